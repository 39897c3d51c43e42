import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import reference
from tests.tolerance import assert_as_accurate, assert_same
from txlcli import UserError
from txlcli.attention import (
    BACKENDS,
    Backend,
    Demands,
    RelativeBias,
    align,
    blocks,
    choice,
    choose_backend,
    fall_back,
    project,
    relative_attention,
    skew,
    unalign,
)


@pytest.fixture(autouse=True)
def _skew_works_itself(monkeypatch):
    """Let skew hand nothing over: sizes here are so small that else the eager form would be tested."""
    monkeypatch.setattr(skew, "EAGER_BYTES", 0)


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


# Each form of the operation with what it takes. Triton's kernels do not run on a CPU: see test_fused.py.
PAIRS = [
    (backend, form)
    for backend in BACKENDS
    for form in FORMS
    if backend != "triton" and BACKENDS[backend].refuses(Demands(has_values=form == "shaw")) is None
]
all_pairs = pytest.mark.parametrize(("backend", "form"), PAIRS)
fast_pairs = pytest.mark.parametrize(("backend", "form"), [pair for pair in PAIRS if pair[0] != "eager"])


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


@all_pairs
@pytest.mark.parametrize(("n_queries", "n_memory"), SIZES)
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


@pytest.fixture(params=[2, 128], ids=["blocks of 2", "one block"])
def _blocks(request, monkeypatch):
    monkeypatch.setattr(blocks, "N_QUERIES", request.param)


def as_in_the_model(x):
    """Return the same numbers, laid out as heads that were split from projected rows."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def results(attend, form, inputs, first, out_gradient):
    """Return the result and the gradients of all inputs that the form uses."""
    q, k, v, r, u, w = inputs
    out = attend(q, k, v, FORMS[form](r, u, w), first=first)
    grads = torch.autograd.grad(out, inputs, out_gradient.to(out.dtype), allow_unused=True)
    return [out.detach(), *(grad for grad in grads if grad is not None)]


@pytest.mark.usefixtures("_blocks")
@fast_pairs
@pytest.mark.parametrize(("n_queries", "n_memory"), [*SIZES, (16, 5), (17, 40)])
@pytest.mark.parametrize("has_first", [False, True])
def test_fast_forms_are_the_eager_one(backend, form, n_queries, n_memory, has_first):
    drawn = draw(n_queries, n_memory, spare=2)
    inputs = [as_in_the_model(x).requires_grad_() if x.ndim == 4 else x.requires_grad_() for x in drawn]
    first = torch.stack([torch.arange(n_queries) // 2, torch.arange(n_queries)]) if has_first else None
    gradient = torch.randn_like(inputs[0])
    expected = results(relative_attention, form, inputs, first, gradient)
    actual = results(BACKENDS[backend].attend, form, inputs, first, gradient)
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert_same(a, b)
    with torch.no_grad():
        q, k, v, r, u, w = inputs
        assert_same(BACKENDS[backend].attend(q, k, v, FORMS[form](r, u, w), first=first), expected[0])


@pytest.mark.usefixtures("_blocks")
@fast_pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n_queries", "n_memory"), [*SIZES, (33, 20)])
def test_fast_forms_are_as_accurate_as_the_eager_one(backend, form, dtype, n_queries, n_memory):
    inputs = draw(n_queries, n_memory, d_head=8, dtype=dtype, grad=True)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    gradient = torch.randn_like(inputs[0])
    exact = results(relative_attention, form, exact_inputs, None, gradient)
    plain = results(relative_attention, form, inputs, None, gradient)
    fast = results(BACKENDS[backend].attend, form, inputs, None, gradient)
    for n, (f, p, e) in enumerate(zip(fast, plain, exact, strict=True)):
        assert f.dtype == p.dtype
        assert_as_accurate(f, p, e, factor=3 if n else 2)


@fast_pairs
def test_fast_forms_compute_in_the_type_of_autocast(backend, form):
    q, k, v, r, u, w = draw(5, 3, dtype=torch.float32, grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = BACKENDS[backend].attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), FORMS[form](r, u, w))
    assert out.dtype == torch.bfloat16
    grads = torch.autograd.grad(out.float().sum(), (q, k, v), allow_unused=True)
    assert [grad.dtype for grad in grads] == [torch.float32] * 3


@fast_pairs
def test_fast_forms_neither_write_their_inputs_nor_read_what_is_unset(backend, form):
    inputs = draw(5, 3, grad=True)
    before = [x.detach().clone() for x in inputs]
    gradient = torch.randn_like(inputs[0])
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        out = results(BACKENDS[backend].attend, form, inputs, None, gradient)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.isfinite(x).all() for x in out)
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))


@all_forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_skew_hands_small_work_to_the_eager_form(monkeypatch, form, dtype):
    n_bytes = 2 * 33 * 53 * dtype.itemsize  # scores of a head: 2 streams, 33 queries, 53 keys
    inputs = draw(33, 20, d_head=8, dtype=dtype, grad=True)
    gradient = torch.randn_like(inputs[0])
    eager = results(relative_attention, form, inputs, None, gradient)
    for limit, is_eager in ((n_bytes + 1, True), (n_bytes, False)):
        monkeypatch.setattr(skew, "EAGER_BYTES", limit)
        found = results(skew.skewed_attention, form, inputs, None, gradient)
        assert all(torch.equal(a, b) for a, b in zip(found, eager, strict=True)) == is_eager
    with torch.no_grad():
        q, k, v, r, u, w = inputs
        monkeypatch.setattr(skew, "EAGER_BYTES", n_bytes + 1)
        found = skew.skewed_attention(q, k, v, FORMS[form](r, u, w))
        # The kernel behind sdpa is faster at any size, but takes no rows for the values.
        assert torch.equal(found, eager[0]) or form != "shaw"


def test_the_type_of_autocast_decides_what_is_small_work(monkeypatch):
    q, k, v, r, u, w = draw(5, 3, dtype=torch.float32, grad=True)
    monkeypatch.setattr(skew, "EAGER_BYTES", 2 * 5 * 8 * torch.float32.itemsize)
    used = []
    monkeypatch.setattr(skew, "relative_attention", lambda q, *_, **__: used.append("eager") or q)
    monkeypatch.setattr(skew._Skewed, "apply", lambda q, *_: used.append("skew") or q)
    for is_half in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_half):
            skew.skewed_attention(q, k, v, RelativeBias(r, u, w))
    assert used == ["skew", "eager"]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 700), st.integers(0, 50))
def test_blocks_hold_every_query_once_and_its_keys(n_queries, n_memory):
    cut = blocks.divide(n_queries, n_memory + n_queries)
    assert [query for block in cut[::-1] for query in range(block.begin, block.end)] == [*range(n_queries)]
    assert all(block.n_keys == n_memory + block.end for block in cut)
    assert all(block.end - block.begin <= blocks.N_QUERIES for block in cut)


def projected(past, rows, weights, gradients, *, is_plain):
    """Return queries, keys and values and the gradients of all that needs one."""
    both = torch.cat([past, rows], dim=1)
    out = project(past, rows, *weights)
    if is_plain:
        out = [x @ w.T for x, w in zip((rows, both, both), weights, strict=True)]
    inputs = [x for x in (past, rows, *weights) if x.requires_grad]
    return [*out, *torch.autograd.grad(out, inputs, gradients)]


@pytest.mark.parametrize("n_memory", [0, 1, 6])
@pytest.mark.parametrize("needs_past", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_projection_is_three_linear_layers(n_memory, needs_past, dtype):
    past = torch.randn(2, n_memory, 16, dtype=dtype).requires_grad_(needs_past)
    rows = torch.randn(2, 9, 16, dtype=dtype).requires_grad_()
    weights = [torch.randn(12, 16, dtype=dtype).requires_grad_() for _ in range(3)]
    gradients = [torch.randn(2, n, 12, dtype=dtype) for n in (9, n_memory + 9, n_memory + 9)]
    fast = projected(past, rows, weights, gradients, is_plain=False)
    plain = projected(past, rows, weights, gradients, is_plain=True)
    past, rows, *weights = (
        x.detach().double().requires_grad_(x.requires_grad) for x in (past, rows, *weights)
    )
    exact = projected(past, rows, weights, [g.double() for g in gradients], is_plain=True)
    for n, (f, p, e) in enumerate(zip(fast, plain, exact, strict=True)):
        assert f.dtype == dtype
        if dtype == torch.float64:
            assert_same(f, e)
        elif e.numel():
            assert_as_accurate(f, p, e, factor=2 if n < 3 else 3)


def test_projection_converts_rows_and_weights_as_autocast_does():
    past, rows = torch.randn(2, 3, 8), torch.randn(2, 4, 8, requires_grad=True)
    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q, k, _ = project(past, rows, *weights)
        assert torch.equal(k, torch.nn.functional.linear(torch.cat([past, rows], 1), weights[1]))
    assert q.dtype == torch.bfloat16
    assert torch.autograd.grad(q.float().sum(), rows)[0].dtype == torch.float32


def test_choice_of_backend():
    assert choose_backend("auto").name in BACKENDS
    assert choose_backend("eager").attend is relative_attention
    with pytest.raises(
        UserError, match=r"^--attention: unknown backend; got `flash`; choose from auto, eager, "
    ):
        choose_backend("flash")


def test_a_backend_without_rows_for_values_gives_way(monkeypatch):
    monkeypatch.setitem(
        BACKENDS, "plain", Backend(lambda *_, **__: None, lambda d: "no values" if d.has_values else None)
    )
    assert choose_backend("plain").name == "plain"
    choice = choose_backend("plain", Demands(has_values=True))
    assert choice.name == choose_backend("auto").name
    assert choice.reason == "no values"


def test_a_fall_back_says_what_is_used_instead_and_why(monkeypatch):
    def refuses(demands):
        return "fast has no attention dropout" if demands.dropout else None

    monkeypatch.setitem(BACKENDS, "fast", Backend(relative_attention, refuses))
    monkeypatch.setitem(choice.BY_DEVICE, "cpu", ("fast",))
    for name in ("auto", "fast"):
        assert fall_back(name, Demands()) is None
        assert fall_back(name, Demands(dropout=0.1)) == "fast has no attention dropout, using eager"
    assert fall_back("eager", Demands(dropout=0.1)) is None


def test_auto_says_why_it_passed_over_a_faster_backend(monkeypatch):
    def refuses(demands):
        return "fast has no attention dropout" if demands.dropout else None

    monkeypatch.setitem(BACKENDS, "fast", Backend(relative_attention, refuses))
    monkeypatch.setitem(choice.BY_DEVICE, "cpu", ("fast",))
    assert choose_backend("auto") == ("fast", relative_attention, "the fastest here")
    assert choose_backend("auto", Demands(dropout=0.1)) == (
        *("eager", relative_attention),
        "fast has no attention dropout",
    )
    assert choose_backend("fast", Demands(dropout=0.1)).name == "eager"
