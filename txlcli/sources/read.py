"""Text out of files of any encoding, as UTF-8 cut at characters, and where it may be split."""

import codecs
import os
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from txlcli import UserError, files
from txlcli.sources.corpus import CHUNK_BYTES, WIDE, Corpus, Newlines, Source, Spaces, became_shorter

PACKED = {
    b"\x1f\x8b": "a gzip file",
    b"\xfd7zXZ": "an xz file",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"BZh": "a bzip2 file",
    b"PK\x03\x04": "a zip file",
    b"%PDF": "a PDF",
}
REPLACEMENT = "\ufffd"

Sizes: TypeAlias = npt.NDArray[np.uint32]


class Chunk(NamedTuple):
    """A piece of text as UTF-8 that ends at a character (raw: any bytes), and what it was in the file.

    `sizes[i]` counts the bytes of the file that end with byte i of the text; None: not asked for.
    `source_bytes` is their sum, `n_replaced` those among them that are no text. `left_out[i]` counts the
    bytes of the file that stand right before byte i's own and are no part of the text: newlines that are
    dropped; None: none is left out.
    """

    text: bytes
    sizes: Sizes | None
    source_bytes: int
    n_replaced: int
    left_out: npt.NDArray[np.int64] | None = None

    @property
    def read_bytes(self) -> int:
        """The bytes of the file up to the last of the text, left out or not."""
        return self.source_bytes + (0 if self.left_out is None else int(self.left_out.sum()))


def convert(text: bytes, newlines: Newlines, spaces: Spaces) -> bytes:
    r"""Return a text as a run reads it, by its settings `newlines` and `spaces`.

    `drop` leaves every byte `\n` out, so that of `\r\n` the `\r` stays; `eos` is the vocabulary's affair.
    `underscore` turns spaces into underscores, which cannot be told from the text's own any more.
    """
    if newlines == "drop":
        text = text.replace(b"\n", b"")
    return text.replace(b" ", b"_") if spaces == "underscore" else text


def read_text(corpus: Corpus, start: int, stop: int) -> Iterator[bytes]:
    """Yield the text between two bytes of the corpus as UTF-8 chunks of about 1 MB, cut at characters.

    Both ends MUST stand at characters, as 0, `n_bytes` and `find_split` do. Raw bytes come as they are. The
    corpus' `newlines` and `spaces` are applied, also to raw bytes.

    Raises:
        UserError: a file cannot be read, has become shorter, or is no text in its encoding under
            `strict`: the message names file, byte, line and remedy.
    """
    for chunk in read_chunks(corpus, start, stop):
        yield chunk.text


def read_chunks(
    corpus: Corpus,
    start: int,
    stop: int,
    *,
    sized: bool = False,
    watch: Callable[[bytes], object] | None = None,
) -> Iterator[Chunk]:
    """Yield what `read_text` does with its origin; `watch` sees the bytes of the files on their way."""
    if corpus.newlines == "drop":
        # What a newline took in the file is known by its size only.
        yield from _without_newlines(_read_files(corpus, start, stop, True, watch), corpus.spaces)
        return
    for chunk in _read_files(corpus, start, stop, sized, watch):
        yield chunk._replace(text=convert(chunk.text, corpus.newlines, corpus.spaces))


def _read_files(
    corpus: Corpus, start: int, stop: int, sized: bool, watch: Callable[[bytes], object] | None
) -> Iterator[Chunk]:
    base = 0
    for source in corpus.sources:
        lo, hi = max(start - base, 0), min(stop - base, source.n_bytes)
        base += source.n_bytes
        if lo < hi:
            read = _read_raw if corpus.raw else _read_utf8 if source.codec == "utf-8" else _read_encoded
            yield from read(source, lo, hi, corpus.errors, sized, watch)


def _without_newlines(chunks: Iterable[Chunk], spaces: Spaces) -> Iterator[Chunk]:
    waiting = 0  # left out since the last byte of text
    for chunk in chunks:
        assert chunk.sizes is not None
        is_kept = np.frombuffer(chunk.text, dtype=np.uint8) != ord("\n")
        before = waiting + np.cumsum(np.where(is_kept, 0, chunk.sizes), dtype=np.int64)
        left_out = np.diff(before[is_kept], prepend=0)
        waiting = int(before[-1]) - int(left_out.sum())
        if len(left_out):
            sizes = chunk.sizes[is_kept]
            text = convert(chunk.text, "drop", spaces)
            yield Chunk(text, sizes, int(sizes.sum()), chunk.n_replaced, left_out)


def find_split(corpus: Corpus, wanted: int) -> int:
    """Move a byte of the corpus forward to the start of a character; it does not depend on the tokenizer.

    Where the bytes around it are no UTF-8 the byte itself is returned, and `n_bytes` where less than two
    bytes would remain.

    Raises:
        UserError: a file cannot be read.
    """
    base = 0
    for source in corpus.sources:
        if base < wanted < base + source.n_bytes:
            align = _align_utf8 if source.codec == "utf-8" else _align_encoded
            split = base + align(source, wanted - base)
            return split if corpus.n_bytes - split >= 2 else corpus.n_bytes
        base += source.n_bytes
    return wanted


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


def _read_blocks(
    source: Source, lo: int, hi: int, watch: Callable[[bytes], object] | None = None
) -> Iterator[bytes]:
    try:
        fd = files.open_regular(source.path)
    except UserError as error:
        raise UserError(str(error).replace(str(source.path), source.name, 1)) from error
    try:
        while lo < hi:
            block = files.read_at(fd, min(CHUNK_BYTES, hi - lo), lo)
            if not block:
                raise became_shorter(source, os.fstat(fd).st_size)
            if watch is not None:
                watch(block)
            lo += len(block)
            yield block
    except OSError as error:
        raise UserError(f"{source.name}: cannot be read; {files.describe_error(error)}") from error
    finally:
        os.close(fd)


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
    """Decode from the file's start, since an encoding may carry state; yield from `lo` on."""
    decoder = codecs.getincrementaldecoder(source.codec)(errors)
    place = source.n_mark
    if lo < place:
        for block in _read_blocks(source, lo, min(place, hi), watch):
            lo += len(block)
    for block in _read_blocks(source, place, lo):
        _decode(decoder, block, source, place, final=False)
        place += len(block)
    taken = 0
    for block in _read_blocks(source, place, hi, watch):
        state = decoder.getstate()
        final = place + len(block) == source.n_bytes
        text = _decode(decoder, block, source, place, final=final)
        place += len(block)
        n_replaced, source_bytes, spread = 0, len(block), None
        if sized or (errors == "replace" and REPLACEMENT in text):
            if taken == 0 and len(text) == len(block) and not state[0] and not decoder.getstate()[0]:
                sizes = np.ones(len(text), dtype=np.uint32)
            else:
                again = codecs.getincrementaldecoder(source.codec)(errors)
                again.setstate(state)
                _, sizes, taken = _measure(again, block, taken, final=final)
            if errors == "replace":
                points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
                n_replaced = int(sizes[points == ord(REPLACEMENT)].sum())
            if sized:
                spread, source_bytes = _spread(text.encode(), sizes), int(sizes.sum())
        if text:
            yield Chunk(text.encode(), spread, source_bytes, n_replaced)


class _Measured(NamedTuple):
    """Decoded text, the bytes that each character took, and the bytes taken since the last one."""

    text: str
    sizes: Sizes
    taken: int


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
) -> str:
    try:
        text = decoder.decode(block, final)
        text.encode()
    except UnicodeDecodeError as error:
        # What the decoder still held stands before the block in the bytes that it complains of.
        start = place + len(block) - len(error.object) + error.start
        raise _not_text(source, start, error.object[error.start : error.end]) from None
    except UnicodeError as error:
        raise UserError(f"{source.name}: not {source.codec} after byte {place}; {error}") from error
    return text


def complete_utf8(data: bytes) -> int:
    """Return how many leading bytes end with a whole character of UTF-8."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return len(data) - back if length > back else len(data)
    return len(data)


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
        for block in _read_blocks(source, 0, place):
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


def _not_text(source: Source, place: int, bad: bytes) -> UserError:
    """Word the refusal of bytes that are no text, with the remedy that fits what the file looks like."""
    head = b"".join(_read_blocks(source, 0, min(4, source.n_bytes)))
    # Those who score a text have no other flag than the first.
    remedy = "name its encoding (--encoding cp1252), "
    remedy += "or train with --encoding-errors replace or --tokenizer byte"
    for magic, kind in PACKED.items():
        if head.startswith(magic):
            remedy = f"it looks like {kind}: unpack it first, or train with --tokenizer byte"
    if source.codec == "utf-8" and head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        remedy = "it looks like utf-16: use --encoding utf-16"
    got = " ".join(f"0x{byte:02x}" for byte in bad[:4])
    if place + len(bad) == source.n_bytes and len(bad) < 4 and _is_cut(source.codec, bad):
        got += " at its end, the beginning of a character"
    line = _line_of(source, place)
    return UserError(f"{source.name}: not {source.codec} at byte {place}, line {line}; got {got}; {remedy}")


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
