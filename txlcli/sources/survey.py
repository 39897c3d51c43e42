"""One pass over a text before anything is decided: is it text, how long, of which characters."""

import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from txlcli.sources.chunk import Chunk, code_points
from txlcli.sources.corpus import Corpus, Progress
from txlcli.sources.documents import select
from txlcli.sources.fault import remedy_of_escapes, remedy_of_nuls
from txlcli.sources.read import by_conventions, read_documents
from txlcli.sources.split import find_split

VALID_FRACTION = 0.05
VALID_BYTES_MAX = 5_000_000


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What one pass over a corpus found.

    Bytes from `split_at` on are held out; `split_at == n_bytes`: none are. With the corpus' `valid_every`
    documents are held out instead. `n_valid_bytes` counts what is held out either way, separators included.
    `alphabet` counts the characters of the rest as they are read, most frequent first, `n_characters` is
    their sum. Of raw bytes nothing is known: `n_characters` is None and `alphabet` empty. `n_replaced` counts
    the bytes of the whole corpus that are no text in its encoding and are read as U+FFFD. `script` names the
    commonest script of the letters in one lower-case word: `latin`, `cjk` (Chinese and Japanese), `hangul`,
    `cyrillic`, ...; `none` where there are no letters. `n_documents` counts the documents that are not empty,
    those held out among them, which `n_valid_documents` counts; None: the corpus has no documents.
    """

    n_bytes: int
    split_at: int
    n_valid_bytes: int
    n_characters: int | None
    alphabet: Mapping[str, int]
    has_text: bool
    script: str
    n_replaced: int
    n_documents: int | None
    n_valid_documents: int | None
    notices: tuple[str, ...]

    @property
    def n_train_bytes(self) -> int:
        """The bytes that are not held out."""
        return self.n_bytes - self.n_valid_bytes

    @property
    def alphabet_size(self) -> int:
        """How many different characters the training part has."""
        return len(self.alphabet)


def survey(
    corpus: Corpus, *, valid_fraction: float = VALID_FRACTION, valid_bytes_max: int | None = VALID_BYTES_MAX
) -> Iterator[Progress | Survey]:
    """Read a corpus once, check that it is text, and yield the progress and at last what was found.

    With the corpus' `valid_every` no part of its end is held out. Raw bytes without documents are not read.

    Raises:
        UserError: as `read_text`.
    """
    n_bytes = corpus.n_bytes
    split_at = n_bytes
    if corpus.valid_every is None:
        split_at = find_split(corpus, held_out_start(n_bytes, valid_fraction, valid_bytes_max))
    counts = np.zeros(sys.maxunicode + 1, dtype=np.int64)
    whole, train = _Tally(), _Tally()
    done = 0
    is_read = not corpus.raw or corpus.has_documents
    for begin, end in ((0, split_at), (split_at, n_bytes)) if is_read else ():
        documents = whole.count(read_documents(corpus, begin, end))
        if corpus.valid_every is not None:
            documents = select(documents, corpus.valid_every, "train")
        if begin == 0:
            documents = train.count(documents)
        for chunk in by_conventions(corpus, documents):
            done += chunk.read_bytes
            if begin == 0 and not corpus.raw:
                _count_characters(chunk.text, counts)
            yield Progress("reading", done, n_bytes)
    alphabet = _alphabet(counts)
    yield Survey(
        n_bytes=n_bytes,
        split_at=split_at,
        n_valid_bytes=n_bytes - split_at if corpus.valid_every is None else whole.n_bytes - train.n_bytes,
        n_characters=None if corpus.raw else int(counts.sum()),
        alphabet=alphabet,
        has_text=corpus.raw or any(not character.isspace() for character in alphabet),
        script="none" if corpus.raw else guess_script(alphabet),
        n_replaced=whole.n_replaced,
        n_documents=whole.n_documents if corpus.has_documents else None,
        n_valid_documents=whole.n_documents - train.n_documents if corpus.has_documents else None,
        notices=_survey_notices(corpus, alphabet, whole),
    )


class _Tally:
    """Counts text on its way: bytes of the files, documents that end; and whether there are separators."""

    def __init__(self) -> None:
        self.n_bytes = self.n_replaced = self.n_documents = 0
        self.is_separated = False

    def count(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Pass chunks on."""
        for chunk in chunks:
            self.n_bytes += chunk.source_bytes
            self.n_replaced += chunk.n_replaced
            self.n_documents += 0 if chunk.document_ends is None else len(chunk.document_ends)
            self.is_separated |= chunk.has_separators
            yield chunk


def _count_characters(text: bytes, counts: npt.NDArray[np.int64]) -> None:
    if text.isascii():
        # Pairs of bytes are counted twice as fast as bytes.
        pairs = np.bincount(np.frombuffer(text[: len(text) & -2], dtype=np.uint16), minlength=1 << 16)
        both = pairs.reshape(256, 256)
        counts[:256] += both.sum(axis=0) + both.sum(axis=1)
        if len(text) % 2:
            counts[text[-1]] += 1
        return
    some = np.bincount(code_points(text))
    counts[: len(some)] += some


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


def _survey_notices(corpus: Corpus, alphabet: Mapping[str, int], whole: _Tally) -> tuple[str, ...]:
    notices = []
    if whole.n_replaced:
        notices.append(told_replaced(corpus, whole.n_replaced))
    if corpus.document_separator is not None and whole.n_documents and not whole.is_separated:
        notices.append(told_unseparated(corpus))
    for character, name in (("\r", "carriage return"), ("\0", "NUL byte")):
        # Among words that white space separates a carriage return is white space.
        if character in alphabet and not (character.isspace() and corpus.newlines == "eos"):
            count = alphabet[character]
            many, kept = ("", "is kept as a character") if count == 1 else ("s", "are kept as characters")
            remedy = remedy_of_nuls(corpus.sources[0]) if character == "\0" else ""
            notices.append(f"{corpus.name}: {count:,} {name}{many} in the training text {kept}{remedy}")
    if "\x1b" in alphabet and (remedy := remedy_of_escapes(corpus.sources[0])):
        notices.append(f"{corpus.name}: {remedy}")
    # Of bytes nothing is decoded, whatever their order.
    for source in () if corpus.reads_bytes else corpus.sources:
        if source.encoding in ("utf-16", "utf-32") and not source.n_mark:
            told = f"{source.name}: {source.told_codec.removeprefix(source.encoding).strip(' ()')}"
            notices.append(f"{told}; its bytes may be in the other order")
            break
    return tuple(notices)


def told_unseparated(corpus: Corpus) -> str:
    """Say that nothing separates documents."""
    where, each = ("it", "it is") if len(corpus.sources) == 1 else ("them", "each file is")
    return f"{corpus.name}: the document separator is nowhere in {where}; {each} one document"


def told_replaced(corpus: Corpus, n_replaced: int) -> str:
    """Say how many bytes are no text and are read as something else."""
    what = "byte is" if n_replaced == 1 else "bytes are"
    read = "is" if n_replaced == 1 else "are"
    return f"{corpus.name}: {n_replaced:,} {what} not {corpus.encoding} and {read} read as U+FFFD"
