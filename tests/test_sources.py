"""Text comes out of any file as UTF-8, exactly, in chunks, with its origin; the rest is refused by name."""

import io
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from txlcli import UserError
from txlcli.sources import (
    Corpus,
    Progress,
    Survey,
    check_unchanged,
    complete_utf8,
    convert,
    find_corpus,
    find_encoding,
    find_split,
    guess_script,
    held_out_start,
    read,
    read_chunks,
    read_text,
    survey,
)

ENCODINGS = ("utf-8", "utf-16", "utf-16-be", "gb18030", "shift_jis", "cp1252", "iso2022_jp", "utf-7")
SAMPLE = {
    "utf-8": "aé紅🐙 \r\n\0",
    "utf-16": "aé紅🐙 \r\n\0",
    "utf-16-be": "aé紅🐙 \r\n\0",
    "gb18030": "aé紅🐙 \r\n\0",
    "shift_jis": "a紅ｱ \r\n\0",
    "cp1252": "aé€ \r\n\0",
    "iso2022_jp": "a紅日 \n",
    "utf-7": "aé紅🐙+- \n",
}


def write(folder: Path, data: bytes, name: str = "a.txt") -> str:
    path = folder / name
    path.write_bytes(data)
    return str(path)


def run_survey(corpus: Corpus, **options: float) -> Survey:
    *progress, last = survey(corpus, **options)  # type: ignore[arg-type]
    assert all(isinstance(one, Progress) for one in progress)
    assert isinstance(last, Survey)
    return last


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda n: monkeypatch.setattr(read, "CHUNK_BYTES", n)


# What is refused, and in which words


def test_paths_that_are_no_text_are_refused_by_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").mkdir()
    write(tmp_path, b"\0\1", "binary/x.bin")
    write(tmp_path, b"", "empty.txt")
    for name, text in (
        ("none.txt", "cannot be read; no such file or directory"),
        ("none.txt/", "cannot be read; no such file or directory"),
        ("loop", "cannot be read; too many levels of symbolic links"),
        ("pipe", "is a named pipe, not a file; send its text to stdin: ... | txl train -"),
        ("empty.txt", "is empty; give a file with some text"),
        ("folder", "no text in this folder; it is empty"),
        ("binary", f"no text in this folder; skipped {tmp_path}/binary/x.bin (binary: it holds NUL bytes)"),
    ):
        with pytest.raises(UserError) as caught:
            find_corpus([f"{tmp_path}/{name}"])
        assert str(caught.value) == f"{tmp_path}/{name}: {text}"
    with pytest.raises(UserError, match=r"^/dev/zero: is a device, not a file; send its text"):
        find_corpus(["/dev/zero"])
    with pytest.raises(UserError, match=r"^'a\\x00b': cannot be read; a name cannot hold a NUL byte$"):
        find_corpus(["a\0b"])
    with pytest.raises(UserError, match=r"^no text is named; give files, a folder, or `-` for stdin"):
        find_corpus([])
    with pytest.raises(UserError, match=r"^-: stdin cannot be read here; give a file$"):
        find_corpus(["-"])


def test_an_unreadable_file_is_refused_or_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = write(tmp_path, b"good", "a.txt"), write(tmp_path, b"bad", "b.txt")
    real = os.open

    def refuse(path: str, *args: int) -> int:
        if str(path) == bad:
            raise PermissionError(13, "Permission denied", path)
        return real(path, *args)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UserError) as caught:
        find_corpus([good, bad])
    assert str(caught.value) == f"{bad}: cannot be read; permission denied"
    corpus = find_corpus([str(tmp_path)])
    assert corpus.files == (Path(good),)
    assert corpus.skipped == ((Path(bad), "permission denied"),)
    assert corpus.notices == (f"{bad} (permission denied): skipped",)


def test_unknown_encodings_are_refused_with_a_suggestion() -> None:
    for name, text in (
        ("uft-8", "--encoding: unknown encoding `uft-8`; did you mean `utf-8`?"),
        ("base64", "--encoding: unknown encoding `base64`; for example utf-8, utf-16, cp1252, gb18030"),
        ("", "--encoding: unknown encoding ``; for example utf-8, utf-16, cp1252, gb18030"),
        ("zzzzzz", "--encoding: unknown encoding `zzzzzz`; for example utf-8, utf-16, cp1252, gb18030"),
    ):
        with pytest.raises(UserError) as caught:
            find_encoding(name)
        assert str(caught.value) == text
    assert [find_encoding(name) for name in ("UTF8", "utf-8-sig", "latin1", "GBK", "utf-16")] == [
        "utf-8",
        "utf-8",
        "iso8859-1",
        "gbk",
        "utf-16",
    ]


REMEDY = "name its encoding (--encoding cp1252), or train with --encoding-errors replace or --tokenizer byte"


@pytest.mark.parametrize(
    ("data", "encoding", "fault"),
    [
        (b"caf\xe9 na\x92ve\n" * 300, "utf-8", f"not utf-8 at byte 3, line 1; got 0xe9; {REMEDY}"),
        (b"a\nb\n\xff", "utf-8", f"not utf-8 at byte 4, line 3; got 0xff; {REMEDY}"),
        (
            b"a\n\xe7\xb4",
            "utf-8",
            f"not utf-8 at byte 2, line 2; got 0xe7 0xb4 at its end, the beginning of a character; {REMEDY}",
        ),
        (b"\xed\xa0\x80", "utf-8", f"not utf-8 at byte 0, line 1; got 0xed; {REMEDY}"),
        (b"ab\xff\n", "gb18030", f"not gb18030 at byte 2, line 1; got 0xff; {REMEDY}"),
        (b"ab\n\x81c", "cp1252", f"not cp1252 at byte 3, line 2; got 0x81; {REMEDY}"),
        (
            "ab\n".encode("utf-16-le") + b"a",
            "utf-16",
            f"not utf-16-le at byte 6, line 2; got 0x61 at its end, the beginning of a character; {REMEDY}",
        ),
        (
            b"\x1f\x8b\x08\0",
            "utf-8",
            "not utf-8 at byte 1, line 1; got 0x8b; "
            "it looks like a gzip file: unpack it first, or train with --tokenizer byte",
        ),
        (
            "紅".encode("utf-16"),
            "utf-8",
            "not utf-8 at byte 0, line 1; got 0xff; it looks like utf-16: use --encoding utf-16",
        ),
    ],
)
def test_bytes_that_are_no_text_are_refused_with_their_place(
    tmp_path: Path, small_chunks: Callable[[int], None], data: bytes, encoding: str, fault: str
) -> None:
    name = write(tmp_path, data)
    for n in (1, 2, 3, 5, 1 << 20):
        small_chunks(n)
        corpus = find_corpus([name], encoding=encoding, packed="keep")
        with pytest.raises(UserError) as caught:
            run_survey(corpus)
        assert str(caught.value) == f"{name}: {fault}"


def test_the_place_is_that_in_its_own_file(tmp_path: Path) -> None:
    first, second = write(tmp_path, b"good\n" * 9, "a.txt"), write(tmp_path, b"\n\nb\xe9", "b.txt")
    with pytest.raises(UserError, match=re.escape(f"{second}: not utf-8 at byte 3, line 3; got 0xe9")):
        run_survey(find_corpus([first, second]))
    with pytest.raises(UserError, match=re.escape(f"{second}: not utf-8 at byte 3, line 3; got 0xe9")):
        list(read_text(find_corpus([first, second]), 45, 49))


def test_a_character_cut_by_the_end_of_a_file_is_not_mended_by_the_next(tmp_path: Path) -> None:
    names = [write(tmp_path, b"a\xc3", "a.txt"), write(tmp_path, b"\xa9b", "b.txt")]
    with pytest.raises(UserError, match=r"a\.txt: not utf-8 at byte 1, line 1; got 0xc3 at its end"):
        run_survey(find_corpus(names))
    text = b"".join(read_text(find_corpus(names, errors="replace"), 0, 4))
    assert text.decode() == "a\ufffd\ufffdb"


# Folders


def test_a_folder_is_walked_in_order_and_says_what_it_skips(tmp_path: Path) -> None:
    root = tmp_path / "texts"
    for name, data in (
        ("b.txt", b"2"),
        ("a/z.txt", b"3"),
        ("a/é.txt", b"4"),
        ("c/x.txt", b"5"),
        ("B.txt", b"1"),
        ("a/picture.png", b"\x89PNG\0"),
        ("a/empty.txt", b""),
        (".git/config", b"no"),
        ("a/.hidden", b"no"),
        ("run/config.yaml", b"no"),
        ("run/checkpoints/x.txt", b"no"),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    (root / "a" / "loop").symlink_to(root)
    (root / "a" / "dead").symlink_to("nowhere")
    os.mkfifo(root / "pipe")
    corpus = find_corpus([str(root)])
    assert b"".join(read_text(corpus, 0, corpus.n_bytes)) == b"12345"
    assert {str(path.relative_to(root)): reason for path, reason in corpus.skipped} == {
        ".git": "hidden",
        "a/.hidden": "hidden",
        "a/loop": "a link to a folder",
        "a/dead": "no such file or directory",
        "a/picture.png": "binary: it holds NUL bytes",
        "a/empty.txt": "is empty",
        "pipe": "is a named pipe, not a file",
        "run": "a run",
    }
    raw = find_corpus([str(root)], raw=True)
    assert b"".join(read_text(raw, 0, raw.n_bytes)) == b"12\x89PNG\x00345"
    wide = find_corpus([str(root / "a")], encoding="utf-16")
    assert root / "a" / "picture.png" in wide.files


def test_files_are_read_end_to_end_in_the_order_given(tmp_path: Path) -> None:
    names = [write(tmp_path, data, name) for name, data in (("b", b"one"), ("a", b"two"))]
    corpus = find_corpus([*names, names[0]])
    assert b"".join(read_text(corpus, 0, corpus.n_bytes)) == b"onetwoone"
    assert b"".join(read_text(corpus, 2, 7)) == b"etwoo"
    assert corpus.name == f"{names[0]} and 2 more"


def test_stdin_is_copied_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO(b"\xef\xbb\xbfhello")

    monkeypatch.setattr(sys, "stdin", Stdin)
    corpus = find_corpus(["-"], stdin_copy=tmp_path / "stdin.txt")
    assert corpus.name == "-"
    assert (tmp_path / "stdin.txt").read_bytes() == b"\xef\xbb\xbfhello"
    assert b"".join(read_text(corpus, 0, corpus.n_bytes)) == b"hello"
    with pytest.raises(UserError, match=r"^-: is empty; give a file with some text$"):
        find_corpus(["-"], stdin_copy=tmp_path / "again.txt")


def test_nothing_is_written_beside_the_text(tmp_path: Path) -> None:
    name = write(tmp_path, b"some text\n" * 100)
    before = (sorted(tmp_path.iterdir()), tmp_path.stat().st_mtime_ns)
    corpus = find_corpus([str(tmp_path), name])
    run_survey(corpus)
    assert (sorted(tmp_path.iterdir()), tmp_path.stat().st_mtime_ns) == before


# Marks, line ends, odd characters


@pytest.mark.parametrize("codec", ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be", "gb18030"])
def test_one_leading_mark_is_no_text(tmp_path: Path, codec: str) -> None:
    family = codec[:6] if codec.startswith(("utf-16", "utf-32")) else codec
    name = write(tmp_path, "\ufeff\ufeffab\r\ncd\rEF\n".encode(codec))
    for encoding in {codec, family}:
        corpus = find_corpus([name], encoding=encoding)
        chunks = list(read_chunks(corpus, 0, corpus.n_bytes, sized=True))
        assert b"".join(chunk.text for chunk in chunks).decode() == "\ufeffab\r\ncd\rEF\n"
        n_mark = len("\ufeff".encode(codec))
        assert sum(chunk.source_bytes for chunk in chunks) == corpus.n_bytes - n_mark
        assert corpus.notices == (f"{name}: the leading byte-order mark is no text and is dropped",)
        raw = find_corpus([name], encoding=encoding, raw=True)
        assert b"".join(read_text(raw, 0, raw.n_bytes)) == Path(name).read_bytes()
        assert raw.notices == ()


def test_what_is_kept_is_said(tmp_path: Path) -> None:
    name = write(tmp_path, b"ab\0\r\n" * 3 + b"caf\xe9 na\x92ve\n" * 100)
    found = run_survey(find_corpus([name], errors="replace"))
    assert found.notices == (
        f"{name}: 200 bytes are not utf-8 and are read as U+FFFD",
        f"{name}: 3 carriage returns are kept as characters",
        f"{name}: 3 NUL bytes are kept as characters",
    )
    assert found.n_replaced == 200


# Reading is exact, whatever the chunks


@settings(max_examples=150, deadline=None)
@given(data=st.data(), encoding=st.sampled_from(ENCODINGS), chunk=st.integers(1, 9))
def test_text_of_any_encoding_is_read_exactly_in_any_pieces(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, encoding: str, chunk: int
) -> None:
    text = data.draw(st.text(st.sampled_from(SAMPLE[encoding]), min_size=1, max_size=30))
    encoded = text.encode(encoding)
    name = write(tmp_path_factory.getbasetemp(), encoded, "any.txt")
    corpus = find_corpus([name], encoding=encoding)
    split = find_split(corpus, data.draw(st.integers(0, corpus.n_bytes)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "CHUNK_BYTES", chunk)
        seen: list[bytes] = []
        chunks = [
            *read_chunks(corpus, 0, split, sized=True, watch=seen.append),
            *read_chunks(corpus, split, corpus.n_bytes, sized=True, watch=seen.append),
        ]
        plain = [*read_text(corpus, 0, split), *read_text(corpus, split, corpus.n_bytes)]
    assert b"".join(plain) == text.encode()
    assert b"".join(one.text for one in chunks) == text.encode()
    assert b"".join(seen) == encoded
    for one in chunks:
        one.text.decode()  # cut at characters
        assert one.sizes is not None
        assert int(one.sizes.sum()) == one.source_bytes
        assert one.n_replaced == 0
    if encoding not in ("utf-8", "iso2022_jp", "utf-7"):
        codec = corpus.sources[0].codec
        sizes = np.concatenate([one.sizes for one in chunks if one.sizes is not None])
        assert sizes[sizes > 0].tolist() == [len(character.encode(codec)) for character in text]
    if encoding == "utf-8":
        assert all(one.sizes is not None and (one.sizes == 1).all() for one in chunks)


@settings(max_examples=150, deadline=None)
@given(
    data=st.lists(
        st.sampled_from([b"a", b"\xe7", b"\xb4", b"\x85", b"\xf0\x9f", b"\x90\x99", b"\xed\xa0", b"\xff"])
    ),
    chunk=st.integers(1, 7),
    encoding=st.sampled_from(["utf-8", "gb18030", "shift_jis", "cp1252", "utf-16-le"]),
)
def test_replacing_is_pythons_own_in_any_pieces(
    tmp_path_factory: pytest.TempPathFactory, data: list[bytes], chunk: int, encoding: str
) -> None:
    joined = b"".join(data)
    assume(joined)
    name = write(tmp_path_factory.getbasetemp(), joined, "bad.txt")
    corpus = find_corpus([name], encoding=encoding, errors="replace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "CHUNK_BYTES", chunk)
        chunks = list(read_chunks(corpus, 0, len(joined), sized=True))
    assert b"".join(one.text for one in chunks).decode() == joined.decode(encoding, "replace")
    assert sum(one.source_bytes for one in chunks) == len(joined)
    assert sum(int(one.sizes.sum()) for one in chunks if one.sizes is not None) == len(joined)
    if encoding == "utf-8":
        kept = joined.decode(errors="ignore").encode()
        assert sum(one.n_replaced for one in chunks) == len(joined) - len(kept)


def read_all(corpus: Corpus) -> bytes:
    return b"".join(read_text(corpus, 0, corpus.n_bytes))


@settings(max_examples=150, deadline=None)
@given(data=st.data(), encoding=st.sampled_from(ENCODINGS), chunk=st.integers(1, 9), raw=st.booleans())
def test_newlines_are_left_out_and_every_byte_keeps_its_place(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, encoding: str, chunk: int, raw: bool
) -> None:
    letters = st.sampled_from(SAMPLE[encoding] + "\n\n _")
    texts = [data.draw(st.text(letters, min_size=1, max_size=20)) for _ in range(2)]
    folder = tmp_path_factory.getbasetemp()
    names = [write(folder, text.encode(encoding), f"{i}.txt") for i, text in enumerate(texts)]
    plain = find_corpus(names, encoding=encoding, raw=raw)
    corpus = find_corpus(names, encoding=encoding, raw=raw, newlines="drop", spaces="underscore")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "CHUNK_BYTES", chunk)
        as_it_is = list(read_chunks(plain, 0, plain.n_bytes, sized=True))
        chunks = list(read_chunks(corpus, 0, corpus.n_bytes))
        joined = read_all(corpus)
    before, text = read_all(plain), b"".join(one.text for one in chunks)
    assert text == joined == before.replace(b"\n", b"").replace(b" ", b"_")
    assert all(one.text for one in chunks)
    # Where each byte ends in the files, newlines included, by the sizes of the text as it is.
    ends = np.cumsum(np.concatenate([one.sizes for one in as_it_is if one.sizes is not None]))
    kept = [end for byte, end in zip(before, ends.tolist(), strict=True) if byte != 10]
    sizes = [size for one in chunks if one.sizes is not None for size in one.sizes.tolist()]
    left_out = [n for one in chunks if one.left_out is not None for n in one.left_out.tolist()]
    assert (np.cumsum(sizes) + np.cumsum(left_out)).tolist() == kept
    assert [one.source_bytes for one in chunks] == [
        one.sizes.sum() for one in chunks if one.sizes is not None
    ]
    assert sum(one.read_bytes for one in chunks) == (kept[-1] if kept else 0)


def test_of_a_windows_line_end_the_carriage_return_stays(tmp_path: Path) -> None:
    name = write(tmp_path, b"a b\r\nc_d\r\n\n")
    corpus = find_corpus([name], newlines="drop")
    assert read_all(corpus) == b"a b\rc_d\r"
    assert read_all(find_corpus([name], spaces="underscore")) == b"a_b\r\nc_d\r\n\n"
    assert read_all(find_corpus([name], newlines="eos")) == Path(name).read_bytes()
    found = run_survey(corpus, valid_fraction=0)
    assert found.notices == (f"{name}: 2 carriage returns are kept as characters",)
    assert (found.n_bytes, found.n_characters, found.alphabet_size) == (11, 8, 7)
    assert "\n" not in found.alphabet
    # Among words that white space separates they are white space.
    assert run_survey(find_corpus([name], newlines="eos"), valid_fraction=0).notices == ()


def test_a_split_is_a_byte_of_the_file_whatever_is_left_out(tmp_path: Path) -> None:
    name = write(tmp_path, b"ab\n\n\n\ncd\n\n")
    for newlines in ("keep", "drop"):
        corpus = find_corpus([name], newlines=newlines)
        assert find_split(corpus, 4) == 4
        assert run_survey(corpus, valid_fraction=0.6).split_at == 4
    assert b"".join(read_text(corpus, 4, 10)) == b"cd"
    assert list(read_text(find_corpus([name], newlines="drop"), 2, 6)) == []


def test_text_of_a_prompt_is_converted_as_files_are() -> None:
    assert convert(b"a b\r\nc_\n", "keep", "keep") == b"a b\r\nc_\n"
    assert convert(b"a b\r\nc_\n", "eos", "keep") == b"a b\r\nc_\n"
    assert convert(b"a b\r\nc_\n", "drop", "underscore") == b"a_b\rc_"


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=20))
def test_complete_utf8_waits_for_cut_characters_only(text: str) -> None:
    data = text.encode()
    for stop in range(len(data) + 1):
        cut = complete_utf8(data[:stop])
        assert data[:cut].decode() == data[:stop].decode(errors="ignore")


def test_memory_does_not_grow_with_a_line(tmp_path: Path) -> None:
    name = write(tmp_path, "紅x".encode() * (1 << 20))
    largest = max(len(chunk) for chunk in read_text(find_corpus([name]), 0, 4 << 20))
    assert largest <= (1 << 20) + 3


# The split


@settings(max_examples=150, deadline=None)
@given(data=st.data(), encoding=st.sampled_from(ENCODINGS))
def test_a_split_stands_at_a_character_and_is_the_same_for_raw_bytes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, encoding: str
) -> None:
    text = data.draw(st.text(st.sampled_from(SAMPLE[encoding]), min_size=1, max_size=30))
    name = write(tmp_path_factory.getbasetemp(), text.encode(encoding), "split.txt")
    corpus, raw = (find_corpus([name, name], encoding=encoding, raw=raw) for raw in (False, True))
    wanted = data.draw(st.integers(0, corpus.n_bytes))
    split = find_split(corpus, wanted)
    assert wanted <= split <= corpus.n_bytes
    assert find_split(raw, wanted) == split
    assert split <= wanted + 4 or encoding in ("utf-7", "iso2022_jp") or split == corpus.n_bytes
    halves = [b"".join(read_text(corpus, *ends)).decode() for ends in ((0, split), (split, corpus.n_bytes))]
    assert "".join(halves) == text * 2
    if encoding == "utf-8" and split < corpus.n_bytes - 1:
        assert not any((text * 2).encode()[wanted:split].decode(errors="ignore"))


@settings(max_examples=50, deadline=None)
@given(data=st.binary(min_size=1, max_size=20), wanted=st.integers(0, 20))
def test_bytes_that_are_no_text_are_split_too(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, wanted: int
) -> None:
    name = write(tmp_path_factory.getbasetemp(), data, "split.bin")
    corpus = find_corpus([name], raw=True, packed="keep")
    split = find_split(corpus, min(wanted, len(data)))
    assert min(wanted, len(data)) <= split <= len(data)
    assert len(data) - split != 1 or wanted == 0
    assert b"".join(read_text(corpus, 0, split)) + b"".join(read_text(corpus, split, len(data))) == data


def test_the_held_out_part_is_the_last_twentieth_at_most_5_mb() -> None:
    assert held_out_start(1000, 0.05) == 950
    assert held_out_start(1_115_394, 0.05) == 1_115_394 - 55_769
    assert held_out_start(100_000_000, 0.05) == 95_000_000
    assert held_out_start(3_000_000_000, 0.05) == 2_995_000_000
    assert held_out_start(3_000_000_000, 0.1, None) == 2_700_000_000
    assert [held_out_start(n, 0.05) for n in (1, 2, 39)] == [1, 2, 39]
    assert held_out_start(40, 0.05) == 38
    assert held_out_start(1000, 0.0) == 1000


# The survey


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60))
def test_a_survey_counts_the_training_part(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    name = write(tmp_path_factory.getbasetemp(), text.encode(), "survey.txt")
    corpus = find_corpus([name])
    found = run_survey(corpus, valid_fraction=0.3)
    training = b"".join(read_text(corpus, 0, found.split_at)).decode()
    assert found.alphabet == Counter(training)
    assert list(found.alphabet.values()) == sorted(found.alphabet.values(), reverse=True)
    assert found.n_characters == len(training)
    assert found.alphabet_size == len(set(training))
    assert found.has_text == (not training.isspace() and bool(training))
    assert (found.n_bytes, found.n_train_bytes) == (len(text.encode()), found.split_at)


def test_a_survey_tells_how_far_it_is(tmp_path: Path, small_chunks: Callable[[int], None]) -> None:
    small_chunks(10)
    events = list(survey(find_corpus([write(tmp_path, b"x" * 100)])))
    assert [one.done_bytes for one in events if isinstance(one, Progress)] == [*range(10, 91, 10), 95, 100]
    assert {(one.stage, one.total_bytes) for one in events if isinstance(one, Progress)} == {("reading", 100)}


def test_of_raw_bytes_nothing_is_known(tmp_path: Path) -> None:
    found = run_survey(find_corpus([write(tmp_path, bytes(range(256)) * 4)], raw=True))
    assert (found.n_characters, found.alphabet, found.split_at) == (None, {}, 973)


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("Once upon a time", "latin"),
        ("紅樓夢, chapter I", "latin"),
        ("紅樓夢第一回 (I)", "cjk"),
        ("これは日本語", "cjk"),
        ("한국어 텍스트", "hangul"),
        ("Война и мир", "cyrillic"),
        ("ثلاثة", "arabic"),
        ("ภาษาไทย", "thai"),
        ("123 .,\n", "none"),
    ],
)
def test_scripts_are_told_by_their_letters(text: str, script: str) -> None:
    assert guess_script(Counter(text)) == script


# Files that change meanwhile


def test_a_file_that_shrinks_is_refused_and_one_that_grows_is_said(tmp_path: Path) -> None:
    name = write(tmp_path, b"0123456789")
    corpus = find_corpus([name])
    assert check_unchanged(corpus) == ()
    write(tmp_path, b"0123456789abc")
    assert check_unchanged(corpus) == (f"{name}: changed while it was read; its first 10 bytes are used",)
    assert b"".join(read_text(corpus, 0, 10)) == b"0123456789"
    write(tmp_path, b"0123")
    for call in (lambda: check_unchanged(corpus), lambda: list(read_text(corpus, 0, 10))):
        with pytest.raises(UserError) as caught:
            call()
        assert str(caught.value) == (
            f"{name}: became shorter while it was read; got 4 bytes, had 10; "
            "start again when nothing writes to it"
        )
    Path(name).unlink()
    for call in (lambda: check_unchanged(corpus), lambda: list(read_text(corpus, 0, 10))):
        with pytest.raises(UserError) as caught:
            call()
        assert str(caught.value) == f"{name}: cannot be read; no such file or directory"
