"""What a measurement yields: progress, and at the end a report of all that was measured."""

import statistics
from dataclasses import dataclass
from typing import TypeAlias

from txlcli.bench.agreement import Errors


@dataclass(frozen=True)
class Progress:
    """How far a stage is; `total` 0: not known."""

    stage: str
    done: int = 0
    total: int = 0
    unit: str = "repetitions"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One kind of work.

    Attributes:
        what: `training`, `scoring`, `generation`, `attention` or `attention+backward`.
        n_stream: Streams side by side.
        n_query: Tokens of each in a step.
        tgt_len: The segment that they are part of.
        mem_len: Rows of memory, all of them there.
        precision: Of the matrix products.
        attention: The form of attention.
        n_steps: Steps of a repetition.
        tokens_per_s: Speed of each repetition.
        eager_tokens_per_s: The same with the eager form; empty: that is the form.
        peak_memory_bytes: See `PeakMemory`; None: not known.
        eager_peak_memory_bytes: The same with the eager form.
        flops_per_token: Of the matrix products, as `flops` counts them.
        matmul_limit: FLOPs per second of this machine's best matrix product.
    """

    what: str
    n_stream: int
    n_query: int
    tgt_len: int
    mem_len: int
    precision: str
    attention: str
    n_steps: int
    tokens_per_s: tuple[float, ...]
    eager_tokens_per_s: tuple[float, ...]
    peak_memory_bytes: int | None
    eager_peak_memory_bytes: int | None
    flops_per_token: float
    matmul_limit: float

    @property
    def tokens_per_s_mean(self) -> float:
        """Mean speed over the repetitions."""
        return statistics.fmean(self.tokens_per_s)

    @property
    def tokens_per_s_sd(self) -> float:
        """Standard deviation over the repetitions, with n - 1."""
        return statistics.stdev(self.tokens_per_s)

    @property
    def ratio_to_eager(self) -> float:
        """Median speed over that of the eager form; 1 where that is the form."""
        return speed_ratio(self.tokens_per_s, self.eager_tokens_per_s or self.tokens_per_s)

    @property
    def share_of_matmul_limit(self) -> float:
        """What the matrix products of the work would take at the limit, as a share of its time."""
        return self.flops_per_token * self.tokens_per_s_mean / self.matmul_limit


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One form of attention in one precision.

    Attributes:
        attention: Its name.
        precision: Of the matrix products.
        errors: How far it is from float64; None: it cannot run here.
        reason: Why not; None: it can.
        tokens_per_s: Speed of each repetition of `attention+backward`; empty: not measured.
        ratio_to_eager: Median speed over that of the eager form; None: not measured.
    """

    attention: str
    precision: str
    errors: Errors | None
    reason: str | None = None
    tokens_per_s: tuple[float, ...] = ()
    ratio_to_eager: float | None = None

    @property
    def tokens_per_s_mean(self) -> float | None:
        """Mean speed over the repetitions; None: not measured."""
        return statistics.fmean(self.tokens_per_s) if self.tokens_per_s else None

    @property
    def agrees(self) -> bool | None:
        """Whether it is as accurate as it should be; None: it cannot run here."""
        return None if self.errors is None else self.errors.agree


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that was measured, and what it rests on.

    Attributes:
        device: Where.
        rows: The kinds of work.
        comparisons: The forms of attention; empty: not asked for.
        matmul_limits: FLOPs per second, by precision.
        environment: Processor, torch, threads.
        is_deterministic: Only operations that repeat bit for bit were used.
        notices: What a reader should know.
    """

    device: str
    rows: tuple[Measured, ...]
    comparisons: tuple[Comparison, ...]
    matmul_limits: dict[str, float]
    environment: dict[str, str | int]
    is_deterministic: bool
    notices: tuple[str, ...]

    @property
    def precision(self) -> str:
        """The precision of all rows, or `mixed`."""
        return _common([row.precision for row in self.rows])

    @property
    def attention(self) -> str:
        """The form of attention of all rows, or `mixed`."""
        return _common([row.attention for row in self.rows])

    @property
    def disagreeing(self) -> tuple[str, ...]:
        """The forms of attention that do not agree with float64."""
        return tuple(dict.fromkeys(c.attention for c in self.comparisons if c.agrees is False))


Event: TypeAlias = Progress | Report


def speed_ratio(fast: tuple[float, ...], plain: tuple[float, ...]) -> float:
    """Return the ratio of median speeds."""
    return statistics.median(fast) / statistics.median(plain)


def _common(names: list[str]) -> str:
    return names[0] if len(set(names)) == 1 else "mixed"
