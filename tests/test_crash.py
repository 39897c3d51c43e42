"""Whatever call a command dies or fails at, its run is the old one or the new one, and goes on exactly."""

import errno
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.crash import Commands, count, fail, kill, tree
from tests.test_resume import assert_equal_ends
from tests.test_train import TINY, make_run, metrics, write_corpus
from txlcli import UserError
from txlcli.checkpoint import find_damage, load_model
from txlcli.config import from_flags
from txlcli.data import origin
from txlcli.run import Run, list_checkpoints, open_run, read_asked, sweep_run
from txlcli.train import Event, Ready, begin, evaluating, loop, resume, train

SETTINGS = {"n_layer": 1, "d_model": 8, "n_head": 1, "steps": 4, "eval_every": 2, "save_every": 1, "keep": 1}


@pytest.fixture(autouse=True)
def _short_and_timeless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluating, "SAMPLE_TOKENS", 1)
    # With a clock that stands still all files of equal runs are equal.
    still = SimpleNamespace(monotonic=lambda: 0.0, perf_counter=lambda: 0.0)
    monkeypatch.setattr(loop, "time", still)
    # A store records times of the text only where that is older than the clock's steps: here always.
    monkeypatch.setattr(origin, "CLOCK_NS", -(10**18))


def go_on(run: Run) -> list[Event]:
    """Resume a run to its end."""
    events = list(resume(run, {}))
    if events and isinstance(events[-1], Ready):
        events += train(run, events[-1].config)
    return events


def break_everywhere(folder: Path, work: Callable[[], object], go_on: Callable[[], object]) -> list[str]:
    """Make each call of some work fail, and die; look at the run each time, and go on to the end.

    Args:
        folder: What the work starts from and changes; it may be absent.
        work: The work.
        go_on: Brings whatever the work has left to the end that the work undisturbed comes to.

    Returns:
        The calls.
    """
    before = folder.with_name(f"{folder.name} before")
    if folder.exists():
        shutil.copytree(folder, before)
    names = count(work)
    expected, seen = tree(folder), list[dict[str, bytes | None]]()
    assert not any(name.endswith(".tmp") for name in expected)

    def restart() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        if before.exists():
            shutil.copytree(before, folder)

    def check() -> None:
        found = tree(folder)
        if found in seen:
            return
        seen.append(found)
        run = Run(folder)
        for step in list_checkpoints(run):
            assert find_damage(run.checkpoint_path(step), with_state=True) is None
        if list_checkpoints(run):
            load_model(run, "best")
            load_model(run, "last")
        go_on()
        assert tree(folder) == expected

    for at in range(len(names)):
        restart()
        kill(work, at)
        check()
        restart()
        error = fail(work, at, errno.EIO if at % 2 else errno.ENOSPC)
        assert error is None or isinstance(error, UserError)
        assert "\n" not in str(error)
        check()
    return names


def test_training(tmp_path: Path) -> None:
    ready = make_run(tmp_path, **SETTINGS)
    run, config = ready.run, ready.config
    list(train(run, config, stop_at=3))
    answers = iter([False, True])  # the second question is asked in the evaluation after the last step
    list(train(run, config, should_stop=lambda: next(answers, True)))
    assert list_checkpoints(run) == [2, 4]

    def end() -> None:
        # What is to be replaced is there until what replaces it is.
        sweep_run(run)
        assert list_checkpoints(run)[-1] == 4
        go_on(run)

    # What is left to do is that evaluation, step 4 again, which is the best, and to delete step 2.
    names = break_everywhere(run.folder, lambda: list(train(run, config)), end)
    assert list_checkpoints(run) == [4]
    assert {"open", "write", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir"} <= set(names)


def test_preparing(tmp_path: Path) -> None:
    corpus, folder = write_corpus(tmp_path), tmp_path / "run"
    settings = from_flags({**TINY, **SETTINGS, "tokenizer": "char", "corpus": (str(corpus),)})

    def work() -> None:
        assert isinstance(list(begin(settings, out=folder))[-1], Ready)

    def go_on() -> None:
        if not (folder / "config.yaml").exists():
            work()
        else:
            assert isinstance(list(resume(open_run(folder), {}))[-1], Ready)

    break_everywhere(folder, work, go_on)


@pytest.mark.slow
def test_preparing_again_and_changing_settings(tmp_path: Path) -> None:
    ready = make_run(tmp_path, **SETTINGS)

    def work() -> None:
        assert isinstance(list(resume(ready.run, from_flags({"keep": 3})))[-1], Ready)

    break_everywhere(ready.run.folder, work, work)
    ready.run.config_path.write_text(
        "# As asked for; the text is yet to be prepared, and what this leaves open to be planned.\n"
        + ready.run.config_path.read_text()
    )
    assert read_asked(ready.run) is False
    shutil.rmtree(tmp_path / "run before")
    break_everywhere(ready.run.folder, work, work)


# Whole commands, really killed

FLAGS = [
    *("--tokenizer", "char", "--n-layer", 1, "--d-model", 8, "--n-head", 1, "--tgt-len", 8, "--mem-len", 8),
    *("--batch-size", 4, "--dropout", 0.1, "--optimizer", "adamw", "--device", "cpu", "--precision", "fp32"),
    *("--steps", 9, "--eval-every", 6, "--save-every", 2, "--log-every", 1, "--eval-tokens", 20),
]


@pytest.fixture
def commands() -> Iterator[Commands]:
    server = Commands()
    yield server
    server.close()


def next_command(corpus: Path, folder: Path) -> list[object]:
    """Return what a user does whose training has died: resume it if it is a run already."""
    is_run = (folder / "config.yaml").exists()
    return ["train", "--resume", folder] if is_run else ["train", corpus, *FLAGS, "--out", folder]


def assert_ended_as(run: Run, straight: Run, *, is_saved_more_often: bool = False) -> None:
    """Compare all that a training leaves but for times."""
    assert_equal_ends(straight, run)
    assert list_checkpoints(run) == list_checkpoints(straight)
    lines = [
        [line for line in metrics(one, timeless=True) if line["event"] != "save" or not is_saved_more_often]
        for one in (run, straight)
    ]
    assert lines[0] == lines[1]
    assert run.config_path.read_bytes() == straight.config_path.read_bytes()
    assert set(tree(run.folder)) == set(tree(straight.folder))


def train_straight(commands: Commands, corpus: Path, folder: Path) -> tuple[Run, float]:
    """Train undisturbed; return the run and the seconds that it took."""
    began = time.perf_counter()
    commands.start(*next_command(corpus, folder))
    assert commands.wait() == 0
    return open_run(folder), time.perf_counter() - began


@pytest.mark.parametrize("n_kills", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_at_random_moments_and_resumed_is_not_killed(
    tmp_path: Path, commands: Commands, n_kills: int
) -> None:
    corpus, chooser = write_corpus(tmp_path), random.Random(n_kills)
    straight, took_s = train_straight(commands, corpus, tmp_path / "straight")
    n_killed = n_runs = 0
    while n_killed < n_kills:
        folder, code = tmp_path / f"run {n_runs}", 1
        n_runs += 1
        while code != 0:
            # Half of the moments are calls that change files, the others any.
            is_at_call = n_killed % 2 == 0
            args = next_command(corpus, folder)
            if n_killed >= n_kills:
                commands.start(*args)
            elif is_at_call:
                commands.start(*args, kill_at=chooser.randrange(100))
            else:
                process = commands.start(*args)
                time.sleep(chooser.uniform(0, took_s / 2))  # the rest is the interpreter's own end
                os.kill(process, signal.SIGKILL)
            code = commands.wait()
            assert code in (0, -signal.SIGKILL), Path("printed").read_text()
            n_killed += code != 0
        assert_ended_as(open_run(folder), straight)
        shutil.rmtree(folder)


@pytest.mark.slow
def test_signals_at_random_moments_end_in_seconds_and_resume_exactly(
    tmp_path: Path, commands: Commands
) -> None:
    corpus, chooser = write_corpus(tmp_path), random.Random(0)
    straight, took_s = train_straight(commands, corpus, tmp_path / "straight")
    n_signals = n_runs = 0
    while n_signals < 40:
        folder, code = tmp_path / f"run {n_runs}", 1
        n_runs += 1
        while code != 0:
            process = commands.start(*next_command(corpus, folder))
            number = chooser.choice([signal.SIGINT, signal.SIGTERM])
            time.sleep(chooser.uniform(0, took_s))
            os.kill(process, number)
            sent = time.perf_counter()
            code = commands.wait()
            assert time.perf_counter() - sent < 10
            printed = Path("printed").read_text()
            # While the interpreter itself is ending there is no handler any more.
            assert code in (0, 128 + number) or (code == -number and "done  step" in printed), printed
            assert "Traceback" not in printed
            n_signals += code != 0
        assert_ended_as(open_run(folder), straight, is_saved_more_often=True)
        shutil.rmtree(folder)
