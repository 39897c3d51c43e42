"""Encodings by name: which Python has and can read in pieces, and the order of their bytes."""

import codecs
import difflib
import encodings.aliases
import sys

from txlcli import UserError

# Python's decoders of these give other text for other pieces: they forget what a piece began.
UNSTREAMED = ("punycode", "unicode-escape")


def find_encoding(name: str) -> str:
    """Return the usual name of an encoding; `utf-8-sig` is `utf-8`, whose mark is dropped anyway.

    Raises:
        UserError: Python knows no such encoding of text, then the message suggests one, or cannot read it in
            pieces.
    """
    codec = _look_up(name)
    if codec is None:
        known = {
            codec.replace("_", "-")
            for codec in encodings.aliases.aliases.values()
            if _look_up(codec) not in (None, *UNSTREAMED)
        }
        close = difflib.get_close_matches(name.lower().replace("_", "-"), sorted(known), 1)
        hint = f"did you mean `{close[0]}`?" if close else "for example utf-8, utf-16, cp1252, gb18030"
        raise UserError(f"--encoding: unknown encoding `{name}`; {hint}")
    if codec in UNSTREAMED:
        raise UserError(
            f"--encoding: {codec} cannot be read in pieces, as texts are; got `{name}`; "
            "convert the text to utf-8 first"
        )
    return "utf-8" if codec == "utf-8-sig" else codec


def _look_up(name: str) -> str | None:
    """Return what Python calls an encoding of text; None: it has none of this name on this system."""
    try:
        codec = codecs.lookup(name).name
        codecs.getincrementaldecoder(codec)
        b"a".decode(codec)
    except UnicodeDecodeError:
        pass  # a lone byte is no text in utf-16, say; the encoding is real
    except (LookupError, ValueError):
        return None
    return codec


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
