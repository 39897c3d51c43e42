"""Text of one file in any encoding, as UTF-8 cut at characters."""

import codecs
import re
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from txlcli.sources.blocks import read_blocks
from txlcli.sources.chunk import Chunk, Sizes, character_ends, complete_utf8
from txlcli.sources.corpus import Source
from txlcli.sources.documents import character_unit
from txlcli.sources.fault import not_text, undecodable

REPLACEMENT = "\ufffd"
# Encodings in which each character is written as it would be alone. A newline is one unit in them, and in
# those of several bytes a character has none below 0x30 after its first.
STATELESS = re.compile(
    r"utf-(8|16|32)|ascii|latin|iso8859|cp\d|koi8|mac|kz1048|ptcp154|tis|hp-roman|gb|big5|shift_jis|euc_|johab"
)
# How far back such a byte is looked for.
_ANCHOR_BYTES = 1 << 16


def read_raw(
    source: Source, lo: int, hi: int, errors: str, sized: bool, watch: Callable[[bytes], object] | None
) -> Iterator[Chunk]:
    """Yield bytes as they are, where they are UTF-8 cut at characters."""
    rest = b""
    for block in read_blocks(source, lo, hi, watch):
        lo += len(block)
        data = rest + block
        cut = len(data) if lo == hi else complete_utf8(data)
        text, rest = data[:cut], data[cut:]
        if text:
            yield Chunk(text, np.ones(len(text), dtype=np.uint32) if sized else None, len(text), 0)


def read_utf8(
    source: Source, lo: int, hi: int, errors: str, sized: bool, watch: Callable[[bytes], object] | None
) -> Iterator[Chunk]:
    """Yield text that is UTF-8 already, without its byte-order mark, as strictly as `errors` says."""
    rest, place = b"", lo
    for block in read_blocks(source, lo, hi, watch):
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
            raise not_text(source, place + error.start, data[error.start : error.end]) from None
        text = data.decode(errors="replace").encode()
        mark = REPLACEMENT.encode()
        n_kept = len(text) - len(mark) * (text.count(mark) - data.count(mark))
        sizes = None
        if sized:
            measured = _measure(codecs.getincrementaldecoder("utf-8")("replace"), data, 0, final=True)
            sizes = _spread(text, measured.sizes)
        return Chunk(text, sizes, len(data), len(data) - n_kept)
    return Chunk(data, np.ones(len(data), dtype=np.uint32) if sized else None, len(data), 0)


def read_encoded(
    source: Source, lo: int, hi: int, errors: str, sized: bool, watch: Callable[[bytes], object] | None
) -> Iterator[Chunk]:
    """Decode, from the file's start where an encoding carries state, and yield from `lo` on."""
    decoder = codecs.getincrementaldecoder(source.codec)(errors)
    place = source.n_mark
    if lo < place:
        for block in read_blocks(source, lo, min(place, hi), watch):
            lo += len(block)
    if STATELESS.match(source.codec):
        place = max(lo, place)
    for block in read_blocks(source, place, lo):
        _decode(decoder, block, source, place, final=False)
        place += len(block)
    is_stateless = STATELESS.match(source.codec) is not None
    taken = n_read = 0  # bytes since the last character; since the last chunk
    lengths = np.zeros(sys.maxunicode + 1, dtype=np.uint8)
    for block in read_blocks(source, place, hi, watch):
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
                    raise undecodable(source, place - len(block), error) from error
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
    if not STATELESS.match(codec):
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
        raise not_text(source, start, error.object[error.start : error.end]) from None
    except UnicodeError as error:
        raise undecodable(source, place, error) from error


def align_utf8(source: Source, place: int) -> int:
    """Return the next byte of a UTF-8 file at which a character starts, `place` where none is near."""
    window = b"".join(read_blocks(source, place, min(place + 4, source.n_bytes)))
    for index, byte in enumerate(window):
        if byte & 0xC0 != 0x80:
            return place + index
    return place + len(window) if len(window) < 4 else place


def align_encoded(source: Source, place: int) -> int:
    """Return the next byte of a file in another encoding at which a character starts."""
    # Replacing, so that raw bytes and text of the same file are split at the same place.
    decoder = codecs.getincrementaldecoder(source.codec)("replace")
    try:
        for block in read_blocks(source, _certain_start(source, place), place):
            decoder.decode(block)
        for block in read_blocks(source, place, source.n_bytes):
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
    if not STATELESS.match(source.codec):
        return 0
    unit = character_unit(source.codec)
    if unit > 1:
        # Some units suffice: of those before a character has two at most.
        return max(place // unit - 64, 0) * unit
    begin = max(place - _ANCHOR_BYTES, 0)
    window = np.frombuffer(b"".join(read_blocks(source, begin, place)), dtype=np.uint8)
    anchors = np.flatnonzero(window < 0x30)
    return begin + int(anchors[-1]) + 1 if len(anchors) else 0
