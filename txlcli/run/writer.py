"""The one process that writes to a run."""

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from txlcli import UserError
from txlcli.files import describe_error, locked, remove_leftovers
from txlcli.run.checkpoints import list_checkpoints
from txlcli.run.folder import Run

LOCK = ".lock"


@contextmanager
def writing(run: Run) -> Iterator[str | None]:
    """Be the one process that writes to a run while the block runs; those that only read it need not ask.

    Yields:
        What to tell the user where the file system has no locks; None: nothing.

    Raises:
        UserError: another process writes to it, which is named; it cannot be written to; or a part of it that
            is written to is a link.
    """
    _refuse_links(run)
    with locked(run.folder / LOCK, str(run.folder)) as has_lock:
        text = f"{run.folder}: its file system has no locks; see to it that nothing else trains it meanwhile"
        yield None if has_lock else text


def _refuse_links(run: Run) -> None:
    for path, is_kind in (
        (run.data_folder, stat.S_ISDIR),
        (run.checkpoints_folder, stat.S_ISDIR),
        (run.metrics_path, stat.S_ISREG),
        (run.stdin_path, stat.S_ISREG),
        *((run.checkpoint_path(step), stat.S_ISDIR) for step in list_checkpoints(run)),
    ):
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UserError(f"{path}: cannot be read; {describe_error(error)}") from error
        if not is_kind(mode):
            kind = "folder" if is_kind is stat.S_ISDIR else "file"
            raise UserError(
                f"{path}: is a link or no {kind}, and a run is written only within its own folder; "
                "put the thing itself there, or link the whole run"
            )


def sweep_run(run: Run) -> list[Path]:
    """Remove what a killed process left under temporary names; only for the run's one writer.

    Returns:
        What could not be removed.
    """
    folders = [run.folder, run.checkpoints_folder, run.data_folder]
    return [path for folder in folders if folder.is_dir() for path in remove_leftovers(folder)]
