"""Bytes or characters with given ids, and nothing else: vocabularies of other programs.

Such a vocabulary holds what its training text was made of, in an order of its own: about 204 of the 256 bytes
(enwik8), 27 characters (text8). Any other byte or character has no id, and a text that holds one is refused,
naming it and where it stands. It has no id for the end of a document.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from txlcli.tokenizer.outside import OutsideVocabulary, shown
from txlcli.tokenizer.stored import (
    Ids,
    check_files,
    damaged,
    hash_files,
    read_strings,
    to_json,
    write_files,
)
from txlcli.tokenizer.symbols import N_CODE_POINTS, code_points, utf8_sizes
from txlcli.tokenizer.units import complete_utf8

# So many characters are listed where a text has another.
_LISTED = 40


@dataclass(frozen=True)
class TableTokenizer:
    """A table of symbols.

    Attributes:
        kind: `byte` or `char`.
        points: Distinct bytes, or code points of characters; symbol k has id k.
    """

    kind: Literal["byte", "char"]
    points: tuple[int, ...]

    control_ids = ()
    is_lossless = True
    document_end = None

    @classmethod
    def load(cls, folder: Path, fields: Mapping[str, Any]) -> "TableTokenizer":
        """Take the tokenizer from its files."""
        path = folder / "tokenizer.json"
        kind: Literal["byte", "char"] = "byte" if fields.get("kind") == "byte" else "char"
        if kind == "byte":
            values = fields.get("bytes")
            is_sound = isinstance(values, list) and all(type(v) is int and 0 <= v < 256 for v in values)
            if not is_sound or not values or len(set(values)) < len(values):
                raise damaged(path, "expected `bytes` to be distinct numbers from 0 to 255")
            points = tuple(values)
        else:
            characters = read_strings(path, fields, "characters")
            if not characters or any(len(c) != 1 or "\ud800" <= c < "\ue000" for c in characters):
                raise damaged(path, "expected `characters` to be single characters")
            points = tuple(map(ord, characters))
        tokenizer = cls(kind, points)
        check_files(folder, tokenizer.files())
        return tokenizer

    @property
    def n_vocab(self) -> int:
        """As many as the table has."""
        return len(self.points)

    @property
    def newline_id(self) -> int | None:
        """The newline of the table; None where it has none."""
        return self.points.index(ord("\n")) if ord("\n") in self.points else None

    def encode(self, text: bytes) -> Ids:
        """Turn text into ids.

        Raises:
            OutsideVocabulary: the text holds something else.
        """
        points = self._points(text)
        ids: Ids = self._id_of_point[points]
        if len(ids) and int(ids.min()) < 0:
            raise self._outside(text, points, int(np.argmin(ids >= 0)))
        return ids

    def encode_with_ends(self, text: bytes) -> tuple[Ids, Ids]:
        """Turn text into ids and their ends.

        Raises:
            OutsideVocabulary: as `encode`.
        """
        ids = self.encode(text)
        if len(ids) == len(text):
            return ids, np.arange(1, len(text) + 1)
        return ids, np.cumsum(utf8_sizes(self._points(text)))

    def complete_prefix(self, text: bytes) -> int:
        """Count all bytes; of characters, all but those of a last one that is not whole yet."""
        return len(text) if self.kind == "byte" else complete_utf8(text)

    def decode(self, ids: Iterable[int], after: int | None = None) -> bytes:
        """Turn ids into text."""
        return b"".join([self._bytes_of_id[id] for id in ids])

    def unknown_count(self, ids: Ids) -> int:
        """Count nothing: no id stands for what is unknown."""
        return 0

    def unknown_characters(self, text: str) -> list[str]:
        """List the characters that have no id, once each."""
        return [character for character in dict.fromkeys(text) if ord(character) not in self.points]

    def files(self) -> dict[str, bytes]:
        """Give the files by name."""
        table = {"bytes": self.points} if self.kind == "byte" else {"characters": [*map(chr, self.points)]}
        return {"tokenizer.json": to_json({"kind": self.kind} | table)}

    def save(self, folder: Path) -> None:
        """Write the files."""
        write_files(folder, self.files())

    def fingerprint(self) -> str:
        """Hash the files."""
        return hash_files(self.files())

    def describe(self) -> dict[str, Any]:
        """Give what a checkpoint records."""
        return {"kind": self.kind, "n_vocab": self.n_vocab}

    def _points(self, text: bytes) -> npt.NDArray[np.unsignedinteger[Any]]:
        return np.frombuffer(text, np.uint8) if self.kind == "byte" else code_points(text)

    def _outside(
        self, text: bytes, points: npt.NDArray[np.unsignedinteger[Any]], index: int
    ) -> OutsideVocabulary:
        """Name the first symbol without an id."""
        if self.kind == "byte":
            byte = text[index]
            name = f" ({shown(chr(byte))})" if byte < 0x80 else ""
            remedy = f"its text is made of {self.n_vocab} of the 256 bytes"
            return OutsideVocabulary(f"0x{byte:02x}{name}", index, remedy)
        sizes = utf8_sizes(points)
        offset, size = int(sizes[:index].sum()), int(sizes[index])
        character = text[offset : offset + size].decode("utf-8", "backslashreplace")
        remedy = f"its text is made of {self.n_vocab:,} characters"
        if self.n_vocab <= _LISTED:
            remedy = f"its text is made of {shown(''.join(sorted(map(chr, self.points))))} alone"
        return OutsideVocabulary(shown(character), offset, remedy)

    @cached_property
    def _id_of_point(self) -> npt.NDArray[np.int32]:
        table = np.full(256 if self.kind == "byte" else N_CODE_POINTS, -1, np.int32)
        table[list(self.points)] = np.arange(self.n_vocab)
        return table

    @cached_property
    def _bytes_of_id(self) -> list[bytes]:
        return [bytes([p]) if self.kind == "byte" else chr(p).encode() for p in self.points]
