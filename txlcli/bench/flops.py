"""The work of a model's matrix products, counted from its settings; a multiply-add is two operations (FLOPs).

Multiply-adds of a step over B streams of T queries after M rows of memory, S = M + T keys, with W = H E and P
pairs of a query and a key that it sees, for each stream:

    each layer   queries, output   B T D W each
                 keys, values      B K D W each    K = S in training, which projects memory anew, else T
                 distances         S D W           `relative` alone; once for each part of the streams
                                                   (accumulate), in training only
                 attention         B H P E each    content; position where distances have keys; sum of values;
                                                   sum of values by distance where distances have them
                 feed-forward      2 B T D F
    embedding    projections       E_i D           for each input of cluster i whose table is not D wide
    head         projections       D E_i           for each target of cluster i, in cluster 0 for all targets
                 logits            E_i L_i         L_i words of the cluster; cluster 0 has also one logit for
                                                   each other cluster

Backward every product has two gradients of its own size. Those of distances, whose sinusoids are constant,
have one; and so has the projection of memory's keys and values with post-norm, since memory takes no gradient
(with pre-norm gain and bias of the norm are learned through it). Products of the optimizer (muon) are not
counted, nor what a form of attention spends on keys that no query may see.
"""

from collections.abc import Sequence
from typing import NamedTuple

from txlcli.adaptive import Clusters
from txlcli.config import ModelConfig


class StepSize(NamedTuple):
    """One step of a model.

    Attributes:
        n_stream: Streams (B).
        n_query: Tokens of each (T).
        n_memory: Rows of memory (M).
        n_pair: Pairs of a query and a key that it sees, of one stream (P).
        inputs: Input tokens of each cluster of the vocabulary, over all streams.
        heads: Tokens for which the logits of each cluster are computed: of the first for all tokens, of the
            others for their targets, or for all where the whole vocabulary's probabilities are wanted.
        n_part: Parts of a training step that the streams are run in, one after the other.
    """

    n_stream: int
    n_query: int
    n_memory: int
    n_pair: float
    inputs: Sequence[float]
    heads: Sequence[float]
    n_part: int = 1


def visible_pairs(n_query: int, n_memory: int, span: int | None) -> int:
    """Return the pairs of a query and a key that it sees: query i sees M + i + 1, at most `span`."""
    n_keys = range(n_memory + 1, n_memory + n_query + 1)
    return sum(n_keys) if span is None else sum(min(n, span) for n in n_keys)


def training_flops(config: ModelConfig, clusters: Clusters, size: StepSize) -> float:
    """Return the FLOPs of a training step, forward and backward."""
    n_rows, width = size.n_stream * size.n_query, config.n_head * config.d_head
    row_of_keys = 2 * config.d_model * width
    n_memory_gradients = 2 if config.norm == "pre" else 1
    layer = 3 * (_rows_macs(config, n_rows) + _attention_macs(config, size) + n_rows * row_of_keys)
    layer += (1 + n_memory_gradients) * size.n_stream * size.n_memory * row_of_keys
    if config.position == "relative":
        layer += 2 * size.n_part * (size.n_query + size.n_memory) * config.d_model * width
    return 2 * (config.n_layer * layer + 3 * _vocabulary_macs(clusters, size))


def inference_flops(config: ModelConfig, clusters: Clusters, size: StepSize) -> float:
    """Return the FLOPs of a step of scoring or generating."""
    n_rows, width = size.n_stream * size.n_query, config.n_head * config.d_head
    layer = _rows_macs(config, n_rows) + _attention_macs(config, size) + 2 * n_rows * config.d_model * width
    return 2 * (config.n_layer * layer + _vocabulary_macs(clusters, size))


def attention_flops(config: ModelConfig, size: StepSize, *, has_backward: bool) -> float:
    """Return the FLOPs of the attention operation of one layer."""
    return 2 * (3 if has_backward else 1) * _attention_macs(config, size)


def _rows_macs(config: ModelConfig, n_rows: int) -> int:
    """Count what a layer does to each row: queries, output, feed-forward."""
    return n_rows * config.d_model * 2 * (config.n_head * config.d_head + config.d_inner)


def _attention_macs(config: ModelConfig, size: StepSize) -> float:
    has_keys = config.position in ("relative", "shaw")
    has_values = config.position == "shaw" and config.shaw_values
    return size.n_stream * config.n_head * size.n_pair * config.d_head * (2 + has_keys + has_values)


def _vocabulary_macs(clusters: Clusters, size: StepSize) -> float:
    """Count the projections of the embedding, and the head's projections and logits."""
    macs = 0.0
    n_logits = (clusters.sizes[0] + clusters.n_tail, *clusters.sizes[1:])
    for i, (width, n_input, n_head) in enumerate(zip(clusters.widths, size.inputs, size.heads, strict=True)):
        projection = clusters.d_model * width if clusters.has_projection(i) else 0
        macs += n_input * projection + n_head * (projection + width * n_logits[i])
    return macs
