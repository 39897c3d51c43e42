"""Files and folders that appear whole or not at all, and reads that know their bound.

What is written gets a hidden temporary name beside its target (`.NAME.XXXXXXXX.tmp`), is flushed to the
disk, and takes the target's name in one rename; then the folder's entry is flushed too. So a crash or a power
failure leaves the old file or the new one, never half a file under a real name; what a killed writer left
behind is cleared by `remove_leftovers`. A folder cannot be replaced in one rename: the old one is put aside
as `.NAME.old.tmp` first, and where the writer dies before the next call, `remove_leftovers` puts it back.

`locked` is how writers keep out of each other's way.
"""

import errno
import json
import os
import platform
import re
import secrets
import shlex
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from txlcli import UserError

_OLD = ".old.tmp"
_LOCKED_BYTE = 1 << 30


def describe_error(error: OSError | ValueError) -> str:
    """Name an operating-system error in lower-case words: `no space left on device`.

    A ValueError is what Python says of a name that no system can take, in words that change with its version.
    """
    if isinstance(error, ValueError):
        return "a name cannot hold a NUL byte"
    return (error.strerror or str(error) or type(error).__name__).lower()


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file whole or not at all, in place of what had this name.

    Raises:
        UserError: the place cannot be written to; what was there before is untouched.
    """
    with open_whole(path) as file:
        file.write(data)


@contextmanager
def open_whole(path: Path) -> Iterator[BinaryIO]:
    """Open a file that gets its name only when the block ends well; at an exception nothing is left.

    Raises:
        UserError: the place cannot be written to, or the disk is full; what was there before is untouched.
    """
    temporary = _temporary_name(path)
    # A rename would fail on a folder and on a name too long only after all the work, and replace a device.
    with _naming(path, temporary), suppress(FileNotFoundError):
        kind = describe_kind(path.stat().st_mode)
        if kind is not None:
            raise UserError(f"{path}: cannot be written; is {kind}, not a file")
    try:
        with _naming(path, temporary), temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        with _naming(path, temporary):
            temporary.replace(path)
            sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


@contextmanager
def folder_whole(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Fill a folder that gets its name only when the block ends well; at an exception nothing is left.

    Yields a temporary folder beside `path`. All that lies in it at the end is flushed to the disk before the
    rename. A folder that has the name already is refused, or with `replace` put aside just before the rename
    and removed after it.

    Raises:
        UserError: the place cannot be written to, the name is taken, or the disk is full.
    """
    if not replace and os.path.lexists(path):
        raise UserError(f"{path}: exists already; remove it, or choose another name")
    temporary = _temporary_name(path)
    try:
        with _naming(path, temporary):
            temporary.mkdir()
            yield temporary
            for folder, _, names in os.walk(temporary, topdown=False):
                for name in names:
                    _sync_file(Path(folder, name))
                sync_folder(Path(folder))
            _put_in_place(path, temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _put_in_place(path: Path, temporary: Path) -> None:
    """Give a folder its name, maybe that of another; where that fails, all is as before."""
    old = path.with_name(f".{path.name}{_OLD}")
    if os.path.lexists(old):
        discard_folder(old)
    if path.is_dir():
        path.rename(old)
    try:
        temporary.rename(path)
        sync_folder(path.parent)
    except BaseException:
        if path.is_dir():
            path.rename(temporary)
        if old.is_dir():
            old.rename(path)
        raise
    with suppress(OSError):
        discard_folder(old)


def discard_folder(path: Path) -> None:
    """Delete a folder so that what is half deleted never looks like it.

    What cannot go, as a file that somebody is reading, stays for `remove_leftovers`, under a temporary name
    that nothing else gets.
    """
    shutil.rmtree(path.rename(_temporary_name(path)), ignore_errors=True)


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove what writers that were killed left in this folder; only for its one writer of now.

    A folder that was put aside for one that never came gets its name back.

    Returns:
        What could not be removed.
    """
    left = []
    for path in sorted(folder.glob(".*.tmp")):
        if path.name.endswith(_OLD):
            home = path.with_name(path.name[1:].removesuffix(_OLD))
            if not os.path.lexists(home):
                path.rename(home)
                continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()
        if os.path.lexists(path):
            left.append(path)
    return left


@contextmanager
def locked(path: Path, what: str) -> Iterator[bool]:
    """Hold the system's lock on a file, which names this process, while the block runs.

    The lock ends with this process however that ends, so a file that is left behind locks nobody out. It is
    removed at the end.

    Args:
        path: The file.
        what: What is locked, for the message.

    Yields:
        Whether there is a lock: not every file system has them.

    Raises:
        UserError: another process holds it, whose number and machine are named; or the file cannot be made.
    """
    try:
        fd, has_lock = _open_locked(path, what)
    except OSError as error:
        raise UserError(f"{path}: cannot be written; {describe_error(error)}") from error
    try:
        # Whoever is refused reads this; the lock holds without.
        with suppress(OSError):
            os.ftruncate(fd, 0)
            os.write(fd, json.dumps({"host": platform.node(), "process": os.getpid()}).encode() + b"\n")
        yield has_lock
    finally:
        # Before the lock ends, so that nobody can hold a file that is about to go.
        with suppress(OSError):
            path.unlink()
        os.close(fd)


def _open_locked(path: Path, what: str) -> tuple[int, bool]:
    """Open a file and lock it; say whether the file system has locks."""
    # A link could lead to a file of the user's, which would then be written over.
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
    while True:
        fd = os.open(path, flags, 0o666)
        try:
            has_lock = _lock(fd)
            if has_lock is None:
                raise UserError(
                    f"{what}: is being written by {_read_owner(fd)}; wait until that ends, or stop it there"
                )
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(path)):  # noqa: PTH116
                    return fd, has_lock
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # its owner was just removing it, and this lock is on a file without a name


def _lock(fd: int) -> bool | None:
    """Lock an open file; None: another process has; False: its file system has no locks."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(fd, _LOCKED_BYTE, os.SEEK_SET)  # what is locked there cannot be read
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
            os.lseek(fd, 0, os.SEEK_SET)
        else:
            import fcntl

            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK):
            return None
        if error.errno in (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL):
            return False
        raise
    return True


def _read_owner(fd: int) -> str:
    try:
        owner = json.loads(read_at(fd, 1000, 0))
        return f"process {int(owner['process'])} on {str(owner['host'])[:100]}"
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return "another process"  # which has not written yet who it is


def is_unreadable(error: UserError) -> bool:
    """Say whether the system did not let something be read that may well be there and whole."""
    cause = error.__cause__
    return isinstance(cause, OSError) and not isinstance(cause, (FileNotFoundError, NotADirectoryError))


def read_bounded(path: Path, limit_bytes: int) -> bytes:
    """Read a whole file that has no business to be larger than the limit.

    Raises:
        UserError: it is missing, unreadable, no regular file, or larger; the message names it.
    """
    fd = open_regular(path)
    try:
        data = read_at(fd, limit_bytes + 1, 0)
        if len(data) > limit_bytes:
            size = os.fstat(fd).st_size
            raise UserError(f"{path}: too large; got {size:,} bytes, expected at most {limit_bytes:,}")
    except OSError as error:
        raise UserError(f"{path}: cannot be read; {describe_error(error)}") from error
    finally:
        os.close(fd)
    return data


def read_stdin(n_bytes: int = -1, *, is_line: bool = False) -> bytes:
    """Read so many bytes of standard input, or its next line; fewer bytes, or none, only at its end.

    Raises:
        UserError: it is closed, as a shell's `<&-` leaves it, or cannot be read.
    """
    if sys.stdin is None:
        raise UserError("-: standard input is closed; give a file, or send text to it")
    stdin = sys.stdin.buffer
    try:
        return stdin.readline(n_bytes) if is_line else stdin.read(n_bytes)
    except OSError as error:
        raise UserError(f"-: standard input cannot be read; {describe_error(error)}") from error


def load_json(data: bytes, most_values: int) -> Any:
    """Parse JSON of no more values than that, which are counted before any is made.

    A value may take thirty times its text: an empty list takes three bytes here and sixty there.

    Raises:
        ValueError: it is not JSON in UTF-8, or has more values.
        RecursionError: it is nested too deep.
    """
    if sum(map(data.count, (b"[", b"{", b","))) > most_values:
        # Signs within texts are none; a text ends at the first quotation mark without a backslash before it.
        bare, n_values = data.replace(b"\\\\", b"").replace(b'\\"', b""), 0
        for sign in re.finditer(rb'"[^"]*(?:"|\Z)|[\[{,]', bare):
            n_values += sign[0][:1] != b'"'
            if n_values > most_values:
                raise ValueError(f"more than {most_values:,} values")
    return json.loads(data.decode("utf-8-sig"))


def json_fault(error: ValueError | RecursionError) -> str:
    """Say in plain words why Python's reader of JSON refused a text."""
    if isinstance(error, RecursionError):
        return "nested too deep"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 at byte {error.start:,}"
    if "integer string conversion" in str(error):
        return "a whole number of more than 4,300 digits"
    return str(error).lower()


def open_regular(path: Path) -> int:
    """Open a regular file to read and return its descriptor, which the caller closes.

    Raises:
        UserError: it is missing, unreadable, a folder, a pipe or a device; the message names it.
    """
    try:
        # Opening a pipe that nobody writes to would wait for ever, so its kind is asked first.
        kind = describe_kind(path.stat().st_mode)
        if kind is None:
            return os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read; {describe_error(error)}") from error
    raise UserError(f"{path}: is {kind}, not a file")


def look_at(path: Path) -> os.stat_result | None:
    """Return the status of what a path leads to; None where nothing is.

    Unlike `Path.exists` and its like, which let some errors of the system through and not others.

    Raises:
        UserError: the system does not say: the way there is closed, or the name is one it cannot take.
    """
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"{path}: cannot be read; {describe_error(error)}") from error
    except ValueError as error:  # a NUL byte in the name
        raise UserError(f"{str(path)!r}: cannot be read; {describe_error(error)}") from error


def is_folder(path: Path) -> bool:
    """Say whether a path leads to a folder.

    Raises:
        UserError: as `look_at`.
    """
    status = look_at(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def inode_of(status: os.stat_result) -> int | None:
    """Return what tells a file from all others of its disk, as long as it is there; None: nothing does.

    Nothing that is kept depends on the numbers of Windows, which may have 128 bits.
    """
    return status.st_ino if os.name != "nt" and status.st_ino > 0 else None


def shell_name(path: Path | str) -> str:
    """Quote a file's name for the shell, on one line whatever is in it."""
    name = str(path)
    if name.isprintable():
        return shlex.quote(name)
    inside = (
        os.fsencode(name).replace(b"\\", b"\\\\").replace(b"'", b"\\'").decode("utf-8", "backslashreplace")
    )
    return "$'" + "".join(one if one.isprintable() else ascii(one)[1:-1] for one in inside) + "'"


def describe_kind(mode: int) -> str | None:
    """Say what a thing that is no regular file is, by its `st_mode`; None for a regular file."""
    kinds = {
        stat.S_IFREG: None,
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "a special file")


def read_at(fd: int, n_bytes: int, offset: int) -> bytes:
    """Read `n_bytes` from a byte offset of an open file, fewer only where the file ends."""
    parts = []
    while n_bytes > 0:
        part = _pread(fd, min(n_bytes, 1 << 30), offset)
        if not part:
            break
        parts.append(part)
        offset += len(part)
        n_bytes -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _pread(fd: int, n_bytes: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(fd, n_bytes, offset)
    os.lseek(fd, offset, os.SEEK_SET)  # Windows has no read that names its offset
    return os.read(fd, n_bytes)


@contextmanager
def _naming(path: Path, temporary: Path) -> Iterator[None]:
    """Turn a failed write into one line; errors that name a file elsewhere are not about `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            place = Path(os.fsdecode(error.filename))
            if place not in (path, path.parent) and temporary not in (place, *place.parents):
                raise
        raise UserError(f"{path}: cannot be written; {describe_error(error)}") from error


def _temporary_name(path: Path) -> Path:
    # Names are at most 255 bytes, and a character may take four of them.
    return path.with_name(f".{path.name[:40]}.{secrets.token_hex(4)}.tmp")


def _sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk."""
    if os.name == "nt":
        return  # Windows cannot flush a folder's entry
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
