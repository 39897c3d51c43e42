"""`txl train`."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from txlcli import UserError, config
from txlcli.cli.app import command
from txlcli.cli.errors import Failed
from txlcli.cli.flags import QuietFlag, argument, option, takes_settings
from txlcli.cli.signals import Interruption, listening
from txlcli.config import Settings
from txlcli.report import Screen, Training

if TYPE_CHECKING:
    from txlcli.train import Event


@command(
    examples=[
        "txl train corpus.txt",
        "txl train books/ --minutes 30 --tokenizer char --out runs/books",
        "txl train --resume runs/books --steps 20000",
    ]
)
@takes_settings
def train(
    corpus: Annotated[
        list[str] | None,
        argument("CORPUS", help="text files, folders, or - for standard input"),
    ] = None,
    *,
    config_file: Annotated[
        str | None, option("--config", "-c", metavar="NAME|FILE", help="a preset, or a YAML file of settings")
    ] = None,
    out: Annotated[
        str | None,
        option("--out", "-o", metavar="DIR", help="the run's folder, new or empty; else runs/NAME"),
    ] = None,
    resume: Annotated[str | None, option("--resume", metavar="DIR", help="continue this run")] = None,
    stop_at: Annotated[
        int | None,
        option(
            "--stop-at",
            metavar="STEP",
            help="save there and end; length and rates stay those of all steps",
            number=int,
        ),
    ] = None,
    is_dry_run: Annotated[
        bool, option("--dry-run", help="show the plan and the first line in pieces; write nothing")
    ] = False,
    is_quiet: QuietFlag = False,
    **flags: Any,  # one for each setting: its text, True or False; None where it is not given
) -> None:
    """Train a model on text.

    Reads CORPUS and writes a run folder: settings, tokenizer, the text as ids, metrics and checkpoints.
    What no flag sets is planned from the text and the machine; with -c, the file's values and plain defaults
    count instead. Ctrl-C saves and ends; --resume continues exactly.
    """
    if stop_at is not None and stop_at < 1:
        raise UserError(f"--stop-at: must be a step of at least 1; got {stop_at}")
    given = config.from_flags({"corpus": tuple(corpus or ()), **flags})
    if resume is not None:
        for name, value in (
            ("CORPUS", corpus),
            ("--config", config_file),
            ("--out", out),
            ("--dry-run", is_dry_run),
        ):
            if value:
                raise UserError(f"{name}: cannot go with --resume; the run has its own text and settings")
    settings = given
    if config_file is not None:
        settings = config.override(config.read_settings(config.find_preset(config_file)), given)
    if resume is None and "corpus" not in settings:
        raise UserError(
            "CORPUS: missing; name text files, folders, or - for standard input; see txl train --help"
        )
    with (
        listening("stopping, saving what there is; once more to stop at once") as interruption,
        Training(
            Screen.of(sys.stderr, is_quiet=is_quiet), Screen.of(sys.stdout), is_dry_run=is_dry_run
        ) as drawing,
    ):
        for event in _events(
            settings, resume, out, stop_at, is_dry_run, config_file is not None, interruption
        ):
            interruption.is_raised = False
            try:
                drawing.show(event)
            except OSError as error:
                from txlcli.train import Finished

                if isinstance(event, Finished) and (
                    event.reason != "interrupted" or not isinstance(error, BrokenPipeError)
                ):
                    raise
                # Whoever watched is gone, or their disk is full: the run is saved before the command ends.
                drawing.hush()
                interruption.stop()
            interruption.is_raised = _is_deaf(event)
    interruption.leave()


def _is_deaf(event: "Event") -> bool:
    """Say whether nothing will ask for the interruption until the next event."""
    from txlcli.train import Progress

    return isinstance(event, Progress) and event.is_deaf


def _events(
    settings: Settings,
    resume: str | None,
    out: str | None,
    stop_at: int | None,
    is_dry_run: bool,
    is_from_file: bool,
    interruption: Interruption,
) -> "Iterator[Event]":
    """Prepare and train, yielding what happens."""
    from txlcli import train as training
    from txlcli.run import open_run

    try:
        if resume is not None:
            prepared = training.resume(open_run(resume), settings, should_stop=interruption)
        else:
            prepared = training.begin(
                settings,
                out=None if out is None else Path(out),
                dry_run=is_dry_run,
                should_stop=interruption,
                is_from_file=is_from_file,
            )
        for event in prepared:
            yield event
            if isinstance(event, training.Ready):
                yield from training.train(
                    event.run,
                    event.config,
                    should_stop=interruption,
                    stop_at=stop_at,
                    budget=event.budget,
                    is_checked=event.is_checked,
                    is_taken=event.is_taken,
                )
    except training.NonFinite as error:
        raise Failed(str(error)) from error
