"""From a run to its continuation."""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from txlcli import UserError
from txlcli.checkpoint import check_model, load_values, remedied
from txlcli.config import (
    DEFAULT,
    LENGTHS,
    Config,
    Settings,
    Sourced,
    build,
    dump,
    leaf,
    override,
    read_origins,
    read_settings,
    value_of,
)
from txlcli.data import Hashing, Look, StoreInfo, check_store, is_untouched, steps_per_epoch
from txlcli.device import choose_device, choose_precision
from txlcli.files import describe_error, shell_name, write_whole
from txlcli.plan import MINUTES, Facts, Known, Measured, last_eval_is_whole, minutes_text, steps_within
from txlcli.run import (
    Run,
    check_writable,
    read_asked,
    read_bits_per_byte,
    refuse_converted,
    sweep_run,
    writing,
)
from txlcli.tokenizer import load_tokenizer
from txlcli.train.cost import (
    Interrupted,
    check_disk,
    check_fits,
    leave_out_failed_compile,
    measure,
    without_length,
)
from txlcli.train.events import Budget, Event, Finished, Notice, Progress, Ready
from txlcli.train.ids import HASHED_S
from txlcli.train.optim import learning_rate
from txlcli.train.preparing import begin_again
from txlcli.train.request import choose_attention
from txlcli.train.session import RESTORE_REMEDY, TRAINED, find_saved, look_for_best, read_text, settle
from txlcli.train.state import Counters, read_counters


def resume(
    run: Run, changes: Settings, *, should_stop: Callable[[], bool] = lambda: False
) -> Iterator[Event]:
    """Make ready to continue a run from its last checkpoint and its own store.

    A run whose text is not prepared is prepared anew (`begin_again`).

    Args:
        run: The run.
        changes: What is set anew; only what `may_change` says, and written to the run's config.yaml.
        should_stop: Asked while the store is checked and steps are measured; once true, the events end
            without `Ready`.

    Yields:
        Notices about what differs from before, and last `Ready`, or `Finished` where nothing is left to do.

    Raises:
        UserError: something else is to be changed, the length is below the saved step, another process
            trains this run, its checkpoints are gone, it is damaged, so is its store (where nobody seems to
            have touched that, `train` finds it), or it cannot be written to.
    """
    started = time.monotonic()
    for name, sourced in changes.items():
        if not leaf(name).may_change:
            raise UserError(
                f"{leaf(name).flag_for(sourced.value) or 'CORPUS'}: cannot change on resume; leave it out, "
                f"or begin a new run: txl train -c {shell_name(run.config_path)}"
            )
    end = None
    with writing(run):
        try:
            for event in _make_ready(run, changes, started, should_stop):
                if isinstance(event, Ready | Finished):
                    end = event
                else:
                    yield event
        except Interrupted:
            return
        except OSError as error:
            raise UserError(f"{run.folder}: cannot be written; {describe_error(error)}") from error
    if end is not None:
        yield end  # only now: a training takes the lock itself


def _make_ready(
    run: Run, changes: Settings, started: float, should_stop: Callable[[], bool]
) -> Iterator[Event]:
    if read_asked(run) is not None:
        yield from begin_again(run, changes, should_stop=should_stop)
        return
    settings = read_settings(run.config_path)
    old = build(settings)
    refuse_converted(
        run,
        "which has no training to continue; begin one with its weights: "
        f"txl train CORPUS --init {shell_name(run.folder)}",
    )
    sweep_run(run)
    newest, saved = _read_saved(run)
    info, _ = read_text(run)
    if newest is not None:
        with remedied(RESTORE_REMEDY):
            check_model(newest, old.model, info.n_vocab)
    given = next((name for name in LENGTHS if name in changes), None)
    is_timed = given == "minutes" or (given is None and old.train.steps is None)
    # Steps that are timed read the ids, and take much longer than to check these; and what is set anew is
    # written only where the run can go on.
    is_checked = is_timed or bool(changes) or not is_untouched(run.folder, info, TRAINED)
    if is_checked:
        yield from _check(run, info, should_stop)
    yield from _corpus_notices(info, should_stop)
    if is_timed:
        compiles = value_of(override(settings, changes), "compile")
        yield Progress("measuring steps", 0, 0, "steps", is_deaf=compiles)
    settled = yield from _settle(run, override(settings, changes), given, info, saved, started, should_stop)
    reason = _reason_it_is_finished(settled.config, info, saved)
    if reason is None:
        check_disk(settled.config, info.n_vocab, run, "free some space, then resume again")
        check_writable(run)
    yield from _told_rate(old, settled.config, saved.step)
    origins = _write_changes(run, changes, settled)
    if reason is None:
        yield Ready(run, settled.config, origins, settled.budget, saved.step, is_checked)
    else:
        yield from _told_finished(run, settled.config, info, saved, reason)


def _read_saved(run: Run) -> tuple[Path | None, Counters]:
    """Find the last whole checkpoint and read how far it is; without one nothing is done yet.

    Training itself says where a newer one is damaged.
    """
    path, _ = find_saved(run)
    return path, Counters() if path is None else read_counters(load_values(path), path)


def _check(run: Run, info: StoreInfo, should_stop: Callable[[], bool]) -> Iterator[Progress]:
    for done in check_store(run.folder, info, TRAINED):
        yield Progress(done.stage, done.done_bytes, done.total_bytes, "bytes")
        if should_stop():
            raise Interrupted


class _Settled(NamedTuple):
    """All settings, the time that was asked for, if any, and whether compiling failed as steps were timed."""

    config: Config
    settings: Settings
    budget: Budget | None
    has_failed_compile: bool


def _settle(
    run: Run,
    settings: Settings,
    given: str | None,
    info: StoreInfo,
    saved: Counters,
    started: float,
    should_stop: Callable[[], bool],
) -> Generator[Event, None, _Settled]:
    """Choose attention and length; `given` names what the length was given in just now."""
    attention, told = choose_attention(settings)
    if "attention" not in settings or settings["attention"].value == "auto":
        settings = settings | {"attention": Sourced(attention, "plan: runs best here")}
    device = choose_device(value_of(settings, "device"))
    check_fits(without_length(settings), info.n_vocab, device, None)
    settings, budget, measured = _settle_length(run, settings, info, saved.step, started, should_stop)
    settings = yield from leave_out_failed_compile(settings, measured)
    config = build(settings)
    steps = config.train.steps
    assert steps is not None
    if steps < saved.step:
        place = f"{run.config_path}: steps" if given is None else f"--{given}"
        raise UserError(
            f"{place}: below the saved step; got {steps} steps, {run.folder} is at step {saved.step}; "
            f"give {saved.step} or more"
        )
    choose_precision(config.machine.precision, device, training=True)
    if told is not None:
        yield Notice(f"attention: {told}")
    has_failed = measured is not None and measured.compile_fault is not None
    return _Settled(config, settings, budget, has_failed)


def _settle_length(
    run: Run,
    settings: Settings,
    info: StoreInfo,
    saved: int,
    started: float,
    should_stop: Callable[[], bool],
) -> tuple[Settings, Budget | None, Measured | None]:
    """Turn epochs or minutes into steps; minutes count from now, and steps are measured."""
    known, config = Known(settings), without_length(settings)
    if known.has("steps"):
        return settings, None, None
    train, valid = info.splits["train"], info.splits.get("valid")
    if known.has("epochs"):
        epochs = known.number("epochs")
        n_stream = min(config.optim.batch_size, train.n_tokens - 1)
        per_epoch = steps_per_epoch(train.n_tokens, n_stream, config.model.tgt_len)
        steps = Sourced(max(1, round(epochs * per_epoch)), f"{epochs:g} epochs, on resume")
        return override(settings, {"steps": steps}), None, None
    minutes = known.number("minutes") if known.has("minutes") else MINUTES
    tokenizer = load_tokenizer(run.tokenizer_folder)
    measured = measure(
        run, config, tokenizer, length_s=60 * minutes, started=started, should_stop=should_stop
    )
    facts = Facts(
        n_bytes=0,
        n_characters=None,
        alphabet_size=0,
        script="none",
        device_kind=config.machine.device,
        has_bf16=False,
        has_muon=False,
        n_train_tokens=train.n_tokens,
        n_valid_tokens=0 if valid is None else valid.n_tokens,
    )
    more = steps_within(60 * minutes - measured.spent_s, known, facts, measured)
    origin = f"{minutes_text(minutes)} more at {measured.step_s:.3g} s a step, on resume"
    steps = Sourced(saved + more, origin)
    return override(settings, {"steps": steps}), Budget(started, 60 * minutes), measured


def _told_rate(old: Config, new: Config, step: int) -> Iterator[Notice]:
    """Say what another length does to the learning rate of the next step, if there is one."""
    before, now = old.train.steps, new.train.steps
    if before is None or now is None or now in (before, step):
        return
    rates = [learning_rate(step + 1, new.optim, steps) for steps in (before, now)]
    yield Notice(
        f"length {before:,} -> {now:,} steps: the learning rate of step {step + 1:,} "
        f"is {rates[1]:.4g} instead of {rates[0]:.4g}"
    )


def _write_changes(run: Run, changes: Settings, settled: _Settled) -> dict[str, str]:
    """Write what is set anew to the run's config.yaml; return where each setting comes from."""
    origins, settings = read_origins(run.config_path), settled.settings
    changed = {name for name in settings if name in changes}
    if changes.keys() & set(LENGTHS):
        changed |= set(LENGTHS)
    if settled.has_failed_compile:
        changed.add("compile")
    if changed:
        origins |= {name: settings[name].origin if name in settings else DEFAULT for name in changed}
        write_whole(run.config_path, dump(settled.config, origins).encode())
    return origins


def _told_finished(
    run: Run, config: Config, info: StoreInfo, saved: Counters, reason: str
) -> Iterator[Event]:
    """Do what ends a training, which may have been killed just before it did this itself, and say so."""
    lost_best, notices = look_for_best(run, saved)
    settle(run, saved, config.train.keep, lost_best)
    yield from notices
    yield Notice(
        f"{run.folder}: is finished at step {saved.step:,}; a larger --steps continues it"
        if reason == "length"
        else f"{run.folder}: ended at step {saved.step:,}, its evaluations had stopped improving"
    )
    yield Finished(
        step=saved.step,
        run=run,
        reason=reason,
        best_step=saved.best_step,
        best_nll=saved.best_nll,
        best_bits_per_byte=read_bits_per_byte(run, saved.best_step),
        best_score=None,
        last_score=None,
        mem_len=config.model.mem_len,
        is_best_lost=lost_best is not None,
        has_valid="valid" in info.splits,
        has_test=config.data.test is not None,
    )


def _reason_it_is_finished(config: Config, info: StoreInfo, saved: Counters) -> str | None:
    train, valid = config.train, info.splits.get("valid")
    if train.patience is not None and saved.n_since_best >= train.patience:
        return "patience"
    if saved.step < (train.steps or 0):
        return None
    if valid is not None and valid.n_tokens >= 2:
        is_scored = saved.evaluated_step == saved.step
        wants_whole = last_eval_is_whole(valid.n_tokens, saved.tokens)
        if not is_scored or (wants_whole and not saved.is_scored_whole):
            return None
    return "length"


def _corpus_notices(info: StoreInfo, should_stop: Callable[[], bool]) -> Iterator[Event]:
    """Say when the text has changed since it was encoded; one that is gone is nobody's concern."""
    there = []
    for source in info.corpus:
        with suppress(OSError):
            if source.path != "-" and Path(source.path).is_file():
                there.append((source, Path(source.path).stat()))
    changed = [source.path for source, now in there if now.st_size != source.n_bytes]
    touched = [source.path for source, now in there if now.st_mtime_ns != source.mtime_ns]
    # A touched file may hold what it held; the hash is of all files end to end.
    is_complete = len(there) == len(info.corpus)
    if not changed and touched and is_complete:
        now_sha256 = yield from _hash(info, should_stop)
        changed = touched if now_sha256 not in (None, info.sha256) else []
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        yield Notice(
            f"{changed[0]}{more}: has changed since this run encoded it; the run goes on with its own copy, "
            "the new text needs a new run"
        )


def _hash(info: StoreInfo, should_stop: Callable[[], bool]) -> Generator[Event, None, str | None]:
    """Hash the files that the text came from, as they are now; None: one of them can no longer be read."""
    look = Look(info.corpus, tuple(Path(source.path) for source in info.corpus), 0)
    with Hashing({"train": look}) as hashing:
        while not hashing.is_done(HASHED_S):
            yield Progress("comparing the text with the ids", hashing.n_read, hashing.n_bytes, "bytes")
            if should_stop():
                raise Interrupted
        try:
            return hashing.result()["train"]
        except UserError:
            return None
