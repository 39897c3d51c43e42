"""What encoding bytes look like: a guess for messages, by which nothing is ever read."""

import codecs
import functools
import re
from typing import NamedTuple

# Fewer characters speak for nothing.
LEAST_CHARACTERS = 10
# A wide encoding's NUL bytes stand at one place of each character, and hardly ever at the others.
_MANY, _FEW = 0.2, 0.01

_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8"),
)


class _Legacy(NamedTuple):
    """An encoding of one script, and what its text is mostly made of.

    Of the characters beyond ASCII the share `least` must be of `usual`: the same bytes are characters in most
    of these encodings, but not such as are usual. The share `least_typical` must be `typical`, and what
    `needed` matches must be there, which other languages written with the same bytes do not reach.
    """

    codec: str
    usual: re.Pattern[str]
    least: float
    typical: re.Pattern[str]
    least_typical: float
    needed: re.Pattern[str]


_ANY = re.compile("", re.DOTALL)
_CJK_SIGNS = "\u3000-\u3017\uff01-\uff5e\u2014\u2018-\u201d\u2026·"
_KANA, _JAPANESE = re.compile("[ぁ-んァ-ー]"), re.compile(f"[ぁ-んァ-ー一-龥々{_CJK_SIGNS}]")
# The commonest letters of Russian, Ukrainian and Bulgarian; and one whose byte Hebrew does not use.
_CYRILLIC, _COMMON, _LAST = re.compile("[Ѐ-ӿ№«»—–…“”„]"), re.compile("[оеаинтсрвл]"), re.compile("я")


def _rows(codec: str, first: int, last: int) -> re.Pattern[str]:
    """The characters of two bytes of an encoding whose first byte lies between two, both included."""
    found = []
    for lead in range(first, last + 1):
        for trail in range(0x40, 0xFF):
            try:
                found.append(bytes([lead, trail]).decode(codec))
            except UnicodeError:
                continue
    return re.compile(f"[{''.join(found)}{_CJK_SIGNS}]")


@functools.cache
def _legacy() -> tuple[_Legacy, ...]:
    return (
        _Legacy("euc_kr", re.compile(f"[가-힣{_CJK_SIGNS}]"), 0.9, re.compile("[가-힣]"), 0.5, _ANY),
        _Legacy("shift_jis", _JAPANESE, 0.95, _KANA, 0.2, _ANY),
        _Legacy("euc_jp", _JAPANESE, 0.95, _KANA, 0.2, _ANY),
        # The frequent characters come first in both.
        _Legacy("gb18030", _rows("gb2312", 0xB0, 0xD7), 0.85, _ANY, 0, _ANY),
        _Legacy("big5", _rows("big5", 0xA4, 0xC6), 0.85, _ANY, 0, _ANY),
        _Legacy("cp1251", _CYRILLIC, 0.95, _COMMON, 0.5, _LAST),
        _Legacy("koi8-r", _CYRILLIC, 0.95, _COMMON, 0.5, _LAST),
    )


def marked_encoding(head: bytes) -> str | None:
    """Name the encoding by the byte-order mark that a file begins with; None: there is none."""
    return next((codec for mark, codec in _MARKS if head.startswith(mark)), None)


def wide_encoding(head: bytes) -> str | None:
    """Name the encoding by NUL bytes, of which ASCII in a wide one has one or three each; None: none."""
    for width, last, codec in (
        (4, 3, "utf-32-le"),
        (4, 0, "utf-32-be"),
        (2, 1, "utf-16-le"),
        (2, 0, "utf-16-be"),
    ):
        data = head[: len(head) // width * width]
        shares = [data[place::width].count(0) / max(len(data) // width, 1) for place in range(width)]
        text_place = width - 1 - last
        is_padded = all(shares[place] >= _MANY for place in range(width) if place != text_place)
        if len(data) // width >= LEAST_CHARACTERS and is_padded and shares[text_place] <= _FEW:
            return codec
    return None


def escaped_encoding(head: bytes) -> str | None:
    """Name the encoding of seven bits by the escapes that lead into its second alphabet; None: none."""
    escapes = {b"\x1b$B": "iso2022_jp", b"\x1b$@": "iso2022_jp", b"\x1b$)C": "iso2022_kr"}
    return next((codec for escape, codec in escapes.items() if escape in head), None)


def likely_encoding(head: bytes, window: bytes) -> str | None:
    """Name the encoding that some bytes of a file look like; None: like none that is known.

    Args:
        head: The file's first kilobytes.
        window: Some kilobytes around those that are no text; begins at a character in most encodings.
    """
    return wide_encoding(head) or _utf8(window) or _of_script(window)


def is_mostly_utf8(window: bytes) -> bool:
    """Say whether bytes are UTF-8 with characters beyond ASCII but for a few that are wrong."""
    text = window.decode(errors="replace")
    n_wrong = text.count("\ufffd")
    return _n_beyond_ascii(text) - n_wrong >= max(LEAST_CHARACTERS, 10 * n_wrong)


def _n_beyond_ascii(text: str) -> int:
    return sum(character > "\x7f" for character in text)


def _utf8(window: bytes) -> str | None:
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(window)
    except UnicodeDecodeError:
        return None
    return "utf-8" if _n_beyond_ascii(text) >= LEAST_CHARACTERS else None


def _of_script(window: bytes) -> str | None:
    best, best_share = None, 0.0
    for one in _legacy():
        try:
            # A last character may be cut.
            text = codecs.getincrementaldecoder(one.codec)().decode(window)
        except UnicodeDecodeError:
            continue
        beyond = "".join(character for character in text if character > "\x7f")
        usual = one.usual.findall(beyond)
        share = len(usual) / max(len(beyond), 1)
        n_typical = len(one.typical.findall(beyond))
        is_typical = n_typical >= one.least_typical * len(beyond) and one.needed.search(beyond) is not None
        if len(beyond) >= LEAST_CHARACTERS and is_typical and share >= one.least and share > best_share:
            best, best_share = one.codec, share
    return best
