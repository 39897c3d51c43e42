"""Transformer-XL (Dai et al. 2019): attention over a segment and a memory of the segments before it.

    h_0     = sqrt(D) E[tokens]                    + positions, where they are absolute; see positions.py
    h~_n    = [memory_n, h_n]                          memory_n: earlier inputs of layer n, no gradient
    q, k, v = h_n W_q, h~_n W_k, h~_n W_v
    a_n     = attention(q, k, v, R W_r, u, w)          see attention/eager.py; other schemes give other rows
    h_{n+1} = h' + FF(h'),  h' = h_n + a_n W_o         each sum behind a LayerNorm (post) or each branch (pre)

Two ways lead through a layer, equal in exact arithmetic. Training stores the *inputs* of each layer as
memory and projects them anew, since weights move. Inference stores projected keys and values: they are
functions of one row each and carry no position, so with fixed weights nothing is lost by keeping them. On a
CPU single tokens of few streams go through `single`, the second way in fewer and cheaper calls.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from txlcli import UserError, single
from txlcli.adaptive import AdaptiveEmbedding, AdaptiveHead, Clusters
from txlcli.attention import (
    BackendChoice,
    Demands,
    RelativeBias,
    choose_backend,
    project,
    relative_attention,
)
from txlcli.config import ModelConfig
from txlcli.positions import (
    AbsoluteSinusoids,
    LearnedDistances,
    LearnedPositions,
    SinusoidKeys,
    farthest_first,
    relative_sinusoids,
)


class Lengths(NamedTuple):
    """How far a prediction sees; may differ between training, scoring and generating.

    Attributes:
        tgt_len: Tokens in a segment.
        mem_len: Rows of memory that a segment's start finds.
        clamp_len: Distances beyond this share one encoding; None: none do.
        same_length: `off`: a query sees all of the memory and the segment up to itself. `mem_len` and
            `mem_len+1`: every query sees that many keys, itself included, the two rules of the published
            implementations.
        memory_start: What the first segment finds as memory: nothing (`empty`), or mem_len rows that are 0 in
            every layer (`zeros`).
    """

    tgt_len: int
    mem_len: int
    clamp_len: int | None = None
    same_length: str = "off"
    memory_start: str = "empty"

    @classmethod
    def of(cls, config: ModelConfig) -> "Lengths":
        """Return the lengths that a model is trained with."""
        return cls(config.tgt_len, config.mem_len, config.clamp_len, config.same_length, config.memory_start)

    @property
    def span(self) -> int | None:
        """Keys that every query sees under same_length, itself included; None without it."""
        if self.same_length == "off":
            return None
        return self.mem_len + (self.same_length == "mem_len+1")

    @property
    def n_rows_at_start(self) -> int:
        """Rows of memory that the first segment finds."""
        return self.mem_len if self.memory_start == "zeros" else 0

    def warm_segments(self, n_layer: int) -> int:
        """Return after how many segments from an empty memory the last layer reads its true inputs.

        Memory holds rows of the ceil(M / T) segments before a segment's start: the first layer agrees with a
        run over all the text after that many, each further layer after as many more. It rounds up once a
        layer, because memory begins at a segment's start; under same_length a query sees `span` keys wherever
        segments begin, and n_layer (span - 1) tokens are enough.
        """
        if self.span is not None:
            return -(-n_layer * (self.span - 1) // self.tgt_len)
        return n_layer * -(-self.mem_len // self.tgt_len)


class Memory(NamedTuple):
    """What a segment leaves to the next one of the same streams.

    Attributes:
        hidden: The last inputs of each layer, detached: N tensors [B, M, D] in float32 at least, M <=
            mem_len.
        position: Position in the text of each stream's next token, counted from where its memory was empty.
        n_document: Of each stream's rows the last so many belong to the document of its next token; None: all
            of them, or documents do not matter.
    """

    hidden: tuple[Tensor, ...]
    position: Int[Tensor, " B"]
    n_document: Int[Tensor, " B"] | None = None


class KVCache(NamedTuple):
    """Projected keys and values of memory and of the segment so far, for inference.

    The buffers are written in place by `TransformerXL.extend`, which returns the cache to go on with: the
    one handed in must not be used again.

    Attributes:
        keys: N buffers [B, H, C, E], C = mem_len + tgt_len; rows are memory, then segment, then unused.
        values: The same for values.
        biases: What each layer's attention adds by distance, for C distances; None in absolute schemes.
        position: Position in the text of the first token of each stream's segment, [B].
        n_memory: Rows of memory, at most mem_len.
        n_segment: Rows of the current segment, at most tgt_len.
        lengths: The lengths that the cache was made for.
        arrays: The layers as `single` takes them; None: single tokens go the way of all.
        n_document: Of each stream's rows the last so many belong to the document of its next token; None: all
            of them, or documents do not matter.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    biases: tuple[RelativeBias | None, ...]
    position: Int[Tensor, " B"]
    n_memory: int
    n_segment: int
    lengths: Lengths
    arrays: tuple[single.LayerArrays, ...] | None = None
    n_document: Int[Tensor, " B"] | None = None

    def repeat(self, n_streams: int) -> "KVCache":
        """Return a cache of `n_streams` copies of this cache's one stream."""
        return self._replace(
            keys=_copies([buffer.expand(n_streams, -1, -1, -1) for buffer in self.keys]),
            values=_copies([buffer.expand(n_streams, -1, -1, -1) for buffer in self.values]),
            position=self.position.repeat(n_streams),
            n_document=None if self.n_document is None else self.n_document.repeat(n_streams),
        )

    def first_streams(self, n_streams: int) -> "KVCache":
        """Return a view of the first streams; the same cache if it has no others."""
        if n_streams == len(self.keys[0]):
            return self
        return self._replace(
            keys=tuple(buffer[:n_streams] for buffer in self.keys),
            values=tuple(buffer[:n_streams] for buffer in self.values),
            position=self.position[:n_streams],
            n_document=None if self.n_document is None else self.n_document[:n_streams],
        )

    def emptied(self, position: Int[Tensor, " B"]) -> "KVCache":
        """Return a cache over the same buffers without rows, for texts that begin at these positions."""
        return self._replace(n_memory=0, n_segment=0, position=position, n_document=None)


class Projected(NamedTuple):
    """Queries of a segment, [B, H, T, E], and the keys and values that they meet, [B, H, S, E]."""

    q: Tensor
    k: Tensor
    v: Tensor


class Attention(nn.Module):
    """The attention branch of a layer: projections around `relative_attention`."""

    def __init__(
        self, d_model: int, n_head: int, d_head: int, distances: nn.Module | None, dropatt: float, eps: float
    ) -> None:
        super().__init__()
        self.n_head, self.dropatt = n_head, dropatt
        self.q = nn.Linear(d_model, n_head * d_head, bias=False)
        self.k = nn.Linear(d_model, n_head * d_head, bias=False)
        self.v = nn.Linear(d_model, n_head * d_head, bias=False)
        self.r = distances
        self.o = nn.Linear(n_head * d_head, d_model, bias=False)
        self.norm = nn.LayerNorm(d_model, eps=eps)
        self.attend = relative_attention

    def heads(self, x: Float[Tensor, "B L HE"]) -> Float[Tensor, "B H L E"]:
        """Split the heads of projected rows."""
        return x.reshape(*x.shape[:2], self.n_head, -1).transpose(1, 2)

    def project(self, rows: Float[Tensor, "B L D"]) -> Projected:
        """Return queries, keys and values of rows; a row's results depend on that row alone."""
        return Projected(*(self.heads(weight(rows)) for weight in (self.q, self.k, self.v)))

    def project_with(self, past: Float[Tensor, "B M D"], rows: Float[Tensor, "B T D"]) -> Projected:
        """Return queries of the segment's rows, keys and values of memory's and of the segment's."""
        projected = project(past, rows, self.q.weight, self.k.weight, self.v.weight)
        return Projected(*(self.heads(x) for x in projected))

    def forward(
        self, qkv: Projected, bias: RelativeBias | None, first: Int[Tensor, "B T"] | None
    ) -> Float[Tensor, "B T D"]:
        """Attend from the segment to memory and segment."""
        q, k, v = qkv
        attended = self.attend(q, k, v, bias, first=first, dropout=self.dropatt if self.training else 0.0)
        out: Tensor = self.o(attended.transpose(1, 2).flatten(-2))
        return out


class FeedForward(nn.Module):
    """The feed-forward branch: relu(x W_1 + b_1) W_2 + b_2."""

    def __init__(self, d_model: int, d_inner: int, dropout: float, eps: float) -> None:
        super().__init__()
        self.inner = nn.Linear(d_model, d_inner)
        self.outer = nn.Linear(d_inner, d_model)
        self.norm = nn.LayerNorm(d_model, eps=eps)
        self.dropout = dropout

    def forward(self, rows: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Apply the branch to each row."""
        # As one matrix, since what a linear layer makes of streams is a view, and writing into one in place
        # costs autograd copies.
        inner = F.relu(self.inner(rows.flatten(0, 1)), inplace=True)
        out: Tensor = self.outer(F.dropout(inner, self.dropout, self.training))
        return out.view_as(rows)


class Layer(nn.Module):
    """One layer: attention and feed-forward, added to its input and normalized after (post) or before."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.is_prenorm, self.dropout = config.norm == "pre", config.dropout
        self.attention = Attention(
            config.d_model, config.n_head, config.d_head, _distances(config), config.dropatt, config.norm_eps
        )
        self.feedforward = FeedForward(config.d_model, config.d_inner, config.dropout, config.norm_eps)

    def attention_rows(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        """Return what the attention's projections read: the layer's inputs, normalized if pre-norm."""
        rows: Tensor = self.attention.norm(x) if self.is_prenorm else x
        return rows

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        qkv: Projected,
        bias: RelativeBias | None,
        first: Int[Tensor, "B T"] | None,
    ) -> Float[Tensor, "B T D"]:
        """Return the layer's output for the segment's inputs `x`, projected out of their `attention_rows`."""
        x = x + F.dropout(self.attention(qkv, bias, first), self.dropout, self.training)
        if self.is_prenorm:
            y = self.feedforward(self.feedforward.norm(x))
            return x + F.dropout(y, self.dropout, self.training)
        x = self.attention.norm(x)
        y = self.feedforward(x)
        out: Tensor = self.feedforward.norm(x + F.dropout(y, self.dropout, self.training))
        return out


class TransformerXL(nn.Module):
    """A language model over `n_vocab` tokens: a function of tokens and memory.

    `forward(tokens, memory, targets)` is `hidden_states(tokens, memory)` and the loss; `extend(tokens,
    cache)` is the same computation for inference. With `reset_memory_at_documents` the last id is that of a
    document's end, and a token sees nothing before the start of its document.

    Raises:
        UserError: the settings do not fit a vocabulary of this size.
    """

    def __init__(self, config: ModelConfig, n_vocab: int) -> None:
        super().__init__()
        self.lengths = Lengths.of(config)
        self.scheme, self.dropout = config.position, config.dropout
        self.d_model, self.n_head, self.d_head = config.d_model, config.n_head, config.d_head
        self.document_end = n_vocab - 1 if config.reset_memory_at_documents else None
        clusters = clusters_of(config, n_vocab)
        self.embed = AdaptiveEmbedding(clusters)
        self.head = AdaptiveHead(clusters, tied=config.tied, tie_projs=config.tie_projs)
        # The paper's u and v: one pair for all layers, or one a layer.
        shape: tuple[int, ...] = (config.n_head, config.d_head)
        if config.untie_r:
            shape = (config.n_layer, *shape)
        is_relative = config.position == "relative"
        self.content_bias = nn.Parameter(torch.empty(shape)) if is_relative else None
        self.position_bias = nn.Parameter(torch.empty(shape)) if is_relative else None
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
        has_norm = config.norm == "pre" and config.final_norm
        self.norm = nn.LayerNorm(config.d_model, eps=config.norm_eps) if has_norm else nn.Identity()
        self.positions = _positions(config)
        self.attention_name = "eager"
        if self.device.type != "meta":  # shapes alone need no numbers, and drawing them is slow
            self.initialize(config.init_std, config.proj_init_std)

    @torch.no_grad()
    def initialize(self, std: float, proj_std: float) -> None:
        """Draw the weights as the authors do.

        N(0, std), the projections of embeddings N(0, proj_std), LayerNorm weights N(1, std), biases 0.
        """
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(1.0, std)
            elif name.endswith((".bias", "cluster_bias")):
                parameter.zero_()
            else:
                parameter.normal_(0.0, proj_std if ".projections." in name else std)

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.head.bias.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self.head.bias.dtype

    def each_layer(self) -> Iterator[Layer]:
        """Iterate over the layers, from the embedding's side."""
        return iter(cast(list[Layer], self.layers))

    def use_attention(self, name: str) -> BackendChoice:
        """Take the named attention backend in every layer (`auto`: the fastest that runs here).

        Until then it is the eager form. What is asked of it depends on the device and on whether the model
        is in training mode, where attention weights may be dropped. A backend that cannot run here gives
        way to another, and what is returned says why.

        Raises:
            UserError: there is no such backend.
        """
        dropatt = next(self.each_layer()).attention.dropatt if self.training else 0.0
        demands = Demands(self.device, self.d_head, has_values=self.has_value_rows, dropout=dropatt)
        choice = choose_backend(name, demands)
        for layer in self.each_layer():
            layer.attention.attend = choice.attend
        self.attention_name = choice.name
        return choice

    @property
    def has_value_rows(self) -> bool:
        """Whether distances add rows to the values (Shaw et al. 2018)."""
        distances = next(self.each_layer()).attention.r
        return isinstance(distances, LearnedDistances) and distances.values is not None

    def refuse_lengths(self, lengths: Lengths) -> None:
        """Refuse lengths that the scheme of positions does not have.

        Raises:
            UserError: a segment is longer than the table of learned positions, or distances are to be clamped
                where there are none.
        """
        if isinstance(self.positions, LearnedPositions):
            n_rows = len(self.positions.weight)
            if lengths.tgt_len > n_rows:
                raise UserError(
                    f"--tgt-len: this model has learned {n_rows:,} positions; got {lengths.tgt_len:,}; "
                    f"give {n_rows:,} or less, and more --mem-len for more context"
                )
        if self.positions is not None and lengths.clamp_len is not None:
            raise UserError(
                f"--clamp-len: position {self.scheme} has no distances; got {lengths.clamp_len}; leave it out"
            )

    def forward(
        self, tokens: Int[Tensor, "B T"], memory: Memory | None, targets: Int[Tensor, "B T"]
    ) -> tuple[Float[Tensor, "B T"], Memory]:
        """Return each target's negative log-likelihood in nats (float32 at least), and the new memory."""
        hidden, memory = self.hidden_states(tokens, memory)
        return self.nll(hidden, targets), memory

    def hidden_states(
        self, tokens: Int[Tensor, "B T"], memory: Memory | None
    ) -> tuple[Float[Tensor, "B T D"], Memory]:
        """Run the layers over a segment, for training.

        Args:
            tokens: The segment; T may be shorter than tgt_len (the end of a text).
            memory: What the call before returned for the same streams; None: that of a text's start.

        Returns:
            Hidden states that the loss reads, and the memory for the next segment: of each layer's inputs
            the last mem_len rows, without gradient.
        """
        if memory is None:
            n_streams, n_rows = len(tokens), self.lengths.n_rows_at_start
            rows = torch.zeros(n_streams, n_rows, self.d_model, dtype=self.dtype, device=tokens.device)
            memory = Memory((rows,) * len(self.layers), tokens.new_zeros(n_streams))
        n_memory, n_tokens = memory.hidden[0].shape[1], tokens.shape[1]
        n_keys = n_memory + n_tokens
        x = self._embed(tokens, memory.position, 0)
        rows_by_distance = self._encode_distances(n_keys, self.lengths.clamp_len)
        first, n_document = self.first_keys(tokens, n_memory, memory.n_document, self.lengths)

        new_hidden = []
        for n, (layer, past) in enumerate(zip(self.each_layer(), memory.hidden, strict=True)):
            new_hidden.append(_last_rows(past, x, self.lengths.mem_len))
            qkv = layer.attention.project_with(layer.attention_rows(past), layer.attention_rows(x))
            x = layer(x, qkv, self._bias(n, layer, rows_by_distance), first)
        if n_document is not None:
            n_document = n_document.clamp(max=new_hidden[0].shape[1])
        new_memory = Memory(tuple(new_hidden), memory.position + n_tokens, n_document)
        return F.dropout(self.norm(x), self.dropout, self.training), new_memory

    def new_cache(
        self, n_streams: int, lengths: Lengths | None = None, positions: Int[Tensor, " B"] | None = None
    ) -> KVCache:
        """Return an empty cache for inference over `n_streams` texts side by side.

        Args:
            n_streams: Streams (B).
            lengths: Lengths to run at; None: those of training. The buffers take 2 N B (mem_len + tgt_len)
                H E numbers, so a mem_len above the text's length should be cut to it.
            positions: Position in the text of each stream's first token; None: 0. It matters where absolute
                positions run on.

        Raises:
            UserError: the scheme of positions does not have these lengths.
        """
        lengths = lengths or self.lengths
        self.refuse_lengths(lengths)
        n_rows = lengths.mem_len + lengths.tgt_len
        rows_by_distance = self._encode_distances(n_rows, lengths.clamp_len)
        shape, dtype = (n_streams, self.n_head, n_rows, self.d_head), self.dtype
        if torch.is_autocast_enabled(self.device.type):
            dtype = torch.get_autocast_dtype(self.device.type)
        # All in one piece of memory, see `_empty`.
        buffers = _empty((2 * len(self.layers), *shape), dtype, self.device)
        keys, values = (tuple(buffers[n] for n in range(part, len(buffers), 2)) for part in (0, 1))
        biases = [self._bias(n, layer, rows_by_distance) for n, layer in enumerate(self.each_layer())]
        if biases[0] is not None:
            # Each head's rows together, since every token reads all of them.
            rows = _copies([bias.r for bias in biases if bias is not None])
            biases = [bias and bias._replace(r=r) for bias, r in zip(biases, rows, strict=True)]
        if lengths.n_rows_at_start:
            start = torch.zeros(1, 1, self.d_model, dtype=self.dtype, device=self.device)
            for layer, k, v in zip(self.each_layer(), keys, values, strict=True):
                projected = layer.attention.project(layer.attention_rows(start))
                k[:, :, : lengths.mem_len], v[:, :, : lengths.mem_len] = projected.k, projected.v
        if positions is None:
            positions = torch.zeros(n_streams, dtype=torch.int64, device=self.device)
        is_single = self.attention_name == "skew" and single.fits(self.dtype, self.device)
        return KVCache(
            keys=keys,
            values=values,
            biases=tuple(biases),
            position=positions.to(self.device),
            n_memory=lengths.n_rows_at_start,
            n_segment=0,
            lengths=lengths,
            arrays=tuple(map(_arrays, self.each_layer(), biases)) if is_single else None,
        )

    def extend(self, tokens: Int[Tensor, "B t"], cache: KVCache) -> tuple[Float[Tensor, "B t D"], KVCache]:
        """Run the layers over the next tokens of the current segment, for inference.

        When the segment is full, the next token opens a new one: the cache is cut to its last mem_len rows,
        the only copy. So every token sees the memory as it was at its segment's start and everything since,
        however the tokens are handed over.

        Args:
            tokens: The next `t` tokens of each stream, which must not cross the end of a segment.
            cache: The cache; consumed, see `KVCache`.
        """
        lengths = cache.lengths
        if cache.n_segment == lengths.tgt_len:
            cache = _next_segment(cache)
        n_new = tokens.shape[1]
        assert cache.n_segment + n_new <= lengths.tgt_len, "tokens cross the end of a segment"
        begin = cache.n_memory + cache.n_segment
        n_keys = begin + n_new
        x = self._embed(tokens, cache.position, cache.n_segment)
        is_single = n_new == 1 and len(tokens) <= single.MAX_STREAMS and not torch.is_grad_enabled()
        first, n_document = self.first_keys(tokens, begin, cache.n_document, lengths)
        extended = cache._replace(n_segment=cache.n_segment + n_new, n_document=n_document)
        if is_single and cache.arrays is not None:
            return self.norm(_extend_single(x, cache, first, cache.arrays)), extended
        buffers = zip(self.each_layer(), cache.keys, cache.values, cache.biases, strict=True)
        for layer, keys, values, bias in buffers:
            q, k, v = layer.attention.project(layer.attention_rows(x))
            keys[:, :, begin:n_keys], values[:, :, begin:n_keys] = k, v
            x = layer(x, Projected(q, keys[:, :, :n_keys], values[:, :, :n_keys]), bias, first)
        return self.norm(x), extended

    def log_probs(self, hidden: Float[Tensor, "... D"]) -> Float[Tensor, "... V"]:
        """Return the log-probabilities of the whole vocabulary after each hidden state (float32 at least)."""
        return self.head.log_probs(hidden, self.embed)

    def nll(
        self, hidden: Float[Tensor, "B T D"], targets: Int[Tensor, "B T"], max_logits: int | None = None
    ) -> Float[Tensor, "B T"]:
        """Return each target's negative log-likelihood in nats, in target order.

        Args:
            hidden: What `hidden_states` or `extend` returned.
            targets: The tokens that follow.
            max_logits: At most about so many logits are held at once; None: all.
        """
        return self.head.nll(hidden, targets, self.embed, max_logits=max_logits)

    def n_parameters(self) -> tuple[int, int]:
        """Return how many parameters belong to the vocabulary (embedding, head), and how many to the rest."""
        total = sum(parameter.numel() for parameter in self.parameters())
        vocabulary = sum(p.numel() for part in (self.embed, self.head) for p in part.parameters())
        return vocabulary, total - vocabulary

    def _embed(
        self, tokens: Int[Tensor, "B T"], start: Int[Tensor, " B"], offset: int
    ) -> Float[Tensor, "B T D"]:
        """Return h_0 of tokens that begin at `offset` in segments that begin at `start` in the text."""
        x = self.embed(tokens) * math.sqrt(self.d_model)
        if self.positions is not None:
            x = x + self.positions(start, offset, tokens.shape[1], x.dtype)
        return F.dropout(x, self.dropout, self.training)

    def _encode_distances(self, n_distances: int, clamp_len: int | None) -> Tensor | None:
        """Return what the layers make their rows of distances from; None: the scheme has none."""
        if self.scheme == "relative":
            encoded = relative_sinusoids(
                n_distances, self.d_model, clamp_len=clamp_len, dtype=self.dtype, device=self.device
            )
            # One mask for all layers and streams, as in the authors' code.
            return F.dropout(encoded, self.dropout, self.training)
        if self.scheme == "shaw":
            return farthest_first(n_distances, at_most=clamp_len, device=self.device)
        return None

    def _bias(self, n: int, layer: Layer, rows_by_distance: Tensor | None) -> RelativeBias | None:
        """Return what the attention of layer `n` adds by distance."""
        if layer.attention.r is None:
            return None
        bias: RelativeBias = layer.attention.r(rows_by_distance)
        if self.content_bias is None or self.position_bias is None:
            return bias
        is_shared = self.content_bias.ndim == 2
        u, w = (b if is_shared else b[n] for b in (self.content_bias, self.position_bias))
        return bias._replace(u=u, w=w)

    def first_keys(
        self, tokens: Int[Tensor, "B T"], n_past: int, n_document: Int[Tensor, " B"] | None, lengths: Lengths
    ) -> tuple[Int[Tensor, "B T"] | None, Int[Tensor, " B"] | None]:
        """Return the first key that each query may see, and how many keys the next token's document has.

        Query i stands at key p_i = n_past + i. Under same_length it sees keys from p_i + 1 - span on, and by
        documents those from s_i on:

            s_0 = n_past - n_document,   s_{i+1} = p_i + 1 where token i ends a document, else s_i

        Args:
            tokens: The queries' tokens.
            n_past: Rows before them (memory, and the segment so far).
            n_document: Of these the last so many belong to the document of the first query; None: all.
            lengths: Whose same_length holds.

        Returns:
            The first keys; None: all are seen. The number of keys; None: documents do not matter.
        """
        if lengths.span is None and self.document_end is None:
            return None, None
        position = torch.arange(n_past, n_past + tokens.shape[1], device=tokens.device)
        first = None
        if lengths.span is not None:
            first = (position - lengths.span + 1).clamp(min=0).expand_as(tokens)
        if self.document_end is None:
            return first, None
        start = torch.zeros_like(tokens[:, :1]) if n_document is None else n_past - n_document[:, None]
        # Where no document ends 0 does no harm: no start lies before it.
        ends = torch.where(tokens == self.document_end, position + 1, 0)
        starts = torch.cat([start, ends], dim=1).cummax(dim=1).values  # [B, T+1]
        by_document = starts[:, :-1]
        first = by_document if first is None else torch.maximum(first, by_document)
        return first, n_past + tokens.shape[1] - starts[:, -1]


def clusters_of(config: ModelConfig, n_vocab: int) -> Clusters:
    """Return the division of a vocabulary by the settings.

    Raises:
        UserError: they do not fit a vocabulary of this size.
    """
    config.check_vocabulary(n_vocab)
    assert config.cutoffs != "auto", "refused before"
    return Clusters(
        n_vocab=n_vocab,
        d_model=config.d_model,
        d_embed=config.d_embed or config.d_model,
        cutoffs=config.cutoffs,
        div_val=config.div_val,
        proj_same_dim=config.proj_same_dim,
    )


def _positions(config: ModelConfig) -> nn.Module | None:
    """Make what is added to the embeddings by the scheme of positions."""
    if config.position == "sinusoid":
        return AbsoluteSinusoids(config.d_model, runs_on=config.absolute_positions == "continue")
    if config.position == "learned":
        return LearnedPositions(config.tgt_len, config.d_model)
    return None


def _distances(config: ModelConfig) -> nn.Module | None:
    """Make what one layer's attention knows of distances by the scheme of positions."""
    if config.position == "relative":
        return SinusoidKeys(config.d_model, config.n_head, config.d_head)
    if config.position == "shaw":
        assert config.max_relative_position is not None, "settled by the config"
        return LearnedDistances(
            config.n_head, config.d_head, config.max_relative_position, has_values=config.shaw_values
        )
    return None


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialized memory, on a CPU in large pages where the system has them.

    NumPy asks the system for them and torch does not; a cache that every token reads as a whole was measured
    to be read a third faster.
    """
    if device.type == "cpu" and dtype in (torch.float32, torch.float64):
        try:
            return torch.from_numpy(np.empty(shape, np.float32 if dtype == torch.float32 else np.float64))
        except ValueError as error:  # beyond what any array may have
            raise MemoryError(str(error)) from error
    return torch.empty(shape, dtype=dtype, device=device)


def _copies(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return copies of tensors of one shape, side by side in one piece of memory."""
    copies = _empty((len(tensors), *tensors[0].shape), tensors[0].dtype, tensors[0].device)
    for n, tensor in enumerate(tensors):
        copies[n] = tensor
    return tuple(copies[n] for n in range(len(tensors)))


def _arrays(layer: Layer, bias: RelativeBias | None) -> single.LayerArrays:
    """Return a layer as `single` takes it."""
    attention, feedforward = layer.attention, layer.feedforward

    def array(weight: Tensor) -> single.Floats:
        numbers: single.Floats = weight.detach().numpy()
        return numbers

    def norm(module: nn.LayerNorm) -> single.Norm:
        return single.Norm(module.weight.detach(), module.bias.detach(), module.eps)

    return single.LayerArrays(
        q=array(attention.q.weight),
        k=array(attention.k.weight),
        v=array(attention.v.weight),
        o=array(attention.o.weight),
        inner=(array(feedforward.inner.weight), array(feedforward.inner.bias)),
        outer=(array(feedforward.outer.weight), array(feedforward.outer.bias)),
        attention_norm=norm(attention.norm),
        feedforward_norm=norm(feedforward.norm),
        is_prenorm=layer.is_prenorm,
        bias=bias and bias.detach(),
    )


def _extend_single(
    x: Float[Tensor, "B 1 D"],
    cache: KVCache,
    first: Int[Tensor, "B 1"] | None,
    layers: tuple[single.LayerArrays, ...],
) -> Float[Tensor, "B 1 D"]:
    """Run the layers over one token of each stream."""
    n_past = cache.n_memory + cache.n_segment
    firsts = [0] if first is None else first[:, 0].tolist()
    begin, hidden = min(firsts), None
    if max(firsts) > begin and first is not None:  # documents began at different rows
        hidden = torch.arange(begin, n_past + 1) < first
    row = x[:, 0].numpy()
    for layer, keys, values in zip(layers, cache.keys, cache.values, strict=True):
        row = single.step(row, layer, keys, values, begin, n_past, hidden)
    return torch.from_numpy(row)[:, None]


def _last_rows(past: Tensor, x: Tensor, n_rows: int) -> Tensor:
    """Return the last rows of memory and segment, without gradient."""
    n_tokens = x.shape[1]
    if n_rows > n_tokens:
        return torch.cat([past, x.detach()], dim=1)[:, -n_rows:]
    return x.detach()[:, n_tokens - n_rows :]


def _next_segment(cache: KVCache) -> KVCache:
    """Turn the finished segment into memory: keep the last mem_len rows, moved to the front."""
    n_rows = cache.n_memory + cache.n_segment
    n_kept = min(cache.lengths.mem_len, n_rows)
    if n_kept < n_rows:
        for buffer in (*cache.keys, *cache.values):
            # Source and destination overlap where mem_len > tgt_len, hence the clone.
            buffer[:, :, :n_kept] = buffer[:, :, n_rows - n_kept : n_rows].clone()
    n_document = None if cache.n_document is None else cache.n_document.clamp(max=n_kept)
    position = cache.position + cache.n_segment
    return cache._replace(n_memory=n_kept, n_segment=0, position=position, n_document=n_document)
