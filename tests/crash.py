"""Calls that change files, made to fail or to end the process, and what is on the disk afterwards.

As a program it runs command lines, each in a process of its own that is there at once: it reads a JSON object
a line, forks, and writes the child's number; asked by an empty line it waits for it and writes its exit code.
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.stores import content_of

# Where one of these calls another, as Path.rename calls os.rename, only the outer one counts.
_OF_OS = ("fsync", "rename", "replace", "unlink", "remove", "mkdir", "rmdir", "ftruncate", "link", "write")
_OF_PATH = ("rename", "replace", "unlink", "mkdir", "rmdir")


class Calls:
    """Counts the calls that change files; one of them does something else than what it should.

    Attributes:
        names: What was called, in order.
    """

    def __init__(self, at: int | None = None, instead: Callable[[], None] = lambda: None) -> None:
        """Make call number `at` do `instead`, which raises or does not return; a write first does half."""
        self.names: list[str] = []
        self._at, self._instead, self._is_inside = at, instead, False

    def make(self, name: str, real: Callable[..., Any], *args: Any, **rest: Any) -> Any:
        if self._is_inside:
            return real(*args, **rest)
        self.names.append(name)
        self._is_inside = True
        try:
            if len(self.names) - 1 == self._at:
                if name == "write":
                    *before, data = args
                    real(*before, data[: len(data) // 2])
                self._instead()
            return real(*args, **rest)
        finally:
            self._is_inside = False


class _File:
    """An open file whose writes count."""

    def __init__(self, file: Any, calls: Calls) -> None:
        self._file, self._calls = file, calls

    def write(self, data: Any) -> Any:
        return self._calls.make("write", self._write_through, data)

    def _write_through(self, data: Any) -> int:
        written: int = self._file.write(data)
        self._file.flush()
        return written

    def truncate(self, size: int) -> Any:
        return self._calls.make("truncate", self._file.truncate, size)

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def counted(calls: Calls) -> Iterator[Calls]:
    """Let all calls that change files go through `calls` while the block runs."""
    with pytest.MonkeyPatch.context() as patch:

        def through(owner: Any, name: str) -> None:
            real = getattr(owner, name)
            patch.setattr(owner, name, lambda *args, **rest: calls.make(name, real, *args, **rest))

        for name in _OF_OS:
            through(os, name)
        for name in _OF_PATH:
            through(pathlib.Path, name)
        real_os_open, real_open = os.open, pathlib.Path.open

        def os_open(path: Any, flags: int, *args: Any, **rest: Any) -> int:
            if flags & os.O_CREAT:
                return calls.make("open", real_os_open, path, flags, *args, **rest)  # type: ignore[no-any-return]
            return real_os_open(path, flags, *args, **rest)

        def path_open(path: Path, mode: str = "r", *args: Any, **rest: Any) -> Any:
            if not set(mode) & set("wax+"):
                return real_open(path, mode, *args, **rest)
            return _File(calls.make("open", real_open, path, mode, *args, **rest), calls)

        patch.setattr(os, "open", os_open)
        patch.setattr(pathlib.Path, "open", path_open)
        yield calls


def count(work: Callable[[], object]) -> list[str]:
    """Do some work and return its calls."""
    with counted(Calls()) as calls:
        work()
    return calls.names


def fail(work: Callable[[], object], at: int, number: int) -> Exception | None:
    """Do some work of which a call fails with an error of the system; return what it raised."""

    def refuse() -> None:
        raise OSError(number, os.strerror(number))

    with counted(Calls(at, refuse)):
        try:
            work()
        except Exception as error:
            return error
    return None


def kill(work: Callable[[], object], at: int) -> None:
    """Do some work in a forked child that is killed at a call, as by `kill -9`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of threads, of which the child has none but its own
        child = os.fork()
    if child == 0:
        try:
            with counted(Calls(at, lambda: os.kill(os.getpid(), signal.SIGKILL))):
                work()
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def tree(folder: Path) -> dict[str, bytes | None]:
    """Return all files of a folder with their bytes, and its folders; what chance and time make left out."""
    found: dict[str, bytes | None] = {}
    for path in sorted(folder.rglob("*")):
        name = re.sub(r"\.[0-9a-f]{8}\.tmp", ".tmp", path.relative_to(folder).as_posix())
        if path.name != ".lock":
            found[name] = path.read_bytes() if path.is_file() else None
            if name == "data/store.json":
                found[name] = content_of(path.read_bytes())
    return found


class Commands:
    """The program, each of whose command lines runs in a process of its own that starts at once."""

    def __init__(self) -> None:
        root = Path(__file__).parent.parent
        env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        pipe = subprocess.PIPE
        self._server = subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, env=env)
        self._read()

    def start(self, *args: object, kill_at: int | None = None) -> int:
        """Start a command line and return its process; it may be killed at one of its calls.

        What it prints goes to the file `printed` of the working folder.
        """
        return self._ask({"args": [str(arg) for arg in args], "folder": str(Path.cwd()), "kill_at": kill_at})

    def wait(self) -> int:
        """Wait for the end of what was started; return its exit code, or minus the signal that ended it.

        Until then its number is its own, even if it has ended.
        """
        return self._ask(None)

    def _ask(self, request: dict[str, Any] | None) -> int:
        assert self._server.stdin is not None
        self._server.stdin.write(b"\n" if request is None else json.dumps(request).encode() + b"\n")
        self._server.stdin.flush()
        return self._read()

    def _read(self) -> int:
        assert self._server.stdout is not None
        return int(self._server.stdout.readline())

    def close(self) -> None:
        self._server.kill()  # quicker than its own end, and it has nothing to lose
        self._server.communicate()


def _serve() -> None:
    # What takes long to import. Nothing of it runs here, so that forking is safe.
    import txlcli.cli
    import txlcli.train  # noqa: F401
    from txlcli import __main__ as program

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, program._end)  # as in a child from its first moment on
    answer, child = 0, 0
    while True:
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()
        line = sys.stdin.readline()
        if not line:
            return
        if not line.strip():
            answer = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            continue
        request = json.loads(line)
        answer = child = os.fork()
        if child == 0:
            os.chdir(request["folder"])
            with Path("printed").open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            with counted(Calls(request["kill_at"], lambda: os.kill(os.getpid(), signal.SIGKILL))):
                sys.argv = ["txl", *request["args"]]
                program.main()


if __name__ == "__main__":
    _serve()
