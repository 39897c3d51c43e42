"""Other programs' vocabularies: their ids stay, their text comes back, what they cannot read is refused."""

import json
import pickle
import re
from collections import Counter, OrderedDict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txlcli import UserError
from txlcli.config import DataConfig
from txlcli.convert.machine import Foreign
from txlcli.convert.vocabulary import Vocabulary, read_vocab, vocabulary_of
from txlcli.data import encode_text, open_counts, open_split
from txlcli.generate import encode_prompt
from txlcli.sources import Newlines, Spaces, find_corpus
from txlcli.tokenizer import (
    CorpusWordTokenizer,
    Joining,
    MosesTokenizer,
    OutsideVocabulary,
    TableTokenizer,
    Tokenizer,
    load_tokenizer,
    moses,
    refuse_missing_moses,
)

PLACE = "vocab.pkl"
LINES = "expected a symbol on each line, or one and its count"
REMEDY = "name the model's own with --vocab FILE"
WORDS = ["<eos>", "the", ",", "=", "@-@", "<unk>", "Grönland", "a"]
# The most frequent first, as in the corpora: a space, e, t, ...
BYTES = [32, 101, 116, 195, 164, 97, 91, 0, 255]
LETTERS = "_etaoinsrhldcumfgpwybvkxjqz"


def attributes(symbols: list[Any], **changes: Any) -> dict[str, Any]:
    """What the class of all three code bases has in its `__dict__`."""
    return {
        "counter": Counter(map(str, symbols)),
        "special": ["<eos>"],
        "min_freq": 0,
        "max_size": None,
        "lower_case": False,
        "delimiter": None,
        "vocab_file": None,
        "idx2sym": symbols,
        "sym2idx": OrderedDict((symbol, id) for id, symbol in enumerate(symbols)),
        **changes,
    }


def read(symbols: list[Any], **changes: Any) -> Vocabulary:
    return vocabulary_of(attributes(symbols, **changes), PLACE, len(symbols))


def tokenizer_of(symbols: list[Any], **changes: Any) -> Tokenizer:
    found = read(symbols, **changes)
    assert found.tokenizer is not None
    assert found.tokenizer.n_vocab == len(symbols)
    # A run must be able to have these settings.
    settings: Any = found.data_settings
    data = DataConfig(**settings)
    assert data.tokenizer == found.tokenizer.kind
    return found.tokenizer


def refusal(vocab: object, n_token: int = 4) -> str:
    with pytest.raises(UserError) as caught:
        vocabulary_of(vocab, PLACE, n_token)
    return str(caught.value)


# Words


@pytest.mark.parametrize("form", ["record", "corpus", "attributes", "list", "ids"])
def test_words_keep_their_ids_whatever_they_come_in(form: str) -> None:
    values = attributes(WORDS, unk_idx=5, eos_idx=0)
    vocab = Foreign("vocabulary.Vocab", (), values)
    forms: dict[str, object] = {
        "record": vocab,
        "corpus": Foreign("data_utils.Corpus", (), {"dataset": "wt103", "vocab": vocab, "train": None}),
        "attributes": values,
        "list": WORDS,
        # In any order, and with words that are names of attributes.
        "ids": dict(reversed(list(zip([*WORDS[:-2], "vocab", "idx2sym"], range(8), strict=True)))),
    }
    found = vocabulary_of(forms[form], PLACE, len(WORDS))
    assert found.data_settings == {"tokenizer": "word", "newlines": "eos", "spaces": "keep"}
    assert found.notices == ()
    assert isinstance(found.tokenizer, CorpusWordTokenizer)
    ids = found.tokenizer.encode(b"the = more\n\n, @-@")
    assert ids.tolist() == [1, 3, 5, 0, 0, 2, 4]
    assert found.tokenizer.decode(ids.tolist()) == b"the = <unk>\n\n, @-@"
    assert (found.tokenizer.newline_id, found.tokenizer.control_ids) == (0, (5,))


def test_files_hold_the_same_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({word: id for id, word in enumerate(WORDS)}))
    # What follows a word on its line is its count.
    (tmp_path / "vocab.txt").write_bytes("\r\n".join([*(f"{w} 7" for w in WORDS), ""]).encode())
    (tmp_path / "vocab.pkl").write_bytes(pickle.dumps(attributes(WORDS), 2))
    found = [
        vocabulary_of(read_vocab(tmp_path / f"vocab.{kind}"), PLACE, len(WORDS))
        for kind in ("json", "txt", "pkl")
    ]
    assert found[0] == found[1] == found[2]
    assert found[0].tokenizer == CorpusWordTokenizer(tuple(WORDS))


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("vocab.json", b"[" * 100_000, "not JSON; nested too deep"),
        ("vocab.json", b'{"a": 1,', None),
        ("vocab.txt", b"<eos>\n\na\n", f"{LINES}; got none on line 2"),
        ("vocab.txt", b"<eos>\na b\n", f"{LINES}; got 'a b' on line 2"),
        ("vocab.txt", b"<eos> 9\na 3 1\n", f"{LINES}; got 'a 3 1' on line 2"),
        (
            "vocab.txt",
            b"<eos>\nthe 2\na\nthe 1\n",
            "expected each symbol on one line; got 'the' on lines 2 and 4; leave one of them out, or",
        ),
        ("vocab.json", b'{"a": "\x80"}', "not JSON; not UTF-8 at byte 7"),
        ("vocab.json", b"[" + b"1" * 5000 + b"]", "not JSON; a whole number of more than 4,300 digits"),
        ("vocab", b"the quick brown fox", "a text file, not a checkpoint; got 'the quick brown fox'"),
        ("vocab.txt", b"<eos>\n\xff", "not UTF-8 at byte 6"),
    ],
)
def test_files_that_hold_none_are_refused(name: str, data: bytes, text: str | None, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(UserError) as caught:
        read_vocab(path)
    if text is None:  # in words of Python's own
        assert str(caught.value).startswith(f"{path}: not JSON; ")
    else:
        assert str(caught.value) == f"{path}: {text}{'' if text.endswith('or') else ';'} {REMEDY}"


def test_a_file_of_a_vocabulary_that_cannot_be_opened_is_refused_with_what_to_do(tmp_path: Path) -> None:
    for name in ("no.txt", "no.json", "no.pkl"):
        with pytest.raises(UserError) as caught:
            read_vocab(tmp_path / name)
        assert str(caught.value) == (
            f"{tmp_path / name}: cannot be read; no such file or directory; {REMEDY}"
        )
    with pytest.raises(UserError, match=f"is a folder, not a file; {REMEDY}$"):
        read_vocab(tmp_path)


def test_the_newline_may_be_any_symbol_and_s_stands_between_sentences() -> None:
    assert tokenizer_of(["a", "<unk>", "<eos>"]).newline_id == 2
    found = read(["<UNK>", "a", "<S>"])
    assert isinstance(found.tokenizer, CorpusWordTokenizer)
    assert found.tokenizer.encode(b"a\nb <S>\n").tolist() == [1, 2, 0, 0, 2]
    assert found.tokenizer.decode([1, 2, 0]) == b"a\n<UNK>"
    assert found.notices == (
        "vocabulary: a newline is read as <S>; the one that the source puts before a text's first line "
        "is not",
    )


def test_the_unknown_word_is_the_one_that_the_class_names() -> None:
    assert tokenizer_of(["<eos>", "<unk>", "<oov>"], unk_idx=2).control_ids == (2,)
    assert tokenizer_of(["<eos>", "<unk>", "<oov>"]).control_ids == (1,)


def test_without_unk_a_new_word_is_refused_with_its_place(tmp_path: Path) -> None:
    found = read(["<eos>", "a", "bär"])
    assert found.notices == ("vocabulary: has no word for unknown ones; text with such a word is refused",)
    assert found.tokenizer is not None
    assert found.tokenizer.control_ids == ()
    assert found.tokenizer.encode("a\nbär bär\n".encode()).tolist() == [1, 0, 2, 2, 0]
    assert found.tokenizer.unknown_characters("a c\na d c") == ["c", "d"]
    for text, offset in (("bär  c a\n", 6), ("a\n c", 3), ("a <eos>\n", 2)):
        with pytest.raises(OutsideVocabulary) as caught:
            found.tokenizer.encode_with_ends(text.encode())
        assert caught.value.offset == offset
    assert refused_file(found, "a\n" * 1000 + "bär dös a\n", tmp_path) == (
        "text.txt: not in the vocabulary; got `dös` at byte 2005; it has no <unk> for other words"
    )


def test_lower_case_is_part_of_reading() -> None:
    found = read(["<eos>", "ａ", "straße", "<unk>"], lower_case=True)
    assert found.notices == ("vocabulary: of lower-case text; words are lowered when they are read",)
    assert found.tokenizer is not None
    text = "Ａ Straße\n STRASSE\n".encode()
    ids, ends = found.tokenizer.encode_with_ends(text)
    assert ids.tolist() == [1, 2, 0, 3, 0]
    assert [text[a:b].decode() for a, b in pairwise([0, *ends])] == ["Ａ", " Straße", "\n", " STRASSE", "\n"]
    assert found.tokenizer.decode(ids.tolist()) == "ａ straße\n<unk>\n".encode()
    assert found.tokenizer.unknown_characters("Ａ Neu") == ["neu"]


@pytest.mark.parametrize(
    "tokenizer",
    [
        CorpusWordTokenizer(tuple(WORDS)),
        CorpusWordTokenizer(("a", "<S>", "<UNK>"), "<S>", "<UNK>"),
        CorpusWordTokenizer(("<eos>", "a"), unknown=None, is_lowered=True),
        TableTokenizer("byte", tuple(BYTES)),
        TableTokenizer("char", tuple(map(ord, LETTERS))),
        TableTokenizer("char", tuple(map(ord, "東\n\x00é\N{PILE OF POO}"))),
    ],
)
def test_a_saved_vocabulary_is_the_same_when_loaded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded == tokenizer
    assert loaded.fingerprint() == tokenizer.fingerprint()
    assert isinstance(loaded, Tokenizer)
    path = tmp_path / "tokenizer.json"
    data = path.read_bytes()
    assert sorted(json.loads(data)) == list(json.loads(data))
    path.write_bytes(data.replace(b'{"', b'{ "', 1))
    with pytest.raises(UserError, match="its bytes are not as they were written"):
        load_tokenizer(tmp_path)


def test_usual_words_are_written_as_before() -> None:
    files = CorpusWordTokenizer(("<eos>", "<unk>")).files()
    assert files == {"tokenizer.json": b'{"kind": "word", "newlines": "eos", "tokens": ["<eos>", "<unk>"]}\n'}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kind": "byte", "bytes": []}, "expected `bytes` to be distinct numbers from 0 to 255"),
        ({"kind": "byte", "bytes": [1, 1]}, "expected `bytes` to be distinct numbers from 0 to 255"),
        ({"kind": "byte", "bytes": [256]}, "expected `bytes` to be distinct numbers from 0 to 255"),
        ({"kind": "byte", "bytes": [True]}, "expected `bytes` to be distinct numbers from 0 to 255"),
        ({"kind": "byte", "bytes": "ab"}, "expected `bytes` to be distinct numbers from 0 to 255"),
        ({"kind": "char", "characters": []}, "expected `characters` to be single characters"),
        ({"kind": "char", "characters": ["ab"]}, "expected `characters` to be single characters"),
        ({"kind": "char", "characters": ["\ud800"]}, "expected `characters` to be single characters"),
        ({"kind": "char", "characters": ["a", "a"]}, "got a repeated string in `characters`"),
        (
            {"kind": "word", "newlines": "eos", "newline": "<S>", "tokens": ["<eos>", "<unk>"]},
            "expected `tokens` to hold a token for newlines and one for unknown words",
        ),
        (
            {"kind": "word", "newlines": "eos", "unknown": "<eos>", "tokens": ["<eos>", "<unk>"]},
            "expected `tokens` to hold a token for newlines and one for unknown words",
        ),
        (
            {"kind": "word", "newlines": "eos", "lower_case": 1, "tokens": ["<eos>", "<unk>"]},
            "its bytes are not as they were written",
        ),
    ],
)
def test_a_damaged_table_is_refused(fields: dict[str, object], reason: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(fields, sort_keys=True) + "\n")
    with pytest.raises(UserError) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value) == (
        f"{path}: damaged, or not made by txl; {reason}; take the file from the run it came from"
    )


# Bytes and characters


def test_decimal_words_are_bytes_with_ids_of_their_own() -> None:
    found = read([str(byte) for byte in BYTES], lower_case=True, special=[])
    assert found.data_settings == {"tokenizer": "byte", "newlines": "drop", "spaces": "keep"}
    assert found.notices == ()
    tokenizer = found.tokenizer
    assert tokenizer == TableTokenizer("byte", tuple(BYTES))
    text = "et ä [[".encode()
    ids, ends = tokenizer.encode_with_ends(text)
    assert ids.tolist() == [1, 2, 0, 3, 4, 0, 6, 6]
    assert ends.tolist() == list(range(1, 9))
    assert tokenizer.decode(ids.tolist()) == text
    assert (tokenizer.newline_id, tokenizer.control_ids, tokenizer.is_lossless) == (None, (), True)
    assert read(["32", "101", "10"]).data_settings["newlines"] == "keep"


def test_letters_are_characters_with_ids_of_their_own() -> None:
    found = read(list(LETTERS), lower_case=True, special=[])
    assert found.data_settings == {"tokenizer": "char", "newlines": "drop", "spaces": "underscore"}
    assert found.notices == ("vocabulary: of lower-case text; capital letters are refused, not lowered",)
    assert found.tokenizer is not None
    assert found.tokenizer.encode(b"tea_").tolist() == [2, 1, 3, 0]
    assert found.tokenizer.unknown_characters("a b_B") == [" ", "B"]
    other = read(["é", " ", "\n"])
    assert other.data_settings == {"tokenizer": "char", "newlines": "keep", "spaces": "keep"}
    assert other.tokenizer is not None
    assert other.tokenizer.newline_id == 2
    ids, ends = other.tokenizer.encode_with_ends("é é\n".encode())
    assert (ids.tolist(), ends.tolist()) == ([0, 1, 0, 2], [2, 3, 5, 6])


@given(ids=st.lists(st.integers(0, 8), max_size=60), cuts=st.lists(st.integers(0, 200), max_size=4))
def test_tables_give_back_what_they_can_hold_in_any_chunks(ids: list[int], cuts: list[int]) -> None:
    for tokenizer in (
        TableTokenizer("byte", tuple(BYTES)),
        TableTokenizer("char", tuple(map(ord, "é東a\n😀zyxw"))),
    ):
        text = tokenizer.decode(ids)
        found, rest = [], b""
        for start, stop in pairwise([0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]):
            rest += text[start:stop]
            n_whole = len(rest) if stop == len(text) else tokenizer.complete_prefix(rest)
            found += tokenizer.encode(rest[:n_whole]).tolist()
            rest = rest[n_whole:]
        assert found == ids
        _, ends = tokenizer.encode_with_ends(text)
        assert [text[a:b] for a, b in pairwise([0, *ends])] == [tokenizer.decode([id]) for id in ids]


# What a vocabulary does not have


def refused_file(
    found: Vocabulary, text: str, folder: Path, encoding: str = "utf-8", name: str = "text.txt"
) -> str:
    (folder / name).write_bytes(text.encode(encoding))
    newlines: Newlines = found.data_settings["newlines"]  # type: ignore[assignment]
    spaces: Spaces = found.data_settings["spaces"]  # type: ignore[assignment]
    assert found.tokenizer is not None
    corpus = find_corpus(
        [name], encoding=encoding, raw=found.tokenizer.kind == "byte", newlines=newlines, spaces=spaces
    )
    with pytest.raises(UserError) as caught:
        list(encode_text(corpus, found.tokenizer, folder))
    assert not (folder / "data").exists()
    return str(caught.value)


def test_other_bytes_are_refused_where_they_stand_in_the_file(tmp_path: Path) -> None:
    found = read([str(byte) for byte in BYTES])
    # Newlines are left out of the text, but not of the place.
    assert refused_file(found, "et\n\nt" * 400_000 + "e\n\nq", tmp_path) == (
        "text.txt: not in the vocabulary; got 0x71 (`q`) at byte 2000003; "
        "its text is made of 9 of the 256 bytes"
    )
    assert refused_file(found, "et\x80", tmp_path, "latin-1").startswith(
        "text.txt: not in the vocabulary; got 0x80 at byte 2; "
    )


@pytest.mark.parametrize(
    ("text", "encoding", "place"),
    [
        ("ab cd\nB", "utf-8", 6),
        ("ab cd\nB", "utf-16", 14),
        ("ab cd\nB", "utf-8-sig", 9),
        ("abc" * 700_000 + "\nB", "utf-8", 2_100_001),
    ],
)
def test_other_characters_are_refused_where_they_stand_in_the_file(
    text: str, encoding: str, place: int, tmp_path: Path
) -> None:
    assert refused_file(read(list(LETTERS)), text, tmp_path, encoding) == (
        f"text.txt: not in the vocabulary; got `B` at byte {place}; "
        "its text is made of `_abcdefghijklmnopqrstuvwxyz` alone"
    )


def test_the_file_of_several_is_named(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(list(LETTERS))
    for name, text in (("a", b"\xef\xbb\xbfabc"), ("b", b"\xef\xbb\xbfdef"), ("c", b"\xef\xbb\xbfgh\nI")):
        (tmp_path / name).write_bytes(text)
    corpus = find_corpus(["a", "b", "c"], newlines="drop", spaces="underscore")
    with pytest.raises(UserError, match=re.escape("c: not in the vocabulary; got `I` at byte 6; ")):
        list(encode_text(corpus, tokenizer, tmp_path))


def test_other_text_of_a_prompt_is_refused_where_it_stands() -> None:
    for symbols, prompt, got in (
        ([str(byte) for byte in BYTES], "et\n\nte!", "0x21 (`!`) at byte 6"),
        (list(LETTERS), "ab\n c\nä", "`ä` at byte 6"),
        (["<eos>", "a"], "a\na b", "`b` at byte 4"),
    ):
        found = read(symbols)
        assert found.tokenizer is not None
        newlines: Newlines = found.data_settings["newlines"]  # type: ignore[assignment]
        spaces: Spaces = found.data_settings["spaces"]  # type: ignore[assignment]
        with pytest.raises(UserError) as caught:
            encode_prompt(found.tokenizer, prompt, 0, newlines=newlines, spaces=spaces)
        assert str(caught.value).startswith(f"prompt: not in the vocabulary; got {got}; ")


# Vocabularies without text, and none at all


@pytest.mark.parametrize(
    ("vocab", "reason"),
    [
        (None, f"none in {PLACE}; its file can be named with --vocab"),
        (
            Foreign("utils.vocabulary.OpenAIVocab", (), {"tokenizer": Foreign("x.GPT2Tokenizer"), "EOT": 9}),
            f"{PLACE} cuts text by rules of another library",
        ),
        (
            attributes(["<eos>", "a", "b c", "d"], delimiter="\t"),
            f"{PLACE} cuts lines at '\\t', not at white space",
        ),
        (["aa", "bb", "cc", "dd"], f"{PLACE} has words, but neither <eos> nor <S> for newlines"),
    ],
)
def test_other_vocabularies_leave_the_weights_without_text(vocab: object, reason: str) -> None:
    found = vocabulary_of(vocab, PLACE, 4)
    assert (found.tokenizer, found.data_settings) == (None, {})
    assert found.notices == (
        f"vocabulary: {reason}; the weights are converted, but no text can be read or written",
    )


def test_added_tokens_name_the_ids_after_the_vocabulary() -> None:
    added = {0: "<eos>", 4: Foreign("tokenizers.AddedToken", (), {"content": "<formula>"}), 5: "<x>"}
    values = attributes(["<eos>", "<unk>", "a", "b"], _added_tokens_decoder=added)
    found = vocabulary_of(values, PLACE, 6)
    assert isinstance(found.tokenizer, CorpusWordTokenizer)
    assert found.tokenizer.tokens[4:] == ("<formula>", "<x>")
    # The model's table does not reach so far: they cannot come up.
    assert vocabulary_of(values, PLACE, 4).tokenizer == CorpusWordTokenizer(("<eos>", "<unk>", "a", "b"))
    assert refusal(values, 7).startswith(
        f"{PLACE}: not the model's vocabulary; got 4 symbols, the model has 7"
    )


@pytest.mark.parametrize(
    ("vocab", "text"),
    [
        (["<eos>", "<unk>", "a"], "not the model's vocabulary; got 3 symbols, the model has 4"),
        (["<eos>", "<unk>", "a", "b", "c"], "not the model's vocabulary; got 5 symbols, the model has 4"),
        (["<eos>", "<unk>", "a", "a"], "not a vocabulary of text; symbol 3, 'a', stands for ids 2 and 3"),
        (["<eos>", "<unk>", "a", ""], "not a vocabulary of text; symbol 3, '', is empty"),
        (["<eos>", "<unk>", "a b", "c"], "not a vocabulary of text; symbol 2, 'a b', holds white space"),
        (
            ["<eos>", "<unk>", "a\u3000", "c"],
            "not a vocabulary of text; symbol 2, 'a\\u3000', holds white space",
        ),
        (["<eos>", "<unk>", "a", "\n"], "not a vocabulary of words; symbol 3, '\\n', is white space"),
        (["<eos>", "<unk>", "a", 3], "not a vocabulary of text; symbol 3, 3, is no text"),
        (["<eos>", "<unk>", "a", ["b"]], "not a vocabulary of text; symbol 3, ['b'], is no text"),
        (["<eos>", "<unk>", "a", "\ud800"], "not a vocabulary of text; symbol 3, '\\ud800', is no text"),
        ({"<eos>": 0, "a": 1, "b": 1, "c": 2}, "its ids must be 0 to 3, each once; got 1 for 'b'"),
        ({"<eos>": 1, "a": 2, "b": 3, "c": 4}, "its ids must be 0 to 3, each once; got 1 for '<eos>'"),
        ({"idx2sym": "abcd"}, "`idx2sym` must be a list; got str"),
        (
            attributes(["<eos>", "<unk>", "a", "b"], sym2idx={"<eos>": 0, "<unk>": 1, "a": 3, "b": 2}),
            "`sym2idx` and `idx2sym` contradict each other; 'a' has id 3 in the first and 2 in the second",
        ),
        (
            attributes(["<eos>", "<unk>", "a", "b"], sym2idx={"z": 3}),
            "`sym2idx` and `idx2sym` contradict each other; 'z' has id 3 in the first and none in the second",
        ),
        (
            attributes(["<eos>", "<unk>", "a", "b"], lower_case="no"),
            "`lower_case` must be true or false; got 'no'",
        ),
        ({}, "not a vocabulary; got dict"),
        (7, "not a vocabulary; got int"),
        (Foreign("torch.device", ("cpu",)), "not a vocabulary; got torch.device"),
        (Foreign("data_utils.Corpus", (), {"vocab": "x"}), "not a vocabulary; got str"),
    ],
)
def test_what_is_no_vocabulary_of_this_model_is_refused(vocab: object, text: str) -> None:
    assert refusal(vocab) == f"{PLACE}: {text}; {REMEDY}"


def test_a_vocabulary_larger_than_any_is_refused() -> None:
    words = ["<eos>", "<unk>", *(f"w{i}" for i in range(2**20))]
    assert refusal(words, len(words)) == (
        f"{PLACE}: not the model's vocabulary; got 1,048,578 symbols of at most 1,048,576, "
        f"the model has 1,048,578; {REMEDY}"
    )


# Raw text


class _Rules:
    """Stands for the library: signs are words, and come back without a space before them."""

    def normalize(self, text: str) -> str:
        return text.replace("’", "'").replace("…", "...")

    def tokenize(self, text: str, **_: object) -> list[str]:
        hyphens = re.sub(r"(?<=\w)-(?=\w)", " @-@ ", text)
        return re.sub(r"([^\w\s@<>-]|(?<!@)-(?!@))", r" \1 ", hyphens).split()

    def detokenize(self, words: list[str], **_: object) -> str:
        return re.sub(r" ([,.;!?])(?!@)", r"\1", " ".join(words)).replace(" @-@ ", "-")


def with_rules(*words: str) -> MosesTokenizer:
    tokenizer = MosesTokenizer(CorpusWordTokenizer(("<eos>", "<unk>", *words)))
    tokenizer.__dict__["_rules"] = (_Rules(), _Rules(), _Rules())
    return tokenizer


def test_raw_text_is_split_and_counted_in_its_own_bytes(tmp_path: Path) -> None:
    tokenizer = with_rules("well", "@-@", "known", ",", ".", "'", "s")
    text = "A well-known,  cat’s…\r\n\n end.".encode()
    ids, ends = tokenizer.encode_with_ends(text)
    np.testing.assert_array_equal(ids, tokenizer.encode(text))
    pieces = [text[a:b].decode() for a, b in pairwise([0, *ends])]
    # Three points stand for one character.
    cat = ["  cat", "’", "s", "…", "", ""]
    assert pieces == ["A", " well", "-", "known", ",", *cat, "\r\n", "\n", " end", "."]
    (tmp_path / "text.txt").write_bytes(text)
    list(encode_text(find_corpus(["text.txt"], newlines="eos"), tokenizer, tmp_path))
    with open_split(tmp_path, "test") as store, open_counts(tmp_path, "test") as counts:
        assert store.read(0, store.n_tokens).tolist() == ids.tolist()
        assert counts.read(0, store.n_tokens).sum(axis=0).tolist() == [len(text), len(text.decode()), 4]


def test_numbers_are_marked_as_the_corpus_has_them() -> None:
    class Split(_Rules):
        def tokenize(self, text: str, **_: object) -> list[str]:
            return text.split()

    tokenizer = MosesTokenizer(CorpusWordTokenizer(("<eos>", "<unk>", "1", "@,@", "@.@", "5", "x")))
    tokenizer.__dict__["_rules"] = (Split(), Split(), Split())
    assert tokenizer.encode(b"1,5.1 x,5\n").tolist() == [2, 3, 5, 4, 2, 1, 0]
    assert tokenizer.join("1 @,@ 5 @.@ 1 x") == "1,5.1 x"


@given(
    text=st.lists(st.sampled_from(["a", "ü", ",", "-", " ", "\n", "…", "’", "…a", "東"]), max_size=40).map(
        "".join
    )
)
def test_ends_rise_to_the_end_of_the_text(text: str) -> None:
    tokenizer = with_rules("a")
    ids, ends = tokenizer.encode_with_ends(text.encode())
    assert len(ids) == len(ends)
    assert (np.diff(ends, prepend=0) >= 0).all()
    assert ends[-1:].tolist() == [len(text.encode())] * bool(len(ids))


@given(
    source=st.text(alphabet="abc…", max_size=30),
    target=st.text(alphabet="abc.", max_size=30),
)
def test_any_two_texts_are_aligned_in_order(source: str, target: str) -> None:
    ends = moses._align(source, target)
    assert len(ends) == len(target)
    assert ends == sorted(ends)
    assert all(0 <= end <= len(source) for end in ends)
    assert moses._align(source, source) == list(range(1, len(source) + 1))


@given(words=st.lists(st.sampled_from(["a", "b", ",", ".", "@-@", "\n"]), max_size=60), data=st.data())
def test_joining_piece_by_piece_gives_the_text_of_whole_lines(words: list[str], data: st.DataObject) -> None:
    tokenizer = with_rules()
    text = " ".join(words).replace(" \n ", "\n").replace(" \n", "\n").replace("\n ", "\n")
    # A mark that nothing follows on its line joins nothing, and no text ends with one.
    text = re.sub(r"(@-@ ?)+(?=\n|$)", "", text)
    joining = Joining(tokenizer, "")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=30)))
    told = "".join(joining.add(text[a:b]) for a, b in pairwise([0, *cuts, len(text)]))
    told += joining.finish()
    assert told == "\n".join(tokenizer.join(line) for line in text.split("\n"))


def test_joining_goes_on_after_a_prompt() -> None:
    tokenizer = with_rules()
    for prompt, words, text in (
        ("Well,", " he said .", " he said."),
        ("Well, ", " he said .", "he said."),
        ("x\n", "he , too\nand", "he, too\nand"),
        ("Well", " , he", ", he"),
    ):
        joining = Joining(tokenizer, prompt)
        assert joining.add(words) + joining.finish() == text


def test_without_the_library_raw_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moses, "find_spec", lambda name: None)
    with pytest.raises(UserError) as caught:
        refuse_missing_moses()
    assert str(caught.value) == "--moses: needs sacremoses, which is not installed; pip install sacremoses"
    monkeypatch.setattr(moses, "find_spec", lambda name: SimpleNamespace())
    refuse_missing_moses()


def test_the_library_splits_as_the_corpus_is() -> None:
    pytest.importorskip("sacremoses")
    tokenizer = MosesTokenizer(CorpusWordTokenizer(("<eos>", "<unk>")))
    text = (
        "The well-known “Valkyria Chronicles” cost $1,234.50 — it's 3.5 % cheaper…\n"
        "He didn't see a-b-c & <unk> [1].\n"
    )
    split = b"".join(map(tokenizer.split, text.encode().splitlines(keepends=True))).decode()
    assert split == (
        'The well @-@ known " Valkyria Chronicles " cost $ 1 @,@ 234 @.@ 50 - it \'s 3 @.@ 5 % cheaper ...\n'
        "He didn 't see a @-@ b @-@ c & <unk> [ 1 ] .\n"
    )
    assert [tokenizer.join(line) for line in split.splitlines()] == [
        'The well-known "Valkyria Chronicles" cost $1,234.50 - it\'s 3.5% cheaper...',
        "He didn't see a-b-c & <unk> [1].",
    ]
    _, ends = tokenizer.encode_with_ends(text.encode())
    source = text.encode()
    pieces = [source[a:b].decode().strip() for a, b in pairwise([0, *ends])]
    words = split.replace("\n", " \n ").split(" ")
    same = [piece == word for piece, word in zip(pieces, words, strict=False) if word.isalnum()]
    assert same
    assert all(same)
