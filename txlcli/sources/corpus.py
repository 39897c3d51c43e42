"""Which files a user means, and what they are called."""

import codecs
import difflib
import encodings.aliases
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from txlcli import UserError, files

CHUNK_BYTES = 1 << 20
# A file is taken for binary if a NUL byte stands in its first bytes, as git does.
SNIFF_BYTES = 8192
# In these, NUL bytes are a normal part of text.
WIDE = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")

Newlines: TypeAlias = Literal["keep", "drop", "eos"]
Spaces: TypeAlias = Literal["keep", "underscore"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file of a corpus.

    `name` is what the user calls it, `path` what is opened, `codec` the encoding with its byte order
    settled, and `n_mark` the bytes of a leading byte-order mark, which are no part of the text.
    """

    name: str
    path: Path
    n_bytes: int
    mtime_ns: int
    codec: str
    n_mark: int


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Files that are read as one text or, with `raw`, as bytes that need not be text.

    `newlines` and `spaces` say how their text is read, as in `convert`. `skipped` lists what was met in
    folders and is not read, with the reason.
    """

    sources: tuple[Source, ...]
    encoding: str = "utf-8"
    errors: Literal["strict", "replace"] = "strict"
    raw: bool = False
    newlines: Newlines = "keep"
    spaces: Spaces = "keep"
    skipped: tuple[tuple[Path, str], ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that are opened, in order."""
        return tuple(source.path for source in self.sources)

    @property
    def n_bytes(self) -> int:
        """The bytes of all files."""
        return sum(source.n_bytes for source in self.sources)

    @property
    def name(self) -> str:
        """What messages call the whole: its first file, and how many more there are."""
        more = f" and {len(self.sources) - 1} more" if len(self.sources) > 1 else ""
        return self.sources[0].name + more

    @property
    def notices(self) -> tuple[str, ...]:
        """What a user should know about the choice of files, one line each."""
        marked = [source.name for source in self.sources if source.n_mark]
        dropped = [f"{_list_some(marked)}: the leading byte-order mark is no text and is dropped"]
        left = [f"{_list_some([f'{path} ({why})' for path, why in self.skipped])}: skipped"]
        return tuple(dropped * bool(marked) + left * bool(self.skipped))


def find_corpus(
    paths: Sequence[str],
    *,
    encoding: str = "utf-8",
    errors: Literal["strict", "replace"] = "strict",
    raw: bool = False,
    newlines: Newlines = "keep",
    spaces: Spaces = "keep",
    stdin_copy: Path | None = None,
) -> Corpus:
    """Find the files behind what a user named: files, folders and `-` for stdin.

    Folders are walked in sorted order; what is hidden, binary (unless `raw`), empty, unreadable or no
    regular file in them is skipped and listed. A file that was named itself is taken as it is, or
    refused. Stdin is first copied to `stdin_copy`.

    Raises:
        UserError: a path is missing, unreadable, empty or no file, or there is no text behind it; or
            there is no such encoding.
    """
    codec = find_encoding(encoding)
    if not paths:
        raise UserError("no text is named; give files, a folder, or `-` for stdin: txl train corpus.txt")
    found: list[Source] = []
    skipped: list[tuple[Path, str]] = []
    for name in paths:
        if name == "-":
            found.append(_copy_stdin(stdin_copy, codec, raw))
        elif files.is_folder(Path(name)):
            n_before = len(found)
            found.extend(_search_folder(Path(name), codec, raw, skipped))
            if len(found) == n_before:
                why = _list_some([f"{path} ({why})" for path, why in skipped])
                raise UserError(
                    f"{name}: no text in this folder; " + (f"skipped {why}" if why else "it is empty")
                )
        else:
            found.append(_open_source(name, Path(name), codec, raw)[0])
    return Corpus(
        sources=tuple(found),
        encoding=codec,
        errors=errors,
        raw=raw,
        newlines=newlines,
        spaces=spaces,
        skipped=tuple(skipped),
    )


def find_encoding(name: str) -> str:
    """Return the usual name of an encoding; `utf-8-sig` is `utf-8`, whose mark is dropped anyway.

    Raises:
        UserError: Python knows no such encoding of text; the message suggests one.
    """
    try:
        codec = codecs.lookup(name).name
        codecs.getincrementaldecoder(codec)
        b"a".decode(codec)
    except UnicodeDecodeError:
        pass  # a lone byte is no text in utf-16, say; the encoding is real
    except (LookupError, ValueError):
        known = {
            codec.replace("_", "-")
            for codec in encodings.aliases.aliases.values()
            if not codec.endswith("_codec") and codec != "rot_13"
        }
        close = difflib.get_close_matches(name.lower().replace("_", "-"), sorted(known), 1)
        hint = f"did you mean `{close[0]}`?" if close else "for example utf-8, utf-16, cp1252, gb18030"
        raise UserError(f"--encoding: unknown encoding `{name}`; {hint}") from None
    return "utf-8" if codec == "utf-8-sig" else codec


def find_byte(corpus: Corpus, start: int, n_bytes: int) -> tuple[str, int]:
    """Name the file, and its byte, that comes `n_bytes` of text after the corpus' byte `start`."""
    base = 0
    for source in corpus.sources:
        begin = max(start - base, source.n_mark)
        if begin + n_bytes < source.n_bytes:
            return source.name, begin + n_bytes
        n_bytes -= max(source.n_bytes - begin, 0)
        base += source.n_bytes
    raise AssertionError("beyond the corpus")


def check_unchanged(corpus: Corpus) -> tuple[str, ...]:
    """Look whether files changed since they were found; one that grew is a notice, since its end is not read.

    Raises:
        UserError: a file is gone or shorter; the message names it.
    """
    notices = []
    for source in corpus.sources:
        try:
            status = source.path.stat()
        except OSError as error:
            raise UserError(f"{source.name}: cannot be read; {files.describe_error(error)}") from error
        if status.st_size < source.n_bytes:
            raise became_shorter(source, status.st_size)
        if (status.st_size, status.st_mtime_ns) != (source.n_bytes, source.mtime_ns):
            notices.append(
                f"{source.name}: changed while it was read; its first {source.n_bytes:,} bytes are used"
            )
    return tuple(notices)


def became_shorter(source: Source, n_bytes: int) -> UserError:
    """Word the refusal of a file that was cut while it was read."""
    return UserError(
        f"{source.name}: became shorter while it was read; got {n_bytes:,} bytes, had {source.n_bytes:,}; "
        "start again when nothing writes to it"
    )


def _copy_stdin(copy: Path | None, codec: str, raw: bool) -> Source:
    if copy is None:
        raise UserError("-: stdin cannot be read here; give a file")
    with files.open_whole(copy) as file:
        while block := sys.stdin.buffer.read(CHUNK_BYTES):
            file.write(block)
    return _open_source("-", copy, codec, raw)[0]


def _open_source(name: str, path: Path, codec: str, raw: bool) -> tuple[Source, bytes]:
    """Look at a file and return it with its first bytes."""
    try:
        status = path.stat()
        kind = files.describe_kind(status.st_mode)
        if kind is not None:
            raise UserError(f"{name}: is {kind}, not a file; send its text to stdin: ... | txl train -")
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        try:
            head = files.read_at(fd, SNIFF_BYTES, 0)
        finally:
            os.close(fd)
    except OSError as error:
        raise UserError(f"{name}: cannot be read; {files.describe_error(error)}") from error
    except ValueError as error:  # a NUL byte in the name
        raise UserError(f"{name!r}: cannot be read; {files.describe_error(error)}") from error
    if not head:
        raise UserError(f"{name}: is empty; give a file with some text")
    settled, n_mark = _settle_codec(head, codec)
    source = Source(
        name=name,
        path=path,
        n_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        codec=settled,
        n_mark=0 if raw else n_mark,
    )
    return source, head


def _settle_codec(head: bytes, codec: str) -> tuple[str, int]:
    """Return the encoding with its byte order settled, and the bytes of a leading byte-order mark."""
    candidates = [codec]
    if codec in ("utf-16", "utf-32"):
        orders = ("le", "be") if sys.byteorder == "little" else ("be", "le")
        candidates = [f"{codec}-{order}" for order in orders]
    for candidate in candidates:
        try:
            mark = "\ufeff".encode(candidate)
        except UnicodeError:
            continue
        if len(mark) > 1 and head.startswith(mark):
            return candidate, len(mark)
    return candidates[0], 0


def _search_folder(folder: Path, codec: str, raw: bool, skipped: list[tuple[Path, str]]) -> Iterator[Source]:
    for path in _walk(folder, skipped):
        try:
            source, head = _open_source(str(path), path, codec, raw)
        except UserError as error:
            skipped.append(
                (path, str(error).removeprefix(f"{path}: ").removeprefix("cannot be read; ").split(";")[0])
            )
            continue
        if not raw and codec not in WIDE and b"\0" in head:
            skipped.append((path, "binary: it holds NUL bytes"))
            continue
        yield source


def _walk(folder: Path, skipped: list[tuple[Path, str]]) -> Iterator[Path]:
    """Yield the files of a folder in sorted order; links to folders are not followed, so loops cannot be."""

    def note_unreadable(error: OSError) -> None:
        skipped.append((Path(os.fsdecode(error.filename)), files.describe_error(error)))

    for place, folders, names in os.walk(folder, onerror=note_unreadable):
        if "config.yaml" in names and "checkpoints" in folders:
            # What txl wrote itself (`txl train .` called twice) is not what the user means by text.
            skipped.append((Path(place), "a run"))
            folders.clear()
            continue
        for name in sorted(folders + names):
            if name.startswith("."):
                skipped.append((Path(place, name), "hidden"))
            elif name in folders and Path(place, name).is_symlink():
                skipped.append((Path(place, name), "a link to a folder"))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(place, name) for name in sorted(names) if not name.startswith("."))


def _list_some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
