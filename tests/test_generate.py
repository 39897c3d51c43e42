import itertools
import math
import statistics
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.tolerance import assert_same
from txlcli import UserError
from txlcli.config import ModelConfig
from txlcli.evaluate import evaluate, final_score
from txlcli.generate import (
    GeneratedText,
    Piece,
    SamplingOptions,
    distribution,
    draw,
    encode_prompt,
    feed,
    generate,
    in_order,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize,
    random_stream,
    read_prompt,
    split_at_stop,
)
from txlcli.model import KVCache, Lengths, TransformerXL

NO_IDS = np.array([], dtype=np.int64)


@dataclass(frozen=True)
class Table:
    """A tokenizer whose tokens are the given bytes; None stands for a control token."""

    pieces: tuple[bytes | None, ...]
    kind: str = "char"
    is_lossless: bool = True
    document_end: int | None = None

    @property
    def control_ids(self):
        return tuple(i for i, piece in enumerate(self.pieces) if piece is None)

    def encode(self, text):
        ids = []
        while text:
            fitting = [i for i, piece in enumerate(self.pieces) if piece and text.startswith(piece)]
            ids.append(max(fitting, key=lambda i: len(self.pieces[i])))
            text = text[len(self.pieces[ids[-1]]) :]
        return np.array(ids, dtype=np.int32)

    def decode(self, ids, after=None):
        return b"".join(self.pieces[i] or b"" for i in ids)

    def unknown_characters(self, text):
        return [c for c in dict.fromkeys(text) if c.encode() not in self.pieces]


LETTERS = Table((None, b"\n", *(bytes([c]) for c in b" abcdefgh")))
N_LETTERS = len(LETTERS.pieces)
START = 1


def make_model(*, n_vocab=N_LETTERS, tgt_len=4, mem_len=6, seed=0, **settings):
    torch.manual_seed(seed)
    config = ModelConfig(n_layer=2, d_model=12, n_head=2, tgt_len=tgt_len, mem_len=mem_len, **settings)
    model = TransformerXL(config, n_vocab).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(20)  # trained weights are no near-zeros: predictions must depend on memory
    return model


SCHEMES = {
    "relative": {},
    "relative, biases of each layer": {"untie_r": True},
    "shaw": {"position": "shaw", "max_relative_position": 5},
    "shaw, keys alone": {"position": "shaw", "max_relative_position": 5, "shaw_values": False},
    "sinusoid": {"position": "sinusoid"},
    "sinusoid that runs on": {"position": "sinusoid", "absolute_positions": "continue"},
    "learned": {"position": "learned"},
    "clusters": {"cutoffs": (3, 6), "div_val": 2},
}


def results(model, prompt, tokenizer=LETTERS, **options):
    options = SamplingOptions(**{"max_tokens": 9, "seed": 5, **options})
    events = generate(model, tokenizer, encode_prompt(tokenizer, prompt, START), options)
    return sorted((e for e in events if isinstance(e, GeneratedText)), key=lambda e: e.sample)


@torch.no_grad()
def scored_together(model, ids, lengths):
    """Log-probabilities [B, L, V] after each token, segment by segment on the route that training takes."""
    model.lengths, kept = lengths, model.lengths
    memory, rows = None, []
    for segment in torch.as_tensor(ids, dtype=torch.int64).split(lengths.tgt_len, dim=1):
        hidden, memory = model.hidden_states(segment, memory)
        rows.append(model.log_probs(hidden))
    model.lengths = kept
    return torch.cat(rows, dim=1)


def scored(model, ids, lengths):
    return scored_together(model, np.array(ids)[None], lengths)[0]


class Ids:
    def __init__(self, ids):
        self.ids, self.n_tokens = np.array(ids, dtype=np.int64), len(ids)

    def read(self, start, stop):
        return self.ids[start:stop]


def evaluated(model, ids, lengths):
    """Nats of each token, [L], as evaluation gives them; the first has none."""
    nats = torch.full((len(ids),), math.nan, dtype=torch.float64)

    def record(start, stretch):
        nats[start : start + len(stretch)] = torch.from_numpy(stretch)

    final_score(evaluate(model, Ids(ids), lengths=lengths, record=record))
    return nats


def letters(n, seed=0):
    return "".join(np.random.default_rng(seed).choice(list("abcdefgh \n"), n))


# Generation is scoring's computation


@pytest.mark.parametrize(("tgt_len", "mem_len"), [(4, 6), (6, 4), (4, 0), (3, 3), (1, 5), (5, 1000)])
@pytest.mark.parametrize(("n_segments", "n_more"), [(0, 1), (1, -1), (1, 0), (1, 1), (5, 3)])
def test_log_probs_are_those_of_scoring(tgt_len, mem_len, n_segments, n_more):
    n_prompt = max(1, n_segments * tgt_len + n_more)
    model, lengths = make_model(), Lengths(tgt_len, mem_len)
    prompt = letters(n_prompt)
    (result,) = results(model, prompt, max_tokens=2 * tgt_len + 3, mem_len=mem_len, tgt_len=tgt_len)

    ids = [*LETTERS.encode(prompt.encode()), *result.ids]
    expected = scored(model, ids[:-1], lengths)[n_prompt - 1 :].gather(1, torch.tensor(result.ids)[:, None])
    log_probs = torch.tensor(result.logprobs, dtype=torch.float64)
    assert_same(log_probs, expected[:, 0])
    assert_same(-log_probs, evaluated(model, ids, lengths)[n_prompt:])


# The last two take turns, so that every scheme meets all four of them.
TURNS = list(itertools.product(["eager", "skew"], ["empty", "zeros"]))
TEXTS = list(itertools.product([(4, 6), (3, 3), (4, 0)], [1, 8, 47]))


@pytest.mark.parametrize(
    ("scheme", "tgt_len", "mem_len", "n_prompt", "attention", "memory_start"),
    [
        (scheme, *lengths, n_prompt, *TURNS[(i + j) % 4])
        for i, scheme in enumerate(SCHEMES)
        for j, (lengths, n_prompt) in enumerate(TEXTS)
    ],
)
def test_log_probs_are_those_of_scoring_in_every_scheme(
    scheme, tgt_len, mem_len, n_prompt, attention, memory_start
):
    model, prompt = make_model(**SCHEMES[scheme], memory_start=memory_start), letters(n_prompt)
    model.use_attention(attention)
    lengths = Lengths(tgt_len, mem_len, memory_start=memory_start)
    options = {"max_tokens": 2 * tgt_len + 3, "mem_len": mem_len, "tgt_len": tgt_len, "num_samples": 2}
    for result in results(model, prompt, **options):
        ids = [*LETTERS.encode(prompt.encode()), *result.ids]
        drawn = torch.tensor(result.ids)[:, None]
        expected = scored(model, ids[:-1], lengths)[n_prompt - 1 :].gather(1, drawn)[:, 0]
        log_probs = torch.tensor(result.logprobs, dtype=torch.float64)
        assert_same(log_probs, expected)
        assert_same(-log_probs, evaluated(model, ids, lengths)[n_prompt:])


# The forms of attention take turns, so that every scheme and all lengths meet both; the other half is slow.
@pytest.mark.parametrize(
    ("scheme", "tgt_len", "mem_len", "attention"),
    [
        pytest.param(scheme, *lengths, attention, marks=[pytest.mark.slow] * ((i + j + k) % 2))
        for i, scheme in enumerate(SCHEMES)
        for j, lengths in enumerate([(4, 6), (1, 5), (4, 0)])
        for k, attention in enumerate(["eager", "skew"])
    ],
)
def test_log_probs_with_documents_are_those_of_scoring(scheme, tgt_len, mem_len, attention):
    # `h`, the last id, ends a document for the model; for the tokenizer it is a letter, so samples go on.
    model = make_model(**SCHEMES[scheme], reset_memory_at_documents=True)
    model.use_attention(attention)
    prompt, lengths = "abchdefhhga\nbchdefg" * 2 + "ah", Lengths(tgt_len, mem_len)
    n_ends = 0
    for n_prompt in (3, 4, 9, 39, 40):
        options = {"max_tokens": 15, "mem_len": mem_len, "tgt_len": tgt_len, "num_samples": 3}
        drawn = results(model, prompt[:n_prompt], temperature=50, top_p=1, **options)
        begun = LETTERS.encode(prompt[:n_prompt].encode())
        texts = [[*begun, *result.ids] for result in drawn]
        rows = scored_together(model, [ids[:-1] for ids in texts], lengths)[:, n_prompt - 1 :]
        for result, ids, expected in zip(drawn, texts, rows, strict=True):
            n_ends += result.ids.count(N_LETTERS - 1)
            log_probs = torch.tensor(result.logprobs, dtype=torch.float64)
            assert_same(log_probs, expected.gather(1, torch.tensor(result.ids)[:, None])[:, 0])
            assert_same(-log_probs, evaluated(model, ids, lengths)[n_prompt:])
    assert n_ends > 3


@pytest.mark.parametrize("attention", ["eager", "skew"])
@pytest.mark.parametrize("scheme", ["relative", "shaw", "untied"])
def test_what_stood_in_a_document_before_does_not_matter(scheme, attention):
    settings = SCHEMES.get(scheme, {"untie_r": True})
    model = make_model(**settings, tgt_len=50, mem_len=50, reset_memory_at_documents=True)
    model.use_attention(attention)
    options = {"max_tokens": 9, "seed": 3, "num_samples": 2}
    alone = results(model, "abc", **options)
    for result, one in zip(results(model, letters(20) + "hhabc", **options), alone, strict=True):
        assert result.ids == one.ids
        assert_same(torch.tensor(result.logprobs).double(), torch.tensor(one.logprobs).double())


def test_a_prompt_that_is_cut_keeps_its_positions(monkeypatch):
    model, lengths = make_model(**SCHEMES["sinusoid that runs on"]), Lengths(4, 6)
    ids, begun = LETTERS.encode(letters(47).encode()), []
    new_cache = model.new_cache
    monkeypatch.setattr(
        model, "new_cache", lambda n, lengths, at: begun.append(at.tolist()) or new_cache(n, lengths, at)
    )
    log_probs, _ = read_prompt(model, ids, lengths)
    # Two layers of ceil(6 / 4) segments before the last one, which begins at 44.
    assert begun == [[28]]
    assert_same(log_probs.clone(), scored(model, ids, lengths)[-1:])
    monkeypatch.setattr(model, "new_cache", lambda n, lengths, at: new_cache(n, lengths))
    assert (read_prompt(model, ids, lengths)[0] - log_probs).abs().max() > 1e-3


@pytest.mark.parametrize("scheme", ["sinusoid", "learned"])
def test_positions_that_restart_forget_how_far_the_text_is(scheme):
    model = make_model(**SCHEMES[scheme])
    prompts = letters(3), letters(8, seed=1) + letters(3)
    near, far = (results(model, prompt, mem_len=0, max_tokens=20)[0] for prompt in prompts)
    assert near.ids == far.ids
    runs_on = make_model(**SCHEMES["sinusoid that runs on"])
    near, far = (results(runs_on, prompt, mem_len=0, max_tokens=20)[0] for prompt in prompts)
    assert near.logprobs[0] != far.logprobs[0]


def test_a_segment_beyond_the_learned_positions_is_refused(monkeypatch):
    model = make_model(**SCHEMES["learned"])
    monkeypatch.setattr(model, "new_cache", lambda *args: pytest.fail("allocated"))
    with pytest.raises(UserError) as caught:
        results(model, "a", tgt_len=5, max_tokens=2)  # too short to need the fifth position
    assert str(caught.value) == (
        "--tgt-len: this model has learned 4 positions; got 5; "
        "give 4 or less, and more --mem-len for more context"
    )


@pytest.mark.parametrize(("tgt_len", "mem_len"), [(4, 6), (6, 4), (4, 0), (5, 1000)])
@pytest.mark.parametrize("same_length", ["off", "mem_len", "mem_len+1"])
def test_greedy_is_the_argmax_of_a_loop_that_recomputes_everything(tgt_len, mem_len, same_length):
    model = make_model(same_length=same_length, clamp_len=5)
    prompt = letters(2 * tgt_len + 1)
    (result,) = results(model, prompt, temperature=0, max_tokens=12, mem_len=mem_len, tgt_len=tgt_len)

    rule = "off" if (same_length, mem_len) == ("mem_len", 0) else same_length
    ids = list(LETTERS.encode(prompt.encode()))
    for token in result.ids:
        row = scored(model, ids, Lengths(tgt_len, mem_len, 5, rule))[-1]
        row[list(LETTERS.control_ids)] = -math.inf
        assert token == int(row.argmax())
        ids.append(token)


@given(
    scheme=st.sampled_from(list(SCHEMES)),
    lengths=st.tuples(st.integers(1, 7), st.integers(0, 12)),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
)
@settings(deadline=None, max_examples=30)
def test_a_prompt_may_be_read_in_any_pieces(scheme, lengths, sizes):
    model, lengths = make_model(**{"tgt_len": 7, **SCHEMES[scheme]}), Lengths(*lengths)
    ids = LETTERS.encode(letters(sum(sizes)).encode())
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    cache = model.new_cache(1, lengths)
    for piece in tokens.split(sizes, dim=1):
        log_probs, cache = feed(model, piece, cache)
    expected = scored(model, ids, lengths)[-1:]
    assert_same(log_probs.clone(), expected)
    # A long prompt is read from where its last segment's prediction begins to depend on it.
    assert_same(read_prompt(model, ids, lengths)[0].clone(), expected)


def test_a_long_prompt_costs_what_a_short_one_does(monkeypatch):
    model, n_read = make_model(), []
    extend = model.extend

    def counted(tokens, cache):
        n_read.append(tokens.shape[1])
        return extend(tokens, cache)

    monkeypatch.setattr(model, "extend", counted)
    read_prompt(model, LETTERS.encode(letters(100_003).encode()), Lengths(4, 6))
    # Two layers of ceil(6 / 4) segments, and the three tokens of the last one.
    assert n_read == [4, 4, 4, 4, 3]


def test_a_token_costs_one_position_and_copies_no_cache(monkeypatch):
    model, seen = make_model(), []
    extend = model.extend

    def watched(tokens, cache):
        seen.append((tokens.shape, [buffer.data_ptr() for buffer in (*cache.keys, *cache.values)]))
        return extend(tokens, cache)

    monkeypatch.setattr(model, "extend", watched)
    results(model, letters(4), num_samples=2, max_tokens=30)
    shapes, buffers = zip(*seen[1:], strict=True)
    assert shapes == ((2, 1),) * 29
    assert all(pointers == buffers[0] for pointers in buffers)


def test_the_cache_is_no_longer_than_the_text(monkeypatch):
    model, made = make_model(), []
    new_cache = model.new_cache
    monkeypatch.setattr(
        model, "new_cache", lambda n, lengths, at: made.append(lengths) or new_cache(n, lengths, at)
    )
    (long,) = results(model, "abc", mem_len=10**9, tgt_len=10**9)
    assert made == [Lengths(12, 12)]
    (short,) = results(model, "abc", mem_len=50, tgt_len=60)
    assert long.logprobs == short.logprobs


def test_a_cache_that_does_not_fit_is_refused_with_its_size(monkeypatch):
    def out_of_memory(cache, n_streams):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(KVCache, "repeat", out_of_memory)
    with pytest.raises(UserError) as caught:
        results(make_model(), "abc", num_samples=10**9, max_tokens=1000)
    # Two layers' keys and values of 12 float64 numbers, ten rows.
    assert str(caught.value) == (
        "--mem-len: 6 rows at tgt_len 4 do not fit in memory; the cache of 1,000,000,000 samples takes "
        "3,840.0 GB; lower --mem-len, --tgt-len or --num-samples"
    )


def test_matrix_products_may_run_in_bfloat16():
    model = make_model().float()
    options = SamplingOptions(max_tokens=12, temperature=0, seed=0)
    prompt = encode_prompt(LETTERS, letters(11), START)
    *_, result = generate(model, LETTERS, prompt, options, precision="bf16")
    ids = [*prompt.ids, *result.ids]
    exact = scored(model.double(), ids[:-1], model.lengths)[10:].gather(1, torch.tensor(result.ids)[:, None])
    # Through four rounded products a layer, of eight bits each, with these large weights; no more is claimed.
    assert torch.tensor(result.logprobs).sub(exact[:, 0]).abs().max() < 0.5
    assert not torch.is_autocast_enabled("cpu")


def test_reported_log_probs_ignore_temperature_and_filters():
    model, prompt = make_model(), letters(7)
    (hot,) = results(model, prompt, temperature=3, top_k=4, min_p=0.01, repetition_penalty=1.3)
    ids = [*LETTERS.encode(prompt.encode()), *hot.ids]
    expected = scored(model, ids[:-1], model.lengths)[6:].gather(1, torch.tensor(hot.ids)[:, None])[:, 0]
    assert_same(torch.tensor(hot.logprobs, dtype=torch.float64), expected)


def test_no_random_state_but_the_samples_own_is_touched():
    model = make_model()
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    results(model, "abc", num_samples=2)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()
    assert not torch.is_inference_mode_enabled()


# Samples and seeds


def test_samples_have_streams_of_their_own():
    model = make_model()
    four = results(model, "abc", num_samples=4, max_tokens=30)
    assert four == [
        replace(r, tokens_per_s=s.tokens_per_s)
        for r, s in zip(results(model, "abc", num_samples=4, max_tokens=30), four, strict=True)
    ]
    assert len({result.text for result in four}) == 4
    # In float64 the rounding that the batch size changes moves no draw here.
    assert [r.ids for r in results(model, "abc", num_samples=2, max_tokens=30)] == [r.ids for r in four[:2]]
    assert [r.seed for r in four] == [5] * 4
    assert results(model, "abc", seed=6, max_tokens=30)[0].ids != four[0].ids


def test_streams_differ_for_any_seed_and_sample():
    pairs = [(seed, sample) for seed in (0, 1, 7, 2**32, 2**32 + 1, 2**70) for sample in range(3)]
    assert len({random_stream(*pair).random() for pair in pairs}) == len(pairs)
    assert random_stream(7, 2).random() == random_stream(7, 2).random()


def test_without_a_seed_every_call_has_a_fresh_one():
    first, second = (results(make_model(), "abc", seed=None, max_tokens=30)[0] for _ in range(2))
    assert first.seed != second.seed
    assert results(make_model(), "abc", seed=first.seed, max_tokens=30)[0].ids == first.ids


@pytest.mark.parametrize("n_prompt", [1, 40, 333])
def test_greedy_samples_side_by_side_are_the_single_run(n_prompt):
    model, prompt = make_model(), letters(n_prompt)
    (single,) = results(model, prompt, temperature=0)
    assert [r.ids for r in results(model, prompt, temperature=0, num_samples=3)] == [single.ids] * 3


def test_zero_tiny_temperature_and_top_k_1_agree_and_hot_varies_more():
    model = make_model()
    greedy, tiny, denormal, top = (
        results(model, "abc", max_tokens=20, **options)[0].ids
        for options in ({"temperature": 0}, {"temperature": 1e-8}, {"temperature": 5e-324}, {"top_k": 1})
    )
    assert greedy == tiny == denormal == top
    assert (
        results(model, "abc", top_k=99_999, max_tokens=20)[0].ids
        == results(model, "abc", max_tokens=20)[0].ids
    )
    hot, mild = (results(model, "abc", temperature=t, top_p=1, max_tokens=60)[0].ids for t in (100, 1))
    entropies = [statistics.fmean(-math.log(ids.count(i) / 60) for i in ids) for ids in (hot, mild)]
    assert entropies[0] > entropies[1]


def test_speed_excludes_the_prompt_and_the_first_token():
    model = make_model()
    assert results(model, "abc", max_tokens=1)[0].tokens_per_s is None
    assert results(model, "abc", max_tokens=2)[0].tokens_per_s > 0


def test_length_is_honoured_past_line_ends():
    (result,) = results(cyclic_model([1, 3, 4], n_vocab=N_LETTERS), "\n", temperature=0, max_tokens=60)
    assert (result.tokens, len(result.ids), result.stop) == (60, 60, "length")
    assert result.text == "ab\n" * 20


def test_weights_that_are_not_numbers_are_named():
    model = make_model()
    with torch.no_grad():
        model.norm.weight.fill_(math.nan)
    message = "model: its prediction is not a number; the weights are damaged; try another --checkpoint"
    with pytest.raises(UserError) as caught:
        results(model, "abc")
    assert str(caught.value) == message


# Sampling functions against their definitions

probabilities = (
    st.lists(st.integers(0, 20), min_size=1, max_size=30)
    .filter(any)
    .map(lambda weights: np.array(weights, dtype=np.float64) / sum(weights))
)


def by_probability(probs):
    return sorted(range(len(probs)), key=lambda i: (-probs[i], i))


def restricted(probs, kept):
    expected = np.array([p if i in kept else 0.0 for i, p in enumerate(probs)])
    return expected / expected.sum()


@given(probabilities, st.integers(0, 35))
def test_top_k_is_its_definition(probs, k):
    kept = set(by_probability(probs)[: k or None])
    np.testing.assert_allclose(keep_top_k(probs, k), restricted(probs, kept), rtol=1e-15)


@given(probabilities, st.floats(0.001, 1))
def test_top_p_is_its_definition(probs, p):
    kept, total = set(), 0.0
    for i in by_probability(probs):
        if total >= p:
            break
        kept.add(i)
        total += probs[i]
    np.testing.assert_allclose(keep_top_p(probs, p), restricted(probs, kept), rtol=1e-15)


@given(probabilities, st.floats(0, 1))
def test_min_p_is_its_definition(probs, share):
    kept = {i for i, p in enumerate(probs) if p >= share * max(probs)}
    np.testing.assert_allclose(keep_min_p(probs, share), restricted(probs, kept), rtol=1e-15)


@given(st.lists(st.floats(-30, 0), min_size=1, max_size=30), st.sets(st.integers(0, 29)), st.floats(0.5, 3))
def test_repetition_penalty_is_its_definition(log_probs, recent, penalty):
    recent = [i for i in recent if i < len(log_probs)]
    expected = [x - math.fsum(log_probs) / len(log_probs) for x in log_probs]
    for i in recent:
        expected[i] = expected[i] / penalty if expected[i] > 0 else expected[i] * penalty
    # A token that came twice is penalized once.
    actual = penalize(np.array(log_probs), np.array(recent * 2, dtype=np.int64), penalty)
    # Two means of up to thirty numbers up to 30.
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)


@given(probabilities, st.floats(0.05, 20))
def test_temperature_is_its_definition(probs, temperature):
    with np.errstate(divide="ignore"):
        log_probs = np.log(probs)
    options = SamplingOptions(temperature=temperature, top_p=1)
    # In logarithms, so that the expected powers do not underflow before they are normalized.
    powers = np.exp(log_probs / temperature - max(log_probs) / temperature)
    actual = distribution(log_probs, NO_IDS, NO_IDS, options)
    np.testing.assert_allclose(actual, powers / powers.sum(), rtol=1e-12, atol=1e-300)


def test_filters_follow_temperature_and_one_another():
    log_probs = np.log([0.5, 0.2, 0.2, 0.06, 0.04])
    options = SamplingOptions(temperature=1, top_k=3, top_p=0.75, min_p=0.0)
    # Of the three kept by top-k the first two have 7/9 of what is left.
    np.testing.assert_allclose(distribution(log_probs, NO_IDS, NO_IDS, options), [5 / 7, 2 / 7, 0, 0, 0])
    sharp = replace(options, temperature=0.5, top_p=1.0, min_p=0.1)
    np.testing.assert_allclose(
        distribution(log_probs, NO_IDS, NO_IDS, sharp), np.array([25, 4, 4, 0, 0]) / 33
    )


@given(probabilities, st.sampled_from([0, 1e-8, 0.8, 100]))
def test_control_tokens_are_never_drawn(probs, temperature):
    assume(len(probs) > 1)
    log_probs = np.log(probs + 1e-9)
    before, control = log_probs.copy(), np.array([0])
    result = distribution(
        log_probs, np.array([0]), control, SamplingOptions(temperature=temperature, repetition_penalty=2)
    )
    assert result[0] == 0
    assert result.sum() == pytest.approx(1)
    assert np.array_equal(log_probs, before)


@given(probabilities, st.floats(0, 1, exclude_max=True))
def test_draw_is_the_inverse_of_the_distribution_function(probs, uniform):
    token = draw(probs, uniform)
    assert probs[token] > 0
    # Two sums of up to thirty rounded numbers.
    assert math.fsum(probs[:token]) <= uniform + 1e-14
    assert uniform <= math.fsum(probs[: token + 1]) + 1e-14


def test_the_largest_number_draws_a_token_of_positive_probability():
    largest = math.nextafter(1, 0)
    probs = np.array([0.3, 0.3, 0.4, 0.0]) * (1 + 1e-15)
    assert draw(probs, largest) == 2
    assert draw(np.array([0.0, 1.0, 0.0]), 0.0) == 1


def chi_square(counts, expected):
    return sum((count - e) ** 2 / e for count, e in zip(counts, expected, strict=True))


def test_draws_fit_the_distribution():
    probs = np.array([0.3, 0.22, 0.15, 0.1, 0.08, 0.06, 0.04, 0.03, 0.015, 0.005])
    n_draws, random = 20_000, random_stream(0, 0)
    counts = np.bincount([draw(probs, random.random()) for _ in range(n_draws)], minlength=10)
    assert chi_square(counts, probs * n_draws) < 27.88  # the 0.999 quantile of chi-square with 9 degrees


def test_first_tokens_of_many_samples_fit_the_model():
    # The streams of samples 0, 1, 2, ... must be as independent as one stream's numbers.
    model, n_samples = make_model(), 3000
    drawn = results(model, "abc", num_samples=n_samples, max_tokens=1, temperature=1, top_p=1)
    probs = scored(model, LETTERS.encode(b"abc"), model.lengths)[-1].exp().numpy()
    probs[0] = 0
    probs /= probs.sum()
    is_common = probs * n_samples >= 5
    counts = np.bincount([r.ids[0] for r in drawn], minlength=len(probs))
    assert is_common.sum() >= 4
    rest = counts[~is_common].sum(), probs[~is_common].sum() * n_samples
    assert (
        chi_square(counts[is_common], probs[is_common] * n_samples)
        + (rest[0] - rest[1]) ** 2 / max(rest[1], 1)
        < 31.26
    )  # the 0.999 quantile with 11 degrees, at least as many as there are


# Text


def test_whole_characters_only():
    bytes_ = sorted(set("日本é🐙".encode()))
    table = Table((None, b"\n", "日".encode(), *(bytes([b]) for b in bytes_), b"a"))
    model = make_model(n_vocab=len(table.pieces))
    options = SamplingOptions(max_tokens=100, seed=0, temperature=2)
    events = list(generate(model, table, encode_prompt(table, "a", START), options))
    pieces, result = [e.text for e in events[:-1]], events[-1]
    assert "".join(pieces) == result.text == table.decode(result.ids).decode("utf-8", "replace")
    assert all(pieces)
    assert result.tokens == 100


def test_a_character_in_several_tokens_appears_with_the_last_of_them():
    table = Table((None, *(bytes([b]) for b in "日".encode())))
    model = cyclic_model([1, 2, 3], n_vocab=4)
    options = SamplingOptions(max_tokens=5, temperature=0)
    events = list(generate(model, table, encode_prompt(table, "日", 1), options))
    assert [(e.text, type(e)) for e in events] == [
        ("日", Piece),
        ("\ufffd", Piece),
        ("日\ufffd", GeneratedText),
    ]


def cyclic_model(cycle, n_vocab):
    """A model whose most probable token is always the one after the last in `cycle`."""
    torch.manual_seed(0)
    config = ModelConfig(n_layer=1, d_model=8, n_head=1, tgt_len=4, mem_len=4, tied=False, norm="pre")
    model = TransformerXL(config, n_vocab).double().eval()
    with torch.no_grad():
        for layer in model.layers:
            layer.attention.o.weight.zero_()
            layer.feedforward.outer.weight.zero_()
        model.embed.weight.zero_()
        model.head.weight.zero_()
        model.norm.weight.fill_(1)
        for place, token in enumerate(cycle):
            model.embed.weight[token, place] = 1
            model.head.weight[cycle[(place + 1) % len(cycle)], place] = 1
    return model


def test_spacing_depends_on_the_token_before():
    class Words(Table):
        def decode(self, ids, after=None):
            text = b""
            for i in ids:
                text += (b" " if after is not None and self.pieces[after].isalpha() else b"") + self.pieces[i]
                after = i
            return text

    table = Words((None, b"\n", b"the", b"fox"))
    model = cyclic_model([2, 3, 1], n_vocab=4)
    assert results(model, "the", table, temperature=0, max_tokens=4)[0].text == " fox \nthe fox"
    (started,) = results(model, "", table, temperature=0, max_tokens=2)
    assert (started.prompt, started.text) == ("", "the fox")


def test_prompt_and_text_are_what_echo_prints():
    for prompt in ("head", "a", "", "a b ", letters(500)):
        (result,) = results(make_model(), prompt)
        assert result.prompt == prompt
        assert result.text == LETTERS.decode(result.ids).decode()


stops = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def read_letter_by_letter(text, stops):
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@given(st.lists(st.text("abc", max_size=5), max_size=8), stops)
def test_stop_texts_do_not_depend_on_how_text_is_cut(pieces, stops):
    shown, waiting, found = "", "", None
    for piece in pieces:
        now, waiting, found = split_at_stop(waiting + piece, stops)
        shown += now
        if found:
            break
        # What was shown is never taken back, and no more waits than must.
        assert not waiting or any(stop.startswith(waiting) for stop in stops)
    assert (shown + waiting, found) == read_letter_by_letter("".join(pieces), stops)
    assert not (found and waiting)


@pytest.mark.parametrize("end", [(4, 5), (7, 11), (20, 21)])
def test_a_stop_text_ends_its_sample_only(end):
    model = make_model()
    free = results(model, "ab", num_samples=3, max_tokens=25)
    stop = free[1].text[slice(*end)]
    ended = results(model, "ab", num_samples=3, max_tokens=25, stop=("zzz", stop))
    for whole, cut in zip(free, ended, strict=True):
        before, found, _ = whole.text.partition(stop)
        assert cut.text == before
        assert cut.stop == (stop if found else "length")
        assert cut.tokens == len(cut.ids) == (len(before) + len(stop) if found else 25)
        assert cut.ids == whole.ids[: cut.tokens]
        assert len(cut.logprobs) == cut.tokens
    assert ended[1].stop == stop


def test_text_held_back_for_a_stop_appears_at_the_end():
    table = Table((None, b"\n", b"a", b"b"))
    options = SamplingOptions(max_tokens=5, temperature=0, stop=("bab\n",))
    events = list(generate(cyclic_model([2, 3], n_vocab=4), table, encode_prompt(table, "a", START), options))
    assert [event.text for event in events] == ["ba", "bab", "babab"]
    assert events[-1].stop == "length"


def test_a_document_s_end_ends_the_sample_and_prints_nothing():
    table = Table((None, b"\n", b"a", b"b", b""), document_end=4)
    model = cyclic_model([2, 3, 4], n_vocab=5)
    for max_tokens in (2, 9):  # also where it is the last token that may be drawn
        (result,) = results(model, "a", table, temperature=0, max_tokens=max_tokens)
        assert (result.text, result.tokens, result.ids, result.stop) == ("b", 2, (3, 4), "document")
        assert len(result.logprobs) == 2
    (short,) = results(model, "a", table, temperature=0, max_tokens=1)
    assert (short.text, short.stop) == ("b", "length")
    # What was held back for a stop text or the rest of a character appears.
    (result,) = results(model, "a", table, temperature=0, stop=("ba",))
    assert (result.text, result.stop) == ("b", "document")
    table = replace(table, pieces=(None, b"\n", b"a", "🐙".encode()[:2], b""))
    (result,) = results(model, "a", table, temperature=0)
    assert (result.text, result.stop) == ("�", "document")
    # A stop text that the end completes cannot be: the end has no text.
    (result,) = results(
        cyclic_model([2, 3, 4], n_vocab=5), "a", replace(table, document_end=None), temperature=0
    )
    assert (result.tokens, result.stop) == (9, "length")


def test_a_document_s_end_ends_its_sample_only():
    table = replace(LETTERS, pieces=(*LETTERS.pieces[:-1], b""), document_end=N_LETTERS - 1)
    for is_reset in (False, True):
        model = make_model(reset_memory_at_documents=is_reset)
        options = {"num_samples": 4, "max_tokens": 25, "temperature": 3}
        ended = results(model, "ab", table, **options)
        assert {result.stop for result in ended} == {"document", "length"}
        for whole, cut in zip(
            results(model, "ab", replace(table, document_end=None), **options), ended, strict=True
        ):
            n = whole.ids.index(N_LETTERS - 1) + 1 if N_LETTERS - 1 in whole.ids else 25
            assert cut.ids == whole.ids[:n]
            assert (cut.stop == "document") == (cut.ids[-1] == N_LETTERS - 1)


def test_pieces_join_to_the_texts_and_can_be_put_in_order():
    model = make_model()
    options = SamplingOptions(max_tokens=20, seed=1, num_samples=3, stop=("a", "e"))
    events = list(generate(model, LETTERS, encode_prompt(LETTERS, "b", START), options))
    ordered = list(in_order(iter(events)))
    assert sorted(map(repr, ordered)) == sorted(map(repr, events))
    assert [event.sample for event in ordered] == sorted(event.sample for event in events)
    for k in range(3):
        *pieces, result = (event for event in ordered if event.sample == k)
        assert "".join(piece.text for piece in pieces) == result.text
        assert isinstance(result, GeneratedText)


def test_the_first_sample_is_passed_on_as_it_is_made():
    model, options = make_model(), SamplingOptions(max_tokens=5, num_samples=2, seed=0)
    events = generate(model, LETTERS, encode_prompt(LETTERS, "b", START), options)
    taken = []
    ordered = in_order(taken.append(event) or event for event in events)
    next(ordered)
    assert len(taken) == 1


# Prompts


def test_unknown_characters_are_named_once_and_read_on():
    class Bytes(Table):
        def encode(self, text):
            return np.full(len(text), 2, dtype=np.int32)

    table = Bytes(LETTERS.pieces)
    assert encode_prompt(table, "d?x?\x07", START).notices == (
        "prompt: not in the vocabulary, read as bytes: `?`, `x`, '\\x07'",
    )
    lossy = Bytes(LETTERS.pieces, kind="word", is_lossless=False)
    many = "".join(map(chr, range(0x4E00, 0x4E00 + 25)))
    (notice,) = encode_prompt(lossy, many, START).notices
    assert notice.startswith("prompt: not in the vocabulary, read as unknown: `一`, ")
    assert notice.endswith(f"`{many[19]}` and 5 more")
    assert encode_prompt(table, "abc", START).notices == ()


def test_an_empty_prompt_reads_the_start_token():
    prompt = encode_prompt(LETTERS, "", START)
    assert (prompt.text, prompt.ids.tolist(), prompt.notices) == ("", [START], ())
    (result,) = results(make_model(), "")
    assert result.text == LETTERS.decode(result.ids).decode()


def test_prompts_that_are_not_text():
    with pytest.raises(UserError) as caught:
        encode_prompt(LETTERS, b"caf\xe9", START)
    assert str(caught.value) == (
        "prompt: not UTF-8; got byte 0xe9 at offset 3; "
        "convert it, or train with --tokenizer byte, which takes any bytes"
    )
    # Python hands over what an argument's bytes are not as lone surrogates.
    with pytest.raises(UserError, match="got byte 0xe9 at offset 1"):
        encode_prompt(LETTERS, "a\udce9", START)
    with pytest.raises(UserError) as caught:
        encode_prompt(LETTERS, "a\ud800", START)
    assert str(caught.value) == "prompt: not text; got U+D800 at character 1; remove it"
    raw = Table((None, *(bytes([b]) for b in range(256))), kind="byte")
    prompt = encode_prompt(raw, b"caf\xe9", START)
    assert (prompt.text, prompt.ids.tolist()) == ("caf\ufffd", [1 + b for b in b"caf\xe9"])
    assert encode_prompt(raw, "caf\udce9", START).ids.tolist() == prompt.ids.tolist()


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "--max-tokens: must be 1 or more; got 0"),
        ({"temperature": -1.0}, "--temperature: must be a finite number, 0 or more; got -1.0"),
        ({"temperature": math.nan}, "--temperature: must be a finite number, 0 or more; got nan"),
        ({"temperature": math.inf}, "--temperature: must be a finite number, 0 or more; got inf"),
        ({"top_k": -1}, "--top-k: must be 0 (off) or more; got -1"),
        ({"top_p": 0.0}, "--top-p: must be above 0 and at most 1; got 0.0"),
        ({"top_p": 1.5}, "--top-p: must be above 0 and at most 1; got 1.5"),
        ({"top_p": math.nan}, "--top-p: must be above 0 and at most 1; got nan"),
        ({"min_p": -0.1}, "--min-p: must be from 0 to 1; got -0.1"),
        ({"repetition_penalty": 0.0}, "--repetition-penalty: must be finite and above 0 (1: off); got 0.0"),
        ({"seed": -1}, "--seed: must be 0 or more; got -1"),
        ({"num_samples": 0}, "--num-samples: must be 1 or more; got 0"),
        ({"stop": ("a", "")}, "--stop: must not be empty; got ''"),
        ({"mem_len": -1}, "--mem-len: must be 0 or more; got -1"),
        ({"tgt_len": 0}, "--tgt-len: must be 1 or more; got 0"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_flag(options, message):
    with pytest.raises(UserError) as caught:
        SamplingOptions(**options)
    assert str(caught.value) == message


def test_edges_that_make_sense_are_taken():
    SamplingOptions(temperature=0, top_k=99_999, top_p=1, min_p=1, mem_len=0, seed=2**70)
    assert SamplingOptions(seed=3).seeded().seed == 3
    trained = Lengths(8, 16, 5, "mem_len")
    assert SamplingOptions().lengths(trained) == trained
    assert SamplingOptions(mem_len=3, tgt_len=4).lengths(trained) == Lengths(4, 3, 5, "mem_len")
    assert SamplingOptions(mem_len=0).lengths(trained) == Lengths(8, 0, 5, "off")
    assert SamplingOptions(mem_len=0).lengths(Lengths(8, 16, None, "mem_len+1")).same_length == "mem_len+1"


def test_the_repetition_penalty_looks_back_mem_len_tokens():
    model = cyclic_model([2, 3, 4], n_vocab=5)
    table = Table((None, b"\n", b"a", b"b", b"c"))
    with torch.no_grad():
        model.head.weight.mul_(0.2)
        model.head.bias[1] = 0.2  # the newline is second best, and better than the mean
    (free,) = results(model, "a", table, temperature=0, max_tokens=6)
    assert free.text == "bcabca"
    # Two tokens back the cycle's next token is never among the recent ones; three back it always is.
    for mem_len, is_free in ((0, True), (2, True), (3, False)):
        (penalized,) = results(
            model, "a", table, temperature=0, max_tokens=6, repetition_penalty=100, mem_len=mem_len
        )
        assert (penalized.text == free.text) == is_free


def test_a_prompt_is_read_as_the_run_reads_text():
    prompt = encode_prompt(LETTERS, "ab\n\na\n", START, newlines="drop")
    assert prompt.text == "ab\n\na\n"
    assert prompt.ids.tolist() == LETTERS.encode(b"aba").tolist()
    for newlines in ("keep", "eos"):
        kept = encode_prompt(LETTERS, "ab\na", START, newlines=newlines)
        assert kept.ids.tolist() == LETTERS.encode(b"ab\na").tolist()
    assert encode_prompt(LETTERS, "\n\n", START, newlines="drop").ids.tolist() == [START]
    table = Table((b"a", b"_", b"\n"))
    prompt = encode_prompt(table, " a \n", START, spaces="underscore")
    assert (prompt.ids.tolist(), prompt.notices) == (table.encode(b"_a_\n").tolist(), ())
    # What is no text does not become some without its newlines.
    with pytest.raises(UserError, match=r"^prompt: not UTF-8; got byte 0xe7 at offset 1;"):
        encode_prompt(LETTERS, b"a\xe7\n\xb4\x85", START, newlines="drop")


# Constant cost, seen in what torch does and not in the time it takes


class Costs(TorchDispatchMode):
    """Counts torch's operations and the bytes of the memory that they allocate."""

    def __init__(self):
        super().__init__()
        self.operations, self.n_bytes = Counter(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {_place(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = function(*args, **(kwargs or {}))
        self.operations[str(function)] += 1
        new = {
            _place(x): x.untyped_storage().nbytes() for x in tree_leaves(out) if isinstance(x, torch.Tensor)
        }
        self.n_bytes += sum(n_bytes for place, n_bytes in new.items() if place not in given)
        return out


def _place(tensor):
    return tensor.untyped_storage().data_ptr()


def costs_of_tokens(model, cache, n_tokens):
    """Operations and bytes of each of the next tokens, all samples together, and the cache after them."""
    costs, tokens = [], torch.full((len(cache.keys[0]), 1), START)
    for _ in range(n_tokens):
        with Costs() as cost:
            _, cache = feed(model, tokens, cache)
        costs.append((cost.operations, cost.n_bytes))
    return costs, cache


def buffers(cache):
    kept = [*cache.keys, *cache.values, *(t for bias in cache.biases for t in bias or () if t is not None)]
    return [(_place(t), t.untyped_storage().nbytes()) for t in kept]


@pytest.mark.parametrize(
    ("attention", "scheme", "is_reset"),
    [
        ("eager", "relative", False),
        *(("auto", scheme, False) for scheme in SCHEMES),
        *((attention, "relative", True) for attention in ("eager", "auto")),
    ],
)
def test_a_token_costs_the_same_however_long_the_text_is(attention, scheme, is_reset):
    model = make_model(tgt_len=4, mem_len=6, **SCHEMES[scheme], reset_memory_at_documents=is_reset)
    model.use_attention(attention)
    # `h` ends a document: after it the memory fills up anew.
    _, cache = read_prompt(model, LETTERS.encode(b"abcdefgh" + 12 * b"a"), model.lengths)
    before = buffers(cache)
    early, cache = costs_of_tokens(model, cache, 8)
    for _ in range(4 * 12):
        _, cache = feed(model, torch.tensor([[START]]), cache)
    late, cache = costs_of_tokens(model, cache, 8)
    assert cache.position == 20 + 8 + 4 * 12 + 8 - 4
    assert late == early
    assert early[:4] == early[4:]  # the first of a segment moves the memory, in every segment
    assert buffers(cache) == before


def test_samples_run_as_one_batch():
    model = make_model()
    _, cache = read_prompt(model, LETTERS.encode(b"abcdefgh"), model.lengths)
    two, _ = costs_of_tokens(
        model, cache.repeat(2), 4
    )  # one row alone goes another way through linear layers
    many, _ = costs_of_tokens(model, cache.repeat(5), 4)
    assert [operations for operations, _ in many] == [operations for operations, _ in two]
