import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tolerance import assert_same
from txlcli import UserError
from txlcli.config import ModelConfig
from txlcli.data import Counts, TokenStore
from txlcli.evaluate import (
    EvalProgress,
    Score,
    TokenNats,
    choose_streams,
    context,
    evaluate,
    evaluate_by_line,
    final_score,
    lay_out,
    receptive_field,
    running,
    scoring,
    streams,
    token_scores,
)
from txlcli.model import Lengths, TransformerXL

N_VOCAB = 11
NEWLINE = 3

LENGTHS = [
    Lengths(4, 0),
    Lengths(4, 3),
    Lengths(4, 4),
    Lengths(4, 6),
    Lengths(3, 7),
    Lengths(1, 5),
    Lengths(4, 1000),
    Lengths(4, 6, clamp_len=5),
    Lengths(4, 5, same_length="mem_len"),
    Lengths(4, 1, same_length="mem_len"),
    Lengths(4, 5, same_length="mem_len+1", clamp_len=3),
    Lengths(5, 0, same_length="mem_len+1"),
    Lengths(4, 1000, same_length="mem_len+1"),
    Lengths(100, 8),
    Lengths(4, 6, memory_start="zeros"),
    Lengths(4, 1000, memory_start="zeros", clamp_len=9),
    Lengths(3, 7, same_length="mem_len", memory_start="zeros"),
]


def build(lengths=LENGTHS[0], *, n_layer=2, dtype=torch.float64, **settings):
    """The same weights for all lengths, far from zero so that every term matters."""
    torch.manual_seed(1)
    config = ModelConfig(
        n_layer=n_layer, d_model=12, n_head=2, d_head=5, d_inner=16, **lengths._asdict(), **settings
    )
    model = TransformerXL(config, N_VOCAB).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.to(dtype).eval()


MODELS = {n_layer: build(n_layer=n_layer) for n_layer in (1, 2, 3)}


# Trained at tgt_len 5 and mem_len 3; distances of shaw from 4 on share a row.
SCHEMES = {
    "relative": {},
    "relative, biases of each layer": {"untie_r": True},
    "shaw": {"position": "shaw", "max_relative_position": 4},
    "shaw, keys alone": {"position": "shaw", "max_relative_position": 4, "shaw_values": False},
    "sinusoid": {"position": "sinusoid"},
    "sinusoid that runs on": {"position": "sinusoid", "absolute_positions": "continue"},
    "learned": {"position": "learned"},
}


def build_scheme(name, **changes):
    return build(Lengths(5, 3), **SCHEMES[name], **changes)


def draw_ids(n_tokens, seed=2):
    return np.random.default_rng(seed).integers(0, N_VOCAB, n_tokens)


@pytest.fixture
def store_of(tmp_path):
    """Make a store of ids."""

    def make(ids):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.ids"
        path.write_bytes(np.asarray(ids, dtype="<u2").tobytes())
        return TokenStore(path, dtype="uint16", n_tokens=len(ids), n_vocab=N_VOCAB)

    return make


@pytest.fixture
def counts_of(tmp_path):
    """Make the counts of [bytes, characters, words] per token."""

    def make(rows):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.counts"
        path.write_bytes(np.asarray(rows, dtype="<u2").tobytes())
        return Counts(path, dtype="uint16", n_tokens=len(rows))

    return make


@pytest.fixture
def side_by_side(monkeypatch):
    """Take as many streams as the layout allows, whether that pays or not."""
    monkeypatch.setattr(
        scoring,
        "choose_streams",
        lambda n_segments, n_warm, limit, *, fixed: max(1, min(limit, n_segments - n_warm)),
    )


def score_tokens(model, store, **options):
    """Return the score and the nats of every token, NaN where none was recorded or more than once."""
    nats = np.full(store.n_tokens, np.nan)
    n_seen = np.zeros(store.n_tokens, dtype=int)

    def record(start, values):
        nats[start : start + len(values)] = values
        n_seen[start : start + len(values)] += 1

    score = final_score(evaluate(model, store, record=record, **options))
    return score, torch.from_numpy(np.where(n_seen == 1, nats, np.nan))


def by_training_path(ids, lengths, **changes):
    """Score one stream, segment after segment with hidden rows as memory: nats from the second token on."""
    return along_training_path(build(lengths, **changes), ids, lengths)


def along_training_path(model, ids, lengths):
    """The same at lengths that may not be those of the model's training."""
    trained, model.lengths = model.lengths, lengths
    tokens, memory, nats = torch.from_numpy(ids)[None], None, []
    with torch.no_grad():
        for begin in range(0, len(ids) - 1, lengths.tgt_len):
            end = min(begin + lengths.tgt_len, len(ids) - 1)
            hidden, memory = model.hidden_states(tokens[:, begin:end], memory)
            picked = model.log_probs(hidden)[0].gather(-1, tokens[0, begin + 1 : end + 1, None])
            nats.append(-picked[:, 0])
    model.lengths = trained
    return torch.cat(nats)


class TestWholeText:
    @pytest.mark.parametrize("lengths", LENGTHS, ids=str)
    def test_any_number_of_streams_gives_the_nats_of_the_training_path(self, store_of, side_by_side, lengths):
        ids = draw_ids(63)  # 62 targets: the last segment is short at most lengths
        expected, model = by_training_path(ids, lengths), build()
        n_used = set()
        for n_stream in (1, 3, 8):
            score, nats = score_tokens(model, store_of(ids), lengths=lengths, n_stream=n_stream)
            assert_same(nats[1:], expected)
            assert score.total_nll == pytest.approx(expected.sum().item(), rel=1e-10)
            assert score.tokens == 62
            n_used.add(score.n_stream)
        if lengths.mem_len < 1000 and lengths.tgt_len < 100:
            assert n_used == {1, 3, 8}

    @given(
        n_tokens=st.integers(2, 50),
        tgt_len=st.integers(1, 9),
        mem_len=st.integers(0, 20),
        n_stream=st.integers(1, 9),
        rule=st.sampled_from(["off", "mem_len", "mem_len+1"]),
        n_layer=st.integers(1, 3),
    )
    @settings(max_examples=20)
    def test_streams_side_by_side_equal_one_stream(
        self, tmp_path_factory, n_tokens, tgt_len, mem_len, n_stream, rule, n_layer
    ):
        lengths = Lengths(tgt_len, mem_len, same_length=rule)
        path = tmp_path_factory.mktemp("ids") / "text.ids"
        path.write_bytes(draw_ids(n_tokens).astype("<u2").tobytes())
        store = TokenStore(path, dtype="uint16", n_tokens=n_tokens, n_vocab=N_VOCAB)
        model = MODELS[n_layer]
        one, expected = score_tokens(model, store, lengths=lengths, n_stream=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(streams, "FIXED_MACS", {"cpu": 1e30})
            several, nats = score_tokens(model, store, lengths=lengths, n_stream=n_stream)
        assert one.tokens == several.tokens == n_tokens - 1
        assert_same(nats[1:], expected[1:])
        assert several.total_nll == pytest.approx(one.total_nll, rel=1e-10)

    @pytest.mark.parametrize("lengths", LENGTHS[:5], ids=str)
    def test_totals_in_float32_agree_to_1e_6(self, store_of, side_by_side, lengths):
        store, model = store_of(draw_ids(100)), build(dtype=torch.float32)
        totals = [
            final_score(evaluate(model, store, lengths=lengths, n_stream=n)).total_nll for n in (1, 3, 8)
        ]
        # The bound is the promise: float32 losses, summed in float64, in three orders of arithmetic.
        assert totals == pytest.approx([totals[0]] * 3, rel=1e-6)

    @pytest.mark.parametrize(
        "lengths", [Lengths(4, 6), Lengths(4, 8), Lengths(4, 6, same_length="mem_len+1")]
    )
    def test_one_segment_of_warm_up_less_would_show(self, store_of, side_by_side, monkeypatch, lengths):
        ids, model = draw_ids(120), build()
        expected = by_training_path(ids, lengths)
        enough = Lengths.warm_segments
        monkeypatch.setattr(Lengths, "warm_segments", lambda *args: enough(*args) - 1)
        _, nats = score_tokens(model, store_of(ids), lengths=lengths, n_stream=3)
        assert (nats[1:] - expected).abs().max() > 1e-8

    def test_without_memory_every_segment_is_scored_on_its_own(self, store_of):
        ids, model = draw_ids(23), build()
        _, nats = score_tokens(model, store_of(ids), lengths=Lengths(5, 0))
        alone = [
            score_tokens(model, store_of(ids[begin : begin + 6]), lengths=Lengths(5, 0))[1][1:]
            for begin in range(0, 22, 5)
        ]
        assert_same(nats[1:], torch.cat(alone))

    @pytest.mark.parametrize("sizes", [(7, 20), (20, 7), (1, 5), (32, 0), (5, 1000)])
    def test_memory_holds_mem_len_rows_or_all_tokens_so_far(self, store_of, monkeypatch, sizes):
        tgt_len, mem_len = sizes
        model, seen = build(), []
        extend = model.extend

        def spy(tokens, cache):
            hidden, cache = extend(tokens, cache)
            seen.append((tokens.shape[1], cache.n_memory, cache.n_segment))
            return hidden, cache

        monkeypatch.setattr(model, "extend", spy)
        final_score(evaluate(model, store_of(draw_ids(50)), lengths=Lengths(tgt_len, mem_len), n_stream=1))
        begins = range(0, 49, tgt_len)
        expected = [(min(tgt_len, 49 - b), min(mem_len, b), min(tgt_len, 49 - b)) for b in begins]
        assert seen == expected

    def test_the_first_tokens_score_as_a_text_that_ends_there(self, store_of):
        ids, model = draw_ids(60), build(Lengths(4, 6))
        part, _ = score_tokens(model, store_of(ids), n_tokens=31)
        whole, _ = score_tokens(model, store_of(ids[:31]))
        assert part.total_nll == whole.total_nll
        assert part.tokens == 30
        assert score_tokens(model, store_of(ids), n_tokens=999)[0].tokens == 59

    def test_lengths_are_those_of_training_unless_given(self, store_of):
        store = store_of(draw_ids(40))
        given_lengths = final_score(evaluate(build(), store, lengths=Lengths(3, 7)))
        own = final_score(evaluate(build(Lengths(3, 7)), store))
        assert own.total_nll == given_lengths.total_nll
        assert (own.lengths, own.is_beyond_training) == (Lengths(3, 7), False)
        assert given_lengths.is_beyond_training

    def test_two_calls_give_the_same_bits(self, store_of):
        store, model = store_of(draw_ids(80)), build(Lengths(4, 6), dtype=torch.float32)
        first, second = (score_tokens(model, store, n_stream=3) for _ in range(2))
        assert first[0].total_nll == second[0].total_nll
        assert torch.equal(first[1][1:], second[1][1:])

    def test_two_tokens_are_enough_and_fewer_are_refused(self, store_of):
        ids = draw_ids(2)
        score, nats = score_tokens(build(), store_of(ids), lengths=Lengths(7, 20), n_stream=8)
        assert (score.tokens, score.n_stream) == (1, 1)
        assert_same(nats[1:], by_training_path(ids, Lengths(7, 20)))
        for n, got in ((0, "0 tokens"), (1, "1 token")):
            with pytest.raises(UserError) as refused:
                final_score(evaluate(build(), store_of(ids[:n]), place="a.txt"))
            assert str(refused.value) == (
                f"a.txt: too short to score; got {got}; "
                "all but the first are scored, so there must be at least 2"
            )

    def test_progress_counts_every_token_run_and_ends_with_the_score(self, store_of, side_by_side):
        *progress, score = evaluate(build(), store_of(draw_ids(63)), lengths=Lengths(4, 4), n_stream=3)
        assert isinstance(score, Score)
        assert all(isinstance(event, EvalProgress) for event in progress)
        done = [event.done for event in progress]
        assert done == sorted(set(done))
        # 62 targets in 16 segments, and 2 segments of warm-up for each of two streams.
        assert {event.total for event in progress} == {done[-1]} == {62 + 2 * 2 * 4}
        assert score.elapsed_s > 0
        assert score.tokens_per_s == score.tokens / score.elapsed_s

    def test_bf16_products_give_about_the_same(self, store_of):
        store, model = store_of(draw_ids(80)), build(Lengths(4, 6), dtype=torch.float32)
        plain, rounded = (final_score(evaluate(model, store, precision=p)) for p in ("fp32", "bf16"))
        # Eight bits of mantissa in weights of this size: a few hundredths of a nat.
        assert plain.nll == pytest.approx(rounded.nll, abs=0.05)
        assert plain.nll != rounded.nll

    def test_the_vocabulary_is_gone_through_in_parts(self, store_of, monkeypatch):
        store, model = store_of(draw_ids(63)), build(Lengths(8, 4))
        _, whole = score_tokens(model, store)
        monkeypatch.setattr(running, "MAX_LOGITS", 5 * N_VOCAB)
        sizes, cross_entropy = [], torch.nn.functional.cross_entropy

        def spy(logits, *args, **rest):
            sizes.append(logits.shape)
            return cross_entropy(logits, *args, **rest)

        monkeypatch.setattr(torch.nn.functional, "cross_entropy", spy)
        _, parts = score_tokens(model, store)
        assert max(sizes) == (5, N_VOCAB)
        assert_same(parts[1:], whole[1:])

    @pytest.mark.gpu
    def test_streams_agree_on_a_gpu(self, store_of, side_by_side):
        ids, model = draw_ids(200), build().cuda()
        for lengths in LENGTHS[:5]:
            _, nats = score_tokens(model, store_of(ids), lengths=lengths, n_stream=3)
            assert_same(nats[1:], by_training_path(ids, lengths))


class TestSchemes:
    @pytest.mark.parametrize("scheme", SCHEMES)
    @pytest.mark.parametrize(
        "lengths",
        [
            Lengths(5, 3),
            Lengths(4, 0),
            Lengths(4, 6),
            Lengths(3, 7),
            Lengths(5, 1000),
            Lengths(1, 2, same_length="mem_len"),
            Lengths(4, 5, same_length="mem_len+1"),
            Lengths(9, 4),
        ],
        ids=str,
    )
    def test_any_number_of_streams_gives_the_nats_of_the_training_path(
        self, store_of, side_by_side, scheme, lengths
    ):
        if scheme == "learned":  # it has five rows; longer segments are refused, see below
            lengths = lengths._replace(tgt_len=min(lengths.tgt_len, 5))
        ids, model = draw_ids(43), build_scheme(scheme)
        expected = along_training_path(model, ids, lengths)
        for n_stream in (1, 3):
            score, nats = score_tokens(model, store_of(ids), lengths=lengths, n_stream=n_stream)
            assert_same(nats[1:], expected)
            assert score.n_stream == (1 if lengths.mem_len == 1000 else n_stream)

    @pytest.mark.parametrize("scheme", ["relative", "shaw", "shaw, keys alone"])
    def test_distances_are_clamped_alike_on_both_paths(self, store_of, side_by_side, scheme):
        ids, model = draw_ids(63), build_scheme(scheme)
        for lengths in (Lengths(4, 6, clamp_len=3), Lengths(5, 3, clamp_len=0), Lengths(5, 9, clamp_len=7)):
            _, nats = score_tokens(model, store_of(ids), lengths=lengths, n_stream=3)
            assert_same(nats[1:], along_training_path(model, ids, lengths))

    def test_a_stream_that_begins_at_the_wrong_position_would_show(self, store_of, side_by_side, monkeypatch):
        ids, model = draw_ids(63), build_scheme("sinusoid that runs on")
        _, nats = score_tokens(model, store_of(ids), n_stream=3)
        new_cache = model.new_cache
        monkeypatch.setattr(model, "new_cache", lambda n, lengths, at: new_cache(n, lengths))
        _, wrong = score_tokens(model, store_of(ids), n_stream=3)
        # 13 segments of 5, two more for the warm-up of each stream but the first: that one scores 6.
        assert_same(wrong[1:31], nats[1:31])
        assert (wrong[31:] - nats[31:]).abs().min() > 1e-8

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_a_text_shorter_than_a_segment_scores_as_the_beginning_of_a_longer_one(self, store_of, scheme):
        ids, model = draw_ids(20), build_scheme(scheme)
        _, whole = score_tokens(model, store_of(ids))
        for n_tokens in range(2, 8):
            _, nats = score_tokens(model, store_of(ids[:n_tokens]))
            assert_same(nats[1:], whole[1:n_tokens])

    @pytest.mark.parametrize("scheme", SCHEMES)
    @pytest.mark.parametrize("lengths", [Lengths(5, 3), Lengths(4, 5, same_length="mem_len")], ids=str)
    def test_each_line_scores_as_alone_after_a_newline(self, store_of, scheme, lengths):
        model = build_scheme(scheme)
        alone = [along_training_path(model, np.array([NEWLINE, *line]), lengths) for line in LINES]
        _, nats, _ = score_lines(model, store_of(TEXT), lengths=lengths, n_stream=2)
        assert_same(nats, torch.cat(alone))

    @pytest.mark.parametrize("by_line", [False, True])
    @pytest.mark.parametrize(
        ("scheme", "lengths", "message"),
        [
            (
                "learned",
                Lengths(6, 3),
                "--tgt-len: this model has learned 5 positions; got 6; "
                "give 5 or less, and more --mem-len for more context",
            ),
            (
                "sinusoid",
                Lengths(5, 3, clamp_len=2),
                "--clamp-len: position sinusoid has no distances; got 2; leave it out",
            ),
        ],
    )
    def test_lengths_that_a_scheme_does_not_have_are_refused(
        self, store_of, monkeypatch, scheme, lengths, message, by_line
    ):
        model = build_scheme(scheme)
        monkeypatch.setattr(model, "new_cache", _raise(AssertionError("allocated")))
        events = (
            evaluate_by_line(model, store_of(TEXT), lengths=lengths, newline_id=NEWLINE)
            if by_line
            else evaluate(model, store_of([1, 2, 3]), lengths=lengths)  # too short to need the sixth position
        )
        with pytest.raises(UserError) as refused:
            final_score(events)
        assert str(refused.value) == message

    def test_more_positions_than_in_training_are_said(self, store_of):
        store, model = store_of(draw_ids(40)), build_scheme("sinusoid")
        assert final_score(evaluate(model, store, lengths=Lengths(6, 3))).is_beyond_training
        assert not final_score(evaluate(model, store, lengths=Lengths(5, 3))).is_beyond_training

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_nothing_of_a_training_is_disturbed(self, store_of, scheme):
        model = build_scheme(scheme, dropout=0.2).train()
        tokens = torch.from_numpy(draw_ids(30)).view(2, 15)
        _, memory = model(tokens[:, :5], None, tokens[:, 1:6])
        before = memory.position.clone(), [rows.clone() for rows in memory.hidden]
        final_score(evaluate(model, store_of(draw_ids(40)), n_stream=2))
        assert torch.equal(memory.position, before[0])
        assert all(torch.equal(a, b) for a, b in zip(memory.hidden, before[1], strict=True))


END = N_VOCAB - 1
DOCUMENT_LINES = [
    *([1, NEWLINE], [2, NEWLINE, END], [END], [4, 5, 1, 2, 7, 6, NEWLINE], [NEWLINE], [8, 8, END]),
    *([2, 0, NEWLINE, END], [END], [NEWLINE, END], [*([7, 1, 9, 0] * 5), END], [4, 2]),
]


def draw_documents(n_tokens):
    """Ids with a document's end, the last id, among five."""
    ids = draw_ids(n_tokens, seed=5) % END
    ids[np.random.default_rng(6).random(n_tokens) < 0.2] = END
    return ids


class TestDocuments:
    @pytest.mark.parametrize("scheme", SCHEMES)
    @pytest.mark.parametrize(
        "lengths",
        [
            *(Lengths(5, 3), Lengths(4, 0), Lengths(3, 7), Lengths(1, 4)),
            *(Lengths(4, 5, same_length="mem_len"), Lengths(4, 6, memory_start="zeros")),
        ],
        ids=str,
    )
    def test_any_number_of_streams_gives_the_nats_of_the_training_path(
        self, store_of, side_by_side, scheme, lengths
    ):
        ids, model = draw_documents(63), build_scheme(scheme, reset_memory_at_documents=True)
        expected = along_training_path(model, ids, lengths)
        for n_stream in (1, 3, 8):
            score, nats = score_tokens(model, store_of(ids), lengths=lengths, n_stream=n_stream)
            assert_same(nats[1:], expected)
            assert score.n_stream == n_stream

    @pytest.mark.parametrize("rule", ["off", "mem_len+1"])
    def test_one_segment_of_warm_up_less_would_show(self, store_of, side_by_side, monkeypatch, rule):
        # One document but for its end, which is no nearer to a stream's start than the warm-up reaches.
        ids, lengths = draw_ids(120) % END, Lengths(4, 6, same_length=rule)
        ids[3] = END
        expected, model = by_training_path(ids, lengths, reset_memory_at_documents=True), build()
        model.document_end = END
        _, nats = score_tokens(model, store_of(ids), lengths=lengths, n_stream=3)
        assert_same(nats[1:], expected)
        enough = Lengths.warm_segments
        monkeypatch.setattr(Lengths, "warm_segments", lambda *args: enough(*args) - 1)
        _, nats = score_tokens(model, store_of(ids), lengths=lengths, n_stream=3)
        assert (nats[1:] - expected).abs().max() > 1e-8

    @pytest.mark.parametrize("is_reset", [False, True])
    def test_a_document_s_end_ends_its_last_line(self, store_of, monkeypatch, is_reset):
        model = build(Lengths(5, 3), reset_memory_at_documents=is_reset)
        store = store_of([token for line in DOCUMENT_LINES for token in line])
        alone = [
            along_training_path(model, np.array([NEWLINE, *line]), model.lengths) for line in DOCUMENT_LINES
        ]
        for block in (1, 2, 7, scoring.COUNT_BLOCK):
            monkeypatch.setattr(scoring, "COUNT_BLOCK", block)
            score, nats, _ = score_lines(model, store, document_end=END)
            assert score.n_line == len(DOCUMENT_LINES)
            assert_same(nats, torch.cat(alone))

    def test_without_documents_the_last_id_is_a_token_like_any_other(self, store_of):
        ids = draw_documents(63)
        _, nats = score_tokens(build(Lengths(5, 3)), store_of(ids))
        assert (nats[1:] - by_training_path(ids, Lengths(5, 3))).abs().max() < 1e-8
        on = by_training_path(ids, Lengths(5, 3), reset_memory_at_documents=True)
        assert (nats[1:] - on).abs().max() > 1e-3


class TestClusters:
    @pytest.mark.parametrize(
        "settings",
        [
            {"cutoffs": (4, 7)},
            {"cutoffs": (4, 7), "div_val": 2},
            {"cutoffs": (5,), "d_embed": 6, "tied": False, "tie_projs": "none"},
        ],
        ids=str,
    )
    def test_tokens_in_clusters_score_in_order(self, store_of, side_by_side, monkeypatch, settings):
        ids, lengths = draw_ids(63), Lengths(4, 6)
        expected = by_training_path(ids, lengths, **settings)
        model = build(lengths, **settings)
        for max_logits in (running.MAX_LOGITS, 9):
            monkeypatch.setattr(running, "MAX_LOGITS", max_logits)
            for n_stream in (1, 3):
                _, nats = score_tokens(model, store_of(ids), n_stream=n_stream)
                assert_same(nats[1:], expected)

    def test_what_a_step_takes_counts_the_widest_cluster(self, monkeypatch):
        monkeypatch.setattr(streams, "MAX_LOGITS", 1)
        plain, clustered = build(), build(cutoffs=(4, 7))
        assert clustered.head.clusters.widest == 6
        sizes = [streams.measure(model, Lengths(4, 6)) for model in (plain, clustered)]
        assert sizes[0].bytes_fixed - sizes[1].bytes_fixed == 2 * (11 - 6) * 8
        assert sizes[0].bytes_stream == sizes[1].bytes_stream
        assert sizes[0].fixed < sizes[1].fixed


class TestLengths:
    def test_a_memory_beyond_the_text_takes_no_more_room_than_the_text(self, store_of, monkeypatch):
        ids, model, made = draw_ids(50), build(), []
        new_cache = model.new_cache
        monkeypatch.setattr(
            model, "new_cache", lambda n, lengths, at: (made.append(lengths), new_cache(n, lengths, at))[1]
        )
        for rule in ("off", "mem_len"):
            lengths = Lengths(4, 999_999_999, same_length=rule)
            score, nats = score_tokens(model, store_of(ids), lengths=lengths)
            assert_same(nats[1:], by_training_path(ids, Lengths(4, 1000, same_length=rule)))
            assert score.lengths == lengths
            assert score.notices == ("mem_len 999,999,999 exceeds the text: every token sees all before it",)
            assert score.context_min == score.context_max == score.receptive_field == 49
        assert max(lengths.mem_len for lengths in made) <= 49

    def test_a_segment_beyond_the_text_takes_no_more_room_than_the_text(self, store_of):
        ids = draw_ids(50)
        score, nats = score_tokens(build(), store_of(ids), lengths=Lengths(10**9, 10**9))
        assert_same(nats[1:], by_training_path(ids, Lengths(49, 0)))
        assert score.tokens == 49

    def test_same_length_without_memory_would_hide_everything(self, store_of):
        store, model = store_of(draw_ids(50)), build()
        score = final_score(evaluate(model, store, lengths=Lengths(4, 0, same_length="mem_len")))
        plain = final_score(evaluate(model, store, lengths=Lengths(4, 0)))
        assert score.total_nll == plain.total_nll
        assert score.lengths == Lengths(4, 0)
        assert score.notices == (
            "mem_len 0 with same_length mem_len would leave no key to see: scored without same_length",
        )
        assert plain.notices == ()
        assert (
            final_score(evaluate(model, store, lengths=Lengths(4, 0, same_length="mem_len+1"))).notices == ()
        )

    @pytest.mark.parametrize(
        ("lengths", "expected"),
        [
            (Lengths(32, 64), (65, 96)),
            (Lengths(8, 0), (1, 8)),
            (Lengths(8, 5, same_length="mem_len"), (5, 5)),
            (Lengths(8, 5, same_length="mem_len+1"), (6, 6)),
        ],
    )
    def test_context_counts_the_current_token(self, lengths, expected):
        assert context(lengths) == expected

    @pytest.mark.parametrize("n_layer", [1, 2, 3])
    @pytest.mark.parametrize(
        "lengths",
        [Lengths(4, 0), Lengths(4, 6), Lengths(4, 8), Lengths(4, 3, same_length="mem_len+1")],
        ids=str,
    )
    def test_the_receptive_field_is_what_a_prediction_depends_on(self, store_of, n_layer, lengths):
        model, ids = build(n_layer=n_layer), draw_ids(61)
        reach = receptive_field(lengths, n_layer)
        target = 60  # predicted by the last input of the 15th segment of 4

        def nats_of_target(changed):
            other = ids.copy()
            other[changed] = (other[changed] + 1) % N_VOCAB
            return score_tokens(model, store_of(other), lengths=lengths)[1][target]

        plain = score_tokens(model, store_of(ids), lengths=lengths)[1][target]
        assert nats_of_target(target - reach) != plain
        assert nats_of_target(target - reach - 1) == plain

    def test_what_does_not_fit_in_memory_is_refused_with_numbers(self, store_of, monkeypatch):
        model, store = build(), store_of(draw_ids(5000))
        monkeypatch.setattr(streams, "free_bytes", lambda device: 500_000_000)
        assert final_score(evaluate(model, store, lengths=Lengths(100, 8))).tokens == 4999
        with pytest.raises(UserError) as refused:
            final_score(evaluate(model, store, lengths=Lengths(2000, 3000)))
        assert str(refused.value) == (
            "--mem-len: 3,000 rows at tgt_len 2,000 do not fit in memory; "
            "one stream needs about 0.9 GB of 0.5 GB free; lower --mem-len or --tgt-len"
        )

    def test_streams_that_do_not_fit_in_memory_take_turns(self, store_of, side_by_side, monkeypatch):
        model, store, lengths = build(), store_of(draw_ids(200)), Lengths(4, 8)
        size = streams.measure(model, lengths)
        free = (size.bytes_fixed + 3 * size.bytes_stream + size.bytes_stream // 2) / streams.USABLE_SHARE
        expected = final_score(evaluate(model, store, lengths=lengths, n_stream=8))
        monkeypatch.setattr(streams, "free_bytes", lambda device: free)
        score = final_score(evaluate(model, store, lengths=lengths, n_stream=8))
        assert (expected.n_stream, score.n_stream) == (8, 3)
        assert score.total_nll == pytest.approx(expected.total_nll, rel=1e-10)

    @pytest.mark.parametrize(
        "error",
        [
            torch.OutOfMemoryError("CUDA out of memory"),
            MemoryError(),
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        ],
        ids=repr,
    )
    def test_an_allocation_that_fails_is_refused_too(self, store_of, monkeypatch, error):
        model = build()
        monkeypatch.setattr(streams, "free_bytes", lambda device: None)
        monkeypatch.setattr(model, "extend", _raise(error))
        with pytest.raises(
            UserError, match=r"^--mem-len: 8 rows at tgt_len 4 do not fit in memory; one stream "
        ):
            final_score(evaluate(model, store_of(draw_ids(90)), lengths=Lengths(4, 8)))

    def test_other_errors_keep_their_traceback(self, store_of, monkeypatch):
        model = build()
        monkeypatch.setattr(model, "extend", _raise(RuntimeError("a bug")))
        with pytest.raises(RuntimeError, match=r"^a bug$"):
            final_score(evaluate(model, store_of(draw_ids(9))))


def _raise(error):
    def fail(*_):
        raise error

    return fail


class TestStreams:
    @given(
        n_segments=st.one_of(st.integers(1, 300), st.integers(1, 2**40)),
        n_warm=st.one_of(st.integers(0, 40), st.integers(0, 2**40)),
        n_stream=st.integers(1, 64),
    )
    def test_each_segment_is_scored_once_after_a_full_warm_up(self, n_segments, n_warm, n_stream):
        n_stream = max(1, min(n_stream, n_segments - n_warm))
        layout = lay_out(n_segments, n_warm, n_stream)
        assert len(layout) == n_stream
        assert layout[0].begin == layout[0].scored == 0
        assert layout[-1].end == n_segments
        assert all(a.end == b.scored for a, b in pairwise(layout))
        assert all(stream.scored < stream.end for stream in layout)
        assert all(stream.begin == stream.scored - n_warm >= 0 for stream in layout[1:])
        lengths = [stream.end - stream.begin for stream in layout]
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] - lengths[-1] <= 1

    @pytest.mark.parametrize(
        ("lengths", "n_layer", "expected"),
        [
            (Lengths(4, 0), 6, 0),
            (Lengths(4, 4), 6, 6),
            (Lengths(4, 5), 6, 12),
            (Lengths(4, 5, same_length="mem_len"), 6, 6),
            (Lengths(4, 5, same_length="mem_len+1"), 6, 8),
            (Lengths(4, 0, same_length="mem_len+1"), 6, 0),
        ],
    )
    def test_warm_up_rounds_up_once_a_layer_or_by_tokens(self, lengths, n_layer, expected):
        assert lengths.warm_segments(n_layer) == expected

    def test_streams_are_taken_only_where_they_pay(self):
        assert choose_streams(1000, 0, 64, fixed=1.0) > 16
        assert choose_streams(1000, 0, 3, fixed=1.0) == 3
        assert choose_streams(1000, 0, 64, fixed=0.0) == 1  # nothing is saved
        assert choose_streams(1000, 100, 64, fixed=0.1) == 1  # the warm-up costs more than it saves
        assert (
            2 <= choose_streams(1000, 10, 64, fixed=1.0) <= 12
        )  # about sqrt(990 / 10), the least of the sum
        assert choose_streams(10, 10, 64, fixed=100.0) == 1  # all would be warm-up
        assert choose_streams(11, 10, 64, fixed=100.0) == 1
        assert choose_streams(1, 0, 64, fixed=100.0) == 1

    @given(
        n_segments=st.integers(1, 500),
        n_warm=st.integers(0, 60),
        limit=st.integers(1, 40),
        fixed=st.floats(0, 100),
    )
    def test_the_choice_never_costs_more_than_one_stream_or_the_limit(self, n_segments, n_warm, limit, fixed):
        def cost(n_stream):
            return (lay_out(n_segments, n_warm, n_stream)[0].end) * (fixed + n_stream)

        most = max(1, min(limit, n_segments - n_warm))
        chosen = choose_streams(n_segments, n_warm, limit, fixed=fixed)
        assert 1 <= chosen <= most
        assert cost(chosen) <= 1.03 * min(cost(1), cost(most))


class TestUnits:
    def test_bytes_characters_and_words_are_those_of_the_scored_tokens(self, store_of, counts_of):
        ids = draw_ids(6)
        rows = [[9, 9, 9], [1, 1, 0], [2, 1, 1], [0, 0, 0], [3, 2, 0], [4, 3, 1]]
        score = final_score(evaluate(build(), store_of(ids), counts_of(rows)))
        assert (score.n_bytes, score.n_characters, score.n_words) == (10, 7, 2)
        bits = score.total_nll / math.log(2)
        assert score.bits_per_byte * 10 == pytest.approx(bits, rel=1e-15)
        assert score.bits_per_char * 7 == pytest.approx(bits, rel=1e-15)
        assert score.word_perplexity == pytest.approx(math.exp(score.total_nll / 2), rel=1e-15)
        assert score.nll == score.total_nll / 5
        assert score.perplexity == math.exp(score.nll)
        part = final_score(evaluate(build(), store_of(ids), counts_of(rows), n_tokens=3))
        assert (part.n_bytes, part.n_characters, part.n_words) == (3, 2, 1)

    def test_unknown_or_absent_units_are_none(self, store_of, counts_of):
        store = store_of(draw_ids(3))
        unknown = final_score(evaluate(build(), store))
        assert (unknown.n_bytes, unknown.n_characters, unknown.n_words) == (None, None, None)
        none = final_score(evaluate(build(), store, counts_of([[1, 1, 1], [0, 0, 0], [0, 0, 0]])))
        assert (none.n_bytes, none.n_characters, none.n_words) == (0, 0, 0)
        for score in (unknown, none):
            assert (score.bits_per_byte, score.bits_per_char, score.word_perplexity) == (None, None, None)

    @pytest.mark.parametrize("scale", [1e3, 1e15, 1e38])
    def test_huge_weights_give_a_number_or_infinity(self, store_of, counts_of, scale):
        model = build(Lengths(4, 6), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(scale)
        store, counts = store_of(draw_ids(40)), counts_of([[1, 1, 1]] * 40)
        score = final_score(evaluate(model, store, counts))
        assert score.total_nll > 100
        assert score.perplexity > 1e10
        assert (score.word_perplexity, score.bits_per_byte) > (1e10, 1)
        not_finite = "the model's outputs are not finite: its weights are damaged or far too large"
        assert (not_finite in score.notices) == math.isinf(score.total_nll)


class TestTraining:
    def test_nothing_of_a_training_is_disturbed(self, store_of):
        store = store_of(draw_ids(40))

        def steps(*, is_evaluated):
            torch.manual_seed(5)
            model = build(Lengths(4, 6), dtype=torch.float32, dropout=0.2).train()
            torch.manual_seed(6)
            tokens, memory, losses = torch.from_numpy(draw_ids(36)).view(3, 12), None, []
            for begin in range(0, 8, 4):
                nll, memory = model(tokens[:, begin : begin + 4], memory, tokens[:, begin + 1 : begin + 5])
                if is_evaluated:
                    final_score(evaluate(model, store, n_tokens=20, n_stream=2))
                nll.mean().backward()
                if is_evaluated:
                    final_score(evaluate(model, store))
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.sub_(0.1 * parameter.grad)
                        parameter.grad = None
                losses.append(nll.detach())
            return torch.stack(losses), torch.get_rng_state(), [p.detach() for p in model.parameters()]

        plain, evaluated = steps(is_evaluated=False), steps(is_evaluated=True)
        assert torch.equal(plain[0], evaluated[0])
        assert torch.equal(plain[1], evaluated[1])
        assert all(torch.equal(a, b) for a, b in zip(plain[2], evaluated[2], strict=True))

    def test_every_module_gets_its_mode_back_however_it_ends(self, store_of, monkeypatch):
        model, store = build(dropout=0.5).train(), store_of(draw_ids(40))
        model.layers[1].eval()
        modes = [module.training for module in model.modules()]
        score = final_score(evaluate(model, store, lengths=Lengths(4, 0)))
        assert [module.training for module in model.modules()] == modes
        assert score.total_nll == final_score(evaluate(build(), store, lengths=Lengths(4, 0))).total_nll

        events = evaluate(model, store, n_stream=1)
        next(events)
        assert not any(module.training for module in model.modules())
        events.close()
        assert [module.training for module in model.modules()] == modes

        monkeypatch.setattr(model, "extend", _raise(RuntimeError("a bug")))
        with pytest.raises(RuntimeError):
            final_score(evaluate(model, store))
        assert [module.training for module in model.modules()] == modes

    def test_whoever_consumes_the_events_keeps_gradients_and_precision(self, store_of):
        model = build(dtype=torch.float32)
        for _ in evaluate(model, store_of(draw_ids(40)), precision="bf16"):
            assert torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()
            assert not torch.is_autocast_enabled("cpu")
        assert all(parameter.grad is None for parameter in model.parameters())


LINES = [[NEWLINE], [1, NEWLINE], [2, 5, 4, NEWLINE], [NEWLINE], [*([7, 1, 9, 0] * 9), NEWLINE], [8, 6, 2, 4]]
TEXT = [token for line in LINES for token in line]


def score_lines(model, store, **options):
    with TokenNats() as nats:
        score = final_score(evaluate_by_line(model, store, newline_id=NEWLINE, record=nats.record, **options))
        return score, torch.from_numpy(nats.read(0, store.n_tokens)), (nats.start, nats.stop)


class TestByLine:
    @pytest.mark.parametrize(
        "lengths",
        [
            Lengths(4, 0),
            Lengths(4, 6),
            Lengths(50, 6),
            Lengths(4, 1000),
            Lengths(4, 5, same_length="mem_len"),
            Lengths(4, 5, same_length="mem_len+1"),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("n_stream", [1, 2, None])
    def test_each_line_scores_as_alone_after_a_newline(self, store_of, lengths, n_stream):
        store = store_of(TEXT)
        alone = [by_training_path(np.array([NEWLINE, *line]), lengths) for line in LINES]
        score, nats, span = score_lines(build(), store, lengths=lengths, n_stream=n_stream)
        assert_same(nats, torch.cat(alone))
        assert score.total_nll == pytest.approx(nats.sum().item(), rel=1e-10)
        assert (score.tokens, score.n_line) == (store.n_tokens, len(LINES))
        assert span == (0, store.n_tokens)

    def test_lots_and_reads_of_any_size_find_the_same_lines(self, store_of, monkeypatch):
        store, model = store_of(TEXT * 2), build(Lengths(4, 6))
        score, nats, _ = score_lines(model, store)
        assert score.n_line == 2 * len(LINES) - 1  # the last line had no newline: it goes on in the first
        for block in (1, 7):
            for lot in (1, 20, 1000):
                monkeypatch.setattr(scoring, "COUNT_BLOCK", block)
                monkeypatch.setattr(scoring, "WINDOW_TOKENS", lot)
                again, nats_again, _ = score_lines(model, store)
                assert again.n_line == score.n_line
                assert_same(nats_again, nats)

    def test_a_text_that_ends_with_a_newline_has_no_empty_line_after_it(self, store_of):
        score, _, _ = score_lines(build(), store_of([1, NEWLINE, 2, NEWLINE]))
        assert score.n_line == 2

    def test_all_tokens_count(self, store_of, counts_of):
        score = final_score(
            evaluate_by_line(
                build(),
                store_of([1, NEWLINE, 2]),
                counts_of([[2, 1, 1], [1, 1, 0], [3, 1, 1]]),
                newline_id=NEWLINE,
            )
        )
        assert (score.n_bytes, score.n_characters, score.n_words) == (6, 3, 2)

    def test_same_length_without_memory_is_left_out_with_a_notice(self, store_of):
        store, model = store_of(TEXT), build()
        score, nats, _ = score_lines(model, store, lengths=Lengths(4, 0, same_length="mem_len"))
        _, plain, _ = score_lines(model, store, lengths=Lengths(4, 0))
        assert_same(nats, plain)
        assert [notice[:36] for notice in score.notices] == ["mem_len 0 with same_length mem_len w"]

    def test_one_token_is_enough_and_no_token_or_no_newline_is_refused(self, store_of):
        score, nats, _ = score_lines(build(), store_of([5]))
        assert score.tokens == 1
        assert_same(nats, by_training_path(np.array([NEWLINE, 5]), LENGTHS[0]))
        with pytest.raises(UserError) as refused:
            final_score(evaluate_by_line(build(), store_of([]), newline_id=NEWLINE, place="a.txt"))
        assert str(refused.value) == (
            "a.txt: too short to score; got 0 tokens; by line there must be at least 1"
        )
        with pytest.raises(UserError) as refused:
            final_score(evaluate_by_line(build(), store_of([1, 2]), newline_id=None))
        assert str(refused.value) == (
            "--by-line: lines start after a newline token; the vocabulary has none; leave it out"
        )

    def test_a_memory_beyond_the_longest_line_is_said(self, store_of):
        score, _, _ = score_lines(build(), store_of(TEXT), lengths=Lengths(4, 38))
        assert score.notices == ("mem_len 38 exceeds the longest line: every token sees all before it",)
        assert score.context_max == 37

    def test_progress_ends_with_all_tokens(self, store_of):
        *progress, score = evaluate_by_line(build(), store_of(TEXT), newline_id=NEWLINE)
        assert progress[-1] == EvalProgress(score.tokens, score.tokens)


class TestTokens:
    def test_tokens_come_in_the_order_of_the_text(self, store_of, counts_of, side_by_side, monkeypatch):
        monkeypatch.setattr("txlcli.evaluate.tokens.TOKEN_BLOCK", 7)
        ids, lengths = draw_ids(63), Lengths(4, 4)
        store, counts = store_of(ids), counts_of([[i % 3, 1, 0] for i in range(63)])
        with TokenNats() as nats:
            score = final_score(
                evaluate(build(), store, counts, lengths=lengths, n_stream=8, record=nats.record)
            )
            tokens = list(token_scores(store, counts, nats))
        assert [token.position for token in tokens] == list(range(1, 63))
        assert [token.token for token in tokens] == ids[1:].tolist()
        assert [token.previous for token in tokens] == ids[:-1].tolist()
        assert [token.byte_offset for token in tokens] == [sum(j % 3 for j in range(i)) for i in range(1, 63)]
        values = torch.tensor([token.nats for token in tokens], dtype=torch.float64)
        assert_same(values, by_training_path(ids, lengths))
        assert math.fsum(values.tolist()) == pytest.approx(score.total_nll, rel=1e-12)

    def test_byte_order_marks_stand_before_the_first_token_of_their_file(self, store_of, counts_of):
        end, sizes = 9, [1, 2, 0, 0, 1, 3]
        store, counts = store_of([1, 2, end, 3, 4, 5]), counts_of([[size, 0, 0] for size in sizes])
        marked = Counts(counts.path, dtype="uint16", n_tokens=6, marks=((0, 3), (3, 2), (4, 4)))
        with TokenNats() as nats:
            nats.record(0, np.zeros(6))
            tokens = list(token_scores(store, marked, nats, document_end=end))
        # The end of the first document, and the first of two pieces of a character in the second.
        assert [token.byte_offset for token in tokens] == [3, 4, 6, 8, 8, 13]

    def test_by_line_the_first_token_comes_too_and_offsets_may_be_unknown(self, store_of):
        store = store_of(TEXT)
        with TokenNats() as nats:
            final_score(evaluate_by_line(build(), store, newline_id=NEWLINE, record=nats.record))
            tokens = list(token_scores(store, None, nats))
        assert [token.position for token in tokens] == list(range(store.n_tokens))
        assert tokens[0].previous is None
        assert {token.byte_offset for token in tokens} == {None}

    def test_nothing_recorded_is_nothing(self, store_of):
        with TokenNats() as nats:
            assert list(token_scores(store_of([1, 2]), None, nats)) == []


def test_bytes_that_are_no_text_have_no_characters(store_of, tmp_path):
    ids = draw_ids(9)
    path = tmp_path / "binary.counts"
    path.write_bytes(np.tile([1, 1, 0], 9).astype("u1").tobytes())
    counts = Counts(path, dtype="uint8", n_tokens=9, is_text=False)
    score = final_score(evaluate(build(), store_of(ids), counts))
    assert (score.n_bytes, score.n_characters, score.n_words) == (8, None, None)
    assert score.bits_per_byte == pytest.approx(score.total_nll / 8 / math.log(2), rel=1e-12)
    assert score.bits_per_char is None
