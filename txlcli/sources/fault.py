"""What is said of bytes that are no text: where, which, and what to do."""

import codecs
import re

from txlcli import UserError
from txlcli.sources.blocks import read_blocks
from txlcli.sources.corpus import WIDE, Source
from txlcli.sources.guess import (
    escaped_encoding,
    is_mostly_utf8,
    likely_encoding,
    marked_encoding,
    wide_encoding,
)
from txlcli.sources.unpack import find_packing

NO_TEXT = {
    b"\x1f\x8b": ("a gzip file", "unpack it first"),
    b"\xfd7zXZ": ("an xz file", "unpack it first"),
    b"\x28\xb5\x2f\xfd": ("a zstd file", "unpack it first"),
    b"BZh": ("a bzip2 file", "unpack it first"),
    b"%PDF": ("a PDF", "extract its text first"),
}
# What of a file that is no text is looked at, at its start and on both sides of the fault.
_LOOKED_BYTES = 1 << 12


class NotText(UserError):
    """Bytes that are no text in the encoding that they are read in."""


def not_text(source: Source, place: int, bad: bytes) -> NotText:
    """Word the refusal of bytes that are no text, with the remedy that fits what the file looks like."""
    got = " ".join(f"0x{byte:02x}" for byte in bad[:4])
    if place + len(bad) == source.n_bytes and len(bad) < 4 and _is_cut(source.codec, bad):
        got += " at its end, which is no whole character"
    where = f"byte {place}, line {line_of(source, place)}"
    return NotText(f"{source.place}: not {source.told_codec} at {where}; got {got}; {_remedy(source, place)}")


def undecodable(source: Source, place: int, error: UnicodeError) -> NotText:
    """Word the refusal of bytes of which their decoder says no more."""
    return NotText(
        f"{source.place}: not {source.told_codec} after byte {place}; got {error}; convert it to utf-8 first"
    )


def _remedy(source: Source, place: int) -> str:
    # Those who score a text have no other flag than --encoding.
    otherwise = "train with --encoding-errors replace or --tokenizer byte"
    head = _head(source)
    # Else it had been unpacked.
    is_kept = source.packing == "none" and find_packing(head) != "none"
    for magic, (kind, remedy) in NO_TEXT.items():
        if head.startswith(magic):
            first = "leave out --packed keep" if is_kept else remedy
            return f"it looks like {kind}: {first}, or train with --tokenizer byte"
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
    return f"mend these bytes, name another encoding with --encoding, or {otherwise}"


def remedy_of_nuls(source: Source) -> str:
    """Word what to do about NUL bytes in a file that was read as text; empty: nothing is known."""
    likely = wide_encoding(_head(source))
    return "" if likely is None else f"; it may be {likely}: try --encoding {likely}"


def remedy_of_escapes(source: Source) -> str:
    """Word what to do about escape characters in a file that was read as text; empty: nothing."""
    likely = escaped_encoding(_head(source))
    return "" if likely is None else f"its escape characters look like {likely}: try --encoding {likely}"


def _head(source: Source) -> bytes:
    return b"".join(read_blocks(source, 0, min(_LOOKED_BYTES, source.n_bytes)))


def _window(source: Source, place: int) -> bytes:
    """Return some bytes around one, from a place on where in most encodings a character begins."""
    begin = max(place - _LOOKED_BYTES, 0)
    window = b"".join(read_blocks(source, begin, min(place + _LOOKED_BYTES, source.n_bytes)))
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


def line_of(source: Source, place: int) -> int:
    """Return the line, counted from 1, on which a byte of a file stands."""
    decoder = codecs.getincrementaldecoder(source.codec)("replace") if source.codec in WIDE else None
    line = 1
    for block in read_blocks(source, 0, place):
        line += block.count(b"\n") if decoder is None else decoder.decode(block).count("\n")
    return line
