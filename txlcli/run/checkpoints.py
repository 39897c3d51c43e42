"""The folders of a run's checkpoints, and the pointers to the best and the last of them."""

import re
from dataclasses import dataclass
from pathlib import Path

from txlcli import UserError
from txlcli.files import describe_error, discard_folder, look_at, read_bounded, shell_name, write_whole
from txlcli.run.folder import Run
from txlcli.run.json_object import dump_json, parse_json

_POINTERS_LIMIT_BYTES = 4096
_STEP_NAME = re.compile(r"step-(\d{7,18})", re.ASCII)


@dataclass(frozen=True)
class Pointers:
    """The steps of the best and the last checkpoint, and the best's held-out nats per token."""

    best: int | None = None
    last: int | None = None
    best_nll: float | None = None


def list_checkpoints(run: Run) -> list[int]:
    """List the steps of the checkpoints on disk, ascending."""
    try:
        names = [entry.name for entry in run.checkpoints_folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{run.checkpoints_folder}: cannot be read; {describe_error(error)}") from error
    return sorted(int(match[1]) for name in names if (match := _STEP_NAME.fullmatch(name)))


def step_of(checkpoint: Path) -> int:
    """Read the step off a checkpoint's folder."""
    match = _STEP_NAME.fullmatch(checkpoint.name)
    assert match, f"{checkpoint} is not the folder of a checkpoint"
    return int(match[1])


def choose_checkpoint(run: Run, which: str = "best") -> Path:
    """Find the checkpoint that `which` names: `best`, `last` or a step.

    Raises:
        UserError: there is no such checkpoint; the message names those that are there.
    """
    # Read first: a step that it names is there when it is read, and in the list unless it goes just then.
    pointers = read_pointers(run) if which == "best" else Pointers()
    steps = list_checkpoints(run)
    if not steps:
        raise UserError(
            f"{run.folder}: has no checkpoint yet; "
            f"continue it with `txl train --resume {shell_name(run.folder)}`"
        )
    if which == "last":
        return run.checkpoint_path(steps[-1])
    if which == "best":
        step = steps[-1] if pointers.best is None else pointers.best
        remedy = "take another with --checkpoint last"
    elif which.isascii() and which.isdigit():
        step = int(which[:19])
        remedy = f"it has {_enumerate(steps)}"
    else:
        raise UserError(f"--checkpoint: must be best, last or a step; got `{which}`")
    if step not in steps:
        raise UserError(f"{run.folder}: no checkpoint of step {step}; {remedy}")
    return run.checkpoint_path(step)


def _enumerate(steps: list[int]) -> str:
    shown = steps if len(steps) <= 8 else [*steps[:3], *steps[-4:]]
    texts = [str(step) for step in shown]
    if len(shown) < len(steps):
        texts.insert(3, "...")
    return ", ".join(texts)


def read_pointers(run: Run) -> Pointers:
    """Read which steps are best and last.

    Raises:
        UserError: the file is damaged.
    """
    path = run.pointers_path
    if look_at(path) is None:
        return Pointers()
    values = parse_json(read_bounded(path, _POINTERS_LIMIT_BYTES), path)
    best, last, best_nll = (values.get(name) for name in ("best", "last", "best_nll"))
    is_sound = (
        all(step is None or (type(step) is int and step >= 0) for step in (best, last))
        and (best_nll is None or type(best_nll) in (int, float))
        and set(values) == {"best", "last", "best_nll"}
    )
    if not is_sound:
        raise UserError(
            f"{path}: damaged; must hold `best`, `best_nll` and `last`; "
            "delete it, and best is last until the next evaluation"
        )
    return Pointers(best, last, None if best_nll is None else float(best_nll))


def write_pointers(run: Run, pointers: Pointers) -> None:
    """Write which steps are best and last, whole or not at all."""
    values = {"best": pointers.best, "last": pointers.last, "best_nll": pointers.best_nll}
    write_whole(run.pointers_path, dump_json(values))


def prune_checkpoints(run: Run, keep: int, best: int | None = None) -> list[int]:
    """Delete all checkpoints but the newest `keep` and the best; return the steps that went.

    Those beyond the last one are damaged, since training went back behind them: they are left for it to
    replace, and do not count.

    Args:
        run: The run.
        keep: How many of the newest stay.
        best: The best as the training knows it: it stays even where the pointers do not name it any more,
            because it cannot be read.
    """
    pointers, steps = read_pointers(run), list_checkpoints(run)
    done = [step for step in steps if pointers.last is None or step <= pointers.last]
    kept = {*done[-keep:], pointers.best, best}
    gone = [step for step in done if step not in kept]
    for step in gone:
        discard_folder(run.checkpoint_path(step))
    return gone
