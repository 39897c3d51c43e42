"""The store holds exactly the tokens of the text; streams laid end to end are the text again."""

import dataclasses
import errno
import itertools
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from txlcli import UserError
from txlcli.data import (
    Batches,
    Counts,
    Prepared,
    Progress,
    StoreInfo,
    TokenStore,
    encode_text,
    longest_stream,
    open_counts,
    open_split,
    prepare,
    read_store_info,
    steps_per_epoch,
    stream_start,
)
from txlcli.sources import (
    Corpus,
    Newlines,
    Spaces,
    Survey,
    convert,
    find_corpus,
    read,
    read_text,
    survey,
)
from txlcli.tokenizer import Ids, Tokenizer, build_tokenizer

SHORT = ["a", "é", "紅", "🐙", " ", "\n", "\u3000", "bc", "\r\n", "\0"]


class Store(NamedTuple):
    folder: Path
    info: StoreInfo
    notices: tuple[str, ...]
    tokenizer: Tokenizer
    text: bytes
    split_at: int


def run_all(events: Iterator[Progress | Prepared]) -> Prepared:
    *progress, last = events
    assert all(isinstance(one, Progress) for one in progress)
    assert isinstance(last, Prepared)
    return last


def survey_of(corpus: Corpus, valid_fraction: float = 0.05) -> Survey:
    *_, last = survey(corpus, valid_fraction=valid_fraction)
    assert isinstance(last, Survey)
    return last


def store_text(
    folder: Path,
    data: bytes,
    kind: str = "byte",
    *,
    encoding: str = "utf-8",
    valid_fraction: float = 0.3,
    vocab_size: int | None = None,
    newlines: Newlines = "keep",
    spaces: Spaces = "keep",
) -> Store:
    """Prepare a text as training does."""
    shutil.rmtree(folder / "data", ignore_errors=True)
    (folder / "text.txt").write_bytes(data)
    corpus = find_corpus(
        [str(folder / "text.txt")], encoding=encoding, raw=kind == "byte", newlines=newlines, spaces=spaces
    )
    split_at = survey_of(corpus, valid_fraction).split_at
    tokenizer = build_tokenizer(
        kind,
        vocab_size=vocab_size,
        text=lambda: read_text(corpus, 0, split_at),
        n_bytes=split_at,
        seed=0,
        newlines=newlines,
    )
    prepared = run_all(prepare(corpus, tokenizer, folder, split_at=split_at))
    assert prepared.info == read_store_info(folder)
    return Store(folder, prepared.info, prepared.notices, tokenizer, data, split_at)


def store_ids(folder: Path, ids: Sequence[int], n_vocab: int = 256) -> TokenStore:
    (folder / "train.ids").write_bytes(np.array(ids, dtype=np.uint16).tobytes())
    return TokenStore(folder / "train.ids", dtype="uint16", n_tokens=len(ids), n_vocab=n_vocab)


def all_ids(folder: Path, split: Any) -> Ids:
    with open_split(folder, split) as store:
        return store.read(0, store.n_tokens)


# Streams


@settings(max_examples=150, deadline=None)
@given(n_tokens=st.integers(2, 60), n_stream=st.integers(1, 12), tgt_len=st.integers(1, 20))
def test_every_token_but_the_first_is_predicted_once_an_epoch(
    tmp_path_factory: pytest.TempPathFactory, n_tokens: int, n_stream: int, tgt_len: int
) -> None:
    with store_ids(tmp_path_factory.getbasetemp(), range(n_tokens)) as store:
        batches = Batches(store, n_stream, tgt_len)
        assert batches.n_stream == min(n_stream, n_tokens - 1)
        inputs: list[list[int]] = [[] for _ in range(batches.n_stream)]
        targets: list[list[int]] = [[] for _ in range(batches.n_stream)]
        for step in range(batches.steps_per_epoch):
            segment = batches.segment(step)
            assert segment.tokens.shape == segment.targets.shape
            assert segment.tokens.dtype == torch.int64
            assert segment.first_of_epoch == (step == 0)
            present = torch.ones_like(segment.tokens) if segment.weights is None else segment.weights
            assert segment.n_targets == int(present.sum())
            for stream in range(batches.n_stream):
                kept = present[stream] == 1
                inputs[stream] += segment.tokens[stream][kept].tolist()
                targets[stream] += segment.targets[stream][kept].tolist()
            is_last = step == batches.steps_per_epoch - 1
            assert segment.tokens.shape[1] == tgt_len or is_last
            assert segment.weights is None or is_last
        assert [*itertools.chain(*inputs)] == list(range(n_tokens - 1))
        assert [*itertools.chain(*targets)] == list(range(1, n_tokens))
        lengths = {len(stream) for stream in inputs}
        assert max(lengths) - min(lengths) <= 1
        for stream, held in enumerate(inputs):
            assert held[0] == stream * (n_tokens - 1) // batches.n_stream


@settings(max_examples=100, deadline=None)
@given(
    n_tokens=st.integers(2, 60),
    n_stream=st.integers(1, 12),
    tgt_len=st.integers(1, 20),
    steps=st.lists(st.integers(0, 200), max_size=8),
    block=st.integers(1, 9),
    data=st.data(),
)
def test_a_segment_depends_on_its_step_alone(
    tmp_path_factory: pytest.TempPathFactory,
    n_tokens: int,
    n_stream: int,
    tgt_len: int,
    steps: list[int],
    block: int,
    data: st.DataObject,
) -> None:
    with (
        store_ids(tmp_path_factory.getbasetemp(), range(n_tokens)) as store,
        pytest.MonkeyPatch.context() as patch,
    ):
        used = Batches(store, n_stream, tgt_len)
        patch.setattr("txlcli.data.batches.LARGEST_BLOCK_TOKENS", block)
        small = Batches(store, n_stream, tgt_len)
        for step in steps:
            fresh = Batches(store, n_stream, tgt_len).segment(step)
            one_epoch_on = used.segment(step + used.steps_per_epoch)
            for other in (used.segment(step), small.segment(step), one_epoch_on):
                assert torch.equal(other.tokens, fresh.tokens)
                assert torch.equal(other.targets, fresh.targets)
                assert (other.weights is None) == (fresh.weights is None)
                if other.weights is not None and fresh.weights is not None:
                    assert torch.equal(other.weights, fresh.weights)
                assert other.n_targets == fresh.n_targets
            cut = data.draw(st.integers(0, used.n_stream))
            upper, lower = used.segment(step, slice(0, cut)), used.segment(step, slice(cut, None))
            assert torch.equal(torch.cat([upper.tokens, lower.tokens]), fresh.tokens)
            assert upper.n_targets + lower.n_targets == fresh.n_targets


@settings(max_examples=300, deadline=None)
@given(
    n_tokens=st.integers(2, 1 << 41),
    n_stream=st.integers(1, 1 << 20),
    tgt_len=st.integers(1, 1 << 16),
    data=st.data(),
)
def test_index_arithmetic_is_exact_beyond_2_to_the_40(
    n_tokens: int, n_stream: int, tgt_len: int, data: st.DataObject
) -> None:
    n_stream = min(n_stream, n_tokens - 1)
    stream = data.draw(st.integers(0, n_stream - 1))
    start, stop = (stream_start(b, n_tokens, n_stream) for b in (stream, stream + 1))
    assert start * n_stream <= stream * (n_tokens - 1) < (start + 1) * n_stream
    assert stop - start in (longest_stream(n_tokens, n_stream), longest_stream(n_tokens, n_stream) - 1)
    assert stream_start(0, n_tokens, n_stream) == 0
    assert stream_start(n_stream, n_tokens, n_stream) == n_tokens - 1
    steps = steps_per_epoch(n_tokens, n_stream, tgt_len)
    assert (steps - 1) * tgt_len < longest_stream(n_tokens, n_stream) <= steps * tgt_len


def test_a_store_of_2_to_the_40_tokens_is_read_at_its_places(tmp_path: Path) -> None:
    n_tokens = (1 << 40) + 3
    path = tmp_path / "train.ids"
    with path.open("wb") as file:
        try:
            file.truncate(n_tokens)  # no block of it is written
        except OSError:
            pytest.skip("this file system holds no sparse file of 1 TiB")
        for place in (0, 1, n_tokens // 3, n_tokens // 3 + 1, n_tokens - 1):
            file.seek(place)
            file.write(bytes([place % 251 + 1]))
    with TokenStore(path, dtype="uint8", n_tokens=n_tokens, n_vocab=256) as store:
        batches = Batches(store, 3, 4)
        assert batches.steps_per_epoch == -(-((n_tokens - 1 + 2) // 3) // 4)
        first = batches.segment(0)
        assert first.tokens[0, :2].tolist() == [1, 2]
        assert first.tokens[1, 0] == store.read((n_tokens - 1) // 3, (n_tokens - 1) // 3 + 1)[0]
        last = batches.segment(batches.steps_per_epoch - 1)
        length = n_tokens - 1 - 2 * (n_tokens - 1) // 3 - 4 * (batches.steps_per_epoch - 1)
        assert last.targets[2, length - 1] == (n_tokens - 1) % 251 + 1


def test_reading_is_in_blocks_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[tuple[int, int]] = []
    with store_ids(tmp_path, [1] * 10_001) as store:
        real = store.read_stored

        def note(start: int, stop: int) -> Any:
            reads.append((start, stop))
            return real(start, stop)

        monkeypatch.setattr(store, "read_stored", note)
        batches = Batches(store, 2, 10)
        for step in range(batches.steps_per_epoch):
            batches.segment(step)
    assert reads == [(0, 10_001), (5_000, 10_001)]


def test_too_few_tokens_for_a_batch_are_refused(tmp_path: Path) -> None:
    with store_ids(tmp_path, [1]) as store, pytest.raises(UserError) as caught:
        Batches(store, 4, 4)
    assert str(caught.value) == f"{store.path}: too short to predict; got 1 tokens, needs at least 2"


# Preparing


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.sampled_from(SHORT), min_size=12, max_size=60),
    kind=st.sampled_from(["byte", "char", "word", "eos"]),
    chunk=st.integers(1, 9),
)
def test_the_store_holds_the_text_whatever_the_chunks(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str], kind: str, chunk: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    data = ("a b " + "".join(parts)).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "CHUNK_BYTES", chunk)
        store = store_text(
            folder, data, "word" if kind == "eos" else kind, newlines="eos" if kind == "eos" else "keep"
        )
    # Too short a part is not held out.
    training, held_out = data[: store.info.split_at], data[store.info.split_at :]
    encode = store.tokenizer.encode
    assert all_ids(folder, "train").tolist() == encode(training).tolist()
    assert store.info.splits["train"].n_bytes == len(training)
    if "valid" not in store.info.splits:
        return
    ids, ends = store.tokenizer.encode_with_ends(held_out)
    assert all_ids(folder, "valid").tolist() == ids.tolist()
    with open_counts(folder, "valid") as counts:
        got = counts.read(0, counts.n_tokens)
        assert counts.read(1, 2).tolist() == got[1:2].tolist()
    info = store.info.splits["valid"]
    text = held_out.decode()
    assert got.sum(axis=0).tolist() == [len(held_out), len(text), len(text.split())]
    assert [info.n_bytes, info.n_characters, info.n_words] == got.sum(axis=0).tolist()
    for token, end in enumerate(ends.tolist()):
        ended = held_out[:end].decode(errors="ignore")
        assert got[: token + 1, 0].sum() == end
        assert got[: token + 1, 1].sum() == len(ended)
        # A word counts with its last character, so one that goes on beyond this token does not count yet.
        goes_on = text[len(ended) : len(ended) + 1].strip() and ended[-1:].strip()
        assert got[: token + 1, 2].sum() == len(ended.split()) - bool(goes_on)


@settings(max_examples=100, deadline=None)
@given(
    parts=st.lists(st.sampled_from([*SHORT, "\n", "_", "\n\n", "\xa0"]), min_size=12, max_size=60),
    kind=st.sampled_from(["byte", "char"]),
    spaces=st.sampled_from(["keep", "underscore"]),
    encoding=st.sampled_from(["utf-8", "utf-16-le"]),
    chunk=st.integers(1, 9),
)
def test_dropped_newlines_are_not_scored_and_keep_their_place(
    tmp_path_factory: pytest.TempPathFactory,
    parts: list[str],
    kind: str,
    spaces: Spaces,
    encoding: str,
    chunk: int,
) -> None:
    folder = tmp_path_factory.getbasetemp()
    encoding = "utf-8" if kind == "byte" else encoding
    data = ("a b " + "".join(parts) + "bcd\n").encode(encoding)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "CHUNK_BYTES", chunk)
        store = store_text(folder, data, kind, encoding=encoding, newlines="drop", spaces=spaces)
    split_at = store.info.split_at
    training, held_out = data[:split_at].decode(encoding), data[split_at:].decode(encoding)
    encode, info = store.tokenizer.encode, store.info.splits
    assert all_ids(folder, "train").tolist() == encode(convert(training.encode(), "drop", spaces)).tolist()
    assert info["train"].n_bytes == len(training.replace("\n", "").encode(encoding))
    # What an empty prompt starts from occurs in training.
    counts_by_id = np.bincount(all_ids(folder, "train"))
    assert counts_by_id[store.info.start_id] == counts_by_id.max()
    if "valid" not in info:
        return
    assert split_at == store.split_at
    assert all_ids(folder, "valid").tolist() == encode(convert(held_out.encode(), "drop", spaces)).tolist()
    with open_counts(folder, "valid") as counts:
        got = counts.read(0, counts.n_tokens)
        left_out = counts.left_out_before(0, counts.n_tokens)
        assert counts.left_out_before(1, 3).tolist() == left_out[1:3].tolist()
    scored = held_out.replace("\n", "")
    words = held_out.replace("_", " ") if spaces == "underscore" else held_out
    totals = [len(scored.encode(encoding)), len(scored), len(words.split())]
    assert got.sum(axis=0).tolist() == totals
    assert [info["valid"].n_bytes, info["valid"].n_characters, info["valid"].n_words] == totals
    ends = (np.cumsum(got[:, 0]) + left_out)[got[:, 1] == 1].tolist()
    places = [i for i, character in enumerate(held_out) if character != "\n"]
    assert ends == [len(held_out[: place + 1].encode(encoding)) for place in places]


def test_newlines_inside_characters_make_no_text_whatever_the_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b"plain text\n" * 9 + b"\xe7\n\xb4\x85 and\n" * 9
    for chunk in (*range(1, 9), 1000):
        monkeypatch.setattr(read, "CHUNK_BYTES", chunk)
        valid = store_text(tmp_path, data, newlines="drop").info.splits["valid"]
        assert (valid.n_characters, valid.n_words) == (None, None)


def test_damaged_places_of_newlines_are_refused_by_name(tmp_path: Path) -> None:
    store_text(tmp_path, b"a line\n" * 30, newlines="drop")
    path = tmp_path / "data" / "valid.left_out"
    path.write_bytes(path.read_bytes()[:-1])
    n_bytes = path.stat().st_size
    with open_counts(tmp_path, "valid") as counts, pytest.raises(UserError) as caught:
        counts.left_out_before(0, 1)
    assert str(caught.value) == f"{path}: damaged; got {n_bytes} bytes for {counts.n_tokens} tokens"
    store_text(tmp_path, b"a line\n" * 30)
    assert not path.exists()
    with open_counts(tmp_path, "valid") as counts:
        assert counts.left_out_before(0, 3).tolist() == [0, 0, 0]


def test_text_of_newlines_alone_is_too_short_without_them(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\n" * 50)
    corpus = find_corpus([str(tmp_path / "a.txt")], raw=True, newlines="drop")
    tokenizer = build_tokenizer("byte", vocab_size=None, text=lambda: iter([]), n_bytes=0, seed=0)
    with pytest.raises(UserError, match=r"a.txt: too short to score; got 0 tokens, needs at least 2$"):
        run_all(encode_text(corpus, tokenizer, tmp_path))


def test_sentencepiece_is_stored_whatever_the_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = ("the quick brown fox, 紅樓夢 🐙\r\n" * 400 + "x" * 9000 + "\n").encode()
    whole = store_text(tmp_path, data, "sentencepiece", vocab_size=400)
    ids = {split: all_ids(tmp_path, split).tolist() for split in ("train", "valid")}
    assert whole.tokenizer.decode(ids["train"]) == data[: whole.split_at]
    assert whole.tokenizer.decode(ids["valid"]) == data[whole.split_at :]
    for chunk in (997, 5000):
        monkeypatch.setattr(read, "CHUNK_BYTES", chunk)
        store_text(tmp_path, data, "sentencepiece", vocab_size=400)
        assert {split: all_ids(tmp_path, split).tolist() for split in ids} == ids


@pytest.mark.parametrize("encoding", ["gb18030", "utf-16", "cp1252"])
def test_bytes_are_those_of_the_file_in_its_own_encoding(tmp_path: Path, encoding: str) -> None:
    text = "aé€b 12\r\n" * 40 if encoding == "cp1252" else "紅樓夢 a🐙\r\n" * 40
    store = store_text(tmp_path, text.encode(encoding), "char", encoding=encoding)
    n_bytes = len(text.encode(encoding)) - store.split_at
    with open_counts(tmp_path, "valid") as counts:
        got = counts.read(0, counts.n_tokens)
    assert store.info.splits["valid"].n_bytes == n_bytes == got[:, 0].sum()
    codec = {"utf-16": "utf-16-le"}.get(encoding, encoding)
    pieces = [store.tokenizer.decode([one]) for one in all_ids(tmp_path, "valid").tolist()]
    if encoding == "cp1252":
        assert got[:, 0].tolist() == [1] * len(pieces)
    else:
        assert got[:, 0].tolist() == [len(piece.decode().encode(codec)) for piece in pieces]


def test_held_out_text_is_the_same_bytes_for_every_tokenizer(tmp_path: Path) -> None:
    data = ("紅樓夢 one two\n" * 60).encode()
    stores = [
        store_text(tmp_path, data, kind, valid_fraction=0.05)
        for kind in ("byte", "char", "word", "sentencepiece")
    ]
    assert {store.split_at for store in stores} == {stores[0].split_at}
    infos = [store.info.splits["valid"] for store in stores]
    assert {(one.n_bytes, one.n_characters, one.n_words) for one in infos} == {
        (infos[0].n_bytes, infos[0].n_characters, infos[0].n_words)
    }


def test_a_mark_at_the_start_is_kept_as_bytes_and_dropped_as_text(tmp_path: Path) -> None:
    data = b"\xef\xbb\xbf" + b"ab\r\ncd\rEF\n" * 30
    raw, text = (store_text(tmp_path, data, kind) for kind in ("byte", "char"))
    sizes = [sum(part.n_bytes for part in store.info.splits.values()) for store in (raw, text)]
    assert sizes == [len(data), len(data) - 3]
    assert text.tokenizer.unknown_characters("\r") == []
    assert text.tokenizer.unknown_characters("\ufeff") == ["\ufeff"]


def test_bytes_that_are_no_text_have_no_characters(tmp_path: Path) -> None:
    store = store_text(tmp_path, b"caf\xe9 na\x92ve\n\0" * 300)
    valid = store.info.splits["valid"]
    assert (valid.n_characters, valid.n_words) == (None, None)
    assert valid.n_bytes == valid.n_tokens == len(store.text) - store.split_at
    with open_counts(tmp_path, "valid") as counts:
        assert counts.read(0, counts.n_tokens)[:, 0].tolist() == [1] * valid.n_tokens


@pytest.mark.parametrize(("length", "dtype"), [(255, "uint8"), (256, "uint16"), (65_536, "uint32")])
def test_counts_widen_when_a_token_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, dtype: str
) -> None:
    class OneTokenALine(FakeTokenizer):
        def complete_prefix(self, text: bytes) -> int:
            return text.rfind(b"\n") + 1

        def encode_with_ends(self, text: bytes) -> tuple[Ids, Ids]:
            ends = np.flatnonzero(np.frombuffer(text, dtype=np.uint8) == 10) + 1
            return np.zeros(len(ends), dtype=np.int32), ends

    monkeypatch.setattr(read, "CHUNK_BYTES", 1000)
    lines = [b"a b\n"] * 500 + [b"x" * (length - 1) + b"\n"] + [b"c\n"] * 500
    (tmp_path / "a.txt").write_bytes(b"".join(lines))
    corpus = find_corpus([str(tmp_path / "a.txt")])
    info = run_all(encode_text(corpus, OneTokenALine(), tmp_path)).info
    assert info.splits["test"].counts_dtype == dtype
    with open_counts(tmp_path, "test") as counts:
        got = counts.read(0, counts.n_tokens)
    assert got.tolist() == [[len(line), len(line), len(line.split())] for line in lines]
    assert sorted(os.listdir(tmp_path / "data")) == ["store.json", "test.counts", "test.ids"]  # noqa: PTH208


class FakeTokenizer:
    """One token a byte, out of a vocabulary whose first id is a control id and which knows no newline."""

    kind = "fake"
    n_vocab = 300
    control_ids = (0,)
    is_lossless = False
    newline_id: int | None = None

    def encode(self, text: bytes) -> Ids:
        ids = np.frombuffer(text, dtype=np.uint8).astype(np.int32) + 1
        return np.where(ids == ord("?") + 1, 0, ids).astype(np.int32)

    def encode_with_ends(self, text: bytes) -> tuple[Ids, Ids]:
        return self.encode(text), np.arange(1, len(text) + 1)

    def complete_prefix(self, text: bytes) -> int:
        return len(text)

    def decode(self, ids: Iterable[int], after: int | None = None) -> bytes:
        return bytes(max(one - 1, 0) for one in ids)

    def unknown_count(self, ids: Ids) -> int:
        return int((ids == 0).sum())

    def unknown_characters(self, text: str) -> list[str]:
        return []

    def files(self) -> dict[str, bytes]:
        return {}

    def save(self, folder: Path) -> None:
        pass

    def fingerprint(self) -> str:
        return "fake"

    def describe(self) -> dict[str, object]:
        return {}


def test_start_and_unknown_tokens_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"?" * 50 + b"b" * 30 + b"a" * 15 + b"?aaaa")
    corpus = find_corpus([str(tmp_path / "a.txt")])
    prepared = run_all(prepare(corpus, FakeTokenizer(), tmp_path, split_at=95))
    assert prepared.info.start_id == ord("b") + 1  # the most frequent is a control id
    assert prepared.info.dtype == "uint16"
    assert prepared.info.splits["train"].n_unknown == 50
    assert prepared.notices == (
        "train: 52.63% of the tokens are unknown to the vocabulary",
        "valid: 20.00% of the tokens are unknown to the vocabulary",
    )


def test_short_texts_hold_nothing_out_or_are_refused(tmp_path: Path) -> None:
    for data, kind, fraction in ((b"ab", "byte", 0.05), (b"abc", "char", 0.05), ("éé".encode(), "char", 0.9)):
        store = store_text(tmp_path, data, kind, valid_fraction=fraction)
        assert list(store.info.splits) == ["train"]
        assert store.info.splits["train"].n_tokens == len(data if kind == "byte" else data.decode())
        assert store.notices[0].startswith(f"{tmp_path}/text.txt: nothing is held out")
        with pytest.raises(UserError) as caught:
            open_counts(tmp_path, "valid")
        assert str(caught.value) == (
            f"{tmp_path}: holds no valid text; it has: train; score a file: txl eval FILE"
        )
    # Two bytes of held-out text that are one token: trained on instead.
    store = store_text(tmp_path, "éabé".encode(), "char", valid_fraction=0.4)
    assert store.notices == (
        f"{tmp_path}/text.txt: nothing is held out, it would be under two tokens; best is last",
    )
    assert store.info.split_at == 6
    with pytest.raises(UserError) as caught:
        store_text(tmp_path, b"a")
    assert str(caught.value) == f"{tmp_path}/text.txt: too short to learn from; got 1 token, needs at least 2"
    with pytest.raises(
        UserError, match=r"too short to learn from; got 1 token, .* less out with --valid-fraction$"
    ):
        store_text(tmp_path, b"abcdefghij", valid_fraction=0.9)
    assert not (tmp_path / "data").exists()


def test_one_token_of_many_bytes_names_the_tokenizers_that_make_more(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        store_text(tmp_path, b"abc" * 30, "word")
    assert str(caught.value) == (
        f"{tmp_path}/text.txt: too short to learn from; got 1 token, needs at least 2 "
        "of the word vocabulary; use --tokenizer char or byte"
    )


def test_replaced_bytes_of_other_files_are_told(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"caf\xe9 " * 3)
    (tmp_path / "b").write_bytes(b"na\xefve")
    text, other = (find_corpus([str(tmp_path / name)], errors="replace") for name in "ab")
    tokenizer = build_tokenizer("char", vocab_size=None, text=lambda: iter([b"a"]), n_bytes=1, seed=0)
    told = [f"{tmp_path}/b: 1 byte is not utf-8 and is read as U+FFFD"]
    (tmp_path / "run").mkdir()
    prepared = run_all(prepare(text, tokenizer, tmp_path / "run", split_at=text.n_bytes, valid=other))
    assert list(prepared.notices) == told  # those of the corpus itself are told by its survey
    (tmp_path / "eval").mkdir()
    assert list(run_all(encode_text(other, tokenizer, tmp_path / "eval")).notices) == told


def test_other_files_may_be_held_out(tmp_path: Path) -> None:
    corpora = []
    for name, data in (("a", b"training text"), ("b", b"held out"), ("c", b"tested on"), ("d", b"x")):
        (tmp_path / name).write_bytes(data)
        corpora.append(find_corpus([str(tmp_path / name)], raw=True))
    train, valid, test, short = corpora
    tokenizer = build_tokenizer("byte", vocab_size=None, text=lambda: iter(()), n_bytes=0, seed=0)
    prepared = run_all(prepare(train, tokenizer, tmp_path, split_at=5, valid=valid, test=test))
    assert prepared.notices == ()
    got = {split: bytes(all_ids(tmp_path, split).tolist()) for split in prepared.info.splits}
    assert got == {"train": b"training text", "valid": b"held out", "test": b"tested on"}
    (tmp_path / "new").mkdir()
    with pytest.raises(UserError) as caught:
        run_all(prepare(train, tokenizer, tmp_path / "new", split_at=5, valid=short))
    assert str(caught.value) == f"{tmp_path}/d: too short to score; got 1 token, needs at least 2"
    assert list((tmp_path / "new").iterdir()) == []
    assert (
        run_all(encode_text(short, tokenizer, tmp_path / "new", least_tokens=1)).info.splits["test"].n_tokens
        == 1
    )


def test_what_the_store_says_of_its_origin(tmp_path: Path) -> None:
    import hashlib

    data = b"\xef\xbb\xbf" + "紅樓夢 a\n".encode() * 50
    for kind in ("byte", "char"):
        info = store_text(tmp_path, data, kind).info
        assert info.sha256 == hashlib.sha256(data).hexdigest()
        assert [one.path for one in info.corpus] == [f"{tmp_path}/text.txt"]
        assert [one.n_bytes for one in info.corpus] == [len(data)]
        assert info.corpus[0].mtime_ns == (tmp_path / "text.txt").stat().st_mtime_ns


def test_progress_is_told_and_a_stop_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "CHUNK_BYTES", 10)
    (tmp_path / "text.txt").write_bytes(b"x" * 100)
    corpus = find_corpus([str(tmp_path / "text.txt")], raw=True)
    tokenizer = build_tokenizer("byte", vocab_size=None, text=lambda: iter(()), n_bytes=0, seed=0)
    events = list(prepare(corpus, tokenizer, tmp_path, split_at=90))
    assert events[:-1] == [
        *(Progress("encoding train", done, 90) for done in range(0, 91, 10)),
        *(Progress("encoding valid", done, 10) for done in (0, 10)),
    ]
    shutil.rmtree(tmp_path / "data")
    for n in range(1, len(events)):
        running = prepare(corpus, tokenizer, tmp_path, split_at=90)
        for _ in range(n):
            next(running)
        running.close()  # type: ignore[attr-defined]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]


def test_a_full_disk_is_refused_before_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_bytes(b"some text\n" * 100_000)
    corpus = find_corpus([str(tmp_path / "text.txt")])
    tokenizer = build_tokenizer(
        "char", vocab_size=None, text=lambda: read_text(corpus, 0, 9), n_bytes=9, seed=0
    )
    usage = shutil.disk_usage(tmp_path)._replace(free=2_000_000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        with pytest.raises(UserError) as caught:
            run_all(prepare(corpus, tokenizer, tmp_path, split_at=900_000))
    assert str(caught.value) == (
        f"{tmp_path}: the disk is too full for the ids; needs about 2.3 MB, 2.0 MB are free; "
        "choose another place with --out"
    )

    def fail(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(UserError, match=r"/data: cannot be written; no space left on device$"):
            run_all(prepare(corpus, tokenizer, tmp_path, split_at=900_000))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]


def test_text_that_changes_meanwhile_is_said_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"some text\n" * 100)
    corpus = find_corpus([str(path)], raw=True)
    tokenizer = build_tokenizer("byte", vocab_size=None, text=lambda: iter(()), n_bytes=0, seed=0)
    with path.open("ab") as file:
        file.write(b"more")
    prepared = run_all(prepare(corpus, tokenizer, tmp_path, split_at=900))
    assert prepared.notices == (f"{path}: changed while it was read; its first 1,000 bytes are used",)
    assert sum(part.n_tokens for part in prepared.info.splits.values()) == 1000
    shutil.rmtree(tmp_path / "data")
    path.write_bytes(b"short")
    with pytest.raises(UserError, match=r"became shorter while it was read; got 5 bytes, had 1,000"):
        run_all(prepare(corpus, tokenizer, tmp_path, split_at=900))
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("kind", ["byte", "char"])
def test_memory_does_not_grow_with_the_text(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "CHUNK_BYTES", 1 << 16)
    peaks = []
    for n in (1 << 16, 1 << 19):  # one line each
        tracemalloc.start()
        store_text(tmp_path, "xé紅 ".encode() * n, kind, valid_fraction=0.5)
        # The test itself holds the text once.
        peaks.append(tracemalloc.get_traced_memory()[1] - 7 * n)
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


# Damage


def damaged(store: Store, **changes: object) -> str:
    path = store.folder / "data" / "store.json"
    path.write_text(json.dumps({**dataclasses.asdict(store.info), **changes}))
    with pytest.raises(UserError) as caught:
        read_store_info(store.folder)
    assert str(caught.value).startswith(f"{path}: damaged; ")
    return str(caught.value).removeprefix(f"{path}: damaged; ")


def test_a_damaged_description_is_refused_by_name(tmp_path: Path) -> None:
    store = store_text(tmp_path, b"some text\n" * 10)
    assert damaged(store, n_vocab=True) == "ValueError: `n_vocab` is True, not a number from 1 to 2147483648"
    assert damaged(store, start_id=256) == "ValueError: `start_id` is 256, not a number from 0 to 255"
    assert damaged(store, dtype="float64") == "ValueError: `dtype` is 'float64', not uint8, uint16 or uint32"
    assert damaged(store, splits={"train": {"n_tokens": -1}}).startswith("ValueError: `n_tokens` is -1")
    assert damaged(store, splits={"train": {}}) == "KeyError: 'n_tokens'"
    assert damaged(store, splits=None).startswith("TypeError: ")
    assert damaged(store, corpus=[3]).startswith("TypeError: ")
    path = tmp_path / "data" / "store.json"
    for text in ("", "[" * 100_000, "[]", "3", "{", '"x"', "\xff", '{"n_vocab": ' + "9" * 5000 + "}"):
        path.write_text(text)
        with pytest.raises(UserError) as caught:
            read_store_info(tmp_path)
        assert str(caught.value).startswith(f"{path}: damaged; ")
    path.unlink()
    with pytest.raises(UserError) as caught:
        open_split(tmp_path, "train")
    assert str(caught.value) == f"{path}: cannot be read; no such file or directory"


def test_damaged_ids_are_refused_by_name(tmp_path: Path) -> None:
    store_text(tmp_path, b"some text\n" * 10)
    ids, counts = tmp_path / "data" / "train.ids", tmp_path / "data" / "valid.counts"
    openers: list[tuple[Path, Callable[[], TokenStore | Counts]]] = [
        (ids, lambda: open_split(tmp_path, "train")),
        (counts, lambda: open_counts(tmp_path, "valid")),
    ]
    for path, opener in openers:
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        with pytest.raises(UserError) as caught:
            opener()
        assert str(caught.value) == (
            f"{path}: damaged; got {len(whole) - 1} bytes, store.json says {len(whole)}"
        )
        path.write_bytes(whole)
        with opener() as opened:
            path.write_bytes(whole[:5])
            with pytest.raises(UserError, match=r": damaged; it ends before token"):
                opened.read(0, 20)
        path.unlink()
        with pytest.raises(UserError, match=r": cannot be read; no such file or directory$"):
            opener()
    with pytest.raises(UserError, match=r"train\.counts: the train split is stored without counts$"):
        open_counts(tmp_path, "train")


def test_an_id_beyond_the_vocabulary_is_damage(tmp_path: Path) -> None:
    with store_ids(tmp_path, [1, 2, 300], n_vocab=300) as store, pytest.raises(UserError) as caught:
        Batches(store, 1, 2).segment(0)
    assert str(caught.value) == f"{store.path}: damaged; got id 300 in a vocabulary of 300"


def test_what_is_read_may_be_written_to(tmp_path: Path) -> None:
    with store_ids(tmp_path, [1, 2, 3]) as store:
        ids = store.read(1, 3)
        ids[0] = 9
        assert store.read(1, 3).tolist() == [2, 3]
        segment = Batches(store, 1, 2).segment(0)
        segment.tokens[0, 0] = 9
        assert store.read(0, 1).tolist() == [1]
