"""The sliding window: what a model without memory pays for the same context (Dai et al. 2019, table 9).

Without memory a token has a full context only at the end of a segment of its own. So each token is predicted
by a fresh window of the L tokens before it, run through all layers for that one prediction (Al-Rfou et al.
2018). L is the attention length: the most tokens that a prediction of the evaluation with memory sees, itself
included. At the text's beginning a window holds what there is.

A layer takes C multiply-adds a token and a for each key that a query sees:

    C = 4 D H E + 2 D F         projections of queries, keys, values and output; feed-forward
    a = (2 to 4) H E            content scores and values; rows of distances for scores, and Shaw's for values

With H E = D, F = 4 D and relative positions that is C = 12 D^2 and a = 3 D. A window's queries see L/2 keys
in the mean; with memory every query is counted with L. So for each token

    ideal ratio = L (C + a L/2) / (C + a L).

What both do once for a scored token is not in it, above all the vocabulary: only a window's last row goes
there, and where it is large the ratio stays below the ideal one. All else in a window is run plainly, the
last layer's other rows too.
"""

import math
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from txlcli import UserError
from txlcli.data import TokenStore
from txlcli.device import Precision
from txlcli.evaluate.running import Nats, computing, evaluation_mode, picked_nll
from txlcli.evaluate.score import EvalProgress
from txlcli.evaluate.streams import bound, context, measure, usable
from txlcli.model import Lengths, TransformerXL
from txlcli.positions import LearnedPositions

MAX_SIDE = 64
"""Windows, and streams with memory, that run side by side at most."""

PIECE_S = 0.1
"""Both sides are timed in turn, in pieces of about this time, or of one step where that takes longer."""

MIN_PIECES = 5
"""Pieces of each side at least; where the windows are fewer, they are run again."""

LEAST_GAIN = 0.02
"""A larger batch is faster if it saves at least this share: less would be noise."""


class Draw:
    """Tokens drawn from a text, and the nats that an evaluation gives them.

    One from each of `n_drawn` stretches of equal length, always the same ones for the same sizes; drawn
    within its stretch, since tokens at equal intervals could all have the same place in their segments.

    Attributes:
        positions: Where they stand in the text, ascending; never the first token, which is not scored.
        nats: What `record` has been told of them; NaN before.
    """

    def __init__(self, n_text: int, n_drawn: int) -> None:
        n_drawn = min(n_drawn, n_text - 1)
        edges = 1 + (n_text - 1) * np.arange(n_drawn + 1, dtype=np.int64) // n_drawn
        share = np.random.default_rng(0).random(n_drawn)
        self.positions = edges[:-1] + (share * np.diff(edges)).astype(np.int64)
        self.nats: Nats = np.full(n_drawn, np.nan)

    def record(self, start: int, nats: Nats) -> None:
        """Keep what is drawn among the nats of the tokens from position `start` on; see `evaluate`."""
        begin, end = np.searchsorted(self.positions, [start, start + len(nats)])
        self.nats[begin:end] = nats[self.positions[begin:end] - start]


@dataclass(frozen=True, kw_only=True)
class WindowScore:
    """What a sliding window scored, and took, beside the evaluation with memory.

    Attributes:
        lengths: The lengths of the evaluation with memory.
        attention_length: Tokens in a window (L).
        tokens: Tokens scored by windows.
        nll: Their mean nats.
        nll_with_memory: Mean nats of the same tokens in the evaluation with memory.
        nll_difference_se: Standard error of the difference of the two, from its spread over the tokens; None:
            a single token has none.
        token_s: Seconds for each token scored by a window, the median of the pieces.
        token_s_with_memory: The same with memory, once it is full.
        batch_size: Windows side by side, the fastest tried.
        batch_size_with_memory: Streams side by side, the fastest tried.
        ideal_ratio: The ratio of the multiply-adds in the layers.
    """

    lengths: Lengths
    attention_length: int
    tokens: int
    nll: float
    nll_with_memory: float
    nll_difference_se: float | None
    token_s: float
    token_s_with_memory: float
    batch_size: int
    batch_size_with_memory: int
    ideal_ratio: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second by windows."""
        return 1 / self.token_s

    @property
    def tokens_per_s_with_memory(self) -> float:
        """Tokens per second with memory."""
        return 1 / self.token_s_with_memory

    @property
    def ratio(self) -> float:
        """How many times as long a token takes by a window."""
        return self.token_s / self.token_s_with_memory

    @property
    def share_of_ideal(self) -> float:
        """The ratio as a share of the ideal one.

        Above 1 where the window's attention is less efficient, for example computes hidden keys too.
        """
        return self.ratio / self.ideal_ratio


def layer_macs(model: TransformerXL) -> tuple[int, int]:
    """Return the multiply-adds of a layer for each token (C) and for each key that a query sees (a)."""
    width, layer = model.n_head * model.d_head, next(model.each_layer())
    by_distance = 0 if layer.attention.r is None else 1 + model.has_value_rows
    per_token = 4 * model.d_model * width + 2 * model.d_model * layer.feedforward.inner.out_features
    return per_token, (2 + by_distance) * width


def ideal_ratio(attention_length: int, per_token: int, per_key: int) -> float:
    """Return L (C + a L/2) / (C + a L)."""
    per_window = attention_length * (per_token + per_key * attention_length / 2)
    return per_window / (per_token + per_key * attention_length)


def window_length(model: TransformerXL, lengths: Lengths, n_text: int) -> int:
    """Return the tokens in a window beside an evaluation at these lengths of a text of `n_text` tokens.

    Raises:
        UserError: the model's positions or memory do not allow such a window.
    """
    length = min(context(usable(lengths))[1], n_text - 1)
    if isinstance(model.positions, LearnedPositions) and length > len(model.positions.weight):
        raise UserError(
            f"--sliding-window: this model has learned {len(model.positions.weight):,} positions; "
            f"got windows of {length:,} tokens (mem_len {lengths.mem_len:,} and tgt_len "
            f"{lengths.tgt_len:,}); lower --mem-len or --tgt-len"
        )
    try:
        measure(model, Lengths(length, 0)).fit(1)
    except UserError as error:
        raise _too_large(length) from error
    return length


def score_window(
    model: TransformerXL,
    store: TokenStore,
    draw: Draw,
    *,
    lengths: Lengths | None = None,
    n_side: int | None = None,
    precision: Precision = "fp32",
) -> Iterator[EvalProgress | WindowScore]:
    """Score drawn tokens by windows, and time that against the evaluation with memory.

    Events count scored tokens; while batch sizes are tried, their total is 0; the last one is the
    `WindowScore`. Model, random numbers and gradients are left alone as by `evaluate`.

    Args:
        model: The model, on the device that is to compute.
        store: The text's tokens, two at least.
        draw: Tokens of that text, and what the evaluation with memory at these lengths gave them.
        lengths: Lengths of the evaluation with memory; None: those of training.
        n_side: At most so many windows, or streams, run side by side; None: as many as are fastest.
        precision: What matrix products run in, on both sides.

    Raises:
        UserError: the model's positions or memory do not allow such windows.
    """
    asked = lengths or model.lengths
    length = window_length(model, asked, store.n_tokens)
    limit, n_drawn = n_side or MAX_SIDE, len(draw.positions)
    with evaluation_mode(model):
        segments = Segments(model, store, bound(usable(asked), store.n_tokens - 1), precision)
        n_stream, segment_s = yield from find_fastest(segments, segments.fit(limit))
        segments.resize(n_stream)
        windows = Windows(model, store, draw.positions, length, asked.clamp_len, precision)
        n_window, window_s = yield from find_fastest(windows, windows.fit(min(limit, n_drawn)))
        windows.resize(n_window)

        n_windows, n_segments = (max(1, round(PIECE_S / step_s)) for step_s in (window_s, segment_s))
        n_pieces = max(MIN_PIECES, -(-n_drawn // (n_window * n_windows)))
        by_window, with_memory = [], []
        # In turn, so that whatever else the machine does meets both.
        for piece in range(1, n_pieces + 1):
            by_window.append(_seconds(windows, n_windows) / (n_windows * windows.n_scored))
            with_memory.append(_seconds(segments, n_segments) / (n_segments * segments.n_scored))
            yield EvalProgress(n_drawn * piece // n_pieces, n_drawn)
    assert not np.isnan(draw.nats).any(), "evaluated before"
    with np.errstate(invalid="ignore"):  # both may be inf
        difference_sd = (windows.nats - draw.nats).std(ddof=1) if n_drawn > 1 else None
    yield WindowScore(
        lengths=usable(asked),
        attention_length=length,
        tokens=n_drawn,
        nll=float(windows.nats.mean()),
        nll_with_memory=float(draw.nats.mean()),
        nll_difference_se=None if difference_sd is None else float(difference_sd) / math.sqrt(n_drawn),
        token_s=float(np.median(by_window)),
        token_s_with_memory=float(np.median(with_memory)),
        batch_size=n_window,
        batch_size_with_memory=n_stream,
        ideal_ratio=ideal_ratio(length, *layer_macs(model)),
    )


class Side(Protocol):
    """One side of the comparison, which runs step after step.

    Steps may only be queued on the device; `finish` waits for them.
    """

    @property
    def n_scored(self) -> int:
        """Tokens that a step scores."""

    def resize(self, n_side: int) -> None:
        """From now on run so many side by side, from the beginning."""

    def step(self) -> None:
        """Run one step."""

    def finish(self) -> None:
        """Wait for all steps so far."""


class Windows:
    """The tokens at `positions`, each by a window of `length` tokens, over and over."""

    def __init__(
        self,
        model: TransformerXL,
        store: TokenStore,
        positions: npt.NDArray[np.int64],
        length: int,
        clamp_len: int | None,
        precision: Precision,
    ) -> None:
        self.model, self.store, self.precision = model, store, precision
        self.positions = positions
        # Under same_length L is its span, which hides nothing from a window.
        self.lengths = Lengths(length, 0, clamp_len)
        self.nats: Nats = np.full(len(positions), np.nan)
        self.n_scored = 0
        self._done = 0
        self._pending: list[tuple[npt.NDArray[np.int64], Tensor]] = []

    def fit(self, limit: int) -> int:
        """Return how many of `limit` windows fit in memory."""
        try:
            return measure(self.model, self.lengths).fit(limit)
        except UserError as error:
            raise _too_large(self.lengths.tgt_len) from error

    def resize(self, n_side: int) -> None:
        """Run `n_side` windows a step, from the first token on."""
        self.n_scored, self._done = n_side, 0
        with computing(self.model, self.lengths, self.precision):
            # One cache for all steps: the rows of distances in it are made once, as in an evaluation.
            self._cache = self.model.new_cache(n_side, self.lengths)

    def step(self) -> None:
        """Score the next tokens."""
        chosen = (self._done + np.arange(self.n_scored)) % len(self.positions)
        self._done += self.n_scored
        ends = self.positions[chosen]
        begins = np.maximum(0, ends - self.lengths.tgt_len)
        tokens = np.zeros((len(chosen), self.lengths.tgt_len), dtype=np.int64)
        targets = np.empty((len(chosen), 1), dtype=np.int64)
        for row, target, begin, end in zip(tokens, targets, begins.tolist(), ends.tolist(), strict=True):
            ids = self.store.read(begin, end + 1)
            # What fills up a short window comes after its tokens, where a causal model cannot see it.
            row[: end - begin], target[0] = ids[:-1], ids[-1]
        device = self.model.device
        position, last = torch.from_numpy(begins).to(device), torch.from_numpy(ends - begins - 1).to(device)
        try:
            with computing(self.model, self.lengths, self.precision):
                empty = self._cache.emptied(position)
                hidden, self._cache = self.model.extend(torch.from_numpy(tokens).to(device), empty)
                hidden = hidden[torch.arange(len(last), device=device), last][:, None]
                nll = picked_nll(self.model, hidden, torch.from_numpy(targets).to(device), None)
        except UserError as error:
            raise _too_large(self.lengths.tgt_len) from error
        self._pending.append((chosen, nll))

    def finish(self) -> None:
        """Wait, and keep the nats."""
        for chosen, nll in self._pending:
            self.nats[chosen] = nll.cpu().double().numpy()
        self._pending.clear()


class Segments:
    """Streams of the text with a full memory, segment after segment, over and over."""

    def __init__(
        self, model: TransformerXL, store: TokenStore, lengths: Lengths, precision: Precision
    ) -> None:
        self.model, self.store, self.lengths, self.precision = model, store, lengths, precision
        self.n_scored = 0
        with computing(model, lengths, precision):
            cache = model.new_cache(1, lengths)
        for begin in range(0, lengths.mem_len, lengths.tgt_len):
            tokens = self._read(begin)[None, :-1]
            with computing(model, lengths, precision):
                _, cache = model.extend(tokens.to(model.device), cache)
        self._full = cache

    def fit(self, limit: int) -> int:
        """Return how many of `limit` streams fit in memory."""
        return measure(self.model, self.lengths).fit(limit)

    def resize(self, n_side: int) -> None:
        """Run `n_side` streams, from places spread over the text."""
        self.n_scored = n_side * self.lengths.tgt_len
        self._begins = [self.store.n_tokens * stream // n_side for stream in range(n_side)]
        # All have the memory of one stream: what it holds takes no time, only that it is full.
        with computing(self.model, self.lengths, self.precision):
            self._cache = self._full.repeat(n_side)

    def step(self) -> None:
        """Score the next segment of each stream."""
        tokens = torch.stack([self._read(begin) for begin in self._begins]).to(self.model.device)
        self._begins = [begin + self.lengths.tgt_len for begin in self._begins]
        with computing(self.model, self.lengths, self.precision):
            hidden, self._cache = self.model.extend(tokens[:, :-1], self._cache)
            self._nll = picked_nll(self.model, hidden, tokens[:, 1:], None)

    def finish(self) -> None:
        """Wait."""
        self._nll.cpu()

    def _read(self, begin: int) -> Tensor:
        """Return a segment and the token after it; what would go beyond the text's end starts it anew."""
        begin %= self.store.n_tokens - self.lengths.tgt_len
        return torch.from_numpy(self.store.read(begin, begin + self.lengths.tgt_len + 1).astype(np.int64))


def find_fastest(side: Side, limit: int) -> Generator[EvalProgress, None, tuple[int, float]]:
    """Try 1, 2, 4, ... side by side; return the fastest for a token, and its seconds for a step.

    It ends when two in a row were no faster: far beyond what fills the machine, nothing gets better.
    """
    best, best_s, best_token_s = 1, math.inf, math.inf
    n_side, n_slower = 1, 0
    while n_side <= limit and n_slower < 2:
        side.resize(n_side)
        seconds: list[float] = []
        # The first step may do more than the others, and the least is what neighbours disturb least.
        while len(seconds) < 2 or sum(seconds) < PIECE_S:
            seconds.append(_seconds(side, 1))
            yield EvalProgress(0, 0)
        token_s = min(seconds) / side.n_scored
        if token_s < (1 - LEAST_GAIN) * best_token_s:
            best, best_s, best_token_s, n_slower = n_side, min(seconds), token_s, 0
        else:
            n_slower += 1
        n_side *= 2
    return best, best_s


def _seconds(side: Side, n_step: int) -> float:
    """Return the time that steps take."""
    started = time.perf_counter()
    for _ in range(n_step):
        side.step()
    side.finish()
    return time.perf_counter() - started


def _too_large(length: int) -> UserError:
    return UserError(
        f"--sliding-window: a window of {length:,} tokens does not fit in memory; "
        "lower --mem-len or --tgt-len"
    )
