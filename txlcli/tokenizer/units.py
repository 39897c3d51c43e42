"""Units: stretches of text that are encoded for themselves, and samples made of whole stretches.

Text is cut after every newline. A line of more than 4,096 bytes is cut further, from its start on: as long as
more than 4,096 bytes are left, before the last space among the first 4,096, else (no space there) after 4,096
bytes, moved back to the start of a character. A cut depends on nothing beyond the 4,097 bytes after the one
before, so a reader that sees the text in chunks finds the same cuts.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np

UNIT_BYTES = 4096

# Text is sampled in blocks of this size; a text up to the sample's size is taken whole.
BLOCK_BYTES = 2**16
SAMPLE_BYTES = 2**23
# Words are rarer than pieces, and counting them takes less memory than learning.
WORD_SAMPLE_BYTES = 2**25


def complete_prefix(text: bytes) -> int:
    """Count the leading bytes of `text`, which starts at a unit, that are whole units already."""
    line = text.rfind(b"\n") + 1
    return max(_cuts(text, line, len(text)), default=line)


def whole_units(chunks: Iterable[bytes], complete_prefix: Callable[[bytes], int]) -> Iterator[bytes]:
    """Cut a text where units end, whatever chunks it comes in and whatever its units are."""
    rest = b""
    for block in blocks(chunks, 2**20):
        text = rest + block
        stop = complete_prefix(text)
        yield text[:stop]
        rest = text[stop:]
    yield rest


def units(text: bytes) -> list[bytes]:
    """Cut text into its units."""
    ends = _line_ends(text)
    ends = sorted(ends + _long_line_cuts(text, ends))
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def parts(text: bytes) -> list[bytes]:
    """Cut text only where a line is too long for one unit."""
    cuts = _long_line_cuts(text, _line_ends(text))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def is_cut_inside(unit: bytes) -> bool:
    """Tell whether a unit may have been ended where there was neither a newline nor a space.

    It depends on the unit alone, and so is also true of a last line that happens to be as long.
    """
    return len(unit) > UNIT_BYTES - 4 and unit.find(b" ", 1) < 0 and not unit.endswith(b"\n")


def is_continuation(byte: int) -> bool:
    """Tell whether a byte of UTF-8 goes on with a character."""
    return byte & 0xC0 == 0x80


def complete_utf8(text: bytes) -> int:
    """Count all bytes but those of a last character of UTF-8 that is not whole yet."""
    # The last four bytes decide: a lead byte that announces more bytes than there are waits for them.
    for n_have in range(1, min(4, len(text)) + 1):
        byte = text[-n_have]
        if not is_continuation(byte):
            n_needs = 1 + (byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0)
            return len(text) - n_have if n_needs > n_have else len(text)
    return len(text)


def sample(
    chunks: Iterable[bytes], seed: int, *, n_bytes: int = SAMPLE_BYTES, block_bytes: int = BLOCK_BYTES
) -> Iterator[bytes]:
    """Choose stretches of a text at random, at most `n_bytes` in all, in the order of the text.

    Each block draws a number and the highest stay, so every block is as likely as another, memory is bounded,
    and the choice depends on the text and the seed but not on the chunks. Blocks that follow each other are
    joined; a stretch starts and ends at a line, a space or at least a character. What has been yielded is
    held no longer.
    """
    draw = random.Random(seed)
    kept: list[tuple[float, int, bytes]] = []
    last = -1
    for index, block in enumerate(blocks(chunks, block_bytes)):
        item = (draw.random(), index, block)
        if len(kept) < n_bytes // block_bytes:
            heapq.heappush(kept, item)
        else:
            heapq.heappushpop(kept, item)
        last = index
    waiting = deque(sorted((index, block) for _, index, block in kept))
    kept.clear()
    while waiting:
        first, block = waiting.popleft()
        end, stretch = first, bytearray(block)
        while waiting and waiting[0][0] == end + 1:
            end, block = waiting.popleft()
            stretch += block
        yield _trim(stretch, at_start=first == 0, at_end=end == last)


def blocks(chunks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Cut a text anew, into blocks of one size and a last shorter one, whatever chunks it comes in."""
    rest = bytearray()
    for chunk in chunks:
        rest += chunk
        whole = len(rest) - len(rest) % size
        for start in range(0, whole, size):
            yield bytes(rest[start : start + size])
        del rest[:whole]
    if rest:
        yield bytes(rest)


def _line_ends(text: bytes) -> list[int]:
    ends: list[int] = (np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n")) + 1).tolist()
    if text and not text.endswith(b"\n"):
        ends.append(len(text))
    return ends


def _long_line_cuts(text: bytes, line_ends: list[int]) -> list[int]:
    starts = np.array([0, *line_ends])
    long = np.flatnonzero(np.diff(starts) > UNIT_BYTES)
    return [cut for line in long for cut in _cuts(text, int(starts[line]), line_ends[line])]


def _cuts(text: bytes, start: int, stop: int) -> Iterator[int]:
    # Where the line text[start:stop] is cut between its start and its end.
    while stop - start > UNIT_BYTES:
        limit = start + UNIT_BYTES
        cut = text.rfind(b" ", start + 1, limit + 1)
        if cut < 0:
            cut = next((at for at in range(limit, limit - 4, -1) if not is_continuation(text[at])), limit)
        yield cut
        start = cut


def _trim(stretch: bytearray, *, at_start: bool, at_end: bool) -> bytes:
    # A block begins and ends anywhere: what may be half a word or half a character there is left out.
    start, stop = 0, len(stretch)
    if not at_start:
        newline, space = (stretch.find(sign, 0, UNIT_BYTES) for sign in (b"\n", b" "))
        start = newline + 1 if newline >= 0 else max(space, 0)
        while start < min(stop, 3) and is_continuation(stretch[start]):
            start += 1
    if not at_end:
        newline, space = (stretch.rfind(sign, max(start, stop - UNIT_BYTES), stop) for sign in (b"\n", b" "))
        if max(newline, space) > start:
            stop = newline + 1 if newline > start else space
        else:
            stop = max(start, stop - 4)
            while stop > start and is_continuation(stretch[stop]):
                stop -= 1
    del stretch[stop:], stretch[:start]
    return bytes(stretch)
