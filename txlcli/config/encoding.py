"""Encodings of text: which Python has and can read in pieces, and what can be written in them."""

import codecs
import encodings.aliases

from txlcli.config.setting import quoted, suggestion

# Python's decoders of these give other text for other pieces: they forget what a piece began.
UNSTREAMED = ("punycode", "unicode-escape")


def codec_of(encoding: str) -> str:
    """Return the usual name of an encoding; `utf-8-sig` is `utf-8`, whose mark is dropped anyway.

    Raises:
        ValueError: Python knows no such encoding of text, then the message suggests one, or cannot read it in
            pieces.
    """
    codec = _look_up(encoding)
    if codec is None:
        known = {
            name.replace("_", "-")
            for name in encodings.aliases.aliases.values()
            if _look_up(name) not in (None, *UNSTREAMED)
        }
        hint = suggestion(encoding.lower().replace("_", "-"), sorted(known))
        hint = hint or "; for example utf-8, utf-16, cp1252, gb18030"
        raise ValueError(f"must be an encoding; got {quoted(encoding)}{hint}")
    if codec in UNSTREAMED:
        raise ValueError(
            f"{codec} cannot be read in pieces, as texts are; got {quoted(encoding)}; "
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


def check_separator(separator: str, encoding: str) -> None:
    """Refuse a separator of documents that no text in an encoding can hold.

    Raises:
        ValueError: it is one; the message says so.
    """
    try:
        separator.encode(encoding)
    except UnicodeError:
        raise ValueError(
            f"the separator of documents {quoted(separator)} cannot be written in {encoding}; "
            "choose one that stands in the text, or another encoding"
        ) from None
