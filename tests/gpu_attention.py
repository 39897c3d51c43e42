"""Check, tune and time the attention on an NVIDIA GPU, in some five minutes.

    python tests/gpu_attention.py --json FILE [--hugging-face FOLDER] [--only check,pick,...]

    check     every form that runs here against the eager one in float64, by the rule of `tolerance`: result
              and all gradients, odd sizes, memory that begins as NaN; the same bits again and again
    pick      the kernels one by one, started in many ways: the fastest, as lines for the tables in
              `txlcli/attention/fused.py`; and which of the two forward passes is faster
    time      attention alone beside plain causal flash attention, FlexAttention with the position scores
              captured, and the eager form
    memory    what forward and backward hold at most, by length
    step      a whole training step of the preset wt103-base; with --hugging-face also theirs, under autocast
    generate  one text, token by token, of the preset enwik8-base with 2,100 tokens of memory

    --hugging-face  a folder to import transformers 4.35, which has TransfoXL, and what it needs from, all
                    made for this Python; torch and numpy are those of this Python

Nothing here needs a GPU to be tried out: in Triton's interpreter (which needs numpy older than 2.4)

    TRITON_INTERPRET=1 python tests/gpu_attention.py --interpret

takes the same way with tiny sizes on a CPU, where times and memory mean nothing and bfloat16 is left out,
since the interpreter cannot compute with it.

Sections run in a process of their own, and if one takes that down with it (a kernel that reads where it must
not spoils all that follows on a GPU), the rest go on in another. Kernels are compiled ahead in as many
processes as there are cores. Exit status 1 means that a check failed or a section did not come to its end.

The tests marked `gpu` check more: `pytest -m gpu`. Not collected by pytest itself: a timing is no test.
"""

import argparse
import contextlib
import datetime
import gc
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

if "--interpret" in sys.argv:  # read when Triton is imported; children inherit it
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.tolerance import assert_as_accurate
from txlcli.attention import BACKENDS, Backend, Demands, RelativeBias, fused, relative_attention
from txlcli.attention.fused import Launch, Launches
from txlcli.attention.sdpa import sdpa_attention
from txlcli.attention.skew import skewed_attention
from txlcli.device import DTYPES, autocast

LIMITS_S = {"check": 70, "pick": 70, "time": 80, "memory": 20, "step": 70, "generate": 25}
"""Sections in their order, and after how many seconds each comes to its end with what it has."""

COMPILE_S = 75
GRACE_S = 60
"""How much longer than its limit a section may take before its process is ended."""

TYPES = ("bf16", "fp16", "fp32")
FORWARDS = ("workspace", "gather")
KERNELS = {
    "workspace": "attend_workspace",
    "queries": "differentiate_queries",
    "keys": "differentiate_keys",
    "gather": "attend_gather",
}
"""Kernels by their fields of `Launches`, in the order of the tables."""


class Case(NamedTuple):
    """Shapes and types that are checked; sizes are (T, M)."""

    d_head: int
    dtype: str
    has_first: bool
    sizes: tuple[tuple[int, int], ...]


class Shape(NamedTuple):
    """Sizes of one attention."""

    n_streams: int
    n_head: int
    n_queries: int
    n_memory: int
    d_head: int

    def __str__(self) -> str:
        return "B {} H {} T {} M {} E {}".format(*self)


ODD = ((203, 150), (129, 260), (151, 0))
ALL = (*ODD, (1, 0), (1, 300), (256, 256))


@dataclass(frozen=True)
class Setup:
    """What is done; the defaults are for a GPU.

    Attributes:
        kind: Of the device that computes.
        precision: Of timings.
        cases: What is checked, with this many streams and heads.
        n_repeat: Runs that must give the same bits.
        pick: Shapes and types that kernels are picked for, the most wanted first.
        shapes: Of the timings.
        lengths: T = M of the measurement of memory.
        n_rounds: Rounds of timings in turn.
        block_s: Seconds of a block of steps or tokens.
        batches: Streams of a training step, the first that fit.
        changes: Settings that make the presets small.
        n_compilers: Processes that compile ahead; None: as many as there are cores.
    """

    kind: str = "cuda"
    precision: str = "bf16"
    cases: tuple[Case, ...] = (
        *(Case(d, dtype, False, ALL if d == 64 else ODD) for dtype in TYPES for d in (64, 16, 40, 96, 128)),
        *(Case(64, dtype, True, ALL) for dtype in TYPES),
        Case(40, "bf16", True, ALL),
    )
    n_streams: int = 3
    n_head: int = 4
    n_repeat: int = 20
    pick: tuple[tuple[Shape, str], ...] = (
        (Shape(8, 16, 1024, 1024, 64), "bf16"),
        (Shape(8, 8, 1024, 1024, 128), "bf16"),
        (Shape(8, 32, 1024, 1024, 32), "bf16"),
        (Shape(2, 16, 512, 512, 64), "fp32"),
    )
    shapes: tuple[Shape, ...] = (
        Shape(8, 16, 512, 512, 64),
        Shape(8, 16, 1024, 1024, 64),
        Shape(2, 16, 4096, 4096, 64),
    )
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192)
    memory_heads: int = 16
    n_rounds: int = 15
    block_s: float = 0.7
    batches: tuple[int, ...] = (60, 30, 15)
    changes: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    n_words: int = 267_735
    n_compilers: int | None = None

    @property
    def device(self) -> torch.device:
        return torch.device(self.kind)

    @property
    def is_interpreted(self) -> bool:
        return self.kind == "cpu"


ON_A_GPU = Setup()
IN_THE_INTERPRETER = Setup(
    kind="cpu",
    precision="fp32",
    cases=(
        Case(16, "fp32", False, ((18, 5), (1, 0), (16, 16))),
        Case(40, "fp32", True, ((5, 19), (1, 20), (17, 0))),
        Case(64, "fp16", False, ((17, 6),)),
    ),
    n_streams=1,
    n_head=2,
    n_repeat=2,
    pick=((Shape(1, 1, 18, 14, 16), "fp32"),),
    shapes=(Shape(1, 2, 18, 14, 16),),
    lengths=(8, 16),
    memory_heads=1,
    n_rounds=3,
    block_s=0.0,
    batches=(2,),
    changes={
        "wt103-base": {
            **{"n_layer": 2, "d_model": 24, "n_head": 2, "d_head": 12, "d_inner": 32},
            **{"tgt_len": 6, "mem_len": 6, "cutoffs": (50, 100, 200)},
        },
        "enwik8-base": {
            **{"n_layer": 2, "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 32},
            **{"tgt_len": 8, "mem_len": 20},
        },
    },
    n_words=300,
    n_compilers=1,
)


@dataclass
class Found:
    """What a section found.

    Attributes:
        text: To be read.
        values: The same as numbers.
        faults: What failed of a check.
    """

    text: str
    values: dict[str, Any]
    faults: list[str] = field(default_factory=list)


class Limit:
    """A time by which work comes to its end."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._end


def say(text: str) -> None:
    """Tell how far we are."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def table(rows: Sequence[Sequence[object]]) -> str:
    """Lay out rows, words to the left and numbers to the right."""
    lines = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    is_number = [
        all(cell[:1].isdigit() or cell in ("-", "") for cell in column[1:])
        for column in zip(*lines, strict=True)
    ]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in lines
    )


def short(error: BaseException) -> str:
    """Return an error as one line."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    return f"{name}: {text[:200]}" if text else name


def refuse_spoiled(setup: Setup) -> None:
    """Go on after an error only where the GPU still computes; else end this process, loudly."""
    if setup.is_interpreted:
        return
    try:
        torch.cuda.synchronize()
    except Exception as error:
        raise Spoiled(short(error)) from error
    torch.cuda.empty_cache()


class Spoiled(Exception):
    """This process can no longer use the GPU."""


# Inputs, and what a form gives for them


def shipped(setup: Setup, d_head: int, dtype: str) -> Launches:
    """Return how the kernels are started by themselves."""
    if setup.is_interpreted:
        return fused.INTERPRETED
    return fused.launches(torch.cuda.get_device_capability(), d_head, DTYPES[dtype])


def draw(setup: Setup, shape: Shape, dtype: str, *, in_nan: bool = False) -> list[Tensor]:
    """Return q, k, v, r, u, w as a model lays them out: heads side by side in each row.

    `in_nan`: each in the midst of NaN, as are two distances in front of r that no key has.
    """
    n_streams, n_head, n_queries, n_memory, d_head = shape
    n_keys, far, around = n_queries + n_memory, 2 * in_nan, int(in_nan)
    made = []
    for streams, n_rows in [
        (n_streams, n_queries),
        (n_streams, n_keys),
        (n_streams, n_keys),
        (1, n_keys + far),
    ]:
        # Rows and heads stay multiples of 16 apart, so that kernels are compiled as for models.
        size = (streams, n_rows + 2 * around, n_head + 2 * around, d_head + 16 * around)
        memory = torch.full(size, torch.nan, dtype=DTYPES[dtype], device=setup.device)
        view = memory[:, around : around + n_rows, around : around + n_head, :d_head].transpose(1, 2)
        made.append(view.copy_(torch.randn(view.shape, device=setup.device) / 2))
    q, k, v, (r,) = made
    r[:, :far] = torch.nan
    u, w = torch.randn(2, n_head, d_head, device=setup.device).to(DTYPES[dtype]) / 2
    return [q, k, v, r, u, w]


def draw_first(shape: Shape, device: torch.device) -> Tensor:
    """Return the first keys that queries see, as several documents or a span give them."""
    own = torch.arange(shape.n_queries, device=device) + shape.n_memory
    spans = (shape.n_queries + shape.n_memory, 100, 1)
    each = [(own - span + 1).clamp(min=0) for span in spans]
    return torch.stack([each[i % 3] for i in range(shape.n_streams)])


def differentiate(
    attend: Callable[..., Tensor], inputs: Sequence[Tensor], d_out: Tensor, first: Tensor | None = None
) -> list[Tensor]:
    """Return the result and the gradients of all inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    q, k, v, *bias = leaves
    out = attend(q, k, v, RelativeBias(*bias), first=first)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out.to(out.dtype))]


def together(tensors: Sequence[Tensor], exact: Sequence[Tensor]) -> Tensor:
    """Return gradients as one, each divided by the power of two, an exact division, next to its maximum.

    How far off the worst of the few numbers of one gradient is, is luck. Those that are 0 in truth, where
    each query sees one key, are left out: the rule asks there for the very same sums.
    """
    scales = [2.0 ** e.abs().max().log2().floor().item() for e in exact]
    parts = [(x / scale).flatten() for x, scale in zip(tensors, scales, strict=True) if scale > 0]
    return torch.cat(parts)


def share(fast: Tensor, plain: Tensor, exact: Tensor, factor: float) -> float:
    """Return the error in units of what `assert_as_accurate` allows."""
    error, plain_error = ((x.double() - exact).abs().max() for x in (fast, plain))
    allowed = factor * plain_error + torch.finfo(plain.dtype).eps * exact.abs().max()
    return (error / allowed).nan_to_num(nan=torch.inf).item()


class Truth:
    """The eager form at some inputs, in their type and in float64."""

    def __init__(self, setup: Setup, shape: Shape, dtype: str, has_first: bool) -> None:
        self.inputs = draw(setup, shape, dtype, in_nan=True)
        self.first = draw_first(shape, setup.device) if has_first else None
        self.d_out = torch.randn(self.inputs[0].shape, device=setup.device).to(DTYPES[dtype])
        wide = [x.double() for x in self.inputs]
        self.exact = differentiate(relative_attention, wide, self.d_out.double(), self.first)
        self.plain = differentiate(relative_attention, self.inputs, self.d_out, self.first)

    def shares(self, attend: Callable[..., Tensor]) -> tuple[float, float, str | None]:
        """Return the errors of the result and of the gradients in units of what is allowed, and the fault."""
        with memory_of_nan():
            found = differentiate(attend, self.inputs, self.d_out, self.first)
        (out, *grads), (plain_out, *plain), (exact_out, *exact) = found, self.plain, self.exact
        compared = {
            "result": (out, plain_out, exact_out, 2.0),
            "gradients": (*(together(x, exact) for x in (grads, plain, exact)), 3.0),
        }
        faults = []
        for what, tensors in compared.items():
            try:
                assert_as_accurate(*tensors)
            except AssertionError as error:
                faults.append(f"{what}: {error}")
        for grad, true in zip(grads, exact, strict=True):
            # A difference of two sums of E products; these differ by a few last places of float32, 1e-6, and
            # that is multiplied and summed once more.
            if not true.any() and not grad.abs().max() < 1e-4:
                faults.append(f"a gradient that is 0 in truth reaches {grad.abs().max():.1e}")
        return share(*compared["result"]), share(*compared["gradients"]), "; ".join(faults) or None


@contextlib.contextmanager
def memory_of_nan() -> Iterator[None]:
    """Fill what torch leaves uninitialized with NaN, so that reading it before writing shows."""
    before = torch.empty, torch.empty_like, Tensor.new_empty

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make_filled(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return make_filled

    torch.empty, torch.empty_like, Tensor.new_empty = map(filled, before)
    try:
        yield
    finally:
        torch.empty, torch.empty_like, Tensor.new_empty = before


# check


def triton_forms(how: Launches, *, in_parts: bool = False) -> dict[str, Callable[..., Tensor]]:
    """Return the fused form with each forward pass, and with a workspace that holds a part of the scores."""
    names = [name for name in FORWARDS if getattr(how, name) is not None]
    forms = {name: partial(fused.attend, how=how._replace(forward=name)) for name in names}
    if in_parts:
        forms["in parts"] = partial(forms["workspace"], workspace_bytes=2**16)
    return dict(forms)


def check(setup: Setup, limit: Limit) -> Found:
    """Hold every form against float64, and repeat it."""
    others = {"sdpa": sdpa_attention, "skew": skewed_attention}
    names = [*FORWARDS, "in parts", *others]
    worst: dict[tuple[str, int, bool], dict[str, list[float]]] = {}
    faults, n_compared = [], 0
    for case in setup.cases:
        if limit.is_over:
            faults.append(f"{case.dtype} E {case.d_head}: not checked, out of time")
            continue
        how = shipped(setup, case.d_head, case.dtype)
        forms = {**triton_forms(how, in_parts=case.d_head == 64), **others}
        row = worst.setdefault((case.dtype, case.d_head, case.has_first), {})
        for n_queries, n_memory in case.sizes:
            shape = Shape(setup.n_streams, setup.n_head, n_queries, n_memory, case.d_head)
            truth = Truth(setup, shape, case.dtype, case.has_first)
            for name, attend in forms.items():
                try:
                    forward, backward, fault = truth.shares(attend)
                except Exception as error:
                    refuse_spoiled(setup)
                    forward = backward = torch.inf
                    fault = short(error)
                n_compared += 1
                row[name] = [
                    max(a, b) for a, b in zip(row.get(name, [0, 0]), (forward, backward), strict=True)
                ]
                if fault is not None:
                    first = ", first" if case.has_first else ""
                    faults.append(f"{name}: {case.dtype}, {shape}{first}: {fault}")
    repeated = check_repetition(setup, faults)
    rows: list[list[object]] = [["type", "E", "first", *names]]
    for (dtype, d_head, has_first), row in worst.items():
        cells = [f"{row[n][0]:.2f} {row[n][1]:.2f}" if n in row else None for n in names]
        rows.append([dtype, d_head, "given" if has_first else "none", *cells])
    text = (
        "Largest errors of result and gradients, in units of what the rule allows (above 1 is a fault):\n"
        f"{table(rows)}\n{n_compared} comparisons, {len(faults)} faults; {repeated}"
    )
    values = [
        {"dtype": dtype, "d_head": d_head, "has_first": has_first, "shares": row}
        for (dtype, d_head, has_first), row in worst.items()  # Infinity where there is no number
    ]
    return Found(text, {"cases": values, "n_compared": n_compared, "repetition": repeated}, faults)


def check_repetition(setup: Setup, faults: list[str]) -> str:
    """Run the fused forms again and again, and hold the bits against the first run's."""
    case = setup.cases[0]
    shape = Shape(setup.n_streams, setup.n_head, *case.sizes[0], case.d_head)
    inputs = draw(setup, shape, case.dtype)
    d_out = torch.randn(inputs[0].shape, device=setup.device).to(DTYPES[case.dtype])
    forms = triton_forms(shipped(setup, case.d_head, case.dtype), in_parts=True)
    for name, attend in forms.items():
        try:
            expected = differentiate(attend, inputs, d_out)
            same = [
                bits_are_equal(differentiate(attend, inputs, d_out), expected)
                for _ in range(setup.n_repeat - 1)
            ]
            q, k, v, *bias = inputs
            with torch.no_grad():  # another kernel, which keeps nothing for backward
                same.append(bits_are_equal([attend(q, k, v, RelativeBias(*bias))], expected[:1]))
        except Exception as error:
            refuse_spoiled(setup)
            faults.append(f"{name}: {case.dtype}, {shape}, repeated: {short(error)}")
            continue
        if not all(same):
            faults.append(
                f"{name}: {case.dtype}, {shape}: {same.count(False)} of {len(same)} runs differ in bits"
            )
    return f"{len(forms)} fused forms repeated {setup.n_repeat} times, bits compared"


def bits_are_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# Clocks


class Sample(NamedTuple):
    """Milliseconds on the device, and those that this process took to start the work."""

    ms: float
    host_ms: float


class Clock:
    """Takes the time of calls: on a GPU between two events, with cold caches and the work queued up before.

    On a CPU it stands in for that and takes the time by the wall.
    """

    # About 2 ms at 2 GHz, so that the GPU waits for this process and not the other way round.
    WAIT_CYCLES = 4_000_000

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            # More than any second-level cache holds.
            self._flush = torch.empty(256 * 2**20, dtype=torch.int8, device=device)

    def sample(self, call: Callable[[], object]) -> Sample:
        if not self._is_cuda:
            begun = time.perf_counter()
            call()
            ms = 1e3 * (time.perf_counter() - begun)
            return Sample(ms, ms)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(self.WAIT_CYCLES)
        self._flush.zero_()
        before.record()
        begun = time.perf_counter()
        call()
        host_ms = 1e3 * (time.perf_counter() - begun)
        after.record()
        torch.cuda.synchronize()
        return Sample(before.elapsed_time(after), host_ms)


def in_turn(
    setup: Setup, calls: Mapping[str, Callable[[], object]], clock: Clock, limit: Limit, n_rounds: int
) -> tuple[dict[str, list[Sample]], dict[str, str]]:
    """Time calls A B A B ..., after each has warmed up; return samples, and why some calls failed."""
    samples: dict[str, list[Sample]] = {}
    failed: dict[str, str] = {}
    for name, call in calls.items():
        if samples and limit.is_over:
            failed[name] = "left out, out of time"
            continue
        try:
            call()
            clock.sample(call)
            samples[name] = []
        except Exception as error:
            refuse_spoiled(setup)
            failed[name] = short(error)
    for n in range(n_rounds):
        if n >= 3 and limit.is_over:
            break
        for name in samples:
            samples[name].append(clock.sample(calls[name]))
    return samples, failed


def median_ms(samples: Sequence[Sample]) -> float:
    return statistics.median(sample.ms for sample in samples)


def median_host_ms(samples: Sequence[Sample]) -> float:
    return statistics.median(sample.host_ms for sample in samples)


# pick


def candidates(setup: Setup, part: str, dtype: str) -> list[Launch]:
    """Return how a kernel might be started: the likeliest first."""
    if setup.is_interpreted:
        return [Launch(16, 16, 1, 1), Launch(32, 32, 1, 1) if part == "gather" else Launch(16, 32, 1, 1)]
    if dtype == "fp32":  # without tensor cores large blocks take minutes to compile
        blocks = [(32, 32), (16, 16)] if part == "gather" else [(32, 32), (16, 32), (32, 16), (16, 16)]
        return [Launch(*block, n_warps, 2) for block in blocks for n_warps in (4, 8)]
    tried = {
        "workspace": [
            *[(128, 64, 8, 3), (128, 64, 4, 3), (128, 128, 8, 2), (64, 64, 4, 3), (128, 64, 8, 2)],
            *[(128, 64, 4, 2), (64, 128, 4, 2), (128, 128, 8, 3), (128, 32, 4, 3), (64, 64, 4, 4)],
        ],
        "queries": [
            *[(64, 64, 4, 2), (64, 32, 4, 2), (128, 64, 8, 2), (64, 64, 8, 2), (128, 32, 8, 2)],
            *[(64, 32, 4, 3), (64, 64, 4, 1), (128, 32, 4, 2), (32, 64, 4, 2), (64, 128, 8, 2)],
        ],
        "keys": [
            *[(64, 64, 4, 2), (64, 128, 8, 2), (32, 128, 4, 2), (64, 64, 8, 2), (32, 64, 4, 2)],
            *[(64, 128, 8, 1), (32, 128, 8, 2), (128, 64, 8, 2), (64, 64, 4, 3), (32, 128, 4, 3)],
        ],
        "gather": [
            *[(64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 8, 2), (64, 64, 4, 1), (64, 64, 4, 4)],
            *[(64, 64, 8, 3), (32, 32, 4, 2), (32, 32, 2, 3), (32, 32, 2, 2), (128, 128, 8, 1)],
        ],
    }
    return [Launch(*values) for values in tried[part]]


def ways(setup: Setup, how: Launches, part: str, dtype: str) -> list[Launch]:
    """Return how a kernel is started by itself, and how else it might be."""
    own = getattr(how, part)
    rest = [one for one in candidates(setup, part, dtype) if own is None or one[:4] != own[:4]]
    return rest if own is None else [own, *rest]


class Recorder:
    """Stands for a kernel: starts it, and keeps what it was started with."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._starts: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self.compiled: Any = None

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def start(*args: Any, **kwargs: Any) -> Any:
            self._starts.append((grid, args, kwargs))
            self.compiled = self._kernel[grid](*args, **kwargs)
            return self.compiled

        return start

    def again(self) -> None:
        """Start it once more, as often as it was."""
        for grid, args, kwargs in self._starts:
            self._kernel[grid](*args, **kwargs)


class Silent:
    """Stands for a kernel that is not to run."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None


@contextlib.contextmanager
def recording(part: str, *, alone: bool = False) -> Iterator[Recorder]:
    """Record how the kernel of a part is started; `alone`: no other kernel is."""
    from txlcli.attention import kernels

    names = [*KERNELS.values(), "clear_unseen"]
    before = {name: getattr(kernels, name) for name in names}
    recorder = Recorder(before[KERNELS[part]])
    for name in names:
        if name == KERNELS[part]:
            setattr(kernels, name, recorder)
        elif alone:
            setattr(kernels, name, Silent())
    try:
        yield recorder
    finally:
        for name, kernel in before.items():
            setattr(kernels, name, kernel)


def with_way(how: Launches, part: str, launch: Launch) -> Launches:
    """Start a part in this way, in a forward pass that has it."""
    forward = part if part in FORWARDS else "workspace"
    return how._replace(forward=forward, **{part: launch})


def start_part(
    part: str, how: Launches, inputs: Sequence[Tensor], d_out: Tensor, *, alone: bool = False
) -> Recorder:
    """Run what contains a part, and return its record."""
    with recording(part, alone=alone) as recorder:
        differentiate(partial(fused.attend, how=how), inputs, d_out)
    return recorder


def shown(launch: Launch | None) -> str:
    """Write a way to start as the tables do."""
    if launch is None:
        return "None"
    *rest, n_spilled = launch
    return f"Launch({', '.join(map(str, rest if not n_spilled else launch))})"


def pick(setup: Setup, limit: Limit) -> Found:
    """Time each kernel in each way, and name the fastest."""
    clock, values = Clock(setup.device), []
    lines, faults = list[str](), list[str]()
    rows: list[list[object]] = [["type", "E", "kernel", "way", "ms", "registers", "spills"]]
    for shape, dtype in setup.pick:
        if limit.is_over:
            lines.append(f"    # {dtype}, E {shape.d_head}: not timed, out of time")
            continue
        how = best = shipped(setup, shape.d_head, dtype)
        inputs = draw(setup, shape, dtype)
        spills = []
        for part in KERNELS:
            found = pick_part(setup, part, how, dtype, inputs, clock, limit)
            values.append({"shape": shape, "dtype": dtype, "part": part, "ways": found})
            timed = [way for way in found if way["ms"] is not None]
            fastest = min(timed, key=lambda way: way["ms"], default=None)
            if fastest is not None:
                best = best._replace(**{part: fastest["launch"]})
                spills += [part] if fastest["n_spills"] else []
            for way in found:
                marks = " shipped" * way["is_shipped"] + " FASTEST" * (way is fastest)
                ms = way["reason"] if way["ms"] is None else f"{way['ms']:.3f}"
                name = ", ".join(map(str, way["launch"][:4])) + marks
                rows.append([dtype, shape.d_head, part, name, ms, way["n_registers"], way["n_spills"]])
        best, note = compare_forwards(setup, best, inputs, clock, limit)
        faults += check_picked(setup, best, shape, dtype)
        picked, own = ([shown(getattr(x, part)) for part in KERNELS] for x in (best, how))
        new = [part for part, a, b in zip(KERNELS, picked, own, strict=True) if a != b]
        lines += [
            f"    {fused.block_e(shape.d_head)}: ({', '.join(picked)}),",
            f"    #   {dtype}; shipped ({', '.join(own)}); new: {', '.join(new) or 'none'}",
            f"    #   {note}; shipped {how.forward}",
        ]
        if spills:
            lines.append(f"    #   {', '.join(spills)} spills: test_kernels_compile.py says how many bytes")
    head = "For `fused`, by columns of a block: workspace, queries, keys, gather"
    text = f"{table(rows)}\n\n{head}; capability {capability(setup)}:\n" + "\n".join(lines)
    return Found(text, {"ways": values, "lines": lines}, faults)


def check_picked(setup: Setup, how: Launches, shape: Shape, dtype: str) -> list[str]:
    """Return what is wrong with the kernels as they were picked."""
    faults = []
    try:
        truth = Truth(setup, shape._replace(n_streams=1, n_queries=-(-shape.n_queries // 4)), dtype, False)
        for name, attend in triton_forms(how).items():
            fault = truth.shares(attend)[2]
            if fault is not None:
                faults.append(f"{name}, as picked: {dtype}, E {shape.d_head}: {fault}")
    except Exception as error:
        refuse_spoiled(setup)
        faults.append(f"as picked: {dtype}, E {shape.d_head}: {short(error)}")
    return faults


def pick_part(
    setup: Setup, part: str, how: Launches, dtype: str, inputs: list[Tensor], clock: Clock, limit: Limit
) -> list[dict[str, Any]]:
    """Time one kernel in all ways, in turn."""
    found, recorders = list[dict[str, Any]](), dict[str, Recorder]()
    d_out = torch.randn_like(inputs[0])
    for launch in ways(setup, how, part, dtype):
        way = {"launch": launch, "is_shipped": launch == getattr(how, part), "ms": None, "reason": None}
        way |= {"n_registers": None, "n_spills": None}
        found.append(way)
        if limit.is_over and recorders:
            way["reason"] = "out of time"
            continue
        try:
            recorder = start_part(part, with_way(how, part, launch), inputs, d_out)
        except Exception as error:
            refuse_spoiled(setup)
            way["reason"] = short(error)[:60]
            continue
        recorders[str(launch)] = recorder
        way["n_registers"] = getattr(recorder.compiled, "n_regs", None)
        way["n_spills"] = getattr(recorder.compiled, "n_spills", None)
    calls = {name: recorder.again for name, recorder in recorders.items()}
    samples, failed = in_turn(setup, calls, clock, limit, setup.n_rounds)
    for way in found:
        name = str(way["launch"])
        way["ms"] = median_ms(samples[name]) if name in samples else None
        way["reason"] = failed.get(name, way["reason"])
    return found


def compare_forwards(
    setup: Setup, how: Launches, inputs: Sequence[Tensor], clock: Clock, limit: Limit
) -> tuple[Launches, str]:
    """Take the faster forward pass of training, the product into the workspace included."""
    q, k, v, *bias = (x.detach().requires_grad_() for x in inputs)
    forms = triton_forms(how)
    calls = {name: partial(attend, q, k, v, RelativeBias(*bias)) for name, attend in forms.items()}
    samples, _ = in_turn(setup, calls, clock, limit, setup.n_rounds)
    medians = {name: median_ms(found) for name, found in samples.items()}
    listed = ", ".join(f"{name} {ms:.3f} ms" for name, ms in medians.items())
    forward = min(medians, key=lambda name: medians[name], default=how.forward)
    return how._replace(forward=forward), f"forward {forward}: {listed}"


# time


def plain_flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend causally without positions, the last query at the last key, by the flash kernel alone."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    if q.device.type == "cpu":  # its flash kernel aligns first with first
        mask = causal_lower_right(q.shape[2], k.shape[2])._materialize()
        return F.scaled_dot_product_attention(q, k, v, mask)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, causal_lower_right(q.shape[2], k.shape[2]))


def flex_attention(shape: Shape, device: torch.device) -> Callable[..., Tensor]:
    """Return FlexAttention with the position scores as a tensor that its score function captures."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    n_queries, n_memory = shape.n_queries, shape.n_memory
    n_keys = n_queries + n_memory

    def is_seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i + n_memory

    mask = create_block_mask(is_seen, None, None, n_queries, n_keys, device=str(device))

    def attend(q: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor, w: Tensor) -> Tensor:
        by_distance = ((q + w[:, None]) @ r.mT) * shape.d_head**-0.5

        def add_position(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            # What lies beyond the last column belongs to keys that are not seen.
            column = torch.clamp(n_queries - 1 - i + j, max=n_keys - 1)
            return score + by_distance[b, h, i, column]

        return flex_attention(q + u[:, None], k, v, score_mod=add_position, block_mask=mask)

    # On a CPU it has no backward when compiled, and takes long to compile.
    compiled: Callable[..., Tensor] = torch.compile(attend, dynamic=False)
    return compiled if device.type == "cuda" else attend


SHARE_TARGETS = {"forward": (0.40, 0.65), "forward+backward": (0.35, 0.55)}
EAGER_TARGET = (2.5, 4.0)


def reached(value: float, target: tuple[float, float]) -> str:
    """Say what of (floor, goal) a value reaches."""
    return "goal" if value >= target[1] else "floor" if value >= target[0] else "below"


def time_attention(setup: Setup, limit: Limit) -> Found:
    """Time attention alone, in turn, at each shape."""
    clock, values, notes = Clock(setup.device), [], []
    head = "shape|work|form|ms|host ms|of flash|floor-goal|x eager|floor-goal|reached"
    rows: list[list[object]] = [list(head.split("|"))]
    # FlexAttention takes long to compile for each shape, and goes last so that all else has been timed.
    for with_flex, shape in [(f, s) for f in (False, True) for s in setup.shapes]:
        if limit.is_over:
            notes.append(f"{shape}{', FlexAttention' if with_flex else ''}: left out, out of time")
            continue
        gc.collect()
        calls = timed_calls(setup, shape, notes, with_flex=with_flex)
        for work, by_name in calls.items():
            samples, failed = in_turn(setup, by_name, clock, limit, setup.n_rounds)
            notes += [f"{shape}, {work}, {name}: {reason}" for name, reason in failed.items()]
            medians = {name: median_ms(found) for name, found in samples.items()}
            for name, ms in medians.items():
                if with_flex and name != "FlexAttention":
                    continue
                of_flash, of_eager = (medians[n] / ms if n in medians else None for n in ("flash", "eager"))
                one = {"shape": shape, "work": work, "form": name, "ms": ms}
                one |= {"host_ms": median_host_ms(samples[name]), "of_flash": of_flash, "of_eager": of_eager}
                one |= {"all_ms": [sample.ms for sample in samples[name]]}
                values.append(one)
                rows.append(timed_row(one))
    text = table(rows) + "".join(f"\n{note}" for note in notes)
    return Found(text, {"rows": values, "notes": notes})


def timed_row(one: Mapping[str, Any]) -> list[object]:
    """Return a line of the table of times; targets are those of the fused form."""
    is_ours = one["form"] == "triton"
    of_flash, of_eager = one["of_flash"], one["of_eager"]
    targets: list[object] = [None, None, None]
    if is_ours and of_flash is not None and of_eager is not None:
        share_target = SHARE_TARGETS[one["work"]]
        targets = [
            "{:.0%}-{:.0%}".format(*share_target),
            "{:g}-{:g}".format(*EAGER_TARGET),
            f"{reached(of_flash, share_target)}, {reached(of_eager, EAGER_TARGET)}",
        ]
    return [
        *(one["shape"], one["work"], one["form"], f"{one['ms']:.3f}", f"{one['host_ms']:.3f}"),
        *(None if of_flash is None else f"{of_flash:.0%}", targets[0]),
        *(None if of_eager is None else f"{of_eager:.2f}", targets[1], targets[2]),
    ]


def timed_calls(
    setup: Setup, shape: Shape, notes: list[str], *, with_flex: bool
) -> dict[str, dict[str, Callable[[], object]]]:
    """Return the calls to time, by work and form."""
    inputs = draw(setup, shape, setup.precision)
    leaves = [x.detach().requires_grad_() for x in inputs]
    d_out = torch.randn_like(inputs[0])

    def biased(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda q, k, v, *bias: attend(q, k, v, RelativeBias(*bias))

    def forward(attend: Callable[..., Tensor], n: int) -> None:
        with torch.no_grad():
            attend(*inputs[:n])

    def both(attend: Callable[..., Tensor], n: int) -> None:
        torch.autograd.grad(attend(*leaves[:n]), leaves[:n], d_out)

    forms = {"flash": plain_flash, "eager": biased(relative_attention)}
    more = dict[str, Callable[..., Tensor]]()
    if with_flex:
        try:
            flex = flex_attention(shape, setup.device)
            with torch.no_grad():
                wrong = (flex(*inputs) - forms["eager"](*inputs)).abs().max().item()
            # Both round scores to 8 bits: enough to see that the same thing is computed.
            if not wrong < 0.05:
                notes.append(f"{shape}, FlexAttention: differs from the eager form by {wrong:.3f}")
            forms["FlexAttention"] = flex
        except Exception as error:
            refuse_spoiled(setup)
            notes.append(f"{shape}, FlexAttention: {short(error)}")
    else:
        how = shipped(setup, shape.d_head, setup.precision)
        forms |= {"triton": biased(partial(fused.attend, how=how)), "sdpa": biased(sdpa_attention)}
        # The two forward passes, one of which is the one above.
        more = {f"triton {name}": biased(attend) for name, attend in triton_forms(how).items()}
    n_inputs = {"flash": 3}
    return {
        "forward": {n: partial(forward, f, n_inputs.get(n, 6)) for n, f in (forms | more).items()},
        "forward+backward": {n: partial(both, f, n_inputs.get(n, 6)) for n, f in forms.items()},
    }


# memory


def memory(setup: Setup, limit: Limit) -> Found:
    """Measure the peak of forward and backward, and what is kept between them, at growing lengths."""
    forms = {"triton": fused.attend, "sdpa": sdpa_attention, "eager": relative_attention}
    rows: list[list[object]] = [["form", "T = M", "peak MB", "kept MB", "out, lse MB", "bytes/token"]]
    values, notes, faults = [], [], []
    for name, attend in forms.items():
        per_token: dict[int, float] = {}
        # The shortest first and once more: libraries take their own memory at their first call.
        for n_queries in (setup.lengths[0], *setup.lengths):
            if limit.is_over:
                notes.append(f"{name}, T {n_queries}: left out, out of time")
                continue
            shape = Shape(1, setup.memory_heads, n_queries, n_queries, 64 if not setup.is_interpreted else 16)
            try:
                peak, kept, least = measure_memory(setup, attend, shape)
            except Exception as error:
                refuse_spoiled(setup)
                notes.append(f"{name}, T {n_queries}: {short(error)[:100]}")
                break
            rest = peak - (workspaces(shape, setup) if name == "triton" else 0)
            per_token[n_queries] = rest / n_queries
            one = {"form": name, "length": n_queries, "peak_bytes": peak, "kept_bytes": kept}
            values.append({**one, "least_kept_bytes": least, "bytes_per_token": rest / n_queries})
        for one in values:
            if one["form"] == name and one is not next(v for v in values if v["form"] == name):
                n_bytes = [one[key] for key in ("peak_bytes", "kept_bytes", "least_kept_bytes")]
                cells = [None if n is None else f"{n / 2**20:.1f}" for n in n_bytes]
                rows.append([name, one["length"], *cells, f"{one['bytes_per_token']:.0f}"])
        if name == "triton" and not setup.is_interpreted:
            shortest, longest = min(per_token), max(per_token)
            # Linear is one number of bytes for each token, quadratic 8 times as many at 8 times the length.
            # Between them lie sums over parts in float32, where a workspace holds no whole head.
            if per_token[longest] > 2.5 * per_token[shortest]:
                faults.append(
                    f"triton: {per_token[longest]:.0f} bytes/token at T {longest:,}, "
                    f"{per_token[shortest]:.0f} at {shortest:,}: not linear"
                )
    text = table(rows) + "\nBytes per token of triton are those above its workspaces."
    return Found(text + "".join(f"\n{note}" for note in notes), {"rows": values, "notes": notes}, faults)


def workspaces(shape: Shape, setup: Setup) -> int:
    """Return the bytes of backward's two workspaces."""
    n_keys = shape.n_queries + shape.n_memory
    n_bytes = shape.n_streams * shape.n_head * shape.n_queries * n_keys * DTYPES[setup.precision].itemsize
    return 2 * min(fused.WORKSPACE_BYTES, n_bytes)


def measure_memory(setup: Setup, attend: Callable[..., Tensor], shape: Shape) -> tuple[int, int | None, int]:
    """Return bytes: the peak above the inputs, what forward keeps of it, and what out and lse alone take."""
    from txlcli.bench.clock import PeakMemory

    q, k, v, r, u, w = (x.detach().requires_grad_() for x in draw(setup, shape, setup.precision))
    d_out = torch.ones_like(q)
    peak = PeakMemory(setup.device)
    before = torch.cuda.memory_allocated() if setup.kind == "cuda" else None
    out = attend(q, k, v, RelativeBias(r, u, w))
    kept = None if before is None else torch.cuda.memory_allocated() - before
    torch.autograd.grad(out, (q, k, v, r, u, w), d_out)
    found = peak.read()
    n_rows = shape.n_streams * shape.n_head * shape.n_queries
    least = n_rows * (shape.d_head * DTYPES[setup.precision].itemsize + 4)
    return found or 0, kept, least


# step and generate


def subject_of(setup: Setup, preset: str, n_vocab: int | None, **changes: object) -> Any:
    """Return a preset as a model to measure, small where there is no GPU."""
    from txlcli.bench import preset_subject
    from txlcli.config import Sourced, find_preset, override, read_settings

    asked = {**changes, **setup.changes.get(preset, {})}
    settings = override(
        read_settings(find_preset(preset)), {name: Sourced(value, "here") for name, value in asked.items()}
    )
    return preset_subject(preset, settings, n_vocab)


def able(setup: Setup, subject: Any, notes: list[str]) -> tuple[str, ...]:
    """Return the forms of attention that run a model here."""
    names = []
    for name in ("triton", "sdpa", "eager"):
        reason = BACKENDS[name].refuses(Demands(setup.device, subject.config.model.d_head))
        if reason is None:
            names.append(name)
        else:
            notes.append(f"{name}: {reason}")
    return tuple(names)


def seconds_of(setup: Setup, step: Callable[[], None], n_steps: int) -> float:
    from txlcli.bench.clock import synchronize

    synchronize(setup.device)
    begun = time.perf_counter()
    for _ in range(n_steps):
        step()
    synchronize(setup.device)
    return time.perf_counter() - begun


def blocks_in_turn(
    setup: Setup, sides: Mapping[str, Callable[[int], float]], limit: Limit, longest: int
) -> tuple[dict[str, list[float]], int]:
    """Let each side do blocks of the same number of steps in turn; return seconds of a step, and that number.

    Args:
        setup: How long a block is to take.
        sides: From steps to seconds; warm.
        limit: Of the time.
        longest: Steps of a block at most.
    """
    slowest_s = max(side(1) for side in sides.values())
    n_steps = max(1, min(longest, int(setup.block_s / slowest_s)))
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for n in range(7):
        if n >= 3 and limit.is_over:
            break
        for name, side in sides.items():
            seconds[name].append(side(n_steps) / n_steps)
    return seconds, n_steps


def step(setup: Setup, limit: Limit, hugging_face: str | None) -> Found:
    """Time whole training steps."""
    notes: list[str] = []
    for n_streams in setup.batches:
        try:
            return step_of(setup, n_streams, limit, hugging_face, notes)
        except torch.OutOfMemoryError:
            notes.append(f"{n_streams} streams: out of memory")
            gc.collect()
            torch.cuda.empty_cache()
    return Found("\n".join(notes), {"notes": notes}, ["step: no number of streams fits"])


def step_of(setup: Setup, n_streams: int, limit: Limit, hugging_face: str | None, notes: list[str]) -> Found:
    """Time whole training steps with this many streams, in turn with Hugging Face's."""
    from txlcli.bench.clock import PeakMemory
    from txlcli.bench.works import Setting, training

    subject = subject_of(setup, "wt103-base", setup.n_words, batch_size=n_streams)
    names, peaks = able(setup, subject, notes), dict[str, int | None]()
    sides: dict[str, Callable[[int], float]] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-attention-")))
        peak = PeakMemory(setup.device)
        work = stack.enter_context(training(Setting(subject, setup.device, setup.precision, names), folder))

        def ours(candidate: Any, n_steps: int) -> float:
            candidate.ready(n_steps)
            return seconds_of(setup, candidate.step, n_steps)

        for candidate in work.candidates:
            peak.restart()
            ours(candidate, 2)
            peaks[candidate.name] = peak.read()
            sides[candidate.name] = partial(ours, candidate)
        if hugging_face is not None:
            try:
                child = HuggingFace(setup, subject, hugging_face, stack)
                sides["Hugging Face"], peaks["Hugging Face"] = child.block, child.facts["peak_bytes"]
                with torch.device("meta"):
                    n_weights = sum(subject.build(torch.device("meta")).n_parameters())
                notes.append(f"weights: ours {n_weights:,}, Hugging Face {child.facts['n_weights']:,}")
            except Exception as error:
                notes.append(f"Hugging Face: {short(error)}")
        seconds, n_steps = blocks_in_turn(setup, sides, limit, longest=50)
    rows: list[list[object]] = [
        ["form", "tokens/s", "ms/step", "peak GB", "x eager", "x Hugging Face", "reached"]
    ]
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    theirs = medians.get("Hugging Face")
    values = []
    for name, one in medians.items():
        ratio = theirs / one if theirs is not None and name != "Hugging Face" else None
        gigabytes = peaks[name]
        rows.append(
            [
                *(name, f"{work.tokens / one:,.0f}", f"{1e3 * one:.1f}"),
                None if gigabytes is None else f"{gigabytes / 1e9:.2f}",
                f"{medians['eager'] / one:.2f}",
                None if ratio is None else f"{ratio:.2f}",
                reached(ratio, (2.5, 5.0)) if ratio is not None and name == "triton" else None,
            ]
        )
        values.append({"form": name, "step_s": seconds[name], "tokens": work.tokens, "peak_bytes": gigabytes})
    lengths = subject.lengths
    head = (
        f"wt103-base, {subject.n_vocab:,} words, {n_streams} streams, T {lengths.tgt_len}, "
        f"M {lengths.mem_len}, {setup.precision}, {n_steps} steps a block; targets: 2.5 and 5 x Hugging Face"
    )
    text = "\n".join([head, table(rows), *notes])
    return Found(text, {"rows": values, "n_streams": n_streams, "notes": notes})


def generate(setup: Setup, limit: Limit) -> Found:
    """Time the generation of one text, token by token."""
    from txlcli.bench.works import Setting, generation

    notes: list[str] = []
    subject = subject_of(setup, "enwik8-base", None, mem_len=2100)
    names = able(setup, subject, notes)
    with generation(Setting(subject, setup.device, setup.precision, names)) as work:

        def ours(candidate: Any, n_steps: int) -> float:
            candidate.ready(n_steps)
            return seconds_of(setup, candidate.step, n_steps)

        sides = {candidate.name: partial(ours, candidate) for candidate in work.candidates}
        for side in sides.values():
            side(2)
        seconds, n_steps = blocks_in_turn(setup, sides, limit, longest=work.longest or 1)
    rows: list[list[object]] = [["form", "tokens/s", "ms/token", "floor-goal", "reached"]]
    for name, found in seconds.items():
        speed = 1 / statistics.median(found)
        is_ours = name == names[0]
        rows.append(
            [
                *(name, f"{speed:,.0f}", f"{1e3 / speed:.2f}"),
                "300-1,000" if is_ours else None,
                reached(speed, (300, 1000)) if is_ours else None,
            ]
        )
    lengths = subject.lengths
    head = (
        f"enwik8-base, T {lengths.tgt_len}, M {lengths.mem_len}, {setup.precision}, {n_steps} tokens a block"
    )
    text = "\n".join([head, table(rows), *notes])
    return Found(text, {"rows": [{"form": n, "token_s": s} for n, s in seconds.items()], "notes": notes})


# Hugging Face's model, in a process of its own


class HuggingFace:
    """A child that trains Hugging Face's model and times its blocks."""

    def __init__(self, setup: Setup, subject: Any, folder: str, stack: contextlib.ExitStack) -> None:
        model = subject.config.model
        names = (
            "n_layer",
            "d_model",
            "n_head",
            "d_head",
            "d_inner",
            "tgt_len",
            "mem_len",
            "dropout",
            "div_val",
        )
        job = {
            **{name: getattr(model, name) for name in names},
            "cutoffs": list(model.cutoffs),
            "n_vocab": subject.n_vocab,
            "n_streams": subject.config.optim.batch_size,
            "clip": subject.config.optim.clip,
            "folder": str(Path(folder).resolve()),
            "device": str(setup.device),
            "precision": setup.precision,
        }
        self._process = start_child({"kind": "hugging-face", "job": job}, stdin=subprocess.PIPE)
        stack.callback(self._process.wait)
        stack.callback(self._process.kill)
        self.facts = self._read()

    def block(self, n_steps: int) -> float:
        """Do steps; return their seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(n_steps) + "\n")
        self._process.stdin.flush()
        return float(self._read()["seconds"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("its process ended early; the error stands above")
        reply: dict[str, Any] = json.loads(line)
        return reply


def serve_hugging_face(job: dict[str, Any], replies: Any) -> None:
    """Set up and warm up; then, for each number of steps on stdin, do them and reply their seconds."""
    from txlcli.bench.clock import PeakMemory, synchronize
    from txlcli.bench.works import draw_tokens

    device, n_streams, tgt_len = torch.device(job["device"]), job["n_streams"], job["tgt_len"]
    ids = torch.from_numpy(draw_tokens(job["n_vocab"], n_streams * tgt_len)).view(n_streams, tgt_len)
    # After torch and numpy, which are those of this Python.
    sys.path.insert(0, job["folder"])
    warnings.simplefilter("ignore")
    from transformers import TransfoXLConfig, TransfoXLLMHeadModel

    torch.manual_seed(0)
    config = TransfoXLConfig(
        vocab_size=job["n_vocab"],
        cutoffs=job["cutoffs"],
        div_val=job["div_val"],
        d_embed=job["d_model"],
        **{name: job[name] for name in ("d_model", "n_head", "d_head", "d_inner", "n_layer", "mem_len")},
        clamp_len=-1,
        same_length=False,
        untie_r=False,
        dropout=job["dropout"],
        dropatt=0.0,
        trainer_compatible=True,
    )
    peak = PeakMemory(device)
    model = TransfoXLLMHeadModel(config).to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    memory = None

    def one() -> None:
        nonlocal memory
        tokens = ids.to(device)
        model.zero_grad(set_to_none=True)
        with autocast(device, job["precision"]):
            out = model(tokens, mems=memory, labels=tokens)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job["clip"])
        optimizer.step()
        memory = out.mems
        out.loss.item()  # as ours, which looks at the loss of every step

    for _ in range(3):
        one()
    reply(replies, {"n_weights": sum(p.numel() for p in model.parameters()), "peak_bytes": peak.read()})
    for line in sys.stdin:
        synchronize(device)
        begun = time.perf_counter()
        for _ in range(json.loads(line)):
            one()
        synchronize(device)
        reply(replies, {"seconds": time.perf_counter() - begun})


# Compiling ahead


class Job(NamedTuple):
    """An attention whose kernels are wanted; `part`: only this kernel.

    `is_whole`: all kernels, those for inference too; else gathering jobs leave backward to the others.
    """

    shape: Shape
    dtype: str
    has_first: bool
    how: Launches
    part: str | None = None
    is_whole: bool = False


def compile_jobs(setup: Setup, only: Sequence[str]) -> list[Job]:
    """Return what is to be compiled for these sections, at small sizes that need the same kernels.

    Triton compiles anew where a number that a kernel is given is 1, or a multiple of 16, and was not before;
    of sizes only T, and H T, are such numbers.
    """
    jobs = []
    for case in setup.cases if "check" in only else ():
        how = shipped(setup, case.d_head, case.dtype)
        for n_queries, n_memory in {(t == 1, t % 16 == 0): (t, m) for t, m in case.sizes}.values():
            shape = Shape(setup.n_streams, setup.n_head, n_queries, n_memory, case.d_head)
            jobs += [
                Job(shape, case.dtype, case.has_first, how._replace(forward=forward))
                for forward in FORWARDS
                if getattr(how, forward) is not None
            ]
    for shape, dtype in setup.pick if "pick" in only else ():
        small = Shape(1, 2, 32, 32, shape.d_head)
        how = shipped(setup, shape.d_head, dtype)
        for part in KERNELS:
            jobs += [
                Job(small, dtype, False, with_way(how, part, launch), part)
                for launch in ways(setup, how, part, dtype)
            ]
    lengths = {64: (1, 2, 32, 32, 64), 41: (60, 10, 150, 150, 41)}
    wanted = [64] if {"time", "memory", "generate"} & set(only) else []
    for d_head in wanted + ([41] if "step" in only else []):
        how = shipped(setup, d_head, setup.precision)
        jobs.append(Job(Shape(*lengths[d_head]), setup.precision, False, how, is_whole=True))
    return jobs[:1] + jobs[-3:-2] if setup.is_interpreted else jobs


def serve_compiling(setup: Setup, only: Sequence[str], index: int, n: int) -> None:
    """Run every n-th job; what fails here fails again, and is reported, where it is wanted."""
    for job in compile_jobs(setup, only)[index::n]:
        with contextlib.suppress(Exception):
            inputs = draw(setup, job.shape, job.dtype)
            d_out = torch.ones_like(inputs[0])
            if job.part is not None:
                start_part(job.part, job.how, inputs, d_out, alone=True)
                continue
            first = draw_first(job.shape, setup.device) if job.has_first else None
            attend = partial(fused.attend, how=job.how)
            q, k, v, *bias = (x.requires_grad_() for x in inputs)
            out = attend(q, k, v, RelativeBias(*bias), first=first)
            if job.how.forward == "workspace" or job.is_whole:
                out.backward(d_out)
            if job.is_whole:
                with torch.no_grad():
                    attend(q, k, v, RelativeBias(*bias), first=first)


def compile_ahead(setup: Setup, options: argparse.Namespace) -> None:
    """Fill Triton's cache, in several processes."""
    n = setup.n_compilers or max(1, min(os.cpu_count() or 1, 16) - 1)
    say(f"compiling ahead in {n} process(es)")
    begun = time.monotonic()
    jobs = [
        {"kind": "compile", "interpret": options.interpret, "only": options.only, "index": i, "n": n}
        for i in range(n)
    ]
    children = [start_child(job) for job in jobs]
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.1, COMPILE_S - (time.monotonic() - begun)))
    for child in children:
        if child.poll() is None:
            say("  stopped one that had not finished")
            child.kill()
            child.wait()
    say(f"  {time.monotonic() - begun:.0f} s")


# Processes


def start_child(job: Mapping[str, Any], **options: Any) -> "subprocess.Popen[str]":
    """Start this script as a child."""
    command = [sys.executable, __file__, "--child", json.dumps(job)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8", **options)


def reply(replies: Any, values: Mapping[str, Any]) -> None:
    replies.write(json.dumps(values) + "\n")
    replies.flush()


def serve(message: dict[str, Any]) -> None:
    """Do what a child is started for."""
    # Only replies go to the parent; whatever a library prints goes to stderr.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    torch.manual_seed(0)
    if message["kind"] == "hugging-face":
        serve_hugging_face(message["job"], replies)
        return
    setup = IN_THE_INTERPRETER if message["interpret"] else ON_A_GPU
    if setup.is_interpreted:
        # The interpreter stands for the GPU.
        BACKENDS["triton"] = Backend(fused.attend, lambda demands: None)
        # It computes scores of keys that are not seen, out of NaN, and drops them.
        warnings.simplefilter("ignore")
    if message["kind"] == "compile":
        serve_compiling(setup, message["only"], message["index"], message["n"])
        return
    serve_sections(setup, message, replies)


def serve_sections(setup: Setup, message: dict[str, Any], replies: Any) -> None:
    """Run sections and reply what each found; end where the GPU can no longer be used."""
    sections: dict[str, Callable[[Limit], Found]] = {
        "check": partial(check, setup),
        "pick": partial(pick, setup),
        "time": partial(time_attention, setup),
        "memory": partial(memory, setup),
        "step": partial(step, setup, hugging_face=message["hugging_face"]),
        "generate": partial(generate, setup),
    }
    reply(replies, {"machine": machine(setup)})
    for name, seconds in message["sections"].items():
        say(f"{name}: at most {seconds:.0f} s")
        begun = time.monotonic()
        values: dict[str, Any] = {"section": name}
        try:
            found = sections[name](Limit(seconds))
            values |= {"text": found.text, "values": found.values, "faults": found.faults}
        except Exception as error:
            traceback.print_exc()
            values |= {"text": "", "values": {}, "faults": [f"{name}: {short(error)}"]}
        gc.collect()
        values |= {"elapsed_s": time.monotonic() - begun, "is_last": False}
        try:
            refuse_spoiled(setup)
        except Spoiled:
            say("  this process can no longer use the GPU")
            values["is_last"] = True
        reply(replies, values)
        if values["is_last"]:
            return


def capability(setup: Setup) -> str:
    return "none" if setup.is_interpreted else "{}.{}".format(*torch.cuda.get_device_capability())


def machine(setup: Setup) -> dict[str, Any]:
    """Return what the numbers belong to."""
    return {
        "card": "none, Triton's interpreter" if setup.is_interpreted else torch.cuda.get_device_name(),
        "capability": capability(setup),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "date": datetime.date.today().isoformat(),
    }


def run(options: argparse.Namespace) -> int:
    """Run all sections, in as many processes as it takes, and report; return the exit status."""
    setup = IN_THE_INTERPRETER if options.interpret else ON_A_GPU
    begun = time.monotonic()
    found: dict[str, Any] = {"machine": {}, "sections": {}}
    waiting = [name for name in LIMITS_S if name in options.only]
    compile_ahead(setup, options)
    while waiting:
        waiting = run_process(waiting, options, found, begun)
    found["elapsed_s"] = time.monotonic() - begun
    faults = [fault for section in found["sections"].values() for fault in section["faults"]]
    for fault in faults:
        sys.stdout.write(f"FAULT {fault}\n")
    sys.stdout.write(
        f"{len(faults)} faults in {', '.join(found['sections'])}; {found['elapsed_s']:.0f} s. "
        "More checks for a GPU: python -m pytest -m gpu\n"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if faults else 0


def run_process(
    waiting: list[str], options: argparse.Namespace, found: dict[str, Any], begun: float
) -> list[str]:
    """Run sections in one process until it ends; return those that it left."""
    left = options.seconds - (time.monotonic() - begun)
    total = sum(LIMITS_S[name] for name in waiting)
    seconds = {name: max(5.0, min(LIMITS_S[name], LIMITS_S[name] * left / total)) for name in waiting}
    child = start_child(
        {
            **{"kind": "sections", "interpret": options.interpret, "sections": seconds},
            "hugging_face": None if options.hugging_face is None else str(options.hugging_face),
        }
    )
    assert child.stdout is not None

    def next_line(limit_s: float) -> str:
        # A kernel that does not end would be waited for without end.
        timer = threading.Timer(limit_s, child.kill)
        timer.start()
        try:
            return child.stdout.readline()
        finally:
            timer.cancel()

    try:
        first = next_line(GRACE_S)
        if first:
            listed = "; ".join(f"{name} {value}" for name, value in json.loads(first)["machine"].items())
            if not found["machine"]:
                sys.stdout.write(f"{listed}\n\n")
            found["machine"] = json.loads(first)["machine"]
        while waiting:
            name = waiting[0]
            line = next_line(seconds[name] + GRACE_S) if first else ""
            waiting = waiting[1:]
            if line:
                section = json.loads(line)
            else:
                fault = f"{name}: its process ended or took too long; stderr may say why"
                section = {"text": "", "values": {}, "faults": [fault], "is_last": True}
            found["sections"][name] = section
            if options.json is not None:  # what there is, should we be stopped
                options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            sys.stdout.write(f"== {name}\n{section['text']}\n\n")
            sys.stdout.flush()
            if section["is_last"]:
                break
    finally:
        child.kill()
        child.wait()
    return waiting


def main() -> None:
    """Read the command line; in a child, serve the parent."""
    parser = argparse.ArgumentParser(
        description="Check, tune and time the attention on an NVIDIA GPU.",
        epilog="The tests marked gpu check more: python -m pytest -m gpu",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers here")
    parser.add_argument("--only", default=",".join(LIMITS_S), metavar="LIST", help="default: %(default)s")
    parser.add_argument("--hugging-face", type=Path, metavar="FOLDER", help="folder with transformers 4.35")
    parser.add_argument(
        "--seconds", type=float, default=340, metavar="N", help="about so long at most (default: %(default)s)"
    )
    parser.add_argument("--interpret", action="store_true", help="try it out on a CPU, with tiny sizes")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        serve(json.loads(options.child))
        return
    options.only = options.only.split(",")
    for section in options.only:
        if section not in LIMITS_S:
            parser.error(f"--only: no section is called {section!r}; choose from {', '.join(LIMITS_S)}")
    if options.hugging_face is not None and not (options.hugging_face / "transformers").is_dir():
        parser.error(f"--hugging-face: no transformers in {options.hugging_face}")
    if not fused.has_triton():
        parser.error("triton is not installed")
    if options.interpret:
        if np.lib.NumpyVersion(np.__version__) >= "2.4.0":
            parser.error(f"Triton's interpreter needs numpy older than 2.4; this is {np.__version__}")
    elif not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here; --interpret tries this out on a CPU")
    sys.exit(run(options))


if __name__ == "__main__":
    main()
