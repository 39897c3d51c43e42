import dataclasses

import pytest
import torch

from tests import reference
from tests.tolerance import assert_same
from txlcli.config import ModelConfig
from txlcli.model import Lengths, TransformerXL

N_VOCAB = 11
LENGTHS = [
    Lengths(4, 0),
    Lengths(1, 5),
    Lengths(7, 3),
    Lengths(3, 7),
    Lengths(4, 4, clamp_len=3),
    Lengths(4, 6, same_length="mem_len"),
    Lengths(5, 3, same_length="mem_len+1", clamp_len=2),
]


def config_of(lengths, **changes):
    sizes = {"n_layer": 2, "d_model": 12, "n_head": 2, "d_head": 5, "d_inner": 16}
    return ModelConfig(**{**sizes, **lengths._asdict(), **changes})


def build(config):
    torch.manual_seed(1)
    model = TransformerXL(config, N_VOCAB).double().eval()
    with torch.no_grad():  # weights far from zero, so that every term matters
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def draw_tokens(n_streams, length):
    return torch.randint(N_VOCAB, (n_streams, length), generator=torch.Generator().manual_seed(2))


def by_training_path(model, tokens):
    """Score segment after segment with hidden rows as memory: [B, L, V]."""
    memory, out = None, []
    for segment in tokens.split(model.lengths.tgt_len, dim=1):
        hidden, memory = model.hidden_states(segment, memory)
        out.append(model.log_probs(hidden))
    return torch.cat(out, dim=1)


def by_cache(model, tokens, pieces, lengths=None):
    """Score with projected keys and values, the tokens handed over in pieces of the given sizes."""
    cache, out, begin = model.new_cache(len(tokens), lengths), [], 0
    for size in pieces:
        hidden, cache = model.extend(tokens[:, begin : begin + size], cache)
        out.append(model.log_probs(hidden))
        begin += size
    assert begin == tokens.shape[1]
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@torch.no_grad()
def test_model_is_the_paper(lengths, norm, tied):
    config = config_of(lengths, norm=norm, tied=tied)
    model, tokens = build(config), draw_tokens(1, 10)
    assert_same(by_training_path(model, tokens)[0], reference.log_probs(model, config, tokens[0].tolist()))


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@torch.no_grad()
def test_cached_keys_and_values_change_nothing(lengths, norm):
    model, tokens = build(config_of(lengths, norm=norm)), draw_tokens(3, 23)
    expected = by_training_path(model, tokens)
    whole = [len(part) for part in torch.arange(23).split(lengths.tgt_len)]
    assert_same(by_cache(model, tokens, whole), expected)
    assert_same(by_cache(model, tokens, [1] * 23), expected)
    halves = [n for size in whole for n in (size // 2, size - size // 2) if n]
    assert_same(by_cache(model, tokens, halves), expected)


@torch.no_grad()
def test_lengths_may_differ_from_those_of_training():
    config = config_of(Lengths(4, 4))
    model, tokens, lengths = build(config), draw_tokens(1, 12), Lengths(5, 9, clamp_len=6)
    expected = reference.log_probs(model, config, tokens[0].tolist(), lengths=lengths)
    assert_same(by_cache(model, tokens, [5, 5, 2], lengths)[0], expected)


@pytest.mark.parametrize("tgt_len", [1, 7, 64])
@pytest.mark.parametrize("norm", ["pre", "post"])
@torch.no_grad()
def test_segments_with_memory_of_all_the_past_are_one_long_forward(tgt_len, norm):
    tokens = draw_tokens(2, 70)
    in_segments = build(config_of(Lengths(tgt_len, 70), norm=norm))
    at_once = build(config_of(Lengths(70, 0), norm=norm))
    assert_same(by_training_path(in_segments, tokens), by_training_path(at_once, tokens))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_no_output_depends_on_a_later_token(lengths):
    model, tokens = build(config_of(lengths)), draw_tokens(1, 12)
    with torch.no_grad():
        before = by_training_path(model, tokens)
        for position in range(1, 12):
            changed = tokens.clone()
            changed[0, position] = (changed[0, position] + 1) % N_VOCAB
            after = by_training_path(model, changed)
            # Exact: the same arithmetic on the same numbers.
            assert torch.equal(after[:, :position], before[:, :position])
            assert not torch.equal(after[:, position], before[:, position])


@pytest.mark.parametrize(
    "lengths", [Lengths(7, 20), Lengths(20, 7), Lengths(1, 5), Lengths(6, 0), Lengths(5, 100)]
)
def test_memory_holds_the_last_mem_len_inputs(lengths):
    model, tokens, memory, seen = build(config_of(lengths)), draw_tokens(2, 43), None, 0
    for segment in tokens.split(lengths.tgt_len, dim=1):
        _, memory = model.hidden_states(segment, memory)
        seen += segment.shape[1]
        for rows in memory.hidden:
            assert rows.shape == (2, min(lengths.mem_len, seen), 12)
            assert not rows.requires_grad
    kept = tokens[:, 43 - min(43, lengths.mem_len) :]
    embedded = model.embed(kept) * 12**0.5
    assert torch.equal(memory.hidden[0], embedded)


def test_memory_is_a_value():
    model, tokens = build(config_of(Lengths(4, 6))), draw_tokens(1, 8)
    _, memory = model.hidden_states(tokens[:, :4], None)
    copies = [rows.clone() for rows in memory.hidden]
    first, _ = model.hidden_states(tokens[:, 4:], memory)
    again, _ = model.hidden_states(tokens[:, 4:], memory)
    assert torch.equal(first, again)
    assert all(torch.equal(rows, copy) for rows, copy in zip(memory.hidden, copies, strict=True))


def test_gradients_reach_every_parameter_and_not_the_memory():
    model = build(config_of(Lengths(4, 4), tied=False)).train()
    tokens = draw_tokens(2, 9)
    _, memory = model.hidden_states(tokens[:, :4], None)
    nll, _ = model(tokens[:, 4:8], memory, tokens[:, 5:])
    nll.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.count_nonzero(parameter.grad) > 0, name


def test_gradients_of_the_whole_model():
    model = build(config_of(Lengths(3, 2), n_layer=1, d_model=4, n_head=1, d_head=2, d_inner=3))
    tokens = draw_tokens(1, 7)
    with torch.no_grad():
        _, memory = model.hidden_states(tokens[:, :3], None)
    parameters = dict(model.named_parameters())

    def loss(*values):
        replaced = dict(zip(parameters, values, strict=True))
        nll, _ = torch.func.functional_call(model, replaced, (tokens[:, 3:6], memory, tokens[:, 4:]))
        return nll.sum()

    assert torch.autograd.gradcheck(loss, tuple(parameters.values()))


@torch.no_grad()
def test_forward_is_the_loss_of_hidden_states():
    model, tokens = build(config_of(Lengths(4, 4))), draw_tokens(2, 5)
    nll, _ = model(tokens[:, :4], None, tokens[:, 1:])
    hidden, _ = model.hidden_states(tokens[:, :4], None)
    picked = -model.log_probs(hidden).gather(-1, tokens[:, 1:, None])[..., 0]
    assert_same(nll, picked)
    assert_same(model.log_probs(hidden).exp().sum(-1), torch.ones(2, 4, dtype=torch.float64))


@torch.no_grad()
def test_streams_do_not_mix():
    model, tokens = build(config_of(Lengths(4, 6))), draw_tokens(3, 12)
    together = by_training_path(model, tokens)
    alone = torch.cat([by_training_path(model, tokens[b : b + 1]) for b in range(3)])
    assert_same(together, alone)


@torch.no_grad()
def test_a_repeated_cache_goes_on_as_copies():
    model, tokens = build(config_of(Lengths(4, 6))), draw_tokens(1, 9)
    _, cache = model.extend(tokens[:, :4], model.new_cache(1))
    _, cache = model.extend(tokens[:, 4:6], cache)
    many, _ = model.extend(tokens[:, 6:8].expand(3, -1), cache.repeat(3))
    one, _ = model.extend(tokens[:, 6:8], cache)
    assert_same(many, one.expand(3, -1, -1))


def test_initialization_is_that_of_the_authors():
    torch.manual_seed(0)
    model = TransformerXL(ModelConfig(n_layer=3, d_model=128, n_head=4, tied=False), 500)
    for name, value in model.named_parameters():
        if name.endswith(".bias"):
            assert torch.count_nonzero(value) == 0, name
        else:
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            # Six standard errors of mean and deviation of normal draws; the seed is fixed.
            assert abs(value.mean().item() - mean) < 6 * 0.02 / value.numel() ** 0.5, name
            assert abs(value.std().item() - 0.02) < 6 * 0.02 / (2 * value.numel()) ** 0.5, name


def test_parameters_are_counted_by_vocabulary_and_rest():
    config = config_of(Lengths(4, 4))
    model = TransformerXL(config, N_VOCAB)
    vocabulary, rest = model.n_parameters()
    assert vocabulary == N_VOCAB * 12 + N_VOCAB
    assert vocabulary + rest == sum(p.numel() for p in model.parameters())
    untied = TransformerXL(dataclasses.replace(config, tied=False), N_VOCAB)
    assert untied.n_parameters() == (2 * N_VOCAB * 12 + N_VOCAB, rest)


def test_dropout_draws_only_while_training():
    config = config_of(Lengths(4, 4), dropout=0.5, dropatt=0.5)
    model, tokens = build(config), draw_tokens(1, 4)
    state = torch.random.get_rng_state()
    first, _ = model.hidden_states(tokens, None)
    assert torch.equal(torch.random.get_rng_state(), state)
    model.train()
    second, _ = model.hidden_states(tokens, None)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_half_precision_keeps_loss_and_memory_in_float32(dtype):
    model, tokens = build(config_of(Lengths(4, 4))).float(), draw_tokens(1, 5)
    with torch.autocast("cpu", dtype=dtype):
        nll, memory = model(tokens[:, :4], None, tokens[:, 1:])
        nll, memory = model(tokens[:, :4], memory, tokens[:, 1:])
    assert nll.dtype == torch.float32
    assert all(rows.dtype == torch.float32 for rows in memory.hidden)
