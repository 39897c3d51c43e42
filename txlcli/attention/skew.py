"""The attention operation for CPUs: no shift copies, one head at a time, a backward pass of its own.

The scores by distance of one head are a matrix product, row i of them q_i against the distances S-1, ..., 0.
Written into rows of S + 1 numbers, of which the last stays unused, the same memory read from number T - 1 on
in rows of S numbers is aligned with the keys (`eager.align` copies to do that):

    by_distance[i, c]  at  i (S + 1) + c        distance S-1-c
    by_key[i, j]       at  (T - 1) + i S + j    c = T-1-i+j, so distance M + i - j

A key that query i may not see lies on top of numbers of row i + 1 that no query needs, so -inf may be added
there. Backward writes by key and reads by distance. Heads go one by one and queries in blocks: the scores at
work stay in the processor's cache, and keys behind a block's last query are left out. Where a head has only
few scores the calls of its operations take longer than the operations, and the eager form does the work.
"""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from txlcli.attention.blocks import Block, divide
from txlcli.attention.demands import Demands
from txlcli.attention.eager import RelativeBias, relative_attention
from txlcli.attention.sdpa import sdpa_attention

EAGER_BYTES = 1 << 17
"""Bytes of one head's scores over all streams, B T S in the type of the products, below which eager works.

By measurement, both forms in turn on one core of an AMD EPYC, 4 heads of 40 and 8 of 64, B T S from 65 to
131,072, every scheme of positions: with gradients the eager form was faster up to 8,192 scores in float32
and 32,768 in bfloat16, both were about equal at 16,384 to 32,768 and at 65,536, and this form was faster
beyond. For values by distance without gradients that holds in bfloat16; in float32 they met at half as many.
"""


def skewed_attention(
    q: Float[Tensor, "B H T E"],
    k: Float[Tensor, "B H S E"],
    v: Float[Tensor, "B H S E"],
    bias: RelativeBias | None = None,
    *,
    first: Int[Tensor, "B T"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "B H T E"]:
    """Attend from a segment to its memory and itself; see `relative_attention`.

    Scores are held in the type of the products; the softmax of a row runs in float32 at least. Backward keeps
    the weights of the keys that a block of queries sees, and cannot be differentiated itself. Without
    gradients nothing is kept, and the kernel behind `sdpa_attention` is faster. Below `EAGER_BYTES` the eager
    form does the rest.
    """
    assert dropout == 0.0, "refused before"
    if not torch.is_grad_enabled() and (bias is None or bias.values is None):
        return sdpa_attention(q, k, v, bias, first=first)
    kind, n_keys = q.device.type, k.shape[-2]
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else q.dtype
    if q.shape[0] * q.shape[-2] * n_keys * dtype.itemsize < EAGER_BYTES:
        return relative_attention(q, k, v, bias, first=first)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    content, position, r, values = q, None, None, None
    if bias is not None:
        content, position = (q if b is None else q + b.to(dtype)[:, None] for b in (bias.u, bias.w))
        r = bias.r[:, -n_keys:].to(dtype)
        values = None if bias.values is None else bias.values[:, -n_keys:].to(dtype)
    operands = (content, k, v, position, r, values)
    with torch.autocast(kind, enabled=False):
        out: Tensor = _Skewed.apply(*operands, first)  # type: ignore[no-untyped-call]
    return out


def refuses(demands: Demands) -> str | None:
    """Say why this form cannot do what is demanded; None: it can."""
    return "skew has no attention dropout (--dropatt)" if demands.dropout else None


class _Operands(NamedTuple):
    """What enters the matrix products, or its gradients.

    Attributes:
        content: q + u, [B, H, T, E].
        k: Keys, [B, H, S, E].
        v: Values, [B, H, S, E].
        position: q + w, [B, H, T, E]; None: distances do not enter the scores.
        r: Keys of the distances S-1, ..., 0, [H, S, E]; None: none.
        values: What distances add to the values, in the order of `r`, [H, S, E]; None: nothing.
    """

    content: Tensor
    k: Tensor
    v: Tensor
    position: Tensor | None
    r: Tensor | None
    values: Tensor | None

    def empty_like(self) -> "_Operands":
        """Return memory for the gradients."""
        return self._replace(
            **{name: torch.empty_like(x) for name, x in self._asdict().items() if x is not None}
        )

    def block(self, head: int, block: Block) -> "_Operands":
        """Return views of what one head's block of queries needs: [B, ., E] or [., E]."""
        span = slice(block.begin, block.end)
        return _Operands(
            content=self.content[:, head, span],
            k=self.k[:, head, : block.n_keys],
            v=self.v[:, head, : block.n_keys],
            position=None if self.position is None else self.position[:, head, span],
            r=None if self.r is None else self.r[head, -block.n_keys :],
            values=None if self.values is None else self.values[head, -block.n_keys :],
        )


class _Scores:
    """Memory for the scores of one head's block of queries, seen by distance and by key."""

    def __init__(self, like: Tensor, n_streams: int, block: Block) -> None:
        n_queries, n_keys = block.end - block.begin, block.n_keys
        n_numbers = n_queries * (n_keys + 1)
        # Zeros: the first n_queries - 1 numbers belong to no key, and what is not used must be finite.
        memory = like.new_zeros(n_streams * n_numbers)
        self.by_distance = memory.as_strided((n_streams * n_queries, n_keys), (n_keys + 1, 1))
        self.by_key = memory.as_strided((n_streams, n_queries, n_keys), (n_numbers, n_keys, 1), n_queries - 1)


class _Skewed(torch.autograd.Function):
    """The operation on `_Operands` and `first`, and its gradient."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        """Compute block by block, and keep the weights where a gradient will be asked for."""
        x, first = _Operands(*arguments[:-1]), arguments[-1]
        is_kept = any(ctx.needs_input_grad)
        out = torch.empty_like(x.content)
        kept = [
            _attend(x, first, block, out, is_kept=is_kept)
            for block in divide(x.content.shape[-2], x.k.shape[-2])
        ]
        if is_kept:
            ctx.save_for_backward(*x, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> Any:
        """Return the gradients of the operands; `first` has none."""
        x, kept = _Operands(*ctx.saved_tensors[:6]), ctx.saved_tensors[6:]
        grad = x.empty_like()
        blocks = divide(x.content.shape[-2], x.k.shape[-2])
        for block, weights in zip(blocks, kept, strict=True):
            _differentiate(x, block, weights, d_out, grad)
        return *grad, None


def _attend(
    x: _Operands, first: Tensor | None, block: Block, out: Tensor, *, is_kept: bool
) -> Float[Tensor, "H B t s"]:
    """Write the result of a block of queries into `out`; return the weights, of the last head if not kept."""
    n_streams, n_heads, _, d_head = x.content.shape
    n_queries, n_keys = block.end - block.begin, block.n_keys
    weights = x.k.new_empty(n_heads if is_kept else 1, n_streams, n_queries, n_keys)
    scores = _Scores(x.k, n_streams, block)
    later = x.k.new_full((n_queries, n_queries), -math.inf).triu_(1)
    hidden = None
    if first is not None:
        hidden = torch.arange(n_keys, device=first.device) < first[:, block.begin : block.end, None]
    scale = 1 / math.sqrt(d_head)
    for head in range(n_heads):
        one = x.block(head, block)
        p = weights[head if is_kept else 0]
        if one.position is None or one.r is None:
            torch.bmm(one.content, one.k.mT, out=p).mul_(scale)
            p[..., n_keys - n_queries :].add_(later)
        else:
            raw, flat = scores.by_distance, one.position.reshape(-1, d_head)
            torch.addmm(raw, flat, one.r.mT, beta=0, alpha=scale, out=raw)
            scores.by_key[..., n_keys - n_queries :].add_(later)
            torch.baddbmm(scores.by_key, one.content, one.k.mT, alpha=scale, out=p)
        if hidden is not None:
            p.masked_fill_(hidden, -math.inf)
        torch.softmax(p, -1, out=p)
        attended = torch.bmm(p, one.v)
        if one.values is not None:
            by_distance = _Scores(p, n_streams, block)
            by_distance.by_key.copy_(p)
            attended += (by_distance.by_distance @ one.values).view_as(attended)
        out[:, head, block.begin : block.end] = attended
    return weights


def _differentiate(x: _Operands, block: Block, weights: Tensor, d_out: Tensor, grad: _Operands) -> None:
    """Add the gradients that a block of queries gives; the first block, which has all keys, writes them."""
    n_streams, n_heads, n_all, d_head = x.content.shape
    put = torch.Tensor.copy_ if block.end == n_all else torch.Tensor.add_
    scores = _Scores(x.k, n_streams, block)
    scale = 1 / math.sqrt(d_head)
    for head in range(n_heads):
        one, to, p = x.block(head, block), grad.block(head, block), weights[head]
        d_o = d_out[:, head, block.begin : block.end]
        flat_o = d_o.reshape(-1, d_head)
        put(to.v, torch.bmm(p.mT, d_o))
        if one.values is None or to.values is None:
            d_p = torch.bmm(d_o, one.v.mT)
        else:
            by_distance = _Scores(p, n_streams, block)
            by_distance.by_key.copy_(p)
            put(to.values, by_distance.by_distance.mT @ flat_o)
            d_by_distance = _Scores(p, n_streams, block)
            torch.mm(flat_o, one.values.mT, out=d_by_distance.by_distance)
            d_p = torch.baddbmm(d_by_distance.by_key, d_o, one.v.mT)
        # Hidden keys have weight 0 and get 0, so that by distance nothing stands where no key is.
        d_scores = torch._softmax_backward_data(d_p, p, -1, p.dtype)
        if one.position is None or one.r is None or to.position is None or to.r is None:
            d_scores.mul_(scale)
        else:
            d_scores = torch.mul(d_scores, scale, out=scores.by_key)
            to.position.copy_(torch.mm(scores.by_distance, one.r).view_as(d_o))
            put(to.r, torch.mm(scores.by_distance.mT, one.position.reshape(-1, d_head)))
        to.content.copy_(torch.bmm(d_scores, one.k))
        put(to.k, torch.bmm(d_scores.mT, one.content))
