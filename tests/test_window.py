import io
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tolerance import assert_same
from txlcli import UserError
from txlcli.config import ModelConfig
from txlcli.data import TokenStore
from txlcli.evaluate import (
    Draw,
    EvalProgress,
    WindowScore,
    evaluate,
    final_score,
    layer_macs,
    score_window,
    streams,
    window,
    window_length,
)
from txlcli.evaluate.streams import usable
from txlcli.evaluate.window import Segments, Windows, find_fastest, ideal_ratio
from txlcli.model import Lengths, Memory, TransformerXL
from txlcli.report import Screen, window_table

N_VOCAB, N_TEXT = 11, 41

# Trained at tgt_len 5 and mem_len 3; the learned table has rows for windows of the lengths below.
MODELS = {
    "relative": {},
    "relative, biases of each layer, post-norm": {"untie_r": True, "norm": "post"},
    "shaw": {"position": "shaw", "max_relative_position": 4},
    "shaw, keys alone": {"position": "shaw", "max_relative_position": 4, "shaw_values": False},
    "sinusoid": {"position": "sinusoid"},
    "sinusoid that runs on": {"position": "sinusoid", "absolute_positions": "continue"},
    "learned": {"position": "learned", "tgt_len": 15},
    "clusters": {"cutoffs": (4, 7), "div_val": 2},
}

# Lengths of an evaluation with memory, and the most tokens that a prediction sees there.
ATTENTION_LENGTHS = {
    Lengths(5, 3): 8,
    Lengths(4, 0): 4,
    Lengths(3, 7): 10,
    Lengths(4, 5, same_length="mem_len"): 5,
    Lengths(4, 5, same_length="mem_len+1"): 6,
    Lengths(4, 0, same_length="mem_len"): 4,
    Lengths(1, 0): 1,
}
TRAINED, *_ = LENGTHS = list(ATTENTION_LENGTHS)


def build(lengths=TRAINED, *, dtype=torch.float64, **settings):
    """Weights far from zero, so that every term matters."""
    torch.manual_seed(1)
    settings = {"n_layer": 2, "d_model": 12, "n_head": 2, "d_head": 5, "d_inner": 16} | settings
    model = TransformerXL(ModelConfig(**{**lengths._asdict(), **settings}), N_VOCAB).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.to(dtype).eval()


def draw_ids(n_tokens=N_TEXT):
    return np.random.default_rng(2).integers(0, N_VOCAB, n_tokens)


@pytest.fixture
def store_of(tmp_path):
    """Make a store of ids."""

    def make(ids):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.ids"
        path.write_bytes(np.asarray(ids, dtype="<u2").tobytes())
        return TokenStore(path, dtype="uint16", n_tokens=len(ids), n_vocab=N_VOCAB)

    return make


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch):
    """Time as little as possible: none of these tests is about speed."""
    monkeypatch.setattr(window, "PIECE_S", 0.0)


@torch.no_grad()
def one_by_one(model, ids, lengths, length):
    """Run each token's window by itself along the training path: nats from the second token on."""
    trained, model.lengths = model.lengths, lengths
    tokens, nats = torch.from_numpy(ids)[None], []
    for position in range(1, len(ids)):
        begin = max(0, position - length)
        empty = torch.empty(1, 0, model.d_model, dtype=model.dtype)
        memory = Memory((empty,) * len(model.layers), torch.tensor([begin]))
        hidden, _ = model.hidden_states(tokens[:, begin:position], memory)
        nats.append(-model.log_probs(hidden[0, -1])[tokens[0, position]])
    model.lengths = trained
    return torch.stack(nats)


def by_windows(model, store, positions, length, n_side, clamp_len=None):
    windows = Windows(model, store, positions, length, clamp_len, "fp32")
    windows.resize(n_side)
    for _ in range(0, len(positions), n_side):
        windows.step()
    windows.finish()
    return torch.from_numpy(windows.nats)


def drawn(model, store, n_drawn=N_TEXT, **options):
    """Draw tokens and evaluate them with memory."""
    draw = Draw(store.n_tokens, n_drawn)
    final_score(evaluate(model, store, record=draw.record, **options))
    return draw


def score(model, store, draw, **options):
    *_, last = score_window(model, store, draw, **options)
    assert isinstance(last, WindowScore)
    return last


class TestWindows:
    @pytest.mark.parametrize(
        ("name", "lengths"),
        [(name, lengths) for name in MODELS for lengths in (LENGTHS if name == "relative" else LENGTHS[1:3])],
        ids=str,
    )
    def test_each_token_scores_as_the_end_of_its_own_window(self, store_of, name, lengths):
        ids, model = draw_ids(), build(**MODELS[name])
        store, length = store_of(ids), window_length(model, lengths, N_TEXT)
        assert length == ATTENTION_LENGTHS[lengths]
        expected = one_by_one(model, ids, usable(lengths), length)
        for n_side in (1, 3, 8) if name == "relative" else (7,):
            assert_same(by_windows(model, store, np.arange(1, N_TEXT), length, n_side), expected)

    @pytest.mark.parametrize("name", MODELS)
    def test_a_window_sees_its_last_document_only(self, store_of, name):
        ids = draw_ids() % (N_VOCAB - 1)
        ids[[3, 9, 10, 30]] = N_VOCAB - 1
        model, lengths = build(**MODELS[name], reset_memory_at_documents=True), Lengths(4, 5)
        expected = one_by_one(model, ids, lengths, 9)
        for n_side in (1, 8):
            assert_same(by_windows(model, store_of(ids), np.arange(1, N_TEXT), 9, n_side), expected)
        model.document_end = None
        assert (one_by_one(model, ids, lengths, 9) - expected).abs().max() > 1e-3

    @pytest.mark.parametrize("name", ["relative", "shaw"])
    def test_distances_are_clamped(self, store_of, name):
        ids, model, lengths = draw_ids(), build(**MODELS[name]), Lengths(3, 7, clamp_len=2)
        expected = one_by_one(model, ids, lengths, 10)
        assert_same(by_windows(model, store_of(ids), np.arange(1, N_TEXT), 10, 3, clamp_len=2), expected)
        assert (expected - one_by_one(model, ids, Lengths(3, 7), 10)).abs().max() > 1e-8

    def test_a_window_longer_than_the_text_sees_all_of_it(self, store_of):
        ids, model, lengths = draw_ids(), build(), Lengths(5, 1000)
        length = window_length(model, lengths, N_TEXT)
        assert length == N_TEXT - 1
        expected = one_by_one(model, ids, lengths, 10**6)
        assert_same(by_windows(model, store_of(ids), np.arange(1, N_TEXT), length, 8), expected)

    def test_what_fills_up_a_short_window_does_not_matter(self, store_of, monkeypatch):
        ids, model = draw_ids(), build()
        expected = by_windows(model, store_of(ids), np.arange(1, 9), 8, 8)
        extend = model.extend

        def with_other_filling(tokens, cache):
            later = torch.arange(8) >= torch.arange(1, 9)[:, None]
            return extend(torch.where(later, 7, tokens), cache)

        monkeypatch.setattr(model, "extend", with_other_filling)
        assert_same(by_windows(model, store_of(ids), np.arange(1, 9), 8, 8), expected)

    def test_only_the_last_row_goes_through_the_vocabulary(self, store_of, monkeypatch):
        model, shapes = build(), []
        nll = model.nll
        monkeypatch.setattr(
            model, "nll", lambda h, *args, **kw: (shapes.append(h.shape), nll(h, *args, **kw))[1]
        )
        by_windows(model, store_of(draw_ids()), np.arange(1, 9), 8, 4)
        assert shapes == [(1, 4, 12)] * 2

    def test_learned_positions_end_where_their_table_does(self):
        model = build(position="learned")
        assert window_length(model, Lengths(3, 2), N_TEXT) == 5
        assert window_length(model, TRAINED, 6) == 5  # no window of this text has more
        with pytest.raises(UserError) as refused:
            window_length(model, TRAINED, N_TEXT)
        assert str(refused.value) == (
            "--sliding-window: this model has learned 5 positions; got windows of 8 tokens "
            "(mem_len 3 and tgt_len 5); lower --mem-len or --tgt-len"
        )

    def test_a_window_that_does_not_fit_in_memory_is_refused(self, store_of, monkeypatch):
        model, lengths = build(), Lengths(20, 2000)
        message = r"^--sliding-window: a window of 2,020 tokens does not fit in memory; lower --mem-len or"
        monkeypatch.setattr(streams, "free_bytes", lambda device: 350_000_000)
        assert streams.measure(model, lengths).fit(1) == 1
        with pytest.raises(UserError, match=message):
            window_length(model, lengths, 10**6)
        monkeypatch.setattr(streams, "free_bytes", lambda device: None)
        windows = Windows(model, store_of(draw_ids(3000)), np.arange(1, 9), 2020, None, "fp32")
        windows.resize(1)

        def fail(*_):
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(model, "extend", fail)
        with pytest.raises(UserError, match=message):
            windows.step()


class TestDraw:
    @given(n_text=st.integers(2, 10**12), n_drawn=st.integers(1, 300))
    def test_one_token_is_drawn_from_each_of_equal_stretches(self, n_text, n_drawn):
        positions = Draw(n_text, n_drawn).positions
        n_drawn = min(n_drawn, n_text - 1)
        assert len(positions) == n_drawn
        edges = [1 + (n_text - 1) * k // n_drawn for k in range(n_drawn + 1)]
        assert all(
            begin <= position < end
            for begin, position, end in zip(edges, positions.tolist(), edges[1:], strict=False)
        )
        assert (Draw(n_text, n_drawn).positions == positions).all()

    def test_all_tokens_but_the_first_can_be_drawn(self):
        for n_drawn in (40, 41, 10**6):
            assert Draw(41, n_drawn).positions.tolist() == list(range(1, 41))

    def test_places_in_segments_are_drawn_evenly(self):
        # 100 segments of 64 in each stretch: equal intervals would take the same place in all of them.
        places = Draw(1 + 6400 * 256, 256).positions % 64
        assert len(set(places.tolist())) > 50

    def test_nats_are_recorded_in_any_order_and_parts(self):
        draw, nats = Draw(101, 20), np.random.default_rng(3).random(101)
        for start, stop in [(60, 101), (1, 2), (2, 30), (30, 60)]:
            draw.record(start, nats[start:stop])
        assert (draw.nats == nats[draw.positions]).all()


class TestScore:
    @pytest.mark.parametrize("lengths", [*LENGTHS[2:4], Lengths(5, 1000)], ids=str)
    def test_both_losses_are_those_of_the_drawn_tokens(self, store_of, lengths):
        ids, model = draw_ids(), build()
        store = store_of(ids)
        draw = drawn(model, store, 20, lengths=lengths)
        length = window_length(model, lengths, N_TEXT)
        expected = one_by_one(model, ids, lengths, length).numpy()[draw.positions - 1]
        found = score(model, store, draw, lengths=lengths)
        assert (found.attention_length, found.tokens) == (length, 20)
        assert found.nll == pytest.approx(expected.mean(), rel=1e-10)
        assert found.nll_with_memory == pytest.approx(draw.nats.mean(), rel=1e-10)
        se = (expected - draw.nats).std(ddof=1) / math.sqrt(20)
        assert found.nll_difference_se == pytest.approx(se, rel=1e-8)  # differences lose digits
        assert found.ideal_ratio == ideal_ratio(length, *layer_macs(model))

    @pytest.mark.parametrize("is_reset", [False, True])
    def test_all_tokens_and_batch_sizes_give_the_same_losses(self, store_of, is_reset):
        model, store = build(reset_memory_at_documents=is_reset), store_of(draw_ids())
        draw = drawn(model, store)
        whole = final_score(evaluate(model, store))
        for n_side in (1, 3, None):
            found = score(model, store, draw, n_side=n_side)
            assert found.nll == pytest.approx(score(model, store, draw).nll, rel=1e-10)
            assert found.nll_with_memory == pytest.approx(whole.nll, rel=1e-10)
            assert found.batch_size <= (n_side or 64)
            assert found.batch_size_with_memory <= (n_side or 64)

    def test_a_single_token_has_no_deviation(self, store_of):
        model, store = build(), store_of([1, 2])
        found = score(model, store, drawn(model, store))
        assert (found.tokens, found.attention_length, found.nll_difference_se) == (1, 1, None)
        assert found.nll == pytest.approx(found.nll_with_memory, rel=1e-10)

    def test_rates_and_ratios_are_of_the_measured_times(self, store_of):
        model, store = build(), store_of(draw_ids())
        found = score(model, store, drawn(model, store))
        assert min(found.token_s, found.token_s_with_memory) > 0
        assert found.tokens_per_s == 1 / found.token_s
        assert found.tokens_per_s_with_memory == 1 / found.token_s_with_memory
        assert found.ratio == found.token_s / found.token_s_with_memory
        assert found.share_of_ideal == found.ratio / found.ideal_ratio

    def test_sides_are_timed_in_turn_and_every_token_is_run(self, store_of, monkeypatch):
        model, store, pieces = build(), store_of(draw_ids()), []
        seconds = window._seconds

        def spy(side, n_step):
            pieces.append((type(side).__name__, side.n_scored, n_step))
            return seconds(side, n_step)

        draw = drawn(model, store)
        monkeypatch.setattr(window, "_seconds", spy)
        monkeypatch.setattr(window, "find_fastest", _take({"Windows": (3, 1.0), "Segments": (2, 1.0)}))
        found = score(model, store, draw)
        assert pieces == [("Windows", 3, 1), ("Segments", 2 * 5, 1)] * 14  # 40 tokens
        pieces.clear()
        monkeypatch.setattr(window, "PIECE_S", 3.0)
        assert score(model, store, draw).nll == pytest.approx(found.nll, rel=1e-10)
        assert pieces == [("Windows", 3, 3), ("Segments", 2 * 5, 3)] * 5

    def test_progress_counts_scored_tokens(self, store_of):
        model, store = build(), store_of(draw_ids())
        *progress, last = score_window(model, store, drawn(model, store, 30))
        assert isinstance(last, WindowScore)
        trying = [event for event in progress if event.total == 0]
        scoring = progress[len(trying) :]
        assert trying == [EvalProgress(0, 0)] * len(trying)
        assert trying
        assert [event.done for event in scoring] == sorted(event.done for event in scoring)
        assert scoring[-1] == EvalProgress(30, 30)

    @pytest.mark.parametrize("scale", [1e15, 1e38])
    def test_huge_weights_give_a_number_or_infinity(self, store_of, scale):
        model, store = build(dtype=torch.float32), store_of(draw_ids())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(scale)
        assert score(model, store, drawn(model, store)).nll > 100

    def test_bf16_products_give_about_the_same(self, store_of):
        model, store = build(dtype=torch.float32), store_of(draw_ids())
        found = score(model, store, drawn(model, store, precision="bf16"), precision="bf16")
        plain = score(model, store, drawn(model, store))
        # Eight bits of mantissa in weights of this size: a few hundredths of a nat.
        assert plain.nll == pytest.approx(found.nll, abs=0.05)
        assert plain.nll != found.nll

    def test_nothing_around_it_is_disturbed(self, store_of):
        model, store = build(dropout=0.5).train(), store_of(draw_ids())
        draw, state = drawn(model, store), torch.get_rng_state()
        for _ in score_window(model, store, draw):
            assert torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()
        assert all(module.training for module in model.modules())
        assert torch.equal(torch.get_rng_state(), state)
        events = score_window(model, store, draw)
        next(events)
        assert not model.training
        events.close()
        assert model.training

    @pytest.mark.gpu
    def test_windows_agree_on_a_gpu(self, store_of):
        ids, model = draw_ids(), build().cuda()
        store = store_of(ids)
        expected = one_by_one(model.cpu(), ids, TRAINED, 8)
        found = score(model.cuda(), store, drawn(model, store))
        assert found.nll == pytest.approx(expected.mean().item(), rel=1e-10)


def _take(sizes):
    """Stand in for `find_fastest`: give each side its size and time for a step."""

    def take(side, limit):
        yield EvalProgress(0, 0)
        return sizes[type(side).__name__]

    return take


class TestSegments:
    @pytest.mark.parametrize("lengths", [*map(usable, LENGTHS), Lengths(7, 7), Lengths(2, 33)], ids=str)
    def test_every_timed_segment_finds_its_memory_full(self, store_of, monkeypatch, lengths):
        model, seen = build(), []
        segments = Segments(model, store_of(draw_ids()), lengths, "fp32")
        extend = model.extend

        def spy(tokens, cache):
            hidden, cache = extend(tokens, cache)
            seen.append((tuple(tokens.shape), cache.n_memory, cache.n_segment))
            return hidden, cache

        monkeypatch.setattr(model, "extend", spy)
        for n_side in (3, 1):
            segments.resize(n_side)
            assert segments.n_scored == n_side * lengths.tgt_len
            for _ in range(30):  # beyond the text's end
                segments.step()
            segments.finish()
            assert set(seen) == {((n_side, lengths.tgt_len), lengths.mem_len, lengths.tgt_len)}
            seen.clear()


class _FakeSide:
    """Takes `step_s[n_side]` seconds a step for `n_side` tokens."""

    def __init__(self, step_s, monkeypatch):
        self.step_s, self.n_scored, self.tried = step_s, 0, []
        monkeypatch.setattr(window, "_seconds", lambda side, n_step: n_step * step_s[side.n_scored])

    def resize(self, n_side):
        self.n_scored = n_side
        self.tried.append(n_side)


class TestFastest:
    @pytest.mark.parametrize(
        ("token_s", "limit", "fastest", "tried"),
        [
            ([4, 3, 2, 1], 8, 8, [1, 2, 4, 8]),
            ([4, 3, 2, 1], 7, 4, [1, 2, 4]),
            ([4, 5, 3, 3.5, 3.6, 1], 64, 4, [1, 2, 4, 8, 16]),
            ([4, 5, 4.1, 1], 64, 1, [1, 2, 4]),
            ([4, 3.95, 3.94, 1], 64, 1, [1, 2, 4]),  # no gain to speak of
            ([4], 1, 1, [1]),
        ],
    )
    def test_the_fastest_batch_for_a_token_is_taken(self, monkeypatch, token_s, limit, fastest, tried):
        side = _FakeSide({2**k: 2**k * s for k, s in enumerate(token_s)}, monkeypatch)
        events = find_fastest(side, limit)
        result = SimpleNamespace(value=None)
        while result.value is None:
            try:
                next(events)
            except StopIteration as end:
                result = end
        assert result.value == (fastest, side.step_s[fastest])
        assert side.tried == tried


class TestIdeal:
    @pytest.mark.parametrize(("length", "expected"), [(800, 624), (1800, 1226), (3800, 2303)])
    def test_the_paper_s_attention_lengths_at_width_256(self, length, expected):
        model = build(n_layer=1, d_model=256, n_head=4, d_head=64, d_inner=1024)
        per_token, per_key = layer_macs(model)
        assert (per_token, per_key) == (12 * 256**2, 3 * 256)
        assert int(ideal_ratio(length, per_token, per_key)) == expected

    @pytest.mark.parametrize(
        ("name", "n_products"),
        [("relative", 3), ("shaw", 4), ("shaw, keys alone", 3), ("sinusoid", 2), ("learned", 2)],
    )
    def test_schemes_differ_in_what_a_key_takes(self, name, n_products):
        per_token = 4 * 12 * 10 + 2 * 12 * 16
        assert layer_macs(build(**MODELS[name])) == (per_token, n_products * 10)


@pytest.mark.parametrize(("width", "left_out"), [(100, set()), (92, {"by side"}), (80, {"by side", "±"})])
def test_the_table_fits_with_numbers_of_long_windows(width, left_out):
    row = WindowScore(
        lengths=Lengths(128, 3672),
        attention_length=3800,
        tokens=256,
        nll=10.12345,
        nll_with_memory=10.12345,
        nll_difference_se=0.01234,
        token_s=1 / 1234.5,
        token_s_with_memory=1 / 1234567.8,
        batch_size=64,
        batch_size_with_memory=64,
        ideal_ratio=2303.3,
    )
    screen = Screen(io.StringIO(), False, False, False, True, width)
    header, names, _, cells = screen.render(window_table([row], [3672], width)).splitlines()
    assert max(map(len, (header, names, cells))) <= width
    assert "…" not in names + cells
    assert {name for name in ("by side", "±") if name not in names} == left_out
    assert cells.split()[-2 if not left_out else -1] == f"{row.share_of_ideal:.2f}"
