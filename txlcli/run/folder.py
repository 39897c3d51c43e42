"""The folder of a run: the names in it, and how to find it."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from txlcli import UserError
from txlcli.files import describe_error, describe_kind, is_folder, look_at, read_bounded, write_whole

RUNS = Path("runs")
_ASKED = {
    False: "# As asked for; the text is yet to be prepared, and what this leaves open to be planned.",
    True: "# As asked for; the text is yet to be prepared, and what this leaves open takes its default.",
}
"""The first line of config.yaml until the text is prepared; whether it came of a configuration file."""
_CONFIG_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True)
class Run:
    """A run folder and the names in it."""

    folder: Path
    made: tuple[Path, ...] = field(default=(), compare=False, repr=False)
    """The folders that `new_run` had to make for it, innermost first."""

    @property
    def config_path(self) -> Path:
        """The resolved settings."""
        return self.folder / "config.yaml"

    @property
    def tokenizer_folder(self) -> Path:
        """Where `tokenizer.json` lies: the run folder itself."""
        return self.folder

    @property
    def data_folder(self) -> Path:
        """The store of token ids."""
        return self.folder / "data"

    @property
    def metrics_path(self) -> Path:
        """What happened, one JSON object a line."""
        return self.folder / "metrics.jsonl"

    @property
    def checkpoints_folder(self) -> Path:
        """Where the checkpoints lie, one folder a step."""
        return self.folder / "checkpoints"

    @property
    def pointers_path(self) -> Path:
        """The small file that names best and last."""
        return self.folder / "pointers.json"

    @property
    def stdin_path(self) -> Path:
        """What came through standard input, if the text did."""
        return self.folder / "stdin.txt"

    @property
    def conversion_path(self) -> Path:
        """What only a converted run has."""
        return self.folder / "converted.json"

    def checkpoint_path(self, step: int) -> Path:
        """The folder of the checkpoint of `step`, there or not."""
        return self.checkpoints_folder / f"step-{step:07d}"


def open_run(path: str | Path) -> Run:
    """Open an existing run.

    Raises:
        UserError: `path` is not a run; the message says what is missing.
    """
    if path == "":  # as a path that would be the working folder
        raise UserError(f"run: its name is empty; give its folder; `txl runs` lists those under {RUNS}/")
    folder = Path(path)
    if look_at(folder) is None:
        raise UserError(f"{folder}: no such run folder; `txl runs` lists those under {RUNS}/")
    if not is_folder(folder):
        raise UserError(f"{folder}: not a run but a file; name the run's folder")
    config = look_at(folder / "config.yaml")
    if config is not None and describe_kind(config.st_mode) is not None:
        raise UserError(
            f"{folder}: not a run; its config.yaml is {describe_kind(config.st_mode)}, not a file"
        )
    if config is None:
        raise UserError(
            f"{folder}: not a run, it has no config.yaml; `txl train` makes one, `txl runs` lists them"
        )
    return Run(folder)


def list_runs(root: Path = RUNS) -> list[Run]:
    """List the runs directly under `root`, by name; also such as cannot be read, which whoever reads is told.

    Raises:
        UserError: `root` is no folder that can be read.
    """
    try:
        # os.path's forms are false, not errors, for a folder that is closed to us: it hides no other run.
        return [
            Run(folder)
            for folder in sorted(root.iterdir())
            if os.path.lexists(folder / "config.yaml")
            or (os.path.isdir(folder) and not os.access(folder, os.X_OK))  # noqa: PTH112
        ]
    except OSError as error:
        raise UserError(
            f"{root}: no folder of runs here ({describe_error(error)}); train one with `txl train FILE`"
        ) from error


def latest_run(root: Path = RUNS) -> Run:
    """Find the run under `root` that saved last.

    Raises:
        UserError: there is none with a checkpoint.
    """
    saved = [(_saved_at(run), run.folder) for run in list_runs(root)] if is_folder(root) else []
    moment, folder = max(saved, default=(-1, root))
    if moment < 0:
        raise UserError(
            f"{root}: no run with a checkpoint here; train one with `txl train FILE`, or name one with --run"
        )
    return Run(folder)


def _saved_at(run: Run) -> int:
    try:
        return run.pointers_path.stat().st_mtime_ns
    except OSError:
        return -1


def write_asked(run: Run, asked: str, *, is_from_file: bool) -> None:
    """Write what was asked of a run whose text is yet to be prepared.

    Args:
        run: The run.
        asked: The settings that are set, as YAML.
        is_from_file: What they leave open takes its default, and is not planned.
    """
    write_whole(run.config_path, f"{_ASKED[is_from_file]}\n{asked}".encode())


def read_asked(run: Run) -> bool | None:
    """Say of a run that is not prepared whether what its config.yaml leaves open takes its default.

    Returns:
        None if the run is prepared.
    """
    first = read_bounded(run.config_path, _CONFIG_LIMIT_BYTES).partition(b"\n")[0].decode(errors="replace")
    return next((is_from_file for is_from_file, line in _ASKED.items() if line == first), None)
