"""Text out of files of any encoding, as UTF-8 cut at characters, and where it may be split."""

import codecs
import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from txlcli import UserError, files
from txlcli.sources.chunk import (
    Chunk,
    Sizes,
    character_ends,
    complete_utf8,
    convert,
    join_chunks,
)
from txlcli.sources.corpus import CHUNK_BYTES, WIDE, Corpus, Source, became_shorter
from txlcli.sources.documents import Part, character_unit, json_texts, mark_documents, select, settle
from txlcli.sources.guess import is_mostly_utf8, likely_encoding, marked_encoding, wide_encoding

NO_TEXT = {
    b"\x1f\x8b": "a gzip file: unpack it first",
    b"\xfd7zXZ": "an xz file: unpack it first",
    b"\x28\xb5\x2f\xfd": "a zstd file: unpack it first",
    b"BZh": "a bzip2 file: unpack it first",
    b"%PDF": "a PDF: extract its text first",
}
REPLACEMENT = "\ufffd"
# Encodings in which each character is written as it would be alone. A newline is one unit in them, and in
# those of several bytes a character has none below 0x30 after its first.
_STATELESS = re.compile(
    r"utf-(8|16|32)|ascii|latin|iso8859|cp\d|koi8|mac|kz1048|ptcp154|tis|hp-roman|gb|big5|shift_jis|euc_|johab"
)
# How far back such a byte is looked for.
_ANCHOR_BYTES = 1 << 16
# What of a file that is no text is looked at, at its start and on both sides of the fault.
_LOOKED_BYTES = 1 << 12


class NotText(UserError):
    """Bytes that are no text in the encoding that they are read in."""


def read_text(corpus: Corpus, start: int, stop: int, *, part: Part = "all") -> Iterator[bytes]:
    """Yield the text between two bytes of the corpus as UTF-8 chunks of about 1 MB, cut at characters.

    Both ends MUST stand at characters, as 0, `n_bytes` and `find_split` do. Raw bytes come as they are. The
    corpus' `newlines` and `spaces` are applied, also to raw bytes; separators of documents are left out.
    A packed file is unpacked from its start, unless another read has ended shortly before `start` or shortly
    after it.

    Raises:
        UserError: a file cannot be read, has become shorter, is damaged, is no text in its encoding under
            `strict`, or has no JSON lines where these are wanted: the message names file, byte or line, and
            remedy.
    """
    for chunk in read_chunks(corpus, start, stop, part=part):
        yield chunk.text


def read_chunks(
    corpus: Corpus,
    start: int,
    stop: int,
    *,
    sized: bool = False,
    watch: Callable[[bytes], object] | None = None,
    part: Part = "all",
) -> Iterator[Chunk]:
    """Yield what `read_text` does with its origin; `watch` sees the files' bytes, unpacked, on their way.

    `part` chooses documents by the corpus' `valid_every`; then `start` MUST be 0 and `stop` `n_bytes`.
    """
    chunks = read_documents(corpus, start, stop, sized=sized, watch=watch)
    if part != "all":
        assert corpus.valid_every is not None
        assert (start, stop) == (0, corpus.n_bytes)
        chunks = select(chunks, corpus.valid_every, part)
    yield from by_conventions(corpus, chunks)


def read_documents(
    corpus: Corpus,
    start: int,
    stop: int,
    *,
    sized: bool = False,
    watch: Callable[[bytes], object] | None = None,
) -> Iterator[Chunk]:
    """Yield text with its documents, but not by the corpus' `newlines` and `spaces` yet."""
    if not corpus.has_documents:
        return _read_files(corpus, start, stop, sized, watch)
    return settle(_gather(_read_files(corpus, start, stop, sized, watch)))


def by_conventions(corpus: Corpus, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Apply the corpus' `newlines` and `spaces`, and put small chunks together."""
    if corpus.newlines == "drop":
        chunks = _without_newlines(chunks, corpus)
    elif corpus.spaces != "keep":
        chunks = (chunk._replace(text=convert(chunk.text, "keep", corpus.spaces)) for chunk in chunks)
    # Documents may have lost all their text.
    yield from _gather(settle(chunks) if corpus.has_documents else chunks)


def find_place(corpus: Corpus, start: int, stop: int, offset: int, *, part: Part = "all") -> tuple[str, str]:
    """Name the file, and the place in it, of byte `offset` of the text that `read_text` gives.

    The place is a byte of the file, `byte 12`; in JSON lines, whose text has escapes, it is a line, `line 3`.

    Raises:
        UserError: as `read_text`.
    """
    unit = "byte" if corpus.text_field is None else "line"
    n_documents, is_open = 0, False  # those ended so far; there is text since
    for source, text, places, is_end in _segments(corpus, start, stop):
        is_held_out = corpus.valid_every is not None and (n_documents + 1) % corpus.valid_every == 0
        if part == "all" or is_held_out == (part == "valid"):
            kept = np.delete(places, _newlines(text)) if corpus.newlines == "drop" else places
            if offset < len(kept):
                return source.place, f"{unit} {kept[offset]}"
            offset -= len(kept)
        is_open = is_open or len(text) > 0
        if is_end and is_open:
            n_documents, is_open = n_documents + 1, False
    raise AssertionError("beyond the text")


def _segments(
    corpus: Corpus, start: int, stop: int
) -> Iterator[tuple[Source, bytes, npt.NDArray[np.int64], bool]]:
    """Yield text with its file, the place of each byte of it, and whether a document ends with it."""
    for source, lo, hi in _ranges(corpus, start, stop):
        chunks = _read_file(corpus, source, lo, hi, True, None)
        if corpus.text_field is not None:
            first_line = _line_of(source, lo)
            for line, text in json_texts(source, chunks, corpus.text_field, corpus.errors, first_line):
                yield source, text, np.full(len(text), line), True
            continue
        place = max(lo, source.n_mark)
        if corpus.has_documents:
            chunks = mark_documents(corpus, source, chunks, lo, hi == source.n_bytes, lambda: 1)
        for chunk in chunks:
            sizes = np.zeros(0, dtype=np.int64) if chunk.sizes is None else chunk.sizes.astype(np.int64)
            ends = [] if chunk.document_ends is None else chunk.document_ends.tolist()
            end_sizes = [] if chunk.end_sizes is None else chunk.end_sizes.tolist()
            begin = 0
            for end, end_size in [*zip(ends, end_sizes, strict=True), (len(chunk.text), None)]:
                some = sizes[begin:end]
                yield source, chunk.text[begin:end], place + np.cumsum(some) - some, end_size is not None
                place += int(some.sum()) + (end_size or 0)
                begin = end


def _read_files(
    corpus: Corpus, start: int, stop: int, sized: bool, watch: Callable[[bytes], object] | None
) -> Iterator[Chunk]:
    for source, lo, hi in _ranges(corpus, start, stop):
        chunks = _read_file(corpus, source, lo, hi, sized, watch)
        if corpus.has_documents:
            chunks = mark_documents(
                corpus, source, chunks, lo, hi == source.n_bytes, functools.partial(_line_of, source, lo)
            )
        yield from chunks


def _ranges(corpus: Corpus, start: int, stop: int) -> Iterator[tuple[Source, int, int]]:
    """Yield the files between two bytes of the corpus, each with the bytes of its own."""
    base = 0
    for source in corpus.sources:
        lo, hi = max(start - base, 0), min(stop - base, source.n_bytes)
        base += source.n_bytes
        if lo < hi:
            yield source, lo, hi


def _read_file(
    corpus: Corpus, source: Source, lo: int, hi: int, sized: bool, watch: Callable[[bytes], object] | None
) -> Iterator[Chunk]:
    is_utf8 = source.codec == "utf-8"
    read = _read_raw if corpus.reads_bytes else _read_utf8 if is_utf8 else _read_encoded
    is_changed = not corpus.reads_bytes and not (is_utf8 and corpus.errors == "strict")
    is_sized = sized or (is_changed and _needs_sizes(corpus, source))
    return read(source, lo, hi, corpus.errors, is_sized, watch)


def _needs_sizes(corpus: Corpus, source: Source) -> bool:
    """Say whether only sizes tell what parts of the text took in a file that is no UTF-8."""
    if not _STATELESS.match(source.codec):
        return corpus.has_documents or corpus.newlines == "drop"
    if corpus.valid_every is not None:
        return True
    separator = corpus.document_separator
    return corpus.text_field is not None or (separator is not None and not separator.isascii())


def _gather(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Join small chunks, as many small files and documents give them."""
    waiting: list[Chunk] = []
    n_waiting = 0
    for chunk in chunks:
        if waiting and n_waiting + len(chunk.text) > CHUNK_BYTES:
            yield join_chunks(waiting)
            waiting, n_waiting = [], 0
        waiting.append(chunk)
        n_waiting += len(chunk.text)
        if n_waiting > CHUNK_BYTES // 2:
            yield join_chunks(waiting)
            waiting, n_waiting = [], 0
    if waiting:
        yield join_chunks(waiting)


def _without_newlines(chunks: Iterable[Chunk], corpus: Corpus) -> Iterator[Chunk]:
    """Leave newlines out; where sizes are not asked for, what they took counts as skipped."""
    is_utf8 = corpus.reads_bytes or corpus.text_field is not None
    newline_bytes = 1 if is_utf8 else character_unit(corpus.encoding)
    n_waiting = 0  # left out since the last byte of text
    for chunk in chunks:
        ends, end_sizes = chunk.document_ends, chunk.end_sizes
        text = convert(chunk.text, "drop", corpus.spaces)
        if chunk.sizes is None:
            n_bytes = newline_bytes * (len(chunk.text) - len(text))
            n_waiting += n_bytes
            if text or ends is not None:
                n_last = (
                    newline_bytes * (len(chunk.text) - len(chunk.text.rstrip(b"\n"))) if text else n_waiting
                )
                if ends is not None and len(ends):
                    ends = ends - np.searchsorted(_newlines(chunk.text), ends)
                yield chunk._replace(
                    text=text,
                    source_bytes=chunk.source_bytes - n_bytes,
                    document_ends=ends,
                    skipped_bytes=chunk.skipped_bytes + n_waiting - n_last,
                )
                n_waiting = n_last
            continue
        newlines = _newlines(chunk.text)
        left_out = np.zeros(len(text) + 1, dtype=np.int64)
        np.add.at(left_out, newlines - np.arange(len(newlines)), chunk.sizes[newlines])
        left_out[0] += n_waiting
        n_waiting = int(left_out[-1])
        if text or ends is not None:
            sizes = np.delete(chunk.sizes, newlines)
            yield chunk._replace(
                text=text,
                sizes=sizes,
                source_bytes=int(sizes.sum()) + (0 if end_sizes is None else int(end_sizes.sum())),
                left_out=left_out[:-1],
                document_ends=None if ends is None else ends - np.searchsorted(newlines, ends),
            )


def _newlines(text: bytes) -> npt.NDArray[np.intp]:
    return np.flatnonzero(np.frombuffer(text, dtype=np.uint8) == ord("\n"))


def find_split(corpus: Corpus, wanted: int) -> int:
    """Move a byte of the corpus to where it may be split; it does not depend on the tokenizer.

    With documents that is the start of one nearest to it, if between half and twice as much comes after as
    wanted; in JSON lines the nearest in any case. Else it is the next start of a character; where the bytes
    around it are no UTF-8 the byte itself is returned, and `n_bytes` where less than two bytes would remain.

    Raises:
        UserError: a file cannot be read.
    """
    n_bytes = corpus.n_bytes
    if not 0 < wanted < n_bytes:
        return wanted
    if corpus.has_documents:
        n_after = n_bytes - wanted
        bounds = [(max(n_bytes - 2 * n_after, 1), n_bytes - max(n_after // 2, 2) + 1)]
        if corpus.text_field is not None:
            bounds = [(bounds[0][0], n_bytes - 1), (1, n_bytes - 1)]
        for lo, hi in bounds:
            split = _nearest_start(corpus, wanted, lo, hi)
            if split is not None:
                return split
        if corpus.text_field is not None:
            return n_bytes
    base = 0
    for source in corpus.sources:
        if base < wanted < base + source.n_bytes:
            align = _align_utf8 if source.codec == "utf-8" else _align_encoded
            split = base + align(source, wanted - base)
            return split if n_bytes - split >= 2 else n_bytes
        base += source.n_bytes
    return wanted


def _nearest_start(corpus: Corpus, wanted: int, lo: int, hi: int) -> int | None:
    """Return the document's start nearest to a byte of the corpus, from `lo` on, before `hi`; None: none."""
    before, base = None, 0
    for source in corpus.sources:
        if base < hi and base + source.n_bytes > lo:
            for start in _starts(corpus, source, max(lo - base, 0)):
                place = base + start
                if place >= hi:
                    break
                if place >= wanted:
                    return before if before is not None and wanted - before < place - wanted else place
                if place >= lo:
                    before = place
        base += source.n_bytes
    return before


def _starts(corpus: Corpus, source: Source, lo: int) -> Iterator[int]:
    """Yield the bytes of a file, from `lo` on, at which documents certainly start."""
    if lo == 0:
        yield 0
    if corpus.document_per_file:
        return
    # In raw bytes too the text is asked, so that both are split at the same place.
    mark = "\n" if corpus.text_field is not None else corpus.document_separator
    assert mark is not None
    separator = mark.encode()
    # Two separators may overlap, as in "\n\n\n". One that none overlaps from before ends a document also
    # for who reads from the file's start, so the search begins early enough to see such.
    begin = max(lo - 10 * len(separator), source.n_mark)
    texts: Iterator[tuple[bytes, Sizes | None]]
    if source.codec == "utf-8":
        texts = ((block, None) for block in _read_blocks(source, begin, source.n_bytes))
    else:
        begin = max(begin if begin == source.n_mark else _align_encoded(source, begin), source.n_mark)
        chunks = _read_encoded(source, begin, source.n_bytes, "replace", True, None)
        texts = ((chunk.text, chunk.sizes) for chunk in chunks)
    place, last = begin, -len(separator)  # of the text that follows `held`; of the last separator in `data`
    held, held_sizes = b"", np.zeros(0, dtype=np.uint32)
    for text, sizes in texts:
        data = held + text
        if sizes is None:
            ends = None
        else:
            data_sizes = np.concatenate([held_sizes, sizes])
            ends = np.cumsum(data_sizes)
        begin_place = place - (len(held) if ends is None else int(held_sizes.sum()))
        found = data.find(separator)
        while found >= 0:
            if found - last >= len(separator):
                stop = found + len(separator)
                start = begin_place + (stop if ends is None else int(ends[stop - 1]))
                if lo <= start < source.n_bytes:
                    yield start
            last = found
            found = data.find(separator, found + 1)
        n_held = min(len(separator) - 1, len(data))
        held = data[len(data) - n_held :]
        last -= len(data) - n_held
        if sizes is None:
            place += len(text)
        else:
            held_sizes = data_sizes[len(data) - n_held :]
            place += int(sizes.sum())


def _read_blocks(
    source: Source, lo: int, hi: int, watch: Callable[[bytes], object] | None = None
) -> Iterator[bytes]:
    read = _stored_blocks if source.packing == "none" else _unpacked_blocks
    try:
        for block in read(source, lo, hi):
            if watch is not None:
                watch(block)
            yield block
    except OSError as error:
        raise UserError(f"{source.name}: cannot be read; {files.describe_error(error)}") from error


def _stored_blocks(source: Source, lo: int, hi: int) -> Iterator[bytes]:
    try:
        fd = files.open_regular(source.path)
    except UserError as error:
        raise UserError(str(error).replace(str(source.path), source.name, 1)) from error
    try:
        while lo < hi:
            block = files.read_at(fd, min(CHUNK_BYTES, hi - lo), lo)
            if not block:
                raise became_shorter(source, os.fstat(fd).st_size)
            lo += len(block)
            yield block
    finally:
        os.close(fd)


def _unpacked_blocks(source: Source, lo: int, hi: int) -> Iterator[bytes]:
    unpacker = source.unpackers.take(source.path, source.packing, source.name, lo)
    try:
        while lo < hi:
            block = unpacker.read(lo, min(lo + CHUNK_BYTES, hi))
            if not block:
                raise became_shorter(source, source.path.stat().st_size)
            lo += len(block)
            yield block
    except GeneratorExit:
        source.unpackers.give(unpacker)
        raise
    source.unpackers.give(unpacker)


def _read_raw(
    source: Source, lo: int, hi: int, errors: str, sized: bool, watch: Callable[[bytes], object] | None
) -> Iterator[Chunk]:
    """Yield bytes as they are, where they are UTF-8 cut at characters."""
    rest = b""
    for block in _read_blocks(source, lo, hi, watch):
        lo += len(block)
        data = rest + block
        cut = len(data) if lo == hi else complete_utf8(data)
        text, rest = data[:cut], data[cut:]
        if text:
            yield Chunk(text, np.ones(len(text), dtype=np.uint32) if sized else None, len(text), 0)


def _read_utf8(
    source: Source, lo: int, hi: int, errors: str, sized: bool, watch: Callable[[bytes], object] | None
) -> Iterator[Chunk]:
    rest, place = b"", lo
    for block in _read_blocks(source, lo, hi, watch):
        if place < source.n_mark:
            dropped = min(source.n_mark - place, len(block))
            block, place = block[dropped:], place + dropped
        data = rest + block
        cut = len(data) if place + len(data) == hi else complete_utf8(data)
        text, rest = data[:cut], data[cut:]
        if text:
            yield _check_utf8(source, place, text, errors, sized)
        place += len(text)


def _check_utf8(source: Source, place: int, data: bytes, errors: str, sized: bool) -> Chunk:
    try:
        if not data.isascii():
            data.decode()
    except UnicodeDecodeError as error:
        if errors == "strict":
            raise _not_text(source, place + error.start, data[error.start : error.end]) from None
        text = data.decode(errors="replace").encode()
        mark = REPLACEMENT.encode()
        n_kept = len(text) - len(mark) * (text.count(mark) - data.count(mark))
        sizes = None
        if sized:
            measured = _measure(codecs.getincrementaldecoder("utf-8")("replace"), data, 0, final=True)
            sizes = _spread(text, measured.sizes)
        return Chunk(text, sizes, len(data), len(data) - n_kept)
    return Chunk(data, np.ones(len(data), dtype=np.uint32) if sized else None, len(data), 0)


def _read_encoded(
    source: Source, lo: int, hi: int, errors: str, sized: bool, watch: Callable[[bytes], object] | None
) -> Iterator[Chunk]:
    """Decode, from the file's start where an encoding carries state, and yield from `lo` on."""
    decoder = codecs.getincrementaldecoder(source.codec)(errors)
    place = source.n_mark
    if lo < place:
        for block in _read_blocks(source, lo, min(place, hi), watch):
            lo += len(block)
    if _STATELESS.match(source.codec):
        place = max(lo, place)
    for block in _read_blocks(source, place, lo):
        _decode(decoder, block, source, place, final=False)
        place += len(block)
    is_stateless = _STATELESS.match(source.codec) is not None
    taken = n_read = 0  # bytes since the last character; since the last chunk
    lengths = np.zeros(sys.maxunicode + 1, dtype=np.uint8)
    for block in _read_blocks(source, place, hi, watch):
        state = decoder.getstate()
        final = place + len(block) == source.n_bytes
        text, in_utf8 = _decode(decoder, block, source, place, final=final)
        place += len(block)
        n_read += len(block)
        after = decoder.getstate()
        n_waiting = len(after[0]) if is_stateless else 0
        n_replaced, source_bytes, spread = 0, n_read - n_waiting, None
        if sized or (errors == "replace" and REPLACEMENT in text):
            # After bytes that were wrong more may be taken than wait in the decoder.
            is_regular = taken == len(state[0])
            known = _look_up(source.codec, text, state, after, block, lengths) if is_regular else None
            if known is not None:
                sizes, taken = known, len(after[0])
            else:
                again = codecs.getincrementaldecoder(source.codec)(errors)
                again.setstate(state)
                try:
                    _, sizes, taken = _measure(again, block, taken, final=final)
                except UnicodeError as error:  # in encodings that carry state not all can be replaced
                    raise _undecodable(source, place - len(block), error) from error
            if errors == "replace":
                points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
                n_replaced = int(sizes[points == ord(REPLACEMENT)].sum())
            if sized:
                spread, source_bytes = _spread(in_utf8, sizes), int(sizes.sum())
        else:
            taken = len(after[0])
        if text:
            yield Chunk(in_utf8, spread, source_bytes, n_replaced)
            n_read = n_waiting


class _Measured(NamedTuple):
    """Decoded text, the bytes that each character took, and the bytes taken since the last one."""

    text: str
    sizes: Sizes
    taken: int


def _look_up(
    codec: str,
    text: str,
    before: tuple[bytes, int],
    after: tuple[bytes, int],
    block: bytes,
    lengths: npt.NDArray[np.uint8],
) -> Sizes | None:
    """Return the bytes of each character where every one is written as it would be alone; None: not so.

    `before` and `after` are the decoder's states around the block; `lengths` keeps what is known.
    """
    if not _STATELESS.match(codec):
        return None
    data = before[0] + block
    data = data[: len(data) - len(after[0])]
    points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    try:
        if text.encode(codec) != data:
            return None
        for point in np.unique(points[lengths[points] == 0]).tolist():
            lengths[point] = len(chr(point).encode(codec))
    except UnicodeError:
        return None
    sizes = lengths[points].astype(np.uint32)
    return sizes if int(sizes.sum()) == len(data) else None


def _measure(decoder: codecs.IncrementalDecoder, block: bytes, taken: int, *, final: bool) -> _Measured:
    """Decode byte by byte, since only a decoder knows which bytes make a character.

    Of several characters that one byte completes, the first was wrong before it, so that each of the
    others took one byte.
    """
    parts, sizes = [], []
    for index in range(len(block)):
        taken += 1
        some = decoder.decode(block[index : index + 1], final and index == len(block) - 1)
        if some:
            parts.append(some)
            first = max(taken - len(some) + 1, 0)
            sizes.append(first)
            sizes.extend([1] * min(len(some) - 1, taken - first))
            sizes.extend([0] * (len(some) - 1 - (taken - first)))
            taken = 0
    return _Measured("".join(parts), np.array(sizes, dtype=np.uint32), taken)


def _spread(text: bytes, sizes: Sizes) -> Sizes:
    """Give each character's size to its last byte in UTF-8."""
    spread = np.zeros(len(text), dtype=np.uint32)
    spread[character_ends(text)] = sizes
    return spread


def _decode(
    decoder: codecs.IncrementalDecoder, block: bytes, source: Source, place: int, *, final: bool
) -> tuple[str, bytes]:
    """Return a block's text, also in UTF-8."""
    try:
        text = decoder.decode(block, final)
        return text, text.encode()
    except UnicodeDecodeError as error:
        # What the decoder still held stands before the block in the bytes that it complains of.
        start = place + len(block) - len(error.object) + error.start
        raise _not_text(source, start, error.object[error.start : error.end]) from None
    except UnicodeError as error:
        raise _undecodable(source, place, error) from error


def _undecodable(source: Source, place: int, error: UnicodeError) -> NotText:
    """Word the refusal of bytes of which their decoder says no more."""
    return NotText(
        f"{source.place}: not {source.told_codec} after byte {place}; got {error}; convert it to utf-8 first"
    )


def _align_utf8(source: Source, place: int) -> int:
    window = b"".join(_read_blocks(source, place, min(place + 4, source.n_bytes)))
    for index, byte in enumerate(window):
        if byte & 0xC0 != 0x80:
            return place + index
    return place + len(window) if len(window) < 4 else place


def _align_encoded(source: Source, place: int) -> int:
    # Replacing, so that raw bytes and text of the same file are split at the same place.
    decoder = codecs.getincrementaldecoder(source.codec)("replace")
    try:
        for block in _read_blocks(source, _certain_start(source, place), place):
            decoder.decode(block)
        for block in _read_blocks(source, place, source.n_bytes):
            for index in range(len(block)):
                if not decoder.getstate()[0]:
                    return place + index
                decoder.decode(block[index : index + 1])
            place += len(block)
    except UnicodeError:
        return place
    return place


def _certain_start(source: Source, place: int) -> int:
    """Return a byte at or before `place` from which on a file decodes as it does from its start."""
    if not _STATELESS.match(source.codec):
        return 0
    unit = character_unit(source.codec)
    if unit > 1:
        # Some units suffice: of those before a character has two at most.
        return max(place // unit - 64, 0) * unit
    begin = max(place - _ANCHOR_BYTES, 0)
    window = np.frombuffer(b"".join(_read_blocks(source, begin, place)), dtype=np.uint8)
    anchors = np.flatnonzero(window < 0x30)
    return begin + int(anchors[-1]) + 1 if len(anchors) else 0


def _not_text(source: Source, place: int, bad: bytes) -> NotText:
    """Word the refusal of bytes that are no text, with the remedy that fits what the file looks like."""
    got = " ".join(f"0x{byte:02x}" for byte in bad[:4])
    if place + len(bad) == source.n_bytes and len(bad) < 4 and _is_cut(source.codec, bad):
        got += " at its end, the beginning of a character"
    where = f"byte {place}, line {_line_of(source, place)}"
    return NotText(f"{source.place}: not {source.told_codec} at {where}; got {got}; {_remedy(source, place)}")


def _remedy(source: Source, place: int) -> str:
    # Those who score a text have no other flag than --encoding.
    otherwise = "train with --encoding-errors replace or --tokenizer byte"
    head = _head(source)
    for magic, kind in NO_TEXT.items():
        if head.startswith(magic):
            return f"it looks like {kind}, or train with --tokenizer byte"
    marked = marked_encoding(head)
    if marked is not None and not source.codec.startswith(marked):
        return f"it looks like {marked}: use --encoding {marked}"
    window = _window(source, place)
    likely = marked or likely_encoding(head, window)
    if (likely is not None and source.codec.startswith(likely)) or (
        source.codec == "utf-8" and is_mostly_utf8(window)
    ):
        return f"the rest looks like {source.encoding}: mend these bytes, or {otherwise}"
    if likely is not None:
        return f"it may be {likely}: try --encoding {likely}, or {otherwise}"
    if source.codec == "utf-8":
        return f"name its encoding (is it cp1252? --encoding cp1252), or {otherwise}"
    return f"name its encoding with --encoding, or {otherwise}"


def remedy_of_nuls(source: Source) -> str:
    """Word what to do about NUL bytes in a file that was read as text; empty: nothing is known."""
    likely = wide_encoding(_head(source))
    return "" if likely is None else f"; it may be {likely}: try --encoding {likely}"


def _head(source: Source) -> bytes:
    return b"".join(_read_blocks(source, 0, min(_LOOKED_BYTES, source.n_bytes)))


def _window(source: Source, place: int) -> bytes:
    """Return some bytes around one, from a place on where in most encodings a character begins."""
    begin = max(place - _LOOKED_BYTES, 0)
    window = b"".join(_read_blocks(source, begin, min(place + _LOOKED_BYTES, source.n_bytes)))
    if begin == 0:
        return window
    sign = re.search(rb"[\x00-\x2f]", window[: place - begin])
    return window if sign is None else window[sign.end() :]


def _is_cut(codec: str, bad: bytes) -> bool:
    decoder = codecs.getincrementaldecoder(codec)()
    try:
        return decoder.decode(bad) == ""
    except UnicodeError:
        return False


def _line_of(source: Source, place: int) -> int:
    """Return the line, counted from 1, on which a byte of a file stands."""
    decoder = codecs.getincrementaldecoder(source.codec)("replace") if source.codec in WIDE else None
    line = 1
    for block in _read_blocks(source, 0, place):
        line += block.count(b"\n") if decoder is None else decoder.decode(block).count("\n")
    return line
