"""Running stretches of a text side by side through the model's inference path."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from txlcli.data import TokenStore
from txlcli.device import Precision, autocast, is_out_of_memory
from txlcli.evaluate.score import EvalProgress
from txlcli.evaluate.streams import MAX_LOGITS, measure
from txlcli.model import Lengths, TransformerXL

Nats: TypeAlias = npt.NDArray[np.float64]
Record: TypeAlias = Callable[[int, Nats], None]


class Row(NamedTuple):
    """A stream's stretch of the text: it predicts tokens `first` to `stop`, scored from `scored` on."""

    first: int
    scored: int
    stop: int

    @property
    def length(self) -> int:
        """Tokens to run."""
        return self.stop - self.first


class StepResult(NamedTuple):
    """What a step gave: nats of the scored tokens, span after span of the text, and how many tokens ran."""

    nll: Tensor
    spans: list[tuple[int, int]]
    n_run: int


def run(
    model: TransformerXL,
    store: TokenStore,
    rows: Sequence[Row],
    lengths: Lengths,
    *,
    precision: Precision,
    start_id: int | None = None,
) -> Iterator[StepResult]:
    """Run rows, longest first, side by side from an empty memory, segment by segment.

    The first row is scored from its beginning. What stands before a row's first token is the text's own, or
    `start_id`. A row that has ended takes no part in later steps.
    """
    # Of each stream's first input: the token before its first target, or the start token of a line.
    positions = torch.tensor([0 if start_id is not None else row.first - 1 for row in rows])
    with computing(model, lengths, precision):
        cache = model.new_cache(len(rows), lengths, positions.to(model.device))
    for offset in range(0, rows[0].length, lengths.tgt_len):
        active = [row for row in rows if row.length > offset]
        width = min(lengths.tgt_len, active[0].length - offset)
        window = torch.from_numpy(_read(store, active, offset, width, start_id)).to(model.device)
        picked, spans = _pick(active, offset, width)
        with computing(model, lengths, precision):
            hidden, cache = model.extend(window[:, :-1], cache.first_streams(len(active)))
            nll = picked_nll(model, hidden, window[:, 1:], picked)
        yield StepResult(nll, spans, sum(min(width, row.length - offset) for row in active))


def _read(
    store: TokenStore, rows: Sequence[Row], offset: int, width: int, start_id: int | None
) -> npt.NDArray[np.int64]:
    """Return each row's next tokens after the one before them, [B, width + 1]; 0 where a row has ended."""
    window = np.zeros((len(rows), width + 1), dtype=np.int64)
    for filled, row in zip(window, rows, strict=True):
        begin = row.first + offset
        end = min(begin + width, row.stop)
        if offset == 0 and start_id is not None:
            filled[0] = start_id
            filled[1 : end - begin + 1] = store.read(begin, end)
        else:
            filled[: end - begin + 1] = store.read(begin - 1, end)
    return window


def _pick(
    rows: Sequence[Row], offset: int, width: int
) -> tuple[npt.NDArray[np.int64] | None, list[tuple[int, int]]]:
    """Return which of a step's B x T outputs are scored (None: all), and which spans of the text they are."""
    scored = [
        (index, row.first + offset, min(row.first + offset + width, row.stop))
        for index, row in enumerate(rows)
        if row.first + offset >= row.scored
    ]
    spans = [(begin, end) for _, begin, end in scored]
    if sum(end - begin for begin, end in spans) == len(rows) * width:
        return None, spans
    return np.concatenate([index * width + np.arange(end - begin) for index, begin, end in scored]), spans


def picked_nll(
    model: TransformerXL, hidden: Tensor, targets: Tensor, picked: npt.NDArray[np.int64] | None
) -> Tensor:
    """Return the nats of the picked targets; only for these the vocabulary is gone through."""
    hidden, targets = hidden.flatten(0, 1), targets.flatten()
    if picked is not None:
        index = torch.from_numpy(picked).to(hidden.device)
        hidden, targets = hidden[index], targets[index]
    nll = model.nll(hidden[None], targets[None], max_logits=MAX_LOGITS)[0]
    # Weights so large that scores overflow give no distribution at all, which is no better than a probability
    # of 0.
    return nll.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)


@contextmanager
def computing(model: TransformerXL, lengths: Lengths, precision: Precision) -> Iterator[None]:
    """Compute without autograd in the given precision.

    Entered anew for each step: a generator that yields inside would change the mode of whoever consumes it.
    """
    try:
        with torch.inference_mode(), autocast(model.device, precision):
            yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise measure(model, lengths).too_large() from error


@contextmanager
def evaluation_mode(model: TransformerXL) -> Iterator[None]:
    """Switch dropout off, and every module back to what it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


class Tally:
    """The running total of an evaluation."""

    def __init__(self, device: torch.device, *, total: int, record: Record | None) -> None:
        # Metal has no float64.
        self._device = torch.device("cpu") if device.type == "mps" else device
        self._nll = torch.zeros((), dtype=torch.float64, device=self._device)
        self._record = record
        self.tokens = 0
        self.progress = EvalProgress(0, total)

    def add(self, result: StepResult) -> None:
        """Add what a step gave."""
        nll = result.nll.to(self._device).double()
        # The sum stays on the device: reading it would make the next step wait for this one.
        self._nll = self._nll + nll.sum()
        self.tokens += len(nll)
        self.progress = EvalProgress(self.progress.done + result.n_run, self.progress.total)
        if self._record is not None:
            nats, begin = nll.cpu().numpy(), 0
            for start, stop in result.spans:
                self._record(start, nats[begin : begin + stop - start])
                begin += stop - start

    @property
    def total_nll(self) -> float:
        """The sum of all nats so far."""
        return float(self._nll)
