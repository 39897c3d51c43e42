"""Everything that is measured, one after the other."""

import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from txlcli import UserError
from txlcli.attention import BACKENDS, BackendChoice, Demands, cannot_run, choose_backend, fall_back
from txlcli.bench.agreement import Errors, Reference, agreement_cases, worse
from txlcli.bench.clock import PeakMemory, Timing, matmul_limit, time_in_turn
from txlcli.bench.results import Comparison, Event, Measured, Progress, Report, speed_ratio
from txlcli.bench.subject import Subject
from txlcli.bench.works import SEED, Setting, Work, attention, bare_model, generation, scoring, training
from txlcli.config import MachineConfig
from txlcli.device import (
    DTYPES,
    Precision,
    choose_device,
    choose_precision,
    environment,
    free_bytes,
    is_out_of_memory,
)
from txlcli.model import TransformerXL
from txlcli.train.cost import memory_bytes
from txlcli.train.machine import run_on

KINDS = ("training", "scoring", "generation", "attention")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured and how.

    Attributes:
        kinds: Of `KINDS`.
        repeats: Repetitions of each row.
        seconds: About so long a row takes.
        n_stream: Streams of scoring; None: as many as an evaluation takes.
        device: `auto`, `cpu`, `cuda`, `cuda:N` or `mps`.
        precision: `auto`: that of each command.
        attention: A form of attention, or `auto`.
        threads: CPU threads; None: as they are.
        is_deterministic: Only operations that repeat bit for bit.
    """

    kinds: tuple[str, ...] = KINDS
    repeats: int = 5
    seconds: float = 3.0
    n_stream: int | None = None
    device: str = "auto"
    precision: str = "auto"
    attention: str = "auto"
    threads: int | None = None
    is_deterministic: bool = False


def bench(subject: Subject, options: Options) -> Generator[Event, None, None]:
    """Measure a model on this machine.

    Closing the generator between two events ends it. Threads, determinism and random states are afterwards
    as before.

    Args:
        subject: The model.
        options: What to measure, and how.

    Yields:
        Progress, and last the `Report`.

    Raises:
        UserError: the machine lacks the device, precision or form of attention, memory is too small, or the
            lengths do not fit the model.
    """
    device = choose_device(options.device)
    cuda = [device.index or 0] if device.type == "cuda" else []
    machine = MachineConfig(threads=options.threads, deterministic=options.is_deterministic)
    with (
        run_on(machine),
        torch.random.fork_rng(cuda),
        tempfile.TemporaryDirectory(prefix="txl-") as folder,
    ):
        torch.manual_seed(SEED)
        try:
            yield from _Bench(subject, options, device, Path(folder)).run()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(f"{device}: out of memory; {_remedy(options.kinds)}") from error


def _remedy(kinds: Sequence[str]) -> str:
    """Say what takes less memory."""
    sizes = "--tgt-len or --mem-len"
    if set(kinds) != {"generation"}:  # which has one stream
        sizes = f"--batch-size, {sizes}"
    return f"lower {sizes}" + (", or leave kinds of work out with --only" if len(set(kinds)) > 1 else "")


class _Bench:
    """One measurement under way."""

    def __init__(self, subject: Subject, options: Options, device: torch.device, folder: Path) -> None:
        self.subject, self.options, self.device, self.folder = subject, options, device, folder
        self.limits: dict[str, float] = {}
        self.notices: list[str] = [] if subject.notice is None else [subject.notice]

    def run(self) -> Generator[Event, None, None]:
        """Measure all that is asked for."""
        subject, device = self.subject, self.device
        model = bare_model(subject, device)
        model.refuse_lengths(subject.lengths)
        dropatt = subject.config.model.dropatt
        demands = {
            kind: self._demands(model, dropout=dropatt if kind == "training" else 0.0) for kind in self._kinds
        }
        choices = {kind: self._choose(demands[kind]) for kind in demands}
        self._say_fallbacks(demands)
        precisions = self._precisions()
        if "training" in choices:
            self._refuse_too_large()
        rows: list[Measured] = []
        comparisons: list[Comparison] = []
        for kind, choice in choices.items():
            precision = precisions[kind]
            if precision not in self.limits:
                yield Progress("measuring the limit of matrix products")
                self.limits[precision] = matmul_limit(device, DTYPES[precision])
            if kind == "attention":
                yield from self._attention(
                    model, choice, precision, set(precisions.values()), rows, comparisons
                )
                continue
            setting = Setting(subject, device, precision, tuple(dict.fromkeys((choice.name, "eager"))))
            works: dict[str, Callable[[], AbstractContextManager[Work]]] = {
                "training": partial(training, setting, self.folder),
                "scoring": partial(scoring, setting, self.options.n_stream),
                "generation": partial(generation, setting),
            }
            _, row = yield from self._row(works[kind], choice.name)
            rows.append(row)
        yield Report(
            device=str(device),
            rows=tuple(rows),
            comparisons=tuple(comparisons),
            matmul_limits=self.limits,
            environment=environment(device, rows[0].precision),
            is_deterministic=self.options.is_deterministic,
            notices=tuple(self.notices),
        )

    @property
    def _kinds(self) -> list[str]:
        return [kind for kind in KINDS if kind in self.options.kinds]

    def _demands(self, model: TransformerXL, dropout: float = 0.0) -> Demands:
        return Demands(self.device, model.d_head, has_values=model.has_value_rows, dropout=dropout)

    def _choose(self, demands: Demands) -> BackendChoice:
        name = self.options.attention
        choice = choose_backend(name, demands)
        if name not in ("auto", choice.name):
            raise cannot_run(name, choice)
        return choice

    def _say_fallbacks(self, all_demands: dict[str, Demands]) -> None:
        """Say why a form is neither the model's own nor the one that is fastest for any model here."""
        told: dict[str, list[str]] = {}
        for kind, demands in all_demands.items():
            own = self.subject.config.machine.attention
            text = fall_back(own, demands) or fall_back("auto", demands)
            if text is not None and self.options.attention == "auto":
                told.setdefault(text, []).append(kind)
        for text, kinds in told.items():
            where = "attention" if len(kinds) == len(all_demands) else ", ".join(kinds)
            self.notices.append(f"{where}: {text}")
        if self.subject.config.model.dropatt and "attention" in all_demands:
            self.notices.append("attention alone is measured and compared without its dropout")

    def _precisions(self) -> dict[str, Precision]:
        """Return the precision of each kind of work, as the commands choose it."""
        asked, device = self.options.precision, self.device
        trained = choose_precision(asked, device, training=True)
        if asked == "auto" and self.subject.config.machine.precision != "auto":
            with suppress(UserError):  # that of another machine
                trained = choose_precision(self.subject.config.machine.precision, device, training=True)
        scored = choose_precision(asked, device, training=False)
        generated = trained if device.type == "cuda" else scored
        return {"training": trained, "scoring": scored, "generation": generated, "attention": trained}

    def _refuse_too_large(self) -> None:
        config, lengths = self.subject.config, self.subject.lengths
        needed, free = memory_bytes(config, self.subject.n_vocab), free_bytes(self.device)
        if free is not None and needed > free:
            raise UserError(
                f"{self.device}: too little memory to train; batch_size {config.optim.batch_size}, "
                f"tgt_len {lengths.tgt_len}, mem_len {lengths.mem_len} take about {needed / 1e9:,.1f} GB, "
                f"{free / 1e9:,.1f} GB are free; {_remedy(self.options.kinds)}"
            )

    def _row(
        self, make: Callable[[], AbstractContextManager[Work]], name: str
    ) -> Generator[Event, None, tuple[list[Timing], Measured]]:
        """Measure one kind of work with the form `name` and the eager one, and perhaps others."""
        yield from self._rehearse(make)
        peak = PeakMemory(self.device)
        with make() as work:
            if work.notice is not None:
                self.notices.append(work.notice)
            timing = time_in_turn(
                work.candidates,
                device=self.device,
                peak=peak,
                repeats=self.options.repeats,
                seconds=self.options.seconds,
                longest=work.longest,
            )
            while True:
                try:
                    done, total = next(timing)
                except StopIteration as end:
                    timings, n_steps = end.value
                    break
                yield Progress(work.what, done, total)
        by_name = {timing.name: timing for timing in timings}
        own, eager = by_name[name], by_name["eager"]
        return timings, Measured(
            what=work.what,
            n_stream=work.n_stream,
            n_query=work.n_query,
            tgt_len=self.subject.lengths.tgt_len,
            mem_len=self.subject.lengths.mem_len,
            precision=work.precision,
            attention=name,
            n_steps=n_steps,
            tokens_per_s=_speeds(work.tokens, own),
            eager_tokens_per_s=() if eager is own else _speeds(work.tokens, eager),
            peak_memory_bytes=own.peak_bytes,
            eager_peak_memory_bytes=eager.peak_bytes,
            flops_per_token=work.flops / work.tokens,
            matmul_limit=self.limits[work.precision],
        )

    def _rehearse(self, make: Callable[[], AbstractContextManager[Work]]) -> Generator[Event, None, None]:
        """Do the work once, for what libraries set up and keep when something is first done.

        That is no memory of this work, and else would count for whichever work comes first.
        """
        with make() as work:
            for candidate in work.candidates:
                yield Progress(f"{work.what}: first steps", 0, 0)
                candidate.ready(1)
                candidate.step()

    def _attention(
        self,
        model: TransformerXL,
        choice: BackendChoice,
        precision: Precision,
        used: set[Precision],
        rows: list[Measured],
        comparisons: list[Comparison],
    ) -> Generator[Event, None, None]:
        """Measure attention alone, with all forms in turn, and say whether they agree."""
        demands = self._demands(model)
        reasons = {name: backend.refuses(demands) for name, backend in BACKENDS.items()}
        able = [name for name in (choice.name, *BACKENDS) if reasons[name] is None]
        setting = Setting(self.subject, self.device, precision, tuple(dict.fromkeys((*able, "eager"))))
        speeds: dict[str, tuple[float, ...]] = {}
        for has_backward in (False, True):
            timings, row = yield from self._row(
                partial(attention, setting, model, has_backward=has_backward), choice.name
            )
            rows.append(row)
            n_tokens = row.n_stream * row.n_query
            speeds = {timing.name: _speeds(n_tokens, timing) for timing in timings}
        for name in BACKENDS:
            if reasons[name] is not None:
                comparisons.append(
                    Comparison(attention=name, precision=precision, errors=None, reason=reasons[name])
                )
        for compared in (precision, *sorted(used - {precision})):
            errors = yield from self._errors(model, compared, _eager_first(setting.names))
            for name, found in errors.items():
                is_timed = compared == precision
                comparisons.append(
                    Comparison(
                        attention=name,
                        precision=compared,
                        errors=found,
                        tokens_per_s=speeds[name] if is_timed else (),
                        ratio_to_eager=speed_ratio(speeds[name], speeds["eager"]) if is_timed else None,
                    )
                )

    def _errors(
        self, model: TransformerXL, precision: Precision, names: Sequence[str]
    ) -> Generator[Event, None, dict[str, Errors]]:
        """Return for each form its errors, the worse of all shapes."""
        generator, found = torch.Generator().manual_seed(SEED), dict[str, Errors]()
        optim = self.subject.config.optim
        cases = agreement_cases(self.subject.lengths)
        for n_case, lengths in enumerate(cases):
            yield Progress(f"comparing the forms of attention in {precision}", n_case, len(cases), "shapes")
            n_stream = optim.batch_size // optim.accumulate
            reference = Reference(model, lengths, n_stream, precision, generator)
            for name in names:
                found[name] = worse(found.get(name), reference.errors(BACKENDS[name].attend))
        return found


def _eager_first(names: Sequence[str]) -> list[str]:
    return ["eager", *(name for name in names if name != "eager")]


def _speeds(n_tokens: int, timing: Timing) -> tuple[float, ...]:
    return tuple(n_tokens / seconds for seconds in timing.step_s)
