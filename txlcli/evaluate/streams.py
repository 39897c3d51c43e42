"""What lengths mean for a text, and how its segments are shared among streams: pure functions of numbers."""

from dataclasses import dataclass
from typing import NamedTuple

from txlcli import UserError
from txlcli.attention.blocks import N_QUERIES
from txlcli.device import free_bytes
from txlcli.model import Lengths, TransformerXL

# What a step costs however few streams it runs (calls of operations, small products), as multiply-adds a
# layer. On CPUs measured: the part of a step's time that does not grow with its streams. Elsewhere an
# estimate: tens of launches a layer on a chip that only thousands of rows fill.
FIXED_MACS = {"cpu": 3e7, "cuda": 1e10, "mps": 1e9}

# Logits held at once: at a vocabulary of 267,735 those of a whole step would take gigabytes.
MAX_LOGITS = 1 << 22

# Of the memory that is free: other programs live too, and what is needed is an estimate.
USABLE_SHARE = 0.8


@dataclass(frozen=True)
class Applied:
    """Lengths as applied to a text, what they mean there, and what to tell about them; see `Score`."""

    lengths: Lengths
    context_min: int
    context_max: int
    receptive_field: int
    is_beyond_training: bool
    notices: tuple[str, ...]


def apply(model: TransformerXL, lengths: Lengths, n_targets: int, *, what: str) -> Applied:
    """Say what lengths mean for a text, or a longest line (`what`), of `n_targets` targets."""
    asked, lengths, notices = lengths, usable(lengths), []
    if asked != lengths:
        notices.append(
            "mem_len 0 with same_length mem_len would leave no key to see: scored without same_length"
        )
    if lengths.mem_len > n_targets and not lengths.n_rows_at_start:
        notices.append(f"mem_len {lengths.mem_len:,} exceeds {what}: every token sees all before it")
    context_min, context_max = context(lengths)
    return Applied(
        lengths=lengths,
        context_min=min(context_min, n_targets),
        context_max=min(context_max, n_targets),
        receptive_field=min(receptive_field(lengths, len(model.layers)), n_targets),
        is_beyond_training=lengths.mem_len > model.lengths.mem_len or lengths.tgt_len > model.lengths.tgt_len,
        notices=tuple(notices),
    )


def usable(lengths: Lengths) -> Lengths:
    """Drop same_length where it would hide every key: rule `mem_len` at mem_len 0."""
    return lengths._replace(same_length="off") if lengths.span == 0 else lengths


def bound(lengths: Lengths, n_targets: int) -> Lengths:
    """Cut usable lengths to what a text of `n_targets` targets can fill; its score stays the same.

    Memory that begins empty never holds more than the segments before the last one. Under same_length the
    span follows mem_len, and one of all targets hides nothing.
    """
    tgt_len = min(lengths.tgt_len, n_targets)
    if lengths.n_rows_at_start:
        return lengths._replace(tgt_len=tgt_len)
    before_last = (_ceil(n_targets, tgt_len) - 1) * tgt_len
    most = before_last if lengths.span is None else n_targets
    return lengths._replace(tgt_len=tgt_len, mem_len=min(lengths.mem_len, most))


def context(lengths: Lengths) -> tuple[int, int]:
    """Return how many tokens a prediction in a full segment sees, itself included: fewest and most."""
    if lengths.span is not None:
        return lengths.span, lengths.span
    return lengths.mem_len + 1, lengths.mem_len + lengths.tgt_len


def receptive_field(lengths: Lengths, n_layer: int) -> int:
    """Return how many tokens the last prediction of a full segment depends on through `n_layer` layers.

    The last layer sees M + T rows. The oldest was made in the segment ceil(M / T) before and saw M rows
    before that one's start, and so on down: T + (N - 1) ceil(M / T) T + M. Under same_length: N (span - 1) +
    1.
    """
    if lengths.span is not None:
        return n_layer * (lengths.span - 1) + 1
    tgt_len, mem_len = lengths.tgt_len, lengths.mem_len
    return tgt_len + (n_layer - 1) * _ceil(mem_len, tgt_len) * tgt_len + mem_len


class Stream(NamedTuple):
    """A stream's share of the segments: it runs `begin` to `end` and scores `scored` to `end`."""

    begin: int
    scored: int
    end: int


def lay_out(n_segments: int, n_warm: int, n_stream: int) -> list[Stream]:
    """Share segments among streams of which all but the first warm up, so that all run equally long.

    The first stream scores what the others spend on warm-up. Streams differ by at most one segment, longer
    first.
    """
    assert n_stream == 1 or n_stream <= n_segments - n_warm, "a stream would score nothing"
    each, n_longer = divmod(n_segments + (n_stream - 1) * n_warm, n_stream)
    streams = [Stream(0, 0, each + (n_longer > 0))]
    for index in range(1, n_stream):
        scored = streams[-1].end
        begin = scored - n_warm
        streams.append(Stream(begin, scored, begin + each + (index < n_longer)))
    return streams


def choose_streams(n_segments: int, n_warm: int, limit: int, *, fixed: float) -> int:
    """Return how many streams to run side by side, `limit` at most.

    B streams take ceil((n_segments + (B - 1) n_warm) / B) steps, and a step is taken to cost `fixed` + B, in
    the cost of one stream's segment. The fewest streams within 2 % of the least cost are taken: more need
    memory for nothing.
    """
    limit = max(1, min(limit, n_segments - n_warm))
    costs = [_ceil(n_segments + (b - 1) * n_warm, b) * (fixed + b) for b in range(1, limit + 1)]
    return next(b for b, cost in enumerate(costs, start=1) if cost <= 1.02 * min(costs))


@dataclass(frozen=True)
class StepSize:
    """What one step takes, estimated: a part of its own and a part for each stream.

    `fixed` is its fixed time in the time of one stream; `bytes_free` is None where the system does not tell.
    """

    lengths: Lengths
    fixed: float
    bytes_fixed: int
    bytes_stream: int
    bytes_free: int | None

    def fit(self, n_stream: int) -> int:
        """Return how many of the streams fit in memory side by side.

        Raises:
            UserError: not even one does.
        """
        if self.bytes_free is None:
            return n_stream
        left = int(USABLE_SHARE * self.bytes_free) - self.bytes_fixed
        if left < self.bytes_stream:
            raise self.too_large()
        return min(n_stream, left // self.bytes_stream)

    def too_large(self) -> UserError:
        """Return the refusal, with numbers."""
        needed = (self.bytes_fixed + self.bytes_stream) / 1e9
        free = "" if self.bytes_free is None else f" of {self.bytes_free / 1e9:,.1f} GB free"
        lengths = self.lengths
        return UserError(
            f"--mem-len: {lengths.mem_len:,} rows at tgt_len {lengths.tgt_len:,} do not fit in memory; "
            f"one stream needs about {needed:,.1f} GB{free}; lower --mem-len or --tgt-len"
        )


def measure(model: TransformerXL, lengths: Lengths) -> StepSize:
    """Estimate what a step takes from the model's shapes."""
    n_layer, clusters, itemsize = len(model.layers), model.head.clusters, model.dtype.itemsize
    n_queries, n_rows = lengths.tgt_len, lengths.mem_len + lengths.tgt_len
    width, has_values = model.n_head * model.d_head, model.has_value_rows

    macs = n_queries * (model.n_parameters()[1] + 3 * n_layer * n_rows * width + clusters.macs)
    cached = n_layer * n_rows * width * itemsize
    # The eager attention holds five of a layer's scores at once, or seven where they are moved back to
    # distances; the other forms go in blocks of queries.
    is_eager = model.attention_name == "eager"
    n_scores = (7 if has_values else 5) if is_eager else 2
    n_side = n_queries if is_eager else min(n_queries, N_QUERIES)
    scores = model.n_head * n_side * n_rows * itemsize
    return StepSize(
        lengths=lengths,
        fixed=n_layer * FIXED_MACS.get(model.device.type, 1e9) / macs,
        # Rows of distances for keys and perhaps values, their sinusoids in float64 while they are made, and
        # two copies of the logits.
        bytes_fixed=(1 + has_values) * cached
        + 4 * 8 * n_rows * model.d_model
        + 2 * max(MAX_LOGITS, clusters.widest) * itemsize,
        # Keys and values; the scores of one layer; rows and inner rows.
        bytes_stream=2 * cached + n_scores * scores + 16 * n_queries * model.d_model * itemsize,
        bytes_free=free_bytes(model.device),
    )


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
