"""From what a user named to the files that are read."""

import fnmatch
import functools
import os
import re
import shlex
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, ParamSpec

from txlcli import UserError, files
from txlcli.config import check_separator
from txlcli.sources.corpus import (
    CHUNK_BYTES,
    EXCLUDED,
    HELD_OUT,
    NAMED_TWICE,
    NOT_INCLUDED,
    WIDE,
    Corpus,
    Newlines,
    Progress,
    Source,
    Spaces,
    list_some,
    printable,
)
from txlcli.sources.encoding import find_encoding, settle_codec
from txlcli.sources.unpack import Packing, Unpackers, find_packing

# A file is taken for binary if a NUL byte stands in its first bytes, as git does.
SNIFF_BYTES = 8192

_P = ParamSpec("_P")


class NothingMatches(UserError):
    """Patterns leave no text in a folder."""


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
    as_is: bool = False,
) -> Iterator[Progress | Corpus]:
    """Find the files behind what a user named: files, folders, `-` for stdin; the last event is the corpus.

    Folders are walked in sorted order; what is hidden, binary (unless read as bytes), empty, unreadable or no
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

    With `as_is` a text that a program made is read exactly: it is not unpacked, no archive is refused, and a
    byte-order mark is text, unless it tells the order of bytes or stands before JSON.

    Raises:
        UserError: a path is missing, unreadable, empty or no file, there is no text behind it, or a packed
            file is cut or damaged, in a folder too; stdin is named twice; or there is no such encoding, or
            none of the separator.
    """
    codec = find_encoding(encoding)
    if document_separator is not None:
        try:
            check_separator(document_separator, codec)
        except ValueError as error:
            raise UserError(f"--document-separator: {error}") from None
    if not paths:
        raise UserError("no text is named; give files, a folder, or `-` for stdin: txl train corpus.txt")
    if paths.count("-") > 1:
        raise UserError(f"-: standard input can be named once; got it {paths.count('-')} times; name it once")
    reads_text = not raw or text_field is not None
    rules = _Rules(
        codec=codec,
        reads_text=reads_text,
        has_marks=reads_text and (not as_is or text_field is not None or codec in ("utf-16", "utf-32")),
        as_is=as_is,
        packed="keep" if as_is else packed,
        include=_compile(include),
        exclude=_compile(exclude),
        held_out=frozenset(source.identity for one in held_out for source in one.sources),
        unpackers=Unpackers(),
    )
    found: list[Source] = []
    set_aside: list[Source] = []  # in folders, held out
    skipped: list[tuple[Path, str]] = []
    refusals: list[UserError] = []
    for name in paths:
        if name == "-":
            source = yield from _copy_stdin(stdin_copy, rules)
            found.append(source)
        elif files.is_folder(Path(name)):
            n_found, n_aside, n_skipped = len(found), len(set_aside), len(skipped)
            for one in _search_folder(Path(name), rules, skipped):
                if isinstance(one, Progress):
                    yield one
                else:
                    (set_aside if one.identity in rules.held_out else found).append(one)
            if len(found) == n_found:
                refusals.append(_has_no_text(name, skipped[n_skipped:], include, exclude))
                # One whose text is held out has some, and what else is named may be enough.
                if len(set_aside) == n_aside:
                    raise refusals[-1]
        else:
            source, _ = yield from _open_source(name, Path(name), rules)
            found.append(source)
    if not found:
        raise refusals[0]
    left = [source for source in found if source.identity not in rules.held_out]
    sources = tuple(_take_once(left or found, skipped))
    skipped.extend((one.path, HELD_OUT) for one in found if left and one.identity in rules.held_out)
    # What was set aside in a folder is read after all where it was named and nothing else is left.
    read = {source.identity for source in sources}
    after_all = {(one.path, HELD_OUT) for one in set_aside if one.identity in read}
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
        skipped=tuple(one for one in dict.fromkeys(skipped) if one not in after_all),
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
    """What decides whether and how a file is read; patterns None: none are given.

    `reads_text`: files are read as text, as lines of JSON are also where bytes are wanted.
    """

    codec: str
    reads_text: bool
    has_marks: bool
    as_is: bool
    packed: Literal["unpack", "keep"]
    include: re.Pattern[str] | None
    exclude: re.Pattern[str] | None
    held_out: frozenset[tuple[int, int] | Path]
    unpackers: Unpackers


def _compile(patterns: Sequence[str]) -> re.Pattern[str] | None:
    if not patterns:
        return None
    return re.compile("|".join(fnmatch.translate(pattern.rstrip("/") or "/") for pattern in patterns))


def _copy_stdin(copy: Path | None, rules: _Rules) -> Generator[Progress, None, Source]:
    if copy is None:
        raise UserError("-: stdin cannot be read here; give a file")
    with files.open_whole(copy) as file:
        n_bytes = 0
        while block := files.read_stdin(CHUNK_BYTES):
            file.write(block)
            n_bytes += len(block)
            yield Progress("reading standard input", n_bytes, 0)
    source, _ = yield from _open_source("-", copy, rules)
    return source


class _Refused(UserError):
    """A file that is not read: `why` in a few words, with a remedy unless it is the system that refuses."""

    def __init__(self, place: str, why: str, remedy: str | None = None) -> None:
        super().__init__(f"{place}: cannot be read; {why}" if remedy is None else f"{place}: {why}; {remedy}")
        self.why = why


def _open_source(name: str, path: Path, rules: _Rules) -> Generator[Progress, None, tuple[Source, bytes]]:
    """Look at a file and return it with its first bytes; a packed one is unpacked for its size."""
    shown = printable(name)
    try:
        status = path.stat()
        kind = files.describe_kind(status.st_mode)
        if kind is not None:
            raise _Refused(shown, f"is {kind}, not a file", "give - and send its text to standard input")
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        try:
            head, n_bytes = files.read_at(fd, SNIFF_BYTES, 0), status.st_size
            told_bytes = os.fstat(fd).st_size
            packing: Packing = find_packing(head) if rules.packed == "unpack" else "none"
        finally:
            os.close(fd)
        # A writer that goes on meanwhile changes the size, but not to less than could be read.
        if len(head) > told_bytes or len(head) < min(n_bytes, told_bytes, SNIFF_BYTES):
            got = f"got {told_bytes:,} bytes, could read {len(head):,}"
            remedy = f"give - and send its text to standard input: cat {shlex.quote(shown)} | txl train -"
            raise _Refused(shown, "the system does not tell its size", f"{got}; {remedy}")
        if packing != "none":
            head, n_bytes = yield from _unpack_once(path, packing, shown, rules.unpackers)
    except OSError as error:
        raise _Refused(shown, files.describe_error(error)) from error
    except ValueError as error:  # a NUL byte in the name
        raise _Refused(repr(name), files.describe_error(error)) from error
    if not head:
        raise _Refused(shown, "is empty", "give a file with some text")
    archive = "tar" if head[257:262] == b"ustar" else "zip" if head.startswith(b"PK\x03\x04") else None
    if archive is not None and rules.reads_text and not rules.as_is:
        raise _Refused(shown, f"is a {archive} archive", "extract it and give the folder")
    settled, n_mark = settle_codec(head, rules.codec)
    source = Source(
        name=shown,
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


def _search_folder(
    folder: Path, rules: _Rules, skipped: list[tuple[Path, str]]
) -> Iterator[Progress | Source]:
    """Yield the text files of a folder, those too that are held out, and note what is not read."""
    for path in _walk(folder, rules, skipped):
        try:
            source, head = yield from _open_source(str(path), path, rules)
        except _Refused as error:
            skipped.append((path, error.why))
            continue
        if source.identity in rules.held_out:
            skipped.append((path, HELD_OUT))
        elif rules.reads_text and rules.codec not in WIDE and b"\0" in head:
            skipped.append((path, "binary: it holds NUL bytes"))
            continue
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
            return EXCLUDED
        if not is_folder and rules.include is not None and not rules.include.fullmatch(inner):
            return NOT_INCLUDED
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
            ("--include", include, NOT_INCLUDED),
            ("--exclude", exclude, EXCLUDED),
        )
        if why in reasons
    ]
    by_pattern_first = sorted(skipped, key=lambda one: one[1] not in (EXCLUDED, NOT_INCLUDED))
    told = list_some([f"{path} ({why})" for path, why in by_pattern_first])
    if not given:
        return UserError(f"{name}: no text in this folder; " + (f"skipped {told}" if told else "it is empty"))
    flags = " and ".join(flag for flag, _ in given) + (" leaves" if len(given) == 1 else " leave")
    patterns = [f"`{printable(pattern)}`" for _, some in given for pattern in some]
    return NothingMatches(
        f"{name}: {flags} no text in this folder; got {list_some(patterns)}, skipped {told}; "
        f"change the pattern{'s' * (len(patterns) > 1)}"
    )


def _take_once(found: Sequence[Source], skipped: list[tuple[Path, str]]) -> Iterator[Source]:
    """Yield the first of the sources that are one file, by whatever names, and note the others."""
    seen = set()
    for source in found:
        if source.identity in seen:
            skipped.append((source.path, NAMED_TWICE))
        else:
            seen.add(source.identity)
            yield source
