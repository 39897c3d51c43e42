"""What a corpus is: its files, and how they are read."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from txlcli import UserError, files
from txlcli.sources.unpack import Packing, Unpackers

# Four times as much made training on a long text take twice the memory, and was no faster.
CHUNK_BYTES = 1 << 18
# In these, NUL bytes are a normal part of text.
WIDE = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")

Newlines: TypeAlias = Literal["keep", "drop", "eos"]
Spaces: TypeAlias = Literal["keep", "underscore"]

# Reasons to skip something; that of some hardly anybody means.
EXCLUDED, NOT_INCLUDED = "excluded", "not included"
HELD_OUT = "held out"
NAMED_TWICE = "read once, named twice"
_UNMEANT = ("hidden", EXCLUDED, NOT_INCLUDED, "a run", "a link to a folder", "is empty")


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

    @property
    def setting(self) -> str | None:
        """The name of the rule; None: there are no documents."""
        given = (name for name, value in self._asdict().items() if value not in (None, False))
        return next(given, None)


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
        told_apart = (HELD_OUT, NAMED_TWICE)
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
            (twice, NAMED_TWICE),
            (list(self.overlapping), "is learned from and scored too, so that its scores are too good"),
        )
        return tuple(f"{list_some(names)}: {what}" for names, what in told if names)

    def shared_with(self, other: "Corpus") -> tuple[str, ...]:
        """The names of its files that are files of another corpus too, by whatever names."""
        theirs = {source.identity for source in other.sources}
        return tuple(source.name for source in self.sources if source.identity in theirs)


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


def list_some(names: Sequence[str]) -> str:
    """Name the first three, and how many more there are."""
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
