"""The text as parallel streams of segments: what each step of training reads."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from txlcli import UserError
from txlcli.data.ahead import Ahead
from txlcli.data.store import TokenStore

# Ids that wait in memory for their step, over all streams.
READ_AHEAD_TOKENS = 1 << 22
LARGEST_BLOCK_TOKENS = 1 << 16
# What is read ahead for coming steps: ids that wait, and steps.
AHEAD_TOKENS = 1 << 21
MOST_AHEAD = 64


def stream_start(stream: int, n_tokens: int, n_stream: int) -> int:
    """Return the first input of a stream: floor(b (N - 1) / B), exact for integers of any size.

    Stream b holds the inputs from here to the start of stream b + 1, and the targets one further: laid end to
    end the streams are the text, and each token but the first is a target exactly once.
    """
    return stream * (n_tokens - 1) // n_stream


def steps_per_epoch(n_tokens: int, n_stream: int, tgt_len: int) -> int:
    """Return the segments of the longest stream: ceil(ceil((N - 1) / B) / T)."""
    return -(-longest_stream(n_tokens, n_stream) // tgt_len)


def longest_stream(n_tokens: int, n_stream: int) -> int:
    """Return the inputs of the longest stream, ceil((N - 1) / B); the others hold one less."""
    return -(-(n_tokens - 1) // n_stream)


@dataclass(frozen=True)
class Segment:
    """What one step reads: targets are the tokens that follow `tokens`.

    `weights` is 0 where a stream has no token left, in the last segment of an epoch, else 1; None: all 1.
    `n_targets` counts the targets of weight 1 in these rows. Memory restarts empty at `first_of_epoch`.
    """

    tokens: Int[Tensor, "B T"]
    targets: Int[Tensor, "B T"]
    weights: Float[Tensor, "B T"] | None
    first_of_epoch: bool
    n_targets: int


class Batches:
    """The text as `n_stream` parallel streams, cut into segments of `tgt_len`.

    What a step reads is a function of the step alone. `n_stream` is less than asked for where the text
    has fewer targets than that; ids are read in one block a stream after the other, each stream from its
    start to its end, and within `reading_ahead` by a thread.

    Raises:
        UserError: the store holds fewer than two tokens.
    """

    def __init__(self, store: TokenStore, n_stream: int, tgt_len: int) -> None:
        if store.n_tokens < 2:
            raise UserError(
                f"{store.path}: too short to predict; got {store.n_tokens} tokens, needs at least 2"
            )
        self.store = store
        self.n_stream = min(n_stream, store.n_tokens - 1)
        self.tgt_len = tgt_len
        self.steps_per_epoch = steps_per_epoch(store.n_tokens, self.n_stream, tgt_len)
        self._block_tokens = max(tgt_len + 1, min(LARGEST_BLOCK_TOKENS, READ_AHEAD_TOKENS // self.n_stream))
        self._blocks: dict[int, tuple[int, npt.NDArray[Any]]] = {}
        self._ahead: Ahead[Segment] | None = None
        self.waited_s = 0.0

    @contextmanager
    def reading_ahead(self, first: int, stop: int) -> Iterator[None]:
        """Read the segments of the steps `first` to `stop` ahead in a thread while the block runs.

        They are taken with `segment`, in order. What the thread meets, such as a damaged store, is raised
        where its step is taken. `waited_s` then says how long steps have waited.
        """
        # The thread has blocks of its own, so that whoever asks for another step does not meet it there.
        own = Batches(self.store, self.n_stream, self.tgt_len)
        n_ahead = min(MOST_AHEAD, AHEAD_TOKENS // (self.n_stream * (self.tgt_len + 1)))
        self._ahead = Ahead(own.segment, first, stop, n_ahead)
        try:
            yield
        finally:
            self._ahead.close()
            self.waited_s += self._ahead.waited_s
            self._ahead = None

    def epoch(self, step: int) -> float:
        """Return the epochs read before a step, as a fraction of segments."""
        return step / self.steps_per_epoch

    def segment(self, step: int, rows: slice | None = None) -> Segment:
        """Return the segment of a step, counted from 0, for all streams or some of them."""
        if self._ahead is not None and rows is None and self._ahead.has(step):
            return self._ahead.take(step)
        index = step % self.steps_per_epoch
        begin = index * self.tgt_len
        length = min(self.tgt_len, longest_stream(self.store.n_tokens, self.n_stream) - begin)
        streams = range(self.n_stream)[rows if rows is not None else slice(None)]
        window = np.zeros((len(streams), length + 1), dtype=np.int64)
        present = np.full(len(streams), length)
        for row, stream in enumerate(streams):
            start = stream_start(stream, self.store.n_tokens, self.n_stream) + begin
            stop = min(start + length, stream_start(stream + 1, self.store.n_tokens, self.n_stream))
            present[row] = stop - start
            if stop > start:
                window[row, : stop - start + 1] = self._read(stream, start, stop + 1)
        ids = torch.from_numpy(window)
        weights = None
        if (present < length).any():
            weights = torch.from_numpy((np.arange(length) < present[:, None]).astype(np.float32))
        return Segment(
            tokens=ids[:, :-1],
            targets=ids[:, 1:],
            weights=weights,
            first_of_epoch=index == 0,
            n_targets=int(present.sum()),
        )

    def _read(self, stream: int, start: int, stop: int) -> npt.NDArray[Any]:
        first, block = self._blocks.get(stream, (0, np.empty(0, dtype=np.int64)))
        if not first <= start <= stop <= first + len(block):
            end = min(start + self._block_tokens, self.store.n_tokens)
            first, block = start, self.store.read_stored(start, max(stop, end))
            self._blocks[stream] = (first, block)
        return block[start - first : stop - first]
