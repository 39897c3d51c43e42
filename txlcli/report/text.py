"""Values as text: counts, sizes, durations, escapes and JSON."""

import json
import math
import re
from collections.abc import Mapping, Sequence

# What a terminal would obey instead of showing: C0 but tab and line ends, delete, C1; and the embeddings,
# overrides and isolates that turn around the text beside them, so that a line reads as it is not. The marks
# of direction (U+200E, U+200F, U+061C) stay: ordinary Hebrew and Arabic has them; they move no other text.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|\r(?!\n)")


def escape_controls(text: str) -> str:
    r"""Write control codes as escapes (`\x1b`, `\u202e`), so that they are shown; tabs and line ends stay."""
    return _CONTROL.sub(lambda match: _escape(match[0]), text)


def escape_line(text: str) -> str:
    """Write control codes, tabs and line ends as escapes: for what must stay on its line, such as a path."""
    return re.sub("[\t\n\r\u2028\u2029]", lambda match: _escape(match[0]), escape_controls(text))


def _escape(character: str) -> str:
    return ascii(character)[1:-1]


def one_line(text: str | bytes) -> str:
    """Put a text on one line, so that it can be told back: escapes for all but what can be printed as it is.

    Backslashes are doubled; bytes that are no UTF-8, such as those of half a character, are escaped too.
    """
    source = text.encode("utf-8", "backslashreplace") if isinstance(text, str) else text
    shown = source.replace(b"\\", b"\\\\").decode("utf-8", "backslashreplace")
    return escape_controls(shown.translate({ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"}))


def count_text(number: float) -> str:
    """Write a count in three figures: `1.29 M`."""
    for factor, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= 0.9995 * factor:
            scaled = number / factor
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{unit}"
    return f"{number:.0f}"


def size_text(n_bytes: float) -> str:
    """Write a size in bytes: `3.2 MB`, powers of 1,000 as disks count."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n_bytes >= 0.9995 * factor:
            scaled = n_bytes / factor
            return f"{scaled:.{1 if scaled < 99.95 else 0}f} {unit}"
    return "1 byte" if n_bytes == 1 else f"{n_bytes:.0f} bytes"


def duration_text(seconds: float) -> str:
    """Write a duration as a clock does: `9:52`, `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def number_text(value: float | None, digits: int = 4) -> str:
    """Write a measured number; a dash where there is none."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= (10**6 if digits else 10**9):
        return f"{value:.4g}"
    return f"{value:,.{digits}f}"


def json_text(value: object, *, indent: int | None = None) -> str:
    """Write JSON that every parser takes and UTF-8 can hold: numbers that are not finite are null.

    Control codes are escapes, and so are the bytes of a file's name that are no text.
    """
    text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, indent=indent)
    # JSON itself escapes the codes below a space, but not delete and C1, nor the lone surrogates that stand
    # for bytes in names.
    return re.sub("[\x7f-\x9f\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return value
