"""Whether forms of attention agree: each against the eager form in float64, from the same rounded inputs.

A form agrees if its error is at most twice that of the eager form in the same type (three times for
gradients), plus one unit in the last place of the largest number: what differs is then the order of sums and
not what is summed. Gradients of what all queries share are sums over n of them, which float32 rounds by about
sqrt(n) units whatever the order: in a small model, where eager may be lucky in a dozen numbers, they are
allowed that too. Inputs are drawn so that every term matters, in the types that the model gives to its
attention, for a whole segment and for a single token, each after a full memory. Where documents matter, one
ends in each stream.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from txlcli.attention import RelativeBias, relative_attention
from txlcli.attention.choice import AttentionBackend
from txlcli.device import DTYPES, autocast
from txlcli.model import Lengths, TransformerXL

FORWARD_FACTOR, GRADIENT_FACTOR = 2, 3

N_STREAM = 16
"""Streams of all draws together, about: so many numbers that their largest errors do not hang on luck."""

# Scores of all draws together; where a single stream has more, it is drawn alone.
_MAX_SCORES = 1 << 23


class Inputs(NamedTuple):
    """What the attention of a layer is called with, and the gradient of what it returns."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: RelativeBias | None
    first: Tensor | None
    out_gradient: Tensor

    def leaves(self) -> dict[str, Tensor]:
        """Return the inputs that take a gradient, by name."""
        bias = {} if self.bias is None else {n: t for n, t in self.bias._asdict().items() if t is not None}
        return {"q": self.q, "k": self.k, "v": self.v, **bias}


@dataclass(frozen=True)
class Errors:
    """Largest errors of a form, relative to the largest number of the exact result.

    Attributes:
        forward: Of what it returns.
        forward_allowed: What the rule allows.
        gradient: Of the gradient that is nearest to its bound, or farthest beyond it.
        gradient_allowed: What the rule allows there.
        gradient_of: The input that it belongs to.
    """

    forward: float
    forward_allowed: float
    gradient: float
    gradient_allowed: float
    gradient_of: str

    @property
    def forward_share(self) -> float:
        """The error in units of what is allowed."""
        return _excess(self.forward, self.forward_allowed)

    @property
    def gradient_share(self) -> float:
        """The error of the gradient in units of what is allowed."""
        return _excess(self.gradient, self.gradient_allowed)

    @property
    def agree(self) -> bool:
        """Whether all errors are within the rule; what is not a number is not."""
        return self.forward_share <= 1 and self.gradient_share <= 1


def draw_inputs(
    model: TransformerXL, lengths: Lengths, n_stream: int, precision: str, generator: torch.Generator
) -> Inputs:
    """Draw what the attention of a layer is called with in this precision, in the model's shapes and types.

    Args:
        model: A model, for the shapes and types of what distances add.
        lengths: Lengths; memory is full.
        n_stream: Streams.
        precision: Of the matrix products.
        generator: Where numbers come from, on the CPU, so that every device is given the same.
    """
    device, n_query, n_keys = model.device, lengths.tgt_len, lengths.tgt_len + lengths.mem_len
    dtype = DTYPES[precision]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def rows(length: int) -> Tensor:
        # Heads lie beside one another, as the projections leave them.
        drawn = draw(n_stream, length, model.n_head, model.d_head)
        return drawn.to(device, dtype).transpose(1, 2)

    with torch.no_grad(), autocast(device, precision):
        bias = model.new_cache(1, lengths).biases[0]
    if bias is not None:
        # Strides stay as they are.
        bias = _each(bias, lambda t: torch.empty_like(t).copy_(draw(*t.shape)))
    tokens, n_document = _draw_documents(model, lengths, n_stream, generator)
    first, _ = model.first_keys(tokens, lengths.mem_len, n_document, lengths)
    return Inputs(rows(n_query), rows(n_keys), rows(n_keys), bias, first, rows(n_query))


def _draw_documents(
    model: TransformerXL, lengths: Lengths, n_stream: int, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """Draw for each stream where a document ends, anywhere in memory and segment.

    Returns:
        Tokens of the segment, and how many rows of memory come after an end in it; zeros and None where
        documents do not matter.
    """
    mem_len, n_keys = lengths.mem_len, lengths.mem_len + lengths.tgt_len
    if model.document_end is None:
        return torch.zeros(n_stream, lengths.tgt_len, dtype=torch.int64, device=model.device), None
    end = torch.randint(n_keys, (n_stream, 1), generator=generator)
    tokens = torch.where(torch.arange(mem_len, n_keys) == end, model.document_end, model.document_end + 1)
    n_document = torch.where(end < mem_len, mem_len - 1 - end, mem_len)[:, 0]
    return tokens.to(model.device), n_document.to(model.device)


def agreement_cases(lengths: Lengths) -> tuple[Lengths, ...]:
    """Return the shapes that forms are compared at: a whole segment, and the last token of one."""
    single = lengths._replace(tgt_len=1, mem_len=lengths.mem_len + lengths.tgt_len - 1)
    if lengths.span is not None:
        # The rule is kept; mem_len decides how many keys it shows.
        single = single._replace(mem_len=lengths.mem_len)
    return tuple(dict.fromkeys((lengths, single)))


class Reference:
    """What forms are held against at one shape and precision: the eager form, and float64."""

    def __init__(
        self,
        model: TransformerXL,
        lengths: Lengths,
        n_stream: int,
        precision: str,
        generator: torch.Generator,
    ) -> None:
        # As many streams as will be attended from, since what a form does may depend on their number.
        n_most = max(1, _MAX_SCORES // (model.n_head * lengths.tgt_len * (lengths.tgt_len + lengths.mem_len)))
        n_stream = min(n_stream, n_most)
        n_draw = max(1, min(N_STREAM, n_most) // n_stream)
        self.draws = [draw_inputs(model, lengths, n_stream, precision, generator) for _ in range(n_draw)]
        self.precision = precision
        self._plain = [_outputs(relative_attention, inputs, precision) for inputs in self.draws]
        # On the CPU, since not every device has float64.
        self._exact = [_outputs(relative_attention, _widened(inputs), "fp32") for inputs in self.draws]

    def errors(self, attend: AttentionBackend) -> Errors:
        """Return how far a form is from float64, the largest over all draws."""
        found = [_outputs(attend, inputs, self.precision) for inputs in self.draws]
        bounds = {name: self._error(name, found) for name in found[0]}
        forward, forward_allowed = bounds.pop("out")
        worst = max(bounds, key=lambda name: _excess(*bounds[name]))
        return Errors(forward, forward_allowed, *bounds[worst], worst)

    def _error(self, name: str, found: Sequence[Mapping[str, Tensor]]) -> tuple[float, float]:
        """Return the error of one tensor and what is allowed, relative to its largest exact number."""
        exact, plain, fast = ([draw[name] for draw in draws] for draws in (self._exact, self._plain, found))
        if any(a.shape != b.shape for a, b in zip(fast, exact, strict=True)):
            return math.inf, 0.0
        largest = max(float(t.abs().max()) for t in exact)
        factor = FORWARD_FACTOR if name == "out" else GRADIENT_FACTOR
        allowed = factor * _distance(plain, exact) + torch.finfo(plain[0].dtype).eps * largest
        if name not in ("out", "q", "k", "v"):
            n_streams, _, n_queries, _ = self.draws[0].q.shape
            allowed += math.sqrt(n_streams * n_queries) * torch.finfo(torch.float32).eps * largest
        scale = largest or 1.0
        return _distance(fast, exact) / scale, allowed / scale


def _distance(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest difference; not a number if any is none."""
    by_draw = [(_wide(a) - b).abs().max() for a, b in zip(found, exact, strict=True)]
    return float(torch.stack(by_draw).max())


def _widened(inputs: Inputs) -> Inputs:
    q, k, v, bias, first, out_gradient = inputs
    return Inputs(
        q=_wide(q),
        k=_wide(k),
        v=_wide(v),
        bias=None if bias is None else _each(bias, _wide),
        first=None if first is None else first.cpu(),
        out_gradient=_wide(out_gradient),
    )


def _outputs(attend: AttentionBackend, inputs: Inputs, precision: str) -> dict[str, Tensor]:
    """Return what a form returns, as `out`, and the gradients of its inputs by name."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.leaves().items()}
    names = [name for name in leaves if name not in ("q", "k", "v")]
    bias = None if inputs.bias is None else inputs.bias._replace(**{name: leaves[name] for name in names})
    with torch.enable_grad(), autocast(inputs.q.device, precision):
        out = attend(leaves["q"], leaves["k"], leaves["v"], bias, first=inputs.first)
    gradients: tuple[Tensor | None, ...] = (None,) * len(leaves)
    if out.requires_grad and out.shape == inputs.out_gradient.shape:
        gradients = torch.autograd.grad(
            out, list(leaves.values()), inputs.out_gradient.to(out.dtype), allow_unused=True
        )
    # No gradient is a gradient of zeros.
    pairs = zip(leaves.items(), gradients, strict=True)
    by_name = {n: torch.zeros_like(leaf) if gradient is None else gradient for (n, leaf), gradient in pairs}
    return {"out": out.detach(), **by_name}


def worse(a: Errors | None, b: Errors) -> Errors:
    """Return of two shapes' errors the forward and the gradient that are nearer to their bounds or beyond."""
    if a is None:
        return b
    forward = max(a, b, key=lambda errors: errors.forward_share)
    gradient = max(a, b, key=lambda errors: errors.gradient_share)
    return Errors(
        forward.forward,
        forward.forward_allowed,
        gradient.gradient,
        gradient.gradient_allowed,
        gradient.gradient_of,
    )


def _wide(tensor: Tensor) -> Tensor:
    return tensor.cpu().double()


def _each(bias: RelativeBias, change: Callable[[Tensor], Tensor]) -> RelativeBias:
    """Return what distances add with every tensor changed."""
    u, w, values = (None if t is None else change(t) for t in (bias.u, bias.w, bias.values))
    return RelativeBias(change(bias.r), u, w, values)


def _excess(error: float, allowed: float) -> float:
    """Return an error in units of what is allowed; what is not a number is beyond all."""
    if math.isnan(error):
        return math.inf
    return error / allowed if allowed else math.inf if error else 0.0
