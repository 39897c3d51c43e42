"""Encodings by name, and the order of their bytes."""

import sys

from txlcli import UserError
from txlcli.config import codec_of


def find_encoding(name: str) -> str:
    """Return the usual name of an encoding.

    Raises:
        UserError: Python has no such encoding of text, or cannot read it in pieces.
    """
    try:
        return codec_of(name)
    except ValueError as error:
        raise UserError(f"--encoding: {error}") from None


def settle_codec(head: bytes, codec: str) -> tuple[str, int]:
    """Return the encoding with its byte order settled, and the bytes of a leading byte-order mark."""
    candidates = [codec]
    if codec in ("utf-16", "utf-32"):
        orders = ("le", "be") if sys.byteorder == "little" else ("be", "le")
        candidates = [f"{codec}-{order}" for order in orders]
    for candidate in candidates:
        try:
            mark = "\ufeff".encode(candidate)
        except UnicodeError:
            continue
        if len(mark) > 1 and head.startswith(mark):
            return candidate, len(mark)
    return candidates[0], 0
