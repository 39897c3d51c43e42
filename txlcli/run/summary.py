"""What `txl runs` shows of a run."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from txlcli import UserError
from txlcli.config import Config, build, read_settings
from txlcli.files import shell_name
from txlcli.run.checkpoints import list_checkpoints, read_pointers
from txlcli.run.conversion import read_conversion
from txlcli.run.folder import Run, read_asked
from txlcli.run.metrics import read_bits_per_byte
from txlcli.tokenizer import load_tokenizer


@dataclass(frozen=True)
class RunSummary:
    """What `txl runs` shows of a run."""

    run: Run
    config: Config
    tokenizer: str
    """Its kind; `none` in a converted run that has none."""
    n_vocab: int
    step: int | None
    """The last saved step; None: nothing was saved yet."""
    steps: int | None
    """The length of the run."""
    best_step: int | None
    best_nll: float | None
    best_bits_per_byte: float | None
    n_bytes: int
    """Size on disk."""


def describe_run(run: Run) -> RunSummary:
    """Summarize a run for `txl runs`.

    Raises:
        UserError: a file of the run is missing or damaged.
    """
    if read_asked(run) is not None:
        raise UserError(
            f"{run.folder}: its text is not prepared; if nothing is at it, "
            f"`txl train --resume {shell_name(run.folder)}` begins anew"
        )
    config = build(read_settings(run.config_path))
    conversion = read_conversion(run)
    if conversion is None or conversion.has_tokenizer:
        tokenizer = load_tokenizer(run.tokenizer_folder)
        kind, n_vocab = tokenizer.kind, tokenizer.n_vocab
    else:
        kind, n_vocab = "none", conversion.n_vocab
    pointers = read_pointers(run)
    steps = list_checkpoints(run)
    return RunSummary(
        run=run,
        config=config,
        tokenizer=kind,
        n_vocab=n_vocab,
        step=steps[-1] if steps else None,
        steps=config.train.steps,
        best_step=pointers.best,
        best_nll=pointers.best_nll,
        best_bits_per_byte=read_bits_per_byte(run, pointers.best),
        n_bytes=_size(run.folder),
    )


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            # A training that goes on may just have pruned it.
            with suppress(FileNotFoundError):
                total += Path(parent, name).lstat().st_size
    return total
