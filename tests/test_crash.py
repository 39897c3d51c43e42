"""Whatever call a command dies or fails at, its run is the old one or the new one, and goes on exactly."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.crash import count, fail, kill, tree
from tests.test_train import TINY, make_run, write_corpus
from txlcli import UserError
from txlcli.checkpoint import find_damage, load_model
from txlcli.config import from_flags
from txlcli.data import origin
from txlcli.run import Run, list_checkpoints, open_run, read_asked
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
    list(train(ready.run, ready.config, stop_at=3))
    names = break_everywhere(
        ready.run.folder, lambda: list(train(ready.run, ready.config)), lambda: go_on(ready.run)
    )
    assert {"open", "write", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir"} <= set(names)


def test_saving_a_step_again_where_it_is_the_only_one(tmp_path: Path) -> None:
    ready = make_run(tmp_path, **{**SETTINGS, "eval_every": 4})
    run, config = ready.run, ready.config
    list(train(run, config, stop_at=3))
    answers = iter([False, True])  # the second question is asked in the evaluation after the last step
    list(train(run, config, should_stop=lambda: next(answers, True)))
    assert list_checkpoints(run) == [4]
    break_everywhere(run.folder, lambda: list(train(run, config)), lambda: go_on(run))


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
