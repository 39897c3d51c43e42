"""Queries, keys and values for training: memory and segment side by side, each row read once."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable


def project(
    past: Float[Tensor, "B M D"],
    rows: Float[Tensor, "B T D"],
    w_q: Float[Tensor, "HE D"],
    w_k: Float[Tensor, "HE D"],
    w_v: Float[Tensor, "HE D"],
) -> tuple[Float[Tensor, "B T HE"], Float[Tensor, "B S HE"], Float[Tensor, "B S HE"]]:
    """Return q = rows W_q, k = [past, rows] W_k and v = [past, rows] W_v.

    The same as three linear layers on the concatenated rows, in the type that autocast asks for; but the rows
    are brought together and converted once, and where `past` needs no gradient its share of the products is
    left out. Cannot be differentiated twice.
    """
    kind = rows.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype
    weights = (w.to(dtype) for w in (w_q, w_k, w_v))
    with torch.autocast(kind, enabled=False):
        q, k, v = _Projection.apply(past, rows, *weights)  # type: ignore[no-untyped-call]
    return q, k, v


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, past: Tensor, rows: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the products; backward keeps the concatenated rows."""
        w_q, w_k, w_v = weights
        n_streams, n_memory, d_model = past.shape
        both = w_q.new_empty(n_streams, n_memory + rows.shape[1], d_model)
        both[:, :n_memory] = past
        both[:, n_memory:] = rows
        ctx.save_for_backward(both, *weights)
        ctx.dtypes = past.dtype, rows.dtype
        ctx.n_memory = n_memory
        return both[:, n_memory:] @ w_q.T, both @ w_k.T, both @ w_v.T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_q: Tensor, d_k: Tensor, d_v: Tensor) -> Any:
        """Return the gradients of rows and weights."""
        both, w_q, w_k, w_v = ctx.saved_tensors
        past, rows = slice(None, ctx.n_memory), slice(ctx.n_memory, None)
        d_weights = (
            _flat(d_q).T @ _flat(both[:, rows]),
            _flat(d_k).T @ _flat(both),
            _flat(d_v).T @ _flat(both),
        )
        d_past = None
        if ctx.needs_input_grad[0]:
            d_past = _sum_of_products((d_k[:, past], w_k), (d_v[:, past], w_v)).to(ctx.dtypes[0])
        d_rows = _sum_of_products((d_q, w_q), (d_k[:, rows], w_k), (d_v[:, rows], w_v)).to(ctx.dtypes[1])
        return d_past, d_rows, *d_weights


def _flat(rows: Float[Tensor, "B L X"]) -> Float[Tensor, "BL X"]:
    """Return the rows of all streams as one matrix."""
    return rows.flatten(0, 1)


def _sum_of_products(*pairs: tuple[Tensor, Tensor]) -> Float[Tensor, "B L D"]:
    """Return the sum of rows [B, L, .] times a matrix."""
    (rows, weight), *more = pairs
    total = _flat(rows) @ weight
    for more_rows, more_weight in more:
        total.addmm_(_flat(more_rows), more_weight)
    return total.view(*rows.shape[:2], total.shape[-1])
