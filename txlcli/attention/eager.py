"""The eager form of the attention operation, which is the specification of all others."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F


class RelativeBias(NamedTuple):
    """What distances add to attention: keys, the two query biases of Transformer-XL, rows for the values.

    Attributes:
        r: Keys of the distances R-1, ..., 1, 0 (farthest first, as the keys are ordered), [H, R, E] with R
            >= S; the last S rows are used, so that one table serves every shorter span.
        u: Content bias, [H, E] (the paper's u); None: none.
        w: Position bias, [H, E] (the paper's v; v is values here); None: none.
        values: What a distance adds to the value that is read there, [H, R, E], in the order of `r`; None:
            position does not enter the values.
    """

    r: Float[Tensor, "H R E"]
    u: Float[Tensor, "H E"] | None = None
    w: Float[Tensor, "H E"] | None = None
    values: Float[Tensor, "H R E"] | None = None

    def detach(self) -> "RelativeBias":
        """Return the same without gradients."""
        u, w, values = (None if part is None else part.detach() for part in self[1:])
        return RelativeBias(self.r.detach(), u, w, values)


def relative_attention(
    q: Float[Tensor, "B H T E"],
    k: Float[Tensor, "B H S E"],
    v: Float[Tensor, "B H S E"],
    bias: RelativeBias | None = None,
    *,
    first: Int[Tensor, "B T"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "B H T E"]:
    """Attend from a segment to its memory and itself; the eager form, which is the specification.

        score[i, j] = ((q_i + u) . k_j + (q_i + w) . r_{i-j}) / sqrt(E)          Dai et al. 2019, sec. 3.3
        out[i] = sum_j softmax(score[i])_j (v_j + values_{i-j})                  Shaw et al. 2018, eq. 3 and 4

    In Shaw's form u and w are absent, in Dai's the rows of `values` are; without a bias this is plain
    attention. Keys are memory first, then the segment, so query i stands at key M + i, where M = S - T, and
    sees keys j <= M + i. For T = 2, M = 3 (1 = visible):

        1 1 1 1 0
        1 1 1 1 1

    Softmax and its sum run in float32 at least, whatever the type of q.

    Args:
        q: Queries of the segment.
        k: Keys of memory and segment.
        v: Values of memory and segment.
        bias: What distances add; None: nothing.
        first: The first key that each query may see (same_length, document starts, padding); None: all.
        dropout: Probability of dropping an attention weight.

    Returns:
        The attended values, in the type of `v`.
    """
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    if bias is None:
        scores = q @ k.mT  # [B, H, T, S]
    else:
        content = (q if bias.u is None else q + bias.u[:, None]) @ k.mT  # [B, H, T, S]
        queries = q if bias.w is None else q + bias.w[:, None]
        by_distance = queries @ bias.r[:, -n_keys:].mT  # [B, H, T, R], farthest first
        scores = content + align(by_distance)
    scores = scores / math.sqrt(q.shape[-1])

    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    hidden = hidden_keys(n_queries, n_keys, first, q.device)
    weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
    weights = F.dropout(weights, dropout).to(v.dtype)
    out = weights @ v
    if bias is not None and bias.values is not None:
        out = out + unalign(weights) @ bias.values[:, -n_keys:].to(v.dtype)
    return out


def align(by_distance: Float[Tensor, "B H T S"]) -> Float[Tensor, "B H T S"]:
    """Move scores from columns of distance to columns of keys (the authors' relative shift).

    Column c holds distance S-1-c. Query i, at key M + i, meets key j at distance M + i - j, so

        out[i, j] = in[i, j + T - 1 - i]        wherever key j is visible, j <= M + i;

    elsewhere the value is meaningless and must be masked. In a matrix with one more column than S this is a
    plain reshape: leaving out the first T - 1 entries, rows one element shorter start one element later each.
    """
    n_queries, n_keys = by_distance.shape[-2:]
    padded = F.pad(by_distance, (0, 1))  # [B, H, T, S+1]
    flat = padded.flatten(-2)[..., n_queries - 1 : n_queries - 1 + n_queries * n_keys]
    return flat.reshape(by_distance.shape)


def unalign(by_key: Float[Tensor, "B H T S"]) -> Float[Tensor, "B H T S"]:
    """Move attention weights from columns of keys to columns of distance; undoes `align`.

    Where a key is hidden its weight must be 0; distances that a query does not have get 0.
    """
    n_queries, n_keys = by_key.shape[-2:]
    flat = F.pad(by_key.flatten(-2), (n_queries - 1, 1))
    return flat.reshape(*by_key.shape[:-1], n_keys + 1)[..., :n_keys]


def hidden_keys(
    n_queries: int, n_keys: int, first: Int[Tensor, "B T"] | None, device: torch.device
) -> Tensor:
    """Return a mask, true where a key may not be seen: [T, S], or [B, 1, T, S] with `first`."""
    key = torch.arange(n_keys, device=device)
    query = torch.arange(n_keys - n_queries, n_keys, device=device)
    later = key > query[:, None]  # [T, S]
    if first is None:
        return later
    return later | (key < first[:, None, :, None])  # [B, 1, T, S]
