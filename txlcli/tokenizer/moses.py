"""Raw text for words that were split as WikiText-103 is: by the rules of Moses (Koehn et al. 2007).

A line becomes words in four steps: punctuation is written in ASCII, what is not part of a word is split off,
hyphens inside words become ` @-@ `, and commas and points between digits ` @,@ ` and ` @.@ `. No character is
written as an HTML entity. The way back joins what was split, which is a guess: spacing and quotation marks of
the raw text are not known any more.

Moses' rules are those of sacremoses, an extra of this package.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from txlcli import UserError
from txlcli.tokenizer.corpus_words import CorpusWordTokenizer
from txlcli.tokenizer.stored import Ids
from txlcli.tokenizer.units import complete_prefix, units

_NUMBER_SIGN = re.compile(r"(?<=\d)[,.](?=\d)")
_MARKED_SIGN = re.compile(r" @([,.])@ ")
_MARKS = {"@-@": "-", "@,@": ",", "@.@": "."}
_PROTECTED = ("<unk>", "<formula>")
# No vocabulary has a word of so many characters.
_LONGEST_WORD = 1000
# How many characters that Moses put in place of others are looked over, and how many must then agree.
_REACH, _AGREEING = 12, 4
# Words that are put together anew at once.
_WORDS_AT_ONCE = 8


def refuse_missing_moses() -> None:
    """Refuse to read raw text without the package that holds Moses' rules.

    Raises:
        UserError: it is not installed.
    """
    if find_spec("sacremoses") is None:
        raise UserError("--moses: needs sacremoses, which is not installed; pip install sacremoses")


@dataclass(frozen=True)
class MosesTokenizer:
    """Words of a vocabulary, found in raw text.

    Attributes:
        words: The vocabulary, whose words were split by Moses' rules.
    """

    words: CorpusWordTokenizer

    kind = "word"
    is_lossless = False

    @property
    def n_vocab(self) -> int:
        """As many as the vocabulary has."""
        return self.words.n_vocab

    @property
    def control_ids(self) -> tuple[int, ...]:
        """Those of the vocabulary."""
        return self.words.control_ids

    @property
    def document_end(self) -> int | None:
        """The end of a document, if the vocabulary has one."""
        return self.words.document_end

    @property
    def newline_id(self) -> int:
        """That of the vocabulary."""
        return self.words.newline_id

    def encode(self, text: bytes) -> Ids:
        """Turn whole lines of raw text into ids."""
        return self.words.encode(b"".join(self.split(unit) for unit in units(text)))

    def encode_with_ends(self, text: bytes) -> tuple[Ids, Ids]:
        """Turn whole lines of raw text into ids and their ends.

        A token ends with the last of its characters in the raw text, the last of a line with the line. Where
        Moses' rules have put other characters in place of some, the ends beside them are a guess.
        """
        ends: list[int] = []
        lines: list[bytes] = []
        begin = 0
        for unit in units(text):
            lines.append(self.split(unit))
            words = lines[-1].decode("utf-8", "surrogateescape").split()
            ends += [begin + end for end in _ends(unit, words)]
            begin += len(unit)
        ends[-1:] = [len(text)] * bool(ends)
        return self.words.encode(b"".join(lines)), np.array(ends, np.int64)

    def complete_prefix(self, text: bytes) -> int:
        """Count the bytes of whole lines, or of the parts of one of more than 4,096 bytes."""
        return complete_prefix(text)

    def decode(self, ids: Iterable[int], after: int | None = None) -> bytes:
        """Turn ids into words with spaces between them, of which `Joining` makes text."""
        return self.words.decode(ids, after)

    def unknown_count(self, ids: Ids) -> int:
        """Count the words outside the vocabulary."""
        return self.words.unknown_count(ids)

    def unknown_characters(self, text: str) -> list[str]:
        """List the words outside the vocabulary, once each."""
        source = text.encode("utf-8", "surrogateescape")
        split = b"".join(self.split(unit) for unit in units(source))
        return self.words.unknown_characters(split.decode("utf-8", "surrogateescape"))

    def save(self, folder: Path) -> None:
        """Write the vocabulary."""
        self.words.save(folder)

    def fingerprint(self) -> str:
        """Hash the vocabulary."""
        return self.words.fingerprint()

    def describe(self) -> dict[str, Any]:
        """Give what a checkpoint records."""
        return self.words.describe()

    def join(self, words: str) -> str:
        """Make text of the words of a line."""
        return _MARKED_SIGN.sub(r"\1", self._rules[2].detokenize(words.split(), unescape=False)).strip()

    def split(self, unit: bytes) -> bytes:
        """Split a line by Moses' rules, with a space between words; its newline stays."""
        line = unit.decode("utf-8", "surrogateescape")
        normalizer, tokenizer, _ = self._rules
        words = tokenizer.tokenize(
            normalizer.normalize(line),
            aggressive_dash_splits=True,
            escape=False,
            protected_patterns=[re.escape(word) for word in _PROTECTED],
        )
        split = " ".join(_NUMBER_SIGN.sub(r" @\g<0>@ ", word) for word in words)
        parts = (
            word[i : i + _LONGEST_WORD] for word in split.split() for i in range(0, len(word), _LONGEST_WORD)
        )
        return " ".join(parts).encode("utf-8", "surrogateescape") + (b"\n" if unit.endswith(b"\n") else b" ")

    @cached_property
    def _rules(self) -> tuple[Any, Any, Any]:  # Any: the library has no types
        import sacremoses

        return (
            sacremoses.MosesPunctNormalizer("en"),
            sacremoses.MosesTokenizer("en"),
            sacremoses.MosesDetokenizer("en"),
        )


class Joining:
    """Puts words together to text as they come; what follows may change how the last ones are spaced.

    joining = Joining(tokenizer, "He said ")
    text = joining.add("hello , said") + joining.add(" he .") + joining.finish()
    """

    def __init__(self, tokenizer: MosesTokenizer, before: str) -> None:
        """Begin after a raw text, whose last line decides how quotation marks pair up."""
        self._join = tokenizer.join
        last_line = before.rpartition("\n")[2].encode("utf-8", "surrogateescape")
        split = tokenizer.split(last_line).decode("utf-8", "surrogateescape") if last_line.strip() else ""
        self._words = split.split()
        self._told = len(self._join(split))
        self._is_spaced = before[-1:].isspace()
        self._rest = ""

    def add(self, text: str) -> str:
        """Take words, also parts of one, and return the text that is settled."""
        *lines, self._rest = (self._rest + text).split("\n")
        settled = "".join(self._end_line(line) for line in lines)
        *words, last = self._rest.split(" ")
        if len(words) < _WORDS_AT_ONCE:
            return settled
        self._words += [word for word in words if word]
        self._rest = " " + last
        # The next word decides how the last ones are joined.
        n_sure = len(self._words) - 1
        while n_sure > 0 and self._words[n_sure - 1] in _MARKS:
            n_sure -= 1
        return settled + self._tell(self._words[:n_sure])

    def finish(self) -> str:
        """Return what is left."""
        rest, self._rest = self._rest, ""
        return self._tell([*self._words, rest])

    def _end_line(self, line: str) -> str:
        text = self._tell([*self._words, line])
        self._words, self._told = [], 0
        return text + "\n"

    def _tell(self, words: list[str]) -> str:
        text = self._join(" ".join(words))
        told, self._told = self._told, max(self._told, len(text))
        new = text[told:]
        if new and self._is_spaced:
            new = new.lstrip()
        self._is_spaced = self._is_spaced and not new
        return new


def _ends(unit: bytes, words: list[str]) -> list[int]:
    """Return where the words of a line end in it, and its newline, as byte offsets."""
    line = unit.decode("utf-8", "surrogateescape")
    places = [i for i, character in enumerate(line) if not character.isspace()]
    source = "".join(line[i] for i in places)
    bare = [_MARKS.get(word, word) for word in words]
    aligned = [0, *_align(source, "".join(bare))]
    byte_ends = [0, *accumulate(len(c.encode("utf-8", "surrogateescape")) for c in line)]
    n_read = accumulate(map(len, bare))
    ends = [byte_ends[places[aligned[n] - 1] + 1] if aligned[n] else 0 for n in n_read]
    if unit.endswith(b"\n"):
        ends.append(len(unit))
    elif ends:
        ends[-1] = len(unit)
    return ends


def _align(source: str, target: str) -> list[int]:
    """Return, for each character of `target`, how many of `source` it and those before it stand for."""
    ends: list[int] = []
    j = 0
    while len(ends) < len(target):
        i = len(ends)
        if source[j : j + 1] == target[i]:
            j += 1
            ends.append(j)
            continue
        n_source, n_target = _skip(source[j:], target[i:])
        j = min(j + n_source, len(source))
        ends += [j] * n_target
    return ends[: len(target)]


def _skip(source: str, target: str) -> tuple[int, int]:
    """Return the fewest characters of both after which they agree; one of each where they do not soon."""
    if source[1:2] == target[1:2]:
        return 1, 1
    for n in range(1, _REACH):
        for n_target in range(n + 1):
            after_source = source[n - n_target : n - n_target + _AGREEING]
            after_target = target[n_target : n_target + _AGREEING]
            if after_source == after_target:
                return n - n_target, n_target
    return 1, 1
