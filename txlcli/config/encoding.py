"""Encodings of text: which there are, and whether a separator of documents can be written in one."""

import codecs
import encodings.aliases

from txlcli.config.setting import quoted, suggestion


def codec_of(encoding: str) -> str:
    """Return the usual name of an encoding; `utf-8-sig` is `utf-8`, whose mark is dropped anyway.

    Raises:
        ValueError: Python knows no such encoding of text; the message says so and suggests one.
    """
    try:
        codec = codecs.lookup(encoding).name
        codecs.getincrementaldecoder(codec)
        # Refuses codecs between bytes, such as hex.
        b"a".decode(codec)
    except UnicodeDecodeError:
        pass  # a lone byte is no text in utf-16, say; the encoding is real
    except (LookupError, ValueError):
        known = {
            name.replace("_", "-")
            for name in encodings.aliases.aliases.values()
            if not name.endswith("_codec") and name != "rot_13"
        }
        hint = suggestion(encoding.lower().replace("_", "-"), sorted(known))
        hint = hint or "; for example utf-8, utf-16, cp1252, gb18030"
        raise ValueError(f"must be an encoding; got {quoted(encoding)}{hint}") from None
    return "utf-8" if codec == "utf-8-sig" else codec


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
