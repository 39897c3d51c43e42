"""The loop: steps, and what is due between them, as a generator of events.

After step s, in this order: a `step` line, the evaluation, the checkpoint; each where it is due, and the
last step is always due. An evaluation that was cut short leaves no trace and is made when training goes on,
so a run that was interrupted anywhere does and writes what an undisturbed one does.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from txlcli import UserError
from txlcli.config import Config
from txlcli.data import CHECKING, DamagedStore, SplitInfo
from txlcli.device import choose_device, is_out_of_memory
from txlcli.files import describe_error
from txlcli.plan import minutes_text
from txlcli.run import Run, append_metrics, discard_run, list_checkpoints, read_bits_per_byte, writing
from txlcli.train.evaluating import evaluate_if_due
from txlcli.train.events import Budget, Event, Finished, Notice, Progress, Skipped, Stepped
from txlcli.train.machine import out_of_memory, run_on
from txlcli.train.optim import learning_rate
from txlcli.train.session import Session, failure, save
from txlcli.train.state import StepResult, optimize

SKIPS_IN_ROW = 5
"""Steps without an update, one after the other, that end a run."""

SCALE_FLOOR = 1.0
"""Loss scale of fp16 below which its gradients cannot be held any more."""

SMOOTHING = 0.95
"""Share of the moving average that the last step leaves to the steps before."""

OVERRUN = 1.1
REFRESH_S = 0.5

TOLD_S = 1.0
"""Seconds that a training waits for its ids to be checked before it says so."""


def train(
    run: Run,
    config: Config,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    stop_at: int | None = None,
    budget: Budget | None = None,
    is_checked: bool = False,
    is_taken: bool = False,
) -> Iterator[Event]:
    """Train a run to `config.train.steps`, from its last checkpoint if it has one, yielding what happened.

    Args:
        run: A run that `begin` or `resume` made ready.
        config: Its settings.
        should_stop: Asked after every step and every piece of an evaluation; once true, the run saves and
            ends as interrupted.
        stop_at: Save and end after this step; length and learning rates stay those of the whole run.
        budget: The time that the run should take; running over is said once.
        is_checked: As `Ready` says; else nothing is scored, and nothing that was learned is
            saved, before the ids are known to be sound.
        is_taken: As `Ready` says; where its ids turn out to be damaged the run is removed again.

    Raises:
        NonFinite: loss or gradient norm were not finite too often, or weights are not.
        UserError: a file cannot be read or written or is damaged, another process trains this run, or the
            device has too little memory.
    """
    with ExitStack() as stack:
        if is_taken:
            stack.enter_context(_undone_if_damaged(run))
        stack.enter_context(run_on(config.machine))
        unlocked = stack.enter_context(writing(run))
        session = None
        try:
            session = Session.open(run, config, stack, is_checked=is_checked)
            session.notices[:0] = [] if unlocked is None else [Notice(unlocked)]
            first, stop = session.state.counters.step, min(session.steps, stop_at or session.steps)
            stack.enter_context(session.state.batches.reading_ahead(first, stop))
            yield from _run(session, should_stop, stop_at, _Clock(session, budget))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            device = choose_device(config.machine.device)
            raise out_of_memory(config, device, "" if session is None else session.last_good()) from error
        except (OSError, UserError) as error:
            # A disk that is full, or gone. Lines of metrics after the last checkpoint go when it is resumed.
            cause = error if isinstance(error, OSError) else error.__cause__
            if not isinstance(cause, OSError):
                raise
            unnamed = f"{run.folder}: cannot be written; {describe_error(cause)}"
            text = str(error) if isinstance(error, UserError) else unnamed
            raise UserError(text if session is None else f"{text}; {session.how_to_go_on(cause)}") from cause


@contextmanager
def _undone_if_damaged(run: Run) -> Iterator[None]:
    """Remove a run whose ids, taken from another, are damaged: nothing has been learned from them."""
    try:
        yield
    except DamagedStore as error:
        if any(list_checkpoints(run)):  # beyond step 0: the damage came later
            raise
        discard_run(run)
        raise DamagedStore(
            f"{error.fault}; so are those of the run that they were taken from",
            f"{run.folder} is removed again; repeat the command, which prepares the text anew",
        ) from error


def _run(
    session: Session, should_stop: Callable[[], bool], stop_at: int | None, clock: "_Clock"
) -> Iterator[Event]:
    config, step = session.config, session.state.counters.step
    if stop_at is not None and stop_at < step:
        raise UserError(
            f"--stop-at: below the saved step; got {stop_at}, {session.run.folder} is at step {step}; "
            f"give {step} or more"
        )
    yield from session.notices
    if session.saved is None:
        yield from save(session)
    yield from _compile(session, should_stop)
    while True:
        if not session.check.is_done() and session.is_evaluation_missing():
            yield from _checked(session)
        is_best = yield from evaluate_if_due(session, should_stop)
        if session.saved != session.progress and (is_best or session.is_due(config.train.save_every)):
            yield from _checked(session)
            yield from save(session)
        reason = _reason_to_end(session, should_stop, stop_at)
        if reason is not None:
            break
        rate = learning_rate(session.state.counters.step + 1, config.optim, session.steps)
        with clock.stepping():
            result = optimize(session.state, rate=rate, clip=config.optim.clip)
        yield from _tell(session, result, rate, clock)
        yield from clock.overrun()
    if session.saved != session.progress:
        yield from _checked(session)
        yield from save(session)
    counters = session.state.counters
    yield Finished(
        step=counters.step,
        run=session.run,
        reason=reason,
        best_step=counters.best_step,
        best_nll=counters.best_nll,
        best_bits_per_byte=read_bits_per_byte(session.run, counters.best_step),
        best_score=session.best_score,
        last_score=session.last_score,
        mem_len=config.model.mem_len,
        is_best_lost=session.is_best_lost,
        has_valid=session.valid is not None,
        has_test=config.data.test is not None,
    )


def _checked(session: Session) -> Iterator[Event]:
    """Wait until the ids are known to be sound.

    Raises:
        UserError: they are not.
    """
    if session.check.is_done(TOLD_S):
        return
    yield Notice(f"{session.run.data_folder}: nothing is scored or saved before its ids are checked; waiting")
    while not session.check.is_done(REFRESH_S):
        yield Progress(CHECKING, session.check.n_read, session.check.n_bytes, "bytes")


def _reason_to_end(session: Session, should_stop: Callable[[], bool], stop_at: int | None) -> str | None:
    counters, train = session.state.counters, session.config.train
    if counters.step == session.steps and not session.is_evaluation_missing():
        return "length"
    if train.patience is not None and counters.n_since_best >= train.patience:
        return "patience"
    if should_stop():
        return "interrupted"
    if stop_at is not None and counters.step >= stop_at:
        return "stop_at"
    return None


# Steps


def _compile(session: Session, should_stop: Callable[[], bool]) -> Iterator[Event]:
    """Compile the step where that was asked for and steps are left, and say where it fails."""
    if not session.config.machine.compile or session.state.counters.step >= session.steps:
        return
    yield Progress("compiling the step", 0, 0, "steps", is_deaf=True)
    try:
        if should_stop():
            return
        fault = session.state.compile()
    except KeyboardInterrupt:
        if not should_stop():
            raise
        return  # the loop will end, and nothing has been trained since the last checkpoint
    yield Progress("compiling the step", 1, 1, "steps")
    yield from _told_uncompiled(fault)


def _told_uncompiled(fault: str | None) -> Iterator[Event]:
    if fault is not None:
        yield Notice(f"compile: failed, {fault}; going on uncompiled")


def _tell(session: Session, result: StepResult, rate: float, clock: "_Clock") -> Iterator[Event]:
    """Write and yield what a step measured."""
    counters = session.state.counters
    yield from _told_uncompiled(result.compile_fault)
    if result.fault is not None:
        yield from _skip(session, result, rate)
    elif counters.n_skipped_in_row:
        counters.n_skipped_in_row = 0
    is_logged = session.is_due(session.config.train.log_every)
    if is_logged or clock.is_stale():
        event = Stepped(
            step=counters.step,
            steps=session.steps,
            loss=result.loss,
            lr=rate,
            grad_norm=result.grad_norm,
            tokens=counters.tokens,
            tokens_per_s=clock.tokens_per_s(is_logged),
            elapsed_s=counters.elapsed_s,
            bits_per_byte=result.loss * _bits_per_byte_factor(session.info.splits["train"]),
            is_logged=is_logged,
        )
        if is_logged:
            names = ("step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "elapsed_s")
            append_metrics(session.run, {"event": "step", **{name: getattr(event, name) for name in names}})
        yield event
    if result.fault is None:
        yield from _watch(session, result.loss)


def _bits_per_byte_factor(split: SplitInfo) -> float:
    return split.n_tokens / (max(split.n_bytes, 1) * math.log(2))


def _skip(session: Session, result: StepResult, rate: float) -> Iterator[Event]:
    """Write and yield that a step was skipped, and end the run where that has no end.

    Raises:
        NonFinite: it was one too many.
    """
    counters, scaler = session.state.counters, session.state.scaler
    reason = result.fault or ""
    if result.is_overflow:
        assert scaler is not None
        counters.n_overflows += 1
        reason = f"fp16 overflow, scale now {scaler.get_scale():g}"
    else:
        counters.n_skipped += 1
        counters.n_skipped_in_row += 1
    append_metrics(session.run, {"event": "skip", "step": counters.step, "reason": reason})
    # A scale that finds its size overflows a few times in every run: said once, counted always.
    if not result.is_overflow or counters.n_overflows == 1:
        yield Skipped(counters.step, reason)
    if scaler is not None and result.is_overflow and scaler.get_scale() < SCALE_FLOOR:
        fault = "fp16 cannot hold the gradients"
        raise failure(session, fault, rate, result, remedy="--precision bf16 or a lower --lr may help")
    if counters.n_skipped_in_row >= SKIPS_IN_ROW:
        fault = f"{reason}, {SKIPS_IN_ROW} steps in a row"
        raise failure(session, fault, rate, result)


def _watch(session: Session, loss: float) -> Iterator[Event]:
    """Follow the smoothed loss, and say once when it is far above its best."""
    counters = session.state.counters
    before = loss if counters.smoothed is None else counters.smoothed
    counters.smoothed = SMOOTHING * before + (1 - SMOOTHING) * loss
    counters.lowest = min(counters.smoothed, math.inf if counters.lowest is None else counters.lowest)
    is_far = counters.smoothed > counters.lowest + max(0.3, 0.25 * counters.lowest)
    if is_far and not counters.is_alarmed:
        counters.is_alarmed = True
        has_best = counters.best_step is not None and not session.is_best_lost
        best = "" if not has_best else f"; the best checkpoint is of step {counters.best_step}"
        yield Notice(
            f"step {counters.step}: the loss has risen far above its best, {counters.lowest:.2f} to "
            f"{counters.smoothed:.2f} nats per token{best}; a lower --lr or a longer --warmup may help"
        )


class _Clock:
    """Measures steps apart from evaluations and saves, and the whole against the budget."""

    def __init__(self, session: Session, budget: Budget | None) -> None:
        self.session, self.budget = session, budget
        self.is_overrun_told = False
        self.started = time.monotonic()
        self.elapsed_before_s = session.state.counters.elapsed_s
        self.shown_at = -math.inf
        self.step_s = 0.0
        self.n_tokens = 0

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Time one step."""
        counters = self.session.state.counters
        begin, tokens = time.perf_counter(), counters.tokens
        yield
        self.step_s += time.perf_counter() - begin
        self.n_tokens += counters.tokens - tokens
        counters.elapsed_s = self.elapsed_before_s + time.monotonic() - self.started

    def is_stale(self) -> bool:
        """Say whether a progress bar would like to move."""
        return time.monotonic() - self.shown_at > REFRESH_S

    def tokens_per_s(self, is_logged: bool) -> float:
        """Return the speed since the last logged step, and start anew if this one is logged."""
        self.shown_at = time.monotonic()
        speed = self.n_tokens / max(self.step_s, 1e-9)
        if is_logged:
            self.step_s, self.n_tokens = 0.0, 0
        return speed

    def overrun(self) -> Iterator[Event]:
        """Say once that the run takes longer than it was asked to."""
        if self.budget is None or self.is_overrun_told:
            return
        elapsed_s, limit_s = time.monotonic() - self.budget.started, self.budget.limit_s
        if elapsed_s > OVERRUN * limit_s:
            self.is_overrun_told = True
            step, steps = self.session.state.counters.step, self.session.steps
            is_slower = self.started - self.budget.started < limit_s
            why = "this machine was faster when it was measured" if is_slower else "preparing took all of it"
            advice = "; Ctrl-C saves and ends" if step < steps else ""
            yield Notice(
                f"more than 10 % over the {minutes_text(limit_s / 60)} asked for, at step {step:,} of "
                f"{steps:,}; {why}{advice}"
            )
