r"""Pieces of words by byte-pair encoding, with the SentencePiece library.

The library learns the pieces and applies them; what would make text come back changed is kept from it:

- no normalization, no space added in front, none removed; a line never shares a piece with the next;
- newline, carriage return and tab are pieces of their own;
- a character without a piece is written as its UTF-8 bytes (256 ids). So are U+2581, which stands for a space
  in the library, NUL, and bytes that are no UTF-8: text is cut around them before the library sees it;
  and so are U+2585 and U+001F, which it does not learn;
- units are encoded one by one, so neither chunks nor threads change a result.

Ids: 0 `<unk>`, 1 to 256 the bytes, then the pieces, those learned first first. A piece never crosses from a
space to the word before it, nor from one script to another, so no piece can spell `<unk>` or `<0x41>`.
Where the text is made of documents, the last id ends each; to the library it is a control piece,
`<document>`, which no text is turned into.

Byte-pair encoding rather than the unigram model, measured at the default sizes on an English novel (3 MB),
plays (1 MB), an encyclopedia (1 MB), a Chinese novel (2.5 MB) and Python code (3 MB), in this order:

    bytes per token             bpe        3.95   2.50   2.55   4.44   3.60
                                unigram    4.00   2.45   2.26   4.38   3.64
    seconds of one processor    bpe        0.5    0.1    0.1    0.7    0.7
                                unigram    4.1    2.6    1.3    8.4    12.6

`tokenizer.json` lists the pieces. `tokenizer.model` is the same in the library's own format, a protocol
buffer, for other programs; it is made from the list, and one that differs is refused without being opened.
"""

import io
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    read_strings,
    to_json,
    write_files,
)
from txlcli.tokenizer.symbols import check_bound
from txlcli.tokenizer.units import UNIT_BYTES, complete_prefix, sample, units

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

UNKNOWN = 0
N_FIXED = 257  # <unk> and the bytes
DOCUMENT_END = "<document>"

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
OWN_PIECES = ("\n", "\r", "\t")
# Characters that only their bytes stand for; U+DC80 to U+DCFF are Python's for bytes that are no UTF-8.
_AS_BYTES = re.compile(f"([\0{SPACE}\udc80-\udcff])")
_NOT_IN_SENTENCES = "\r\n"
# In training the library skips sentences with U+2585 or U+001F, which it has its own uses for.
_NOT_LEARNED = re.compile(f"[\0{SPACE}\u2585\x1f\udc80-\udcff{''.join(OWN_PIECES)}]+")

MAX_PIECE_CHARACTERS = 16
# The library splits work among these; fixed, so that the machine does not matter.
TRAINING_THREADS = 4
# In encoding; a process that is one of many sets it to one. -1: as many as there are processors.
N_THREADS = -1

CHARACTERS_PER_PIECE = 800
DEFAULT_SIZES = tuple(1 << n for n in range(9, 16))


@dataclass(frozen=True)
class PieceTokenizer:
    """The pieces learned from a text, and bytes for what they do not cover.

    Attributes:
        pieces: Distinct texts; piece k has id k + 257.
        has_documents: There is an id after them that ends a document.
    """

    pieces: tuple[str, ...]
    has_documents: bool = False

    kind = "sentencepiece"
    control_ids = (UNKNOWN,)
    is_lossless = True

    @classmethod
    def build(
        cls,
        chunks: Iterable[bytes],
        vocab_size: int | None,
        *,
        n_bytes: int,
        seed: int,
        has_documents: bool = False,
    ) -> "PieceTokenizer":
        """Learn pieces from a text, or from stretches of it chosen by the seed if it is long.

        The bound may not be reached: a short text has few pieces.

        Raises:
            UserError: the text is white space, or the bound is below 257 and the alphabet, and one more with
                documents.
        """
        texts = [stretch.decode("utf-8", "surrogateescape") for stretch in sample(chunks, seed)]
        alphabet = set().union(*texts)
        alphabet = {sign for sign in alphabet if sign in OWN_PIECES or not _NOT_LEARNED.match(sign)}
        if not any(sign.strip() for sign in alphabet):
            raise UserError(
                "corpus: nothing but white space; pieces need words; "
                "give other text, or --tokenizer byte or char, which take it"
            )
        if vocab_size is None:
            n_sampled = max(1, sum(len(text.encode("utf-8", "surrogateescape")) for text in texts))
            n_characters = sum(map(len, texts)) * max(n_bytes, n_sampled) // n_sampled
            vocab_size = default_vocab_size(n_characters, len(alphabet))
        check_bound(
            vocab_size,
            n_control=1,
            n_bytes=256,
            n_characters=len(alphabet),
            n_document_ends=int(has_documents),
        )
        own = tuple(sign for sign in OWN_PIECES if sign in alphabet)
        n_learned = min(vocab_size, MAX_VOCAB) - N_FIXED - len(own) - has_documents
        return cls(own + _learn(_sentences(texts), n_learned), has_documents)

    @classmethod
    def load(cls, folder: Path, fields: Mapping[str, Any]) -> "PieceTokenizer":
        """Take the tokenizer from its files."""
        path = folder / "tokenizer.json"
        pieces = read_strings(path, fields, "pieces")
        reserved = {*_fixed_pieces(), DOCUMENT_END}
        for piece in pieces:
            if not 0 < len(piece) <= MAX_PIECE_CHARACTERS or piece in reserved:
                raise damaged(path, f"expected pieces of 1 to {MAX_PIECE_CHARACTERS} characters")
        # Joined: one search is quicker than 32,000.
        if re.search(f"[\0{SPACE}\ud800-\udfff]", "".join(pieces)):
            raise damaged(path, "got a piece with a character that only bytes stand for")
        tokenizer = cls(tuple(pieces), has_documents(fields))
        check_files(folder, tokenizer.files())
        return tokenizer

    @property
    def n_vocab(self) -> int:
        """`<unk>`, the bytes, the pieces and the end of a document."""
        return N_FIXED + len(self.pieces) + self.has_documents

    @property
    def document_end(self) -> int | None:
        """The last id, which ends a document; None without documents."""
        return self.n_vocab - 1 if self.has_documents else None

    @cached_property
    def newline_id(self) -> int | None:
        """The newline, if the training text had any."""
        return N_FIXED + self.pieces.index("\n") if "\n" in self.pieces else None

    def encode(self, text: bytes) -> Ids:
        """Turn whole units of text into ids, on all processors."""
        if _is_clean(text):
            encoded = self._library.encode(units(text), out_type=int, num_threads=N_THREADS)
            return np.fromiter(chain.from_iterable(encoded), np.int32)
        clean, byte_ids = zip(*chain.from_iterable(map(_around_bytes, units(text))), strict=True)
        encoded = self._library.encode(list(clean), out_type=int, num_threads=N_THREADS)
        pairs = zip(encoded, byte_ids, strict=True)
        return np.fromiter(chain.from_iterable(chain.from_iterable(pairs)), np.int32)

    def encode_with_ends(self, text: bytes) -> tuple[Ids, Ids]:
        """Turn whole units of text into ids and their ends."""
        ids = self.encode(text)
        ends = np.cumsum(self._size_of_id[ids])
        assert (ends[-1] if len(ends) else 0) == len(text), "the library must give back every byte"
        return ids, ends

    def complete_prefix(self, text: bytes) -> int:
        """Count the leading bytes that are whole units."""
        return complete_prefix(text)

    def decode(self, ids: Iterable[int], after: int | None = None) -> bytes:
        """Turn ids into text."""
        return b"".join([self._bytes_of_id[id] for id in ids])

    def unknown_count(self, ids: Ids) -> int:
        """Count nothing: bytes give every character back."""
        return 0

    def unknown_characters(self, text: str) -> list[str]:
        """List the characters that only bytes stand for, once each."""
        return [character for character in dict.fromkeys(text) if character not in self._alphabet]

    def files(self) -> dict[str, bytes]:
        """Give the files by name."""
        fields = {"kind": self.kind, "model": "bpe", "normalization": "identity", "pieces": self.pieces}
        json = to_json({**fields, **document_field(self.has_documents)})
        return {"tokenizer.json": json, "tokenizer.model": self._model}

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
    def _model(self) -> bytes:
        return _write_model(self.pieces, self.has_documents)

    @cached_property
    def _library(self) -> "SentencePieceProcessor":
        from sentencepiece import SentencePieceProcessor

        return SentencePieceProcessor(model_proto=self._model)

    @cached_property
    def _alphabet(self) -> frozenset[str]:
        return frozenset(piece for piece in self.pieces if len(piece) == 1)

    @cached_property
    def _bytes_of_id(self) -> list[bytes]:
        texts = [b"<unk>", *(bytes([byte]) for byte in range(256)), *map(str.encode, self.pieces)]
        return [*texts, b""] if self.has_documents else texts

    @cached_property
    def _size_of_id(self) -> npt.NDArray[np.int64]:
        return np.array([len(source) for source in self._bytes_of_id], np.int64)


def default_vocab_size(n_characters: int, n_alphabet: int) -> int:
    """Choose a vocabulary for a training text: about one piece for 800 characters.

    The nearest power of two from 512 to 32,768; if that cannot hold the fixed ids, the alphabet and the end
    of a document, the next power of two that can.
    """
    wanted = n_characters / CHARACTERS_PER_PIECE
    size = min(DEFAULT_SIZES, key=lambda size: abs(size - wanted))
    while size < N_FIXED + n_alphabet + 1:
        size *= 2
    return size


def _is_clean(text: bytes) -> bool:
    # Whether the library may see all of it.
    if b"\0" in text or SPACE.encode() in text:
        return False
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _around_bytes(unit: bytes) -> Iterator[tuple[bytes, list[int]]]:
    # What the library may see, each stretch with the ids of the bytes after it.
    signs = _AS_BYTES.split(unit.decode("utf-8", "surrogateescape"))
    for clean, sign in zip(signs[::2], [*signs[1::2], ""], strict=True):
        yield clean.encode(), [1 + byte for byte in sign.encode("utf-8", "surrogateescape")]


def _sentences(texts: Iterable[str]) -> list[str]:
    # Without the newlines: the library takes a carriage return off the end of what it is given.
    return [
        sentence
        for text in texts
        for unit in units(text.encode("utf-8", "surrogateescape"))
        for sentence in _NOT_LEARNED.split(unit.decode("utf-8", "surrogateescape"))
        if sentence
    ]


def _learn(sentences: list[str], n_pieces: int) -> tuple[str, ...]:
    """Learn pieces with the library, in its order.

    The library leaves out of its lessons whatever spells one of its special pieces. So here the bytes are not
    among them, and the one it insists on is called by a name that no sentence contains.
    """
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        model_type="bpe",
        vocab_size=1 + n_pieces,
        hard_vocab_limit=False,
        character_coverage=1.0,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        max_sentence_length=2 * UNIT_BYTES,
        max_sentencepiece_length=MAX_PIECE_CHARACTERS,
        num_threads=TRAINING_THREADS,
        unk_id=UNKNOWN,
        unk_piece=_NOT_IN_SENTENCES,
        bos_id=-1,
        eos_id=-1,
        pad_id=-1,
        minloglevel=2,
    )
    learned = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = (learned.id_to_piece(id) for id in range(1, learned.get_piece_size()))
    return tuple(piece.replace(SPACE, " ") for piece in pieces)


def _fixed_pieces() -> list[str]:
    return ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]


def _write_model(pieces: Iterable[str], has_documents: bool) -> bytes:
    """Write pieces in the library's format, message ModelProto of its sentencepiece_model.proto.

    Merges are tried from the highest score to the lowest: the order of learning.
    """
    normal, unknown, control, user_defined, byte = 1, 2, 3, 4, 6
    messages = [
        _message(1, _text(1, name) + _float(2, 0.0) + _integer(3, unknown if id == UNKNOWN else byte))
        for id, name in enumerate(_fixed_pieces())
    ]
    for rank, piece in enumerate(pieces):
        is_own = piece in OWN_PIECES
        score, kind = (0.0, user_defined) if is_own else (-float(rank), normal)
        messages.append(
            _message(1, _text(1, piece.replace(" ", SPACE)) + _float(2, score) + _integer(3, kind))
        )
    if has_documents:
        messages.append(_message(1, _text(1, DOCUMENT_END) + _float(2, 0.0) + _integer(3, control)))
    trainer = {"model_type": (3, 2), "vocab_size": (4, len(messages)), "byte_fallback": (35, 1)}
    ids = {"unk_id": (40, UNKNOWN), "bos_id": (41, -1), "eos_id": (42, -1), "pad_id": (43, -1)}
    messages.append(_message(2, b"".join(_integer(*field) for field in {**trainer, **ids}.values())))
    normalizer = {
        "add_dummy_prefix": (3, 0),
        "remove_extra_whitespaces": (4, 0),
        "escape_whitespaces": (5, 1),
    }
    messages.append(
        _message(3, _text(1, "identity") + b"".join(_integer(*field) for field in normalizer.values()))
    )
    return b"".join(messages)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _varint(value: int) -> bytes:
    # Seven bits a byte, lowest first; a negative number is written as 64 bits.
    value %= 2**64
    groups = []
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])
