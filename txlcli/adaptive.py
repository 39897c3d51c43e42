"""Clusters of a big vocabulary: adaptive softmax (Grave et al. 2017), adaptive input (Baevski & Auli 2019).

Ids are sorted by frequency and cut at c_1 < ... < c_n. Cluster 0 is the head, the ids below c_1; cluster i
holds [c_i, c_{i+1}). Its table E_i is d_embed / div_val^i wide, and P_i leads from that width to d_model:

    input   h(w) = P_i E_i[w]                                                   w in cluster i
    head    p_0  = softmax([W_0, C] P_0' h + [b_0, d])                          c_1 words, then n clusters
    words   log p(w) = log p_0[w]                                               w in cluster 0
            log p(w) = log p_0[c_1 + i - 1] + log softmax(W_i P_i' h + b_i)[w]  w in cluster i > 0

C and d are a row and a number for each tail cluster, in ascending order. A cluster's logits are computed for
its own targets only, and most targets are in the head: that saves time and memory. Without cut-offs there is
one cluster, and this is the plain softmax.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from txlcli import single

TAIL_SHARE = 0.3
"""Share of the targets beyond the first cluster, to estimate what a loss costs.

Where words follow Zipf's law and the first cluster is a twentieth of the vocabulary, it is 0.26 to 0.36.
"""


@dataclass(frozen=True, kw_only=True)
class Clusters:
    """How a vocabulary is divided, and the widths of the parts.

    Attributes:
        n_vocab: Tokens (V).
        d_model: Width of the hidden states (D).
        d_embed: Width of the first cluster's table.
        cutoffs: Ids at which a new cluster begins, ascending, between 0 and n_vocab; empty: one cluster.
        div_val: Each cluster's table is this many times narrower than the one before.
        proj_same_dim: With `div_val` above 1, also a projection where a cluster is as wide as d_model.
    """

    n_vocab: int
    d_model: int
    d_embed: int
    cutoffs: tuple[int, ...]
    div_val: int
    proj_same_dim: bool

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """First id of each cluster and the id after its last."""
        return tuple(zip((0, *self.cutoffs), (*self.cutoffs, self.n_vocab), strict=True))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each cluster."""
        return tuple(end - start for start, end in self.ranges)

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of each cluster's table."""
        return tuple(self.d_embed // self.div_val**i for i in range(len(self.cutoffs) + 1))

    @property
    def n_tail(self) -> int:
        """Clusters beside the head."""
        return len(self.cutoffs)

    @property
    def is_one_table(self) -> bool:
        """Whether all clusters are as wide and so are slices of one table; a single one always is."""
        return self.div_val == 1 or not self.cutoffs

    @property
    def n_embedding(self) -> int:
        """Numbers in the input's tables and projections."""
        tables = sum(size * width for size, width in zip(self.sizes, self.widths, strict=True))
        return tables + sum(self.d_model * self.widths[i] for i in self.input_projections)

    @property
    def input_projections(self) -> tuple[int, ...]:
        """Clusters whose input has a projection of its own; one table has one for all."""
        owners = range(1 if self.is_one_table else self.n_tail + 1)
        return tuple(i for i in owners if self.has_projection(i))

    @property
    def widest(self) -> int:
        """Most logits that are computed at once for one token."""
        return max(self.sizes[0] + self.n_tail, *self.sizes)

    @property
    def macs(self) -> int:
        """Multiply-adds of one token's loss, to estimate its cost.

        `TAIL_SHARE` of the targets is assumed to be in the tail, shared evenly by its clusters.
        """
        per_row = [
            size * width + (self.d_model * width if self.has_projection(i) else 0)
            for i, (size, width) in enumerate(zip(self.sizes, self.widths, strict=True))
        ]
        tail = TAIL_SHARE * sum(per_row[1:]) / max(1, self.n_tail)
        return per_row[0] + self.n_tail * self.d_embed + round(tail)

    def output_projections(self, tie_projs: str) -> tuple[int, ...]:
        """Clusters whose output has a projection of its own.

        Args:
            tie_projs: Clusters that share their input's projection: `none`, `all`, or `tail`: not the first.
        """
        first_tied = {"none": self.n_tail + 1, "tail": 1, "all": 0}[tie_projs]
        return tuple(i for i in range(first_tied) if self.has_projection(i))

    def has_projection(self, i: int) -> bool:
        """Whether cluster `i` is projected between its width and d_model."""
        return self.widths[i] != self.d_model or (not self.is_one_table and self.proj_same_dim)

    def cluster_of(self, tokens: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Return each token's cluster."""
        cluster = torch.zeros_like(tokens)
        for cutoff in self.cutoffs:
            cluster = cluster + (tokens >= cutoff)
        return cluster

    def rows_by_cluster(self, cluster: Int[Tensor, " n"]) -> tuple[Int[Tensor, " _"], ...]:
        """Return for each cluster the rows that belong to it, ascending.

        The sizes are read from the device once for all clusters.
        """
        sizes = torch.bincount(cluster, minlength=self.n_tail + 1).tolist()
        return cluster.argsort(stable=True).split_with_sizes(sizes)


class AdaptiveEmbedding(nn.Module):
    """The input: a table for each cluster and what projects it, or one of both where all are as wide."""

    def __init__(self, clusters: Clusters) -> None:
        super().__init__()
        self.clusters = clusters
        self.weight, self.weights = _new_tables(clusters)
        self.projections = _new_projections(clusters, clusters.input_projections)

    def tables(self) -> tuple[Float[Tensor, "_ _"], ...]:
        """Return each cluster's table."""
        return _tables(self.clusters, self.weight, self.weights)

    def projection(self, i: int) -> Float[Tensor, "D E_i"] | None:
        """Return the projection of cluster `i`'s input; None: it has none."""
        if not self.clusters.has_projection(i):
            return None
        projection: Tensor = self.projections["0" if self.clusters.is_one_table else str(i)]
        return projection

    def forward(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """Return each token's embedding, unscaled, in the type of the tables also under autocast."""
        if self.weight is not None:
            return self._project(F.embedding(tokens, self.weight), 0)
        flat = tokens.flatten()
        rows = self.clusters.rows_by_cluster(self.clusters.cluster_of(flat))
        parts = [
            self._project(F.embedding(flat[chosen] - start, table), i)
            for i, (chosen, table, (start, _)) in enumerate(
                zip(rows, self.tables(), self.clusters.ranges, strict=True)
            )
        ]
        # One gather back into the tokens' order: its backward copies the gradient once, not once a cluster.
        return torch.cat(parts)[torch.cat(rows).argsort()].view(*tokens.shape, self.clusters.d_model)

    def _project(self, embedded: Float[Tensor, "... E_i"], i: int) -> Float[Tensor, "... D"]:
        projection = self.projection(i)
        if projection is None:
            return embedded
        return F.linear(embedded, projection).to(embedded.dtype)


class AdaptiveHead(nn.Module):
    """The output: what it needs beside the hidden state and what the embedding lends.

    Args:
        clusters: The division of the vocabulary, the same as the embedding's.
        tied: The embedding's tables are the output's matrices.
        tie_projs: As in `Clusters.output_projections`.
    """

    def __init__(self, clusters: Clusters, *, tied: bool, tie_projs: str) -> None:
        super().__init__()
        self.clusters = clusters
        self.weight, self.weights = (None, None) if tied else _new_tables(clusters)
        self.bias = nn.Parameter(torch.empty(clusters.n_vocab))
        self.projections = _new_projections(clusters, clusters.output_projections(tie_projs))
        self.cluster_weight = self.cluster_bias = None
        if clusters.n_tail:
            self.cluster_weight = nn.Parameter(torch.empty(clusters.n_tail, clusters.d_embed))
            self.cluster_bias = nn.Parameter(torch.empty(clusters.n_tail))

    def nll(
        self,
        hidden: Float[Tensor, "B T D"],
        targets: Int[Tensor, "B T"],
        embed: AdaptiveEmbedding,
        max_logits: int | None = None,
    ) -> Float[Tensor, "B T"]:
        """Return each target's negative log-likelihood in nats, in target order, in float32 at least.

        Args:
            hidden: Hidden states.
            targets: The tokens to score. A tail cluster without targets is not computed, and parameters of
                its own get no gradient.
            embed: The input embedding, for what is tied to it.
            max_logits: Rows are run in parts of at most so many logits, or of one row; None: all at once.
                Where a gradient is recorded the parts' logits are all kept for it.
        """
        rows, target = hidden.flatten(0, 1), targets.flatten()
        matrices = self._matrices(embed)
        first = self._project(rows, 0, embed)
        if self.cluster_weight is None or self.cluster_bias is None:
            return _cross_entropy(first, *matrices[0], target, max_logits).view_as(targets)
        # The clusters' few rows are joined to the weights, a copy of c_1 rows a call: joining logits instead
        # would copy c_1 numbers for every token, and keep both for the gradient.
        head = (
            torch.cat([matrices[0][0], self.cluster_weight]),
            torch.cat([matrices[0][1], self.cluster_bias]),
        )
        cluster = self.clusters.cluster_of(target)
        head_target = torch.where(cluster == 0, target, self.clusters.sizes[0] + cluster - 1)
        nll = _cross_entropy(first, *head, head_target, max_logits)
        chosen = self.clusters.rows_by_cluster(cluster)
        for i in range(1, self.clusters.n_tail + 1):
            if len(chosen[i]):
                tail_rows = self._project(rows[chosen[i]], i, embed)
                tail_target = target[chosen[i]] - self.clusters.ranges[i][0]
                tail = _cross_entropy(tail_rows, *matrices[i], tail_target, max_logits)
                nll = nll.index_add(0, chosen[i], tail)
        return nll.view_as(targets)

    def log_probs(self, hidden: Float[Tensor, "... D"], embed: AdaptiveEmbedding) -> Float[Tensor, "... V"]:
        """Return the log-probabilities of the whole vocabulary, in float32 at least."""
        projected = [self._project(hidden, i, embed) for i in range(self.clusters.n_tail + 1)]
        logits = [_logits(x, *matrix) for x, matrix in zip(projected, self._matrices(embed), strict=True)]
        if self.cluster_weight is None or self.cluster_bias is None:
            return logits[0].log_softmax(dim=-1)
        # One row at a time, as in generation, weights are more than logits: here these are joined.
        of_clusters = _logits(projected[0], self.cluster_weight, self.cluster_bias)
        first = torch.cat([logits[0], of_clusters], dim=-1).log_softmax(dim=-1)
        words, clusters = first.tensor_split([self.clusters.sizes[0]], dim=-1)
        tails = [tail.log_softmax(dim=-1) + clusters[..., i, None] for i, tail in enumerate(logits[1:])]
        return torch.cat([words, *tails], dim=-1)

    def _matrices(self, embed: AdaptiveEmbedding) -> list[tuple[Float[Tensor, "_ _"], Float[Tensor, " _"]]]:
        """Return weight and bias of the logits of each cluster's words."""
        is_tied = self.weight is None and self.weights is None
        tables = embed.tables() if is_tied else _tables(self.clusters, self.weight, self.weights)
        return list(zip(tables, _slices(self.clusters, self.bias), strict=True))

    def _project(
        self, hidden: Float[Tensor, "... D"], i: int, embed: AdaptiveEmbedding
    ) -> Float[Tensor, "... E_i"]:
        own = str(i) in self.projections
        projection = self.projections[str(i)] if own else embed.projection(i)
        return hidden if projection is None else hidden @ projection


def linear(
    x: Float[Tensor, "... I"], weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None = None
) -> Float[Tensor, "... O"]:
    """Return x W^T + b; in inference on a CPU a single row as `single.product` does it."""
    is_one = not torch.is_grad_enabled() and x.numel() == x.shape[-1]
    if not is_one or not single.fits(weight.dtype, weight.device):
        return F.linear(x, weight, bias)
    out = torch.from_numpy(single.product(weight.detach().numpy(), x.reshape(1, -1).numpy()))
    return (out if bias is None else out + bias).view(*x.shape[:-1], -1)


def _new_tables(clusters: Clusters) -> tuple[nn.Parameter | None, nn.ParameterList | None]:
    """Return one table for all clusters, or one for each."""
    if clusters.is_one_table:
        return nn.Parameter(torch.empty(clusters.n_vocab, clusters.d_embed)), None
    shapes = zip(clusters.sizes, clusters.widths, strict=True)
    return None, nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in shapes)


def _new_projections(clusters: Clusters, owners: tuple[int, ...]) -> nn.ParameterDict:
    """Return a projection for each of the clusters `owners`."""
    shapes = {str(i): (clusters.d_model, clusters.widths[i]) for i in owners}
    return nn.ParameterDict({name: nn.Parameter(torch.empty(shape)) for name, shape in shapes.items()})


def _tables(
    clusters: Clusters, weight: nn.Parameter | None, weights: nn.ParameterList | None
) -> tuple[Tensor, ...]:
    """Return each cluster's table from the two forms of `_new_tables`."""
    if weight is not None:
        return _slices(clusters, weight)
    assert weights is not None
    return tuple(weights)


def _slices(clusters: Clusters, table: Tensor) -> tuple[Tensor, ...]:
    """Return each cluster's rows of what is one table for all.

    By a single split, since its backward joins the gradients once: that of a slice fills a table of zeros for
    each.
    """
    return table.split_with_sizes(clusters.sizes) if clusters.n_tail else (table,)


def _logits(
    hidden: Float[Tensor, "... E_i"], weight: Float[Tensor, "L E_i"], bias: Float[Tensor, " L"]
) -> Float[Tensor, "... L"]:
    """Return the scores before the softmax, in float32 at least also where autocast multiplies in less."""
    logits = linear(hidden, weight, bias)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _cross_entropy(
    hidden: Float[Tensor, "n E_i"],
    weight: Float[Tensor, "L E_i"],
    bias: Float[Tensor, " L"],
    target: Int[Tensor, " n"],
    max_logits: int | None,
) -> Float[Tensor, " n"]:
    """Return each row's negative log-likelihood in parts of at most `max_logits` logits."""
    n_rows = len(target) if max_logits is None else max(1, max_logits // len(bias))
    if n_rows >= len(target):
        return F.cross_entropy(_logits(hidden, weight, bias), target, reduction="none")
    # Written into one vector, since small results between the parts' large ones keep the C library from using
    # the space of a part again: memory would grow with every part.
    nll = hidden.new_empty(len(target), dtype=torch.promote_types(hidden.dtype, torch.float32))
    starts = range(0, len(target), n_rows)
    for start, h, t in zip(starts, torch.split(hidden, n_rows), torch.split(target, n_rows), strict=True):
        nll[start : start + n_rows] = F.cross_entropy(_logits(h, weight, bias), t, reduction="none")
    return nll
