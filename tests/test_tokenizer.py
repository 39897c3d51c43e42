"""Vocabularies: text comes back, chunks change nothing, files are deterministic and refused when damaged."""

import json
import pickle
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from txlcli import UserError
from txlcli.tokenizer import (
    Tokenizer,
    build_tokenizer,
    corpus_words,
    default_vocab_size,
    load_tokenizer,
    pieces,
    sampled_bytes,
    units,
    words,
)
from txlcli.tokenizer.corpus_words import CorpusWordTokenizer
from txlcli.tokenizer.pieces import PieceTokenizer
from txlcli.tokenizer.words import WordTokenizer

# `eos` is `word` with newlines as <eos>.
KINDS = ["byte", "char", "word", "eos", "sentencepiece"]
LOSSLESS = ["byte", "char", "sentencepiece"]

PROSE = (
    "The quick brown fox jumps over the lazy dog; don't ask why.\n"
    "  Indented, with a tab\there, and twice  two spaces.\r\n"
    "東京へ行く。 ไทย \N{PILE OF POO} e\u0301 ½ ① Ａ …\n\n"
) * 40


# One text a script, and what trips tokenizers up: see the names.
SCRIPTS = {
    "chinese": "紅樓夢第一回　甄士隱夢幻識通靈，賈雨村風塵懷閨秀。「此開卷第一回也」\n𠀀𪚥〇\n",
    "japanese": "吾輩は猫である。名前はまだ無い。ﾊﾝｶｸ ガ ｶﾞ 々〆ヶ、〜ー\n",
    "korean": "나랏말싸미 듕귁에 달아 한글 한\n",
    "arabic": "بِسْمِ ٱللَّهِ ٱلرَّحْمَٰنِ ٱلرَّحِيمِ‏ ١٢٣ لا ﷺ ـــ\n",
    "hebrew": "בְּרֵאשִׁית בָּרָא אֱלֹהִים‎\n",
    "thai": "กาลครั้งหนึ่งนานมาแล้ว มีน้ำใจ ๑๒๓ ฯลฯ\n",
    "devanagari": "क्षत्रिय नमस्ते क्‍ष दुनिया।\n",
    "tamil and khmer": "வணக்கம் உலகம் សួស្តីពិភពលោក\n",
    "greek and cyrillic": "Ἐν ἀρχῇ ἦν ὁ λόγος· Слово о полку Игореве, ё й\n",
    "emoji": "😀👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷👍🏽 ❤️ #️⃣ ☃︎\n",
    "marks": "é é ọ̈ Z͑ͫ̓Ấ ää ñ ́alone\n",
    "spaces": "a b c　d​e﻿f g hijkl  m   n\n \n\n",
    "code": "def f(x):\n\tif x:\n\t\treturn {\n\t\t    'a':\t1,\r\n\t}\t \n        #\ttrailing \t\n\n\n",
    "full width": "Ａ１ ﬁ ½ ① ㎏ Ⅷ ｶ x² ͍ İı ẞß ǅ\n",
    "private and rare": " 󰀀 􏿽 ￾￿ � 𒀀 𓀀 𝔸 𞤀\n",
    "directions": "a‮b‬ ⁦c⁩ ؜\n",
}


def build(
    kind: str,
    text: str | bytes = PROSE,
    vocab_size: int | None = None,
    seed: int = 0,
    has_documents: bool = False,
) -> Tokenizer:
    source = text.encode() if isinstance(text, str) else text
    return build_tokenizer(
        "word" if kind == "eos" else kind,
        newlines="eos" if kind == "eos" else "keep",
        vocab_size=vocab_size,
        text=lambda: iter([source[i : i + 1000] for i in range(0, len(source), 1000)]),
        n_bytes=len(source),
        seed=seed,
        has_documents=has_documents,
    )


@cache
def prose(kind: str, has_documents: bool = False) -> Tokenizer:
    return build(kind, has_documents=has_documents)


@cache
def of_scripts(kind: str) -> Tokenizer:
    return build(kind, "".join(SCRIPTS.values()) * 20)


def encode_in_chunks(tokenizer: Tokenizer, text: bytes, cuts: list[int]) -> tuple[list[int], list[int]]:
    """Encode as a reader of chunks does."""
    ids: list[int] = []
    ends: list[int] = []
    n_done, rest = 0, b""
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    for start, stop in pairwise(bounds):
        rest += text[start:stop]
        n_whole = len(rest) if stop == len(text) else tokenizer.complete_prefix(rest)
        new_ids, new_ends = tokenizer.encode_with_ends(rest[:n_whole])
        ids += new_ids.tolist()
        ends += (new_ends + n_done).tolist()
        n_done += n_whole
        rest = rest[n_whole:]
    assert len(rest) == 0
    return ids, ends


# Text with everything that a tokenizer might trip over: what spells control ids, what the library keeps for
# itself, halves of characters, and lines far longer than a unit with and without spaces.
stretches = st.one_of(
    st.text(max_size=40).map(str.encode),
    st.binary(max_size=12),
    st.sampled_from(
        [
            b"\n",
            b"\r\n",
            b"\t",
            b" ",
            b"  ",
            b"\0",
            "▁".encode(),
            "▅".encode(),
            b"\x1f",
            "\ufffd".encode(),
            "東京".encode(),
            b"<unk>",
            b"<eos>",
            "\u3000".encode(),
            b"\x85\x1c\xc2\xa0",
            b"</s>",
            b"<s>",
            b"<0x41>",
            b"the quick",
            b" fox.",
            b"\xe6\x9d",
            b"\xed\xa0\x80",
            "\ufeff".encode(),
        ]
    ),
    st.builds(
        lambda stretch, n: stretch * n,
        st.sampled_from(
            [b"a", b" ", b"ab c", "東".encode(), b"\xf0\x9f\x98\x80", b"\x80", b"the fox\n", b"a" * 4095]
        ),
        st.integers(1, 5000),
    ),
)
texts = st.lists(stretches, max_size=8).map(b"".join).map(lambda text: text[:20_000])
cuts = st.lists(st.integers(0, 20_000), max_size=6)


@pytest.mark.parametrize("kind", LOSSLESS)
@given(text=texts)
def test_any_bytes_come_back(kind: str, text: bytes) -> None:
    tokenizer = prose(kind)
    assert tokenizer.is_lossless
    ids, ends = tokenizer.encode_with_ends(text)
    assert ids.dtype == np.int32
    assert ends.dtype == np.int64
    np.testing.assert_array_equal(ids, tokenizer.encode(text))
    assert tokenizer.decode(ids.tolist()) == text
    parts = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    assert parts == [tokenizer.decode([id]) for id in ids.tolist()]
    assert not set(tokenizer.control_ids) & set(ids.tolist())
    assert tokenizer.unknown_count(ids) == 0


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(text=texts, cuts=cuts)
def test_chunks_give_the_ids_of_one_pass(kind: str, text: bytes, cuts: list[int]) -> None:
    tokenizer = prose(kind)
    ids, ends = tokenizer.encode_with_ends(text)
    assert encode_in_chunks(tokenizer, text, cuts) == (ids.tolist(), ends.tolist())


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.binary(max_size=300), more=st.binary(max_size=300))
def test_a_complete_prefix_stays_complete(kind: str, text: bytes, more: bytes) -> None:
    tokenizer = prose(kind)
    n_whole = tokenizer.complete_prefix(text)
    assert n_whole <= len(text)
    assert tokenizer.complete_prefix(text + more) >= n_whole


def units_by_definition(text: bytes) -> list[bytes]:
    found = []
    for line in re.findall(rb"[^\n]*\n|[^\n]+", text):
        while len(line) > 4096:
            spaces = [at for at in range(1, 4097) if line[at] == 32]
            back = [at for at in range(4096, 4092, -1) if line[at] & 0xC0 != 0x80] or [4096]
            cut = spaces[-1] if spaces else back[0]
            found.append(line[:cut])
            line = line[cut:]
        found.append(line)
    return found


@given(text=texts)
def test_units_are_lines_of_at_most_4096_bytes(text: bytes) -> None:
    found = units.units(text)
    assert found == units_by_definition(text)
    assert b"".join(found) == text
    assert all(len(unit) <= 4096 for unit in found)
    assert b"".join(units.parts(text)) == text
    tokenizer = prose("sentencepiece")
    separately = [id for unit in found for id in tokenizer.encode(unit).tolist()]
    assert tokenizer.encode(text).tolist() == separately


@pytest.mark.parametrize("filler", [b"a", "東".encode(), b"word "])
def test_a_line_without_end_is_read_in_bounded_pieces(filler: bytes) -> None:
    line = filler * (2_000_000 // len(filler))
    rest, longest = b"", 0
    for start in range(0, len(line), 50_000):
        rest += line[start : start + 50_000]
        rest = rest[units.complete_prefix(rest) :]
        longest = max(longest, len(rest))
    assert longest <= 4096


@pytest.mark.parametrize("kind", ["char", "sentencepiece"])
def test_every_character_of_unicode_comes_back(kind: str) -> None:
    everything = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000, 7)])).encode()
    tokenizer = prose(kind)
    assert tokenizer.decode(tokenizer.encode(everything).tolist()) == everything


@given(text=texts, seed=st.integers(0, 3))
@settings(max_examples=30)
def test_pieces_learned_from_any_text_give_it_back(text: bytes, seed: int) -> None:
    try:
        tokenizer = build("sentencepiece", text, seed=seed)
    except UserError as error:
        assert not re.sub("[\0▁▅\x1f]", " ", text.decode(errors="ignore")).strip()
        assert str(error).startswith("corpus: nothing but white space")  # noqa: PT017
        return
    assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


# --- scripts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LOSSLESS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_text_of_every_script_comes_back_exactly(kind: str, script: str) -> None:
    text = (SCRIPTS[script] * 3).encode()
    # Learned from this script, from all of them, and from English above all.
    for tokenizer in (build(kind, text * 10), of_scripts(kind), prose(kind)):
        ids, ends = tokenizer.encode_with_ends(text)
        assert tokenizer.decode(ids.tolist()) == text
        assert ends[-1] == len(text)
        assert tokenizer.unknown_count(ids) == 0
        assert not set(ids.tolist()) & set(tokenizer.control_ids)


@pytest.mark.parametrize("script", SCRIPTS)
def test_words_of_every_script_come_back_where_they_are_known(script: str) -> None:
    text = SCRIPTS[script].encode()
    tokenizer = build("word", text)
    ids = tokenizer.encode(text)
    assert tokenizer.unknown_count(ids) == 0
    assert tokenizer.decode(ids.tolist()) == text
    tokenizer = build("eos", text)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids.tolist()).decode().split() == text.decode().split()


@pytest.mark.parametrize("kind", LOSSLESS)
@settings(max_examples=50)
@given(data=st.data())
def test_any_mixture_of_scripts_comes_back_in_any_chunks(kind: str, data: st.DataObject) -> None:
    characters = st.sampled_from(sorted(set("".join(SCRIPTS.values()))))
    text = data.draw(st.text(st.one_of(characters, st.characters(codec="utf-8")), max_size=200)).encode()
    tokenizer = of_scripts(kind)
    ids, ends = encode_in_chunks(tokenizer, text, data.draw(cuts))
    assert tokenizer.decode(ids) == text
    assert [len(tokenizer.decode([id])) for id in ids] == np.diff(ends, prepend=0).tolist()


# --- documents ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(text=texts)
def test_an_end_of_documents_changes_no_other_id(kind: str, text: bytes) -> None:
    without, tokenizer = prose(kind), prose(kind, has_documents=True)
    assert without.document_end is None
    assert tokenizer.document_end == without.n_vocab == tokenizer.n_vocab - 1
    assert tokenizer.document_end not in tokenizer.control_ids
    assert (tokenizer.newline_id, tokenizer.is_lossless) == (without.newline_id, without.is_lossless)
    ids, ends = tokenizer.encode_with_ends(text)
    expected, expected_ends = without.encode_with_ends(text)
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(ends, expected_ends)
    assert tokenizer.decode(ids.tolist()) == without.decode(expected.tolist())
    assert tokenizer.unknown_count(ids) == without.unknown_count(expected)


@pytest.mark.parametrize("kind", KINDS)
@given(first=texts, second=texts)
@settings(max_examples=30)
def test_an_end_of_documents_has_no_text_and_separates(kind: str, first: bytes, second: bytes) -> None:
    tokenizer = prose(kind, has_documents=True)
    end = tokenizer.document_end
    assert end is not None
    assert tokenizer.decode([end, end]) == b""
    one, other = tokenizer.encode(first).tolist(), tokenizer.encode(second).tolist()
    together = tokenizer.decode([*one, end, *other])
    assert together == tokenizer.decode(one) + tokenizer.decode(other)
    assert tokenizer.decode(other, after=end) == tokenizer.decode(other)
    assert tokenizer.unknown_count(np.array([end])) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_says_that_it_has_documents_and_only_then(kind: str, tmp_path: Path) -> None:
    tokenizer = prose(kind, has_documents=True)
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded == tokenizer
    assert loaded.document_end == tokenizer.document_end
    assert loaded.fingerprint() != prose(kind).fingerprint()
    fields = json.loads((tmp_path / "tokenizer.json").read_bytes())
    assert fields.pop("documents") is True
    assert fields == json.loads(prose(kind).files()["tokenizer.json"])
    for wrong in (b"false", b"1", b'"yes"'):
        data = tokenizer.files()["tokenizer.json"].replace(b'"documents": true', b'"documents": ' + wrong)
        (tmp_path / "tokenizer.json").write_bytes(data)
        with pytest.raises(UserError, match="its bytes are not as they were written"):
            load_tokenizer(tmp_path)


def test_files_without_documents_are_what_they_were(tmp_path: Path) -> None:
    assert build("byte").files() == {"tokenizer.json": b'{"kind": "byte"}\n'}
    assert build("char", "ab").files() == {"tokenizer.json": b'{"alphabet": "ab", "kind": "char"}\n'}
    assert build("word", "b a b").files() == {"tokenizer.json": b'{"kind": "word", "tokens": ["b", "a"]}\n'}
    assert build("eos", "b a b").files() == {
        "tokenizer.json": b'{"kind": "word", "newlines": "eos", "tokens": ["<eos>", "b", "a", "<unk>"]}\n'
    }


def test_a_vocabulary_of_another_program_has_no_end_of_documents(tmp_path: Path) -> None:
    for fields in ({"kind": "byte", "bytes": [97, 10]}, {"kind": "char", "characters": ["a", "\n"]}):
        (tmp_path / "tokenizer.json").write_text(json.dumps(fields, sort_keys=True) + "\n")
        assert load_tokenizer(tmp_path).document_end is None
        fields["documents"] = True
        (tmp_path / "tokenizer.json").write_text(json.dumps(fields, sort_keys=True) + "\n")
        with pytest.raises(UserError, match="its bytes are not as they were written"):
            load_tokenizer(tmp_path)


def test_to_the_library_an_end_of_documents_is_a_control_piece(tmp_path: Path) -> None:
    import sentencepiece

    text = "<document> the <document> fox\n" * 300
    tokenizer = build("sentencepiece", text, has_documents=True)
    assert isinstance(tokenizer, PieceTokenizer)
    assert pieces.DOCUMENT_END not in tokenizer.pieces
    tokenizer.save(tmp_path)
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert library.get_piece_size() == tokenizer.n_vocab
    assert library.is_control(tokenizer.n_vocab - 1)
    for line in ("<document>", "a<document>", " the <document> fox"):
        ids = tokenizer.encode(line.encode()).tolist()
        assert library.encode(line, out_type=int) == ids
        assert tokenizer.document_end not in ids
        assert tokenizer.decode(ids) == line.encode()


@pytest.mark.parametrize(
    ("kind", "vocab_size", "least"),
    [
        ("byte", 256, "257 or more (256 bytes, 1 document end)"),
        ("char", 261, "262 or more (256 bytes, 5 characters, 1 document end)"),
        ("word", 2, "3 or more (1 control id, 1 word, 1 document end)"),
        ("eos", 3, "4 or more (2 control ids, 1 word, 1 document end)"),
        ("sentencepiece", 262, "263 or more (1 control id, 256 bytes, 5 characters, 1 document end)"),
    ],
)
def test_the_bound_counts_the_end_of_documents(kind: str, vocab_size: int, least: str) -> None:
    with pytest.raises(UserError) as caught:
        build(kind, "ab c\n", vocab_size=vocab_size, has_documents=True)
    assert str(caught.value) == f"--vocab-size: too small for this text; got {vocab_size}; give {least}"
    bound = int(least.split()[0])
    assert build(kind, "ab c\n", vocab_size=bound, has_documents=True).n_vocab <= bound
    assert build(kind, PROSE, vocab_size=400, has_documents=True).n_vocab <= 400


def test_the_default_size_leaves_room_for_the_end_of_documents() -> None:
    assert default_vocab_size(0, 512 - 257 - 1) == 512
    assert default_vocab_size(0, 512 - 257) == 1024


# --- words -------------------------------------------------------------------------------------------------


def word_tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([id]).decode() for id in tokenizer.encode(text.encode()).tolist()]


def test_words_stay_known_beside_punctuation_and_spacing_is_kept() -> None:
    tokenizer = build("word", "the quick brown fox (don't) .,\n")
    assert word_tokens(tokenizer, "the quick (brown), fox.") == [
        *("the", "quick", " ", "(", "brown", ")", ",", " ", "fox", ".")
    ]
    # Two spaces are a token of their own, which this text has not.
    assert word_tokens(tokenizer, "fox  fox don't\n\nfox") == [
        "fox",
        "<unk>",
        "fox",
        "don't",
        "\n",
        "\n",
        "fox",
    ]


def test_scripts_without_spaces_are_split_by_character() -> None:
    text = "東京 is Tokyo, กา 서울 हिन्दी e\u0301te\u0301\n"
    tokenizer = build("word", text)
    assert word_tokens(tokenizer, text) == [
        *("東", "京", " ", "is", "Tokyo", ",", " ", "ก", "า", " ", "서울", "हिन्दी", "e\u0301te\u0301", "\n")
    ]


@given(text=texts)
def test_words_come_back_within_their_vocabulary(text: bytes) -> None:
    text = re.sub(rb"\w{65,}", b"x", text)
    if not text.decode(errors="replace").strip():
        return
    tokenizer = WordTokenizer.build(iter([text]), None, seed=0)
    ids, ends = tokenizer.encode_with_ends(text)
    if tokenizer.unknown_count(ids) == 0:
        assert tokenizer.decode(ids.tolist()) == text
    assert not len(ends) or ends[-1] == len(text)
    assert (np.diff(ends) >= 0).all()


def test_a_line_cut_inside_words_comes_back() -> None:
    # No space in 20,000 bytes, and a comma every 7 bytes: cuts fall inside words.
    text = b"abcdef," * 3000 + b"\n" + b"abc def\n" * 3
    tokenizer = build("word", text)
    assert isinstance(tokenizer, WordTokenizer)
    assert words.JOIN in tokenizer.tokens
    ids = tokenizer.encode(text)
    assert tokenizer.unknown_count(ids) == 0
    assert tokenizer.decode(ids.tolist()) == text


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts, at=st.integers(0, 1000))
@settings(max_examples=40)
def test_decoding_goes_on_after_the_id_before(kind: str, text: bytes, at: int) -> None:
    tokenizer = prose(kind)
    ids = tokenizer.encode(text).tolist()
    at %= len(ids) + 1
    after = ids[at - 1] if at else None
    assert tokenizer.decode(ids[:at]) + tokenizer.decode(ids[at:], after=after) == tokenizer.decode(ids)


def test_unknown_words_are_counted_and_cost_their_bytes() -> None:
    text = b"rose rose rose is is a\n"
    tokenizer = build("word", text * 10, vocab_size=4)
    assert not tokenizer.is_lossless
    assert tokenizer.n_vocab == 4
    ids, ends = tokenizer.encode_with_ends(text)
    assert tokenizer.decode(ids.tolist()) == b"rose rose rose is is <unk>\n"
    assert tokenizer.control_ids == (0,)
    assert tokenizer.unknown_count(ids) == 1
    assert ends.tolist() == [4, 9, 14, 17, 20, 22, 23]
    assert tokenizer.unknown_characters("rose tulip, a tulip") == ["tulip", ",", " ", "a"]


def test_words_are_ranked_by_frequency_then_by_spelling() -> None:
    tokenizer = build("word", "b a a c c c\n")
    assert isinstance(tokenizer, WordTokenizer)
    assert tokenizer.tokens == ("c", "a", "\n", "b")


def test_counting_words_forgets_the_rare_ones_when_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "MIN_COUNTED", 100)
    rare = [f"w{number}" for number in range(500_000)]
    text = "\n".join(f"{word} often" for word in rare) + "\n"
    tokenizer = build("word", text, vocab_size=3)
    assert isinstance(tokenizer, WordTokenizer)
    assert set(tokenizer.tokens) == {"often", "\n"}


# --- words of a corpus, newlines as <eos> ------------------------------------------------------------------


def words_by_definition(text: bytes, vocabulary: Sequence[str]) -> list[str]:
    """What `str.split` makes of each line, and `<eos>` for each newline."""
    *lines, last = text.decode("utf-8", "surrogateescape").split("\n")
    known = set(vocabulary) - {"<eos>"}
    words_of = [[word if word in known else "<unk>" for word in line.split()] for line in (*lines, last)]
    return [*(word for words in words_of[:-1] for word in (*words, "<eos>")), *words_of[-1]]


SPACED = [b"a", b"bb", "東".encode(), b"<unk>", b"<eos>", b"\xe6\x9d", b" ", b"\n", b"\r\n", b"\t", b"\x1f"]
spaced_texts = st.lists(
    st.sampled_from([*SPACED, "\u3000".encode(), b"\xe3\x80", b"\x80", b"\xc2", b"  \n"]), max_size=30
).map(b"".join)


@settings(max_examples=300)
@given(text=spaced_texts, cuts=st.lists(st.integers(0, 100), max_size=8))
def test_corpus_words_are_those_of_str_split_in_any_chunks(text: bytes, cuts: list[int]) -> None:
    tokenizer = build("eos", "a <unk> 東 a\nbb")
    assert isinstance(tokenizer, CorpusWordTokenizer)
    ids, ends = tokenizer.encode_with_ends(text)
    assert [tokenizer.tokens[id] for id in ids.tolist()] == words_by_definition(text, tokenizer.tokens)
    assert tokenizer.encode(text).tolist() == ids.tolist()
    assert (ids.dtype, ends.dtype) == (np.int32, np.int64)
    assert encode_in_chunks(tokenizer, text, cuts) == (ids.tolist(), ends.tolist())
    assert not len(ends) or ends[-1] == len(text)
    # Each token's bytes are white space and then the word, only the last has white space after it.
    pieces_of = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    for id, piece in zip(ids.tolist(), pieces_of, strict=True):
        word = piece.decode("utf-8", "surrogateescape")
        assert word.split() == ([] if id == tokenizer.newline_id else [word.strip()])
        assert word.count("\n") == (id == tokenizer.newline_id)
    for piece in pieces_of[:-1]:
        last = piece.decode("utf-8", "surrogateescape")[-1]
        assert last == "\n" or not last.isspace()


@given(text=texts)
def test_decoded_corpus_words_are_the_words_again(text: bytes) -> None:
    if not text.decode(errors="replace").strip() or text.split() == [b"<eos>"]:
        return
    try:
        tokenizer = CorpusWordTokenizer.build(iter([text]), None)
    except UserError:
        assert set(text.split()) <= {b"<eos>"}
        return
    ids = tokenizer.encode(text)
    n_unknown = sum(word in ("<unk>", "<eos>") for word in text.decode("utf-8", "surrogateescape").split())
    assert tokenizer.unknown_count(ids) == n_unknown
    decoded = tokenizer.decode(ids.tolist())
    assert tokenizer.encode(decoded).tolist() == ids.tolist()
    assert b" \n" not in decoded
    assert b"\n " not in decoded
    assert b"  " not in decoded


def test_a_vocabulary_of_corpus_words_is_eos_and_every_word() -> None:
    text = " = Title = \n \n b <unk> b <unk> a c , b \n a <eos> c\u3000<unk> <unk>"
    tokenizer = build("eos", text)
    assert isinstance(tokenizer, CorpusWordTokenizer)
    assert tokenizer.tokens == ("<eos>", "<unk>", "b", "=", "a", "c", ",", "Title")
    assert tokenizer.newline_id == 0
    assert tokenizer.control_ids == (1,)
    assert not tokenizer.is_lossless
    assert word_tokens(tokenizer, "a b \n\n<eos> <unk> d") == ["a", "b", "\n", "\n", *["<unk>"] * 3]
    assert tokenizer.unknown_characters("d a <eos> <unk>\nd") == ["d", "<eos>"]
    # Without an <unk> in the text it comes last, and within the bound in place of the rarest word.
    for vocab_size, tokens in ((None, "a b c <unk>"), (4, "a b <unk>"), (3, "a <unk>")):
        tokenizer = build("eos", "b c a\na b a", vocab_size=vocab_size)
        assert isinstance(tokenizer, CorpusWordTokenizer)
        assert tokenizer.tokens == ("<eos>", *tokens.split())
        assert tokenizer.n_vocab == len(tokenizer.tokens)
    assert build("eos", "<unk> <unk>").n_vocab == 2


def test_no_eos_is_added_where_there_is_no_newline() -> None:
    tokenizer = build("eos", "a b\nc")
    for text in ("a b\nc", "a b\r\nc\r", " a\tb \n\u3000c "):
        ids, ends = tokenizer.encode_with_ends(text.encode())
        assert tokenizer.decode(ids.tolist()) == b"a b\nc"
        assert ends[-1] == len(text.encode())
    assert tokenizer.encode(b"\n\n").tolist() == [0, 0]
    assert tokenizer.encode_with_ends(b" \t \r")[0].tolist() == []
    assert tokenizer.encode_with_ends(b" \t \r")[1].tolist() == []
    assert tokenizer.decode([1, 2], after=0) == b"a b"
    assert tokenizer.decode([1, 2, 0, 1], after=3) == b" a b\na"


def test_corpus_words_longer_than_a_unit_are_cut_and_kept_text_is_short() -> None:
    tokenizer = build("eos", "x" * 4096 + " y\n")
    # The word begins after a space or a newline; characters of 3 bytes are not cut.
    for text, cut in (
        (b"y " + b"x" * 10_000 + b" y\n", [1, 2 + 4096, 2 + 8192, 10_002, 10_004, 10_005]),
        (b"\n" + "東".encode() * 3000, [1, 1 + 4095, 1 + 8190, 9001]),
    ):
        ids, ends = tokenizer.encode_with_ends(text)
        assert ends.tolist() == cut
        assert encode_in_chunks(tokenizer, text, [5, 4000, 4097, 4099, 9000]) == (ids.tolist(), cut)
    # A run of white space is kept, and read in the time that its length takes.
    spaces = b" " * 2**21
    assert tokenizer.complete_prefix(b"y x\n y" + spaces) == 4
    assert tokenizer.encode_with_ends(b"y" + spaces)[1].tolist() == [1 + 2**21]
    rest, longest = b"", 0
    for _ in range(40):
        rest += b"x" * 50_000
        rest = rest[tokenizer.complete_prefix(rest) :]
        longest = max(longest, len(rest))
    assert longest <= 4096


def test_counting_corpus_words_forgets_the_rare_ones_when_memory_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(corpus_words, "MIN_COUNTED", 100)
    text = "\n".join(f"w{number} often" for number in range(200_000)) + "\n"
    tokenizer = build("eos", text, vocab_size=3)
    assert isinstance(tokenizer, CorpusWordTokenizer)
    assert tokenizer.tokens == ("<eos>", "often", "<unk>")


def test_corpus_words_too_long_for_a_file_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_words, "MAX_FILE_BYTES", 5_000_000)
    text = "\n".join("字" * 900 + str(number) for number in range(1000))
    with pytest.raises(UserError) as caught:
        build("eos", text)
    assert str(caught.value) == (
        "corpus: its words are too long for a vocabulary; got 1,001 of 5 MB, at most 5 MB; give a smaller "
        "--vocab-size, or --newlines keep for text that white space does not split into words"
    )
    assert build("eos", text, vocab_size=100).n_vocab == 100


# --- what each vocabulary holds ----------------------------------------------------------------------------


def test_newline_and_tab_are_pieces_of_their_own() -> None:
    text = "a quick fox\n\ta lazy dog\r\n" * 100
    tokenizer = build("sentencepiece", text, vocab_size=300)
    assert isinstance(tokenizer, PieceTokenizer)
    assert tokenizer.pieces[:3] == ("\n", "\r", "\t")
    assert not any(set(piece) & set("\n\r\t") for piece in tokenizer.pieces[3:])
    assert tokenizer.newline_id == 257
    assert tokenizer.encode(b"\n\n").tolist() == [257, 257]
    ids = tokenizer.encode(b"a\n\nb\n").tolist()
    assert ids.count(257) == 3
    assert tokenizer.decode(ids) == b"a\n\nb\n"


@pytest.mark.parametrize("kind", ["char", "word", "sentencepiece"])
def test_no_newline_in_the_text_no_newline_in_the_vocabulary(kind: str) -> None:
    tokenizer = build(kind, "abc abc " * 100)
    assert tokenizer.newline_id is None
    assert build(kind, "abc abc\n" * 100).newline_id is not None


def test_text_that_spells_control_ids_is_text() -> None:
    text = "</s> <unk> <0x41> <s> <pad>\n" * 200
    tokenizer = build("sentencepiece", text)
    assert isinstance(tokenizer, PieceTokenizer)
    assert not {"</s>", "<unk>", "<0x41>"} & set(tokenizer.pieces)
    ids = tokenizer.encode(text.encode()).tolist()
    assert tokenizer.decode(ids) == text.encode()
    assert min(ids) > 256


@pytest.mark.parametrize("sign", ["\0", "▁", "▅", "\x1f"])
def test_what_the_library_keeps_for_itself_goes_through_bytes(sign: str) -> None:
    text = f"ab{sign}cd {sign}\n" * 300
    tokenizer = build("sentencepiece", text)
    assert isinstance(tokenizer, PieceTokenizer)
    assert "ab" in tokenizer.pieces
    assert sign not in "".join(tokenizer.pieces)
    assert tokenizer.encode(sign.encode()).tolist() == [1 + byte for byte in sign.encode()]
    assert tokenizer.decode(tokenizer.encode(text.encode()).tolist()) == text.encode()


def test_nothing_is_normalized() -> None:
    text = "ﬁ ½ ① Ａ e\u0301 …  \n" * 300
    tokenizer = build("sentencepiece", text, vocab_size=320)
    assert tokenizer.n_vocab <= 320
    assert tokenizer.decode(tokenizer.encode(text.encode()).tolist()) == text.encode()


def test_rare_characters_are_kept() -> None:
    text = "the quick brown fox\n" * 2000 + "ż \N{OCTOPUS} 東京翴\n"
    tokenizer = build("sentencepiece", text, vocab_size=600)
    assert tokenizer.unknown_characters("the ż翴") == []
    assert tokenizer.decode(tokenizer.encode(text.encode()).tolist()) == text.encode()


def test_the_char_alphabet_is_the_texts_characters_after_the_bytes() -> None:
    tokenizer = build("char", "cab\n東\r")
    assert tokenizer.n_vocab == 256 + 6
    assert tokenizer.newline_id == 256
    assert tokenizer.encode("東a?é".encode()).tolist() == [261, 258, ord("?"), 0xC3, 0xA9]
    assert tokenizer.unknown_characters("da?d東") == ["d", "?"]
    _, ends = tokenizer.encode_with_ends("東é".encode())
    assert ends.tolist() == [3, 4, 5]


def test_a_short_text_does_not_fill_the_vocabulary_asked_for() -> None:
    tokenizer = build(
        "sentencepiece", "the quick brown fox jumps over the lazy dog\n" * 40, vocab_size=32_000
    )
    assert 257 + 28 < tokenizer.n_vocab < 600


@pytest.mark.parametrize("vocab_size", [257 + 29, 300, 310])
def test_vocab_size_is_an_upper_bound(vocab_size: int) -> None:
    text = "the quick brown fox jumps over the lazy dog.\n" * 40
    assert build("sentencepiece", text, vocab_size=vocab_size).n_vocab <= vocab_size


@pytest.mark.parametrize(
    ("kind", "vocab_size", "least"),
    [
        ("byte", 255, "256 or more (256 bytes)"),
        ("char", 3, "261 or more (256 bytes, 5 characters)"),
        ("word", 1, "2 or more (1 control id, 1 word)"),
        ("eos", 2, "3 or more (2 control ids, 1 word)"),
        ("sentencepiece", 261, "262 or more (1 control id, 256 bytes, 5 characters)"),
    ],
)
def test_a_bound_too_small_is_refused_naming_the_least(kind: str, vocab_size: int, least: str) -> None:
    with pytest.raises(UserError) as caught:
        build(kind, "ab c\n", vocab_size=vocab_size)
    assert str(caught.value) == f"--vocab-size: too small for this text; got {vocab_size}; give {least}"
    build(kind, "ab c\n", vocab_size=int(least.split()[0]))


@pytest.mark.parametrize("text", ["", " \n\n", "\t\r\n"])
def test_white_space_is_no_text_for_words_and_pieces(text: str) -> None:
    needs = "a vocabulary of words needs words"
    for kind, what in (("word", needs), ("eos", needs), ("sentencepiece", "pieces need words")):
        with pytest.raises(UserError) as caught:
            build(kind, text)
        assert str(caught.value) == (
            f"corpus: nothing but white space; {what}; "
            "give other text, or --tokenizer byte or char, which take it"
        )
    for kind in ("byte", "char"):
        tokenizer = build(kind, text)
        assert tokenizer.decode(tokenizer.encode(text.encode()).tolist()) == text.encode()


@pytest.mark.parametrize("text", ["a" * 5000, ("a" * 100 + "\n") * 5, "a" * 65 + " " + "b" * 65])
def test_a_text_of_nothing_but_endless_words_is_no_text_for_words(text: str) -> None:
    with pytest.raises(UserError) as caught:
        build("word", text)
    assert str(caught.value) == (
        "corpus: no word of at most 64 characters; a vocabulary of words needs words; "
        "give other text, or --tokenizer byte or char, which take it"
    )
    assert build("word", text + " " + "c" * 64).unknown_characters("c" * 64) == []


@pytest.mark.parametrize(
    ("n_characters", "n_alphabet", "size"),
    [
        (0, 0, 512),
        (100_000, 60, 512),
        (1_059_624, 65, 1024),
        (3_030_997, 78, 4096),
        (818_916, 4232, 8192),
        (10**10, 100, 32_768),
        (10**10, 40_000, 65_536),
    ],
)
def test_the_default_size_is_a_piece_for_800_characters(
    n_characters: int, n_alphabet: int, size: int
) -> None:
    assert default_vocab_size(n_characters, n_alphabet) == size


def test_the_library_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    build("sentencepiece", PROSE)
    assert capfd.readouterr() == ("", "")


# --- samples -----------------------------------------------------------------------------------------------


def in_chunks(text: bytes, size: int) -> Iterator[bytes]:
    return (text[start : start + size] for start in range(0, len(text), size))


@given(text=st.binary(max_size=400), sizes=st.lists(st.integers(1, 50), max_size=20), size=st.integers(1, 60))
def test_blocks_are_of_one_size(text: bytes, sizes: list[int], size: int) -> None:
    chunks, start = [], 0
    for n in sizes:
        chunks.append(text[start : start + n])
        start += n
    found = list(units.blocks(iter([*chunks, text[start:]]), size))
    assert b"".join(found) == text
    assert [len(block) for block in found[:-1]] == [size] * (len(found) - 1)


def test_a_short_text_is_its_own_sample() -> None:
    text = PROSE.encode()
    assert list(units.sample(in_chunks(text, 999), 0)) == [text]


@pytest.mark.parametrize("form", ["lines", "words", "characters"])
def test_a_sample_is_bounded_seeded_and_spread(form: str) -> None:
    def sample(chunks: Iterator[bytes], seed: int) -> list[bytes]:
        return list(units.sample(chunks, seed, n_bytes=64_000, block_bytes=1000))

    line = {"lines": "{:07d} 東京\n", "words": "{:07d} 東京 ", "characters": "{:07d}東京"}[form]
    text = "".join(line.format(number) for number in range(60_000)).encode()
    stretches = sample(in_chunks(text, 777), 1)
    assert stretches == sample(in_chunks(text, 5000), 1)
    assert stretches != sample(in_chunks(text, 777), 2)
    assert 50_000 < sum(map(len, stretches)) <= 64_000
    places = [text.index(stretch) for stretch in stretches]
    assert places == sorted(places)
    quarters = np.bincount([4 * place // len(text) for place in places], minlength=4)
    assert quarters.min() >= 5
    for stretch in stretches:
        stretch.decode()
        if form == "lines":
            assert re.fullmatch(r"(\d{7} 東京\n)+", stretch.decode())


def test_pieces_of_one_long_line_are_those_of_lines() -> None:
    sentence = "the quick brown fox jumps over the lazy dog and runs away "
    lines = build("sentencepiece", (sentence + "\n") * 3000, vocab_size=320)
    line = build("sentencepiece", sentence * 3000, vocab_size=320)
    text = sentence.encode()
    assert abs(len(lines.encode(text)) - len(line.encode(text))) <= 2


def test_equal_texts_and_seeds_give_equal_vocabularies(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in KINDS:
        assert build(kind).files() == build(kind).files()
    text = "".join(f"{number * number} " for number in range(4000))
    sample = units.sample
    for kind, module in (("sentencepiece", pieces), ("word", words)):
        monkeypatch.setattr(
            module, "sample", lambda chunks, seed, **_: sample(chunks, seed, n_bytes=4000, block_bytes=500)
        )
        assert build(kind, text, seed=1).files() == build(kind, text, seed=1).files()
        assert build(kind, text, seed=1).files() != build(kind, text, seed=2).files()
    assert build("eos", text, seed=1).files() == build("eos", text, seed=2).files()


def test_what_is_learned_from_is_bounded_by_kind() -> None:
    assert [sampled_bytes(kind) for kind in ("byte", "char", "word", "sentencepiece")] == [
        None,
        None,
        2**25,
        2**23,
    ]
    assert sampled_bytes("word", "eos") is None


# --- files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_vocabulary_is_the_same_when_loaded(kind: str, tmp_path: Path) -> None:
    tokenizer = prose(kind)
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded == tokenizer
    described = {"kind": "word", "newlines": "eos"} if kind == "eos" else {"kind": kind}
    assert loaded.kind == described["kind"]
    assert loaded.fingerprint() == tokenizer.fingerprint()
    assert loaded.describe() == {**described, "n_vocab": tokenizer.n_vocab}
    text = PROSE.encode() + bytes(range(256))
    np.testing.assert_array_equal(loaded.encode(text), tokenizer.encode(text))
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == tokenizer.files()
    assert str(tmp_path).encode() not in b"".join(written.values())


def test_the_librarys_file_opens_in_the_library(tmp_path: Path) -> None:
    import sentencepiece

    tokenizer = prose("sentencepiece")
    tokenizer.save(tmp_path)
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert library.get_piece_size() == tokenizer.n_vocab
    line = "The quick brown 東京, don't."
    assert library.encode(line, out_type=int) == tokenizer.encode(line.encode()).tolist()
    assert library.decode(tokenizer.encode(line.encode()).tolist()) == line


def test_the_fingerprint_tells_vocabularies_apart() -> None:
    prints = [prose(kind).fingerprint() for kind in KINDS]
    prints.append(build("char", "abc").fingerprint())
    prints.append(build("sentencepiece", PROSE, vocab_size=330).fingerprint())
    assert len(set(prints)) == len(prints)
    assert all(re.fullmatch("[0-9a-f]{64}", value) for value in prints)


WRONG_JSON = [
    (b"", "expected JSON"),
    (b"{", "expected JSON"),
    (pickle.dumps({"kind": "byte"}), "expected JSON"),
    (b"[" * 100_000 + b"]" * 100_000, "expected JSON"),
    (b"\xff\xfe", "expected JSON"),
    (b"[]", "expected a JSON object"),
    (b"{}", "expected a `kind` of byte, char, word or sentencepiece"),
    (b'{"kind": ["byte"]}', "expected a `kind` of byte, char, word or sentencepiece"),
    (b'{"kind":"byte"}', "its bytes are not as they were written"),
    (b'{"kind": "byte", "more": 1}\n', "its bytes are not as they were written"),
    (b'{"kind": "byte", "kind": "byte"}\n', "its bytes are not as they were written"),
    (b'{"kind": "char"}\n', "expected `alphabet` to be a string of characters"),
    (b'{"kind": "char", "alphabet": ["a"]}\n', "expected `alphabet` to be a string of characters"),
    (b'{"kind": "char", "alphabet": "ba"}\n', "expected `alphabet` to ascend by code point"),
    (b'{"kind": "char", "alphabet": "aa"}\n', "expected `alphabet` to ascend by code point"),
    (b'{"kind": "char", "alphabet": "\\ud800"}\n', "expected `alphabet` to ascend by code point"),
    (b'{"kind": "word", "tokens": "abc"}\n', "expected `tokens` to be a list of strings"),
    (b'{"kind": "word", "tokens": ["a", 1]}\n', "expected `tokens` to be a list of strings"),
    (b'{"kind": "word", "tokens": ["a", "a"]}\n', "got a repeated string in `tokens`"),
    (b'{"kind": "word", "tokens": ["a", " b"]}\n', "got a token of a space and more"),
    (b'{"kind": "word", "tokens": ["\\ud83d"]}\n', "got a token that is no text"),
    (b'{"kind": "word", "newlines": "keep", "tokens": ["a"]}\n', "its bytes are not as they were written"),
    (b'{"kind": "word", "newlines": "eos"}\n', "expected `tokens` to be a list of strings"),
    *(
        (b'{"kind": "word", "newlines": "eos", "tokens": ' + tokens + b"}\n", reason)
        for tokens, reason in (
            (b"[]", "expected `tokens` to hold a token for newlines and one for unknown words"),
            (b'["<unk>", "a"]', "expected `tokens` to hold a token for newlines and one for unknown words"),
            (b'["<eos>", "a"]', "expected `tokens` to hold a token for newlines and one for unknown words"),
            (b'["<eos>", "<unk>", "<eos>"]', "got a repeated string in `tokens`"),
            (b'["<eos>", "<unk>", ""]', "got a token that is empty or holds white space"),
            (b'["<eos>", "<unk>", "a\\u3000b"]', "got a token that is empty or holds white space"),
            (b'["<eos>", "<unk>", "\\n"]', "got a token that is empty or holds white space"),
            (b'["<eos>", "<unk>", "\\ud800"]', "got a token that is no text"),
            (b'["<eos>","<unk>"]', "its bytes are not as they were written"),
        )
    ),
    (b'{"kind": "sentencepiece"}\n', "expected `pieces` to be a list of strings"),
    (b'{"kind": "sentencepiece", "pieces": [""]}\n', "expected pieces of 1 to 16 characters"),
    (b'{"kind": "sentencepiece", "pieces": ["<unk>"]}\n', "expected pieces of 1 to 16 characters"),
    (b'{"kind": "sentencepiece", "pieces": ["<0x41>"]}\n', "expected pieces of 1 to 16 characters"),
    (
        b'{"kind": "sentencepiece", "pieces": ["\\ud800"]}\n',
        "got a piece with a character that only bytes stand for",
    ),
    (
        b'{"kind": "sentencepiece", "pieces": ["a\\u0000"]}\n',
        "got a piece with a character that only bytes stand for",
    ),
    (b'{"kind": "sentencepiece", "pieces": ["a"]}\n', "its bytes are not as they were written"),
]


@pytest.mark.parametrize(("data", "reason"), WRONG_JSON)
def test_a_damaged_vocabulary_is_refused(data: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data)
    with pytest.raises(UserError) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value) == (
        f"{path}: damaged, or not made by txl; {reason}; take the file from the run it came from"
    )


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data + b"\0", lambda data: pickle.dumps(data)]
)
def test_a_model_file_other_than_ours_never_reaches_the_library(damage, tmp_path: Path, monkeypatch) -> None:
    prose("sentencepiece").save(tmp_path)
    path = tmp_path / "tokenizer.model"
    path.write_bytes(damage(path.read_bytes()))
    monkeypatch.setattr("sentencepiece.SentencePieceProcessor", None)
    with pytest.raises(UserError) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value) == (
        f"{path}: damaged, or not made by txl; its bytes are not as they were written; "
        "take the file from the run it came from"
    )


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(data=st.data())
def test_any_changed_byte_is_refused_or_another_vocabulary(kind: str, data, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    prose(kind).save(folder)
    path = folder / data.draw(st.sampled_from(sorted(prose(kind).files())))
    source = bytearray(path.read_bytes())
    source[data.draw(st.integers(0, len(source) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(source)
    try:
        tokenizer = load_tokenizer(folder)
    except UserError as error:
        assert str(error).startswith(f"{folder}/tokenizer.")  # noqa: PT017
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert tokenizer.fingerprint() != prose(kind).fingerprint()
        tokenizer.decode(tokenizer.encode(PROSE.encode()).tolist())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(str(tmp_path / "tokenizer.json"))):
        load_tokenizer(tmp_path)
    prose("sentencepiece").save(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    with pytest.raises(UserError, match=re.escape(str(tmp_path / "tokenizer.model"))):
        load_tokenizer(tmp_path)


def test_the_json_lists_the_vocabulary_as_text(tmp_path: Path) -> None:
    build("sentencepiece", "the fox and the hen\n" * 50).save(tmp_path)
    fields = json.loads((tmp_path / "tokenizer.json").read_text(encoding="ascii"))
    assert set(fields) == {"kind", "model", "normalization", "pieces"}
    assert (fields["model"], fields["normalization"]) == ("bpe", "identity")
    assert " the" in fields["pieces"]
