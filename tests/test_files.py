"""Files appear whole or not at all; reads know their bound."""

import errno
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from txlcli import UserError, files


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_write_whole_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write_whole(path, b"old")
    files.write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["a.json"]


def test_written_files_have_the_usual_mode(tmp_path: Path) -> None:
    files.write_whole(tmp_path / "a", b"")
    (tmp_path / "b").write_bytes(b"")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_long_and_foreign_names_fit(tmp_path: Path) -> None:
    path = tmp_path / ("紅" * 85)
    files.write_whole(path, b"x")
    assert path.read_bytes() == b"x"


@pytest.mark.parametrize("error", [ValueError("bug"), KeyboardInterrupt(), GeneratorExit()])
def test_open_whole_leaves_the_old_file_at_an_exception(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def write() -> None:
        with files.open_whole(path) as file:
            file.write(b"half")
            raise error

    with pytest.raises(type(error)):
        write()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_folder_whole_appears_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with files.folder_whole(path) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "a").write_bytes(b"1")
        assert not path.exists()
        assert folder.parent == tmp_path
    assert (path / "inner" / "a").read_bytes() == b"1"
    assert names(tmp_path) == ["data"]


def test_folder_whole_leaves_nothing_at_an_exception(tmp_path: Path) -> None:
    def fill() -> None:
        with files.folder_whole(tmp_path / "data") as folder:
            (folder / "a").write_bytes(b"1")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill()
    assert names(tmp_path) == []


def test_folder_whole_refuses_or_replaces_a_taken_name(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.mkdir()
    (path / "old").write_bytes(b"old")
    with (
        pytest.raises(UserError, match=r"data: exists already; remove it, or choose another name$"),
        files.folder_whole(path),
    ):
        pass
    assert names(path) == ["old"]
    with files.folder_whole(path, replace=True) as folder:
        (folder / "new").write_bytes(b"new")
    assert names(path) == ["new"]
    assert names(tmp_path) == ["data"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "none" / "a", tmp_path / "file" / "a"):
        with pytest.raises(UserError) as caught:
            files.write_whole(path, b"x")
        assert str(caught.value).startswith(f"{path}: cannot be written; ")
        with pytest.raises(UserError) as caught, files.folder_whole(path):
            pass
        assert str(caught.value).startswith(f"{path}: cannot be written; ")


def _failing(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_failed_flush_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", _failing)
    with pytest.raises(UserError, match=r"a: cannot be written; no space left on device$"):
        files.write_whole(path, b"new")
    with (
        pytest.raises(UserError, match=r"d: cannot be written; no space left on device$"),
        files.folder_whole(tmp_path / "d") as folder,
    ):
        (folder / "x").write_bytes(b"1")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # Python ignores SIGXFSZ, so the write just fails
    try:
        with pytest.raises(UserError, match=r"big: cannot be written; file too large$"):
            files.write_whole(tmp_path / "big", bytes(1 << 16))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == []


def test_an_error_about_another_file_keeps_its_own_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), files.open_whole(tmp_path / "a"):
        (tmp_path / "elsewhere" / "b").read_bytes()
    assert names(tmp_path) == []


def test_order_is_file_then_rename_then_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, log = tmp_path / "a", []
    real_fsync: Callable[[int], None] = os.fsync

    def fsync(fd: int) -> None:
        log.append(("folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "file", path.exists()))  # noqa: PTH112
        real_fsync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    files.write_whole(path, b"x")
    assert log == [("file", False), ("folder", True)]


def test_remove_leftovers_takes_only_temporary_names(tmp_path: Path) -> None:
    (tmp_path / ".a.12345678.tmp").write_bytes(b"")
    (tmp_path / ".data.12345678.tmp").mkdir()
    (tmp_path / ".data.12345678.tmp" / "x").write_bytes(b"")
    (tmp_path / "notes.tmp").write_bytes(b"")
    (tmp_path / ".hidden").write_bytes(b"")
    assert files.remove_leftovers(tmp_path) == []
    assert names(tmp_path) == [".hidden", "notes.tmp"]


def test_what_cannot_be_removed_is_returned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".a.12345678.tmp").write_bytes(b"")
    (tmp_path / ".b.12345678.tmp").mkdir()
    (tmp_path / ".c.12345678.tmp").write_bytes(b"")
    plain = Path.unlink

    def refuse(path: Path) -> None:
        if path.name.startswith(".a."):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        plain(path)

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: None)
    left = files.remove_leftovers(tmp_path)
    assert left == [tmp_path / ".a.12345678.tmp", tmp_path / ".b.12345678.tmp"]
    assert names(tmp_path) == [".a.12345678.tmp", ".b.12345678.tmp"]


def test_a_folder_that_cannot_be_removed_takes_no_name_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: None)
    for text in ("one", "two", "three"):
        with files.folder_whole(tmp_path / "d", replace=True) as folder:
            (folder / "x").write_text(text)
    assert (tmp_path / "d" / "x").read_text() == "three"
    files.discard_folder(tmp_path / "d")
    monkeypatch.undo()
    assert len(names(tmp_path)) == 3
    assert files.remove_leftovers(tmp_path) == []
    assert names(tmp_path) == []  # and none of them took the name again


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (PermissionError(errno.EACCES, "no"), True),
        (OSError(errno.EIO, "no"), True),
        (FileNotFoundError(errno.ENOENT, "no"), False),
        (NotADirectoryError(errno.ENOTDIR, "no"), False),
        (ValueError("no"), False),
        (None, False),
    ],
)
def test_what_may_not_be_read_is_not_what_is_not_there(cause: Exception | None, expected: bool) -> None:
    error = UserError("a: cannot be read")
    error.__cause__ = cause
    assert files.is_unreadable(error) is expected


def test_read_bounded(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert files.read_bounded(path, 5) == b"12345"
    with pytest.raises(UserError, match=r"a: too large; got 5 bytes, expected at most 4$"):
        files.read_bounded(path, 4)
    path.write_bytes(b"")
    assert files.read_bounded(path, 0) == b""


def test_read_bounded_names_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for path, text in (
        (tmp_path / "none", "cannot be read; no such file or directory"),
        (tmp_path, "is a folder, not a file"),
        (tmp_path / "pipe", "is a named pipe, not a file"),
        (Path("/dev/zero"), "is a device, not a file"),
        (tmp_path / "loop", "cannot be read; too many levels of symbolic links"),
        (Path("a\0b"), "cannot be read; a name cannot hold a NUL byte"),
    ):
        with pytest.raises(UserError) as caught:
            files.read_bounded(path, 10)
        assert str(caught.value) == f"{path}: {text}".replace("\0", "\\x00")


@settings(max_examples=50, deadline=None)
@given(data=st.binary(max_size=50), offset=st.integers(0, 60), n=st.integers(0, 60))
def test_read_at_is_a_slice(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, offset: int, n: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "slice"
    path.write_bytes(data)
    fd = files.open_regular(path)
    try:
        assert files.read_at(fd, n, offset) == data[offset : offset + n]
    finally:
        os.close(fd)


def test_read_at_goes_on_after_a_short_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(range(100)))
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n, offset: real(fd, min(n, 7), offset))
    fd = files.open_regular(path)
    try:
        assert files.read_at(fd, 50, 3) == bytes(range(3, 53))
    finally:
        os.close(fd)


def test_looking_at_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"x")
    status = files.look_at(tmp_path / "a")
    assert status is not None
    assert status.st_size == 1
    assert files.look_at(tmp_path / "b") is None
    assert files.look_at(tmp_path / "a" / "b") is None
    assert [files.is_folder(tmp_path / name) for name in ("", "a", "b")] == [True, False, False]
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    for name, error in (
        ("l" * 300, f"{'l' * 300}: cannot be read; file name too long"),
        ("loop", "loop: cannot be read; too many levels of symbolic links"),
        ("a\0b", r"'a\x00b': cannot be read; a name cannot hold a NUL byte"),
    ):
        for look in (files.look_at, files.is_folder):
            with pytest.raises(UserError) as caught:
                look(Path(name))
            assert str(caught.value) == error


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("folder", "folder: cannot be written; is a folder, not a file"),
        ("pipe", "pipe: cannot be written; is a named pipe, not a file"),
        ("l" * 300, f"{'l' * 300}: cannot be written; file name too long"),
    ],
)
def test_a_name_that_cannot_be_taken_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    os.mkfifo("pipe")
    with pytest.raises(UserError) as caught, files.open_whole(Path(name)):
        raise AssertionError("nothing may be computed for a file that cannot be")
    assert str(caught.value) == error
    assert names(tmp_path) == ["folder", "pipe"]
