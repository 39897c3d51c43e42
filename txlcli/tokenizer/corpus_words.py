r"""Words of a corpus that is split into words already, with `<eos>` for its newlines.

Tokens are what white space separates, as Python's `str.split` does it, and a newline is the word `<eos>`, as
in the published results on WikiText-103 (Dai et al. 2019). There is an `<eos>` only where there is a newline:
none is added after a last line without one. All other white space is lost, also a carriage return, so text is
given back with single spaces. A word of more than 4,096 bytes is cut as a line of that length is (see
`units`).

Ids: 0 is `<eos>`, then words from the most to the least frequent, and `<unk>` among them. It stands for
whatever is not in the vocabulary, and is also what a text means that spells it, as published corpora do. A
text that spells `<eos>` gets `<unk>`: only a newline may end a line. Where the text is made of documents,
the last id ends each; it has no spelling.

A vocabulary of another program may have other names for the two, or no `<unk>`; then a text with a word that
it does not have is refused. It may also be one of lower-case text: then a text's words are lowered before
they are looked up, and come back so.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from txlcli import UserError
from txlcli.tokenizer.outside import OutsideVocabulary, shown
from txlcli.tokenizer.stored import (
    MAX_FILE_BYTES,
    MAX_VOCAB,
    Ids,
    check_files,
    damaged,
    document_field,
    has_documents,
    hash_files,
    read_strings,
    to_json,
    write_files,
)
from txlcli.tokenizer.symbols import check_bound
from txlcli.tokenizer.units import UNIT_BYTES, complete_utf8, parts, whole_units
from txlcli.tokenizer.words import COUNTED_PER_ID, MIN_COUNTED, without_words

EOS, UNKNOWN = "<eos>", "<unk>"

# No text decodes to this character, so it cannot be taken for a word.
_NEWLINE_WORD = "\ud800"
_SPACED_TOKEN = re.compile(r"[^\S\n]*(?:\n|\S+)")


@dataclass(frozen=True)
class CorpusWordTokenizer:
    """The most frequent words that white space separates.

    Attributes:
        tokens: Distinct words, with `newline` and `unknown` among them; token k has id k.
        newline: The token of a newline.
        unknown: The token of all other words; None: there are no others.
        is_lowered: Words are read in lower case.
        has_documents: There is an id after the words that ends a document.
    """

    tokens: tuple[str, ...]
    newline: str = EOS
    unknown: str | None = UNKNOWN
    is_lowered: bool = False
    has_documents: bool = False

    kind = "word"
    is_lossless = False

    @classmethod
    def build(
        cls, chunks: Iterable[bytes], vocab_size: int | None, *, has_documents: bool = False
    ) -> "CorpusWordTokenizer":
        """Take the most frequent words of a text; of equally frequent ones those that sort first.

        All of the text is counted, as for the published vocabularies. Memory is bounded: when too many
        distinct words are held, the rarer half is forgotten.

        Raises:
            UserError: the text has no word, its words make too large a file, or the bound is below three,
                or four with documents.
        """
        check_bound(vocab_size, n_control=2, n_words=1, n_document_ends=int(has_documents))
        n_words = min(vocab_size or MAX_VOCAB, MAX_VOCAB) - 1 - has_documents
        limit = max(COUNTED_PER_ID * n_words, MIN_COUNTED)
        counts: Counter[str] = Counter()
        for text in whole_units(chunks, _complete_prefix):
            counts.update(_words(text))
            if len(counts) > limit:
                counts = Counter(dict(counts.most_common(limit // 2)))
        for sign in (_NEWLINE_WORD, EOS):
            counts.pop(sign, None)
        if not counts:
            raise without_words("nothing but white space")
        counts.setdefault(UNKNOWN, 0)
        ranked = sorted(counts, key=lambda word: (-counts[word], word))[:n_words]
        if UNKNOWN not in ranked:
            ranked[-1] = UNKNOWN
        tokenizer = cls((EOS, *ranked), has_documents=has_documents)
        n_bytes = sum(map(len, tokenizer.files().values()))
        if n_bytes > MAX_FILE_BYTES:
            raise UserError(
                f"corpus: its words are too long for a vocabulary; got {len(ranked):,} of "
                f"{n_bytes / 1e6:,.0f} MB, at most {MAX_FILE_BYTES / 1e6:,.0f} MB; give a smaller "
                "--vocab-size, or --newlines keep for text that white space does not split into words"
            )
        return tokenizer

    @classmethod
    def load(cls, folder: Path, fields: Mapping[str, Any]) -> "CorpusWordTokenizer":
        """Take the tokenizer from its files."""
        path = folder / "tokenizer.json"
        tokens = read_strings(path, fields, "tokens")
        newline, unknown = fields.get("newline", EOS), fields.get("unknown", UNKNOWN)
        if newline not in tokens or unknown not in (None, *tokens) or newline == unknown:
            raise damaged(path, "expected `tokens` to hold a token for newlines and one for unknown words")
        # Joined: one search is quicker than 200,000. Surrogates may stand for bytes, but for nothing else.
        joined = "".join(tokens)
        if "" in tokens or re.search(r"\s", joined):
            raise damaged(path, "got a token that is empty or holds white space")
        if re.search("[\ud800-\udc7f\udd00-\udfff]", joined):
            raise damaged(path, "got a token that is no text")
        is_lowered = fields.get("lower_case") is True
        tokenizer = cls(tuple(tokens), newline, unknown, is_lowered, has_documents(fields))
        check_files(folder, tokenizer.files())
        return tokenizer

    @property
    def n_vocab(self) -> int:
        """The words, `<eos>` and `<unk>`, and the end of a document."""
        return len(self.tokens) + self.has_documents

    @property
    def document_end(self) -> int | None:
        """The last id, which ends a document; None without documents."""
        return self.n_vocab - 1 if self.has_documents else None

    @cached_property
    def newline_id(self) -> int:
        """The token of a newline, `<eos>`."""
        return self.tokens.index(self.newline)

    @property
    def control_ids(self) -> tuple[int, ...]:
        """`<unk>`; `<eos>` is a newline, which may be drawn."""
        return () if self.unknown is None else (self._unknown,)

    def encode(self, text: bytes) -> Ids:
        """Turn whole units of text into ids.

        Raises:
            OutsideVocabulary: a word has no id, and there is none for unknown words.
        """
        words = self._words(text)
        ids = np.fromiter(map(self._id_of_word.get, words, repeat(self._unknown)), np.int32, len(words))
        if self.unknown is None and len(ids) and int(ids.min()) < 0:
            index = int(np.argmin(ids >= 0))
            word, end = _words(text)[index], sum(_sizes(text)[: index + 1])
            remedy = "it has no <unk> for other words"
            raise OutsideVocabulary(shown(word), end - len(_to_bytes(word)), remedy)
        return ids

    def encode_with_ends(self, text: bytes) -> tuple[Ids, Ids]:
        """Turn whole units into ids and their ends.

        White space before a word or newline belongs to it, and that after the last one to the last one. A
        text of nothing else has no token.

        Raises:
            OutsideVocabulary: as `encode`.
        """
        ends = np.cumsum(np.array(_sizes(text), np.int64))
        ends[-1:] = len(text)
        return self.encode(text), ends

    def complete_prefix(self, text: bytes) -> int:
        """Count the bytes up to the end of the last token that another follows.

        What follows may go on, and white space at the end belongs to the last token of all. So a run of white
        space is kept whole, however long.
        """
        return _complete_prefix(text)

    def decode(self, ids: Iterable[int], after: int | None = None) -> bytes:
        """Turn ids into text, with a space between two words, also between `after` and the first id."""
        texts, ends = self._bytes_of_id, (self.newline_id, self.document_end)
        spaced = []
        was_word = after is not None and after not in ends
        for id in ids:
            is_word = id not in ends
            if was_word and is_word:
                spaced.append(b" ")
            spaced.append(texts[id])
            was_word = is_word
        return b"".join(spaced)

    def unknown_count(self, ids: Ids) -> int:
        """Count the words outside the vocabulary, and those that the text itself calls unknown."""
        return int(np.count_nonzero(np.asarray(ids) == self._unknown))

    def unknown_characters(self, text: str) -> list[str]:
        """List the words outside the vocabulary, once each."""
        words = dict.fromkeys(self._words(_to_bytes(text)))
        return [word for word in words if word not in self._id_of_word]

    def files(self) -> dict[str, bytes]:
        """Give the files by name; what is as usual is not written."""
        rules = {"newline": self.newline, "unknown": self.unknown, "lower_case": self.is_lowered}
        usual = {"newline": EOS, "unknown": UNKNOWN, "lower_case": False}
        own = {name: rule for name, rule in rules.items() if rule != usual[name]}
        own |= document_field(self.has_documents)
        return {
            "tokenizer.json": to_json({"kind": self.kind, "newlines": "eos", "tokens": self.tokens} | own)
        }

    def save(self, folder: Path) -> None:
        """Write the files."""
        write_files(folder, self.files())

    def fingerprint(self) -> str:
        """Hash the files."""
        return hash_files(self.files())

    def describe(self) -> dict[str, Any]:
        """Give what a checkpoint records."""
        return {"kind": self.kind, "newlines": "eos", "n_vocab": self.n_vocab}

    def _words(self, text: bytes) -> list[str]:
        words = _words(text)
        return [word.lower() for word in words] if self.is_lowered else words

    @cached_property
    def _unknown(self) -> int:
        return -1 if self.unknown is None else self.tokens.index(self.unknown)

    @cached_property
    def _id_of_word(self) -> dict[str, int]:
        words = {word: id for id, word in enumerate(self.tokens) if id != self.newline_id}
        return {_NEWLINE_WORD: self.newline_id} | words

    @cached_property
    def _bytes_of_id(self) -> list[bytes]:
        texts = [b"\n" if word == self.newline else _to_bytes(word) for word in self.tokens]
        return [*texts, b""] if self.has_documents else texts


def _words(text: bytes) -> list[str]:
    # No word of so few characters is cut, which is quick to see.
    longest = UNIT_BYTES // 4
    words = _to_text(text).replace("\n", f" {_NEWLINE_WORD} ").split()
    if max(map(len, words), default=0) <= longest:
        return words
    cut = ([word] if len(word) <= longest else map(_to_text, parts(_to_bytes(word))) for word in words)
    return [part for some in cut for part in some]


def _sizes(text: bytes) -> list[int]:
    """Count the bytes of each token with the white space before it; that after the last is not counted."""
    whole = _to_text(text)
    # White space without a token after it would be tried again from each of its characters on.
    stop = len(whole.rstrip())
    stop = max(stop, whole.rfind("\n", stop) + 1)
    sizes = []
    for token in _SPACED_TOKEN.findall(whole[:stop]):
        n_bytes = len(token) if token.isascii() else len(_to_bytes(token))
        if n_bytes <= UNIT_BYTES:
            sizes.append(n_bytes)
        else:
            word = _to_bytes(token.lstrip())
            first, *others = map(len, parts(word))
            sizes += [n_bytes - len(word) + first, *others]
    return sizes


def _complete_prefix(text: bytes) -> int:
    # From the last newline but one there are at least two tokens, so nothing before it needs a look.
    start = max(text.rfind(b"\n", 0, max(text.rfind(b"\n"), 0)), 0)
    return start + sum(_sizes(text[start : complete_utf8(text)])[:-1])


def _to_text(text: bytes) -> str:
    return text.decode("utf-8", "surrogateescape")


def _to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
