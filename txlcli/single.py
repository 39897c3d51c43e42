"""One token through a layer in NumPy, for inference on a CPU.

Generation on a CPU runs one row through matrices that do not fit the processor's cache: it waits for memory,
and for the calls of many small operations. Both cost less here: products with one row as dot products, row
after row of a matrix, and calls that take a microsecond. The equations are those of `model.Layer`,

    out = sum_j softmax(((q + u) . k_j + (q + w) . r_{n-j}) / sqrt(E))_j (v_j + values_{n-j})

with one query, whose distances are its keys (see `attention.relative_attention`). Keys that no stream sees
are left out; those that only some do not see get a weight of 0 there.
"""

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from txlcli.attention import RelativeBias

Floats: TypeAlias = npt.NDArray[np.floating[Any]]

MAX_STREAMS = 8
"""With more streams side by side a matrix library's product was measured to be faster."""


class Norm(NamedTuple):
    """A layer normalization."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Floats) -> Floats:
        """Normalize rows."""
        rows = F.layer_norm(torch.from_numpy(x), self.weight.shape, self.weight, self.bias, self.eps)
        normalized: Floats = rows.numpy()
        return normalized


class LayerArrays(NamedTuple):
    """A layer's weights as arrays in the memory of its parameters, and what its attention adds by distance.

    Attributes:
        q: Projection of queries, [HE, D]; `k` and `v` likewise.
        o: Projection of what was attended, [D, HE].
        inner: Weight and bias of the feed-forward's first product, [F, D] and [F]; `outer` of its second.
        attention_norm: The normalization behind the attention (post) or before it (pre).
        feedforward_norm: The same of the feed-forward.
        is_prenorm: Whether they stand before.
        bias: See `RelativeBias`; None: nothing.
    """

    q: Floats
    k: Floats
    v: Floats
    o: Floats
    inner: tuple[Floats, Floats]
    outer: tuple[Floats, Floats]
    attention_norm: Norm
    feedforward_norm: Norm
    is_prenorm: bool
    bias: RelativeBias | None


def fits(model_dtype: torch.dtype, device: torch.device) -> bool:
    """Say whether weights of this type on this device can be read as arrays."""
    is_full = model_dtype in (torch.float32, torch.float64)
    return is_full and device.type == "cpu" and not torch.is_autocast_enabled("cpu")


def product(weight: Floats, rows: Floats) -> Floats:
    """Return rows W^T, [B, O], of rows [B, I] and weights [O, I]."""
    if hasattr(np, "vecdot"):  # NumPy 2
        out: Floats = np.vecdot(weight, rows[:, None])
        return out
    return np.stack([np.einsum("oi,i->o", weight, row) for row in rows])


def step(
    x: Floats,
    layer: LayerArrays,
    keys: Tensor,
    values: Tensor,
    first: int,
    n_past: int,
    hidden: Tensor | None = None,
) -> Floats:
    """Run the next token of each stream through a layer.

    Args:
        x: The layer's inputs, [B, D].
        layer: Its weights.
        keys: Buffer of keys, [B, H, C, E]; row `n_past` is written.
        values: The same of values.
        first: The first row that any stream sees.
        n_past: Rows of memory and of the segment so far.
        hidden: [B, n_past + 1 - first], true where a stream does not see a row from `first` on; None: all are
            seen.
    """
    rows = layer.attention_norm(x) if layer.is_prenorm else x
    shape = keys.shape[0], keys.shape[1], keys.shape[3]
    q = product(layer.q, rows).reshape(shape)
    keys.numpy()[:, :, n_past] = product(layer.k, rows).reshape(shape)
    values.numpy()[:, :, n_past] = product(layer.v, rows).reshape(shape)
    seen = slice(first, n_past + 1)
    attended = attend(torch.from_numpy(q), keys[:, :, seen], values[:, :, seen], layer.bias, hidden)
    x = x + product(layer.o, attended.reshape(len(x), -1))
    if not layer.is_prenorm:
        x = layer.attention_norm(x)
    y = layer.feedforward_norm(x) if layer.is_prenorm else x
    inner = product(layer.inner[0], y)
    inner += layer.inner[1]
    np.maximum(inner, 0, out=inner)
    x = x + product(layer.outer[0], inner)
    x += layer.outer[1]
    return x if layer.is_prenorm else layer.feedforward_norm(x)


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: RelativeBias | None, hidden: Tensor | None = None
) -> Floats:
    """Attend from one query a stream, [B, H, E], to keys and values [B, H, S, E]; return [B, H, 1, E].

    `hidden` [B, S] is true where a stream does not see a key.
    """
    n_streams, n_heads, n_keys, d_head = k.shape
    q = q / math.sqrt(d_head)
    content = q if bias is None or bias.u is None else q + bias.u / math.sqrt(d_head)
    scores = torch.bmm(content.flatten(0, 1)[:, None], k.flatten(0, 1).mT).view(n_streams, n_heads, n_keys)
    if bias is not None:
        position = q if bias.w is None else q + bias.w / math.sqrt(d_head)
        by_distance = torch.bmm(position.transpose(0, 1), bias.r[:, -n_keys:].mT)  # [H, B, S]
        scores += by_distance.transpose(0, 1)
    if hidden is not None:
        scores.masked_fill_(hidden[:, None], -math.inf)
    weights = scores.softmax(-1)[:, :, None].numpy()
    # NumPy's products of rows with narrow matrices were measured to be faster here, torch's the other way on.
    out: Floats = np.matmul(weights, v.numpy())
    if bias is not None and bias.values is not None:
        out += np.matmul(weights, bias.values[:, -n_keys:].numpy())
    return out
