import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import reference
from tests.tolerance import assert_same
from txlcli import UserError
from txlcli.attention import BACKENDS, RelativeBias, align, choose_backend, relative_attention

SIZES = [(1, 0), (1, 5), (5, 0), (7, 3), (3, 7), (4, 4)]  # T, M


def draw(n_queries, n_memory, *, n_streams=2, n_head=3, d_head=4, spare=0, dtype=torch.float64, grad=False):
    """Return q, k, v, r, u, w; r has `spare` rows of farther distances than any key."""
    n_keys = n_queries + n_memory
    shapes = [
        (n_streams, n_head, n_queries, d_head),
        (n_streams, n_head, n_keys, d_head),
        (n_streams, n_head, n_keys, d_head),
        (n_head, n_keys + spare, d_head),
        (n_head, d_head),
        (n_head, d_head),
    ]
    return [torch.randn(shape, dtype=dtype).requires_grad_(grad) for shape in shapes]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(0, 9))
def test_aligned_scores_are_those_of_direct_indexing(n_streams, n_queries, n_memory):
    n_keys = n_queries + n_memory
    by_distance = torch.randn(n_streams, 2, n_queries, n_keys, dtype=torch.float64)
    aligned = align(by_distance)
    for i in range(n_queries):
        for j in range(n_memory + i + 1):
            distance = n_memory + i - j
            assert torch.equal(aligned[:, :, i, j], by_distance[:, :, i, n_keys - 1 - distance])


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 2), st.integers(1, 6), st.integers(0, 6), st.integers(0, 3))
def test_eager_is_the_formula(n_streams, n_queries, n_memory, spare):
    q, k, v, r, u, w = draw(n_queries, n_memory, n_streams=n_streams, n_head=2, spare=spare)
    expected = reference.attention(q, k, v, r.flip(1), u, w)
    assert_same(relative_attention(q, k, v, RelativeBias(r, u, w)), expected)


@pytest.mark.parametrize(("n_queries", "n_memory"), SIZES)
def test_first_hides_what_lies_before_it(n_queries, n_memory):
    q, k, v, r, u, w = draw(n_queries, n_memory)
    own = torch.arange(n_memory, n_memory + n_queries)
    first = torch.stack([own, (own - 2).clamp(min=0)])  # one stream sees itself alone, the other three keys
    out = relative_attention(q, k, v, RelativeBias(r, u, w), first=first)
    assert_same(out, reference.attention(q, k, v, r.flip(1), u, w, first))
    assert_same(out[0], v[0, :, n_memory:])


@pytest.mark.parametrize(("n_queries", "n_memory"), SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_gradient_comes_from_a_later_or_hidden_key(backend, n_queries, n_memory):
    q, k, v, r, u, w = draw(n_queries, n_memory, grad=True)
    first = torch.arange(n_queries).expand(2, -1)
    out = BACKENDS[backend](q, k, v, RelativeBias(r, u, w), first=first)
    for i in range(n_queries):
        grad_k, grad_v = torch.autograd.grad(out[:, :, i].sum(), (k, v), retain_graph=True)
        for grad in (grad_k, grad_v):
            assert torch.count_nonzero(grad[:, :, n_memory + i + 1 :]) == 0
            assert torch.count_nonzero(grad[:, :, :i]) == 0
        assert torch.count_nonzero(grad_v[:, :, n_memory + i]) > 0


@pytest.mark.parametrize(("n_queries", "n_memory"), SIZES)
@pytest.mark.parametrize("has_first", [False, True])
def test_gradients_of_the_eager_form(n_queries, n_memory, has_first):
    inputs = draw(n_queries, n_memory, n_head=2, d_head=2, grad=True)
    first = (torch.arange(n_queries) // 2).expand(2, -1) if has_first else None

    def attend(q, k, v, r, u, w):
        return relative_attention(q, k, v, RelativeBias(r, u, w), first=first)

    assert torch.autograd.gradcheck(attend, inputs)


def test_dropout_keeps_the_mean():
    q, k, v, r, u, w = draw(1, 3, n_streams=4000, n_head=1)
    q, k, v = (x[:1].expand(4000, -1, -1, -1) for x in (q, k, v))
    dropped = relative_attention(q, k, v, RelativeBias(r, u, w), dropout=0.5)
    kept = relative_attention(q, k, v, RelativeBias(r, u, w))
    assert not torch.equal(dropped, kept)
    standard_error = dropped.std(0) / 4000**0.5
    # Five standard errors: a fixed seed draws the numbers, so this passes always or never.
    assert ((dropped.mean(0) - kept[0]).abs() <= 5 * standard_error + 1e-12).all()


def test_half_precision_has_a_float32_softmax():
    q, k, v, r, u, w = draw(3, 2, dtype=torch.bfloat16)
    out = relative_attention(q, k, v, RelativeBias(r, u, w))
    assert out.dtype == torch.bfloat16
    assert torch.isfinite(out).all()


def test_choice_of_backend():
    assert choose_backend("auto").name in BACKENDS
    assert choose_backend("eager").attend is relative_attention
    with pytest.raises(
        UserError, match=r"^--attention: unknown backend; got `flash`; choose from auto, eager$"
    ):
        choose_backend("flash")
