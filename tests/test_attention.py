import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import reference
from tests.tolerance import assert_same
from txlcli import UserError
from txlcli import attention as attention_module
from txlcli.attention import (
    BACKENDS,
    Backend,
    RelativeBias,
    align,
    choose_backend,
    relative_attention,
    unalign,
)

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


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(0, 9))
def test_unaligned_weights_stand_at_their_distance(n_streams, n_queries, n_memory):
    n_keys = n_queries + n_memory
    weights = torch.rand(n_streams, 2, n_queries, n_keys, dtype=torch.float64).tril(n_memory)
    by_distance = unalign(weights)
    expected = torch.zeros_like(weights)
    for i in range(n_queries):
        for j in range(n_memory + i + 1):
            expected[:, :, i, n_keys - 1 - (n_memory + i - j)] = weights[:, :, i, j]
    assert torch.equal(by_distance, expected)


# What each scheme of positions gives to attention: a row here is a row of the tests below.
FORMS = {
    "relative": lambda r, u, w: RelativeBias(r, u, w),
    "shaw": lambda r, u, w: RelativeBias(r, values=r.sin()),
    "shaw-keys": lambda r, u, w: RelativeBias(r),
    "absolute": lambda r, u, w: None,
}
all_forms = pytest.mark.parametrize("form", FORMS)


def by_loops(q, k, v, bias, first=None):
    """Attend by the loops of the reference, with zeros for what a form does not have."""
    r = torch.zeros_like(k[0]) if bias is None else bias.r.flip(1)
    none = q.new_zeros(q.shape[1], q.shape[-1])
    u = none if bias is None or bias.u is None else bias.u
    w = none if bias is None or bias.w is None else bias.w
    values = None if bias is None or bias.values is None else bias.values.flip(1)
    return reference.attention(q, k, v, r, u, w, first, values)


@all_forms
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 2), st.integers(1, 6), st.integers(0, 6), st.integers(0, 3))
def test_eager_is_the_formula(form, n_streams, n_queries, n_memory, spare):
    q, k, v, r, u, w = draw(n_queries, n_memory, n_streams=n_streams, n_head=2, spare=spare)
    bias = FORMS[form](r, u, w)
    assert_same(relative_attention(q, k, v, bias), by_loops(q, k, v, bias))


@all_forms
@pytest.mark.parametrize(("n_queries", "n_memory"), SIZES)
def test_first_hides_what_lies_before_it(form, n_queries, n_memory):
    q, k, v, r, u, w = draw(n_queries, n_memory)
    bias = FORMS[form](r, u, w)
    own = torch.arange(n_memory, n_memory + n_queries)
    first = torch.stack([own, (own - 2).clamp(min=0)])  # one stream sees itself alone, the other three keys
    out = relative_attention(q, k, v, bias, first=first)
    assert_same(out, by_loops(q, k, v, bias, first))
    itself = v[0, :, n_memory:]
    assert_same(out[0], itself if form != "shaw" else itself + bias.values[:, -1:])


@all_forms
@pytest.mark.parametrize(("n_queries", "n_memory"), SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_gradient_comes_from_a_later_or_hidden_key(backend, n_queries, n_memory, form):
    q, k, v, r, u, w = draw(n_queries, n_memory, grad=True)
    first = torch.arange(n_queries).expand(2, -1)
    out = BACKENDS[backend].attend(q, k, v, FORMS[form](r, u, w), first=first)
    for i in range(n_queries):
        grad_k, grad_v = torch.autograd.grad(out[:, :, i].sum(), (k, v), retain_graph=True)
        for grad in (grad_k, grad_v):
            assert torch.count_nonzero(grad[:, :, n_memory + i + 1 :]) == 0
            assert torch.count_nonzero(grad[:, :, :i]) == 0
        assert torch.count_nonzero(grad_v[:, :, n_memory + i]) > 0


@pytest.mark.parametrize(("n_queries", "n_memory"), SIZES)
@pytest.mark.parametrize("has_first", [False, True])
@all_forms
def test_gradients_of_the_eager_form(form, n_queries, n_memory, has_first):
    inputs = draw(n_queries, n_memory, n_head=2, d_head=2, grad=True)
    first = (torch.arange(n_queries) // 2).expand(2, -1) if has_first else None

    def attend(q, k, v, r, u, w):
        return relative_attention(q, k, v, FORMS[form](r, u, w), first=first)

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


@all_forms
def test_half_precision_has_a_float32_softmax(form):
    q, k, v, r, u, w = draw(3, 2, dtype=torch.bfloat16)
    out = relative_attention(q, k, v, FORMS[form](r, u, w))
    assert out.dtype == torch.bfloat16
    assert torch.isfinite(out).all()


def test_choice_of_backend():
    assert choose_backend("auto").name in BACKENDS
    assert choose_backend("eager").attend is relative_attention
    with pytest.raises(
        UserError, match=r"^--attention: unknown backend; got `flash`; choose from auto, eager$"
    ):
        choose_backend("flash")


def test_a_backend_without_rows_for_values_gives_way(monkeypatch):
    monkeypatch.setitem(
        attention_module.BACKENDS, "plain", Backend(lambda *_, **__: None, takes_values=False)
    )
    assert choose_backend("plain").name == "plain"
    choice = choose_backend("plain", has_values=True)
    assert choice.name == "eager"
    assert choice.attend is relative_attention
    assert choice.reason == "plain takes no rows of distances for the values (--shaw-values)"
