"""One step of each kind of work, done as the product does it, on random tokens after a full memory."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from txlcli.adaptive import Clusters
from txlcli.attention import BACKENDS
from txlcli.bench.agreement import Inputs, draw_inputs
from txlcli.bench.clock import Candidate
from txlcli.bench.flops import (
    StepSize,
    attention_flops,
    inference_flops,
    training_flops,
    visible_pairs,
)
from txlcli.bench.subject import Subject
from txlcli.data import Batches, TokenStore
from txlcli.device import Precision, autocast
from txlcli.evaluate import choose_streams
from txlcli.evaluate.scoring import MAX_STREAMS
from txlcli.evaluate.streams import MAX_LOGITS, measure
from txlcli.generate import SamplingOptions, distribution, draw, feed, random_stream
from txlcli.model import KVCache, Memory, TransformerXL
from txlcli.train.state import TrainState, optimize

SEED = 0

TEXT_TOKENS = 100_000
"""Length of the text that streams of scoring are chosen for."""

# Segments of each stream; a step reads the second, which is neither the first of an epoch nor its last.
_N_SEGMENTS = 3


@dataclass(frozen=True, kw_only=True)
class Work:
    """A kind of work, ready to be done.

    Attributes:
        what: Its name.
        n_stream: Streams side by side.
        n_query: Tokens of each in a step.
        precision: Of the matrix products.
        candidates: The forms of attention to do it with.
        flops: Of the matrix products of a step.
        longest: At most so many steps in a row; None: any number.
        notice: What is otherwise than asked for; None: nothing.
    """

    what: str
    n_stream: int
    n_query: int
    precision: Precision
    candidates: tuple[Candidate, ...]
    flops: float
    longest: int | None = None
    notice: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.n_stream * self.n_query


class Setting(NamedTuple):
    """What each kind of work needs: model, device, precision, and the forms of attention by name."""

    subject: Subject
    device: torch.device
    precision: Precision
    names: tuple[str, ...]


@contextmanager
def training(setting: Setting, folder: Path) -> Iterator[Work]:
    """Make training steps: forward, backward, clipping and the optimizer, at a rate of 0.

    Args:
        setting: What to train.
        folder: A folder for the text.
    """
    subject, device, precision, names = setting
    config, lengths = subject.config, subject.lengths
    n_stream = config.optim.batch_size
    ids = draw_tokens(subject.n_vocab, n_stream * _N_SEGMENTS * lengths.tgt_len + 1)
    # The state begins with the eager form; a name that stands in the settings may not run here.
    config = replace(config, machine=replace(config.machine, attention="eager"))
    with _store(folder / "text.ids", ids, subject.n_vocab) as store:
        batches = Batches(store, n_stream, lengths.tgt_len)
        state = TrainState.start(
            config, batches, subject.n_vocab, device=device, precision=precision, init=subject.checkpoint
        )
        model = state.model
        model.lengths = lengths
        state.memory = [_full_memory(state, part.stop - part.start) for part in state.parts()]

        def step() -> None:
            state.counters.step = 1
            optimize(state, rate=0.0, clip=config.optim.clip)

        segment = batches.segment(1)
        size = StepSize(
            n_stream,
            lengths.tgt_len,
            lengths.mem_len,
            visible_pairs(lengths.tgt_len, lengths.mem_len, lengths.span),
            _by_cluster(subject.clusters, segment.tokens),
            _heads(subject.clusters, segment.targets),
            n_part=len(state.parts()),
        )
        yield Work(
            what="training",
            n_stream=n_stream,
            n_query=lengths.tgt_len,
            precision=precision,
            candidates=_with_each(model, names, step),
            flops=training_flops(config.model, subject.clusters, size),
        )


def _full_memory(state: TrainState, n_stream: int) -> Memory:
    n_rows = state.model.lengths.mem_len
    shape = (n_stream, n_rows, state.model.d_model)
    hidden = tuple(torch.randn(shape).to(state.device) for _ in state.model.layers)
    return Memory(hidden, torch.full((n_stream,), n_rows, device=state.device))


@contextmanager
def scoring(setting: Setting, asked: int | None) -> Iterator[Work]:
    """Make steps of an evaluation: each stream one segment on, and the nats of its tokens.

    Args:
        setting: What to score with.
        asked: So many streams, or as many of them as fit into memory; None: as many as an evaluation takes.
    """
    subject, device, precision, names = setting
    lengths = subject.lengths
    model = subject.build(device)
    estimate, notice = measure(model, lengths), None
    n_stream = estimate.fit(asked or MAX_STREAMS)
    if asked is None:
        n_segments = -(-TEXT_TOKENS // lengths.tgt_len)
        n_warm = lengths.warm_segments(len(model.layers))
        n_stream = choose_streams(n_segments, n_warm, n_stream, fixed=estimate.fixed)
    elif n_stream < asked:
        notice = f"scoring: {asked:,} streams asked for, {n_stream:,} fit into memory"
    n_tokens = n_stream * (lengths.tgt_len + 1)
    window = draw_tokens(subject.n_vocab, n_tokens).reshape(n_stream, -1)
    cache = _full_cache(model, n_stream, precision)

    @torch.inference_mode()
    def step() -> None:
        nonlocal cache
        tokens = torch.from_numpy(window).to(device)
        with autocast(device, precision):
            hidden, cache = model.extend(tokens[:, :-1], cache)
            model.nll(hidden.flatten(0, 1)[None], tokens[:, 1:].flatten()[None], max_logits=MAX_LOGITS)

    size = StepSize(
        n_stream,
        lengths.tgt_len,
        lengths.mem_len,
        visible_pairs(lengths.tgt_len, lengths.mem_len, lengths.span),
        _by_cluster(subject.clusters, torch.from_numpy(window[:, :-1])),
        _heads(subject.clusters, torch.from_numpy(window[:, 1:])),
    )
    yield Work(
        what="scoring",
        n_stream=n_stream,
        n_query=lengths.tgt_len,
        precision=precision,
        candidates=_with_each(model, names, step),
        flops=inference_flops(subject.config.model, subject.clusters, size),
        notice=notice,
    )


@contextmanager
def generation(setting: Setting) -> Iterator[Work]:
    """Make tokens: one through the model, then one drawn from the distribution as by default.

    A repetition is a whole segment, its first token moving the one before into memory; or, where time is
    short, tokens of its middle, whose keys are as many on average.
    """
    subject, device, precision, names = setting
    lengths, clusters = subject.lengths, subject.clusters
    model = subject.build(device)
    options, random = SamplingOptions(), random_stream(SEED, 0)
    token, cache = 0, list[KVCache]()  # the one at work, if any
    nothing = np.zeros(0, dtype=np.int64)

    def rewind(n_tokens: int) -> None:
        is_whole = n_tokens >= lengths.tgt_len
        start = lengths.tgt_len if is_whole else (lengths.tgt_len - n_tokens) // 2
        # What a cache holds beside keys and values depends on the form of attention that it is made for.
        cache.clear()
        cache.append(_full_cache(model, 1, precision)._replace(n_segment=start))

    def step() -> None:
        nonlocal token
        tokens = torch.tensor([[token]], device=device)
        log_probs, cache[0] = feed(model, tokens, cache[0], precision=precision)
        row = log_probs[0].cpu().double().numpy()
        token = draw(distribution(row, nothing, nothing, options), random.random())

    n_pair = visible_pairs(lengths.tgt_len, lengths.mem_len, lengths.span) / lengths.tgt_len
    # The whole vocabulary's probabilities go through every cluster; a token is drawn as by Zipf's law.
    expected = _by_cluster(clusters, torch.from_numpy(draw_tokens(subject.n_vocab, TEXT_TOKENS)))
    inputs = [count / TEXT_TOKENS for count in expected]
    size = StepSize(1, 1, lengths.mem_len, n_pair, inputs, [1.0, *[1.0] * clusters.n_tail])
    yield Work(
        what="generation",
        n_stream=1,
        n_query=1,
        precision=precision,
        candidates=_with_each(model, names, step, rewind),
        flops=inference_flops(subject.config.model, clusters, size),
        longest=lengths.tgt_len,
    )


@contextmanager
def attention(setting: Setting, model: TransformerXL, *, has_backward: bool) -> Iterator[Work]:
    """Make calls of the attention operation at the shapes of training, one layer, without dropout.

    Args:
        setting: The forms to call.
        model: A model of these shapes, as `bare_model` makes it.
        has_backward: With the gradients of all inputs.
    """
    subject, _, precision, names = setting
    lengths, n_stream = subject.lengths, subject.config.optim.batch_size // subject.config.optim.accumulate
    generator = torch.Generator().manual_seed(SEED)
    inputs = draw_inputs(model, lengths, n_stream, precision, generator)
    if has_backward:
        for leaf in inputs.leaves().values():
            leaf.requires_grad_()
    size = StepSize(n_stream, lengths.tgt_len, lengths.mem_len, _pairs(inputs), (), ())
    yield Work(
        what="attention+backward" if has_backward else "attention",
        n_stream=n_stream,
        n_query=lengths.tgt_len,
        precision=precision,
        candidates=tuple(
            Candidate(name, lambda _: None, _attending(name, inputs, precision, has_backward=has_backward))
            for name in names
        ),
        flops=attention_flops(subject.config.model, size, has_backward=has_backward),
    )


def _pairs(inputs: Inputs) -> float:
    """Return the pairs of a query and a key that it sees, of one stream on average."""
    n_query, n_keys = inputs.q.shape[2], inputs.k.shape[2]
    if inputs.first is None:
        return visible_pairs(n_query, n_keys - n_query, None)
    seen = torch.arange(n_keys - n_query, n_keys) + 1 - inputs.first.cpu()
    return float(seen.sum()) / len(seen)


def bare_model(subject: Subject, device: torch.device) -> TransformerXL:
    """Make a model with the attention of the subject's and as little else as possible."""
    config = replace(subject.config.model, n_layer=1, d_inner=1, cutoffs=(), div_val=1, d_embed=None)
    model = TransformerXL(config, 1)
    model.lengths = subject.lengths
    return model.to(device).eval()


def _attending(name: str, inputs: Inputs, precision: str, *, has_backward: bool) -> Callable[[], None]:
    attend, leaves = BACKENDS[name].attend, list(inputs.leaves().values())
    q, k, v, bias, first, out_gradient = inputs

    def step() -> None:
        with torch.set_grad_enabled(has_backward), autocast(q.device, precision):
            out: Tensor = attend(q, k, v, bias, first=first)
        if has_backward:
            torch.autograd.grad(out, leaves, out_gradient.to(out.dtype), allow_unused=True)

    return step


def _with_each(
    model: TransformerXL,
    names: Sequence[str],
    step: Callable[[], None],
    rewind: Callable[[int], None] = lambda _: None,
) -> tuple[Candidate, ...]:
    """Return the same step of a model with each of the forms of attention."""

    def ready(name: str) -> Callable[[int], None]:
        def use(n_steps: int) -> None:
            model.use_attention(name)
            rewind(n_steps)

        return use

    return tuple(Candidate(name, ready(name), step) for name in names)


@torch.inference_mode()
def _full_cache(model: TransformerXL, n_stream: int, precision: str) -> KVCache:
    """Return a cache with a full memory and a finished segment of random keys and values."""
    lengths = model.lengths
    positions = torch.full((n_stream,), lengths.mem_len)
    with autocast(model.device, precision):
        cache = model.new_cache(n_stream, lengths, positions)
    for buffer in (*cache.keys, *cache.values):
        buffer.normal_()
    return cache._replace(n_memory=lengths.mem_len, n_segment=lengths.tgt_len)


def draw_tokens(n_vocab: int, n_tokens: int) -> npt.NDArray[np.int64]:
    """Draw tokens by Zipf's law, p(id) = log((id + 2) / (id + 1)) / log(V + 1), so small ids come often."""
    uniform = np.random.default_rng(SEED).random(n_tokens)
    # Rounding may lift the largest beyond the vocabulary.
    return np.minimum((float(n_vocab + 1) ** uniform).astype(np.int64), n_vocab) - 1


def _store(path: Path, ids: npt.NDArray[np.int64], n_vocab: int) -> TokenStore:
    path.write_bytes(ids.astype("<u4").tobytes())
    return TokenStore(path, dtype="uint32", n_tokens=len(ids), n_vocab=n_vocab)


def _heads(clusters: Clusters, targets: Tensor) -> list[float]:
    """Return for how many targets the logits of each cluster are computed."""
    return [float(targets.numel()), *_by_cluster(clusters, targets)[1:]]


def _by_cluster(clusters: Clusters, tokens: Tensor) -> list[float]:
    """Count the tokens of each cluster of the vocabulary."""
    counts = torch.bincount(clusters.cluster_of(tokens.flatten()), minlength=clusters.n_tail + 1)
    return [float(count) for count in counts.tolist()]
