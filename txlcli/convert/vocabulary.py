"""Foreign vocabularies as tokenizers: how a checkpoint's ids are read from text and written to it.

`read_vocab` opens the file of a vocabulary, `vocabulary_of` makes a tokenizer out of what is in it. The three
code bases share one class in several copies: symbols in the order of their ids (`idx2sym`), the way back
(`sym2idx`), and how text is cut (`lower_case`, `delimiter`). What text the symbols were made from shows in
them:

    symbols                       text                                      tokenizer, newlines, spaces
    words with `<eos>`            split at white space, as WikiText-103     word, eos, keep
    words with `<S>`              the same, as lm1b: `<S>` between lines    word, eos, keep
    `32`, `101`, ...              bytes in decimal, as enwik8               byte, drop unless there is a `10`
    single characters             characters, as text8                      char, drop; `_` is the space

Of anything else the weights can be used without text: there is no tokenizer, and a notice says why.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from txlcli import UserError
from txlcli.convert.machine import Foreign
from txlcli.convert.pickles import read_pickled
from txlcli.files import json_fault, load_json, read_bounded
from txlcli.tokenizer import MAX_VOCAB, CorpusWordTokenizer, TableTokenizer, Tokenizer

EOS, SENTENCE = "<eos>", "<S>"
UNKNOWNS = ("<unk>", "<UNK>")

_LARGEST_FILE_BYTES = 2**28
_COUNT = re.compile(r"-?[0-9]+(\.[0-9]*)?", re.ASCII)
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,2}", re.ASCII)
_REMEDY = "name the model's own with --vocab FILE"


@dataclass(frozen=True)
class Vocabulary:
    """A foreign vocabulary, read.

    Attributes:
        tokenizer: Text to ids and back, with exactly `n_token` ids in the source's order; None: no text can
            be read or written.
        data_settings: The settings of `config.data` that fit it, by name: `tokenizer`, `newlines`, `spaces`;
            empty where there is no tokenizer.
        notices: What the user should know about it, one line each.
    """

    tokenizer: Tokenizer | None
    data_settings: dict[str, object] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


def read_vocab(path: Path) -> object:
    """Read the file of a vocabulary: `.json`, `.txt` with a symbol a line, else a pickle or torch archive.

    No object of the file is built; see `read_pickled`.

    Raises:
        UserError: the file cannot be read, or holds what is not allowed.
    """
    if path.suffix == ".json":
        try:
            return load_json(_read_bytes(path), 4 * MAX_VOCAB)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: not JSON; {json_fault(error)}; {_REMEDY}") from None
    if path.suffix == ".txt":
        return _read_lines(path)
    return read_pickled(path, _REMEDY)


def _read_bytes(path: Path) -> bytes:
    try:
        return read_bounded(path, _LARGEST_FILE_BYTES)
    except UserError as error:
        raise UserError(f"{error}; {_REMEDY}") from error


def _read_lines(path: Path) -> list[str]:
    """Take the symbol of each line; a number behind it is its count."""
    try:
        text = _read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start:,}; {_REMEDY}") from None
    lines = re.split("\r\n|\r|\n", text.rstrip())
    first: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        symbol, *others = line.split() or [""]
        if not symbol or len(others) > 1 or not all(map(_COUNT.fullmatch, others)):
            found = f"{line.strip()!r:.40}" if symbol else "none"
            raise UserError(
                f"{path}: expected a symbol on each line, or one and its count; got {found} on line "
                f"{number:,}; {_REMEDY}"
            )
        if first.setdefault(symbol, number) != number:
            raise UserError(
                f"{path}: expected each symbol on one line; got {symbol!r:.40} on lines {first[symbol]:,} "
                f"and {number:,}; leave one of them out, or {_REMEDY}"
            )
    return list(first)


def vocabulary_of(foreign_vocab: object, path: str, n_token: int) -> Vocabulary:
    """Make a tokenizer out of a foreign vocabulary.

    Args:
        foreign_vocab: What `read_vocab` or `read_pickled` returned, or the part of a checkpoint that is its
            vocabulary: a record of `Corpus` or `Vocab`, their attributes as a dict, a list of symbols, or a
            dict of ids by symbol. None: the source has no vocabulary.
        path: Where it comes from, as messages name it.
        n_token: Ids of the model.

    Raises:
        UserError: its two tables contradict each other, its size is not the model's, or a symbol is no text,
            empty, repeated or holds white space.
    """
    if foreign_vocab is None:
        return _without_text(f"none in {path}; its file can be named with --vocab")
    attributes = _attributes(foreign_vocab, path)
    if "idx2sym" not in attributes and "tokenizer" in attributes:
        return _without_text(f"{path} cuts text by rules of another library")
    delimiter = attributes.get("delimiter")
    if delimiter is not None:
        return _without_text(f"{path} cuts lines at {delimiter!r:.20}, not at white space")
    symbols = _symbols(attributes, path, n_token)
    is_lowered = attributes.get("lower_case", False)
    if type(is_lowered) is not bool:
        raise UserError(f"{path}: `lower_case` must be true or false; got {is_lowered!r:.40}; {_REMEDY}")
    has_numbers = all(_DECIMAL.fullmatch(symbol) and int(symbol) < 256 for symbol in symbols)
    if has_numbers and max(map(len, symbols)) > 1:
        return _table("byte", [int(symbol) for symbol in symbols], is_lowered=False)
    if all(len(symbol) == 1 for symbol in symbols):
        return _table("char", [ord(symbol) for symbol in symbols], is_lowered=is_lowered)
    return _words(attributes, symbols, path, is_lowered=is_lowered)


def _without_text(reason: str) -> Vocabulary:
    notice = f"vocabulary: {reason}; the weights are converted, but no text can be read or written"
    return Vocabulary(None, {}, (notice,))


def _attributes(vocab: object, path: str) -> Mapping[str, Any]:
    """Find the attributes of the vocabulary, whatever it is wrapped in; `Any`: a stranger's values."""
    found = vocab.attributes if isinstance(vocab, Foreign) else vocab
    if isinstance(found, list):
        return {"idx2sym": found}
    # First, since any attribute's name may also be a word.
    if isinstance(found, Mapping) and found and all(type(id) is int for id in found.values()):
        return {"idx2sym": _by_id(found, path)}
    if isinstance(found, Mapping) and ("idx2sym" in found or "tokenizer" in found):
        return found
    if isinstance(found, Mapping) and "vocab" in found:
        return _attributes(found["vocab"], path)
    name = vocab.name if isinstance(vocab, Foreign) else type(vocab).__name__
    raise UserError(f"{path}: not a vocabulary; got {name:.80}; {_REMEDY}")


def _by_id(ids: Mapping[Any, int], path: str) -> list[Any]:
    """Put symbols in the order of their ids, which must be 0 to n - 1."""
    symbols = sorted(ids, key=lambda symbol: ids[symbol])
    for expected, symbol in enumerate(symbols):
        if ids[symbol] != expected:
            raise UserError(
                f"{path}: its ids must be 0 to {len(ids) - 1:,}, each once; "
                f"got {ids[symbol]} for {symbol!r:.40}; {_REMEDY}"
            )
    return symbols


def _symbols(attributes: Mapping[str, Any], path: str, n_token: int) -> list[str]:
    """Check the symbols: text, each once, as many as the model has, the same in both tables."""
    symbols, ids = attributes["idx2sym"], attributes.get("sym2idx")
    if not isinstance(symbols, list):
        raise UserError(f"{path}: `idx2sym` must be a list; got {type(symbols).__name__}; {_REMEDY}")
    symbols = [*symbols, *_added(attributes, len(symbols), n_token)]
    if len(symbols) != n_token or n_token > MAX_VOCAB:
        most = f" of at most {MAX_VOCAB:,}" if n_token > MAX_VOCAB else ""
        raise UserError(
            f"{path}: not the model's vocabulary; got {len(symbols):,} symbols{most}, "
            f"the model has {n_token:,}; {_REMEDY}"
        )
    first: dict[object, int] = {}
    for id, symbol in enumerate(symbols):
        fault = _fault(symbol)
        if fault is None and first.setdefault(symbol, id) != id:
            fault = f"stands for ids {first[symbol]} and {id}"
        if fault is not None:
            raise UserError(
                f"{path}: not a vocabulary of text; symbol {id}, {symbol!r:.40}, {fault}; {_REMEDY}"
            )
    if isinstance(ids, Mapping):
        for symbol, id in ids.items():
            if first.get(symbol) != id:
                at = f"{first[symbol]}" if symbol in first else "none"
                raise UserError(
                    f"{path}: `sym2idx` and `idx2sym` contradict each other; "
                    f"{symbol!r:.40} has id {id!r:.20} in the first and {at} in the second; {_REMEDY}"
                )
    return symbols


def _fault(symbol: object) -> str | None:
    if not isinstance(symbol, str):
        return "is no text"
    if not symbol:
        return "is empty"
    if symbol.split() != [symbol] and len(symbol) > 1:
        return "holds white space"
    return "is no text" if re.search("[\ud800-\udfff]", symbol) else None


def _added(attributes: Mapping[str, Any], n_symbol: int, n_token: int) -> list[object]:
    """Return what Hugging Face's class adds after the vocabulary, where the model has ids for it."""
    decoder = attributes.get("_added_tokens_decoder", attributes.get("added_tokens_decoder"))
    if not isinstance(decoder, Mapping):
        return []
    added: list[object] = []
    for id in range(n_symbol, n_token):
        token = decoder.get(id)
        added.append(token.attributes.get("content") if isinstance(token, Foreign) else token)
    return [] if None in added else added


def _table(kind: str, points: Sequence[int], *, is_lowered: bool) -> Vocabulary:
    """Bytes or characters with ids of their own."""
    notices = []
    has_newline, has_space = ord("\n") in points, ord(" ") in points
    spaces = "underscore" if kind == "char" and ord("_") in points and not has_space else "keep"
    if kind == "char" and is_lowered:
        notices.append("vocabulary: of lower-case text; capital letters are refused, not lowered")
    return Vocabulary(
        TableTokenizer("byte" if kind == "byte" else "char", tuple(points)),
        {"tokenizer": kind, "newlines": "keep" if has_newline else "drop", "spaces": spaces},
        tuple(notices),
    )


def _words(
    attributes: Mapping[str, Any], symbols: Sequence[str], path: str, *, is_lowered: bool
) -> Vocabulary:
    """Words that white space separates, with a word for newlines."""
    newline = next((sign for sign in (EOS, SENTENCE) if sign in symbols), None)
    if newline is None:
        return _without_text(f"{path} has words, but neither {EOS} nor {SENTENCE} for newlines")
    white = next((id for id, symbol in enumerate(symbols) if not symbol.strip()), None)
    if white is not None:
        fault = f"symbol {white}, {symbols[white]!r}, is white space"
        raise UserError(f"{path}: not a vocabulary of words; {fault}; {_REMEDY}")
    index = attributes.get("unk_idx")
    names = (symbols[index],) if type(index) is int and 0 <= index < len(symbols) else UNKNOWNS
    unknown = next((name for name in names if name in symbols and name != newline), None)
    notices = []
    if newline == SENTENCE:
        notices.append(
            f"vocabulary: a newline is read as {SENTENCE}; the one that the source puts before a text's "
            "first line is not"
        )
    if unknown is None:
        notices.append("vocabulary: has no word for unknown ones; text with such a word is refused")
    if is_lowered:
        notices.append("vocabulary: of lower-case text; words are lowered when they are read")
    return Vocabulary(
        CorpusWordTokenizer(tuple(symbols), newline, unknown, is_lowered),
        {"tokenizer": "word", "newlines": "eos", "spaces": "keep"},
        tuple(notices),
    )
