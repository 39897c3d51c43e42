"""The attention operation through PyTorch's scaled_dot_product_attention, scores by distance as its mask.

    out = sdpa(q + u, k, v, mask = aligned((q + w) . r) / sqrt(E))

The mask is a view of the product's own memory, as in `skew.py`, for all heads at once: rows of W numbers by
distance are rows of W - 1 by key. W = 1 and the first key's place = 0 modulo `ALIGNMENT` let CUDA's
memory-efficient kernel read the view as it is. It gives the mask a gradient; on a CPU a mask that needs one
takes the slow path, which makes this a form for inference there.
"""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from txlcli.attention.blocks import divide
from txlcli.attention.demands import Demands
from txlcli.attention.eager import RelativeBias, hidden_keys

ALIGNMENT = 16
"""Numbers at a multiple of which the rows of a mask begin."""


def sdpa_attention(
    q: Float[Tensor, "B H T E"],
    k: Float[Tensor, "B H S E"],
    v: Float[Tensor, "B H S E"],
    bias: RelativeBias | None = None,
    *,
    first: Int[Tensor, "B T"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "B H T E"]:
    """Attend from a segment to its memory and itself; see `relative_attention`. `bias` has no `values`.

    Without gradients queries go in blocks; with them the mask of all is kept for backward.
    """
    r, u, w, values = bias or (None, None, None, None)
    assert values is None, "refused before"
    content = q if u is None else (q + u[:, None]).to(k.dtype)
    position = q if w is None else (q + w[:, None]).to(k.dtype)
    r = None if r is None else r.to(k.dtype)
    blocks = divide(q.shape[-2], k.shape[-2])
    if torch.is_grad_enabled() or len(blocks) == 1:
        return _attend(content, k, v, position, r, first, dropout)
    out = torch.empty_like(content)
    for begin, end, n_keys in blocks:
        out[:, :, begin:end] = _attend(
            content[:, :, begin:end],
            k[:, :, :n_keys],
            v[:, :, :n_keys],
            position[:, :, begin:end],
            r,
            None if first is None else first[:, begin:end],
            dropout,
        )
    return out


def refuses(demands: Demands) -> str | None:
    """Say why this form cannot do what is demanded; None: it can."""
    if demands.has_values:
        return "sdpa takes no rows of distances for the values (--shaw-values)"
    return None


def _attend(
    content: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    r: Tensor | None,
    first: Tensor | None,
    dropout: float,
) -> Tensor:
    """Attend from a block of queries to all keys given; the last rows of `r` are those of their distances."""
    n_queries, n_keys = content.shape[-2], k.shape[-2]
    mask = None
    if r is not None:
        align = _Aligned.apply if torch.is_grad_enabled() else _align
        mask = align(position, r[:, -n_keys:], first)
    elif n_queries > 1 or first is not None:
        mask = ~hidden_keys(n_queries, n_keys, first, content.device)
    return F.scaled_dot_product_attention(content, k, v, mask, dropout)


class _Aligned(torch.autograd.Function):
    """Scores by distance as a mask for the keys, and their gradient; see `_align`."""

    @staticmethod
    def forward(ctx: Any, position: Tensor, r: Tensor, first: Tensor | None) -> Tensor:
        """Return the mask."""
        ctx.save_for_backward(position, r)
        return _align(position, r, first)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mask: Tensor) -> Any:
        """Return the gradients of `position` and `r`; what is hidden has none."""
        position, r = ctx.saved_tensors
        by_distance, by_key = _memory(position, r.shape[-2])
        torch.mul(d_mask, 1 / math.sqrt(r.shape[-1]), out=by_key)
        n_streams, n_heads, n_queries, d_head = position.shape
        d_position = torch.bmm(by_distance, r).view(n_heads, n_streams, n_queries, d_head).transpose(0, 1)
        return d_position, torch.bmm(by_distance.mT, _by_head(position)), None


def _align(
    position: Float[Tensor, "B H T E"], r: Float[Tensor, "H S E"], first: Int[Tensor, "B T"] | None
) -> Float[Tensor, "B H T S"]:
    """Return q . r / sqrt(E) where a query's keys are, -inf where they are hidden."""
    n_queries, n_keys = position.shape[-2], r.shape[-2]
    scale = 1 / math.sqrt(r.shape[-1])
    if n_queries == 1 and first is None:  # one query's distances are its keys
        return torch.bmm(_by_head(position) * scale, r.mT).transpose(0, 1)[:, :, None]
    by_distance, by_key = _memory(position, n_keys)
    torch.baddbmm(by_distance, _by_head(position), r.mT, beta=0, alpha=scale, out=by_distance)
    if first is not None:
        by_key.masked_fill_(hidden_keys(n_queries, n_keys, first, r.device), -math.inf)
    else:
        later = r.new_full((n_queries, n_queries), -math.inf).triu_(1)
        by_key[..., n_keys - n_queries :].add_(later)
    return by_key


def _by_head(position: Float[Tensor, "B H T E"]) -> Float[Tensor, "H BT E"]:
    """Return the queries of all streams, head by head: no copy where tokens lie side by side."""
    return position.transpose(0, 1).flatten(1, 2)


def _memory(like: Tensor, n_keys: int) -> tuple[Tensor, Tensor]:
    """Return memory for the scores of all heads: by distance [H, B T, S] and by key [B, H, T, S]."""
    n_streams, n_heads, n_queries = like.shape[:3]
    width = -(-n_keys // ALIGNMENT) * ALIGNMENT + 1
    before = -(n_queries - 1) % ALIGNMENT
    # One head's numbers, rounded up so that the next one's are aligned too; those of a stream are where the
    # number of queries is a multiple.
    n_numbers = -(-(before + n_streams * n_queries * width) // ALIGNMENT) * ALIGNMENT
    # Zeros, because numbers that are not used must be finite.
    memory = like.new_zeros(n_heads * n_numbers)
    by_distance = memory.as_strided((n_heads, n_streams * n_queries, n_keys), (n_numbers, width, 1), before)
    by_key = memory.as_strided(
        (n_streams, n_heads, n_queries, n_keys),
        (n_queries * width, n_numbers, width - 1, 1),
        before + n_queries - 1,
    )
    return by_distance, by_key
