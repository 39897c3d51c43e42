"""Damages files at random, the same way for the same seed, and watches what a reader makes of them.

A reader of a stranger's file may do two things: return, or raise a UserError of one printable line. Meanwhile
it runs no code of the file, opens and changes nothing outside the file's folder, and takes no more memory and
time than bounded (`watched`). An error of a new form makes a damaged file the start of further ones, so that
damage reaches what lies behind the first check.
"""

import os
import random
import re
import resource
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from txlcli import UserError

MEMORY_BYTES = 512 << 20
"""What a reader may take beyond what the process has."""

CPU_S = 5.0
"""Seconds of a processor that one small file may take."""

LONGEST_ERROR = 2000

_PACKAGE = str(Path(__file__).parents[1])

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|[A-Za-z_]+|[\[\]{}:,\n]', re.DOTALL)
_HOSTILE = (
    *b"null true false none ~ -1 0 1 2 3 255 256 65536 2147483648 4294967296 9007199254740993".split(),
    *b'"I32" "U32" "F16" "F64" "BOOL" "F8_E4M3" "F4" "C64"'.split(),
    *b"18446744073709551616 1e308 1e999 -1e999 NaN Infinity -Infinity 1.5 -0.0 1e-400 .5 0x10 1_0".split(),
    *(b"9" * n for n in (30, 400, 5000)),
    *b'"" "a" "\\u0000" "\\ud800" "\\udcff" "\\u001b[31m" "\\u202e" "a\\nb" "/etc/passwd"'.split(),
    *b'"../.." "."'.split(),
    '"\x9b"'.encode(),
    b'"' + b"x" * 5000 + b'"',
    *b'[] {} [[]] [0] [""] [null] {"":0} {"a":{}} &a *a !!python/object:os.system <<'.split(),
    *(sign * n for sign in (b"[", b'{"a":', b"- ", b"? ") for n in (50, 3000)),
    b"\n",
    b"\r\n",
    b"\t",
    b"#",
    b"\0",
    b"\xff",
    b"\xed\xa0\x80",
    b"\x1b[2J",
)
_BYTES = tuple(
    struct.pack(form, number % (1 << 8 * struct.calcsize(form)))
    for form in ("<B", "<H", "<I", "<Q")
    for number in (-1, 0, 1, 127, 128, 1 << 15, 1 << 31, 1 << 63)
)


def mutate(data: bytes, other: bytes, draw: random.Random) -> bytes:
    """Damage a file in one to four places, maybe with parts of another."""
    if data[8:9] == b"{" and len(data) >= 8 + int.from_bytes(data[:8], "little"):
        return _mutate_safetensors(data, other, draw)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        data = (_change_token if draw.random() < 0.6 else _change_bytes)(data, other, draw)
    return data


def _mutate_safetensors(data: bytes, other: bytes, draw: random.Random) -> bytes:
    """Damage the header and mostly say its new length, or the bytes anywhere."""
    if draw.random() < 0.2:
        return _change_bytes(data, other, draw)
    end = 8 + int.from_bytes(data[:8], "little")
    header, body = data[8:end], data[end:]
    for _ in range(draw.choice((1, 1, 2, 4))):
        header = (_change_token if draw.random() < 0.9 else _change_bytes)(header, header, draw)
    n_bytes = len(header) if draw.random() < 0.95 else draw.choice((0, 1, 1 << 20, 1 << 40, (1 << 64) - 1))
    return struct.pack("<Q", n_bytes) + header + body


def _change_token(data: bytes, other: bytes, draw: random.Random) -> bytes:
    """Replace, delete or double a number, a text, a name or a sign."""
    places = [match.span() for match in _TOKEN.finditer(data)]
    if not places:
        return _change_bytes(data, other, draw)
    start, end = draw.choice(places)
    kind = draw.randrange(6)
    if kind <= 2:
        return data[:start] + draw.choice(_HOSTILE) + data[end:]
    if kind == 3:
        first, last = draw.choice(places)
        return data[:start] + data[first:last] + data[end:]
    if kind == 4:
        number = re.fullmatch(rb"-?\d{1,18}", data[start:end])
        near = b"%d" % (int(data[start:end]) + draw.choice((-1, 1, 7, 1000))) if number else b""
        return data[:start] + near + data[end:]
    stop = draw.choice(places)[1]
    return data[: max(end, stop)] + data[min(start, stop) :]


def _change_bytes(data: bytes, other: bytes, draw: random.Random) -> bytes:
    """Flip a bit, cut, delete, double, insert or overwrite bytes anywhere."""
    if not data:
        return draw.choice(_HOSTILE)
    at, n = draw.randrange(len(data)), draw.choice((1, 1, 2, 4, 8, 30, 500))
    kind = draw.randrange(8)
    if kind == 0:
        return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
    if kind == 1:
        return data[:at]
    if kind == 2:
        return data[:at] + data[at + n :]
    if kind == 3:
        return data[: at + n] + data[at : at + n] * draw.choice((1, 1, 50)) + data[at + n :]
    if kind == 4:
        return data[:at] + draw.randbytes(n) + data[at + n * draw.randrange(2) :]
    if kind == 5:
        word = draw.choice(_BYTES)
        return data[:at] + word + data[at + len(word) :]
    if kind == 6:
        return data[:at] + draw.choice(_HOSTILE) + data[at:]
    start = draw.randrange(len(other) + 1)
    return data[:at] + other[start : start + draw.choice((n, len(other)))] + data[at + n :]


@dataclass(frozen=True)
class Reader:
    """What reads some files of a folder.

    Attributes:
        files: Names of the files that are damaged, one at a time, with further sound examples of each.
        read: Reads them; given the folder.
        writes: It also writes, within the folder.
        prepare: Makes what was damaged likelier to be read, such as by new checksums; given the folder.
    """

    files: Mapping[str, tuple[bytes, ...]]
    read: Callable[[Path], object]
    writes: bool = False
    prepare: Callable[[Path], object] | None = None


@dataclass
class Findings:
    """What a reader made of damaged files.

    Attributes:
        n_read: How many it took.
        n_refused: How many it refused as it should.
        forms: The forms of its errors, numbers and quotations left out.
        faults: Damaged files that it failed on: name, content, what went wrong; one for each form of fault.
    """

    n_read: int = 0
    n_refused: int = 0
    forms: set[str] = field(default_factory=set)
    faults: dict[str, tuple[str, bytes, str]] = field(default_factory=dict)


def fuzz(
    folder: Path, reader: Reader, seed: int, *, n_inputs: int | None = None, seconds: float | None = None
) -> Findings:
    """Damage a reader's files again and again, so often or so long; in the end they are as they were."""
    draw, found = random.Random(seed), Findings()
    sound = {name: (folder / name).read_bytes() for name in reader.files}
    pools = {name: [sound[name], *reader.files[name]] for name in reader.files}
    whole = files_below(folder)
    for _ in range(2):  # what is imported only now is no fault of a damaged file
        fault, form = read(folder, reader)
    assert not form, fault or form
    restore(folder, whole)
    stop = None if seconds is None else time.monotonic() + seconds
    n_done = 0
    while (n_inputs is None or n_done < n_inputs) and (stop is None or time.monotonic() < stop):
        n_done += 1
        name = draw.choice([*reader.files])
        pool = pools[name]
        # Half of the time from a sound file.
        start = pool[0] if draw.random() < 0.5 else draw.choice(pool)
        data = mutate(start, draw.choice(pool), draw)[: 1 << 20]
        (folder / name).write_bytes(data)
        fault, form = read(folder, reader)
        if fault is not None:
            found.faults.setdefault(form, (name, data, fault))
        elif form:
            found.n_refused += 1
        else:
            found.n_read += 1
        if form not in found.forms and fault is None:
            found.forms.add(form)
            pool.append(data)
        (folder / name).write_bytes(sound[name])
        if reader.writes or reader.prepare is not None:
            restore(folder, whole)
    assert files_below(folder) == whole, "a reader has written"
    return found


def files_below(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def restore(folder: Path, whole: Mapping[Path, bytes]) -> None:
    """Make a folder hold these files and no others."""
    kept = {parent for path in whole for parent in path.parents}
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and path not in kept:
            path.rmdir()
        elif not path.is_dir() and path not in whole:
            path.unlink()
    for path, data in whole.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def read(folder: Path, reader: Reader) -> tuple[str | None, str]:
    """Read a folder, and return what went wrong, None if nothing, and the form of the error, empty: none."""
    if reader.prepare is not None:
        reader.prepare(folder)
    begun_s = time.process_time()
    try:
        with watched(folder, writes=reader.writes) as misdeeds:
            reader.read(folder)
        form, fault = "", None
    except UserError as error:
        form, fault = _form_of(str(error)), _describe_bad_text(str(error))
    except Exception as error:
        form = f"{type(error).__name__}: {_form_of(str(error))} at {_place_of(error)}"
        fault = f"{type(error).__name__}: {error!s:.300} at {_place_of(error)}"
    if misdeeds:
        form = fault = f"did what no reader does: {misdeeds[0]}"
    taken_s = time.process_time() - begun_s
    if taken_s > CPU_S:
        form, fault = f"slow: {form}", f"took {taken_s:.1f} s"
    return fault, form


def _form_of(text: str) -> str:
    return re.sub(r"`[^`]*`|'[^']*'|\"[^\"]*\"|[-+.\d,einfa]*\d[-+.\d,einfa]*", "#", text)[:200]


def _describe_bad_text(text: str) -> str | None:
    if not text.isprintable():
        return f"an error that is not one printable line: {text!r:.300}"
    return f"an error of {len(text):,} characters" if len(text) > LONGEST_ERROR else None


def _place_of(error: BaseException) -> str:
    """Name the line of the package where an exception passed last."""
    trace, place = error.__traceback__, "?"
    while trace is not None:
        code = trace.tb_frame.f_code
        if "txlcli" in code.co_filename:
            place = f"{Path(code.co_filename).name}:{code.co_name}"
        trace = trace.tb_next
    return place


_watching: list[tuple[str, bool, list[str]]] = []
_WRITING = (
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod", "os.truncate"),
    *("shutil.rmtree", "shutil.move", "shutil.copyfile"),
)
_FORBIDDEN = (
    *("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen"),
    *("socket.connect", "socket.getaddrinfo", "ctypes.dlopen", "marshal.loads", "exec", "compile"),
)


def _see(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching:
        return
    folder, may_write, misdeeds = _watching[-1]
    if event == "open":
        path, mode, flags = arguments
        is_written = (isinstance(mode, str) and any(sign in mode for sign in "wax+")) or (
            isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        )
        # Python's own files are opened by imports.
        is_own = not isinstance(path, int) and os.fsdecode(path).startswith(
            (sys.prefix, sys.base_prefix, "/proc", "/sys", _PACKAGE)
        )
        if (is_written and not may_write) or not (_is_below(path, folder) or is_own):
            misdeeds.append(f"open {path!r:.200} {mode}")
    elif event in _WRITING:
        # A name below an open folder comes with its descriptor.
        is_relative = any(isinstance(one, int) and one > 2 for one in arguments[1:])
        paths = [one for one in arguments if isinstance(one, (str, bytes, Path)) and not is_relative]
        if not may_write or not all(_is_below(path, folder) for path in paths):
            misdeeds.append(f"{event} {arguments!r:.200}")
    elif event in _FORBIDDEN and not (event in ("exec", "compile", "marshal.loads") and _is_import()):
        misdeeds.append(f"{event} {arguments!r:.200}")


def _is_below(path: Any, folder: str) -> bool:
    return isinstance(path, int) or os.path.abspath(os.fsdecode(path)).startswith(folder)  # noqa: PTH100


def _is_import() -> bool:
    """Say whether Python, not the reader, runs code here."""
    frame = sys._getframe(1)
    while frame is not None:
        # The checker of shapes makes its checks when they are first needed.
        if "importlib" in frame.f_code.co_filename or "beartype" in frame.f_code.co_filename:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


_is_hooked = False


@contextmanager
def watched(folder: Path, *, writes: bool = False) -> Iterator[list[str]]:
    """Bound the memory of the block, and list what no reader of files in this folder should do."""
    global _is_hooked
    if not _is_hooked:
        sys.addaudithook(_see)
        _is_hooked = True
    misdeeds: list[str] = []
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = Path("/proc/self/statm")
    _watching.append((str(folder.absolute()), writes, misdeeds))
    try:
        if pages.exists():
            size = int(pages.read_text().split()[0]) * resource.getpagesize()
            misdeeds.clear()
            resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, limits[1]))
        yield misdeeds
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        _watching.pop()
