import copy
import dataclasses
import itertools

import numpy
import pytest
import torch

from tests import reference
from tests.tolerance import assert_as_accurate, assert_same
from txlcli import UserError, single
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
    Lengths(4, 5, memory_start="zeros"),
    Lengths(4, 6, same_length="mem_len", memory_start="zeros", clamp_len=5),
]


SCHEMES = {
    "relative": {},
    "untied": {"untie_r": True},
    "shaw": {"position": "shaw", "max_relative_position": 3},
    "shaw-keys": {"position": "shaw", "shaw_values": False},
    "restart": {"position": "sinusoid"},
    "continue": {"position": "sinusoid", "absolute_positions": "continue"},
    "learned": {"position": "learned"},
}
all_schemes = pytest.mark.parametrize("scheme", SCHEMES)
# Every length with every scheme, and each of both with both norms.
norms_in_turn = pytest.mark.parametrize(
    ("lengths", "scheme", "norm"),
    [
        (lengths, scheme, ("pre", "post")[(i + j) % 2])
        for i, lengths in enumerate(LENGTHS)
        for j, scheme in enumerate(SCHEMES)
    ],
    ids=str,
)


def config_of(lengths, scheme="relative", **changes):
    sizes = {"n_layer": 2, "d_model": 12, "n_head": 2, "d_head": 5, "d_inner": 16}
    changes = SCHEMES[scheme] | changes
    if changes.get("position") in ("sinusoid", "learned"):
        lengths = lengths._replace(clamp_len=None)
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


def draw_documents(n_streams, length):
    """Tokens with a document's end, the last id, among three: also first, last and several in a row."""
    generator = torch.Generator().manual_seed(4)
    is_end = torch.rand(n_streams, length, generator=generator) < 0.3
    return torch.where(is_end, N_VOCAB - 1, draw_tokens(n_streams, length) % (N_VOCAB - 1))


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


@torch.no_grad()
def test_rows_of_a_cache_that_nothing_has_written_are_no_numbers_here():
    model, tokens = build(config_of(Lengths(4, 6))), draw_tokens(2, 3)
    _, cache = model.extend(tokens, model.new_cache(2))
    for buffer in (*cache.keys, *cache.values):
        assert buffer[:, :, :3].isfinite().all()
        assert buffer[:, :, 3:].isnan().all()


@norms_in_turn
@torch.no_grad()
def test_model_is_the_paper(lengths, scheme, norm):
    config = config_of(lengths, scheme, norm=norm, tied=norm == "pre")
    model, tokens = build(config), draw_tokens(1, 10)
    assert_same(by_training_path(model, tokens)[0], reference.log_probs(model, config, tokens[0].tolist()))


@all_schemes
@pytest.mark.parametrize("lengths", [*LENGTHS, Lengths(5, 100)], ids=str)
@torch.no_grad()
def test_with_documents_too_model_is_the_paper(lengths, scheme):
    config = config_of(lengths, scheme, reset_memory_at_documents=True)
    model, tokens = build(config), draw_documents(1, 14)
    assert set((tokens == N_VOCAB - 1).sum(dim=1).tolist()) <= set(range(3, 8))
    expected = reference.log_probs(model, config, tokens[0].tolist())
    assert_same(by_training_path(model, tokens)[0], expected)
    without = dataclasses.replace(config, reset_memory_at_documents=False)
    if config.mem_len or config.tgt_len > 1:
        assert not torch.allclose(expected, reference.log_probs(model, without, tokens[0].tolist()))


@pytest.mark.parametrize("has_documents", [False, True])
@norms_in_turn
@torch.no_grad()
def test_cached_keys_and_values_change_nothing(lengths, scheme, norm, has_documents):
    model = build(config_of(lengths, scheme, norm=norm, reset_memory_at_documents=has_documents))
    tokens = (draw_documents if has_documents else draw_tokens)(3, 18)
    expected = by_training_path(model, tokens)
    whole = [len(part) for part in torch.arange(18).split(lengths.tgt_len)]
    assert_same(by_cache(model, tokens, whole), expected)
    assert_same(by_cache(model, tokens, [1] * 18), expected)
    model.use_attention("skew")  # one token then goes its own way
    assert_same(by_cache(model, tokens, [1] * 18), expected)
    halves = [n for size in whole for n in (size // 2, size - size // 2) if n]
    assert_same(by_cache(model, tokens, halves), expected)


@pytest.mark.parametrize("n_streams", [1, single.MAX_STREAMS, single.MAX_STREAMS + 1])
@pytest.mark.parametrize("scheme", ["relative", "shaw", "restart"])
@torch.no_grad()
def test_single_tokens_are_as_accurate_as_all_at_once(scheme, n_streams, monkeypatch):
    taken = []
    monkeypatch.setattr(single, "step", lambda *given, step=single.step: taken.append(1) or step(*given))
    exact = build(config_of(Lengths(8, 5), scheme, d_model=48, n_head=3, d_head=16))
    tokens = draw_tokens(n_streams, 20)
    model = copy.deepcopy(exact).float()
    plain = by_cache(model, tokens, [1] * 20)
    assert not taken
    model.use_attention("skew")
    fast = by_cache(model, tokens, [1] * 20)
    assert len(taken) == (40 if n_streams <= single.MAX_STREAMS else 0)
    assert_as_accurate(fast, plain, by_training_path(exact, tokens))


@torch.no_grad()
def test_a_product_without_numpy_2_is_the_same(monkeypatch):
    weight, rows = (numpy.random.default_rng(3).normal(size=shape) for shape in ((5, 7), (2, 7)))
    assert_same(torch.from_numpy(single.product(weight, rows)), torch.from_numpy(rows @ weight.T))
    monkeypatch.delattr(numpy, "vecdot", raising=False)
    assert_same(torch.from_numpy(single.product(weight, rows)), torch.from_numpy(rows @ weight.T))


@all_schemes
@torch.no_grad()
def test_layer_normalization_has_an_epsilon_and_may_leave_out_the_last(scheme):
    config = config_of(Lengths(4, 4), scheme, norm="pre", final_norm=False, norm_eps=0.3)
    model, tokens = build(config), draw_tokens(1, 10)
    expected = reference.log_probs(model, config, tokens[0].tolist())
    assert_same(by_training_path(model, tokens)[0], expected)
    model.use_attention("skew")
    assert_same(by_cache(model, tokens, [1] * 10)[0], expected)
    with pytest.raises(UserError, match=r"final_norm false needs norm pre; got post"):
        config_of(Lengths(4, 4), norm="post", final_norm=False)


@all_schemes
@torch.no_grad()
def test_lengths_may_differ_from_those_of_training(scheme):
    config = config_of(Lengths(5, 4), scheme)
    model, tokens, lengths = build(config), draw_tokens(1, 12), Lengths(3, 9)
    pieces = [3, 3, 3, 3]
    if config.position in ("relative", "shaw"):
        lengths = lengths._replace(clamp_len=6)
    if config.position != "learned":
        lengths, pieces = lengths._replace(tgt_len=7), [7, 5]
    expected = reference.log_probs(model, config, tokens[0].tolist(), lengths=lengths)
    assert_same(by_cache(model, tokens, pieces, lengths)[0], expected)


@torch.no_grad()
def test_a_stream_in_the_middle_of_a_text_continues_its_positions():
    model, tokens = build(config_of(Lengths(4, 4), "continue", n_layer=1)), draw_tokens(1, 16)
    expected = by_training_path(model, tokens)
    # One layer reads its true inputs after the segments that fill the memory: here one.
    cache = model.new_cache(2, positions=torch.tensor([4, 8]))
    both = torch.cat([tokens[:, 4:12], tokens[:, 8:16]])
    _, cache = model.extend(both[:, :4], cache)
    hidden, cache = model.extend(both[:, 4:], cache)
    assert_same(model.log_probs(hidden), torch.cat([expected[:, 8:12], expected[:, 12:16]]))
    assert cache.repeat(2).position.tolist() == [8, 12, 8, 12]


@torch.no_grad()
def test_restarting_positions_repeat_and_continuing_ones_do_not():
    same = torch.full((1, 8), 3)
    restarting = build(config_of(Lengths(4, 0), "restart"))
    out = by_training_path(restarting, same)
    assert torch.equal(out[:, :4], out[:, 4:])
    continuing = build(config_of(Lengths(4, 0), "continue"))
    out = by_training_path(continuing, same)
    assert not torch.equal(out[:, :4], out[:, 4:])


def test_lengths_that_a_scheme_does_not_have_are_refused():
    learned = build(config_of(Lengths(4, 4), "learned"))
    with pytest.raises(
        UserError,
        match=r"^--tgt-len: this model has learned 4 positions; got 5; give 4 or less, "
        r"and more --mem-len for more context$",
    ):
        learned.new_cache(1, Lengths(5, 4))
    for scheme, name in (("learned", "learned"), ("restart", "sinusoid"), ("continue", "sinusoid")):
        with pytest.raises(
            UserError, match=rf"^--clamp-len: position {name} has no distances; got 3; leave it out$"
        ):
            build(config_of(Lengths(4, 4), scheme)).refuse_lengths(Lengths(4, 4, clamp_len=3))
    for scheme in SCHEMES:
        build(config_of(Lengths(4, 4), scheme)).refuse_lengths(Lengths(3, 100))


@pytest.mark.parametrize(("rule", "n_keys"), [("mem_len", 6), ("mem_len+1", 7)])
@all_schemes
def test_same_length_shows_exactly_so_many_keys(scheme, rule, n_keys):
    # One layer: the input rows that an output depends on are the keys that it sees.
    model = build(config_of(Lengths(4, 6, same_length=rule), scheme, n_layer=1))
    seen = []
    model.embed.register_forward_hook(lambda _, __, out: seen.append(out) or out)
    cache, outputs = model.new_cache(1), []
    for segment in draw_tokens(1, 20).split(4, dim=1):
        hidden, cache = model.extend(
            segment, cache._replace(keys=clones(cache.keys), values=clones(cache.values))
        )
        outputs.append(hidden)
    rows = torch.cat(outputs, dim=1)
    for position in range(20):
        gradients = torch.autograd.grad(rows[0, position].sum(), seen, retain_graph=True, allow_unused=True)
        touched = [
            4 * n + int(i)
            for n, gradient in enumerate(gradients)
            if gradient is not None
            for i in gradient[0].abs().sum(-1).nonzero()
        ]
        assert touched == list(range(max(0, position + 1 - n_keys), position + 1))


@all_schemes
@torch.no_grad()
def test_a_document_does_not_depend_on_those_before_it(scheme):
    for lengths in (Lengths(5, 7), Lengths(1, 9), Lengths(30, 0)):
        model = build(config_of(lengths, scheme, reset_memory_at_documents=True))
        tokens = draw_tokens(1, 30) % (N_VOCAB - 1)
        tokens[0, [6, 7, 19]] = N_VOCAB - 1
        before = by_training_path(model, tokens)
        for begin, end in ((0, 7), (7, 8), (8, 20), (20, 30)):
            changed = tokens.clone()
            changed[0, end:] = (changed[0, end:] + 1) % (N_VOCAB - 1)
            changed[0, :begin] = torch.where(tokens == N_VOCAB - 1, tokens, (tokens + 3) % 10)[0, :begin]
            # Exact: the same arithmetic on the same numbers, and a weight of 0 for all others.
            assert torch.equal(by_training_path(model, changed)[:, begin:end], before[:, begin:end])


@pytest.mark.parametrize("tgt_len", [1, 7, 64])
@pytest.mark.parametrize("scheme", ["relative", "untied", "shaw"])
@torch.no_grad()
def test_documents_in_a_row_are_documents_alone(tgt_len, scheme):
    # Memory of all the past, so that it does not matter where segments begin.
    model = build(config_of(Lengths(tgt_len, 60), scheme, reset_memory_at_documents=True))
    tokens = draw_documents(1, 60)
    ends = [0, *((tokens[0] == N_VOCAB - 1).nonzero()[:, 0] + 1).tolist(), 60]
    alone = [by_training_path(model, tokens[:, a:b]) for a, b in itertools.pairwise(ends) if a < b]
    assert len(alone) > 10
    assert_same(by_training_path(model, tokens), torch.cat(alone, dim=1))


@all_schemes
@torch.no_grad()
def test_memory_knows_how_many_rows_are_of_the_running_document(scheme):
    end = N_VOCAB - 1
    tokens = torch.tensor(
        [[1, end, 2, 3, 4, 5, 6, end], [1, 2, 3, 4, 5, 6, 7, 8], [end, end, 1, 2, 3, end, 4, 5]]
    )
    model = build(config_of(Lengths(2, 3), scheme, reset_memory_at_documents=True))
    memory, cache = None, model.new_cache(3)
    for segment, n_document in zip(
        tokens.split(2, dim=1), ([0, 2, 0], [2, 3, 2], [3, 3, 0], [0, 3, 2]), strict=True
    ):
        _, memory = model.hidden_states(segment, memory)
        _, cache = model.extend(segment, cache)
        assert memory.n_document.tolist() == n_document
        assert cache.n_document.clamp(max=3).tolist() == n_document
    assert cache.first_streams(2).n_document.tolist() == cache.n_document[:2].tolist()
    assert cache.first_streams(1).repeat(2).n_document.tolist() == [0, 0]


@pytest.mark.parametrize("attention", ["eager", "skew"])
@all_schemes
def test_without_documents_nothing_is_masked_and_nothing_kept(attention, scheme, monkeypatch):
    model = build(config_of(Lengths(4, 5), scheme))
    model.use_attention(attention)
    given, tokens = [], draw_documents(2, 12)
    for layer in model.each_layer():
        attend = layer.attention.attend
        monkeypatch.setattr(
            layer.attention,
            "attend",
            lambda *args, attend=attend, **options: (
                given.append(options["first"]) or attend(*args, **options)
            ),
        )
    _, memory = model.hidden_states(tokens[:, :4], None)
    _, memory = model.hidden_states(tokens[:, 4:8], memory)
    _, cache = model.extend(tokens[:, :4], model.new_cache(2))
    assert given == [None] * 6
    assert memory.n_document is None
    assert cache.n_document is None


@all_schemes
@torch.no_grad()
def test_a_text_that_is_one_document_is_a_text_without_documents(scheme):
    tokens = draw_tokens(2, 20) % (N_VOCAB - 1)
    for lengths in (Lengths(4, 6), Lengths(4, 6, memory_start="zeros"), Lengths(3, 0)):
        on, off = (build(config_of(lengths, scheme, reset_memory_at_documents=on)) for on in (True, False))
        # Exact: the eager form masks the same keys.
        assert torch.equal(by_training_path(on, tokens), by_training_path(off, tokens))
        assert torch.equal(by_cache(on, tokens, [1] * 20), by_cache(off, tokens, [1] * 20))


@pytest.mark.parametrize(
    "lengths", [Lengths(6, 4), Lengths(3, 7), Lengths(4, 6, same_length="mem_len")], ids=str
)
@all_schemes
def test_gradients_with_documents_are_those_of_the_eager_form(lengths, scheme, monkeypatch):
    monkeypatch.setattr("txlcli.attention.skew.EAGER_BYTES", 0)
    tokens, gradients = draw_documents(3, 19), []
    for attention in ("eager", "skew", "sdpa"):
        model = build(config_of(lengths, scheme, reset_memory_at_documents=True)).train()
        model.use_attention(attention)
        memory = None
        for begin in range(0, 18, lengths.tgt_len):
            segment = tokens[:, begin : min(begin + lengths.tgt_len, 18)]
            nll, memory = model(segment, memory, tokens[:, begin + 1 : begin + 1 + segment.shape[1]])
            nll.sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for others in gradients[1:]:
        for one, other in zip(gradients[0], others, strict=True):
            assert_same(other, one)


@pytest.mark.parametrize("scheme", ["relative", "shaw", "restart"])
@torch.no_grad()
def test_single_tokens_mask_only_where_documents_began_at_different_rows(scheme, monkeypatch):
    model = build(config_of(Lengths(4, 5), scheme, reset_memory_at_documents=True))
    model.use_attention("skew")
    seen, end = [], N_VOCAB - 1
    monkeypatch.setattr(
        single, "step", lambda *given, step=single.step: seen.append(given[4:]) or step(*given)
    )
    tokens = torch.tensor([[1, end, 2, 3], [4, end, 5, end], [6, end, 7, 8]])
    assert_same(by_cache(model, tokens, [1] * 4), by_training_path(model, tokens))
    assert [(first, n_past) for first, n_past, hidden in seen if hidden is None] == [
        *((0, 0), (0, 0), (0, 1), (0, 1), (2, 2), (2, 2), (2, 3), (2, 3))
    ]
    seen.clear()
    cache = model.new_cache(3)
    for n in range(4):
        _, cache = model.extend(tokens[:, n : n + 1], cache)
    _, cache = model.extend(torch.tensor([[1], [2], [3]]), cache)
    (first, n_past, hidden), _ = seen[-2:]
    assert (first, n_past) == (2, 4)
    assert hidden.tolist() == [[False] * 3, [True, True, False], [False] * 3]


def clones(buffers):
    return tuple(buffer.clone() for buffer in buffers)


@pytest.mark.parametrize("tgt_len", [1, 7, 64])
@pytest.mark.parametrize("scheme", ["relative", "untied", "shaw", "continue"])
@torch.no_grad()
def test_segments_with_memory_of_all_the_past_are_one_long_forward(tgt_len, scheme):
    tokens = draw_tokens(2, 70)
    in_segments = build(config_of(Lengths(tgt_len, 70), scheme))
    at_once = build(config_of(Lengths(70, 0), scheme))
    assert_same(by_training_path(in_segments, tokens), by_training_path(at_once, tokens))


@all_schemes
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_no_output_depends_on_a_later_token(lengths, scheme):
    model, tokens = build(config_of(lengths, scheme)), draw_tokens(1, 12).repeat(11, 1)
    changed, places = tokens.clone(), range(1, 12)
    changed[range(11), places] = (changed[range(11), places] + 1) % N_VOCAB  # another place in each stream
    with torch.no_grad():
        before, after = by_training_path(model, tokens), by_training_path(model, changed)
    for stream, place in enumerate(places):
        # Exact: the same arithmetic on the same numbers.
        assert torch.equal(after[stream, :place], before[stream, :place])
        assert not torch.equal(after[stream, place], before[stream, place])


@pytest.mark.parametrize(
    "lengths", [Lengths(7, 20), Lengths(20, 7), Lengths(1, 5), Lengths(6, 0), Lengths(5, 100)]
)
def test_memory_holds_the_last_mem_len_inputs(lengths):
    model, tokens, memory, seen = build(config_of(lengths)), draw_tokens(2, 43), None, 0
    for segment in tokens.split(lengths.tgt_len, dim=1):
        _, memory = model.hidden_states(segment, memory)
        seen += segment.shape[1]
        assert memory.position.tolist() == [seen, seen]
        for rows in memory.hidden:
            assert rows.shape == (2, min(lengths.mem_len, seen), 12)
            assert not rows.requires_grad
    kept = tokens[:, 43 - min(43, lengths.mem_len) :]
    embedded = model.embed(kept) * 12**0.5
    assert torch.equal(memory.hidden[0], embedded)


@all_schemes
def test_memory_is_a_value(scheme):
    model, tokens = build(config_of(Lengths(4, 6), scheme)), draw_tokens(1, 8)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    _, memory = model.hidden_states(tokens[:, :4], None)
    copies = [rows.clone() for rows in (*memory.hidden, memory.position)]
    first, _ = model.hidden_states(tokens[:, 4:], memory)
    again, _ = model.hidden_states(tokens[:, 4:], memory)
    assert torch.equal(first, again)
    kept = (*memory.hidden, memory.position)
    assert all(torch.equal(rows, copy) for rows, copy in zip(kept, copies, strict=True))
    assert torch.equal(tokens, draw_tokens(1, 8))
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@all_schemes
def test_gradients_reach_every_parameter_and_not_the_memory(scheme):
    model = build(config_of(Lengths(4, 4), scheme, tied=False)).train()
    tokens = draw_tokens(2, 9)
    _, memory = model.hidden_states(tokens[:, :4], None)
    nll, _ = model(tokens[:, 4:8], memory, tokens[:, 5:])
    nll.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.count_nonzero(parameter.grad) > 0, name


@pytest.mark.parametrize(("attention", "has_documents"), [("eager", False), ("skew", True)])
@all_schemes
def test_gradients_of_the_whole_model(scheme, attention, has_documents, monkeypatch):
    monkeypatch.setattr("txlcli.attention.skew.EAGER_BYTES", 0)
    sizes = {"n_layer": 1, "d_model": 4, "n_head": 1, "d_head": 2, "d_inner": 3}
    model = build(config_of(Lengths(3, 2), scheme, reset_memory_at_documents=has_documents, **sizes))
    model.use_attention(attention)
    tokens = draw_tokens(1, 7) % (N_VOCAB - 1)
    tokens[0, [1, 4]] = N_VOCAB - 1
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


@all_schemes
@torch.no_grad()
def test_streams_do_not_mix(scheme):
    model, tokens = build(config_of(Lengths(4, 6), scheme)), draw_tokens(3, 12)
    together = by_training_path(model, tokens)
    alone = torch.cat([by_training_path(model, tokens[b : b + 1]) for b in range(3)])
    assert_same(together, alone)


@all_schemes
@torch.no_grad()
def test_a_repeated_cache_goes_on_as_copies(scheme):
    model, tokens = build(config_of(Lengths(4, 6), scheme)), draw_tokens(1, 9)
    _, cache = model.extend(tokens[:, :4], model.new_cache(1))
    _, cache = model.extend(tokens[:, 4:6], cache)
    many, _ = model.extend(tokens[:, 6:8].expand(3, -1), cache.repeat(3))
    one, _ = model.extend(tokens[:, 6:8], cache)
    assert_same(many, one.expand(3, -1, -1))


@pytest.mark.parametrize("scheme", ["relative", "untied", "shaw", "learned"])
def test_initialization_is_that_of_the_authors(scheme):
    torch.manual_seed(0)
    config = ModelConfig(
        n_layer=3,
        d_model=128,
        n_head=4,
        tied=False,
        cutoffs=(90, 200),
        div_val=2,
        init_std=0.03,
        **SCHEMES[scheme],
    )
    model = TransformerXL(config, 500)
    for name, value in model.named_parameters():
        if name.endswith(".bias") or name == "head.cluster_bias":
            assert torch.count_nonzero(value) == 0, name
        else:
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            std = 0.01 if "projections" in name else 0.03
            # Six standard errors of mean and deviation of normal draws; the seed is fixed.
            assert abs(value.mean().item() - mean) < 6 * std / value.numel() ** 0.5, name
            assert abs(value.std().item() - std) < 6 * std / (2 * value.numel()) ** 0.5, name


def test_parameters_are_counted_by_vocabulary_and_rest():
    config = config_of(Lengths(4, 4))
    model = TransformerXL(config, N_VOCAB)
    vocabulary, rest = model.n_parameters()
    assert vocabulary == N_VOCAB * 12 + N_VOCAB
    assert vocabulary + rest == sum(p.numel() for p in model.parameters())
    untied = TransformerXL(dataclasses.replace(config, tied=False), N_VOCAB)
    assert untied.n_parameters() == (2 * N_VOCAB * 12 + N_VOCAB, rest)


@all_schemes
def test_dropout_draws_only_while_training(scheme):
    config = config_of(Lengths(4, 4), scheme, dropout=0.5, dropatt=0.5)
    model, tokens = build(config), draw_tokens(1, 4)
    state = torch.random.get_rng_state()
    first, _ = model.hidden_states(tokens, None)
    assert torch.equal(torch.random.get_rng_state(), state)
    model.train()
    second, _ = model.hidden_states(tokens, None)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [{}, {"cutoffs": (3, 7), "div_val": 2}])
@all_schemes
def test_half_precision_keeps_loss_and_memory_in_float32(dtype, vocabulary, scheme):
    model, tokens = build(config_of(Lengths(4, 4), scheme, **vocabulary)).float(), draw_tokens(1, 5)
    with torch.autocast("cpu", dtype=dtype):
        nll, memory = model(tokens[:, :4], None, tokens[:, 1:])
        nll, memory = model(tokens[:, :4], memory, tokens[:, 1:])
    assert nll.dtype == torch.float32
    assert all(rows.dtype == torch.float32 for rows in memory.hidden)
