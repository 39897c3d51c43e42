"""One pass over a text before anything is decided: is it text, how long, of which characters."""

import sys
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from txlcli.sources.corpus import Corpus
from txlcli.sources.read import code_points, find_split, read_chunks

VALID_FRACTION = 0.05
VALID_BYTES_MAX = 5_000_000


@dataclass(frozen=True)
class Progress:
    """How far a pass over the text is, in bytes of the files."""

    stage: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What one pass over a corpus found.

    Bytes from `split_at` on are held out; `split_at == n_bytes`: nothing is. `alphabet` counts the
    characters of the part before as they are read, most frequent first, `n_characters` is their sum. Of
    raw bytes nothing is known: `n_characters` is None and `alphabet` empty. `n_replaced` counts the bytes
    of the whole corpus that are no text in its encoding and are read as U+FFFD. `script` names the
    commonest script of the letters in one lower-case word: `latin`, `cjk` (Chinese and Japanese), `hangul`,
    `cyrillic`, ...; `none` where there are no letters.
    """

    n_bytes: int
    split_at: int
    n_characters: int | None
    alphabet: Mapping[str, int]
    has_text: bool
    script: str
    n_replaced: int
    notices: tuple[str, ...]

    @property
    def n_train_bytes(self) -> int:
        """The bytes before the held-out part."""
        return self.split_at

    @property
    def alphabet_size(self) -> int:
        """How many different characters the training part has."""
        return len(self.alphabet)


def survey(
    corpus: Corpus, *, valid_fraction: float = VALID_FRACTION, valid_bytes_max: int | None = VALID_BYTES_MAX
) -> Iterator[Progress | Survey]:
    """Read a corpus once, check that it is text, and yield the progress and at last what was found.

    Raises:
        UserError: as `read_text`.
    """
    n_bytes = corpus.n_bytes
    split_at = find_split(corpus, held_out_start(n_bytes, valid_fraction, valid_bytes_max))
    if corpus.raw:
        yield Survey(
            n_bytes=n_bytes,
            split_at=split_at,
            n_characters=None,
            alphabet={},
            has_text=True,
            script="none",
            n_replaced=0,
            notices=(),
        )
        return
    counts = np.zeros(sys.maxunicode + 1, dtype=np.int64)
    done = n_replaced = 0
    for begin, end in ((0, split_at), (split_at, n_bytes)):
        for chunk in read_chunks(corpus, begin, end):
            done += chunk.read_bytes
            n_replaced += chunk.n_replaced
            if begin == 0:
                some = np.bincount(code_points(chunk.text))
                counts[: len(some)] += some
            yield Progress("reading", done, n_bytes)
    alphabet = _alphabet(counts)
    yield Survey(
        n_bytes=n_bytes,
        split_at=split_at,
        n_characters=int(counts.sum()),
        alphabet=alphabet,
        has_text=any(not character.isspace() for character in alphabet),
        script=guess_script(alphabet),
        n_replaced=n_replaced,
        notices=_survey_notices(corpus, alphabet, n_replaced),
    )


def held_out_start(n_bytes: int, fraction: float, bytes_max: int | None = VALID_BYTES_MAX) -> int:
    """Return the byte at which the last `fraction` begins; `n_bytes` where that is under two bytes."""
    n_held_out = int(n_bytes * fraction)
    if bytes_max is not None:
        n_held_out = min(n_held_out, bytes_max)
    return n_bytes - n_held_out if n_held_out >= 2 else n_bytes


def guess_script(alphabet: Mapping[str, int]) -> str:
    """Name the commonest script among the letters of a text in one lower-case word."""
    shares: dict[str, int] = {}
    for character, count in alphabet.items():
        if character.isalpha():
            word = unicodedata.name(character, "other").split()[0].lower()
            script = "cjk" if word in ("cjk", "hiragana", "katakana") else word
            shares[script] = shares.get(script, 0) + count
    return max(shares, key=lambda script: (shares[script], script)) if shares else "none"


def _alphabet(counts: npt.NDArray[np.int64]) -> dict[str, int]:
    points = np.flatnonzero(counts)
    order = points[np.argsort(-counts[points], kind="stable")]
    return {chr(point): int(counts[point]) for point in order.tolist()}


def _survey_notices(corpus: Corpus, alphabet: Mapping[str, int], n_replaced: int) -> tuple[str, ...]:
    notices = []
    if n_replaced:
        notices.append(told_replaced(corpus, n_replaced))
    for character, name in (("\r", "carriage returns"), ("\0", "NUL bytes")):
        # Among words that white space separates a carriage return is white space.
        if character in alphabet and not (character.isspace() and corpus.newlines == "eos"):
            notices.append(f"{corpus.name}: {alphabet[character]:,} {name} are kept as characters")
    return tuple(notices)


def told_replaced(corpus: Corpus, n_replaced: int) -> str:
    """Say how many bytes are no text and are read as something else."""
    what = "byte is" if n_replaced == 1 else "bytes are"
    read = "is" if n_replaced == 1 else "are"
    return f"{corpus.name}: {n_replaced:,} {what} not {corpus.encoding} and {read} read as U+FFFD"
