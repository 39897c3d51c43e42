"""Text of one file in any encoding, as UTF-8 cut at characters."""

import codecs
import re
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from txlcli.sources.blocks import read_blocks
from txlcli.sources.chunk import Chunk, Sizes, character_ends
from txlcli.sources.corpus import Source
from txlcli.sources.documents import character_unit
from txlcli.sources.fault import not_text, undecodable
from txlcli.tokenizer import complete_utf8

REPLACEMENT = "\ufffd"
_STATELESS = re.compile(
    r"utf-(8|16|32)|ascii|latin|iso8859|cp\d|koi8|mac|kz1048|ptcp154|tis|hp-roman|gb|big5|shift_jis|euc_|johab"
)
# How far back a byte below 0x30 is looked for.
_ANCHOR_BYTES = 1 << 16
# A decoder waits with at most one byte less; euc_kr has characters of eight.
_LONGEST_CHARACTER = 8


def is_stateless(codec: str) -> bool:
    """Say whether each character of an encoding is written as it would be alone.

    A newline is one unit in such, and in those of several bytes a character has none below 0x30 after its
    first.
    """
    return _STATELESS.match(codec) is not None


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
            measured = _measure(
                codecs.getincrementaldecoder("utf-8")("replace"), "utf-8", data, 0, final=True
            )
            sizes = _spread(text, measured.sizes)
        return Chunk(text, sizes, len(data), len(data) - n_kept)
    return Chunk(data, np.ones(len(data), dtype=np.uint32) if sized else None, len(data), 0)


def read_encoded(
    source: Source, lo: int, hi: int, errors: str, sized: bool, watch: Callable[[bytes], object] | None
) -> Iterator[Chunk]:
    """Decode, from the file's start where an encoding carries state, and yield from `lo` on.

    All bytes from `lo` to `hi` are read as text, but where an encoding carries state those after the last
    character before `hi`: who reads on from there gets the character that they begin.
    """
    decoder = codecs.getincrementaldecoder(source.codec)(errors)
    place = source.n_mark
    if lo < place:
        for block in read_blocks(source, lo, min(place, hi), watch):
            lo += len(block)
    stateless = is_stateless(source.codec)
    if stateless:
        place = max(lo, place)
    for block in read_blocks(source, place, lo):
        _decode(decoder, block, source, place, final=False)
        place += len(block)
    taken = n_read = 0  # bytes since the last character; since the last chunk
    lengths = np.zeros(sys.maxunicode + 1, dtype=np.uint8)
    for block in read_blocks(source, place, hi, watch):
        state = decoder.getstate()
        final = place + len(block) == source.n_bytes
        text, in_utf8 = _decode(decoder, block, source, place, final=final)
        place += len(block)
        n_read += len(block)
        after = decoder.getstate()
        n_waiting = len(after[0]) if stateless else 0
        n_replaced, source_bytes, spread = 0, n_read - n_waiting, None
        if sized or (errors == "replace" and REPLACEMENT in text):
            known = _look_up(source.codec, text, state, after, block, lengths)
            if known is not None:
                sizes, taken = known, len(after[0])
            else:
                again = codecs.getincrementaldecoder(source.codec)(errors)
                again.setstate(state)
                try:
                    _, sizes, taken = _measure(again, source.codec, block, taken, final=final)
                except UnicodeError as error:  # in encodings that carry state not all can be replaced
                    raise undecodable(source, place - len(block), error) from error
                if errors == "replace":
                    n_replaced = _count_wrong(source.codec, text, sizes, state, block, final=final)
            if sized:
                spread, source_bytes = _spread(in_utf8, sizes), int(sizes.sum())
        else:
            taken = len(after[0])
        if text:
            yield Chunk(in_utf8, spread, source_bytes, n_replaced)
            n_read = n_waiting
    if stateless and hi < source.n_bytes and decoder.getstate()[0]:
        yield _last(decoder, source, hi, sized)


def _last(decoder: codecs.IncrementalDecoder, source: Source, hi: int, sized: bool) -> Chunk:
    """Decode what a decoder waits with where a part ends at a character: bytes that are no text, and others.

    It waits since with more bytes they might have been one character. At a file's end Python takes all of
    them for one that is cut; here they are read as before a byte that stands for itself, as a newline does.
    """
    n_bytes = len(decoder.getstate()[0])
    filler = ("\n" * _LONGEST_CHARACTER).encode(source.codec)
    text = _decode(decoder, filler, source, hi, final=False)[0][:-_LONGEST_CHARACTER]
    sizes = np.array(_shares(n_bytes, text, source.codec), dtype=np.uint32)
    points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    n_replaced = int(sizes[points == ord(REPLACEMENT)].sum())
    in_utf8 = text.encode()
    return Chunk(in_utf8, _spread(in_utf8, sizes) if sized else None, n_bytes, n_replaced)


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
    if not is_stateless(codec):
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


def _measure(
    decoder: codecs.IncrementalDecoder, codec: str, block: bytes, taken: int, *, final: bool
) -> _Measured:
    """Decode byte by byte, since only a decoder knows which bytes make a character."""
    parts: list[str] = []
    sizes: list[int] = []
    for index in range(len(block)):
        taken += 1
        some = decoder.decode(block[index : index + 1], final and index == len(block) - 1)
        if some:
            # After bytes that were wrong the decoder may keep others.
            done = max(taken - len(decoder.getstate()[0]), 0)
            parts.append(some)
            sizes += _shares(done, some, codec)
            taken -= done
    return _Measured("".join(parts), np.array(sizes, dtype=np.uint32), taken)


def _shares(n_bytes: int, text: str, codec: str) -> list[int]:
    """Divide bytes among the characters that the last of them completes at once.

    If they are several the first was wrong before it, so that each of the others took what it takes alone.
    """
    sizes = []
    for character in reversed(text[1:]):
        sizes.append(min(_length(character, codec), n_bytes))
        n_bytes -= sizes[-1]
    return [n_bytes, *reversed(sizes)]


def _length(character: str, codec: str) -> int:
    """Return how many bytes a character takes, where state is carried and of what is wrong the least."""
    unit = character_unit(codec)
    if character == REPLACEMENT or not is_stateless(codec):
        return unit
    try:
        return len(character.encode(codec))
    except UnicodeError:  # some are only read
        return unit


def _count_wrong(
    codec: str, text: str, sizes: Sizes, state: tuple[bytes, int], block: bytes, *, final: bool
) -> int:
    """Count the bytes that are read as U+FFFD, those apart that are this character."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    n_bytes = int(sizes[points == ord(REPLACEMENT)].sum())
    try:
        mark = REPLACEMENT.encode(codec)
    except UnicodeError:
        return n_bytes
    decoder = codecs.getincrementaldecoder(codec)("ignore")
    decoder.setstate(state)
    n_real = decoder.decode(block, final).count(REPLACEMENT)
    n_wrong = text.count(REPLACEMENT) - n_real
    # Where an encoding carries state the character may take less than alone.
    return max(n_bytes - n_real * len(mark), n_wrong) if n_wrong else 0


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
    """Return a byte at or before `place`; who decodes from it is at `place` where one from the start is."""
    if not is_stateless(source.codec):
        return 0
    unit = character_unit(source.codec)
    if unit > 1:
        # Some units suffice: of those before a character has two at most.
        return max(place // unit - 64, 0) * unit
    begin = max(place - _ANCHOR_BYTES, 0)
    window = np.frombuffer(b"".join(read_blocks(source, begin, place)), dtype=np.uint8)
    # Such a byte ends what is before it, but a decoder may see that only some bytes later.
    anchors = np.flatnonzero(window[: max(len(window) - _LONGEST_CHARACTER + 1, 0)] < 0x30)
    return begin + int(anchors[-1]) + 1 if len(anchors) else 0
