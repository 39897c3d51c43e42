"""One process writes to a run, the others are told which; its lock ends with it, and readers need none."""

import errno
import fcntl
import json
import os
import platform
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.test_cli import refusal
from tests.test_resume import go_on, texts
from tests.test_train import TINY, make_run, train_run, write_corpus
from txlcli import UserError, checkpoint, files
from txlcli.api import load
from txlcli.config import from_flags
from txlcli.run import Run, describe_run, list_checkpoints, writing
from txlcli.train import Finished, Ready, begin, evaluating, resume, train


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluating, "SAMPLE_TOKENS", 3)


def refused(folder: Path, process: int) -> str:
    """Return the line for who comes second."""
    return (
        f"{folder}: is being written by process {process} on {platform.node()}; "
        "wait until that ends, or stop it there"
    )


def start_run(folder: Path) -> Ready:
    ready = make_run(folder)
    list(train(ready.run, ready.config, stop_at=3))
    return ready


@contextmanager
def another_process_holds(run: Run) -> Iterator[int]:
    """Let a forked child hold the lock until it is killed, as by `kill -9`."""
    reading, written = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of threads, of which the child has none but its own
        child = os.fork()
    if child == 0:
        try:
            with writing(run):
                os.write(written, b"x")
                signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(reading, 1) == b"x"
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(written)


def test_who_comes_second_is_told_who_is_there(tmp_path: Path) -> None:
    ready = start_run(tmp_path)
    run = ready.run
    (run.checkpoints_folder / ".step-0000009.01234567.tmp").mkdir()  # the other may be writing it
    with another_process_holds(run) as process:
        for work in (
            lambda: list(train(run, ready.config)),
            lambda: list(resume(run, {})),
        ):
            with pytest.raises(UserError) as caught:
                work()
            assert str(caught.value) == refused(run.folder, process)
        assert refusal("train", "--resume", run.folder) == refused(run.folder, process)
        assert (run.checkpoints_folder / ".step-0000009.01234567.tmp").exists()
        assert json.loads((run.folder / ".lock").read_text()) == {
            "host": platform.node(),
            "process": process,
        }
    # It was killed, and its lock with it, but not what it wrote.
    assert (run.folder / ".lock").exists()
    assert isinstance(go_on(run)[-1], Finished)
    assert not (run.folder / ".lock").exists()


def test_a_run_that_is_trained_is_not_trained_twice_in_one_process_either(tmp_path: Path) -> None:
    ready = make_run(tmp_path)
    first = train(ready.run, ready.config)
    next(first)
    with pytest.raises(UserError) as caught:
        list(resume(ready.run, {}))
    assert str(caught.value) == refused(ready.run.folder, os.getpid())
    first.close()  # type: ignore[attr-defined]
    assert not (ready.run.folder / ".lock").exists()
    assert isinstance(go_on(ready.run)[-1], Finished)


def test_a_run_that_is_prepared_is_left_alone(tmp_path: Path) -> None:
    corpus, folder = write_corpus(tmp_path), tmp_path / "run"
    settings = from_flags({**TINY, "corpus": (str(corpus),)})
    first = begin(settings, out=folder)
    next(first)
    with pytest.raises(UserError) as caught:
        list(resume(Run(folder), {}))
    assert str(caught.value) == refused(folder, os.getpid())
    assert (folder / "config.yaml").exists()
    assert isinstance(list(first)[-1], Ready)
    assert not (folder / ".lock").exists()


def test_two_that_begin_in_one_folder_at_once_do_not_discard_each_other(tmp_path: Path) -> None:
    corpus, folder = write_corpus(tmp_path), tmp_path / "run"
    folder.mkdir()
    with another_process_holds(Run(folder)) as process, pytest.raises(UserError) as caught:
        list(begin(from_flags({**TINY, "corpus": (str(corpus),)}), out=folder))
    assert str(caught.value) == refused(folder, process)
    assert folder.exists()


def test_what_a_dead_writer_wrote_of_itself_does_not_count(tmp_path: Path) -> None:
    run = start_run(tmp_path).run
    for left in (b"", b"[" * 100_000, b'{"process": 1, "host": "elsewhere"}', b"\xff\0"):
        (run.folder / ".lock").write_bytes(left)
        with writing(run) as notice:
            assert notice is None
            assert json.loads((run.folder / ".lock").read_text())["process"] == os.getpid()
        assert not (run.folder / ".lock").exists()


@pytest.mark.parametrize("left", [b"", b"x", b"[]", b'{"process": "many", "host": 1}', b'{"process": 1}'])
def test_a_lock_that_does_not_say_whose_it_is_locks(tmp_path: Path, left: bytes) -> None:
    with files.locked(tmp_path / ".lock", "a"):
        (tmp_path / ".lock").write_bytes(left)
        with pytest.raises(UserError) as caught, files.locked(tmp_path / ".lock", "a"):
            pass
        assert str(caught.value) == (
            "a: is being written by another process; wait until that ends, or stop it there"
        )


def test_a_lock_on_a_file_that_has_just_been_removed_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, n_locked, real = tmp_path / ".lock", 0, fcntl.flock

    def flock(fd: int, how: int) -> None:
        nonlocal n_locked
        n_locked += 1
        real(fd, how)
        if n_locked == 1:
            path.unlink()  # its owner of before ends, and another one makes it anew
            path.write_bytes(b"")

    monkeypatch.setattr(fcntl, "flock", flock)
    with files.locked(path, "a") as has_lock:
        assert has_lock
        assert n_locked == 2
        with pytest.raises(UserError, match=f"^a: is being written by process {os.getpid()} on "):
            files.locked(path, "a").__enter__()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    ready = start_run(tmp_path)

    def flock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert texts(go_on(ready.run)) == [
        f"{ready.run.folder}: its file system has no locks; see to it that nothing else trains it meanwhile"
    ]


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EIO])
def test_a_run_that_cannot_be_written_to_is_not_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    ready, real = start_run(tmp_path), os.open

    def refuse(path: Any, flags: int, *args: Any, **rest: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(number, os.strerror(number))
        return real(path, flags, *args, **rest)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UserError) as caught:
        go_on(ready.run)
    assert str(caught.value) == (
        f"{ready.run.folder / '.lock'}: cannot be written; {os.strerror(number).lower()}"
    )


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / ".lock").symlink_to("precious")
    with pytest.raises(UserError, match=r"/\.lock: cannot be written; too many levels of symbolic links$"):
        files.locked(tmp_path / ".lock", "a").__enter__()
    assert (tmp_path / "precious").read_text() == "mine"


def test_readers_need_no_lock_and_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start_run(tmp_path).run
    before = sorted((str(path), path.stat().st_mtime_ns) for path in run.folder.rglob("*"))

    def refuse(*_: Any) -> None:
        raise AssertionError("a reader takes no lock")

    monkeypatch.setattr(files, "_open_locked", refuse)
    with writing_in_vain(run):
        lm = load(run.folder)
        lm.generate("the", max_tokens=3)
        lm.score_split("valid")
        describe_run(run)
    assert sorted((str(path), path.stat().st_mtime_ns) for path in run.folder.rglob("*")) == before


@contextmanager
def writing_in_vain(run: Run) -> Iterator[None]:
    """Make whatever would be written into a run's folder fail, as on a file system that is read-only."""
    real = Path.open

    def refuse(path: Path, mode: str = "r", *args: Any, **rest: Any) -> Any:
        if run.folder in path.parents and set(mode) & set("wax+"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, mode, *args, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        yield


# Readers while a training saves and deletes


@pytest.mark.parametrize("which", ["best", "last"])
def test_a_step_that_goes_at_any_moment_while_it_is_read_is_looked_for_again(
    tmp_path: Path, which: str
) -> None:
    run, _ = train_run(tmp_path, n_layer=1, d_model=8)
    later = tmp_path / "later"
    shutil.copytree(run.folder, later)
    later_pointers = (later / "pointers.json").read_bytes().replace(b'"best": 6', b'"best": 12')

    def go_back() -> None:
        shutil.rmtree(run.folder)
        shutil.copytree(later, run.folder)
        shutil.rmtree(run.checkpoint_path(12))
        files.write_whole(run.pointers_path, b'{"best": 6, "best_nll": 1.0, "last": 6}')

    def move_on() -> None:
        # As a training does: it saves, points to that, and deletes.
        shutil.copytree(later / "checkpoints/step-0000012", run.checkpoint_path(12))
        files.write_whole(run.pointers_path, later_pointers)
        shutil.rmtree(run.checkpoint_path(6))

    def read(at: int | None) -> int:
        """Load the model, with the training moving on before a certain look at the disk; count the looks."""
        n_looks, is_moving = 0, False

        def look(real: Callable[..., Any]) -> Callable[..., Any]:
            def look_later(*args: Any, **rest: Any) -> Any:
                nonlocal n_looks, is_moving
                if not is_moving:
                    n_looks, is_moving = n_looks + 1, True
                    if n_looks - 1 == at:
                        move_on()
                    is_moving = False
                return real(*args, **rest)

            return look_later

        with pytest.MonkeyPatch.context() as patch:
            for owner, name in ((Path, "stat"), (Path, "iterdir"), (os, "open"), (checkpoint, "safe_open")):
                patch.setattr(owner, name, look(getattr(owner, name)))
            loaded = checkpoint.load_model(run, which)
        assert loaded.step in (6, 12)
        assert loaded.damage is None
        return n_looks

    go_back()
    n_looks = read(None)
    assert n_looks > 15
    for at in range(n_looks):
        go_back()
        read(at)
        assert list_checkpoints(run) == [12]


def test_looking_again_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = train_run(tmp_path)
    n_times = 0

    def gone(path: Path, **_: Any) -> Any:
        nonlocal n_times
        n_times += 1
        (run.checkpoints_folder / f"step-{100 + n_times:07d}").mkdir()
        raise UserError(f"{path}: cannot be read; no such file or directory")

    monkeypatch.setattr(checkpoint, "open_tensors", gone)
    with pytest.raises(UserError, match="no such file or directory"):
        checkpoint.load_model(run, "12")
    assert n_times == checkpoint._READS
