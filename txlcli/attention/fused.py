"""The fused form for CUDA: the kernels of `kernels`, their memory and the products between them.

Forward keeps its inputs, the result and one number per query (the logarithm of its softmax sum) for
backward, so memory grows with S = M + T and not with T x S. The position scores pass through a workspace of
constant size on their way from cuBLAS to a kernel: as many heads, streams or queries at a time as fit. All
sums have a fixed order, so the same call gives the same bits.

Backward, where ds = d(score) / sqrt(E) has distances for columns, as the position scores have:

    dq_i = d(q_i + u) + d(q_i + w),   d(q_i + w) = sum_c ds[i, c] r_c,   dr_c = sum_{b, i} ds[i, c] (q_i + w)
    du = sum_{b, i} d(q_i + u),   dw = sum_{b, i} d(q_i + w)

and `kernels.differentiate_queries` and `differentiate_keys` say the rest. This module imports without Triton;
`refuses` says whether it can be used.
"""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from txlcli.attention.demands import Demands
from txlcli.attention.eager import RelativeBias, relative_attention
from txlcli.attention.sdpa import sdpa_attention

WORKSPACE_BYTES = 128 * 2**20
"""Bound of a workspace. Forward has one, or none where scores are gathered; backward has two."""

SLACK = 128
"""Numbers behind a workspace's last row: a block of keys may read past it, by less than a block's width."""

MAX_D_HEAD = 128

LEAST_TRITON = (3, 3)
"""The first version with `tl.gather`; PyTorch 2.6 comes with 3.2."""


class Launch(NamedTuple):
    """How one kernel is started.

    Attributes:
        block_m: Queries in a block.
        block_n: Keys in a block.
        n_warps: Warps that share a block.
        n_stages: Blocks of the loop in flight between global and shared memory.
        n_spilled_bytes: What a thread stores in memory for want of registers, as ptxas reports it.
    """

    block_m: int
    block_n: int
    n_warps: int
    n_stages: int
    n_spilled_bytes: int = 0


class Launches(NamedTuple):
    """How the kernels are started, and which of the two forward passes.

    Attributes:
        forward: The forward pass where distances add to attention.
        workspace: Forward with position scores from a workspace, or with none.
        queries: Backward to the queries.
        keys: Backward to keys and values.
        gather: Forward with position scores made in place, in square blocks; None: it is not offered.
    """

    forward: Literal["gather", "workspace"]
    workspace: Launch
    queries: Launch
    keys: Launch
    gather: Launch | None = None


INTERPRETED = Launches("workspace", *(Launch(16, 16, 1, 1),) * 4)
"""For Triton's interpreter: small blocks, so that small sizes meet every edge."""


# Chosen by compiling, not by timing: the first of some common configurations, large blocks before small ones,
# that spills fewest registers (none, save where it says so), with and without `first`. By columns of a block:
# workspace, queries, keys, gather.
_TENSOR_CORES_OF_90 = {
    16: (Launch(128, 64, 8, 3), Launch(64, 32, 4, 2), Launch(64, 64, 4, 2), Launch(64, 64, 4, 3)),
    32: (Launch(128, 64, 8, 3), Launch(64, 32, 4, 2), Launch(64, 64, 4, 2), Launch(64, 64, 4, 3)),
    64: (Launch(128, 64, 8, 3), Launch(64, 32, 4, 2), Launch(64, 64, 4, 2), Launch(64, 64, 4, 3)),
    128: (Launch(128, 64, 8, 3), Launch(64, 32, 8, 2), Launch(64, 64, 8, 2), Launch(64, 64, 8, 2)),
}
_TENSOR_CORES = {
    16: (Launch(128, 64, 8, 3), Launch(64, 32, 4, 2), Launch(64, 64, 4, 2), Launch(64, 64, 4, 3)),
    32: (Launch(128, 64, 8, 3), Launch(64, 32, 4, 2), Launch(64, 64, 4, 2), Launch(64, 64, 8, 2)),
    64: (Launch(128, 64, 8, 3), Launch(32, 64, 4, 2), Launch(32, 64, 4, 2), Launch(64, 64, 8, 1)),
    128: (Launch(64, 64, 8, 2), Launch(64, 32, 8, 2), Launch(32, 64, 8, 2), Launch(64, 64, 8, 2)),
}
_FLOAT32 = {
    16: (Launch(64, 32, 4, 2), Launch(32, 32, 4, 2), Launch(32, 32, 8, 2), Launch(32, 32, 4, 2)),
    32: (Launch(64, 32, 4, 2), Launch(32, 32, 4, 2), Launch(32, 32, 8, 2), Launch(32, 32, 4, 2)),
    64: (Launch(32, 32, 8, 2, 4), Launch(32, 32, 8, 2), Launch(16, 16, 4, 2), Launch(16, 16, 4, 2)),
    128: (Launch(16, 16, 4, 1), Launch(32, 32, 8, 2, 8), Launch(16, 16, 4, 1, 12), None),
}


def launches(capability: tuple[int, int], d_head: int, dtype: torch.dtype) -> Launches:
    """Return how to start the kernels on an NVIDIA GPU of this compute capability.

    Position scores are gathered on capability 9.0 up to 64 columns in half precision, where that spills no
    register and keeps the products asynchronous; elsewhere they come from the workspace.
    """
    is_hopper = capability == (9, 0)
    if dtype == torch.float32:
        table: Mapping[int, tuple[Launch, Launch, Launch, Launch | None]] = _FLOAT32
    else:
        table = _TENSOR_CORES_OF_90 if is_hopper else _TENSOR_CORES
    gathers = is_hopper and dtype != torch.float32 and d_head <= 64
    return Launches("gather" if gathers else "workspace", *table[block_e(d_head)])


def block_e(d_head: int) -> int:
    """Return the columns of a block: E up to a power of two, at least the 16 that a tensor core takes."""
    return max(16, 1 << (d_head - 1).bit_length())


@cache
def has_triton() -> bool:
    """Return whether Triton with all that the kernels use is installed, without loading it."""
    if find_spec("triton") is None:
        return False
    try:
        found = version("triton")
    except PackageNotFoundError:  # a build under another name, which tells no version without being loaded
        return True
    return tuple(int(part) for part in found.split(".")[:2]) >= LEAST_TRITON


def refuses(demands: Demands) -> str | None:
    """Return why the kernels cannot do what is demanded; None: they can."""
    if demands.device.type != "cuda":
        return "triton needs a CUDA device"
    if not has_triton():
        return "triton {}.{} or newer is not installed".format(*LEAST_TRITON)
    if torch.cuda.is_available() and torch.cuda.get_device_capability(demands.device) < (8, 0):
        return "triton needs a GPU of compute capability 8.0 or newer"
    if demands.has_values:
        return "triton takes no rows of distances for the values (--shaw-values)"
    if demands.dropout > 0:
        return "triton has no attention dropout (--dropatt)"
    if demands.d_head > MAX_D_HEAD:
        return f"triton has no heads wider than {MAX_D_HEAD} (--d-head)"
    return None


def attend(
    q: Float[Tensor, "B H T E"],
    k: Float[Tensor, "B H S E"],
    v: Float[Tensor, "B H S E"],
    bias: RelativeBias | None = None,
    *,
    first: Int[Tensor, "B T"] | None = None,
    dropout: float = 0.0,
    how: Launches | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> Float[Tensor, "B H T E"]:
    """Attend as `relative_attention` does, by fused kernels.

    Products are of the type of q, or of autocast's where that is on; softmax and sums are float32. On a CPU
    it runs where `kernels` was imported with TRITON_INTERPRET=1, for tests.

    Args:
        q: Queries of the segment, in float16, bfloat16 or float32; so k and v.
        k: Keys of memory and segment.
        v: Values of memory and segment.
        bias: What distances add, without rows for values; None: nothing.
        first: The first key that each query may see, itself at the latest; None: all.
        dropout: Must be 0.
        how: How to start the kernels; None: what is best on the device.
        workspace_bytes: Bound of a workspace, though one query of one head is the least that is computed at
            once.
    """
    assert dropout == 0, "the kernels have no dropout"
    assert bias is None or bias.values is None, "the kernels take no rows for values"
    d_head = q.shape[-1]
    assert d_head <= MAX_D_HEAD, "the kernels have no heads as wide"
    if q.shape[-2] == 1 and not torch.is_grad_enabled() and q.device.type == "cuda":
        # One query would leave a block of queries almost empty.
        return sdpa_attention(q, k, v, bias, first=first)
    if q.numel() == 0:  # nothing to start a kernel for, but gradients to give
        return relative_attention(q, k, v, bias, first=first)

    dtype = q.dtype
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
    assert dtype in (torch.float16, torch.bfloat16, torch.float32), "the kernels know no other types"
    if how is None:
        how = INTERPRETED
        if q.device.type == "cuda":
            how = launches(torch.cuda.get_device_capability(q.device), d_head, dtype)

    q, k, v = (_whole_rows(x.to(dtype)) for x in (q, k, v))
    r = u = w = None
    if bias is not None:
        r = _whole_rows(bias.r[:, -k.shape[-2] :].to(dtype))
        u, w = (None if x is None else _whole_rows(x) for x in (bias.u, bias.w))
    if first is not None:
        first = first.to(torch.int32).contiguous()
    inputs = q, k, v, r, u, w, first
    plan = _Plan(how, workspace_bytes, scale=1 / math.sqrt(d_head))
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        out: Tensor = _Attention.apply(*inputs, plan)  # type: ignore[no-untyped-call]
    else:
        out = _forward(_operands(*inputs), plan, None)
    return out[..., :d_head]


class _Plan(NamedTuple):
    """What the tensors do not say: how to start, with how much memory, and 1 / sqrt(E) of the unpadded E."""

    how: Launches
    workspace_bytes: int
    scale: float


class _Attention(torch.autograd.Function):
    """Attention with its gradient; r has exactly S rows."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *inputs, ctx.plan = args
        q = inputs[0]
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        out = _forward(_operands(*inputs), ctx.plan, lse)
        ctx.save_for_backward(*inputs, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out, lse = ctx.saved_tensors
        _, _, _, _, u, w, _ = inputs
        d_out = _whole_rows(grads[0])
        d_qu, d_qw, d_k, d_v, d_r = _backward(_operands(*inputs), out, lse, d_out, ctx.plan)
        d_u = None if u is None else d_qu.sum((0, 2), dtype=torch.float32).to(u.dtype)
        d_w = None if w is None or d_qw is None else d_qw.sum((0, 2), dtype=torch.float32).to(w.dtype)
        d_q = d_qu if d_qw is None else d_qu.add_(d_qw)
        return d_q, d_k, d_v, d_r, d_u, d_w, None, None


class _Operands(NamedTuple):
    """What the kernels work on.

    Attributes:
        qu: q + u, [B, H, T, E]; q where there is no u.
        qw: q + w, likewise.
        k: [B, H, S, E].
        v: [B, H, S, E].
        r: [H, S, E], farthest first; None: distances add nothing.
        first: [B, T] in int32, or None.
    """

    qu: Tensor
    qw: Tensor
    k: Tensor
    v: Tensor
    r: Tensor | None
    first: Tensor | None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Streams, queries and keys."""
        return self.qu.shape[0], self.qu.shape[2], self.k.shape[2]

    @property
    def width(self) -> int:
        """Distance of the rows of position scores, at least S; so wide that each starts at 16 bytes."""
        return -(-self.k.shape[2] // 8) * 8

    @property
    def constants(self) -> dict[str, Any]:
        """What is compiled into every kernel that multiplies."""
        d_head = self.qu.shape[-1]
        is_exact = self.qu.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
        return {
            "HAS_FIRST": self.first is not None,
            "E": d_head,
            "BLOCK_E": block_e(d_head),
            "PRECISION": "ieee" if is_exact else "tf32",
        }


class _Part(NamedTuple):
    """Streams, heads and queries that are computed at once, with the keys that the last of these sees.

    Such a part is an attention of its own, with fewer keys and more of them memory.
    """

    streams: slice
    heads: slice
    queries: slice
    n_keys: int

    def of(self, x: _Operands) -> _Operands:
        return _Operands(
            qu=self.at_queries(x.qu),
            qw=self.at_queries(x.qw),
            k=self.at_keys(x.k),
            v=self.at_keys(x.v),
            r=None if x.r is None else self.at_distances(x.r),
            first=None if x.first is None else x.first[self.streams, self.queries],
        )

    def at_queries(self, x: Tensor) -> Tensor:
        return x[self.streams, self.heads, self.queries]

    def at_keys(self, x: Tensor) -> Tensor:
        return x[self.streams, self.heads, : self.n_keys]

    def at_distances(self, x: Tensor) -> Tensor:
        return x[self.heads, -self.n_keys :]


def _parts(x: _Operands, workspace_bytes: int) -> list[_Part]:
    """Divide an attention so that the position scores of each part fit into the workspace.

    Heads are divided first, then the streams of one head, then the queries of one head and stream.
    """
    n_streams, n_queries, n_keys = x.sizes
    n_head = x.qu.shape[1]
    heads, streams, queries = n_head, n_streams, n_queries
    if x.r is not None:
        # Kernels count the numbers of a part in 32 bits.
        n_rows = max(1, min(workspace_bytes, 2**31) // (x.width * x.qu.element_size()))
        queries = _even(n_queries, n_rows)
        streams = _even(n_streams, n_rows // n_queries)
        heads = _even(n_head, n_rows // (n_queries * n_streams))
    return [
        _Part(
            slice(b, min(b + streams, n_streams)),
            slice(h, min(h + heads, n_head)),
            slice(i, min(i + queries, n_queries)),
            n_keys - n_queries + min(i + queries, n_queries),
        )
        for h in range(0, n_head, heads)
        for b in range(0, n_streams, streams)
        for i in range(0, n_queries, queries)
    ]


def _even(n: int, most: int) -> int:
    """Return the size of parts of n that are at most so large, at least 1, and about equal."""
    n_parts = -(-n // max(1, most))
    return -(-n // n_parts)


def _forward(x: _Operands, plan: _Plan, lse: Tensor | None) -> Tensor:
    """Return the attended values; write log2 of each query's sum of exp(score) to `lse`, if there is one."""
    from txlcli.attention import kernels

    out = _empty_rows(x.qu)
    if x.r is not None and plan.how.forward == "gather":
        launch = plan.how.gather
        assert launch is not None, "no launch is known for the gathering kernel"
        assert launch.block_m == launch.block_n, "the gathering kernel has square blocks"
        with _on_device_of(out):
            kernels.attend_gather[_grid(x.qu, launch.block_m)](
                *(*_rows(x.qu), *_rows(x.qw), *_rows(x.k), *_rows(x.v), *_rows(x.r)),
                *(*_rows(x.first, 1), *_rows(out), *_rows(lse, 2)),
                *x.sizes,
                **x.constants,
                SCALE=plan.scale,
                HAS_LSE=lse is not None,
                BLOCK=launch.block_m,
                num_warps=launch.n_warps,
                num_stages=launch.n_stages,
            )
        return out

    launch = plan.how.workspace
    parts = _parts(x, plan.workspace_bytes)
    workspace = _workspace(parts, x)
    for part in parts:
        some = part.of(x)
        by_distance = _position_scores(some, workspace)
        some_lse = None if lse is None else part.at_queries(lse)
        with _on_device_of(out):
            kernels.attend_workspace[_grid(some.qu, launch.block_m)](
                *(*_rows(some.qu), *_rows(some.k), *_rows(some.v), by_distance),
                *(*_rows(some.first, 1), *_rows(part.at_queries(out)), *_rows(some_lse, 2)),
                *(*some.sizes, some.width),
                **some.constants,
                **_options(launch),
                SCALE=plan.scale,
                HAS_BIAS=some.r is not None,
                HAS_LSE=lse is not None,
            )
    return out


def _backward(
    x: _Operands, out: Tensor, lse: Tensor, d_out: Tensor, plan: _Plan
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q + u, q + w, k, v and r; those of q + w and r are None where r is."""
    from txlcli.attention import kernels

    parts = _parts(x, plan.workspace_bytes)
    workspace, d_workspace = _workspace(parts, x), _workspace(parts, x)
    delta = torch.empty_like(lse)
    d_qu, d_k, d_v = _empty_rows(x.qu), _empty_rows(x.k), _empty_rows(x.v)
    d_qw = d_r = None
    if x.r is not None:
        d_qw, d_r = _empty_heads(x.qu), torch.zeros_like(x.r, dtype=torch.float32)
    # Keys belong to one part, save where the queries of a stream are divided: then parts are summed.
    is_summed = parts[0].queries != slice(0, x.qu.shape[2])
    if is_summed:
        d_k, d_v = (torch.zeros_like(t, dtype=torch.float32) for t in (x.k, x.v))

    for part in parts:
        some = part.of(x)
        by_distance, d_by_distance = _position_scores(some, workspace), _by_distance(some, d_workspace)
        some_out, some_d_out, some_lse, some_delta, some_d_qu = (
            part.at_queries(t) for t in (out, d_out, lse, delta, d_qu)
        )
        some_d_k, some_d_v = part.at_keys(d_k), part.at_keys(d_v)
        if is_summed:
            some_d_k, some_d_v = torch.empty_like(some_d_k), torch.empty_like(some_d_v)
        constants = {**some.constants, "SCALE": plan.scale, "HAS_BIAS": some.r is not None}
        with _on_device_of(out):
            if d_by_distance is not None:
                kernels.clear_unseen[_grid(some.qu, 16)](
                    *(d_by_distance, *_rows(some.first, 1), some.sizes[0], some.sizes[1], some.width),
                    **{"HAS_FIRST": some.first is not None, "BLOCK_M": 16, "BLOCK_N": 128},
                )
            kernels.differentiate_queries[_grid(some.qu, plan.how.queries.block_m)](
                *(*_rows(some.qu), *_rows(some.k), *_rows(some.v), by_distance, *_rows(some.first, 1)),
                *(*_rows(some_out), *_rows(some_d_out), *_rows(some_lse), some_delta),
                *(*_rows(some_d_qu), d_by_distance, *some.sizes, some.width),
                **constants,
                **_options(plan.how.queries),
            )
            kernels.differentiate_keys[_grid(some.k, plan.how.keys.block_n)](
                *(*_rows(some.qu), *_rows(some.k), *_rows(some.v), by_distance, *_rows(some.first, 1)),
                *(*_rows(some_d_out), *_rows(some_lse), some_delta),
                *(*_rows(some_d_k), *_rows(some_d_v), *some.sizes, some.width),
                **constants,
                **_options(plan.how.keys),
            )
        if is_summed:
            part.at_keys(d_k).add_(some_d_k)
            part.at_keys(d_v).add_(some_d_v)
        if some.r is not None and d_by_distance is not None and d_qw is not None and d_r is not None:
            torch.bmm(d_by_distance, some.r, out=_matrices(part.at_queries(d_qw)))
            part.at_distances(d_r).add_(d_by_distance.mT @ _matrices(some.qw))
    d_r = None if d_r is None else d_r.to(x.qu.dtype)
    return d_qu, d_qw, d_k.to(x.k.dtype), d_v.to(x.v.dtype), d_r


def _workspace(parts: list[_Part], x: _Operands) -> Tensor:
    """Return memory for the position scores of any part; none is needed where there are none."""
    somes = (part.of(x) for part in parts if x.r is not None)
    n_numbers = max((some.qu[..., 0].numel() * some.width for some in somes), default=0)
    return torch.empty(n_numbers + SLACK, dtype=x.qu.dtype, device=x.qu.device)


def _by_distance(x: _Operands, workspace: Tensor) -> Tensor | None:
    """Return the workspace as [H, B T, S], a matrix of scores for each head; None without distances."""
    if x.r is None:
        return None
    n_streams, n_queries, n_keys = x.sizes
    n_head, n_rows = x.qu.shape[1], n_streams * n_queries
    return workspace[: n_head * n_rows * x.width].view(n_head, n_rows, x.width)[..., :n_keys]


def _position_scores(x: _Operands, workspace: Tensor) -> Tensor | None:
    """Multiply (q + w) . r into the workspace, [H, B T, S]; None without distances."""
    by_distance = _by_distance(x, workspace)
    if x.r is not None and by_distance is not None:
        torch.bmm(_matrices(x.qw), x.r.mT, out=by_distance)
    return by_distance


def _matrices(x: Tensor) -> Tensor:
    """Fold [B, H, T, E] to a matrix for each head, [H, B T, E]; without a copy where heads lie outermost."""
    return x.transpose(0, 1).flatten(1, 2)


def _operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor | None,
    u: Tensor | None,
    w: Tensor | None,
    first: Tensor | None,
) -> _Operands:
    def plus(bias: Tensor | None) -> Tensor:
        # One pass: added in the wider type, written in that of q.
        return q if bias is None else torch.add(q, bias[:, None], out=_empty_heads(q))

    return _Operands(plus(u), plus(w), k, v, r, first)


def _whole_rows(x: Tensor) -> Tensor:
    """Return x with rows of E numbers as kernels want them: neighbors, and a multiple of 16 in number.

    Views of [B, T, H E] with such an E are; else this copies, and fills up with zeros, which change no
    product. Rows at odd addresses would be loaded number by number.
    """
    n_missing = -x.shape[-1] % 16
    if n_missing:
        return F.pad(x, (0, n_missing))
    return x if x.stride(-1) == 1 else x.contiguous()


def _empty_rows(x: Tensor) -> Tensor:
    """Return memory like x [B, H, T, E], laid out as [B, T, H, E] like the rows it comes from and goes to."""
    n_streams, n_head, n_rows, d_head = x.shape
    return torch.empty(n_streams, n_rows, n_head, d_head, dtype=x.dtype, device=x.device).transpose(1, 2)


def _empty_heads(x: Tensor) -> Tensor:
    """Return memory like x [B, H, T, E], laid out as [H, B, T, E], so that a head's rows are one matrix."""
    n_streams, n_head, n_rows, d_head = x.shape
    return torch.empty(n_head, n_streams, n_rows, d_head, dtype=x.dtype, device=x.device).transpose(0, 1)


def _on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Return the context in which kernels start on the device of x; Triton takes the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _rows(x: Tensor | None, n_strides: int = 3) -> tuple[Any, ...]:
    """Return a tensor and all its strides but the last, which is 1, as the kernels take it."""
    return (x, *x.stride()[:-1]) if x is not None else (None, *[0] * n_strides)


def _grid(x: Tensor, block: int) -> tuple[int]:
    """Return the number of blocks in the rows of [B, H, T, E]."""
    n_streams, n_head, n_rows, _ = x.shape
    return (n_streams * n_head * -(-n_rows // block),)


def _options(launch: Launch) -> dict[str, int]:
    return {
        "BLOCK_M": launch.block_m,
        "BLOCK_N": launch.block_n,
        "num_warps": launch.n_warps,
        "num_stages": launch.n_stages,
    }
