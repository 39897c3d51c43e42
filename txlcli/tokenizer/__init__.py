"""Text to ids and back: bytes, characters, words, SentencePiece.

Inside the program text is UTF-8 bytes (for `byte`: any bytes). What each kind promises:

    kind            vocabulary                                        text it gives back exactly
    byte            the 256 bytes                                     any
    char            256 bytes, the training text's characters         any; a new character costs its bytes
    word            <unk>, the most frequent words and signs          what its vocabulary covers
    word, eos       <eos>, <unk>, the most frequent words             its words and newlines
    sentencepiece   <unk>, 256 bytes, the training text's pieces      any; a new character costs its bytes
    byte, char      those of another program's vocabulary             what it takes; other text is refused

Where a run's text is made of documents, each kind but the last has one more id, the last, which ends a
document: no text is turned into it, it gives back no text, and it may be drawn.

Long text is encoded in chunks that give the ids of one pass, because encoding works on *units* that stand for
themselves (see `units`): read, take `complete_prefix` of what has been read, encode that, keep the rest for
the next chunk. No unit is longer than 4,096 bytes, so what is kept is short; but `word, eos` keeps a run of
white space whole, however long.

A control id (`<unk>`) never comes out of text that the vocabulary covers, and a text that spells `<unk>`,
`</s>` or `<0x41>` is only text.

`word, eos` is `word` with the setting `newlines eos`, the words of published corpora (see `corpus_words`).
There a text that spells `<unk>` means it, and units are single words with the white space before them.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from txlcli.tokenizer.corpus_words import CorpusWordTokenizer
from txlcli.tokenizer.moses import Joining, MosesTokenizer, refuse_missing_moses
from txlcli.tokenizer.outside import OutsideVocabulary
from txlcli.tokenizer.pieces import PieceTokenizer, default_vocab_size
from txlcli.tokenizer.stored import MAX_VOCAB, Ids, damaged, read_fields
from txlcli.tokenizer.symbols import ByteTokenizer, CharTokenizer
from txlcli.tokenizer.table import TableTokenizer
from txlcli.tokenizer.units import SAMPLE_BYTES, WORD_SAMPLE_BYTES, complete_utf8
from txlcli.tokenizer.words import WordTokenizer

__all__ = [
    "MAX_VOCAB",
    "SAMPLE_BYTES",
    "CorpusWordTokenizer",
    "Ids",
    "Joining",
    "MosesTokenizer",
    "OutsideVocabulary",
    "TableTokenizer",
    "Tokenizer",
    "build_tokenizer",
    "complete_utf8",
    "default_vocab_size",
    "load_tokenizer",
    "refuse_missing_moses",
    "sampled_bytes",
]


@runtime_checkable
class Tokenizer(Protocol):
    """A vocabulary and its rules; a value that never changes."""

    @property
    def kind(self) -> str:
        """`byte`, `char`, `word` or `sentencepiece`."""

    @property
    def n_vocab(self) -> int:
        """Number of ids: 0 to n_vocab - 1."""

    @property
    def control_ids(self) -> tuple[int, ...]:
        """Ids that stand for lost text; never drawn when sampling."""

    @property
    def document_end(self) -> int | None:
        """The id that ends a document, n_vocab - 1; None where the run has no documents.

        Encoding never gives it, it decodes to nothing, and it may be drawn when sampling.
        """

    @property
    def is_lossless(self) -> bool:
        """Whether decoding gives back every text; if not, bits per byte are a lower bound."""

    @property
    def newline_id(self) -> int | None:
        """The token of a newline; None where the vocabulary has none."""

    def encode(self, text: bytes) -> Ids:
        """Turn whole units of text into ids.

        Raises:
            OutsideVocabulary: the text holds what has no id, and there is none for the unknown.
        """

    def encode_with_ends(self, text: bytes) -> tuple[Ids, Ids]:
        """Turn whole units into ids (int32) and, per token, its end as a byte offset in `text` (int64).

        The last end is `len(text)`. An end may lie inside a character, and two ends may be equal.

        Raises:
            OutsideVocabulary: as `encode`.
        """

    def complete_prefix(self, text: bytes) -> int:
        """Count the leading bytes that are whole units already, whatever text may follow.

        Args:
            text: Text that starts where a unit starts: at the beginning, or where the last call cut.
        """

    def decode(self, ids: Iterable[int], after: int | None = None) -> bytes:
        """Turn ids into text; `after` is the id before them, on which the spacing of words depends."""

    def unknown_count(self, ids: Ids) -> int:
        """Count the tokens that stand for text outside the vocabulary and do not give it back."""

    def unknown_characters(self, text: str) -> list[str]:
        """List what the vocabulary does not have, once each: characters, for `word` words."""

    def save(self, folder: Path) -> None:
        """Write the vocabulary; equal ones write equal bytes, with no path or date in them."""

    def fingerprint(self) -> str:
        """Hash what `save` writes (sha256, hexadecimal)."""

    def describe(self) -> dict[str, Any]:
        """Give what a checkpoint says about its tokenizer, ready for JSON."""


def build_tokenizer(
    kind: str,
    *,
    vocab_size: int | None,
    text: Callable[[], Iterator[bytes]],
    n_bytes: int,
    seed: int,
    newlines: Literal["keep", "drop", "eos"] = "keep",
    has_documents: bool = False,
) -> Tokenizer:
    """Make a vocabulary out of the training text.

    Args:
        kind: `byte`, `char`, `word` or `sentencepiece`.
        vocab_size: Upper bound on the number of ids; None: none for byte, char and the words of `eos`, a rule
            for the others.
        text: Starts a fresh pass over the training text in chunks.
        n_bytes: Size of the training text, about.
        seed: Chooses what is learned from in a text of more than `sampled_bytes`.
        newlines: `eos`, with `word` only: a newline is the word `<eos>`. Dropped ones are not in `text`.
        has_documents: The last id ends a document; the bound counts it.

    Raises:
        UserError: the bound leaves no room for what the kind always needs, or the text has no words.
    """
    if kind == "byte":
        return ByteTokenizer.build(vocab_size, has_documents=has_documents)
    if kind == "char":
        return CharTokenizer.build(text(), vocab_size, has_documents=has_documents)
    if kind == "word" and newlines == "eos":
        return CorpusWordTokenizer.build(text(), vocab_size, has_documents=has_documents)
    if kind == "word":
        return WordTokenizer.build(text(), vocab_size, seed=seed, has_documents=has_documents)
    if kind == "sentencepiece":
        return PieceTokenizer.build(
            text(), vocab_size, n_bytes=n_bytes, seed=seed, has_documents=has_documents
        )
    raise ValueError(f"no tokenizer is called {kind!r}")


def sampled_bytes(kind: str, newlines: str = "keep") -> int | None:
    """Return how many bytes of a long text a vocabulary is learned from at most; None: from all of it."""
    if kind == "sentencepiece":
        return SAMPLE_BYTES
    return WORD_SAMPLE_BYTES if kind == "word" and newlines != "eos" else None


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read a vocabulary that `save` wrote; files that differ from what `save` writes are refused.

    Raises:
        UserError: a file is missing, damaged or not ours; the message names it.
    """
    path = folder / "tokenizer.json"
    fields = read_fields(path)
    kind = fields.get("kind")
    if (kind == "byte" and "bytes" in fields) or (kind == "char" and "characters" in fields):
        return TableTokenizer.load(folder, fields)
    if kind == "byte":
        return ByteTokenizer.load(folder, fields)
    if kind == "char":
        return CharTokenizer.load(folder, fields)
    if kind == "word" and fields.get("newlines") == "eos":
        return CorpusWordTokenizer.load(folder, fields)
    if kind == "word":
        return WordTokenizer.load(folder, fields)
    if kind == "sentencepiece":
        return PieceTokenizer.load(folder, fields)
    raise damaged(path, "expected a `kind` of byte, char, word or sentencepiece")
