"""Train a small run for long while another process reads it: nothing grows, slows down or breaks.

    python -m tests.soak --minutes 40

A training through the command line evaluates, saves and deletes checkpoints more than once a second. Beside
it a reader loads `last` and `best` of that run again and again, scores the held-out text, continues a prompt,
and now and then calls the commands that read runs. It stops at the first thing that does not fit:

- a load or a command that fails, or that has to tell of damage;
- a step that metrics.jsonl has not saved; a best that was not better than all before it; a last that is
  older than the last before it; more checkpoints than are kept;
- weights whose sha256 is not the one that state.json records, or that are not those in the model;
- a score other than the one that the training wrote for this step, bit for bit; another score or another text
  of the same step than before;
- a line of metrics.jsonl that is not whole, or a step in it that is not above the one before.

Meanwhile resident memory and open files of both processes and the training's tokens per CPU second are
measured, which other work on the machine disturbs less than tokens per second. Compared are the first and the
last quarter of the time after a warm-up. At the end the training is interrupted, and resumed for some steps.

Exit status 1, after one line that says what was wrong. Linux only, whose /proc is read. Not collected by
pytest itself; `make soak` runs it, and `tests/test_soak.py` tests the comparison.
"""

import argparse
import hashlib
import itertools
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from txlcli import UserError
from txlcli.checkpoint import find_damage
from txlcli.run import Run, list_checkpoints, parse_json, read_pointers

if TYPE_CHECKING:
    from txlcli import LanguageModel

ROOT = Path(__file__).parent.parent
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "and", "then", "some", "more", "ox")

KEEP = 2
FLAGS = [
    *(
        "--tokenizer",
        "byte",
        "--n-layer",
        2,
        "--d-model",
        32,
        "--n-head",
        2,
        "--tgt-len",
        32,
        "--mem-len",
        32,
    ),
    *("--batch-size", 8, "--optimizer", "adamw", "--dropout", 0.1, "--device", "cpu", "--precision", "fp32"),
    *("--threads", 1, "--steps", 100_000_000, "--warmup", 10, "--log-every", 5, "--keep", KEEP),
    # So small a rate that evaluations are better than those before to the end: then each moves `best`.
    *("--lr", 1e-5, "--eval-every", 50, "--save-every", 35),
    # More than there are: the training scores all that the reader does.
    *("--eval-tokens", 1_000_000),
]
RESUMED_STEPS = 250
END_S = 60
"""Within which a process ends that is asked to."""
PROMPT = "the "
PASSES_A_COMMAND = 25
"""Readings by the Python interface between two by a command, which takes seconds to start."""

WARM_UP = 0.1
"""Share of the time in which libraries and allocators still get what they keep."""

MOST_MEMORY = 1.05
LEAST_SPEED = 0.90
_TAIL_BYTES = 4096
_MIB = 1 << 20


class Wrong(Exception):
    """Something that must not be, in one line."""


# What the processes need


class Sample(NamedTuple):
    """What a process used at one moment."""

    resident_bytes: int
    n_handles: int
    cpu_s: float
    """Since the process began."""
    tokens: int | None = None
    """Trained on since the run began; None: this process trains nothing."""


class Row(NamedTuple):
    """One quantity in the first and the last quarter."""

    what: str
    first: float
    last: float
    fault: str | None


def measure(pid: int, tokens: int | None = None) -> Sample:
    """Measure a process."""
    process = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    # The name of the program comes first, in brackets, and may hold anything.
    times = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
    return Sample(
        resident_bytes=int(status["VmRSS"].split()[0]) * 1024,
        n_handles=len(os.listdir(process / "fd")),  # noqa: PTH208
        cpu_s=sum(map(int, times)) / os.sysconf("SC_CLK_TCK"),
        tokens=tokens,
    )


def compare(name: str, samples: Sequence[Sample]) -> list[Row]:
    """Compare the last quarter of what is left after the warm-up with its first.

    Args:
        name: Of the process.
        samples: At even distances, at least 9.

    Returns:
        Memory, open files and, if tokens were counted, speed: the medians of memory and of the speeds between
        two samples, and the fewest files at any time, since one that is never closed raises those too.
    """
    after = samples[round(WARM_UP * len(samples)) :]
    n_quarter = len(after) // 4
    assert n_quarter > 1, "too few samples"
    first, last = after[:n_quarter], after[-n_quarter:]

    def row(what: str, unit: str, values: tuple[float, float], fault: str | None) -> Row:
        says = f"{name}: {what} {fault} from {values[0]:,.1f} to {values[1]:,.1f} {unit}"
        return Row(f"{name}: {what}, {unit}", *values, None if fault is None else says)

    memory = [statistics.median(one.resident_bytes for one in quarter) / _MIB for quarter in (first, last)]
    handles = [min(one.n_handles for one in quarter) for quarter in (first, last)]
    rows = [
        row("memory", "MiB", (memory[0], memory[1]), "grew" if memory[1] > MOST_MEMORY * memory[0] else None),
        row("open files", "at least", (handles[0], handles[1]), "grew" if handles[1] > handles[0] else None),
    ]
    if samples[0].tokens is not None:
        speed = [statistics.median(_speeds(quarter)) for quarter in (first, last)]
        is_slower = speed[1] < LEAST_SPEED * speed[0]
        rows.append(row("speed", "tokens/CPU s", (speed[0], speed[1]), "fell" if is_slower else None))
    return rows


def _speeds(samples: Sequence[Sample]) -> Iterator[float]:
    """Yield tokens per CPU second between each two samples."""
    for before, after in itertools.pairwise(samples):
        assert before.tokens is not None
        assert after.tokens is not None
        yield (after.tokens - before.tokens) / max(after.cpu_s - before.cpu_s, 1e-9)


# metrics.jsonl


class Metrics:
    """metrics.jsonl while it is written: each time it is read on from where it was left."""

    def __init__(self, run: Run) -> None:
        self.path = run.metrics_path
        self.n_bytes = 0
        self.saved: set[int] = set()
        self.scores: dict[int, float] = {}
        self.bests: set[int] = set()
        """The steps whose scores were better than all before."""
        self._lowest = float("inf")
        self._newest: dict[str, int] = {}

    def read_on(self) -> None:
        """Read the lines that have come; the end of one that is just being written comes next time."""
        with self.path.open("rb") as file:
            file.seek(self.n_bytes)
            lines = file.read().split(b"\n")[:-1]
        for line in lines:
            self._take(parse_json(line, f"{self.path.name} after byte {self.n_bytes:,}"))
            self.n_bytes += len(line) + 1

    def _take(self, values: dict[str, Any]) -> None:
        kind, step = values["event"], values["step"]
        before, any_before = self._newest.get(kind, -1), max(self._newest.values(), default=0)
        # An interrupted evaluation is made when the training is resumed, and its step is then saved again.
        if step < any_before or (step <= before and kind != "save"):
            raise Wrong(
                f"metrics.jsonl: {kind} of step {step} after {kind} of {before}, others of {any_before}"
            )
        self._newest[kind] = step
        if kind == "save":
            self.saved.add(step)
        elif kind == "eval":
            self.scores[step] = values["nll"]
            if values["nll"] < self._lowest:
                self._lowest = values["nll"]
                self.bests.add(step)
        elif kind != "step":
            raise Wrong(f"metrics.jsonl: an event `{kind}` at step {step}")


def trained_tokens(run: Run) -> int:
    """Read off the end of metrics.jsonl how many tokens were trained on."""
    try:
        with run.metrics_path.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
            lines = file.read().split(b"\n")[1:-1]
    except FileNotFoundError:
        return 0
    steps = [line for line in lines if line.startswith(b'{"event": "step"')]
    return int(json.loads(steps[-1])["tokens"]) if steps else 0


# The reader


class Reader:
    """Reads a run and holds all it finds against all it has found."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.metrics = Metrics(run)
        self.found: dict[int, tuple[float, str]] = {}
        """Score and text by step, of the checkpoints that are there."""
        self.last = 0
        self.counts = dict.fromkeys(("loads", "repeated", "hashed", "scores as trained", "commands"), 0)

    def read(self, which: str) -> None:
        """Load a checkpoint and check everything that can be known of it."""
        from txlcli import load

        has_best = read_pointers(self.run).best is not None
        lm = load(self.run.folder, which, device="cpu", threads=1)
        self.counts["loads"] += 1
        if lm.damage is not None or lm.notices:
            raise Wrong(f"{which}: loaded step {lm.step}, but {lm.damage or lm.notices[0]}")
        self.metrics.read_on()
        if lm.step not in self.metrics.saved:
            raise Wrong(f"{which}: is step {lm.step}, which metrics.jsonl has not saved")
        if which == "best" and has_best and lm.step not in self.metrics.bests:
            raise Wrong(f"best: is step {lm.step}, which was not better than all before it")
        if which == "last":
            if lm.step < self.last:
                raise Wrong(f"last: is step {lm.step}, and was step {self.last} before")
            self.last = lm.step
        self._check_weights(lm)
        self._check_results(lm)

    def _check_weights(self, lm: "LanguageModel") -> None:
        import safetensors.torch
        import torch

        folder = self.run.checkpoint_path(lm.step)
        try:
            data = (folder / "model.safetensors").read_bytes()
            values = parse_json((folder / "state.json").read_bytes(), folder / "state.json")
        except FileNotFoundError:
            if lm.step in list_checkpoints(self.run):
                raise Wrong(f"{folder.name}: is there without a file of its own") from None
            return  # deleted since it was loaded
        if hashlib.sha256(data).hexdigest() != values["files"]["model.safetensors"]["sha256"]:
            raise Wrong(f"{folder.name}: the weights' sha256 is not the recorded one")
        written, loaded = safetensors.torch.load(data), lm.model.state_dict()
        if written.keys() != loaded.keys() or not all(
            torch.equal(written[name], loaded[name]) for name in written
        ):
            raise Wrong(f"{folder.name}: the model's weights are not those of the file")
        self.counts["hashed"] += 1

    def _check_results(self, lm: "LanguageModel") -> None:
        score = lm.score_split().nll
        text = lm.generate(PROMPT, max_tokens=20, seed=1).text
        if score != self.metrics.scores.get(lm.step, score):
            raise Wrong(f"step {lm.step}: scored {score!r}, the training {self.metrics.scores[lm.step]!r}")
        self.counts["scores as trained"] += lm.step in self.metrics.scores
        before = self.found.setdefault(lm.step, (score, text))
        if (score, text) != before:
            raise Wrong(f"step {lm.step}: score and text were {before!r}, are {(score, text)!r}")
        self.counts["repeated"] += before[1] is not text
        steps = list_checkpoints(self.run)
        # While one is saved, it is there before those that go for it have gone; the best stays as well.
        if len(steps) > KEEP + 2:
            raise Wrong(f"{len(steps)} checkpoints are there: {steps}")
        self.found = {step: result for step, result in self.found.items() if step in steps}

    def command(self, number: int) -> None:
        """Call one of the commands that read runs."""
        which, folder = ("best", "last")[number // 4 % 2], self.run.folder
        if number % 4 == 0:
            shown = self._call(
                "eval", "--run", folder, "--checkpoint", which, "--device", "cpu", "--threads", 1
            )
            self._known_score(shown["step"], shown["rows"][0]["nll"])
        elif number % 4 == 1:
            options = ["--prompt", PROMPT, "--max-tokens", 20, "--seed", 1, "--device", "cpu", "--threads", 1]
            shown = self._call("generate", "--run", folder, "--checkpoint", which, *options)
            if shown["tokens"] != 20:
                raise Wrong(f"generate: made {shown['tokens']} tokens of 20")
        elif number % 4 == 2:
            (shown,) = self._call("runs", folder.parent)
            self.metrics.read_on()
            if shown["step"] not in self.metrics.saved or shown["best_step"] not in {
                *self.metrics.bests,
                None,
            }:
                raise Wrong(f"runs: shows step {shown['step']} and best {shown['best_step']}")
            self._known_score(shown["best_step"], shown["best_nll"])
        else:
            shown = {line["key"]: line["value"] for line in self._call("config", "--run", folder)}
            if shown["train.keep"] != KEEP:
                raise Wrong(f"config: shows keep {shown['train.keep']}")
        self.counts["commands"] += 1

    def _known_score(self, step: int | None, nll: float) -> None:
        self.metrics.read_on()
        if step in self.metrics.scores and self.metrics.scores[step] != nll:
            raise Wrong(
                f"step {step}: a command shows {nll!r}, the training scored {self.metrics.scores[step]!r}"
            )

    def _call(self, *args: object) -> Any:
        done = subprocess.run(program(*args, "--json"), cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise Wrong(f"txl {args[0]}: exit status {done.returncode}; {last_line(done.stderr)}")
        return json.loads(done.stdout)


def read_until_told(run: Run) -> int:
    """Read the run until standard input ends; print what was read, or what was wrong."""
    reader, n_passes = Reader(run), 0
    try:
        while not select.select([sys.stdin], [], [], 0)[0]:
            reader.read("last")
            reader.read("best")
            if n_passes % PASSES_A_COMMAND == 0:
                reader.command(n_passes // PASSES_A_COMMAND)
            n_passes += 1
    except (Wrong, UserError) as error:
        say(" ".join(str(error).split()))
        return 1
    say(" · ".join(f"{count:,} {name}" for name, count in reader.counts.items()))
    return 0


# The whole


def program(*args: object) -> list[str]:
    """Return the command line of the program with these arguments."""
    return [sys.executable, "-m", "txlcli", *map(str, args)]


def last_line(text: str) -> str:
    """Return the last line that is not empty."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "(nothing printed)")


@contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a command while the block runs; whatever ends the block, no process of it is left.

    It has a session of its own, so that the terminal's Ctrl-C reaches this process alone.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=env, text=True, start_new_session=True, **options)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def soak(folder: Path, minutes: float) -> Iterator[Row]:
    """Train and read for so long, yielding what is compared.

    Raises:
        Wrong: something went wrong before there was anything to compare, or after.
    """
    chooser, corpus, run = random.Random(0), folder / "words.txt", Run(folder / "runs" / "run")
    corpus.write_text("".join(" ".join(chooser.choices(WORDS, k=8)) + ".\n" for _ in range(1500)))
    printed = folder / "printed"
    with printed.open("w") as out:
        training = program("train", corpus, "--out", run.folder, *FLAGS)
        reading = [sys.executable, "-m", "tests.soak", "--read", str(run.folder)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with started(training, stdin=subprocess.DEVNULL, stdout=out, stderr=out) as trainer:
            while not list_checkpoints(run):
                _refuse_end(trainer, printed)
                time.sleep(0.1)
            with started(reading, **pipes) as reader:
                samples = _watch(run, trainer, reader, printed, minutes)
                trainer.send_signal(signal.SIGINT)
                code = _await(trainer, "training")
                if code != 128 + signal.SIGINT:
                    raise Wrong(f"training: interrupted, ended with {code}; {last_line(printed.read_text())}")
                assert reader.stdin is not None
                assert reader.stdout is not None
                reader.stdin.close()
                code, said = _await(reader, "reading"), last_line(reader.stdout.read())
                if code:
                    raise Wrong(f"reading: {said}")
                say(said)
    for name, taken in samples.items():
        yield from compare(name, taken)
    _resume(run)


def _await(process: "subprocess.Popen[str]", name: str) -> int:
    """Wait for the end of a process that was asked to end; return its exit code."""
    try:
        return process.wait(END_S)
    except subprocess.TimeoutExpired:
        raise Wrong(f"{name}: asked to end, still there after {END_S} s") from None


def _watch(
    run: Run, trainer: "subprocess.Popen[str]", reader: "subprocess.Popen[str]", printed: Path, minutes: float
) -> dict[str, list[Sample]]:
    end = time.monotonic() + 60 * minutes
    pause_s = min(max(60 * minutes / 120, 1.0), 5.0)
    samples: dict[str, list[Sample]] = {"training": [], "reading": []}
    while time.monotonic() < end:
        time.sleep(pause_s)
        _refuse_end(trainer, printed)
        if reader.poll() is not None:
            assert reader.stdout is not None
            raise Wrong(f"reading: {last_line(reader.stdout.read())}")
        tokens = trained_tokens(run)
        with suppress(OSError, KeyError):  # one that has just ended has no memory; said at the next look
            samples["training"].append(measure(trainer.pid, tokens))
            samples["reading"].append(measure(reader.pid))
    return samples


def _refuse_end(trainer: "subprocess.Popen[str]", printed: Path) -> None:
    if trainer.poll() is not None:
        raise Wrong(f"training: ended by itself with {trainer.returncode}; {last_line(printed.read_text())}")


def _resume(run: Run) -> None:
    """Resume the run for some steps and look at all that it then is."""
    interrupted_at = list_checkpoints(run)[-1]
    stop = interrupted_at + RESUMED_STEPS
    resuming = program("train", "--resume", run.folder, "--stop-at", stop)
    with started(resuming, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as trainer:
        said = trainer.communicate()[0]
        if trainer.returncode:
            raise Wrong(f"resuming: exit status {trainer.returncode}; {last_line(said)}")
    metrics, steps = Metrics(run), list_checkpoints(run)
    metrics.read_on()
    if steps[-1] != stop or metrics.n_bytes != run.metrics_path.stat().st_size:
        raise Wrong(f"resumed: last is step {steps[-1]}, not {stop}, or metrics.jsonl ends within a line")
    if not set(steps) <= metrics.saved or read_pointers(run).best != max(metrics.bests):
        raise Wrong(
            f"resumed: steps {steps} and best {read_pointers(run).best} are not those of metrics.jsonl"
        )
    for step in steps:
        if fault := find_damage(run.checkpoint_path(step), with_state=True):
            raise Wrong(f"resumed: {fault}")
    left = [path.name for path in run.folder.rglob("*") if path.name.endswith(".tmp") or path.name == ".lock"]
    if left:
        raise Wrong(f"resumed: left behind {', '.join(left)}")
    say(
        f"{interrupted_at:,} steps, {len(metrics.scores):,} evaluations, {len(metrics.bests):,} better, "
        f"{len(metrics.saved):,} checkpoints, {metrics.n_bytes:,} bytes of metrics; resumed to step {stop:,}"
    )


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _end(number: int, frame: FrameType | None) -> None:
    """Let the blocks that are open end processes and remove files, which a second signal must not cut."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=40.0, help="how long; at least 1 [default: 40]")
    parser.add_argument("--read", metavar="RUN", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.read is not None:
        return read_until_told(Run(asked.read))
    if not asked.minutes >= 1:
        parser.error(f"--minutes: must be 1 or more; got {asked.minutes:g}")
    if not Path("/proc/self/fd").is_dir():
        parser.error("needs Linux, whose /proc it reads")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    try:
        with tempfile.TemporaryDirectory(prefix="txl-soak-") as folder:
            rows = []
            say(f"{'':40} {'first quarter':>15} {'last quarter':>15}")
            for row in soak(Path(folder), asked.minutes):
                say(f"{row.what:40} {row.first:15,.1f} {row.last:15,.1f} {row.last / row.first - 1:+8.1%}")
                rows.append(row)
            if faults := [row.fault for row in rows if row.fault is not None]:
                raise Wrong("; ".join(faults))
    except Wrong as wrong:
        sys.stderr.write(f"error: {wrong}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
