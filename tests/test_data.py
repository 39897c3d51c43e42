"""The store holds exactly the tokens of the text; streams laid end to end are the text again."""

import dataclasses
import errno
import itertools
import os
import re
import shutil
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stores import write_sealed
from txlcli import UserError
from txlcli.data import (
    Batches,
    Counts,
    Prepared,
    Progress,
    Segment,
    StoreInfo,
    TokenStore,
    check_store,
    encode_text,
    longest_stream,
    open_counts,
    open_split,
    prepare,
    read_store_info,
    steps_per_epoch,
    stream_start,
)
from txlcli.data.ahead import Ahead
from txlcli.data.info import SPLITS
from txlcli.sources import (
    Chunk,
    Corpus,
    Newlines,
    Spaces,
    Survey,
    blocks,
    convert,
    find_corpus,
    read_text,
    survey,
)
from txlcli.tokenizer import Ids, Tokenizer, build_tokenizer

# By its name it is a function.
PREPARE = sys.modules["txlcli.data.prepare"]
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
    assert list(check_store(folder, prepared.info, SPLITS)) == []  # too small to be watched
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


@settings(max_examples=300, deadline=None)
@given(
    n_tokens=st.integers(2, 1 << 41) | st.just(1 << 40),
    n_stream=st.integers(1, 1 << 16),
    tgt_len=st.integers(1, 1 << 14),
    n_rank=st.integers(1, 64) | st.just(64),
    data=st.data(),
)
def test_ranks_share_the_streams_and_with_them_the_text_exactly(
    n_tokens: int, n_stream: int, tgt_len: int, n_rank: int, data: st.DataObject
) -> None:
    """Rank r of R has the streams floor(r B / R) to floor((r + 1) B / R), so one range of the text."""
    n_stream = min(n_stream, n_tokens - 1)
    bounds = [rank * n_stream // n_rank for rank in range(n_rank + 1)]
    assert (bounds[0], bounds[-1]) == (0, n_stream)
    sizes = [stop - start for start, stop in itertools.pairwise(bounds)]
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes) == n_stream
    # The inputs of all ranks, laid end to end, are all tokens but the last; the targets all but the first.
    places = [stream_start(bound, n_tokens, n_stream) for bound in bounds]
    assert (places[0], places[-1]) == (0, n_tokens - 1)
    assert places == sorted(places)
    # Whatever place of the text: one rank, one stream, one step and one column have it as their input.
    place = data.draw(st.integers(0, n_tokens - 2) | st.sampled_from([0, n_tokens - 2]))
    (rank,) = [r for r in range(n_rank) if places[r] <= place < places[r + 1]]
    stream = (place * n_stream + n_stream - 1) // (n_tokens - 1)
    stream -= stream_start(stream, n_tokens, n_stream) > place
    start, stop = (stream_start(b, n_tokens, n_stream) for b in (stream, stream + 1))
    assert start <= place < stop
    assert bounds[rank] <= stream < bounds[rank + 1]
    step, column = divmod(place - start, tgt_len)
    assert step < steps_per_epoch(n_tokens, n_stream, tgt_len)
    assert start + step * tgt_len + column == place
    # All ranks make the same number of steps: none of them waits for one that has no more text.
    longest = longest_stream(n_tokens, n_stream)
    assert all(
        b - a <= longest * size for (a, b), size in zip(itertools.pairwise(places), sizes, strict=True)
    )
    assert longest <= tgt_len * steps_per_epoch(n_tokens, n_stream, tgt_len) < longest + tgt_len


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


def assert_equal_segments(one: Segment, other: Segment) -> None:
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.targets, other.targets)
    assert (one.weights is None) == (other.weights is None)
    assert (one.first_of_epoch, one.n_targets) == (other.first_of_epoch, other.n_targets)


def reading_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "reading ahead"]


def test_what_is_read_ahead_is_what_the_step_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txlcli.data.batches.LARGEST_BLOCK_TOKENS", 9)
    monkeypatch.setattr("txlcli.data.batches.MOST_AHEAD", 3)
    with store_ids(tmp_path, [one % 251 for one in range(1001)]) as store:
        plain, ahead = Batches(store, 3, 7), Batches(store, 3, 7)
        with ahead.reading_ahead(5, 120):
            assert reading_threads() == ["reading ahead"]
            for step in range(5, 120):
                assert_equal_segments(ahead.segment(step), plain.segment(step))
            # Any other is read when it is asked for, and so are some of the streams.
            assert_equal_segments(ahead.segment(400), plain.segment(400))
        assert reading_threads() == []
        with ahead.reading_ahead(0, 10**9):
            assert_equal_segments(ahead.segment(3), plain.segment(3))
            rows = slice(1, 3)
            assert_equal_segments(ahead.segment(0, rows), plain.segment(0, rows))
            assert_equal_segments(ahead.segment(0), plain.segment(0))
        assert reading_threads() == []


def test_what_the_reading_thread_meets_is_raised_where_its_step_is_taken(tmp_path: Path) -> None:
    with store_ids(tmp_path, [1] * 10_001) as store:
        batches = Batches(store, 1, 100)
        os.truncate(store.path, 0)
        with batches.reading_ahead(0, 100):
            with pytest.raises(UserError) as caught:
                batches.segment(0)
            assert str(caught.value) == (
                f"{store.path}: damaged; it ends before token 10,001, it was cut since it was opened"
                + remedy(tmp_path.parent)  # a store of its own has no run's folder around it
            )
        assert reading_threads() == []


def test_no_more_is_read_ahead_than_may_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def make(step: int) -> int:
        made.append(step)
        return step

    ahead = Ahead(make, 2, 100, 3)
    try:
        assert ahead.take(2) == 2
        time.sleep(0.05)
        # One was taken, three wait, and one more is in the thread's hand.
        assert len(made) <= 5
        assert not ahead.has(5)
    finally:
        ahead.close()


def test_a_step_says_how_long_it_waited_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with store_ids(tmp_path, [1] * 10_001) as store:
        real = store.read_stored

        def slow(start: int, stop: int) -> Any:
            time.sleep(0.05)
            return real(start, stop)

        monkeypatch.setattr(store, "read_stored", slow)
        batches = Batches(store, 1, 10)
        with batches.reading_ahead(0, 50):
            batches.segment(0)
            time.sleep(0.1)
            for step in range(1, 50):
                batches.segment(step)
        assert 0.02 < batches.waited_s < 0.09


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
    counted=st.integers(1, 9),
)
def test_the_store_holds_the_text_whatever_the_chunks(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str], kind: str, chunk: int, counted: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    data = ("a b " + "".join(parts)).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", chunk)
        patch.setattr(PREPARE, "COUNTED_BYTES", counted)
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
    counted=st.integers(1, 9),
)
def test_dropped_newlines_are_not_scored_and_keep_their_place(
    tmp_path_factory: pytest.TempPathFactory,
    parts: list[str],
    kind: str,
    spaces: Spaces,
    encoding: str,
    chunk: int,
    counted: int,
) -> None:
    folder = tmp_path_factory.getbasetemp()
    encoding = "utf-8" if kind == "byte" else encoding
    data = ("a b " + "".join(parts) + "bcd\n").encode(encoding)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", chunk)
        patch.setattr(PREPARE, "COUNTED_BYTES", counted)
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
        monkeypatch.setattr(blocks, "BLOCK_BYTES", chunk)
        valid = store_text(tmp_path, data, newlines="drop").info.splits["valid"]
        assert (valid.n_characters, valid.n_words) == (None, None)


def test_damaged_places_of_newlines_are_refused_by_name(tmp_path: Path) -> None:
    store_text(tmp_path, b"a line\n" * 30, newlines="drop")
    path = tmp_path / "data" / "valid.left_out"
    path.write_bytes(path.read_bytes()[:-1])
    n_bytes = path.stat().st_size
    with open_counts(tmp_path, "valid") as counts, pytest.raises(UserError) as caught:
        counts.left_out_before(0, 1)
    fault = f"{path}: damaged; got {n_bytes} bytes for {counts.n_tokens} tokens"
    assert str(caught.value) == fault + remedy(tmp_path)
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
        monkeypatch.setattr(blocks, "BLOCK_BYTES", chunk)
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

    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1000)
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
    document_end: int | None = None

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
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 10)
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
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 16)
    peaks = []
    for n in (1 << 16, 1 << 19):  # one line each
        tracemalloc.start()
        store_text(tmp_path, "xé紅 ".encode() * n, kind, valid_fraction=0.5)
        # The test itself holds the text once.
        peaks.append(tracemalloc.get_traced_memory()[1] - 7 * n)
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


# Documents


class DocumentChunk(NamedTuple):
    """What a source delivers of a text that is made of documents."""

    text: bytes
    sizes: Any
    source_bytes: int
    n_replaced: int
    left_out: Any
    document_ends: Any
    end_sizes: Any
    skipped_bytes: int = 0

    has_separators = Chunk.has_separators

    @property
    def read_bytes(self) -> int:
        return self.source_bytes


class WithDocuments:
    """A vocabulary with one more id, which ends a document."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def n_vocab(self) -> int:
        return self._tokenizer.n_vocab + 1

    @property
    def document_end(self) -> int:
        return self._tokenizer.n_vocab

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def cut_documents(
    documents: Sequence[bytes], cuts: Iterable[int], n_separator: int
) -> Iterator[DocumentChunk]:
    """Deliver documents in chunks that begin at any byte, as long as they end at characters."""
    text = b"".join(documents)
    ends = np.cumsum([len(one) for one in documents])
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    places = [one for one in places if one == len(text) or text[one] & 0xC0 != 0x80]
    for start, stop in itertools.pairwise(places):
        # An end stands with the text before it.
        own = ends[(ends > start) & (ends <= stop)] - start
        yield DocumentChunk(
            text=text[start:stop],
            sizes=np.ones(stop - start, dtype=np.uint32),
            source_bytes=stop - start + n_separator * len(own),
            n_replaced=0,
            left_out=None,
            document_ends=own,
            end_sizes=np.full(len(own), n_separator),
        )


@settings(max_examples=60, deadline=None)
@given(
    documents=st.lists(
        st.lists(st.sampled_from(SHORT), min_size=1, max_size=12).map("".join), min_size=1, max_size=9
    ),
    kind=st.sampled_from(["byte", "char", "word", "eos"]),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    separator=st.sampled_from(["", "=="]),
)
def test_the_end_of_a_document_follows_it_whatever_the_chunks(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[str],
    kind: str,
    cuts: list[int],
    separator: str,
) -> None:
    folder = tmp_path_factory.getbasetemp()
    texts = [one.encode() for one in documents]
    (folder / "text.txt").write_bytes(b"a b " + b"".join(texts))
    newlines: Newlines = "eos" if kind == "eos" else "keep"
    corpus = find_corpus([str(folder / "text.txt")], raw=kind == "byte", newlines=newlines)
    object.__setattr__(corpus, "document_separator", separator)
    plain = build_tokenizer(
        "word" if kind == "eos" else kind,
        vocab_size=None,
        text=lambda: iter([b"a b "]),
        n_bytes=4,
        seed=0,
        newlines=newlines,
    )
    tokenizer: Any = WithDocuments(plain)
    n_end = len(separator)
    stores = []
    for some in ([], cuts):
        chunks = [*cut_documents(texts, some, n_end)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PREPARE, "read_chunks", lambda *_, chunks=chunks, **__: iter(chunks))
            patch.setattr(PREPARE, "COUNTED_BYTES", 5 if some else 1000)
            shutil.rmtree(folder / "data", ignore_errors=True)
            info = run_all(encode_text(corpus, tokenizer, folder, least_tokens=1)).info.splits["test"]
        with open_counts(folder, "test") as counts:
            got = counts.read(0, counts.n_tokens)
        stores.append((all_ids(folder, "test").tolist(), got.tolist(), info))
    assert stores[0] == stores[1]
    ids, counted, info = stores[0]
    expected = [[*plain.encode(one).tolist(), tokenizer.document_end] for one in texts]
    assert ids == [*itertools.chain(*expected)]
    assert [plain.n_vocab, info.n_tokens] == [tokenizer.document_end, len(ids)]
    # What a document has is counted with its tokens, its separator with its end.
    rows = iter(counted)
    for one, tokens in zip(documents, expected, strict=True):
        *inside, end = (next(rows) for _ in tokens)
        n_bytes, n_characters, n_words = np.array([*inside, end]).sum(axis=0).tolist()
        assert (n_bytes, n_characters) == (len(one.encode()) + n_end, len(one) + n_end)
        assert n_words == len(one.split())
        if inside and kind != "eos":
            assert end == [n_end, n_end, 0]
    assert info.n_bytes == sum(map(len, texts)) + n_end * len(texts)


def test_every_nth_document_may_be_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"document {i}\n".encode() for i in range(9)]
    (tmp_path / "text.txt").write_bytes(b"".join(texts))
    corpus = find_corpus([str(tmp_path / "text.txt")], raw=True)
    object.__setattr__(corpus, "valid_every", 3)
    parts = {"train": [one for i, one in enumerate(texts) if i % 3 != 2], "valid": texts[2::3]}

    def read_chunks(corpus: Corpus, start: int, stop: int, *, part: str = "all", **_: Any) -> Iterator[Any]:
        assert (start, stop) == (0, corpus.n_bytes)
        return cut_documents(parts.get(part, texts), [5, 40], 0)

    monkeypatch.setattr(PREPARE, "read_chunks", read_chunks)
    plain = build_tokenizer("byte", vocab_size=None, text=lambda: iter(()), n_bytes=0, seed=0)
    tokenizer: Any = WithDocuments(plain)
    info = run_all(prepare(corpus, tokenizer, tmp_path, split_at=corpus.n_bytes)).info
    assert info.dtype == "uint16"
    for split, some in parts.items():
        ids = all_ids(tmp_path, split).tolist()
        assert ids == [*itertools.chain(*([*one, 256] for one in some))]
        assert info.splits[split].n_bytes == sum(map(len, some))
    # Too little to score: all is trained on.
    shutil.rmtree(tmp_path / "data")
    parts["valid"] = []
    prepared = run_all(prepare(corpus, tokenizer, tmp_path, split_at=corpus.n_bytes))
    assert list(prepared.info.splits) == ["train"]
    assert prepared.notices == (
        f"{tmp_path}/text.txt: nothing is held out, what --valid-every {corpus.valid_every} takes would be "
        "under two tokens; best is last",
    )


# Damage


def damaged(store: Store, **changes: object) -> str:
    path = store.folder / "data" / "store.json"
    write_sealed(path, {**dataclasses.asdict(store.info), **changes})
    with pytest.raises(UserError) as caught:
        read_store_info(store.folder)
    text = str(caught.value)
    assert text.startswith(f"{path}: damaged; ")
    assert text.endswith(remedy(store.folder))
    return text.removeprefix(f"{path}: damaged; ").removesuffix(remedy(store.folder))


def remedy(folder: Path) -> str:
    return f"; put it back, or repeat the run from its texts: txl train -c {folder}/config.yaml"


def test_a_damaged_description_is_refused_by_name(tmp_path: Path) -> None:
    store = store_text(tmp_path, b"some text\n" * 10)
    assert damaged(store, n_vocab=True) == "`n_vocab` is True, not a number from 1 to 2147483648"
    assert damaged(store, start_id=256) == "`start_id` is 256, not a number from 0 to 255"
    assert damaged(store, dtype="float64") == "`dtype` is 'float64', not uint8, uint16 or uint32"
    assert damaged(store, splits={"train": {"n_tokens": -1}}).startswith("`n_tokens` is -1")
    assert damaged(store, splits={"train": {}}) == "has no `n_tokens`"
    form = "its values have another form than a store's"
    assert damaged(store, splits=None) == damaged(store, corpus=[3]) == form
    splits = dataclasses.asdict(store.info)["splits"]
    del splits["valid"]["files"]["counts"]
    assert damaged(store, splits=splits) == "`files` are not those of the split"
    splits["train"]["files"] = {"../../ids": {}}
    assert damaged(store, splits=splits) == "`files` are not those of the split"
    path = tmp_path / "data" / "store.json"
    for text in ("", "[" * 100_000, "[]", "3", "{", '"x"', "\xff", '{"n_vocab": ' + "9" * 5000 + "}"):
        path.write_text(text)
        with pytest.raises(UserError) as caught:
            read_store_info(tmp_path)
        assert re.match(f"{path}: damaged(, not valid JSON; [^A-Z]|; must hold)", str(caught.value))
        assert str(caught.value).endswith(remedy(tmp_path))
    path.unlink()
    with pytest.raises(UserError) as caught:
        open_split(tmp_path, "train")
    assert str(caught.value) == f"{path}: cannot be read; no such file or directory{remedy(tmp_path)}"


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
            f"{path}: damaged; got {len(whole) - 1} bytes, store.json says {len(whole)}{remedy(tmp_path)}"
        )
        path.write_bytes(whole)
        with opener() as opened:
            path.write_bytes(whole[:5])
            with pytest.raises(UserError, match=r": damaged; it ends before token"):
                opened.read(0, 20)
        path.unlink()
        with pytest.raises(UserError, match=r": cannot be read; no such file or directory; put it back, or"):
            opener()
    with pytest.raises(UserError, match=r"train\.counts: the train split is stored without counts$"):
        open_counts(tmp_path, "train")


def test_an_id_beyond_the_vocabulary_is_damage(tmp_path: Path) -> None:
    with store_ids(tmp_path, [1, 2, 300], n_vocab=300) as store, pytest.raises(UserError) as caught:
        Batches(store, 1, 2).segment(0)
    fault = str(caught.value).partition("; put it back")[0]
    assert fault == f"{store.path}: damaged; got id 300 in a vocabulary of 300"


def test_what_is_read_may_be_written_to(tmp_path: Path) -> None:
    with store_ids(tmp_path, [1, 2, 3]) as store:
        ids = store.read(1, 3)
        ids[0] = 9
        assert store.read(1, 3).tolist() == [2, 3]
        segment = Batches(store, 1, 2).segment(0)
        segment.tokens[0, 0] = 9
        assert store.read(0, 1).tolist() == [1]
