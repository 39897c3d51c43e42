"""Words and signs, with the spacing kept.

Text falls into these tokens, from left to right:

    word     letters, digits, marks and `_`, with single apostrophes inside: `don't`
    spaces   eight, four, two or one
    sign     any other character: punctuation, newline, tab; also each character of a script that is written
             without spaces (Chinese, Japanese, Thai, Lao, Burmese, Khmer)

One space between two words is not a token: words that follow each other are spaced by decoding. So
`the fox (brown).` is `the` `fox` ` ` `(` `brown` `)` `.`, and no word changes beside punctuation. Where a
line too long for one unit had to be cut inside a word, a token without text, the *join*, ends the unit.

Id 0 is `<unk>`, all that is not among the most frequent tokens of the training text; decoding spaces it like
a word. Ids ascend from the most to the least frequent in the text, or in stretches of it chosen by the seed
if it is long. Where the text is made of documents, one more id ends each.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, groupby, repeat
from pathlib import Path
from typing import Any

import numpy as np

from txlcli import UserError
from txlcli.tokenizer.stored import (
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
from txlcli.tokenizer.units import (
    WORD_SAMPLE_BYTES,
    complete_prefix,
    is_cut_inside,
    parts,
    sample,
    whole_units,
)

UNKNOWN = 0
JOIN = ""

# Without a bound on the vocabulary this many; an output layer of more is for those who ask.
DEFAULT_VOCAB_SIZE = 2**18
# A longer word is unknown: nobody's vocabulary, but a line of base64 is full of them.
MAX_WORD_CHARACTERS = 64
# Distinct tokens held while counting, for each id of the vocabulary and at least.
COUNTED_PER_ID = 4
MIN_COUNTED = 2**19

_NO_SPACES = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x3005, 0x3007),  # ideographic repetition, closing and zero marks
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x31F0, 0x31FF),  # Katakana extensions
    (0x3400, 0x4DBF),  # Han extension A
    (0x4E00, 0x9FFF),  # Han
    (0xF900, 0xFAFF),  # Han, compatibility
    (0xFF66, 0xFF9F),  # halfwidth Katakana
)
# Beyond the first 65,536 code points whole blocks are letters: a pattern of many ranges there is slow.
_LETTER_BLOCKS = (
    (0x10000, 0x16FFF),  # scripts, from Linear B to Bamum
    (0x1B170, 0x1CEFF),  # shorthand and scripts; Tangut, Khitan and Kana before them have no spaces
    (0x1D400, 0x1D7FF),  # mathematical letters
    (0x1DF00, 0x1EFFF),  # scripts, from Latin extensions to Adlam
    (0xE0100, 0xE01EF),  # variation selectors
)
# Zero-width joiner and non-joiner stand inside words of Persian and of the scripts of India.
_JOINERS = (0x200C, 0x200D)


@dataclass(frozen=True)
class WordTokenizer:
    """The most frequent words and signs.

    Attributes:
        tokens: Distinct words, signs, spaces and maybe the join; token k has id k + 1.
        has_documents: There is an id after them that ends a document.
    """

    tokens: tuple[str, ...]
    has_documents: bool = False

    kind = "word"
    control_ids = (UNKNOWN,)
    is_lossless = False

    @classmethod
    def build(
        cls, chunks: Iterable[bytes], vocab_size: int | None, *, seed: int, has_documents: bool = False
    ) -> "WordTokenizer":
        """Take the most frequent tokens of a text; of equally frequent ones those that sort first.

        Memory and time are bounded: of a long text, stretches chosen by the seed are counted, and when too
        many distinct tokens are held, the rarer half is forgotten.

        Raises:
            UserError: the text has no word, or the bound is below two, or three with documents.
        """
        check_bound(vocab_size, n_control=1, n_words=1, n_document_ends=int(has_documents))
        n_tokens = min(vocab_size or DEFAULT_VOCAB_SIZE, MAX_VOCAB) - 1 - has_documents
        limit = max(COUNTED_PER_ID * n_tokens, MIN_COUNTED)
        # A word is counted with its space and without, and added up at the end: that keeps the loop in C.
        found: Counter[str] = Counter()
        stretches = sample(chunks, seed, n_bytes=WORD_SAMPLE_BYTES)
        for text in chain.from_iterable(whole_units([one], complete_prefix) for one in stretches):
            found.update(_split(text, has_joins=True))
            if len(found) > limit:
                found = Counter(dict(found.most_common(limit // 2)))
        counts: Counter[str] = Counter()
        for token, count in found.items():
            counts[_bare(token)] += count
        ranked = sorted(
            (token for token in counts if len(token) <= MAX_WORD_CHARACTERS),
            key=lambda token: (-counts[token], token),
        )
        if not any(map(str.strip, ranked)):
            is_long = any(map(str.strip, counts))
            what = f"no word of at most {MAX_WORD_CHARACTERS} characters"
            raise without_words(what if is_long else "nothing but white space")
        return cls(tuple(ranked[:n_tokens]), has_documents)

    @classmethod
    def load(cls, folder: Path, fields: Mapping[str, Any]) -> "WordTokenizer":
        """Take the tokenizer from its files."""
        path = folder / "tokenizer.json"
        tokens = read_strings(path, fields, "tokens")
        if any(token.startswith(" ") and token.strip(" ") for token in tokens):
            raise damaged(path, "got a token of a space and more")
        # Joined: one search is quicker than 200,000. Surrogates may stand for bytes, but for nothing else.
        if re.search("[\ud800-\udc7f\udd00-\udfff]", "".join(tokens)):
            raise damaged(path, "got a token that is no text")
        tokenizer = cls(tuple(tokens), has_documents(fields))
        check_files(folder, tokenizer.files())
        return tokenizer

    @property
    def n_vocab(self) -> int:
        """`<unk>`, the tokens and the end of a document."""
        return 1 + len(self.tokens) + self.has_documents

    @property
    def document_end(self) -> int | None:
        """The last id, which ends a document; None without documents."""
        return self.n_vocab - 1 if self.has_documents else None

    @property
    def newline_id(self) -> int | None:
        """The newline, if the training text had any."""
        return self._id_of_token.get("\n")

    def encode(self, text: bytes) -> Ids:
        """Turn whole units of text into ids."""
        return self._look_up(self._split(text))

    def encode_with_ends(self, text: bytes) -> tuple[Ids, Ids]:
        """Turn whole units into ids and their ends; a space that is no token belongs to the word after it."""
        tokens = self._split(text)
        if text.isascii():
            sizes = np.fromiter(map(len, tokens), np.int64, len(tokens))
        else:
            sizes = np.array([len(_to_bytes(token)) for token in tokens], np.int64)
        return self._look_up(tokens), np.cumsum(sizes)

    def complete_prefix(self, text: bytes) -> int:
        """Count the leading bytes that are whole units."""
        return complete_prefix(text)

    def decode(self, ids: Iterable[int], after: int | None = None) -> bytes:
        """Turn ids into text, with a space between two words, also between `after` and the first id."""
        texts, is_word = self._bytes_of_id, self._is_word_of_id
        spaced = []
        was_word = after is not None and is_word[after]
        for id in ids:
            if was_word and is_word[id]:
                spaced.append(b" ")
            spaced.append(texts[id])
            was_word = is_word[id]
        return b"".join(spaced)

    def unknown_count(self, ids: Ids) -> int:
        """Count the tokens outside the vocabulary."""
        return int(np.count_nonzero(np.asarray(ids) == UNKNOWN))

    def unknown_characters(self, text: str) -> list[str]:
        """List the words and signs outside the vocabulary, once each."""
        tokens = map(_bare, self._split(_to_bytes(text)))
        return [token for token in dict.fromkeys(tokens) if token not in self._id_of_token]

    def files(self) -> dict[str, bytes]:
        """Give the files by name."""
        fields = {"kind": self.kind, "tokens": self.tokens}
        return {"tokenizer.json": to_json(fields | document_field(self.has_documents))}

    def save(self, folder: Path) -> None:
        """Write the files."""
        write_files(folder, self.files())

    def fingerprint(self) -> str:
        """Hash the files."""
        return hash_files(self.files())

    def describe(self) -> dict[str, Any]:
        """Give what a checkpoint records."""
        return {"kind": self.kind, "n_vocab": self.n_vocab}

    def _split(self, text: bytes) -> list[str]:
        # A join outside the vocabulary is left out: a space too many is better than an unknown word too many.
        return _split(text, has_joins=JOIN in self._id_of_token)

    def _look_up(self, tokens: list[str]) -> Ids:
        ids = map(self._id_of_token.get, tokens, repeat(UNKNOWN))
        return np.fromiter(ids, np.int32, len(tokens))

    @cached_property
    def _id_of_token(self) -> dict[str, int]:
        table = {token: id for id, token in enumerate(self.tokens, 1)}
        # A word comes out of the text with the space before it or without.
        table.update({" " + token: id for token, id in table.items() if _is_word(token)})
        return table

    @cached_property
    def _bytes_of_id(self) -> list[bytes]:
        return [b"<unk>", *map(_to_bytes, self.tokens), *[b""] * self.has_documents]

    @cached_property
    def _is_word_of_id(self) -> list[bool]:
        return [True, *map(_is_word, self.tokens), *[False] * self.has_documents]


def without_words(found: str) -> UserError:
    """Word the refusal of a text of which no word can be in a vocabulary; `found` says what it is."""
    return UserError(
        f"corpus: {found}; a vocabulary of words needs words; "
        "give other text, or --tokenizer byte or char, which take it"
    )


def _split(text: bytes, *, has_joins: bool) -> list[str]:
    # The tokens' texts; a word keeps its one space to the word before.
    find = _patterns()[0].findall
    tokens: list[str] = []
    for part in parts(text):
        tokens += find(part.decode("utf-8", "surrogateescape"))
        if has_joins and is_cut_inside(part[part.rfind(b"\n") + 1 :]) and _is_word(_bare(tokens[-1])):
            tokens.append(JOIN)
    return tokens


def _bare(token: str) -> str:
    return token[1:] if token[:1] == " " and token[-1] != " " else token


def _is_word(token: str) -> bool:
    return _patterns()[1].match(token) is not None


def _to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


@cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Compile the pattern of a token and that of a word's first character."""
    letter = f"[{_letters()}]"
    word = f"{letter}+(?:['’]{letter}+)*"
    return re.compile(f"{word}| (?<={letter} ){word}| {{8}}| {{4}}| {{2}}|(?s:.)"), re.compile(letter)


def _letters() -> str:
    """List what words are made of, as the ranges of a character class."""

    def is_letter(point: int) -> bool:
        character = chr(point)
        return (
            character.isalnum()
            or character == "_"
            or unicodedata.category(character)[0] == "M"
            or point in _JOINERS
        )

    letters = {point for point in range(0x10000) if is_letter(point)}
    letters.difference_update(*(range(first, last + 1) for first, last in _NO_SPACES))
    runs = groupby(enumerate(sorted(letters)), key=lambda item: item[1] - item[0])
    members = [[point for _, point in run] for _, run in runs]
    ranges = [*((run[0], run[-1]) for run in members), *_LETTER_BLOCKS]
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in ranges)
