"""Seconds of steps that take turns, memory at the peak, and what the machine multiplies at best."""

import ctypes
import gc
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

WARM_UP_STEPS = 2
LEAST_REPEATS = 3

# Squares, so large that a product takes long against its call, and small enough for any machine.
_LIMIT_SIZES = {"cpu": (512, 1024, 2048), "mps": (1024, 2048), "cuda": (4096, 8192)}
_LIMIT_S = 0.2

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_CLEAR_PEAK = "5"


class Candidate(NamedTuple):
    """One of several ways to do the same step.

    Attributes:
        name: Its name.
        ready: Called before a row of steps, with their number.
        step: Does the step.
    """

    name: str
    ready: Callable[[int], None]
    step: Callable[[], None]


@dataclass
class Timing:
    """What was measured of a candidate: seconds of a step, the mean of each repetition, and its peak."""

    name: str
    step_s: list[float] = field(default_factory=list)
    peak_bytes: int | None = None


def time_in_turn(
    candidates: Sequence[Candidate],
    *,
    device: torch.device,
    peak: "PeakMemory",
    repeats: int,
    seconds: float,
    longest: int | None = None,
) -> Generator[tuple[int, int], None, tuple[list[Timing], int]]:
    """Time steps of candidates in turn: A B A B ..., so that what disturbs the machine disturbs all.

    A repetition is as many steps as fill an equal part of the seconds, one at least. Where steps are so slow
    that this takes longer, fewer repetitions are made, `LEAST_REPEATS` at least.

    Args:
        candidates: What to time; the peak of each is that of its warm-up.
        device: Where they compute.
        peak: Opened before anything that the steps need was made.
        repeats: Repetitions of each.
        seconds: About so long in all.
        longest: At most so many steps make a repetition; None: any number.

    Yields:
        Repetitions done, of all candidates, and how many there will be at most.

    Returns:
        A timing for each, and the steps of a repetition.
    """
    timings, slowest_s = [Timing(candidate.name) for candidate in candidates], 1e-6
    total = repeats * len(candidates)
    for candidate, timing in zip(candidates, timings, strict=True):
        peak.restart()
        for _ in range(WARM_UP_STEPS):
            yield 0, total
            took_s = _time(candidate, 1, device)
        timing.peak_bytes = peak.read()
        slowest_s = max(slowest_s, took_s)
    n_steps = max(1, int(seconds / total / slowest_s))
    if longest is not None:
        n_steps = min(n_steps, longest)
    begun, done = time.perf_counter(), 0
    for repeat in range(repeats):
        if repeat >= LEAST_REPEATS and time.perf_counter() - begun > seconds:
            break
        for candidate, timing in zip(candidates, timings, strict=True):
            yield done, total
            timing.step_s.append(_time(candidate, n_steps, device) / n_steps)
            done += 1
    return timings, n_steps


def _time(candidate: Candidate, n_steps: int, device: torch.device) -> float:
    candidate.ready(n_steps)
    synchronize(device)
    before = time.perf_counter()
    for _ in range(n_steps):
        candidate.step()
    synchronize(device)
    return time.perf_counter() - before


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def matmul_limit(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOPs per second of the best of several large square matrix products."""
    best = 0.0
    for size in _LIMIT_SIZES.get(device.type, _LIMIT_SIZES["cpu"]):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = a @ b
        begun, n_done = time.perf_counter(), 0
        while n_done < LEAST_REPEATS or time.perf_counter() - begun < _LIMIT_S:
            synchronize(device)
            before = time.perf_counter()
            torch.mm(a, b, out=out)
            synchronize(device)
            best = max(best, 2 * size**3 / (time.perf_counter() - before))
            n_done += 1
    return best


class PeakMemory:
    """The most memory held at once, above what was held when this was made.

    On CUDA what torch's allocator handed out; on Linux the process' resident memory without the pages of
    files (the code of libraries, which is loaded as it is first used); elsewhere the system does not tell.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()
        self.restart()
        if device.type == "cuda":
            self._before: int | None = torch.cuda.memory_allocated(device)
        else:
            self._before = _own_bytes("VmRSS") if device.type == "cpu" else None

    def restart(self) -> None:
        """Forget the peak so far."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._device.type == "cpu":
            self._is_known = _restart_resident_peak()

    def read(self) -> int | None:
        """Return the peak since the last start in bytes; None: not known."""
        if self._device.type == "cuda":
            now: int | None = torch.cuda.max_memory_allocated(self._device)
        else:
            now = _own_bytes("VmHWM") if self._device.type == "cpu" and self._is_known else None
        return None if now is None or self._before is None else max(0, now - self._before)


def _restart_resident_peak() -> bool:
    """Give back what the C library keeps of freed memory, and let the system count the peak anew.

    Without the first, memory that was freed before and is used again would not show.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR_REFS.write_text(_CLEAR_PEAK, encoding="ascii")
    except (OSError, AttributeError, TypeError):
        return False  # no Linux, no glibc, or a system that does not allow it
    return True


def _own_bytes(name: str) -> int | None:
    """Return VmRSS or its peak VmHWM without the pages of files."""
    try:
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
        kilobytes = {line.partition(":")[0]: line.split()[1] for line in lines if line.endswith(" kB")}
        return 1024 * (int(kilobytes[name]) - int(kilobytes["RssFile"]))
    except (OSError, KeyError, ValueError):
        return None
