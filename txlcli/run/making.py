"""The folder of a new run, made and undone."""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from txlcli import UserError
from txlcli.files import describe_error, is_folder, look_at, shell_name, sync_folder, write_whole
from txlcli.run.folder import RUNS, Run
from txlcli.run.writer import LOCK

_NAME_LIMIT_BYTES = 200
_PROBE = ".write-test"
_BEGUN_NAME = re.compile(r"\.(\.write-test|config\.yaml)\.[0-9a-f]{8}\.tmp")


def new_run(path: Path | None, stem: str) -> Run:
    """Make the folder of a new run and test that it can be written to.

    Args:
        path: The folder that was asked for; it may exist if there is nothing in it, or only what a process
            left that was killed in here. None: `runs/<stem>`, or the first free of `runs/<stem>-2`,
            `runs/<stem>-3`, ...
        stem: The corpus' name without its ending.

    Raises:
        UserError: the folder is in use or cannot be written to. Nothing is left behind.
    """
    run = _make_numbered(_name_from(stem)) if path is None else _make_given(path)
    probe = run.folder / _PROBE
    try:
        for folder in run.made:
            sync_folder(folder.parent)
        write_whole(probe, b"txl\n")
        probe.unlink(
            missing_ok=True
        )  # another that begins here at this moment has the same; the lock decides
        run.checkpoints_folder.mkdir(exist_ok=True)
    except (OSError, UserError) as error:
        discard_run(run)
        raise _cannot_make(run.folder, error) from error
    return run


def check_writable(run: Run) -> None:
    """Test that a run can be saved to, before work is done that would be lost.

    Raises:
        UserError: it cannot.
    """
    probe = run.checkpoints_folder / f"{_PROBE}.tmp"  # which is swept, should this process be killed
    try:
        run.checkpoints_folder.mkdir(exist_ok=True)
        write_whole(probe, b"txl\n")
        probe.unlink()
    except (OSError, UserError) as error:
        cause = error.__cause__ if isinstance(error, UserError) else error
        reason = describe_error(cause) if isinstance(cause, OSError) else str(error)
        raise UserError(
            f"{run.checkpoints_folder}: cannot be written, so nothing would be saved; {reason}; "
            "see to its permissions and its disk, then resume again"
        ) from error


def discard_run(run: Run) -> None:
    """Remove a run that came to nothing, and the folders that were made for it.

    Only for a run from `new_run`, whose folder was absent or empty before.
    """
    # What makes it a run goes last: one whose removal is cut short can still be resumed or removed by name.
    for entry in sorted(run.folder.iterdir(), key=lambda entry: entry == run.config_path):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            with suppress(OSError):
                entry.unlink()
    for folder in run.made:
        try:
            folder.rmdir()
        except OSError:
            break  # somebody else has put something there meanwhile


def _name_from(stem: str) -> str:
    while len(os.fsencode(stem)) > _NAME_LIMIT_BYTES:
        stem = stem[:-1]
    return stem if stem.strip(".") else "corpus"


def _make_numbered(name: str) -> Run:
    made: tuple[Path, ...] = () if look_at(RUNS) else (RUNS,)
    number = 1
    while True:
        folder = RUNS / (name if number == 1 else f"{name}-{number}")
        try:
            RUNS.mkdir(exist_ok=True)
            # Two trainings that start at once must not share a folder: mkdir fails for the second.
            folder.mkdir()
        except FileExistsError:
            if not is_folder(RUNS):
                raise UserError(f"{RUNS}: a file has this name; name a folder with --out DIR") from None
            number += 1
        except OSError as error:
            raise _cannot_make(folder, error) from error
        else:
            return Run(folder, (folder, *made))


def _make_given(path: Path) -> Run:
    try:
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        is_empty = all(_is_left_over(entry) for entry in path.iterdir())
    except OSError as error:
        raise _cannot_make(path, error) from error
    if not is_empty:
        is_run = look_at(path / "config.yaml") is not None
        remedy = f"name another, or continue with `--resume {shell_name(path)}`" if is_run else "name another"
        raise UserError(f"--out: `{path}` exists and is not empty; {remedy}")
    return Run(path, tuple(missing))


def _is_left_over(entry: Path) -> bool:
    """Say whether it is what is in a run's folder before `config.yaml` is."""
    if entry.name == "checkpoints":
        return entry.is_dir() and next(entry.iterdir(), None) is None
    return entry.name in (_PROBE, LOCK) or _BEGUN_NAME.fullmatch(entry.name) is not None


def _cannot_make(folder: Path, error: OSError | UserError) -> UserError:
    reason = describe_error(error) if isinstance(error, OSError) else str(error).rpartition("; ")[2]
    return UserError(f"{folder}: cannot write a run here; {reason}; name another folder with --out DIR")
