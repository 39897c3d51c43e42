"""Which files a user means, and what they are called."""

import codecs
import difflib
import encodings.aliases
import fnmatch
import functools
import os
import re
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, ParamSpec, TypeAlias

from txlcli import UserError, files
from txlcli.sources.unpack import Damaged, Packing, Unpackers, find_packing

# Four times as much made training on a long text take twice the memory, and was no faster.
CHUNK_BYTES = 1 << 18
# A file is taken for binary if a NUL byte stands in its first bytes, as git does.
SNIFF_BYTES = 8192
# In these, NUL bytes are a normal part of text.
WIDE = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")

Newlines: TypeAlias = Literal["keep", "drop", "eos"]
Spaces: TypeAlias = Literal["keep", "underscore"]

_P = ParamSpec("_P")


# Reasons to skip something that hardly anybody meant.
_EXCLUDED, _NOT_INCLUDED = "excluded", "not included"
_UNMEANT = ("hidden", _EXCLUDED, _NOT_INCLUDED, "a run", "a link to a folder", "is empty")
_HELD_OUT = "held out"
_NAMED_TWICE = "read once, named twice"


@dataclass(frozen=True)
class Progress:
    """How far a pass over files is, in their bytes; `total_bytes` 0: not known."""

    stage: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One file of a corpus.

    `name` is what the user calls it, on one line, `path` what is opened, `encoding` what its encoding is
    called by the user, `codec` the same with its byte order settled, and `n_mark` the bytes of a leading
    byte-order mark, which are no part of the text. `n_bytes` counts what is read: of a packed file
    (`packing`) what it unpacks to. All positions are bytes of that. `stored_bytes`, `mtime_ns`, `ctime_ns`,
    `device` and `inode` are the file's own on the disk. `unpackers` keeps packed files open from one read to
    the next, those of all sources of a corpus.
    """

    name: str
    path: Path
    n_bytes: int
    mtime_ns: int
    encoding: str
    codec: str
    n_mark: int
    packing: Packing = "none"
    stored_bytes: int
    ctime_ns: int
    device: int
    inode: int
    unpackers: Unpackers = field(default_factory=Unpackers, compare=False, repr=False)

    @property
    def identity(self) -> tuple[int, int] | Path:
        """What is equal for all names of one file; some file systems number none, then it is the path."""
        return (self.device, self.inode) if self.inode else self.path

    @property
    def place(self) -> str:
        """What messages call the text in which they name a byte: the file, or what it unpacks to."""
        return self.name if self.packing == "none" else f"{self.name} (unpacked)"

    @property
    def told_codec(self) -> str:
        """What messages call its encoding: as the user does, and by what a byte order was chosen."""
        if self.codec == self.encoding:
            return self.codec
        order = "little-endian" if self.codec.endswith("-le") else "big-endian"
        why = "by its byte-order mark" if self.n_mark else "as it has no byte-order mark"
        return f"{self.encoding} ({order}, {why})"


class DocumentRule(NamedTuple):
    """How documents are told apart, by at most one of three rules of a `Corpus`; by none: there are none."""

    text_field: str | None = None
    document_separator: str | None = None
    document_per_file: bool = False


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Files that are read as one text or, with `raw`, as bytes that need not be text.

    `newlines` and `spaces` say how their text is read, as in `convert`. `skipped` lists what was met and is
    not read, with the reason, `overlapping` what is read though it is also held out, since nothing else is
    left.

    A corpus has documents by at most one of three rules. `text_field`: files are JSON lines, each line an
    object whose field of that name is a document's text; blank lines are none. `document_separator`: a
    document ends where this text stands, which belongs to none, and at the end of a file; it is looked for
    before `newlines` and `spaces` change anything, from each file's start, without overlap; in raw bytes it
    is the bytes that it has in `encoding`. `document_per_file`: each file is one. With `valid_every` n the
    documents n - 1, 2 n - 1, ..., counted from 0 over those that are not empty, are held out.
    """

    sources: tuple[Source, ...]
    encoding: str = "utf-8"
    errors: Literal["strict", "replace"] = "strict"
    raw: bool = False
    newlines: Newlines = "keep"
    spaces: Spaces = "keep"
    text_field: str | None = None
    document_separator: str | None = None
    document_per_file: bool = False
    valid_every: int | None = None
    skipped: tuple[tuple[Path, str], ...] = ()
    overlapping: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that are opened, in order."""
        return tuple(source.path for source in self.sources)

    @property
    def n_bytes(self) -> int:
        """The bytes of all files, of packed ones unpacked."""
        return sum(source.n_bytes for source in self.sources)

    @property
    def has_documents(self) -> bool:
        """Whether the text is known to consist of documents."""
        return self.text_field is not None or self.document_separator is not None or self.document_per_file

    @property
    def reads_bytes(self) -> bool:
        """Whether the files are read as bytes as they are; JSON is text also where bytes are wanted."""
        return self.raw and self.text_field is None

    @property
    def name(self) -> str:
        """What messages call the whole: its first file, and how many more there are."""
        more = f" and {len(self.sources) - 1} more" if len(self.sources) > 1 else ""
        return self.sources[0].name + more

    @property
    def notices(self) -> tuple[str, ...]:
        """What a user should know about the choice of files, one line each."""
        marked = [source.name for source in self.sources if source.n_mark]
        packed = [f"{source.name} ({source.packing})" for source in self.sources if source.packing != "none"]
        # What may have been meant comes first, since only some are named.
        unmeant = [one for one in self.skipped if one[1] in _UNMEANT]
        told_apart = (_HELD_OUT, _NAMED_TWICE)
        skipped = [one for one in self.skipped if one[1] not in (*_UNMEANT, *told_apart)] + unmeant
        left = [f"{printable(str(path))} ({why})" for path, why in skipped]
        held_out, twice = (
            [printable(str(path)) for path, why in self.skipped if why == reason] for reason in told_apart
        )
        told = (
            (marked, "the leading byte-order mark is no text and is dropped"),
            (
                packed,
                "read unpacked" + (", not byte for byte; --packed keep does" if self.reads_bytes else ""),
            ),
            (left, "skipped"),
            (held_out, "held out, so not learned from"),
            (twice, _NAMED_TWICE),
            (list(self.overlapping), "is learned from and scored too, so that its scores are too good"),
        )
        return tuple(f"{list_some(names)}: {what}" for names, what in told if names)

    def shared_with(self, other: "Corpus") -> tuple[str, ...]:
        """The names of its files that are files of another corpus too, by whatever names."""
        theirs = {source.identity for source in other.sources}
        return tuple(source.name for source in self.sources if source.identity in theirs)


def search_corpus(
    paths: Sequence[str],
    *,
    encoding: str = "utf-8",
    errors: Literal["strict", "replace"] = "strict",
    raw: bool = False,
    newlines: Newlines = "keep",
    spaces: Spaces = "keep",
    packed: Literal["unpack", "keep"] = "unpack",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    text_field: str | None = None,
    document_separator: str | None = None,
    document_per_file: bool = False,
    valid_every: int | None = None,
    held_out: Sequence[Corpus] = (),
    stdin_copy: Path | None = None,
) -> Iterator[Progress | Corpus]:
    """Find the files behind what a user named: files, folders, `-` for stdin; the last event is the corpus.

    Folders are walked in sorted order; what is hidden, binary (unless `raw`), empty, unreadable or no
    regular file in them is skipped and listed. A file that was named itself is taken as it is, or
    refused. Stdin is first copied to `stdin_copy`.

    Of the files in folders those are taken whose path within the folder matches one of the patterns
    `include`, where there are any, and none of `exclude`; a folder that matches `exclude` is not looked
    into. Patterns are those of shells, in which `*` stands for `/` too: `*.txt`, `drafts/*`.

    Packed files (gzip, xz, bz2, zstd) are told by their content, whatever their names, and are read unpacked,
    unless `packed` is `keep`; for their sizes they are unpacked once here. Files of the corpora `held_out`
    are skipped, in folders and where they were named, as `*.txt` names them, unless nothing else is named.
    A file that is named several times, as folders within one another and links do, is read where it is named
    first: else its text could be learned from and held out at once.

    Raises:
        UserError: a path is missing, unreadable, empty or no file, there is no text behind it, or a packed
            file is cut or damaged, in a folder too; stdin is named twice; or there is no such encoding, or
            none of the separator.
    """
    codec = find_encoding(encoding)
    if document_separator is not None:
        try:
            document_separator.encode(codec)
        except UnicodeError:
            got = printable(document_separator)[:60]
            raise UserError(
                f"--document-separator: cannot be written in {codec}; got `{got}`; "
                "choose one that stands in the text, or another --encoding"
            ) from None
    if not paths:
        raise UserError("no text is named; give files, a folder, or `-` for stdin: txl train corpus.txt")
    if paths.count("-") > 1:
        raise UserError(f"-: standard input can be named once; got it {paths.count('-')} times; name it once")
    rules = _Rules(
        codec=codec,
        raw=raw,
        has_marks=not raw or text_field is not None,
        packed=packed,
        include=_compile(include),
        exclude=_compile(exclude),
        held_out=frozenset(source.identity for one in held_out for source in one.sources),
        unpackers=Unpackers(),
    )
    found: list[Source] = []
    skipped: list[tuple[Path, str]] = []
    for name in paths:
        if name == "-":
            source = yield from _copy_stdin(stdin_copy, rules)
            found.append(source)
        elif files.is_folder(Path(name)):
            n_before, n_skipped_before = len(found), len(skipped)
            for one in _search_folder(Path(name), rules, skipped):
                if isinstance(one, Source):
                    found.append(one)
                else:
                    yield one
            if len(found) == n_before:
                raise _has_no_text(name, skipped[n_skipped_before:], include, exclude)
        else:
            source, _ = yield from _open_source(name, Path(name), rules)
            found.append(source)
    left = [source for source in found if source.identity not in rules.held_out]
    if left:
        skipped.extend((source.path, _HELD_OUT) for source in found if source.identity in rules.held_out)
    sources = tuple(_take_once(left or found, skipped))
    yield Corpus(
        sources=sources,
        encoding=codec,
        errors=errors,
        raw=raw,
        newlines=newlines,
        spaces=spaces,
        text_field=text_field,
        document_separator=document_separator,
        document_per_file=document_per_file,
        valid_every=valid_every,
        # Folders within one another are looked into twice.
        skipped=tuple(dict.fromkeys(skipped)),
        overlapping=() if left else tuple(source.name for source in sources),
    )


def _last_of(search: Callable[_P, Iterator[Progress | Corpus]]) -> Callable[_P, Corpus]:
    @functools.wraps(search)
    def find(*args: _P.args, **kwargs: _P.kwargs) -> Corpus:
        *_, last = search(*args, **kwargs)
        assert isinstance(last, Corpus)
        return last

    return find


find_corpus = _last_of(search_corpus)
"""`search_corpus` without the progress."""


@dataclass(frozen=True, kw_only=True)
class _Rules:
    """What decides whether and how a file is read; patterns None: none are given."""

    codec: str
    raw: bool
    has_marks: bool
    packed: Literal["unpack", "keep"]
    include: re.Pattern[str] | None
    exclude: re.Pattern[str] | None
    held_out: frozenset[tuple[int, int] | Path]
    unpackers: Unpackers


def _compile(patterns: Sequence[str]) -> re.Pattern[str] | None:
    if not patterns:
        return None
    return re.compile("|".join(fnmatch.translate(pattern.rstrip("/") or "/") for pattern in patterns))


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
        if status.st_size < source.stored_bytes:
            raise became_shorter(source, status.st_size)
        if (status.st_size, status.st_mtime_ns) != (source.stored_bytes, source.mtime_ns):
            kind = "bytes" if source.packing == "none" else "unpacked bytes"
            notices.append(
                f"{source.name}: changed while it was read; its first {source.n_bytes:,} {kind} are used"
            )
    return tuple(notices)


def became_shorter(source: Source, stored_bytes: int) -> UserError:
    """Word the refusal of a file that was cut while it was read."""
    return UserError(
        f"{source.name}: became shorter while it was read; got {stored_bytes:,} bytes, had "
        f"{source.stored_bytes:,}; start again when nothing writes to it"
    )


def printable(name: str) -> str:
    """Put a name on one line: escapes for what cannot be printed."""
    return name if name.isprintable() else name.encode("unicode_escape").decode()


def _copy_stdin(copy: Path | None, rules: _Rules) -> Generator[Progress, None, Source]:
    if copy is None:
        raise UserError("-: stdin cannot be read here; give a file")
    with files.open_whole(copy) as file:
        n_bytes = 0
        while block := sys.stdin.buffer.read(CHUNK_BYTES):
            file.write(block)
            n_bytes += len(block)
            yield Progress("reading standard input", n_bytes, 0)
    source, _ = yield from _open_source("-", copy, rules)
    return source


def _open_source(name: str, path: Path, rules: _Rules) -> Generator[Progress, None, tuple[Source, bytes]]:
    """Look at a file and return it with its first bytes; a packed one is unpacked for its size."""
    try:
        status = path.stat()
        kind = files.describe_kind(status.st_mode)
        if kind is not None:
            raise UserError(
                f"{printable(name)}: is {kind}, not a file; give - and send its text to standard input"
            )
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        try:
            head, n_bytes = files.read_at(fd, SNIFF_BYTES, 0), status.st_size
            packing: Packing = find_packing(head) if rules.packed == "unpack" else "none"
        finally:
            os.close(fd)
        if packing != "none":
            head, n_bytes = yield from _unpack_once(path, packing, printable(name), rules.unpackers)
    except OSError as error:
        raise UserError(f"{printable(name)}: cannot be read; {files.describe_error(error)}") from error
    except ValueError as error:  # a NUL byte in the name
        raise UserError(f"{name!r}: cannot be read; {files.describe_error(error)}") from error
    if not head:
        raise UserError(f"{printable(name)}: is empty; give a file with some text")
    archive = "tar" if head[257:262] == b"ustar" else "zip" if head.startswith(b"PK\x03\x04") else None
    if archive is not None and not rules.raw:
        raise UserError(f"{printable(name)}: is a {archive} archive; extract it and give the folder")
    settled, n_mark = _settle_codec(head, rules.codec)
    source = Source(
        name=printable(name),
        path=path,
        # What a writer appends meanwhile is not read.
        n_bytes=n_bytes,
        mtime_ns=status.st_mtime_ns,
        encoding=rules.codec,
        codec=settled,
        n_mark=n_mark if rules.has_marks else 0,
        packing=packing,
        stored_bytes=status.st_size,
        ctime_ns=status.st_ctime_ns,
        device=status.st_dev,
        inode=status.st_ino,
        unpackers=rules.unpackers,
    )
    return source, head


def _unpack_once(
    path: Path, packing: Packing, name: str, unpackers: Unpackers
) -> Generator[Progress, None, tuple[bytes, int]]:
    """Return the first bytes of a packed file and how many there are, having checked all of them."""
    unpacker, stored_bytes, told = unpackers.take(path, packing, name, 0), path.stat().st_size, 0
    head = unpacker.read(0, SNIFF_BYTES)
    while (piece := unpacker.advance(unpacker.place)) is not None:
        if unpacker.place - told >= CHUNK_BYTES:
            told = unpacker.place
            yield Progress(f"unpacking {name}", piece.place, stored_bytes)
    unpackers.give(unpacker)
    return head, unpacker.place


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


def _search_folder(
    folder: Path, rules: _Rules, skipped: list[tuple[Path, str]]
) -> Iterator[Progress | Source]:
    for path in _walk(folder, rules, skipped):
        name = str(path)
        try:
            source, head = yield from _open_source(name, path, rules)
        except Damaged:
            raise
        except UserError as error:
            prefix = f"{printable(name)}: "
            skipped.append(
                (path, str(error).removeprefix(prefix).removeprefix("cannot be read; ").split(";")[0])
            )
            continue
        if source.identity in rules.held_out:
            skipped.append((path, _HELD_OUT))
        elif not rules.raw and rules.codec not in WIDE and b"\0" in head:
            skipped.append((path, "binary: it holds NUL bytes"))
        else:
            yield source


def _walk(folder: Path, rules: _Rules, skipped: list[tuple[Path, str]]) -> Iterator[Path]:
    """Yield the files of a folder in sorted order; links to folders are not followed, so loops cannot be."""

    def note_unreadable(error: OSError) -> None:
        place, why = Path(os.fsdecode(error.filename)), files.describe_error(error)
        if place == folder:
            raise UserError(f"{printable(str(folder))}: cannot be read; {why}") from error
        skipped.append((place, why))

    def refuse(inner: str, name: str, *, is_folder: bool) -> str | None:
        """Say why something is not taken, None: it is."""
        if name.startswith("."):
            return "hidden"
        # Path.is_symlink raises where the folder may be listed and not looked into.
        if is_folder and os.path.islink(Path(folder, inner)):  # noqa: PTH114
            return "a link to a folder"
        if rules.exclude is not None and rules.exclude.fullmatch(inner):
            return _EXCLUDED
        if not is_folder and rules.include is not None and not rules.include.fullmatch(inner):
            return _NOT_INCLUDED
        return None

    for place, folders, names in os.walk(folder, onerror=note_unreadable):
        if "config.yaml" in names and "checkpoints" in folders:
            # What txl wrote itself (`txl train .` called twice) is not what the user means by text.
            skipped.append((Path(place), "a run"))
            folders.clear()
            continue
        base = Path(place).relative_to(folder).as_posix()
        within = "" if base == "." else f"{base}/"
        refused = {
            name: why
            for is_folder, some in ((True, folders), (False, names))
            for name in some
            if (why := refuse(within + name, name, is_folder=is_folder)) is not None
        }
        skipped.extend((Path(place, name), refused[name]) for name in sorted(refused))
        folders[:] = sorted(name for name in folders if name not in refused)
        yield from (Path(place, name) for name in sorted(names) if name not in refused)


def _has_no_text(
    name: str, skipped: Sequence[tuple[Path, str]], include: Sequence[str], exclude: Sequence[str]
) -> UserError:
    """Word the refusal of a folder in which nothing is read; patterns that left something out are named."""
    reasons = {why for _, why in skipped}
    given = [
        (flag, patterns)
        for flag, patterns, why in (
            ("--include", include, _NOT_INCLUDED),
            ("--exclude", exclude, _EXCLUDED),
        )
        if why in reasons
    ]
    by_pattern_first = sorted(skipped, key=lambda one: one[1] not in (_EXCLUDED, _NOT_INCLUDED))
    told = list_some([f"{path} ({why})" for path, why in by_pattern_first])
    if not given:
        return UserError(f"{name}: no text in this folder; " + (f"skipped {told}" if told else "it is empty"))
    flags = " and ".join(flag for flag, _ in given) + (" leaves" if len(given) == 1 else " leave")
    patterns = [f"`{printable(pattern)}`" for _, some in given for pattern in some]
    return UserError(
        f"{name}: {flags} no text in this folder; got {list_some(patterns)}, skipped {told}; "
        f"change the pattern{'s' * (len(patterns) > 1)}"
    )


def _take_once(found: Sequence[Source], skipped: list[tuple[Path, str]]) -> Iterator[Source]:
    """Yield the first of the sources that are one file, by whatever names, and note the others."""
    seen = set()
    for source in found:
        if source.identity in seen:
            skipped.append((source.path, _NAMED_TWICE))
        else:
            seen.add(source.identity)
            yield source


def list_some(names: Sequence[str]) -> str:
    """Name the first three, and how many more there are."""
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
