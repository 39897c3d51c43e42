"""Where a run is prepared, and how it is left empty again."""

import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from txlcli.run import Run, sweep_run


@dataclass(frozen=True)
class Place:
    """Where a run is prepared.

    Attributes:
        make: Makes its folder, which is undone with the stack; the corpus' paths may give it its name.
        beside: The folder whose runs may have the same text.
        is_dry: It is only planned.
        stdin_copy: Where standard input was copied to before; None: it is read.
    """

    make: Callable[[ExitStack, tuple[str, ...]], Run]
    beside: Path
    is_dry: bool = False
    stdin_copy: Path | None = None


def clear(run: Run) -> None:
    """Remove what a preparation that was cut off has left."""
    sweep_run(run)
    shutil.rmtree(run.data_folder, ignore_errors=True)
    for path in run.tokenizer_folder.glob("tokenizer.*"):
        with suppress(OSError):  # a folder that somebody has put there
            path.unlink()
