"""The forward pass of training through torch.compile, for the one shape that most steps have.

A graph is compiled for each shape that is met, which takes seconds to minutes, and a run meets many: the
memory grows over the first segments of an epoch, and its last segment is shorter. So only the shape of a full
segment and the longest memory is compiled, and all other steps run as they are.

Tracing stops where it must: at forms of attention that are written by hand, and where a vocabulary is in
clusters, since how many tokens fall into each differs in every step.
"""

import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import NamedTuple

import torch
from torch import Tensor

from txlcli.adaptive import AdaptiveEmbedding
from txlcli.attention import relative_attention
from txlcli.data import Batches, longest_stream
from txlcli.model import Memory, TransformerXL

Forward = Callable[[Tensor, Memory | None, Tensor], tuple[Tensor, Memory]]
"""From tokens, memory and targets to each target's nats and the new memory, as `TransformerXL.forward`."""

LONGEST_REASON = 160


class Shape(NamedTuple):
    """What a graph is compiled for, apart from the number of streams.

    Attributes:
        n_tokens: Tokens of the segment (T).
        n_memory: Rows of memory (M); None: there is none, as in the first segment of an epoch.
    """

    n_tokens: int
    n_memory: int | None

    @classmethod
    def of(cls, tokens: Tensor, memory: Memory | None) -> "Shape":
        """Return the shape of a step."""
        return cls(tokens.shape[1], None if memory is None else memory.hidden[0].shape[1])

    @classmethod
    def usual(cls, batches: Batches, mem_len: int) -> "Shape":
        """Return the shape of the segment before an epoch's last: full, the memory as long as it gets."""
        index = max(batches.steps_per_epoch - 2, 0)
        n_tokens = min(batches.tgt_len, longest_stream(batches.store.n_tokens, batches.n_stream))
        return cls(n_tokens, min(mem_len, index * batches.tgt_len) if index else None)


def compile_forward(model: TransformerXL, shape: Shape) -> Forward:
    """Return the model's forward, compiled for one shape at its first call.

    That call may fail, and so may any other. The model's parameters stay its own and keep their names.
    """
    for layer in model.each_layer():
        if layer.attention.attend is not relative_attention:
            layer.attention.attend = _untraced(layer.attention.attend)
    if model.embed.weights is not None:
        untraced = MethodType(_untraced(AdaptiveEmbedding.forward), model.embed)
        model.embed.forward = untraced  # type: ignore[method-assign]
    is_whole = model.head.clusters.n_tail == 0
    with_loss, layers = torch.compile(_with_loss, dynamic=False), torch.compile(_layers, dynamic=False)

    def forward(tokens: Tensor, memory: Memory | None, targets: Tensor) -> tuple[Tensor, Memory]:
        if Shape.of(tokens, memory) != shape:
            return model(tokens, memory, targets)  # type: ignore[no-any-return]
        if memory is not None:
            memory = _packed(memory)
        if is_whole:
            return with_loss(model, tokens, memory, targets)
        hidden, memory = layers(model, tokens, memory)
        return model.nll(hidden, targets), memory

    return forward


@functools.cache
def _untraced(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that a graph stops at; the same one each time, since graphs are compiled for it."""
    if getattr(function, "_torchdynamo_disable", False):
        return function
    stopping: Callable[..., Tensor] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return stopping


def _with_loss(
    model: TransformerXL, tokens: Tensor, memory: Memory | None, targets: Tensor
) -> tuple[Tensor, Memory]:
    nll, memory = model(tokens, memory, targets)
    return nll, _packed(memory)


def _layers(model: TransformerXL, tokens: Tensor, memory: Memory | None) -> tuple[Tensor, Memory]:
    hidden, memory = model.hidden_states(tokens, memory)
    return hidden, _packed(memory)


def _packed(memory: Memory) -> Memory:
    """Return a memory whose rows lie one after the other: a graph is compiled for strides, too."""
    return memory._replace(hidden=tuple(rows.flatten().view(rows.shape) for rows in memory.hidden))


@contextmanager
def quietly() -> Iterator[None]:
    """Keep back what torch warns of and logs; where it fails there is an exception."""
    disabled = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(disabled)


def reason(error: Exception) -> str:
    """Return one line that says why compiling failed, out of the many that torch writes."""
    cause = getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    name = type(cause).__name__
    text = lines[0] if lines else ""
    if not text.startswith(name):
        text = f"{name}: {text}" if text else name
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 1] + "…"
