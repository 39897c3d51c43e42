"""The Triton form of the attention operation, in Triton's interpreter; on a GPU where there is one."""

import importlib
import math
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import txlcli.attention
from tests.tolerance import assert_as_accurate
from txlcli.attention import Demands, RelativeBias, fused, relative_attention

FORWARDS = ["workspace", "gather"]
# T, M, E: no memory, one query, more and fewer queries than memory, blocks (of 16) met and missed, padded E.
SIZES = [(18, 0, 16), (1, 20, 16), (16, 16, 16), (33, 6, 16), (5, 19, 24), (17, 15, 41), (7, 8, 64)]

# What the interpreter complains about: kernels compute scores of keys that are not seen, out of NaN, and drop
# them; and Triton 3.6 reads bounds of loops in a way that NumPy deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def _interpreted() -> Iterator[None]:
    """Have the kernels run on a CPU, and leave no trace of that for other tests of this process.

    Whether a kernel is interpreted is decided when it is defined, and those of Triton's own library when
    Triton is imported; so both are imported anew, then and afterwards. Only the compiled part stays.
    """
    if not fused.has_triton():
        pytest.skip("triton 3.3 or newer is not installed")
    if np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("Triton 3.6 cannot interpret loops with NumPy 2.4 or newer")

    def forget() -> dict[str, object]:
        kernels = "txlcli.attention.kernels"
        names = [n for n in sys.modules if n.split(".")[0] == "triton" and not n.startswith("triton._C")]
        vars(txlcli.attention).pop("kernels", None)
        return {name: sys.modules.pop(name) for name in (*names, kernels) if name in sys.modules}

    before = forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        importlib.import_module("txlcli.attention.kernels")
        yield
    forget()
    sys.modules.update(before)  # type: ignore[arg-type]


interpreted = pytest.mark.usefixtures("_interpreted")


def surrounded(shape, dtype, device="cpu"):
    """Return random [B, H, rows, E] as a model gives it, a view of [B, rows, H, E], in the midst of NaN."""
    n_streams, n_head, n_rows, d_head = shape
    memory = torch.full((n_streams, n_rows + 4, n_head + 2, d_head + 8), math.nan, dtype=dtype, device=device)
    view = memory[:, 2:-2, 1:-1, :d_head].transpose(1, 2)
    view.copy_(torch.randn(shape) / 2)
    return view


def draw(n_queries, n_memory, d_head, *, n_streams=1, n_head=2, spare=2, dtype=torch.float32, device="cpu"):
    """Return q, k, v, r, u, w; the `spare` distances in front of r are NaN, since no key is as far."""
    n_keys = n_queries + n_memory
    q, k, v = (surrounded((n_streams, n_head, n, d_head), dtype, device) for n in (n_queries, n_keys, n_keys))
    (r,) = surrounded((1, n_head, n_keys + spare, d_head), dtype, device)
    r[:, :spare] = math.nan
    u, w = torch.randn(2, n_head, d_head, dtype=dtype, device=device) / 2
    return q, k, v, r, u, w


def differentiate(attend, inputs, d_out, form=RelativeBias, **options):
    """Return the result and the gradients of the inputs that take part, all in their own types."""
    q, k, v, *rest = (x.detach().requires_grad_() for x in inputs)
    bias = form(*rest)
    out = attend(q, k, v, bias, **options)
    given = [x for x in (q, k, v, *(bias or ())) if x is not None]
    return [out.detach(), *torch.autograd.grad(out, given, d_out.to(out.dtype))]


def together(tensors, exact):
    """Return the tensors as one, each divided by the power of two, an exact division, next to its maximum."""
    scales = [2.0 ** e.abs().max().log2().floor().item() for e in exact]
    return torch.cat([(x / scale).flatten() for x, scale in zip(tensors, scales, strict=True)])


def assert_as_accurate_as_eager(inputs, form=RelativeBias, first=None, **options):
    """Compare the result and all gradients by the ratio rule; return those of the kernels.

    Gradients are compared together: how far off the worst of the 16 numbers of one is, is luck.
    """
    d_out = torch.randn(inputs[0].shape).to(inputs[0])
    exact, *d_exact = differentiate(
        relative_attention, [x.double() for x in inputs], d_out.double(), form, first=first
    )
    plain, *d_plain = differentiate(relative_attention, inputs, d_out, form, first=first)
    fast, *d_fast = differentiate(fused.attend, inputs, d_out, form, first=first, **options)
    assert [x.dtype for x in (fast, *d_fast)] == [x.dtype for x in (plain, *d_plain)]
    assert [x.shape for x in (fast, *d_fast)] == [x.shape for x in (plain, *d_plain)]
    assert_as_accurate(fast, plain, exact)
    assert_as_accurate(*(together(x, d_exact) for x in (d_fast, d_plain, d_exact)), factor=3)
    return fast, *d_fast


def by(forward):
    return fused.INTERPRETED._replace(forward=forward)


@interpreted
@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float32, size) for size in SIZES] + [(torch.float16, size) for size in SIZES[4:]],
)
def test_as_accurate_as_eager(size, forward, dtype):
    assert_as_accurate_as_eager(draw(*size, dtype=dtype), how=by(forward))


@interpreted
@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("size", [(1, 5, 16), (19, 13, 16), (20, 3, 24)])
def test_first_hides_what_lies_before_it(size, forward):
    own = torch.arange(size[0]) + size[1]
    first = torch.stack([own - 3, own - 7]).clamp(min=0)  # mostly four and eight keys, across edges of blocks
    assert_as_accurate_as_eager(draw(*size, n_streams=2, n_head=1), first=first, how=by(forward))


@interpreted
@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize(("n_queries", "n_memory"), [(1, 0), (5, 0), (5, 18)])
def test_a_query_that_sees_itself_alone(n_queries, n_memory, forward):
    inputs, d_out = draw(n_queries, n_memory, 16), torch.randn(1, 2, n_queries, 16)
    first = (torch.arange(n_queries) + n_memory)[None]
    out, d_q, d_k, d_v, *d_bias = differentiate(fused.attend, inputs, d_out, first=first, how=by(forward))
    assert torch.equal(out, inputs[2][:, :, n_memory:])
    assert torch.count_nonzero(d_v[:, :, :n_memory]) == 0
    # Backward computes the score anew, in another order than where forward gathers; one place of a score of 4
    # is 5e-7 of its exp.
    torch.testing.assert_close(d_v[:, :, n_memory:], d_out, rtol=5e-6, atol=0)
    for d in (d_q, d_k, *d_bias):
        # In truth 0, as the difference of two sums of E products; these differ by a few last places, and that
        # is multiplied and summed once more.
        assert d.abs().max() < 1e-5


# 1 head of 2, 1 stream of 2, 9 queries of 18 (rows are 24 numbers); at least one query is taken.
SPLITS = {"heads": 2 * 18 * 24 * 4, "streams": 18 * 24 * 4, "queries": 9 * 24 * 4, "single queries": 1}


@interpreted
@pytest.mark.parametrize("split", SPLITS)
def test_parts_give_what_the_whole_gives(split):
    size = (18, 5, 16) if split != "single queries" else (3, 16, 16)
    first = torch.arange(size[0]).div(2, rounding_mode="floor").expand(2, -1)
    inputs = draw(*size, n_streams=2)
    assert_as_accurate_as_eager(inputs, first=first, how=by("workspace"), workspace_bytes=SPLITS[split])


@given(*(st.integers(1, n) for n in (5, 5, 40)), st.integers(0, 9), st.integers(1, 30000), st.booleans())
@settings(max_examples=100)
def test_parts_cover_all_and_fit(n_streams, n_head, n_queries, n_memory, workspace_bytes, is_half):
    n_keys = n_queries + n_memory
    like = torch.zeros((), dtype=torch.float16 if is_half else torch.float32)
    x = fused._Operands(
        *(like.expand(n_streams, n_head, n, 8) for n in (n_queries, n_queries, n_keys, n_keys)),
        r=like.expand(n_head, n_keys, 8),
        first=None,
    )
    times_computed = torch.zeros(n_streams, n_head, n_queries, dtype=torch.int64)
    for part in fused._parts(x, workspace_bytes):
        part.at_queries(times_computed).add_(1)
        some = part.of(x)
        n_rows = some.qu[..., 0].numel()
        assert n_rows * some.width * like.element_size() <= workspace_bytes or n_rows == 1
        assert some.sizes[2] == n_memory + part.queries.stop
    assert (times_computed == 1).all()


FORMS = {
    "no u, no w": lambda r, u, w: RelativeBias(r),
    "no u": lambda r, u, w: RelativeBias(r, w=w),
    "no w": lambda r, u, w: RelativeBias(r, u),
    "no distances": lambda r, u, w: None,
}


@interpreted
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("forward", FORWARDS)
def test_forms_without_some_of_the_bias(forward, form):
    first = torch.tensor([[0, 1, 4, 4, 0]])
    assert_as_accurate_as_eager(draw(5, 14, 16), FORMS[form], first, how=by(forward))


@interpreted
@pytest.mark.parametrize("forward", FORWARDS)
def test_no_gradient_comes_from_a_later_or_hidden_key(forward):
    inputs = [x.requires_grad_() for x in draw(4, 14, 16, spare=0)]
    q, k, v, *bias = inputs
    out = fused.attend(q, k, v, RelativeBias(*bias), first=torch.arange(4)[None], how=by(forward))
    for i in (0, 2, 3):
        d_k, d_v, d_r = torch.autograd.grad(out[:, :, i].sum(), (k, v, bias[0]), retain_graph=True)
        seen = slice(i, 14 + i + 1)
        for d in (d_k, d_v):
            assert torch.count_nonzero(d) == torch.count_nonzero(d[:, :, seen]) > 0
        assert torch.count_nonzero(d_r) == torch.count_nonzero(d_r[:, -15:]) > 0


@interpreted
@pytest.mark.parametrize("forward", FORWARDS)
def test_repetition_gives_the_same_bits(forward):
    inputs, d_out = draw(18, 5, 16), torch.randn(1, 2, 18, 16)
    options = {"how": by(forward), "workspace_bytes": SPLITS["queries"]}
    once = differentiate(fused.attend, inputs, d_out, **options)
    again = differentiate(fused.attend, inputs, d_out, **options)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    with torch.no_grad():  # another kernel, which keeps nothing for backward
        q, k, v, *bias = inputs
        out = fused.attend(q, k, v, RelativeBias(*bias), **options)
    assert not out.requires_grad
    assert torch.equal(out, once[0])


@interpreted
@pytest.mark.parametrize("forward", FORWARDS)
def test_autocast_multiplies_in_half_and_returns_gradients_in_their_own_types(forward):
    q, k, v, *bias = draw(5, 14, 16)
    inputs = [x.half() for x in (q, k, v)] + bias
    with torch.autocast("cpu", torch.float16):
        fast = assert_as_accurate_as_eager(inputs, how=by(forward))
    assert [x.dtype for x in fast] == [torch.float16] * 4 + [torch.float32] * 3


@interpreted
def test_numbers_of_a_row_may_lie_apart():
    inputs = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in draw(5, 3, 16, spare=0)]
    inputs = [x.detach().requires_grad_() for x in inputs]
    assert inputs[0].stride(-1) != 1
    q, k, v, *bias = inputs
    fast = torch.autograd.grad(fused.attend(q, k, v, RelativeBias(*bias)).sum(), inputs)
    plain = torch.autograd.grad(relative_attention(q, k, v, RelativeBias(*bias)).sum(), inputs)
    for f, p in zip(fast, plain, strict=True):
        torch.testing.assert_close(f, p)  # torch's own tolerance for float32: what is compared is the layout


@pytest.mark.parametrize(("n_streams", "n_queries"), [(0, 3), (2, 0)])
def test_nothing_to_attend_from(n_streams, n_queries):
    inputs = draw(n_queries, 4, 16, n_streams=n_streams, spare=0)
    out, *gradients = differentiate(fused.attend, inputs, torch.empty(n_streams, 2, n_queries, 16))
    assert out.shape == (n_streams, 2, n_queries, 16)
    for gradient, x in zip(gradients, inputs, strict=True):
        assert gradient.shape == x.shape
        assert torch.count_nonzero(gradient) == 0


@interpreted
def test_a_second_derivative_is_refused():
    q, k, v, *bias = (x.requires_grad_() for x in draw(2, 1, 16, spare=0))
    out = fused.attend(q, k, v, RelativeBias(*bias))
    (d_q,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        d_q.sum().backward()


@pytest.mark.parametrize(
    ("demands", "reason"),
    [
        (Demands(), "triton needs a CUDA device"),
        (Demands(torch.device("cuda")), None),
        (Demands(torch.device("cuda"), 128), None),
        (Demands(torch.device("cuda"), 129), "triton has no heads wider than 128 (--d-head)"),
        (Demands(torch.device("cuda"), dropout=0.1), "triton has no attention dropout (--dropatt)"),
        (
            Demands(torch.device("cuda"), has_values=True),
            "triton takes no rows of distances for the values (--shaw-values)",
        ),
    ],
)
def test_what_it_refuses(demands, reason, monkeypatch):
    monkeypatch.setattr(fused, "has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert fused.refuses(demands) == reason


def test_it_refuses_old_devices_and_a_machine_without_triton(monkeypatch):
    monkeypatch.setattr(fused, "has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    demands = Demands(torch.device("cuda"))
    assert fused.refuses(demands) == "triton needs a GPU of compute capability 8.0 or newer"
    monkeypatch.setattr(fused, "has_triton", lambda: False)
    assert fused.refuses(demands) == "triton 3.3 or newer is not installed"


@pytest.mark.parametrize(
    ("version", "is_enough"),
    [(None, True), ("3.2.0", False), ("3.3.0+git12", True), ("3.10.1", True), ("2.9", False), ("4.0", True)],
)
def test_a_triton_that_cannot_gather_is_none(version, is_enough, monkeypatch):
    def tell(name):
        if version is None:
            raise PackageNotFoundError(name)
        return version

    monkeypatch.setattr(fused, "version", tell)
    monkeypatch.setattr(fused, "find_spec", lambda name: name)
    assert fused.has_triton.__wrapped__() == is_enough
    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    assert not fused.has_triton.__wrapped__()


def test_the_host_code_does_not_load_triton():
    code = "import sys, txlcli.attention.fused\nassert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("d_head", [16, 24, 32, 41, 64, 128])
def test_on_a_gpu(d_head, forward, dtype):
    if fused.refuses(Demands(torch.device("cuda"), d_head)) is not None:
        pytest.skip("the kernels do not run here")
    how = fused.launches(torch.cuda.get_device_capability(), d_head, dtype)
    if forward == "gather" and how.gather is None:
        pytest.skip("not offered")
    how = how._replace(forward=forward)
    for n_queries, n_memory in [(2, 0), (1, 300), (200, 150), (129, 260), (256, 256)]:
        inputs = draw(n_queries, n_memory, d_head, n_streams=2, dtype=dtype, device="cuda")
        own = torch.arange(n_queries, device="cuda") + n_memory
        first = torch.stack([torch.zeros_like(own), (own - 100).clamp(min=0)])
        for options in ({}, {"first": first}, {"workspace_bytes": 2**16}):
            assert_as_accurate_as_eager(inputs, how=how, **options)
