"""Pieces of text on their way out of files, and what UTF-8 says about them."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from txlcli.sources.corpus import Newlines, Spaces

Sizes: TypeAlias = npt.NDArray[np.uint32]
Offsets: TypeAlias = npt.NDArray[np.int64]


class Chunk(NamedTuple):
    """A piece of text as UTF-8 that ends at a character (raw: any bytes), and what it was in the file.

    `sizes[i]` counts the bytes of the file that end with byte i of the text; None: not asked for.
    `source_bytes` is their sum and that of `end_sizes`, `n_replaced` the bytes read that are no text.
    `left_out[i]` counts the bytes of the file that stand right before byte i's own and are no part of the
    text: newlines that are dropped; None: none is left out.

    `document_ends` are the offsets in the text, ascending and at least 1, after which a document ends, and
    `end_sizes[i]` the bytes of the file that ended it: those of the separator, 0 at a file's end and in JSON
    lines. Empty documents have no end. None: the text has no documents.

    `skipped_bytes` counts bytes of the file up to the last of the text that are neither text nor separator:
    JSON's syntax, separators of empty documents, documents of another part. Text out of JSON counts as
    UTF-8, not as its escapes; where those bytes are more than the file's, it is less than 0.
    """

    text: bytes
    sizes: Sizes | None
    source_bytes: int
    n_replaced: int
    left_out: Offsets | None = None
    document_ends: Offsets | None = None
    end_sizes: Offsets | None = None
    skipped_bytes: int = 0

    @property
    def read_bytes(self) -> int:
        """The bytes of the file up to the last of the text, left out and skipped ones too."""
        return (
            self.source_bytes
            + self.skipped_bytes
            + (0 if self.left_out is None else int(self.left_out.sum()))
        )

    @property
    def has_separators(self) -> bool:
        """Whether separators were taken out of a text that is cut at them, be it only of empty documents."""
        return self.skipped_bytes > 0 or (self.end_sizes is not None and bool(self.end_sizes.any()))


def join_chunks(chunks: Sequence[Chunk]) -> Chunk:
    """Make one chunk of some that follow one another."""
    if len(chunks) == 1:
        return chunks[0]
    starts = np.cumsum([0, *(len(chunk.text) for chunk in chunks[:-1])])
    ends = [chunk.document_ends for chunk in chunks]
    # Of those without text it is not known whether sizes were asked for.
    full = [chunk for chunk in chunks if chunk.text] or chunks
    return Chunk(
        text=b"".join(chunk.text for chunk in chunks),
        sizes=_concatenate([chunk.sizes for chunk in full]),
        source_bytes=sum(chunk.source_bytes for chunk in chunks),
        n_replaced=sum(chunk.n_replaced for chunk in chunks),
        left_out=_concatenate([chunk.left_out for chunk in full]),
        document_ends=_concatenate(
            [None if some is None else start + some for start, some in zip(starts, ends, strict=True)]
        ),
        end_sizes=_concatenate([chunk.end_sizes for chunk in chunks]),
        skipped_bytes=sum(chunk.skipped_bytes for chunk in chunks),
    )


def _concatenate(arrays: "Sequence[npt.NDArray[Any] | None]") -> "npt.NDArray[Any] | None":
    known = [array for array in arrays if array is not None]
    return np.concatenate(known) if len(known) == len(arrays) else None


def convert(text: bytes, newlines: Newlines, spaces: Spaces) -> bytes:
    r"""Return a text as a run reads it, by its settings `newlines` and `spaces`.

    `drop` leaves every byte `\n` out, so that of `\r\n` the `\r` stays; `eos` is the vocabulary's affair.
    `underscore` turns spaces into underscores, which cannot be told from the text's own any more.
    """
    if newlines == "drop":
        text = text.replace(b"\n", b"")
    return text.replace(b" ", b"_") if spaces == "underscore" else text


def code_points(text: bytes) -> npt.NDArray[np.uint32]:
    """Return the code points of UTF-8 text."""
    if text.isascii():
        return np.frombuffer(text, dtype=np.uint8).astype(np.uint32)
    return np.frombuffer(text.decode().encode("utf-32-le"), dtype="<u4").astype(np.uint32, copy=False)


def character_ends(text: bytes) -> npt.NDArray[np.bool_]:
    """Say for each byte of UTF-8 text whether a character ends with it."""
    ends = np.empty(len(text), dtype=np.bool_)
    if len(text):
        ends[:-1] = (np.frombuffer(text, dtype=np.uint8)[1:] & 0xC0) != 0x80
        ends[-1] = True
    return ends
