"""Between text and tokens: prompts on the way in, stop texts on the way out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from txlcli import UserError
from txlcli.generate.sampling import Ids
from txlcli.sources import Newlines, Spaces, convert
from txlcli.tokenizer import OutsideVocabulary, Tokenizer

_NAMED_CHARACTERS = 20


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model reads it.

    Attributes:
        text: What the user gave, bytes that are not UTF-8 replaced.
        ids: Its tokens. A text that begins empty is read as the start token, which is part of no text.
        notices: What the user should know about it.
    """

    text: str
    ids: Ids
    notices: tuple[str, ...] = ()


def to_bytes(text: str | bytes, place: str) -> bytes:
    """Return a text as UTF-8, and the bytes that its lone surrogates stand for as they are.

    Raises:
        UserError: the string holds a surrogate that stands for no byte; the message begins with `place`.
    """
    try:
        return text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    except UnicodeEncodeError as error:
        character = f"U+{ord(error.object[error.start]):04X}"
        raise UserError(f"{place}: not text; got {character} at character {error.start}; remove it") from None


def encode_prompt(
    tokenizer: Tokenizer,
    text: str | bytes,
    start_id: int | None,
    *,
    newlines: Newlines = "keep",
    spaces: Spaces = "keep",
) -> Prompt:
    """Turn a prompt into tokens.

    Args:
        tokenizer: The run's tokenizer.
        text: The prompt. In a string lone surrogates may stand for bytes that are not UTF-8, as Python
            hands over arguments of the command line.
        start_id: The token that an empty prompt starts from; None: it follows other text and has none.
        newlines: How the run reads newlines; a prompt of nothing but dropped ones is empty.
        spaces: How the run reads spaces.

    Raises:
        UserError: the bytes are not UTF-8 and the tokenizer takes text only, or it has no id for some.
    """
    source = to_bytes(text, "prompt")
    shown = source.decode("utf-8", "replace")
    read = convert(source, newlines, spaces)
    notices: tuple[str, ...] = ()
    if tokenizer.kind != "byte":
        try:
            source.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"prompt: not UTF-8; got byte 0x{source[error.start]:02x} at offset {error.start}; "
                f"convert it, or train with --tokenizer byte, which takes any bytes"
            ) from None
        if unknown := tokenizer.unknown_characters(read.decode("utf-8")):
            notices = (_unknown_notice(unknown, is_kept=tokenizer.is_lossless),)
    try:
        ids = tokenizer.encode(read)
    except OutsideVocabulary as error:
        kept = np.flatnonzero(np.frombuffer(source, np.uint8) != ord("\n")) if newlines == "drop" else None
        offset = error.offset if kept is None else int(kept[error.offset])
        raise error.at("prompt", f"byte {offset}") from None
    if len(ids) == 0 and start_id is not None:
        ids = np.array([start_id], dtype=np.int32)
    return Prompt(shown, ids, notices)


def split_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str, str | None]:
    """Split text into what may be shown, what must wait, and the stop text found.

    Read letter by letter, the first moment at which the text ends with a stop text counts (the longest one,
    if there are several), so that the result does not depend on how text is cut into tokens. What waits is
    the longest end that may be the beginning of a stop text; the caller puts it before the text that comes
    next.

    Returns:
        (shown, waiting, stop); with a stop, `shown` is the text before it and nothing waits.
    """
    found = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if found:
        end, _, stop = min(found)
        return text[: end - len(stop)], "", stop
    longest = min(len(text), max(map(len, stops), default=1) - 1)
    for n_waiting in range(longest, 0, -1):
        if any(stop.startswith(text[-n_waiting:]) for stop in stops):
            return text[:-n_waiting], text[-n_waiting:], None
    return text, "", None


def _unknown_notice(unknown: Sequence[str], *, is_kept: bool) -> str:
    """Say which characters or words of a prompt the model never saw, and what becomes of them."""
    names = ", ".join(
        f"`{name}`" if name.isprintable() else ascii(name) for name in unknown[:_NAMED_CHARACTERS]
    )
    if len(unknown) > _NAMED_CHARACTERS:
        names += f" and {len(unknown) - _NAMED_CHARACTERS} more"
    fate = "read as bytes" if is_kept else "read as unknown"
    return f"prompt: not in the vocabulary, {fate}: {names}"
