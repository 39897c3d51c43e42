"""The attention operation: from a segment to its memory and itself, with content and position scores.

Shapes, here and everywhere else in the package (B, H, S, E follow PyTorch's scaled_dot_product_attention):

    B streams    T queries (the segment)   M memory     S keys = M + T   R distances
    H heads      D d_model                 E d_head     F d_inner        V vocabulary   N layers
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from txlcli import UserError


class RelativeBias(NamedTuple):
    """What positions add to the scores: distance keys and the two learned query biases.

    Attributes:
        r: Keys of the distances R-1, ..., 1, 0 (farthest first, as the keys are ordered), [H, R, E] with R
            >= S; the last S rows are used, so that one table serves every shorter span.
        u: Content bias, [H, E] (the paper's u).
        w: Position bias, [H, E] (the paper's v; v is values here).
    """

    r: Float[Tensor, "H R E"]
    u: Float[Tensor, "H E"]
    w: Float[Tensor, "H E"]


def relative_attention(
    q: Float[Tensor, "B H T E"],
    k: Float[Tensor, "B H S E"],
    v: Float[Tensor, "B H S E"],
    bias: RelativeBias,
    *,
    first: Int[Tensor, "B T"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "B H T E"]:
    """Attend from a segment to its memory and itself; the eager form, which is the specification.

        score[i, j] = ((q_i + u) . k_j + (q_i + w) . r_{i-j}) / sqrt(E)          Dai et al. 2019, sec. 3.3

    Keys are memory first, then the segment, so query i stands at key M + i, where M = S - T, and sees keys
    j <= M + i. For T = 2, M = 3 (1 = visible):

        1 1 1 1 0
        1 1 1 1 1

    Softmax and its sum run in float32 at least, whatever the type of q.

    Args:
        q: Queries of the segment.
        k: Keys of memory and segment.
        v: Values of memory and segment; position does not enter them.
        bias: Distance keys and query biases.
        first: The first key that each query may see (same_length, document starts, padding); None: all.
        dropout: Probability of dropping an attention weight.

    Returns:
        The attended values, in the type of `v`.
    """
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    content = (q + bias.u[:, None]) @ k.mT  # [B, H, T, S]
    by_distance = (q + bias.w[:, None]) @ bias.r[:, -n_keys:].mT  # [B, H, T, R], farthest first
    scores = (content + align(by_distance)) / math.sqrt(q.shape[-1])

    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    hidden = hidden_keys(n_queries, n_keys, first, q.device)
    weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
    return F.dropout(weights, dropout).to(v.dtype) @ v


def align(by_distance: Float[Tensor, "B H T S"]) -> Float[Tensor, "B H T S"]:
    """Move scores from columns of distance to columns of keys (the authors' relative shift).

    Column c holds distance S-1-c. Query i, at key M + i, meets key j at distance M + i - j, so

        out[i, j] = in[i, j + T - 1 - i]        wherever key j is visible, j <= M + i;

    elsewhere the value is meaningless and must be masked. In a matrix with one more column than S this is a
    plain
    reshape: leaving out the first T entries, rows one element shorter start one element later each.
    """
    n_queries, n_keys = by_distance.shape[-2:]
    padded = F.pad(by_distance, (0, 1))  # [B, H, T, S+1]
    flat = padded.flatten(-2)[..., n_queries - 1 : n_queries - 1 + n_queries * n_keys]
    return flat.reshape(by_distance.shape)


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


AttentionBackend = Callable[..., Tensor]

BACKENDS: dict[str, AttentionBackend] = {"eager": relative_attention}


class BackendChoice(NamedTuple):
    """A backend and why it was taken."""

    name: str
    attend: AttentionBackend
    reason: str


def choose_backend(name: str) -> BackendChoice:
    """Return the backend for a requested name; `auto` takes the fastest that runs here.

    Raises:
        UserError: there is no backend of that name.
    """
    if name == "auto":
        return BackendChoice("eager", relative_attention, "the only backend so far")
    if name not in BACKENDS:
        raise UserError(
            f"--attention: unknown backend; got `{name}`; choose from auto, {', '.join(BACKENDS)}"
        )
    return BackendChoice(name, BACKENDS[name], "asked for")
