"""The soak's own judgement: what counts as growth, and which metrics.jsonl as whole."""

import json
from pathlib import Path

import pytest

from tests.soak import Metrics, Sample, Wrong, compare
from txlcli import UserError
from txlcli.run import Run

N = 100


def samples(
    *, leak_bytes: float = 0, n_left_open: float = 0, slower: float = 0, tokens: int | None = 1000
) -> list[Sample]:
    """Return even samples of a process that gets worse by this much from the first to the last."""
    found, cpu_s = [], 0.0
    for i in range(N):
        cpu_s += 1 / (1 - slower * i / N)
        # At the beginning everything grows, and files are opened for a moment at any time.
        resident, n_handles = (
            300e6 * min(1.0, 0.5 + i / 10) + leak_bytes * i / N,
            min(i, 8) + 3 * (i % 3 == 0),
        )
        done = None if tokens is None else tokens * i
        found.append(Sample(round(resident), n_handles + round(n_left_open * i / N), cpu_s, done))
    return found


def faults(taken: list[Sample]) -> list[str]:
    return [row.fault for row in compare("training", taken) if row.fault is not None]


def test_only_what_grows_after_the_warm_up_is_a_fault() -> None:
    assert faults(samples()) == []
    assert faults(samples(leak_bytes=15e6, slower=0.1)) == []
    assert [row.what for row in compare("reading", samples(tokens=None))] == [
        "reading: memory, MiB",
        "reading: open files, at least",
    ]


@pytest.mark.parametrize(
    ("worse", "says"),
    [
        ({"leak_bytes": 30e6}, "training: memory grew from "),
        ({"n_left_open": 3}, "training: open files grew from "),
        ({"slower": 0.2}, "training: speed fell from "),
    ],
)
def test_growth_is_named(worse: dict[str, float], says: str) -> None:
    (fault,) = faults(samples(**worse))
    assert fault.startswith(says)


def write(run: Run, *lines: tuple[str, int, float], end: str = "") -> None:
    """Add lines to metrics.jsonl."""
    text = "".join(json.dumps({"event": kind, "step": step, "nll": nll}) + "\n" for kind, step, nll in lines)
    with run.metrics_path.open("a") as file:
        file.write(text + end)


def test_metrics_are_read_on(tmp_path: Path) -> None:
    run = Run(tmp_path)
    write(run, ("save", 0, 0.0), ("step", 1, 0.0), ("eval", 1, 3.0), ("save", 1, 0.0), end='{"event": ')
    metrics = Metrics(run)
    metrics.read_on()
    write(run, end='"step", "step": 2}\n')
    write(run, ("eval", 2, 3.5), ("save", 2, 0.0), ("eval", 3, 2.5), ("save", 3, 0.0), ("save", 3, 0.0))
    metrics.read_on()
    assert metrics.n_bytes == run.metrics_path.stat().st_size
    assert metrics.saved == {0, 1, 2, 3}
    assert metrics.scores == {1: 3.0, 2: 3.5, 3: 2.5}
    assert metrics.bests == {1, 3}


@pytest.mark.parametrize(
    "line", [("step", 5, 0.0), ("eval", 5, 0.0), ("save", 4, 0.0), ("step", 4, 0.0), ("skip", 6, 0.0)]
)
def test_metrics_out_of_order_are_refused(tmp_path: Path, line: tuple[str, int, float]) -> None:
    run = Run(tmp_path)
    write(run, ("step", 5, 0.0), ("eval", 5, 1.0), ("save", 5, 0.0), line)
    with pytest.raises(Wrong, match=r"^metrics\.jsonl: "):
        Metrics(run).read_on()


def test_broken_line_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    write(run, ("step", 5, 0.0), end='{"event": "st{"event": "step", "step": 6}\n')
    with pytest.raises(UserError, match="damaged"):
        Metrics(run).read_on()
