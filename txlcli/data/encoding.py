"""Pieces of text to ids and counts: a function of the piece alone, in whichever process it runs."""

import functools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from txlcli.data.store import smallest_dtype
from txlcli.sources import Chunk, Corpus, character_ends, code_points
from txlcli.tokenizer import Ids, Tokenizer

# Counting takes some fifty times this.
COUNTED_BYTES = 1 << 18
# In bytes of UTF-8.
LONGEST_CHARACTER = 4
# Each symbol is a unit of these vocabularies, so that documents need not be encoded one by one.
SYMBOLS = ("byte", "char")


class Piece(NamedTuple):
    """Whole units of text; `sizes`, `left_out`, `document_ends` and `end_sizes` as in `Chunk`.

    `following` begins with the character after it, a newline even if that is left out; `source_bytes` and
    `read_bytes` count those read so far.
    """

    text: bytes
    sizes: npt.NDArray[np.uint32] | None = None
    left_out: npt.NDArray[np.int64] | None = None
    following: bytes = b""
    document_ends: npt.NDArray[np.int64] | None = None
    end_sizes: npt.NDArray[np.int64] | None = None
    source_bytes: int = 0
    read_bytes: int = 0

    def part(self, start: int, stop: int) -> "Piece":
        """Return some bytes of the text with their sizes and what was left out before each."""
        return self._replace(
            text=self.text[start:stop],
            sizes=None if self.sizes is None else self.sizes[start:stop],
            left_out=None if self.left_out is None else self.left_out[start:stop],
        )


class Rules(NamedTuple):
    """How the pieces of a store are encoded.

    Attributes:
        dtype: The type of its ids.
        is_text: Characters and words can be counted, unless the bytes turn out to be no UTF-8.
        has_underscores: Underscores may have been spaces, and end words.
        n_separator: Characters of what separates documents in the file.
    """

    dtype: str
    is_text: bool
    has_underscores: bool
    n_separator: int

    @classmethod
    def of(cls, corpus: Corpus, dtype: str) -> "Rules":
        """Return those of a corpus."""
        return cls(
            dtype=dtype,
            # Characters of raw bytes are counted where they are UTF-8, and only there.
            is_text=not corpus.raw or corpus.encoding == "utf-8",
            has_underscores=corpus.spaces == "underscore",
            n_separator=len(corpus.document_separator or ""),
        )


class Encoded(NamedTuple):
    """What a piece of text has become.

    Attributes:
        ids: The ids, little-endian in the type of the store.
        n_tokens: How many they are.
        n_unknown: Those among them that stand for lost text.
        n_characters: The characters of the piece; None: not asked for, or not known.
        n_words: The words that end in it; None: as `n_characters`.
        counts: [n, 3] source bytes, characters and words that end with each token; None: not asked for.
        gaps: [k, 2] tokens of the piece before which the sum of bytes left out, counted from the piece's
            start, has grown, and that sum; the first token always; None: nothing can be left out.
        n_left_out: The bytes left out in all.
    """

    ids: bytes
    n_tokens: int
    n_unknown: int
    n_characters: int | None
    n_words: int | None
    counts: npt.NDArray[np.unsignedinteger[Any]] | None = None
    gaps: npt.NDArray[np.int64] | None = None
    n_left_out: int = 0


def cut_chunk(chunk: Chunk, n_bytes: int) -> Iterator[Chunk]:
    """Cut a chunk, whose sizes are known, at characters about every `n_bytes`."""
    start, text, sizes = 0, chunk.text, chunk.sizes
    if len(text) <= n_bytes or sizes is None:
        yield chunk
        return
    ends, end_sizes = getattr(chunk, "document_ends", None), getattr(chunk, "end_sizes", None)
    while start < len(text):
        stop = min(start + max(n_bytes, LONGEST_CHARACTER), len(text))
        if stop < len(text):
            # Bytes that are no text may have no character's start among these.
            nearest = range(stop, stop - LONGEST_CHARACTER, -1)
            stop = next((place for place in nearest if text[place] & 0xC0 != 0x80), stop)
        more: dict[str, Any] = {}
        source_bytes = int(sizes[start:stop].sum())
        if ends is not None and end_sizes is not None:
            is_here = (ends > start) & (ends <= stop)
            source_bytes += int(end_sizes[is_here].sum())
            more = {"document_ends": ends[is_here] - start, "end_sizes": end_sizes[is_here]}
        if stop < len(text) and hasattr(chunk, "skipped_bytes"):
            more["skipped_bytes"] = 0
        yield chunk._replace(
            text=text[start:stop],
            sizes=sizes[start:stop],
            source_bytes=source_bytes,
            n_replaced=chunk.n_replaced if stop == len(text) else 0,
            left_out=None if chunk.left_out is None else chunk.left_out[start:stop],
            **more,
        )
        start = stop


def whole_units(tokenizer: Tokenizer, chunks: Iterator[Chunk]) -> Iterator[Piece]:
    """Cut text where the tokenizer's units end, so that encoding it piece by piece equals one pass.

    The end of a document ends a unit.
    """
    last: Piece | None = None
    for piece in cut_units(tokenizer, chunks):
        if last is not None:
            yield last._replace(following=b"\n" if _begins_anew(piece) else piece.text[:4])
        last = piece
    if last is not None:
        yield last


def _begins_anew(piece: Piece) -> bool:
    """Say whether a newline that is left out, or the end of a document, stands right before a piece."""
    is_after_newline = piece.left_out is not None and len(piece.left_out) > 0 and piece.left_out[0] > 0
    ends = piece.document_ends
    return bool(is_after_newline or (ends is not None and len(ends) and ends[0] == 0))


def cut_units(tokenizer: Tokenizer, chunks: Iterator[Chunk]) -> Iterator[Piece]:
    """Do as `whole_units`, but without `following`."""
    rest = Piece(b"")
    for chunk in chunks:
        ends, end_sizes = getattr(chunk, "document_ends", None), getattr(chunk, "end_sizes", None)
        read = Piece(
            text=rest.text + chunk.text,
            sizes=_join(rest.sizes, chunk.sizes),
            left_out=_join(rest.left_out, chunk.left_out),
            document_ends=None if ends is None else ends + len(rest.text),
            end_sizes=end_sizes,
            source_bytes=rest.source_bytes + chunk.source_bytes,
            read_bytes=rest.read_bytes + chunk.read_bytes,
        )
        ended = [] if read.document_ends is None else read.document_ends[-1:].tolist()
        n_ended = sum(ended)
        cut = n_ended + tokenizer.complete_prefix(read.text[n_ended:])
        if cut or ended:
            yield read.part(0, cut)
        rest = read.part(cut, len(read.text))._replace(document_ends=None, end_sizes=None)
    if rest.text:
        yield rest


def _join(before: npt.NDArray[Any] | None, after: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
    return after if before is None or after is None else np.concatenate([before, after])


def encode(tokenizer: Tokenizer, piece: Piece, rules: Rules, *, is_counted: bool) -> Encoded:
    """Turn a piece into ids and, if asked, count what ends with each.

    The document's end follows each document. What the file had for it, such as a separator, ends with it.

    Raises:
        OutsideVocabulary: as `Tokenizer.encode`.
    """
    ids, ends, places = _encode_documents(tokenizer, piece, with_ends=is_counted)
    n_characters, n_words, counts, gaps, n_left_out = None, None, None, None, 0
    if ends is not None:
        columns, is_text = _count(piece, ends, places, rules)
        if is_text:
            n_characters, n_words = int(columns[1].sum()), int(columns[2].sum())
        most = max((int(column.max()) for column in columns if len(column)), default=0)
        counts = np.stack(columns, axis=1).astype(smallest_dtype(most))
        if piece.left_out is not None and len(piece.left_out):
            gaps, n_left_out = _gaps(piece.left_out, ends)
    elif rules.is_text:
        n_characters = _count_characters(piece.text)
        if piece.end_sizes is not None:
            n_characters += rules.n_separator * int(np.count_nonzero(piece.end_sizes))
    return Encoded(
        ids=ids.astype(np.dtype(rules.dtype).newbyteorder("<")).tobytes(),
        n_tokens=len(ids),
        n_unknown=0 if tokenizer.is_lossless else tokenizer.unknown_count(ids),
        n_characters=n_characters,
        n_words=n_words,
        counts=counts,
        gaps=gaps,
        n_left_out=n_left_out,
    )


def _encode_documents(
    tokenizer: Tokenizer, piece: Piece, *, with_ends: bool
) -> tuple[Ids, npt.NDArray[np.int64] | None, npt.NDArray[np.int64] | None]:
    """Return ids, their ends in the text (None: not asked for), and the places of documents' ends in them."""
    document_end = getattr(tokenizer, "document_end", None)
    if piece.document_ends is None or document_end is None:
        if with_ends:
            return *tokenizer.encode_with_ends(piece.text), None
        return tokenizer.encode(piece.text), None, None
    if tokenizer.kind in SYMBOLS:
        ids, ends = tokenizer.encode_with_ends(piece.text)
        before = np.searchsorted(ends, piece.document_ends, side="right")
        ids = np.insert(ids, before, document_end)
        ends = np.insert(ends, before, piece.document_ends)
        return ids, ends, before + np.arange(len(before))
    some_ids, some_ends, lengths, start = [], [], [], 0
    for stop in (*piece.document_ends.tolist(), len(piece.text)):
        ids, ends = tokenizer.encode_with_ends(piece.text[start:stop])
        some_ids += [ids, np.array([document_end], ids.dtype)]
        some_ends += [ends + start, np.array([stop])]
        lengths.append(len(ids) + 1)
        start = stop
    # No document ends with the text that is left.
    ids, ends = np.concatenate(some_ids[:-1]), np.concatenate(some_ends[:-1])
    return ids, ends, np.cumsum(lengths[:-1], dtype=np.int64) - 1


def _count_characters(text: bytes) -> int:
    # Of UTF-8 all bytes but those that go on with a character, which are the lowest of the signed ones.
    return int(np.count_nonzero(np.frombuffer(text, dtype=np.int8) >= -64))


def _count(
    piece: Piece, ends: npt.NDArray[np.int64], places: npt.NDArray[np.int64] | None, rules: Rules
) -> tuple[list[npt.NDArray[np.uint32]], bool]:
    """Count the source bytes, characters and words that end with each token, and say whether it is text."""
    n_text = len(piece.text)
    sizes = np.ones(n_text, dtype=np.uint32) if piece.sizes is None else piece.sizes
    marks_by_kind: list[npt.NDArray[Any]] = [sizes]
    if rules.is_text:
        with suppress(ValueError):
            marks_by_kind += _mark_ends(piece, has_underscores=rules.has_underscores)
    is_text = len(marks_by_kind) == 3
    columns = [_differences(marks, ends) for marks in marks_by_kind]
    columns += [np.zeros_like(columns[0]) for _ in range(3 - len(columns))]
    if places is not None and piece.end_sizes is not None:
        columns[0][places] += piece.end_sizes.astype(np.uint32)
        if is_text:
            columns[1][places] += np.where(piece.end_sizes > 0, rules.n_separator, 0).astype(np.uint32)
    return columns, is_text


def _mark_ends(piece: Piece, *, has_underscores: bool) -> list[npt.NDArray[np.bool_]]:
    """Say for each byte whether a character, and whether a word ends with it.

    Words are those of the file: a newline that is left out ends one, so does the end of a document, and so
    does an underscore that may have been a space.

    Raises:
        ValueError: the bytes of the file are no UTF-8.
    """
    characters = character_ends(piece.text)
    # What follows may be cut inside its second character, of which nothing is asked.
    after = piece.following.decode(errors="ignore")[:1] or "\n"
    points = np.append(code_points(piece.text), np.uint32(ord(after)))
    is_space = _is_space(points)
    if has_underscores:
        is_space |= points == ord("_")
    is_before_space = is_space[1:].copy()
    if piece.left_out is not None:
        begins = np.append(True, characters[:-1])[: len(characters)]
        if piece.left_out[~begins].any():
            raise ValueError("a newline stood inside a character")
        is_before_space[:-1] |= piece.left_out[begins][1:] > 0
    words = np.zeros(len(piece.text), dtype=np.bool_)
    words[characters] = ~is_space[:-1] & is_before_space
    if piece.document_ends is not None:
        last = piece.document_ends[piece.document_ends > 0] - 1
        is_sign = np.zeros(len(piece.text), dtype=np.bool_)
        is_sign[characters] = ~is_space[:-1]
        words[last] = is_sign[last]
    return [characters, words]


def _is_space(points: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
    spaces: npt.NDArray[np.bool_] = _space_table()[np.minimum(points, 0x3001)]
    return spaces


@functools.cache
def _space_table() -> npt.NDArray[np.bool_]:
    # No character beyond U+3000 is white space.
    return np.array([chr(point).isspace() for point in range(0x3002)])


def _differences(marks: npt.NDArray[Any], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """Sum marks per byte between one end and the next."""
    running = np.zeros(len(marks) + 1, dtype=np.uint32)
    np.cumsum(marks, out=running[1:])
    at_end = running[ends]
    at_end[1:] -= at_end[:-1].copy()
    return at_end


def _gaps(
    left_out: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64] | None, int]:
    """Find the tokens before which bytes were left out, as `Encoded.gaps`; and count all those bytes."""
    before_byte = np.cumsum(left_out)
    if not len(ends):
        return None, int(before_byte[-1])
    starts = np.minimum(np.append(0, ends[:-1]), len(left_out) - 1)
    before_token = before_byte[starts]
    grown = np.flatnonzero(np.diff(before_token, prepend=-1))
    return np.stack([grown, before_token[grown]], axis=1), int(before_byte[-1])
