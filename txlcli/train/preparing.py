"""From a corpus to a run that is ready to train."""

import os
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from txlcli import UserError
from txlcli.config import (
    DEFAULT,
    FLAG,
    LEAVES,
    Config,
    Settings,
    build,
    dump,
    dump_settings,
    override,
    read_origins,
    read_settings,
    value_of,
)
from txlcli.device import has_bf16
from txlcli.files import describe_error, shell_name, write_whole
from txlcli.plan import (
    Facts,
    Known,
    Measured,
    changed_by_plan,
    fit_streams,
    plan_length,
    plan_text,
    plan_vocabulary,
    run_s,
)
from txlcli.run import RUNS, Run, discard_run, new_run, read_asked, sweep_run, write_asked, writing
from txlcli.tokenizer import Tokenizer
from txlcli.train.cost import (
    Interrupted,
    check_fits,
    is_timed,
    leave_out_failed_compile,
    measure,
    without_length,
)
from txlcli.train.events import Budget, Event, Notice, Planned, Progress, Ready
from txlcli.train.ids import encode, make_tokenizer, take
from txlcli.train.optim import has_muon
from txlcli.train.place import Place, clear
from txlcli.train.request import Request
from txlcli.train.summary import (
    first_line,
    summarize,
    told_clusters,
    told_compile_time,
    told_short_streams,
    told_vocabulary,
)
from txlcli.train.texts import Texts, find_texts


def begin(
    settings: Settings,
    *,
    out: Path | None = None,
    dry_run: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    is_from_file: bool | None = None,
) -> Iterator[Event]:
    """Prepare a new run: find and survey the text, plan, make vocabulary and store, settle the length.

    Args:
        settings: What flags and file set; the corpus among it.
        out: The run's folder; None: a free name under `runs/`.
        dry_run: Plan only: the events end with the plan and the first line, and nothing is left on disk.
        should_stop: Asked during preparation; once true, the events end without `Ready`.
        is_from_file: A configuration file decides what flags leave open, and not the plan; None: as the
            origins of `settings` tell.

    Yields:
        Events, the last of them `Ready`. Unless it comes the run's folder is removed again; but where the
        user stops, one that holds all of standard input stays, and can be resumed.

    Raises:
        UserError: the text, the settings or the machine do not allow it.
    """
    started = time.monotonic()
    if is_from_file is None:
        is_from_file = any(sourced.origin != FLAG for sourced in settings.values())
    request = Request.of(settings, is_from_file, started, should_stop)

    locks, kept = ExitStack(), list[Run]()

    def undo(run: Run) -> None:
        if should_stop() and run.stdin_path.exists():  # nobody else may have that text
            clear(run)
            kept.append(run)
        else:
            discard_run(run)

    def make(stack: ExitStack, paths: tuple[str, ...]) -> Run:
        if dry_run:
            return Run(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="txl-"))))
        run = new_run(out, _stem(paths[0]) if paths else "corpus")
        # Another process may have begun in the same folder just now, which is then its own to discard.
        locks.enter_context(writing(run))
        stack.callback(undo, run)
        sweep_run(run)
        write_asked(run, dump_settings(settings), is_from_file=is_from_file)
        return run

    beside = RUNS if out is None else out.parent
    with locks:
        ready = yield from _until_ready(request, Place(make, beside, is_dry=dry_run))
    for run in kept:
        resume = f"txl train --resume {shell_name(run.folder)}"
        yield Notice(f"{run.folder}: keeps the text of standard input; `{resume}` prepares it anew")
    if ready is not None:
        yield ready  # only now: a training takes the lock itself


def begin_again(
    run: Run, changes: Settings, *, should_stop: Callable[[], bool] = lambda: False
) -> Iterator[Event]:
    """Prepare a run whose preparation was cut off, from the texts that its config.yaml names.

    What was there of it is removed. Unless `Ready` comes the run can be begun again once more.

    Args:
        run: The run; this process holds its lock.
        changes: What is set anew.
        should_stop: As for `begin`.

    Raises:
        UserError: as `begin`; or its text came through standard input and is not all there.
    """
    started = time.monotonic()
    is_from_file = read_asked(run)
    assert is_from_file is not None, "the run is not prepared"
    origins = read_origins(run.config_path)
    asked = {
        name: replace(sourced, origin=origins.get(name, sourced.origin))
        for name, sourced in read_settings(run.config_path).items()
    }
    # Before any is read: whoever wrote the run may not be whoever goes on with it.
    others = [value_of(asked, name) for name in ("valid", "test", "init")]
    names = ", ".join([*value_of(asked, "corpus"), *filter(None, others)])
    yield Notice(f"{run.folder}: its text was not prepared to the end; it is prepared anew, from {names}")
    request = Request.of(override(asked, changes), is_from_file, started, should_stop)

    def undo() -> None:
        if read_asked(run) is not None:  # else it failed after the last thing to do: all is there
            clear(run)

    def make(stack: ExitStack, paths: tuple[str, ...]) -> Run:
        clear(run)
        stack.callback(undo)
        run.checkpoints_folder.mkdir(exist_ok=True)
        return run

    ready = yield from _until_ready(request, Place(make, run.folder.parent, stdin_copy=run.stdin_path))
    if ready is not None:
        yield ready


def _until_ready(request: Request, place: Place) -> Generator[Event, None, Ready | None]:
    with ExitStack() as stack:
        try:
            ready = yield from _prepare(request, place, stack)
        except Interrupted:
            return None
        except OSError as error:
            where = place.beside if error.filename is None else os.fsdecode(error.filename)
            raise UserError(f"{where}: the run cannot be prepared; {describe_error(error)}") from error
        if ready is not None:
            stack.pop_all()  # from here on the folder is a run, whatever happens to its training
    return ready


def _prepare(request: Request, place: Place, stack: ExitStack) -> Generator[Event, None, Ready | None]:
    """Do all of `begin` but its last event; `stack` holds what must be undone unless that event comes."""
    is_dry = place.is_dry
    yield from request.notices
    texts = yield from find_texts(request, place, stack)
    run, facts = texts.run, _facts(request, texts)
    settings = plan_text(request.settings, facts, from_file=request.is_from_file)
    taken = yield from take(request, settings, texts)
    tokenizer = (yield from make_tokenizer(request, settings, texts)) if taken is None else taken.tokenizer
    yield from told_vocabulary(request, tokenizer)
    facts = replace(facts, n_vocab=tokenizer.n_vocab)
    settings = plan_vocabulary(settings, facts, from_file=request.is_from_file)
    yield from told_clusters(settings)
    info = (yield from encode(request, texts, tokenizer)) if taken is None else taken.info
    valid = info.splits.get("valid")
    facts = replace(
        facts, n_train_tokens=info.splits["train"].n_tokens, n_valid_tokens=valid.n_tokens if valid else 0
    )
    fitted = settings | fit_streams(Known(settings), facts)
    check_fits(without_length(fitted), tokenizer.n_vocab, request.device, None if is_dry else run)

    config, planned, budget, expected_s = yield from _settle_length(request, run, settings, facts, tokenizer)
    yield Planned(summarize(config, planned, texts.found, info, tokenizer, request.device, expected_s))
    if is_dry:
        yield first_line(texts, tokenizer)
        return None
    origins = {leaf.name: planned[leaf.name].origin if leaf.name in planned else DEFAULT for leaf in LEAVES}
    write_whole(run.config_path, dump(config, origins).encode())
    is_checked = taken is None or taken.is_checked
    return Ready(run, config, origins, budget, is_checked=is_checked, is_taken=taken is not None)


class _Settled(NamedTuple):
    """All settings, where each comes from, and the times that were asked for and are expected, if any."""

    config: Config
    planned: Settings
    budget: Budget | None
    expected_s: float | None


def _settle_length(
    request: Request, run: Run, settings: Settings, facts: Facts, tokenizer: Tokenizer
) -> Generator[Event, None, _Settled]:
    """Plan the length; a few steps are timed where it was asked for as a time."""
    budget, measured = None, None

    def time_on_this_machine(wanted: Settings) -> Measured:
        nonlocal budget, measured
        budget = Budget(request.started, 60 * Known(wanted).number("minutes"))
        measured = measure(
            run,
            without_length(wanted),
            tokenizer,
            length_s=budget.limit_s,
            started=request.started,
            should_stop=request.should_stop,
        )
        return measured

    if is_timed(settings):
        is_compiled = value_of(settings, "compile")
        stage = "compiling and timing a few steps" if is_compiled else "timing a few steps"
        yield Progress(stage, 0, 0, "steps", is_deaf=is_compiled)
    planned = plan_length(settings, facts, time_on_this_machine, from_file=request.is_from_file)
    request.pause()
    for text in changed_by_plan(request.settings, planned):
        yield Notice(text)
    planned = yield from leave_out_failed_compile(planned, measured)
    config = build(planned)
    yield from told_short_streams(config, facts)
    if measured is None or budget is None:
        return _Settled(config, planned, None, None)
    yield from told_compile_time(measured, budget)
    assert config.train.steps is not None
    expected_s = measured.spent_s + run_s(config.train.steps, Known(planned), facts, measured)
    return _Settled(config, planned, budget, expected_s)


def _stem(path: str) -> str:
    return "stdin" if path == "-" else Path(path).resolve().stem


def _facts(request: Request, texts: Texts) -> Facts:
    found = texts.survey
    return Facts(
        n_bytes=found.n_bytes,
        n_characters=found.n_characters,
        alphabet_size=found.alphabet_size,
        script=found.script,
        device_kind=request.device.type,
        has_bf16=has_bf16(request.device),
        has_muon=has_muon(),
        attention=request.attention,
    )
