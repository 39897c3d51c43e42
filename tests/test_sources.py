"""Text comes out of any file as UTF-8, exactly, in chunks, with its origin; the rest is refused by name."""

import bz2
import codecs
import encodings.aliases
import gzip
import io
import json
import lzma
import os
import pkgutil
import re
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from txlcli import UserError
from txlcli.sources import (
    Chunk,
    Corpus,
    Progress,
    Survey,
    blocks,
    check_unchanged,
    complete_utf8,
    convert,
    decoding,
    documents,
    find_corpus,
    find_encoding,
    find_marks,
    find_place,
    find_split,
    guess_script,
    held_out_start,
    read_chunks,
    read_text,
    search_corpus,
    survey,
    unpack,
)
from txlcli.sources.unpack import Damaged

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


KNOWN_CODECS = {
    codecs.lookup(name).name
    for name in set(encodings.aliases.aliases.values()) - {"mbcs", "oem"}
    if not name.endswith("_codec") and name != "rot_13"
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
    return lambda n: monkeypatch.setattr(blocks, "BLOCK_BYTES", n)


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
        ("pipe", "is a named pipe, not a file; give - and send its text to standard input"),
        ("empty.txt", "is empty; give a file with some text"),
        ("folder", "no text in this folder; it is empty"),
        ("binary", f"no text in this folder; skipped {tmp_path}/binary/x.bin (binary: it holds NUL bytes)"),
    ):
        with pytest.raises(UserError) as caught:
            find_corpus([f"{tmp_path}/{name}"])
        assert str(caught.value) == f"{tmp_path}/{name}: {text}"
    with pytest.raises(UserError, match=r"^/dev/zero: is a device, not a file; give - and send its text"):
        find_corpus(["/dev/zero"])
    with pytest.raises(UserError, match=r"^'a\\x00b': cannot be read; a name cannot hold a NUL byte$"):
        find_corpus(["a\0b"])
    with pytest.raises(UserError, match=r"^no text is named; give files, a folder, or `-` for stdin"):
        find_corpus([])
    with pytest.raises(UserError, match=r"^-: stdin cannot be read here; give a file$"):
        find_corpus(["-"])


def test_a_file_whose_size_is_not_told_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As Linux does it of what is no file on a disk: in /proc all are empty, in /sys all have 4,096 bytes.
    name = write(tmp_path, b"some text\n", "a b.txt")
    real_stat, real_fstat = Path.stat, os.fstat
    for n_told in (0, 4096):

        def told(status: os.stat_result, n_told: int = n_told) -> os.stat_result:
            return os.stat_result((*status[:6], n_told, *status[7:]))

        with monkeypatch.context() as patch:
            patch.setattr(Path, "stat", lambda path, told=told, **options: told(real_stat(path, **options)))
            patch.setattr(os, "fstat", lambda fd, told=told: told(real_fstat(fd)))
            with pytest.raises(UserError) as caught:
                find_corpus([name])
            assert str(caught.value) == (
                f"{name}: the system does not tell its size; got {n_told:,} bytes, could read 10; "
                f"give - and send its text to standard input: cat '{name}' | txl train -"
            )
            with pytest.raises(UserError, match=r"b\.txt \(the system does not tell its size\)$"):
                find_corpus([str(tmp_path)])
    if Path("/proc/cpuinfo").exists():
        with pytest.raises(
            UserError, match=r"^/proc/cpuinfo: the system does not tell its size; got 0 bytes, "
        ):
            find_corpus(["/proc/cpuinfo"])


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
        ("uft-8", "--encoding: must be an encoding; got `uft-8`; did you mean `utf-8`?"),
        (
            "base64",
            "--encoding: must be an encoding; got `base64`; for example utf-8, utf-16, cp1252, gb18030",
        ),
        ("", "--encoding: must be an encoding; got ``; for example utf-8, utf-16, cp1252, gb18030"),
        (
            "zzzzzz",
            "--encoding: must be an encoding; got `zzzzzz`; for example utf-8, utf-16, cp1252, gb18030",
        ),
    ):
        with pytest.raises(UserError) as caught:
            find_encoding(name)
        assert str(caught.value) == text
    # Python has it on Windows alone.
    assert "mbcs" in encodings.aliases.aliases.values()
    if sys.platform != "win32":
        with pytest.raises(UserError, match=r"; got `mbcs`; (?!did you mean `mbcs`)"):
            find_encoding("mbcs")
    assert [find_encoding(name) for name in ("UTF8", "utf-8-sig", "latin1", "GBK", "utf-16")] == [
        "utf-8",
        "utf-8",
        "iso8859-1",
        "gbk",
        "utf-16",
    ]


def test_encodings_that_are_read_otherwise_in_other_pieces_are_refused() -> None:
    unstreamed = set()
    for module in pkgutil.iter_modules(encodings.__path__):
        with suppress(LookupError, UserError, UnicodeError):
            codec = codecs.lookup(module.name).name
            b"a".decode(codec)
            for text in ("ab\n", "é紅b\n", "ａ日本\n", "я один\n"):
                for data in (rb"\0444 ", text.encode(codec, "ignore")):
                    if any(in_pieces(data, codec, n) != data.decode(codec, "replace") for n in (1, 2, 3)):
                        unstreamed.add(codec)
    # These two go by a mark at the start, or else by the machine, and are read by that.
    assert unstreamed - {"utf-16", "utf-32"} == {"punycode", "unicode-escape"}
    for codec in ("punycode", "unicode_escape"):
        with pytest.raises(UserError) as caught:
            find_encoding(codec)
        assert str(caught.value) == (
            f"--encoding: {codec.replace('_', '-')} cannot be read in pieces, as texts are; got `{codec}`; "
            "convert the text to utf-8 first"
        )


def in_pieces(data: bytes, codec: str, n: int) -> str | None:
    decoder = codecs.getincrementaldecoder(codec)("replace")
    try:
        return "".join(decoder.decode(data[i : i + n], i + n >= len(data)) for i in range(0, len(data), n))
    except UnicodeError:
        return None


OTHERWISE = "train with --encoding-errors replace or --tokenizer byte"
REMEDY = f"name its encoding (is it cp1252? --encoding cp1252), or {OTHERWISE}"
RENAME = f"mend these bytes, name another encoding with --encoding, or {OTHERWISE}"


@pytest.mark.parametrize(
    ("data", "encoding", "fault"),
    [
        (b"caf\xe9 na\x92ve\n" * 300, "utf-8", f"not utf-8 at byte 3, line 1; got 0xe9; {REMEDY}"),
        (b"a\nb\n\xff", "utf-8", f"not utf-8 at byte 4, line 3; got 0xff; {REMEDY}"),
        (
            b"a\n\xe7\xb4",
            "utf-8",
            f"not utf-8 at byte 2, line 2; got 0xe7 0xb4 at its end, which is no whole character; {REMEDY}",
        ),
        (b"\xed\xa0\x80", "utf-8", f"not utf-8 at byte 0, line 1; got 0xed; {REMEDY}"),
        (b"ab\xff\n", "gb18030", f"not gb18030 at byte 2, line 1; got 0xff; {RENAME}"),
        (b"ab\n\x81c", "cp1252", f"not cp1252 at byte 3, line 2; got 0x81; {RENAME}"),
        (
            "ab\n".encode("utf-16-le") + b"a",
            "utf-16-le",
            f"not utf-16-le at byte 6, line 2; got 0x61 at its end, which is no whole character; {RENAME}",
        ),
        (
            "ab\n".encode("utf-16-le") + b"a",
            "utf-16",
            "not utf-16 (little-endian, as it has no byte-order mark) at byte 6, line 2; "
            f"got 0x61 at its end, which is no whole character; {RENAME}",
        ),
        (
            codecs.BOM_UTF16_BE + "ab\n".encode("utf-16-be") + b"a",
            "utf-16",
            "not utf-16 (big-endian, by its byte-order mark) at byte 8, line 2; got 0x61 at its end, which "
            f"is no whole character; the rest looks like utf-16: mend these bytes, or {OTHERWISE}",
        ),
        (
            "紅樓夢，曹雪芹，高鶚著。\n".encode() + b"caf\xe9\n",
            "utf-8",
            "not utf-8 at byte 40, line 2; got 0xe9; "
            f"the rest looks like utf-8: mend these bytes, or {OTHERWISE}",
        ),
        (
            b"\x1f\x8b\x08\0",
            "utf-8",
            "not utf-8 at byte 1, line 1; got 0x8b; "
            "it looks like a gzip file: leave out --packed keep, or train with --tokenizer byte",
        ),
        (
            b"\x1f\x8b\x07\0",
            "utf-8",
            "not utf-8 at byte 1, line 1; got 0x8b; "
            "it looks like a gzip file: unpack it first, or train with --tokenizer byte",
        ),
        (
            b"%PDF-1.4 \xff",
            "utf-8",
            "not utf-8 at byte 9, line 1; got 0xff; "
            "it looks like a PDF: extract its text first, or train with --tokenizer byte",
        ),
        *(
            (
                "紅".encode(family),
                "utf-8",
                f"not utf-8 at byte 0, line 1; got 0xff; it looks like {family}: use --encoding {family}",
            )
            for family in ("utf-16", "utf-32")
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


# In each script, one sentence or two, and by which codec it is written; None: nothing is guessed.
LIKELY = [
    ("人工智能是计算机科学的一个分支，它企图了解智能的实质，并生产出一种新的机器。", "gb18030", "gb18030"),
    ("這是一個關於語言模型的故事，我們在學校裡讀過許多書，也寫過許多文章。", "big5", "big5"),
    ("吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。", "shift_jis", "shift_jis"),
    ("吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。", "euc_jp", "euc_jp"),
    ("동해물과 백두산이 마르고 닳도록 하느님이 보우하사 우리나라 만세.", "euc_kr", "euc_kr"),
    (
        "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему.",
        "cp1251",
        "cp1251",
    ),
    (
        "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему.",
        "koi8-r",
        "koi8-r",
    ),
    (
        "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему.",
        "cp866",
        None,
    ),
    ("Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια.", "cp1253", None),
    ("כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם.", "cp1255", None),
    ("Tous les êtres naissent égaux. Été à Noël, ça où déjà, façon, élève, forêt, où.", "cp1252", None),
    ("Åsa åt än ärtor på ön, så är det när våren går över ängen, två små grå räv.", "cp1252", None),
    ("plain text in a wide encoding, naïve", "utf-16-le", "utf-16-le"),
    ("plain text in a wide encoding, naïve", "utf-16-be", "utf-16-be"),
    ("plain text in a wide encoding, naïve", "utf-32-le", "utf-32-le"),
    ("plain text in a wide encoding, naïve", "utf-32-be", "utf-32-be"),
]


@pytest.mark.parametrize(("text", "codec", "guess"), LIKELY)
def test_the_encoding_that_bytes_look_like_is_suggested(
    tmp_path: Path, text: str, codec: str, guess: str | None
) -> None:
    # Far into the file, behind text that tells nothing, after half a line.
    start = "" if codec.startswith("utf") else "plain text\n" * 1000 + "more "
    name = write(tmp_path, (start + text * 50).encode(codec))
    with pytest.raises(UserError) as caught:
        run_survey(find_corpus([name]))
    remedy = f"it may be {guess}: try --encoding {guess}, or {OTHERWISE}" if guess else REMEDY
    assert str(caught.value).endswith(f"; {remedy}")
    if guess:
        run_survey(find_corpus([name], encoding=guess))


def test_what_a_decoder_cannot_replace_is_refused(tmp_path: Path) -> None:
    name = write(tmp_path, b"ab\n\x1b$\xdf9\x04!#\x1b(B")
    with pytest.raises(UserError) as caught:
        run_survey(find_corpus([name], encoding="iso2022_jp", errors="replace"))
    assert str(caught.value) == (
        f"{name}: not iso2022_jp after byte 0; got pending buffer overflow; convert it to utf-8 first"
    )


def test_utf8_named_otherwise_is_suggested(tmp_path: Path) -> None:
    name = write(tmp_path, "naïve café à la carte, señor; été, œuvre, Größe, füße ñ\n".encode() * 3)
    for encoding in ("ascii", "shift_jis"):
        with pytest.raises(
            UserError, match=f": not {encoding} at .*; it may be utf-8: try --encoding utf-8, or "
        ):
            run_survey(find_corpus([name], encoding=encoding))


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
    names = [write(tmp_path, data, name) for name, data in (("b", b"one"), ("a", b"two"), ("c", b"one"))]
    corpus = find_corpus(names)
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
    again = r"^-: standard input can be named once; got it 2 times; name it once$"
    with pytest.raises(UserError, match=again):
        find_corpus(["-", "a.txt", "-"], stdin_copy=tmp_path / "again.txt")


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
        f"{name}: 3 carriage returns in the training text are kept as characters",
        f"{name}: 3 NUL bytes in the training text are kept as characters",
    )
    assert found.n_replaced == 200


@pytest.mark.parametrize("raw", [False, True])
def test_bytes_that_are_no_text_in_lines_of_json_are_for_no_tokenizer(tmp_path: Path, raw: bool) -> None:
    name = write(tmp_path, b'{"text": "caf\xe9"}\n')
    corpus = find_corpus([name], text_field="text", raw=raw)
    with pytest.raises(UserError, match=r": not utf-8 at byte 13, .*--encoding-errors replace$"):
        list(read_text(corpus, 0, corpus.n_bytes))


def test_escapes_into_another_alphabet_are_told(tmp_path: Path) -> None:
    name = write(tmp_path, "吾輩は猫である。\n".encode("iso2022_jp"))
    assert run_survey(find_corpus([name])).notices == (
        f"{name}: its escape characters look like iso2022_jp: try --encoding iso2022_jp",
    )
    assert run_survey(find_corpus([name], encoding="iso2022_jp")).notices == ()
    assert run_survey(find_corpus([write(tmp_path, b"\x1b[31mred\x1b[m\n")])).notices == ()


def test_an_order_of_bytes_that_nothing_names_is_told(tmp_path: Path) -> None:
    text = "hello мир\n"
    name = write(tmp_path, text.encode("utf-16-be"))
    order = sys.byteorder
    assert run_survey(find_corpus([name], encoding="utf-16")).notices[-1] == (
        f"{name}: {order}-endian, as it has no byte-order mark; its bytes may be in the other order"
    )
    assert run_survey(find_corpus([name], encoding="utf-16-be")).notices == ()
    marked = write(tmp_path, text.encode("utf-16"))
    assert all("endian" not in text for text in run_survey(find_corpus([marked], encoding="utf-16")).notices)
    # Bytes are read in no order, with a mark or without.
    for one in (name, marked):
        assert run_survey(find_corpus([one], encoding="utf-16", raw=True)).notices == ()


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_text_that_is_wide_and_ascii_is_told_by_its_nul_bytes(tmp_path: Path, encoding: str) -> None:
    name = write(tmp_path, ("Plain text of many words.\n" * 4).encode(encoding))
    (notice,) = run_survey(find_corpus([name])).notices
    assert notice.endswith(f" are kept as characters; it may be {encoding}: try --encoding {encoding}")


def test_what_is_counted_in_the_training_text_is_said_of_it(tmp_path: Path) -> None:
    names = [write(tmp_path, b"ab\r\n" + b"cd\n" * 60, "a"), write(tmp_path, b"ef\r\n" * 60, "b")]
    found = run_survey(find_corpus(names), valid_fraction=0.5)
    n_counted = (found.split_at - 184) // 4 + 1
    assert 0 < n_counted < 61
    assert found.notices == (
        f"{names[0]} and 1 more: {n_counted} carriage returns in the training text are kept as characters",
    )
    found = run_survey(find_corpus(names[:1]), valid_fraction=0.5)
    assert found.notices == (f"{names[0]}: 1 carriage return in the training text is kept as a character",)


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
        patch.setattr(blocks, "BLOCK_BYTES", chunk)
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
        patch.setattr(blocks, "BLOCK_BYTES", chunk)
        chunks = list(read_chunks(corpus, 0, len(joined), sized=True))
    assert b"".join(one.text for one in chunks).decode() == joined.decode(encoding, "replace")
    assert sum(one.source_bytes for one in chunks) == len(joined)
    assert sum(int(one.sizes.sum()) for one in chunks if one.sizes is not None) == len(joined)
    if encoding == "utf-8":
        kept = joined.decode(errors="ignore").encode()
        assert sum(one.n_replaced for one in chunks) == len(joined) - len(kept)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-be", "utf-32-le", "gb18030", "utf-7"])
def test_a_replacement_character_of_the_file_is_text(
    tmp_path: Path, small_chunks: Callable[[int], None], encoding: str
) -> None:
    text = "a\ufffdb\ufffd\ufffdc\n" * 3
    name = write(tmp_path, text.encode(encoding))
    corpus = find_corpus([name], encoding=encoding, errors="replace")
    for n in (3, 4, 1 << 20):
        small_chunks(n)
        found = run_survey(corpus)
        assert (found.n_replaced, found.alphabet["\ufffd"]) == (0, 9)
        assert not any("U+FFFD" in notice for notice in found.notices)
    if encoding == "utf-7":
        return
    wrong = {"utf-8": b"\xff", "gb18030": b"\xff", "utf-32-le": b"\xff" * 4}.get(encoding, b"\xdc\xdc")
    Path(name).write_bytes(Path(name).read_bytes() + wrong + text.encode(corpus.sources[0].codec))
    corpus = find_corpus([name], encoding=encoding, errors="replace")
    for n in (3, 4, 1 << 20):
        small_chunks(n)
        assert run_survey(corpus).n_replaced == len(wrong)


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
        patch.setattr(blocks, "BLOCK_BYTES", chunk)
        as_it_is = list(read_chunks(plain, 0, plain.n_bytes, sized=True))
        chunks = list(read_chunks(corpus, 0, corpus.n_bytes, sized=True))
        unsized = list(read_chunks(corpus, 0, corpus.n_bytes))
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
    for total in ("source_bytes", "read_bytes"):
        assert sum(getattr(one, total) for one in unsized) == sum(getattr(one, total) for one in chunks)


def test_of_a_windows_line_end_the_carriage_return_stays(tmp_path: Path) -> None:
    name = write(tmp_path, b"a b\r\nc_d\r\n\n")
    corpus = find_corpus([name], newlines="drop")
    assert read_all(corpus) == b"a b\rc_d\r"
    assert read_all(find_corpus([name], spaces="underscore")) == b"a_b\r\nc_d\r\n\n"
    assert read_all(find_corpus([name], newlines="eos")) == Path(name).read_bytes()
    found = run_survey(corpus, valid_fraction=0)
    assert found.notices == (f"{name}: 2 carriage returns in the training text are kept as characters",)
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


def test_marks_are_found_between_two_bytes(tmp_path: Path) -> None:
    mark = codecs.BOM_UTF8
    for name, data in (("1", mark + b"abc"), ("2", b"de"), ("3", mark + b"f")):
        (tmp_path / name).write_bytes(data)
    names = [str(tmp_path / name) for name in "123"]
    corpus = find_corpus(names)
    assert find_marks(corpus, 0, 12) == ((0, 3), (5, 3))
    assert find_marks(corpus, 2, 10) == ((0, 1), (5, 2))
    assert find_marks(corpus, 3, 8) == ()
    assert find_marks(find_corpus(names, raw=True), 0, 12) == ()


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
    other = write(tmp_path_factory.getbasetemp(), text.encode(encoding), "split_too.txt")
    corpus, raw = (find_corpus([name, other], encoding=encoding, raw=raw) for raw in (False, True))
    wanted = data.draw(st.integers(0, corpus.n_bytes))
    split = find_split(corpus, wanted)
    assert wanted <= split <= corpus.n_bytes
    assert find_split(raw, wanted) == split
    assert split <= wanted + 4 or encoding in ("utf-7", "iso2022_jp") or split == corpus.n_bytes
    halves = [b"".join(read_text(corpus, *ends)).decode() for ends in ((0, split), (split, corpus.n_bytes))]
    assert "".join(halves) == text * 2
    if encoding == "utf-8" and split < corpus.n_bytes - 1:
        assert not any((text * 2).encode()[wanted:split].decode(errors="ignore"))


@settings(max_examples=200, deadline=None)
@given(
    data=st.lists(
        st.sampled_from(
            [
                b"a",
                b"\n",
                b" ",
                b"\x30",
                b"\x81\x30",
                b"\x81",
                b"\xd8",
                b"\xdc",
                b"\xe7\xb4\x85",
                b"\x8f",
                b"\xa4",
            ]
        ),
        min_size=1,
        max_size=30,
    ),
    encoding=st.sampled_from(sorted(filter(decoding.is_stateless, KNOWN_CODECS))),
    anchor=st.sampled_from([2, 7, 1 << 16]),
    wanted=st.integers(0, 60),
)
def test_where_an_encoding_has_no_state_the_end_is_read_without_the_beginning(
    tmp_path_factory: pytest.TempPathFactory, data: list[bytes], encoding: str, anchor: int, wanted: int
) -> None:
    joined = b"".join(data)
    name = write(tmp_path_factory.getbasetemp(), joined, "any.txt")
    corpus = find_corpus([name], encoding=encoding, errors="replace")
    assume(corpus.sources[0].codec != "utf-8" and not corpus.sources[0].n_mark)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "_ANCHOR_BYTES", anchor)
        split = find_split(corpus, wanted)
        patch.setattr(decoding, "_certain_start", lambda *_: 0)
        assert find_split(corpus, wanted) == split
    halves = [b"".join(read_text(corpus, *ends)).decode() for ends in ((0, split), (split, len(joined)))]
    assert "".join(halves) == joined.decode(corpus.sources[0].codec, "replace")


# After bytes that are no text a decoder waits for more than it needs: a newline may be among them.
WAITED_FOR = [
    ("euc_jp", "8f0a8e0a"),
    ("euc_jp", "a1818f0a8f8e8e8ea1"),
    ("euc_jis_2004", "8f0a8e0a8f0a"),
    ("gb18030", "a4d48f8431a4370a8e0aa141"),
    ("gb18030", "813041a1a10a81308431a437410a41"),
    ("euc_kr", "a4d441a10aa48e"),
    ("euc_kr", "0aa4d40a0a41b0a1a4d4a10a0ab0a10a41"),
    ("utf-16-le", "00d800d800dc0a0000d80a00fdff410041"),
]


@pytest.mark.parametrize(("encoding", "bytes_in_hex"), WAITED_FOR)
def test_every_byte_is_read_in_one_of_two_parts(tmp_path: Path, encoding: str, bytes_in_hex: str) -> None:
    data = bytes.fromhex(bytes_in_hex)
    name = write(tmp_path, data)
    strict, corpus = (
        find_corpus([name], encoding=encoding, errors=errors) for errors in ("strict", "replace")
    )
    by_line = find_corpus([name], encoding=encoding, errors="replace", document_separator="\n")
    n_replaced = run_survey(corpus).n_replaced
    fault = refusal_of(strict, 0, len(data))
    assert fault is not None
    splits = {find_split(one, wanted) for one in (corpus, by_line) for wanted in range(len(data))}
    for split in splits:
        ends = (0, split), (split, len(data))
        for sized in (False, True):
            parts = [list(read_chunks(corpus, *one, sized=sized)) for one in ends]
            text = b"".join(chunk.text for chunks in parts for chunk in chunks)
            assert text.decode() == data.decode(encoding, "replace")
            assert [sum(chunk.source_bytes for chunk in chunks) for chunks in parts] == [
                split,
                len(data) - split,
            ]
            assert sum(chunk.n_replaced for chunks in parts for chunk in chunks) == n_replaced
        assert fault in [refusal_of(strict, *one) for one in ends]


def refusal_of(corpus: Corpus, start: int, stop: int) -> str | None:
    try:
        list(read_text(corpus, start, stop))
    except UserError as error:
        return str(error)
    return None


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


# Packed files

WITH_STATE = ("iso2022_jp", "utf-7")
PACKERS = {"none": bytes, "gzip": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}
with_zstd = pytest.mark.skipif(find_spec("zstandard") is None, reason="zstandard is not installed")
PACKINGS = [*PACKERS, pytest.param("zstd", marks=with_zstd)]


def pack(packing: str, *members: bytes) -> bytes:
    if packing != "zstd":
        return b"".join(PACKERS[packing](member) for member in members)
    import zstandard

    compressor = zstandard.ZstdCompressor(write_checksum=True)
    # The frame between is one to be skipped.
    frames = [compressor.compress(member) for member in members]
    return b"\x50\x2a\x4d\x18\x03\0\0\0abc".join([*frames, b""]) if len(frames) > 1 else frames[0]


@contextmanager
def pieces_of(chunk: int) -> Iterator[None]:
    """Read in blocks of so many bytes, packed files too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", chunk)
        patch.setattr(documents, "CHUNK_BYTES", chunk)
        for name in ("SLICE_BYTES", "PIECE_BYTES", "ZSTD_SLICE_BYTES"):
            patch.setattr(unpack, name, chunk)
        yield


@pytest.mark.parametrize("packing", PACKINGS)
@settings(max_examples=50, deadline=None)
@given(data=st.data(), encoding=st.sampled_from(ENCODINGS), chunk=st.integers(1, 30))
def test_packed_files_are_read_as_what_they_hold(
    packing: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, encoding: str, chunk: int
) -> None:
    text = data.draw(st.text(st.sampled_from(SAMPLE[encoding]), min_size=1, max_size=300))
    encoded = text.encode(encoding)
    cut = data.draw(st.integers(0, len(encoded)))
    name = write(tmp_path_factory.getbasetemp(), pack(packing, encoded[:cut], encoded[cut:]), "packed.txt")
    corpus = find_corpus([name], encoding=encoding)
    plain = write(tmp_path_factory.getbasetemp(), encoded, "plain.txt")
    as_plain = find_corpus([plain], encoding=encoding)
    assert (corpus.sources[0].packing, corpus.n_bytes) == (packing, len(encoded))
    split = find_split(as_plain, data.draw(st.integers(0, len(encoded))))
    with pieces_of(chunk):
        assert find_split(corpus, split) == split
        seen: list[bytes] = []
        chunks = [
            one
            for ends in ((0, split), (split, len(encoded)))
            for one in read_chunks(corpus, *ends, sized=True, watch=seen.append)
        ]
    expected = list(read_chunks(as_plain, 0, len(encoded), sized=True))
    assert b"".join(seen) == encoded
    assert b"".join(one.text for one in chunks) == b"".join(one.text for one in expected)
    if encoding not in WITH_STATE:  # there a split may stand within what changes the state
        assert sizes_of(chunks) == sizes_of(expected)


def sizes_of(chunks: Iterable[Chunk]) -> list[int]:
    return [size for one in chunks if one.sizes is not None for size in one.sizes.tolist()]


@pytest.mark.parametrize("packing", PACKINGS[1:])
def test_a_packed_file_that_is_cut_or_damaged_is_refused(packing: str, tmp_path: Path) -> None:
    text = bytes(range(256)) * 3
    whole = pack(packing, text)
    for n_bytes in range(12, len(whole)):
        name = write(tmp_path, whole[:n_bytes])
        with pytest.raises(UserError) as caught:
            find_corpus([name], raw=True)
        start = f"{name}: {packing} file cut short at byte {n_bytes:,}, after "
        assert str(caught.value).startswith(start)
        assert re.fullmatch(
            "[0-9,]+ unpacked bytes; give the whole file as it was packed", str(caught.value)[len(start) :]
        )
    for at in range(12, len(whole)):
        broken = bytearray(whole)
        broken[at] ^= 0x55
        name = write(tmp_path, bytes(broken))
        with suppress(Damaged):
            assert read_all(find_corpus([name], raw=True)) == text
    # In a folder too: text that was meant to be there is missing.
    (tmp_path / "folder").mkdir()
    write(tmp_path, b"good", "folder/a.txt")
    bad = write(tmp_path, whole[:-1], "folder/b.txt")
    with pytest.raises(
        UserError, match=rf"^{re.escape(bad)}: {packing} file cut short at byte {len(whole) - 1:,}"
    ):
        find_corpus([str(tmp_path / "folder")], raw=True)
    kept = find_corpus([str(tmp_path / "folder")], raw=True, packed="keep")
    assert read_all(kept) == b"good" + whole[:-1]


@pytest.mark.parametrize("packing", PACKINGS[1:])
def test_zeros_after_a_packed_text_are_padding_and_all_else_is_not(packing: str, tmp_path: Path) -> None:
    packed = pack(packing, b"some text")
    for chunk in (1, 7, 1000):
        with pieces_of(chunk):
            padded = find_corpus([write(tmp_path, packed + bytes(100))])
            assert read_all(padded) == b"some text"
            again = find_corpus([write(tmp_path, packed + bytes(4) + packed)])
            assert read_all(again) == b"some textsome text"
            name = write(tmp_path, packed + bytes(4) + b"plain")
            with pytest.raises(UserError) as caught:
                find_corpus([name])
        assert str(caught.value) == (
            f"{name}: {packing} file damaged at byte {len(packed) + 4:,}, where another stream should begin, "
            "after 9 unpacked bytes; got 0x70 0x6c 0x61 0x69; give the whole file as it was packed"
        )


def test_a_small_packed_file_that_holds_much_takes_little_memory(tmp_path: Path) -> None:
    for pack_all in (gzip.compress, lzma.compress, bz2.compress):
        name = write(tmp_path, pack_all(bytes(5 << 20)))
        corpus = find_corpus([name], raw=True)
        fd = os.open(name, os.O_RDONLY)
        try:
            pieces = list(unpack.unpack(fd, corpus.sources[0].packing, name))
        finally:
            os.close(fd)
        assert max(len(piece.data) for piece in pieces) <= unpack.PIECE_BYTES
        assert sum(len(piece.data) for piece in pieces) == 5 << 20


def test_zstd_without_its_package_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = write(tmp_path, b"\x28\xb5\x2f\xfd rest of it")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    for path in (name, str(tmp_path)):
        with pytest.raises(UserError) as caught:
            find_corpus([path])
        assert str(caught.value) == (
            f"{name}: is packed with zstd, which needs the package zstandard (txlcli's extra zstd); "
            "install it (pip install zstandard), or unpack the file first"
        )


def test_packing_is_told_by_content_and_said(tmp_path: Path) -> None:
    named = write(tmp_path, b"no archive", "a.gz")
    packed = write(tmp_path, gzip.compress(b"\xef\xbb\xbfan archive"), "b.txt")
    write(tmp_path, gzip.compress(b"\0binary"), "c.txt")
    write(tmp_path, gzip.compress(b""), "d.txt")
    corpus = find_corpus([str(tmp_path)])
    assert read_all(corpus) == b"no archivean archive"
    assert [(one.packing, one.n_bytes, one.stored_bytes) for one in corpus.sources] == [
        ("none", 10, 10),
        ("gzip", 13, Path(packed).stat().st_size),
    ]
    assert corpus.notices == (
        f"{packed}: the leading byte-order mark is no text and is dropped",
        f"{packed} (gzip): read unpacked",
        f"{tmp_path}/c.txt (binary: it holds NUL bytes), {tmp_path}/d.txt (is empty): skipped",
    )
    raw = find_corpus([named, packed], raw=True)
    assert read_all(raw) == b"no archive\xef\xbb\xbfan archive"
    assert raw.notices == (f"{packed} (gzip): read unpacked, not byte for byte; --packed keep does",)
    kept = find_corpus([packed], raw=True, packed="keep")
    assert read_all(kept) == Path(packed).read_bytes()
    assert kept.notices == ()
    with pytest.raises(UserError, match=rf"^{re.escape(packed)}: not utf-8 at byte 1, line 1; got 0x8b"):
        run_survey(find_corpus([packed], packed="keep"))


def test_an_archive_of_files_is_no_text(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    name = write(tmp_path, packed.getvalue())
    with pytest.raises(UserError) as caught:
        find_corpus([name])
    assert str(caught.value) == f"{name}: is a tar archive; extract it and give the folder"
    assert find_corpus([name], raw=True).n_bytes == 10240
    write(tmp_path, b"text", "b.txt")
    assert find_corpus([str(tmp_path)]).notices == (f"{name} (is a tar archive): skipped",)
    with zipfile.ZipFile(name, "w") as zipped:
        zipped.writestr("a.txt", "text")
    with pytest.raises(UserError) as caught:
        find_corpus([name])
    assert str(caught.value) == f"{name}: is a zip archive; extract it and give the folder"
    assert find_corpus([str(tmp_path)]).notices == (f"{name} (is a zip archive): skipped",)
    # Lines of JSON are text for every tokenizer.
    with pytest.raises(UserError, match=r"is a zip archive; extract it and give the folder$"):
        find_corpus([name], raw=True, text_field="text")


def test_what_is_binary_is_no_lines_of_json_for_any_tokenizer(tmp_path: Path) -> None:
    lines = write(tmp_path, b'{"text": "a"}\n', "a.jsonl")
    picture = write(tmp_path, b"\x89PNG\r\n\x1a\n\0\0", "pic.png")
    for raw in (False, True):
        corpus = find_corpus([str(tmp_path)], raw=raw, text_field="text")
        assert corpus.files == (Path(lines),)
        assert corpus.skipped == ((Path(picture), "binary: it holds NUL bytes"),)
    assert find_corpus([str(tmp_path)], raw=True).files == (Path(lines), Path(picture))


def test_the_place_in_a_packed_file_is_one_of_what_it_holds(tmp_path: Path) -> None:
    name = write(tmp_path, gzip.compress(b"good\n" * 500 + b"ab\xff"))
    with pytest.raises(UserError) as caught:
        run_survey(find_corpus([name]))
    assert str(caught.value) == f"{name} (unpacked): not utf-8 at byte 2502, line 501; got 0xff; {REMEDY}"
    assert find_place(find_corpus([name]), 5, 500, 7) == (f"{name} (unpacked)", "byte 12")


def test_unpacking_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txlcli.sources.search.CHUNK_BYTES", 1 << 20)
    name = write(tmp_path, lzma.compress(os.urandom(3 << 20)))
    *progress, corpus = search_corpus([name], raw=True)
    assert isinstance(corpus, Corpus)
    places = [one.done_bytes for one in progress if isinstance(one, Progress)]
    assert len(places) == 2
    assert places == sorted(places)
    assert {(one.stage, one.total_bytes) for one in progress if isinstance(one, Progress)} == {
        (f"unpacking {name}", Path(name).stat().st_size)
    }


def count_unpacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of all pieces that are unpacked from now on, in bytes."""
    sizes, real = list[int](), unpack.unpack

    def counted(*args: Any) -> Iterator[unpack.Piece]:
        for piece in real(*args):
            sizes.append(len(piece.data))
            yield piece

    monkeypatch.setattr(unpack, "unpack", counted)
    return sizes


def test_a_packed_file_is_unpacked_once_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"KEPT_BYTES": 30_000, "PIECE_BYTES": 1000, "SLICE_BYTES": 200}.items():
        monkeypatch.setattr(unpack, name, size)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 5000)
    unpacked = count_unpacked(monkeypatch)
    text = b"".join(b"document %d \xe7\xb4\x85 of some words\n" % number for number in range(8000))
    name = write(tmp_path, gzip.compress(text[:1000]) + gzip.compress(text[1000:]))
    most = len(text) + unpack.PIECE_BYTES
    for rule in ({}, {"document_separator": "\n"}):
        unpacked.clear()
        corpus = find_corpus([name], **rule)
        assert sum(unpacked) == corpus.n_bytes == len(text) > 8 * unpack.KEPT_BYTES
        # Where the held-out text begins is known from what the first pass has kept.
        found = run_survey(corpus)
        assert len(text) < sum(unpacked) <= len(text) + most
        before = sum(unpacked)
        n_valid = len(text) - found.split_at
        assert sum(one.read_bytes for one in read_chunks(corpus, found.split_at, len(text))) == n_valid
        next(read_chunks(corpus, found.split_at, len(text)))
        assert sum(unpacked) == before
        # What looked at the beginning only is gone on with.
        next(read_chunks(corpus, 0, found.split_at))
        assert sum(unpacked) <= before + 4 * blocks.BLOCK_BYTES
        for start, stop in ((0, found.split_at), (found.split_at, len(text))):
            assert sum(one.read_bytes for one in read_chunks(corpus, start, stop)) == stop - start
        assert sum(unpacked) <= before + most
    # A small one is unpacked once in all.
    monkeypatch.setattr(unpack, "KEPT_BYTES", 1 << 20)
    unpacked.clear()
    corpus = find_corpus([name], text_field=None, encoding="gb18030", errors="replace")
    run_survey(corpus)
    assert sum(unpacked) == len(text)
    # Each read has its own place.
    both = [read_text(corpus, start, len(text)) for start in (0, 0)]
    assert b"".join(one for pair in zip(*both, strict=True) for one in pair[:1]) == read_all(corpus)


def test_a_packed_file_that_changes_is_said(tmp_path: Path) -> None:
    name = write(tmp_path, gzip.compress(b"0123456789"))
    corpus = find_corpus([name])
    with Path(name).open("ab") as file:
        file.write(gzip.compress(b"more"))
    assert read_all(corpus) == b"0123456789"
    assert check_unchanged(corpus) == (
        f"{name}: changed while it was read; its first 10 unpacked bytes are used",
    )
    write(tmp_path, gzip.compress(b"012") + bytes(100))
    with pytest.raises(UserError, match=rf"^{re.escape(name)}: became shorter while it was read; "):
        read_all(corpus)


# Which files of a folder


def test_patterns_choose_files_by_their_path_within_the_folder(tmp_path: Path) -> None:
    for path in ("a.txt", "b.md", "drafts/c.txt", "books/one.txt", "books/drafts/d.txt", "books/[x].txt"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(path.encode() + b"\n")

    def chosen(**patterns: Any) -> list[str]:
        corpus = find_corpus([str(tmp_path)], **patterns)
        return [path.relative_to(tmp_path).as_posix() for path in corpus.files]

    assert chosen(include=["*.md"]) == ["b.md"]
    assert chosen(include=["*.txt"], exclude=["books"]) == ["a.txt", "drafts/c.txt"]
    assert chosen(include=["books/*"]) == ["books/[x].txt", "books/one.txt", "books/drafts/d.txt"]
    assert chosen(exclude=["drafts/", "*/drafts"]) == ["a.txt", "b.md", "books/[x].txt", "books/one.txt"]
    assert chosen(include=["?.txt", "books/[[]*"]) == ["a.txt", "books/[x].txt"]
    assert chosen(include=["*.TXT", "b*"], exclude=["*/*"]) == ["b.md"]
    skipped = dict(find_corpus([str(tmp_path)], include=["b.*"], exclude=["books"]).skipped)
    assert skipped[tmp_path / "books"] == "excluded"
    assert skipped[tmp_path / "a.txt"] == "not included"
    # What was named itself is taken.
    assert find_corpus([str(tmp_path / "a.txt")], include=["*.md"]).n_bytes == 6


def test_patterns_that_leave_no_text_are_named(tmp_path: Path) -> None:
    for name in (".hidden", "a.txt", "b.md", "c.png"):
        write(tmp_path, b"\0" if name == "c.png" else b"text", name)
    a, b, c, hidden = (f"{tmp_path}/{name}" for name in ("a.txt", "b.md", "c.png", ".hidden"))
    for include, exclude, flags, got, skipped in (
        (
            ["*.nope"],
            [],
            "--include leaves",
            "`*.nope`",
            f"{a} (not included), {b} (not included), {c} (not in",
        ),
        (
            [],
            ["*"],
            "--exclude leaves",
            "`*`",
            f"{a} (excluded), {b} (excluded), {c} (excluded) and 1 more; ",
        ),
        (
            ["*.png"],
            ["b*"],
            "--include and --exclude leave",
            "`*.png`, `b*`",
            f"{a} (not included), {b} (exc",
        ),
        (
            [],
            ["a*", "b*"],
            "--exclude leaves",
            "`a*`, `b*`",
            f"{a} (excluded), {b} (excluded), {hidden} (hid",
        ),
    ):
        with pytest.raises(UserError) as caught:
            find_corpus([str(tmp_path)], include=include, exclude=exclude)
        text = str(caught.value)
        assert text.startswith(f"{tmp_path}: {flags} no text in this folder; got {got}, skipped {skipped}")
        assert text.endswith(f" and 1 more; change the pattern{'s' * (len(include + exclude) > 1)}")
    # Only what is in this folder is told.
    write(tmp_path, b"\0", "d.png")
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match=r"other: no text in this folder; it is empty$"):
        find_corpus([str(tmp_path), f"{tmp_path}/other"])


def test_a_folder_that_may_not_be_read_is_refused_or_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, locked = write(tmp_path, b"good", "a.txt"), tmp_path / "locked"
    (locked / "inner").mkdir(parents=True)
    with monkeypatch.context() as patch:
        deny(patch, "scandir", locked)
        with pytest.raises(UserError) as caught:
            find_corpus([good, str(locked)])
        assert str(caught.value) == f"{locked}: cannot be read; permission denied"
        assert find_corpus([str(tmp_path)]).skipped == ((locked, "permission denied"),)
    # It may be listed, and nothing in it looked at.
    for name in ("lstat", "scandir"):
        deny(monkeypatch, name, locked / "inner")
    assert find_corpus([str(tmp_path)]).skipped == ((locked / "inner", "permission denied"),)


def deny(monkeypatch: pytest.MonkeyPatch, call: str, place: Path) -> None:
    """Let a call of the system fail at one place as it does without permission."""
    real = getattr(os, call)

    def refuse(path: Any, *args: Any, **options: Any) -> Any:
        if str(path) == str(place):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, call, refuse)


def test_a_file_is_read_once_however_often_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("f/sub/b.txt", "f/a.txt", "f/sub/.hidden"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)

    def check(paths: list[str], files: list[str], twice: list[str], told: str, **rules: Any) -> None:
        corpus = find_corpus(paths, **rules)
        assert corpus.files == tuple(map(Path, files))
        assert [str(path) for path, why in corpus.skipped if why == "read once, named twice"] == twice
        assert corpus.notices[-1] == f"{told}: read once, named twice"

    check(["f/a.txt", "f/a.txt", "./f/a.txt"], ["f/a.txt"], ["f/a.txt"], "f/a.txt")
    check(["f/sub/b.txt", "f"], ["f/sub/b.txt", "f/a.txt"], ["f/sub/b.txt"], "f/sub/b.txt")
    check(["f", "f/sub"], ["f/a.txt", "f/sub/b.txt"], ["f/sub/b.txt"], "f/sub/b.txt")
    again = "f/sub/../sub/b.txt"
    check(["f/sub", "f/sub/../sub/"], ["f/sub/b.txt"], [again], again)
    # What is skipped in both is told once.
    assert find_corpus(["f", "f/sub"]).skipped == (
        (Path("f/sub/.hidden"), "hidden"),
        (Path("f/sub/b.txt"), "read once, named twice"),
    )
    alone = find_corpus(["f/a.txt", "f/a.txt"], held_out=[find_corpus(["f/a.txt"])])
    assert (alone.files, alone.overlapping) == ((Path("f/a.txt"),), ("f/a.txt",))
    for i in range(4):
        Path(f"f/link{i}").symlink_to("a.txt")
    Path("f/z").hardlink_to("f/a.txt")
    twice = ["f/link0", "f/link1", "f/link2", "f/link3", "f/z"]
    check(["f"], ["f/a.txt", "f/sub/b.txt"], twice, "f/link0, f/link1, f/link2 and 2 more")
    # Held out under one name is held out under all.
    corpus = find_corpus(["f/z", "f"], held_out=[find_corpus(["f/link0"])])
    assert corpus.files == (Path("f/sub/b.txt"),)
    assert {why for _, why in corpus.skipped} == {"held out", "hidden"}


def test_files_without_numbers_are_told_apart_by_their_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [write(tmp_path, b"text", name) for name in ("a.txt", "b.txt")]
    real = Path.stat

    def unnumbered(path: Path, **options: Any) -> os.stat_result:
        status = real(path, **options)
        return os.stat_result((status.st_mode, 0, *status[2:]))

    monkeypatch.setattr(Path, "stat", unnumbered)
    corpus = find_corpus([*names, names[0]])
    assert [str(path) for path in corpus.files] == names
    assert corpus.notices == (f"{names[0]}: read once, named twice",)


def test_held_out_files_are_not_learned_from(tmp_path: Path) -> None:
    first, second = write(tmp_path, b"first", "a.txt"), write(tmp_path, b"second", "b.txt")
    (tmp_path / "c.txt").symlink_to(second)
    held_out = find_corpus([second])
    corpus = find_corpus([str(tmp_path)], held_out=[held_out])
    assert [str(path) for path in corpus.files] == [first]
    assert corpus.notices == (f"{second}, {tmp_path}/c.txt: held out, so not learned from",)
    # As a shell writes *.txt out.
    named = find_corpus([first, second], held_out=[held_out])
    assert named.files == corpus.files
    assert named.skipped == ((Path(second), "held out"),)
    assert named.notices == (f"{second}: held out, so not learned from",)
    # Where there is nothing else it was meant.
    alone = find_corpus([second], held_out=[held_out])
    assert [str(path) for path in alone.files] == [second]
    assert alone.notices == (f"{second}: is learned from and scored too, so that its scores are too good",)
    Path(tmp_path / "folder").mkdir()
    Path(tmp_path / "folder" / "d.txt").hardlink_to(second)
    with pytest.raises(UserError, match=r"no text in this folder; skipped .*d\.txt \(held out\)$"):
        find_corpus([str(tmp_path / "folder")], held_out=[held_out])
    # A folder whose text is all held out has some: what else is named is read.
    write(tmp_path, b"", "folder/.hidden")
    for paths in ([first, f"{tmp_path}/folder"], [f"{tmp_path}/folder", first]):
        corpus = find_corpus(paths, held_out=[held_out])
        assert [str(path) for path in corpus.files] == [first]
        assert corpus.notices[-1] == f"{tmp_path}/folder/d.txt: held out, so not learned from"
    # What is read after all is not told to be held out.
    corpus = find_corpus([f"{tmp_path}/folder", second], held_out=[held_out])
    assert [str(path) for path in corpus.files] == [second]
    assert {why for _, why in corpus.skipped} == {"hidden"}
    write(tmp_path, b"\0", "other.bin")
    Path(tmp_path / "binary").mkdir()
    Path(tmp_path / "other.bin").rename(tmp_path / "binary" / "other.bin")
    with pytest.raises(UserError, match=r"binary: no text in this folder; skipped .*\(binary: it holds NUL"):
        find_corpus([first, f"{tmp_path}/binary"], held_out=[held_out])


def test_names_that_are_no_single_line_are_shown_on_one(tmp_path: Path) -> None:
    name = write(tmp_path, b"ab\xff", "a\nb\x1b[31m.txt")
    shown = f"{tmp_path}/a\\nb\\x1b[31m.txt"
    corpus = find_corpus([name])
    assert corpus.name == shown
    with pytest.raises(UserError) as caught:
        run_survey(corpus)
    assert str(caught.value).startswith(f"{shown}: not utf-8 at byte 2, line 1")
    Path(name).write_bytes(b"")
    write(tmp_path, b"good", "z.txt")
    assert find_corpus([str(tmp_path)]).notices == (f"{shown} (is empty): skipped",)


# Documents

SEPARATORS = {encoding: ["\n", "a", "\n\n", " a"] for encoding in ENCODINGS}
for _encoding in ("utf-8", "utf-16", "utf-16-be", "gb18030", "utf-7"):
    SEPARATORS[_encoding] += ["紅", "é紅🐙", "🐙🐙"]


def documents_of(chunks: Iterable[Chunk], codec: str | None = None) -> tuple[list[bytes], list[int], bytes]:
    """The documents of some chunks, the sizes of what ended them, and what no end follows.

    Where sizes were not asked for, the bytes counted are compared with those of the text in `codec`; None: as
    it is.
    """
    found, end_sizes, rest = [], [], b""
    for one in chunks:
        assert one.text
        assert one.document_ends is not None
        assert one.end_sizes is not None
        assert len(one.end_sizes) == len(one.document_ends)
        start = 0
        for end in one.document_ends.tolist():
            assert end > start or (end == start == 0 and rest)
            assert end > 0
            found.append(rest + one.text[start:end])
            assert found[-1]
            start, rest = end, b""
        end_sizes += one.end_sizes.tolist()
        rest += one.text[start:]
        text = one.text if codec is None else one.text.decode().encode(codec)
        text_bytes = len(text) if one.sizes is None else int(one.sizes.sum())
        assert one.source_bytes == text_bytes + int(one.end_sizes.sum())
    return found, end_sizes, rest


@pytest.mark.parametrize("packing", ["none", "gzip", pytest.param("zstd", marks=with_zstd)])
@settings(max_examples=150, deadline=None)
@given(data=st.data(), encoding=st.sampled_from(ENCODINGS), chunk=st.integers(1, 9), sized=st.booleans())
def test_documents_end_where_separators_stand_in_any_pieces(
    packing: str,
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    encoding: str,
    chunk: int,
    sized: bool,
) -> None:
    separator = data.draw(st.sampled_from(SEPARATORS[encoding]))
    letters = st.lists(st.sampled_from([*SAMPLE[encoding], separator]), min_size=1, max_size=20)
    texts = ["".join(data.draw(letters)) for _ in range(2)]
    folder = tmp_path_factory.getbasetemp()
    names = [write(folder, pack(packing, text.encode(encoding)), f"{i}.txt") for i, text in enumerate(texts)]
    corpus = find_corpus(names, encoding=encoding, document_separator=separator)
    with pieces_of(chunk):
        chunks = list(read_chunks(corpus, 0, corpus.n_bytes, sized=sized))
    found, end_sizes, rest = documents_of(chunks, corpus.sources[0].codec)
    parts = [text.split(separator) for text in texts]
    assert found == [part.encode() for some in parts for part in some if part]
    assert rest == b""
    codec = corpus.sources[0].codec
    if encoding not in WITH_STATE:
        n_separator = len(separator.encode(codec))
        assert end_sizes == [
            n_separator if i < len(some) - 1 else 0 for some in parts for i, part in enumerate(some) if part
        ]
        lasting = [size for size in sizes_of(chunks) if size]
        if lasting and encoding != "utf-8":
            assert lasting == [
                len(letter.encode(codec)) for some in parts for part in some for letter in part
            ]
    n_marks = sum(source.n_mark for source in corpus.sources)
    assert sum(one.read_bytes for one in chunks) <= corpus.n_bytes - n_marks
    if parts[-1][-1] and encoding not in WITH_STATE:
        assert sum(one.read_bytes for one in chunks) == corpus.n_bytes - n_marks
    *_, surveyed = survey(corpus, valid_fraction=0)
    assert isinstance(surveyed, Survey)
    assert surveyed.n_documents == len(found)
    assert surveyed.n_characters == sum(len(one.decode()) for one in found)


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    encoding=st.sampled_from(["utf-8", "utf-16-le", "utf-16-be", "gb18030"]),
    chunk=st.integers(1, 9),
)
def test_separators_are_found_in_raw_bytes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, encoding: str, chunk: int
) -> None:
    # Letters whose bytes in UTF-16 look like a newline out of step.
    letters = st.sampled_from("a\n\n\u0a00\u000a\u0a0a紅")
    text = data.draw(st.text(letters, min_size=1, max_size=20))
    name = write(tmp_path_factory.getbasetemp(), text.encode(encoding), "raw.txt")
    corpus = find_corpus([name], encoding=encoding, raw=True, document_separator="\n")
    with pieces_of(chunk):
        found, _, rest = documents_of(read_chunks(corpus, 0, corpus.n_bytes, sized=data.draw(st.booleans())))
    assert found == [part.encode(encoding) for part in text.split("\n") if part]
    assert rest == b""
    *_, surveyed = survey(corpus, valid_fraction=0)
    assert isinstance(surveyed, Survey)
    assert (surveyed.n_documents, surveyed.n_characters) == (len(found), None)


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text("aé紅\n", max_size=10), min_size=1, max_size=5),
    encoding=st.sampled_from(["utf-8", "utf-16-le", "gb18030"]),
    chunk=st.integers(1, 9),
    raw=st.booleans(),
)
def test_each_file_is_a_document(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], encoding: str, chunk: int, raw: bool
) -> None:
    texts = [text for text in texts if text]
    assume(texts)
    folder = tmp_path_factory.getbasetemp()
    names = [write(folder, text.encode(encoding), f"file{i}.txt") for i, text in enumerate(texts)]
    corpus = find_corpus(names, encoding=encoding, raw=raw, document_per_file=True)
    with pieces_of(chunk):
        found, end_sizes, rest = documents_of(
            read_chunks(corpus, 0, corpus.n_bytes), None if raw else corpus.sources[0].codec
        )
    assert found == [text.encode(encoding if raw else "utf-8") for text in texts]
    assert (end_sizes, rest) == ([0] * len(texts), b"")


@settings(max_examples=150, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), min_size=1, max_size=8),
    encoding=st.sampled_from(["utf-8", "utf-16", "gb18030"]),
    chunk=st.integers(1, 40),
    is_ascii=st.booleans(),
    sized=st.booleans(),
    raw=st.booleans(),
)
def test_json_lines_hold_a_document_each(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    encoding: str,
    chunk: int,
    is_ascii: bool,
    sized: bool,
    raw: bool,
) -> None:
    lines = [json.dumps({"id": i, "text": text}, ensure_ascii=is_ascii) for i, text in enumerate(texts)]
    data = "\n \r\n".join(lines).encode(encoding)
    name = write(tmp_path_factory.getbasetemp(), data, "lines.jsonl")
    corpus = find_corpus([name], encoding=encoding, raw=raw, text_field="text")
    with pieces_of(chunk):
        chunks = list(read_chunks(corpus, 0, corpus.n_bytes, sized=sized))
    found, end_sizes, rest = documents_of(chunks)
    assert found == [text.encode() for text in texts if text]
    assert (end_sizes, rest) == ([0] * len(found), b"")
    for one in chunks:
        one.text.decode()
        assert len(one.text) <= max(chunk, 4)
    if texts[-1]:
        n_mark = corpus.sources[0].n_mark
        assert sum(one.read_bytes for one in chunks) == corpus.n_bytes - n_mark
    *_, surveyed = survey(corpus, valid_fraction=0)
    assert isinstance(surveyed, Survey)
    assert surveyed.n_documents == len(found)


EACH_LINE = "each line must be an object with a text in `text`"
OF_LIST, OF_OBJECT = (f"for example jq -c {what} FILE writes such lines" for what in ("'.[]'", "."))


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (
            '{"text": "a" "b"}',
            "is not JSON at column 14 (expecting ',' delimiter); got `\"b\"}`; mend the line",
        ),
        (
            '{"text": "a',
            'is not JSON at column 10 (unterminated string starting at); got `"a`; mend the line',
        ),
        ("plain text", "is not JSON at column 1 (expecting value); got `plain text`; mend the line"),
        ('["a"]', f"is no JSON object; got a list; {EACH_LINE}: {OF_LIST}"),
        ('[{"text": "a"}, {"text": "b"}]', f"is no JSON object; got a list; {EACH_LINE}: {OF_LIST}"),
        ("[", f"is no JSON object; got a list that goes on beyond the line; {EACH_LINE}: {OF_LIST}"),
        (
            ' [ {"text": "a"}, \r',
            f"is no JSON object; got a list that goes on beyond the line; {EACH_LINE}: {OF_LIST}",
        ),
        ("{", f"is no JSON object; got an object that goes on beyond the line; {EACH_LINE}: {OF_OBJECT}"),
        (
            '{"id": 1, "text":',
            f"is no JSON object; got an object that goes on beyond the line; {EACH_LINE}: {OF_OBJECT}",
        ),
        ('{"text": "a"},', "is not JSON at column 14 (extra data); got `,`; mend the line"),
        ('"a"', "is no JSON object; got a text; each line must be an object with a text in `text`"),
        ("7", "is no JSON object; got a number; each line must be an object with a text in `text`"),
        (
            '{"Text": "a", "b\\n": 1}',
            "has no field `text`; got `Text`, `b\\n`; name the text's field with --text-field",
        ),
        ("{}", "has no field `text`; got no field; name the text's field with --text-field"),
        (
            '{"text": null}',
            "has no text in the field `text`; got null; name the text's field with --text-field",
        ),
        (
            '{"text": 1' + "0" * 5000 + "}",
            "has no text in the field `text`; got a number; name the text's field with --text-field",
        ),
        (
            '{"text": {"a": 1}}',
            "has no text in the field `text`; got an object; name the text's field with --text-field",
        ),
        ('{"a": ' + "[" * 100_000, "is not JSON that can be read; it is nested too deeply"),
        (
            '{"text": "a\\ud83d"}',
            "has half a character in the field `text`; got \\ud83d; "
            "mend it, or train with --encoding-errors replace",
        ),
    ],
)
def test_lines_that_are_not_as_json_lines_must_be_are_refused(tmp_path: Path, line: str, fault: str) -> None:
    name = write(tmp_path, f'{{"text": "fine"}}\n\n{line}\n'.encode())
    for packed, place in ((False, name), (True, f"{name} (unpacked)")):
        if packed:
            write(tmp_path, gzip.compress(Path(name).read_bytes()))
        for chunk in (100, 1 << 20):
            with pieces_of(chunk), pytest.raises(UserError) as caught:
                run_survey(find_corpus([name], text_field="text"))
            assert str(caught.value) == f"{place}: line 3 {fault}"
    # The line is that of the file also for who reads from its middle on.
    with pytest.raises(UserError, match="line 3 "):
        list(read_text(find_corpus([name], text_field="text"), 17, find_corpus([name]).n_bytes))


def test_halves_of_characters_in_json_are_replaced_if_asked_for(tmp_path: Path) -> None:
    name = write(tmp_path, rb'{"text": "a\ud83db \ud83d\ude00 \udc00"}')
    corpus = find_corpus([name], text_field="text", errors="replace")
    assert read_all(corpus).decode() == "a\ufffdb 😀 \ufffd"
    found = run_survey(corpus, valid_fraction=0)
    assert found.n_replaced == 12
    assert found.notices[0] == f"{name}: 12 bytes are not utf-8 and are read as U+FFFD"


def test_one_huge_line_is_no_json_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = write(tmp_path, b" [" + b'{"text": "a"},' * 200_000 + b"]")
    with pytest.raises(UserError) as caught:
        run_survey(find_corpus([name], text_field="text"))
    assert str(caught.value) == (f"{name}: line 1 is no JSON object; got a list; {EACH_LINE}: {OF_LIST}")
    monkeypatch.setattr(documents, "LINE_BYTES_MAX", 3 << 20)
    name = write(tmp_path, b'{"text": "a"}\n{"text": "' + b"a" * (5 << 20) + b'"}')
    with pytest.raises(UserError) as caught:
        run_survey(find_corpus([name], text_field="text"))
    assert str(caught.value) == (f"{name}: line 2 is longer than 3,145,728 bytes; give one document a line")


@settings(max_examples=100, deadline=None)
@given(data=st.data(), chunk=st.integers(1, 9), every=st.integers(2, 4), sized=st.booleans())
def test_every_so_many_documents_one_is_held_out(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, chunk: int, every: int, sized: bool
) -> None:
    texts = [data.draw(st.text("ab\n|", min_size=1, max_size=20)) for _ in range(2)]
    encoding = data.draw(st.sampled_from(["utf-8", "utf-16-le"]))
    newlines = data.draw(st.sampled_from(["keep", "drop"]))
    folder = tmp_path_factory.getbasetemp()
    names = [write(folder, text.encode(encoding), f"{i}.txt") for i, text in enumerate(texts)]
    corpus = find_corpus(
        names, encoding=encoding, document_separator="|", newlines=newlines, valid_every=every
    )
    parts = [part for text in texts for part in text.split("|") if part]
    expected = {
        "train": [part for i, part in enumerate(parts) if (i + 1) % every],
        "valid": [part for i, part in enumerate(parts) if not (i + 1) % every],
    }
    counted = 0
    for name in ("train", "valid"):
        with pieces_of(chunk):
            chunks = list(read_chunks(corpus, 0, corpus.n_bytes, sized=sized, part=name))  # type: ignore[arg-type]
        found, _, rest = documents_of_kept(chunks)
        kept = [part.replace("\n", "") if newlines == "drop" else part for part in expected[name]]
        assert found == [part.encode() for part in kept if part]
        assert rest == b""
        counted += sum(one.source_bytes for one in chunks)
    *_, surveyed = survey(corpus)
    assert isinstance(surveyed, Survey)
    assert surveyed.split_at == corpus.n_bytes
    assert (surveyed.n_documents, surveyed.n_valid_documents) == (len(parts), len(parts) // every)
    letters = "".join(expected["train"])
    assert surveyed.alphabet == Counter(letters.replace("\n", "") if newlines == "drop" else letters)
    if newlines == "keep":
        n_valid = sum(one.source_bytes for one in chunks)
        assert surveyed.n_valid_bytes == n_valid
        whole = list(read_chunks(corpus, 0, corpus.n_bytes, sized=True))
        assert counted == sum(one.source_bytes for one in whole)


def documents_of_kept(chunks: list[Chunk]) -> tuple[list[bytes], list[int], bytes]:
    return documents_of(one._replace(left_out=None) for one in chunks)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), chunk=st.integers(1, 9), packing=st.sampled_from(["none", "gzip"]))
def test_newlines_left_out_leave_documents_apart(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, chunk: int, packing: str
) -> None:
    text = data.draw(st.text("a b\né", min_size=1, max_size=30))
    name = write(tmp_path_factory.getbasetemp(), pack(packing, text.encode()), "drop.txt")
    corpus = find_corpus([name], document_separator="\n\n", newlines="drop", spaces="underscore")
    with pieces_of(chunk):
        chunks = list(read_chunks(corpus, 0, corpus.n_bytes))
    found, _, rest = documents_of_kept(chunks)
    parts = [part.replace("\n", "").replace(" ", "_").encode() for part in text.split("\n\n")]
    assert found == [part for part in parts if part]
    assert rest == b""
    # Where the last byte of the text ends in the file.
    if parts[-1] and not text.endswith("\n"):
        assert sum(one.read_bytes for one in chunks) == corpus.n_bytes


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(), encoding=st.sampled_from(["utf-8", "utf-16", "gb18030", "utf-7"]), chunk=st.integers(1, 9)
)
def test_a_split_of_documents_stands_between_two_where_one_is_near(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, encoding: str, chunk: int
) -> None:
    separator = data.draw(st.sampled_from(["\n\n", "|", "紅"]))
    letters = st.lists(st.sampled_from(["a", "é", "\n", separator]), min_size=1, max_size=30)
    texts = ["".join(data.draw(letters)) for _ in range(data.draw(st.integers(1, 3)))]
    folder = tmp_path_factory.getbasetemp()
    names = [write(folder, text.encode(encoding), f"{i}.txt") for i, text in enumerate(texts)]
    corpus, raw = (
        find_corpus(names, encoding=encoding, document_separator=separator, raw=raw) for raw in (False, True)
    )
    wanted = data.draw(st.integers(0, corpus.n_bytes))
    with pieces_of(chunk):
        split = find_split(corpus, wanted)
        assert find_split(raw, wanted) == split
        halves = [list(read_chunks(corpus, *ends)) for ends in ((0, split), (split, corpus.n_bytes))]
        whole = documents_of(read_chunks(corpus, 0, corpus.n_bytes), corpus.sources[0].codec)[0]
    (first, _, rest), (second, _, _) = (documents_of(half, corpus.sources[0].codec) for half in halves)
    if [*first, *second] != whole:
        # A document is cut, or two separators overlap, or one is cut.
        letters = b"".join([*first, rest, *second]).decode().translate(dict.fromkeys(map(ord, separator)))
        assert letters == b"".join(whole).decode().translate(dict.fromkeys(map(ord, separator)))
    n_after = corpus.n_bytes - wanted
    if separator == "\n\n" or encoding == "utf-7" or not n_after or not wanted:
        return
    starts, base = [], 0
    for text, source in zip(texts, corpus.sources, strict=True):
        starts.append(base)
        for match in re.finditer(re.escape(separator), text):
            starts.append(base + source.n_mark + len(text[: match.end()].encode(source.codec)))
        base += source.n_bytes
    near = [one for one in starts if max(n_after // 2, 2) <= corpus.n_bytes - one <= 2 * n_after and one]
    if near:
        assert split == min(near, key=lambda one: (abs(one - wanted), -one))
        assert ([*first, *second], rest) == (whole, b"")
    else:
        assert wanted <= split <= wanted + 4 or split == corpus.n_bytes


def test_the_split_is_the_start_of_a_document_nearest_to_the_wanted_byte(tmp_path: Path) -> None:
    name = write(tmp_path, b"aaaa|bbbb|cccccccc|dd|e")  # documents start at 0, 5, 10, 19, 22
    corpus = find_corpus([name], document_separator="|")
    assert [find_split(corpus, wanted) for wanted in (0, 4, 5, 7, 8, 12, 16, 19)] == [
        0,
        5,
        5,
        5,
        10,
        10,
        19,
        19,
    ]
    # A single byte is too little, and nothing under half of what was wanted is taken.
    assert find_split(corpus, 20) == 19
    long = find_corpus([write(tmp_path, b"a|" + b"b" * 100, "long")], document_separator="|")
    assert find_split(long, 90) == 90
    files = [write(tmp_path, bytes([65 + i]) * 10, f"{i}.txt") for i in range(10)]
    books = find_corpus(files, document_per_file=True)
    assert [find_split(books, wanted) for wanted in (50, 52, 56, 95, 96)] == [50, 50, 60, 90, 96]
    lines = write(tmp_path, b'{"t": "a"}\n{"t": "b"}\n' + b'{"t": "' + b"c" * 100 + b'"}', "lines")
    of_lines = find_corpus([lines], text_field="t")
    assert [find_split(of_lines, wanted) for wanted in (3, 12, 120)] == [11, 11, 22]
    one = find_corpus([write(tmp_path, b'{"t": "abcdef"}', "one")], text_field="t")
    assert find_split(one, 10) == one.n_bytes
    assert run_survey(corpus, valid_fraction=0.2).split_at == 19
    found = run_survey(corpus, valid_fraction=0.2)
    assert (found.n_documents, found.n_valid_documents, found.n_valid_bytes) == (5, 2, 4)


def test_overlapping_separators_split_as_they_are_read(tmp_path: Path) -> None:
    # From the start the separator is bytes 1 and 2, so that no document starts at byte 4.
    corpus = find_corpus([write(tmp_path, b"a\n\n\nbcd")], document_separator="\n\n")
    assert find_split(corpus, 4) == 3
    assert documents_of(read_chunks(corpus, 3, 7))[0] == [b"\nbcd"]


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    encoding=st.sampled_from(["utf-8", "utf-16", "gb18030"]),
    chunk=st.integers(1, 9),
    rule=st.sampled_from(["none", "separator", "per_file", "json"]),
    raw=st.booleans(),
    newlines=st.sampled_from(["keep", "drop"]),
    every=st.sampled_from([None, 2]),
)
def test_the_place_of_each_byte_of_a_text_is_known(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    encoding: str,
    chunk: int,
    rule: str,
    raw: bool,
    newlines: Any,
    every: int | None,
) -> None:
    raw = raw and rule != "json"
    some = st.lists(st.text(st.sampled_from("aé紅\n"), max_size=4), min_size=1, max_size=6)
    texts = [data.draw(some) for _ in range(2)]
    rules: dict[str, dict[str, Any]] = {
        "none": {},
        "separator": {"document_separator": "|"},
        "per_file": {"document_per_file": True},
        "json": {"text_field": "t"},
    }
    # Each document of a file, where it begins in it, and the bytes of its characters there.
    written = []
    for one in texts:
        joined = (
            "".join(json.dumps({"t": text}) + "\n\n" for text in one) if rule == "json" else "|".join(one)
        )
        written.append(joined or "a")
    folder = tmp_path_factory.getbasetemp()
    names = [write(folder, text.encode(encoding), f"{i}.txt") for i, text in enumerate(written)]
    corpus = find_corpus(
        names,
        encoding=encoding,
        raw=raw,
        newlines=newlines,
        valid_every=every if rule != "none" else None,
        **rules[rule],
    )
    part: Any = data.draw(st.sampled_from(["train", "valid"])) if corpus.valid_every else "all"
    with pieces_of(chunk):
        text = b"".join(read_text(corpus, 0, corpus.n_bytes, part=part))
        for offset in range(len(text)):
            if text[offset] & 0xC0 == 0x80:
                continue
            name, where = find_place(corpus, 0, corpus.n_bytes, offset, part=part)
            kind, number = where.split()
            content = Path(name).read_bytes()
            if kind == "byte":
                assert rule != "json"
                codec = corpus.sources[0].codec
                found = content[int(number) :] if raw else content[int(number) :].decode(codec).encode()
                assert found[:1] == text[offset : offset + 1]
                assert found[:1] != b"\n" or newlines == "keep"
            else:
                line = json.loads(content.decode(encoding).split("\n")[int(number) - 1])["t"].encode()
                assert text[offset : offset + 1] in line
        places = [find_place(corpus, 0, corpus.n_bytes, offset, part=part) for offset in range(len(text))]
    order = [(names.index(name), int(where.split()[1])) for name, where in places]
    assert order == sorted(order)


def test_the_place_in_json_lines_is_a_line(tmp_path: Path) -> None:
    lines = [json.dumps({"t": text}) for text in ("ab", "", "cé\n", "d")]
    name = write(tmp_path, "\n".join([lines[0], "", *lines[1:]]).encode())
    other = write(tmp_path, Path(name).read_bytes(), "b.txt")
    corpus = find_corpus([name, other], text_field="t")
    expected = ["line 1"] * 2 + ["line 4"] * 4 + ["line 5"]
    found = [find_place(corpus, 0, corpus.n_bytes, offset) for offset in range(14)]
    assert found == [(one, where) for one in (name, other) for where in expected]
    split = len(lines[0]) + 1
    assert find_place(corpus, split, corpus.n_bytes, 0) == (name, "line 4")

    def first_alone() -> Iterator[Chunk]:
        yield Chunk(b'{"t": "ab"}\n', None, 12, 0)
        raise AssertionError("read before it is needed")

    assert next(documents.json_texts(corpus.sources[0], first_alone(), "t", "strict", 1)) == (1, b"ab")


def test_a_separator_that_is_nowhere_is_said(tmp_path: Path) -> None:
    names = [write(tmp_path, b"one", "a"), write(tmp_path, b"two", "b")]
    found = run_survey(find_corpus(names, document_separator="<|end|>"), valid_fraction=0)
    assert found.n_documents == 2
    assert found.notices == (
        f"{names[0]} and 1 more: the document separator is nowhere in them; each file is one document",
    )
    for text, notices in (
        (b"one", (f"{names[0]}: the document separator is nowhere in it; it is one document",)),
        (b"<|end|>one", ()),
        (b"one<|end|>", ()),
        (b"<|end|>", ()),
    ):
        write(tmp_path, text, "a")
        corpus = find_corpus(names[:1], document_separator="<|end|>")
        assert run_survey(corpus, valid_fraction=0).notices == notices


def test_many_small_files_come_in_few_chunks(tmp_path: Path) -> None:
    for i in range(1000):
        write(tmp_path, b"%03d\n" % i, f"{i:03}.txt")
    for options in ({}, {"document_per_file": True}):
        corpus = find_corpus([str(tmp_path)], **options)  # type: ignore[arg-type]
        (one,) = read_chunks(corpus, 0, corpus.n_bytes, sized=True)
        assert one.text == b"".join(b"%03d\n" % i for i in range(1000))
        assert one.document_ends is None or one.document_ends.tolist() == list(range(4, 4001, 4))
        assert sizes_of([one]) == [1] * 4000
