"""Bytes and characters: one table lookup per symbol.

Ids of `byte` are the bytes. Ids of `char` are the 256 bytes, then the training text's characters in the order
of their code points; a character outside the alphabet is written as its UTF-8 bytes, and so is any byte that
is no UTF-8. So every text comes back. Where the text is made of documents, one more id ends each.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from txlcli import UserError
from txlcli.tokenizer.stored import (
    MAX_VOCAB,
    Ids,
    check_files,
    damaged,
    document_field,
    has_documents,
    hash_files,
    to_json,
    write_files,
)
from txlcli.tokenizer.units import blocks, complete_utf8

N_CODE_POINTS = 0x110000
# Python stands a byte that is no UTF-8 for U+DC80 to U+DCFF; no UTF-8 text contains these.
_BYTE_POINTS = 0xDC00


@dataclass(frozen=True)
class ByteTokenizer:
    """The 256 bytes.

    Attributes:
        has_documents: There is an id after them that ends a document.
    """

    has_documents: bool = False

    kind = "byte"
    control_ids = ()
    is_lossless = True
    newline_id = ord("\n")

    @classmethod
    def build(cls, vocab_size: int | None, *, has_documents: bool = False) -> "ByteTokenizer":
        """Make the tokenizer.

        Raises:
            UserError: the bound is below 256, or 257 with documents.
        """
        check_bound(vocab_size, n_bytes=256, n_document_ends=int(has_documents))
        return cls(has_documents)

    @classmethod
    def load(cls, folder: Path, fields: Mapping[str, Any]) -> "ByteTokenizer":
        """Take the tokenizer from its files."""
        tokenizer = cls(has_documents(fields))
        check_files(folder, tokenizer.files())
        return tokenizer

    @property
    def n_vocab(self) -> int:
        """256 bytes and the end of a document."""
        return 256 + self.has_documents

    @property
    def document_end(self) -> int | None:
        """The last id, which ends a document; None without documents."""
        return self.n_vocab - 1 if self.has_documents else None

    def encode(self, text: bytes) -> Ids:
        """Turn bytes into ids."""
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def encode_with_ends(self, text: bytes) -> tuple[Ids, Ids]:
        """Turn bytes into ids and their ends."""
        return self.encode(text), np.arange(1, len(text) + 1)

    def complete_prefix(self, text: bytes) -> int:
        """Count all bytes: each is a unit."""
        return len(text)

    def decode(self, ids: Iterable[int], after: int | None = None) -> bytes:
        """Turn ids into bytes."""
        end = self.document_end
        return bytes([id for id in ids if id != end])

    def unknown_count(self, ids: Ids) -> int:
        """Count nothing: all bytes are known."""
        return 0

    def unknown_characters(self, text: str) -> list[str]:
        """List nothing: all bytes are known."""
        return []

    def files(self) -> dict[str, bytes]:
        """Give the files by name."""
        return {"tokenizer.json": to_json({"kind": self.kind} | document_field(self.has_documents))}

    def save(self, folder: Path) -> None:
        """Write the files."""
        write_files(folder, self.files())

    def fingerprint(self) -> str:
        """Hash the files."""
        return hash_files(self.files())

    def describe(self) -> dict[str, Any]:
        """Give what a checkpoint records."""
        return {"kind": self.kind, "n_vocab": self.n_vocab}


@dataclass(frozen=True)
class CharTokenizer:
    """The characters of an alphabet, and bytes for all others.

    Attributes:
        alphabet: Distinct characters in the order of their code points.
        has_documents: There is an id after them that ends a document.
    """

    alphabet: str
    has_documents: bool = False

    kind = "char"
    control_ids = ()
    is_lossless = True

    @classmethod
    def build(
        cls, chunks: Iterable[bytes], vocab_size: int | None, *, has_documents: bool = False
    ) -> "CharTokenizer":
        """Take the alphabet from a text.

        Raises:
            UserError: the bound is below 256 and the alphabet, and one more with documents.
        """
        is_used = np.zeros(N_CODE_POINTS, bool)
        rest = b""
        for block in blocks(chunks, 2**20):
            text = rest + block
            stop = complete_utf8(text)
            is_used[code_points(text[:stop])] = True
            rest = text[stop:]
        is_used[code_points(rest)] = True
        is_used[0xD800:0xE000] = False
        alphabet = "".join(map(chr, np.flatnonzero(is_used)))
        check_bound(vocab_size, n_bytes=256, n_characters=len(alphabet), n_document_ends=int(has_documents))
        return cls(alphabet, has_documents)

    @classmethod
    def load(cls, folder: Path, fields: Mapping[str, Any]) -> "CharTokenizer":
        """Take the tokenizer from its files."""
        path = folder / "tokenizer.json"
        alphabet = fields.get("alphabet")
        if not isinstance(alphabet, str) or len(alphabet) > MAX_VOCAB:
            raise damaged(path, "expected `alphabet` to be a string of characters")
        points = np.fromiter(map(ord, alphabet), np.int64, len(alphabet))
        if (np.diff(points) <= 0).any() or ((points >= 0xD800) & (points < 0xE000)).any():
            raise damaged(path, "expected `alphabet` to ascend by code point")
        tokenizer = cls(alphabet, has_documents(fields))
        check_files(folder, tokenizer.files())
        return tokenizer

    @property
    def n_vocab(self) -> int:
        """256 bytes, the alphabet and the end of a document."""
        return 256 + len(self.alphabet) + self.has_documents

    @property
    def document_end(self) -> int | None:
        """The last id, which ends a document; None without documents."""
        return self.n_vocab - 1 if self.has_documents else None

    @property
    def newline_id(self) -> int | None:
        """The newline of the alphabet; None if the training text was one line."""
        index = self.alphabet.find("\n")
        return None if index < 0 else 256 + index

    def encode(self, text: bytes) -> Ids:
        """Turn text into ids."""
        points = code_points(text)
        ids: Ids = self._id_of_point[points]
        is_known = ids >= 0
        if is_known.all():
            return ids
        # Every unknown character gives way to its bytes.
        n_bytes = utf8_sizes(points)
        n_ids = np.where(is_known, 1, n_bytes)
        first_id = np.cumsum(n_ids) - n_ids
        first_byte = np.cumsum(n_bytes) - n_bytes
        offset = np.arange(n_ids.sum()) - np.repeat(first_id, n_ids)
        source = np.frombuffer(text, np.uint8)[np.repeat(first_byte, n_ids) + offset]
        mixed: Ids = np.where(np.repeat(is_known, n_ids), np.repeat(ids, n_ids), source).astype(np.int32)
        return mixed

    def encode_with_ends(self, text: bytes) -> tuple[Ids, Ids]:
        """Turn text into ids and their ends."""
        ids = self.encode(text)
        if len(ids) == len(text):
            return ids, np.arange(1, len(text) + 1)
        return ids, np.cumsum(self._size_of_id[ids])

    def complete_prefix(self, text: bytes) -> int:
        """Count all bytes but those of a last character that is not whole yet."""
        return complete_utf8(text)

    def decode(self, ids: Iterable[int], after: int | None = None) -> bytes:
        """Turn ids into text."""
        return b"".join([self._bytes_of_id[id] for id in ids])

    def unknown_count(self, ids: Ids) -> int:
        """Count nothing: bytes give every character back."""
        return 0

    def unknown_characters(self, text: str) -> list[str]:
        """List the characters outside the alphabet, once each."""
        known = set(self.alphabet)
        return [character for character in dict.fromkeys(text) if character not in known]

    def files(self) -> dict[str, bytes]:
        """Give the files by name."""
        fields = {"kind": self.kind, "alphabet": self.alphabet}
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

    @cached_property
    def _id_of_point(self) -> npt.NDArray[np.int32]:
        table = np.full(N_CODE_POINTS, -1, np.int32)
        table[[ord(character) for character in self.alphabet]] = 256 + np.arange(len(self.alphabet))
        return table

    @cached_property
    def _bytes_of_id(self) -> list[bytes]:
        texts = [bytes([byte]) for byte in range(256)] + [character.encode() for character in self.alphabet]
        return [*texts, b""] if self.has_documents else texts

    @cached_property
    def _size_of_id(self) -> npt.NDArray[np.int64]:
        return np.array([len(source) for source in self._bytes_of_id], np.int64)


def check_bound(
    vocab_size: int | None,
    *,
    n_control: int = 0,
    n_bytes: int = 0,
    n_characters: int = 0,
    n_words: int = 0,
    n_document_ends: int = 0,
) -> None:
    """Refuse a bound on the vocabulary that leaves no room for what must be in it.

    Raises:
        UserError: the message gives the least bound and what it is made of.
    """
    needs = {
        "control id": n_control,
        "byte": n_bytes,
        "character": n_characters,
        "word": n_words,
        "document end": n_document_ends,
    }
    least = sum(needs.values())
    if vocab_size is not None and vocab_size < least:
        listed = ", ".join(f"{n} {what}{'s' if n > 1 else ''}" for what, n in needs.items() if n)
        raise UserError(
            f"--vocab-size: too small for this text; got {vocab_size}; give {least} or more ({listed})"
        )


def code_points(text: bytes) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Return the code points of UTF-8; a byte that is none stands for U+DC80 to U+DCFF."""
    if text.isascii():
        return np.frombuffer(text, np.uint8)
    wide = text.decode("utf-8", "surrogateescape").encode("utf-32-le", "surrogatepass")
    return np.frombuffer(wide, "<u4")


def utf8_sizes(points: npt.NDArray[np.unsignedinteger[Any]]) -> npt.NDArray[np.int64]:
    """Count the bytes that each of these code points was."""
    sizes = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    sizes[(points >= _BYTE_POINTS) & (points < _BYTE_POINTS + 0x100)] = 1
    return sizes
