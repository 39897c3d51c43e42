"""The run folder: where everything that a run was and is lies, and how to find it again.

    config.yaml                    the settings, each a plain value
    tokenizer.json, tokenizer.*    text to ids and back
    data/                          the store of training and held-out ids
    stdin.txt                      the text, only if it came through standard input
    metrics.jsonl                  one JSON object a line, `event` first
    checkpoints/step-0000100/      weights and exact training state (see checkpoint.py)
    pointers.json                  {"best": 80, "best_nll": 1.52, "last": 100}
    .lock                          only while something is written: who writes
    converted.json                 only in a run that was not trained but made of another program's checkpoint

A folder is a run when it has a `config.yaml`. Until the text is prepared that holds only what was asked for,
below a first line that says so, and nothing else in the folder counts. A checkpoint's folder appears whole or
not at all, so the newest one on disk is the last one. `pointers.json` is written after it: its time says
which run saved last, and it is the only place that knows which step is best. `best` and `best_nll` are null
before the first evaluation, and where the best checkpoint was lost; then best is last. Nothing here holds an
absolute path: a run may be moved and copied.

A run may be a link to a folder elsewhere, and files that are only read may be links. What is written, emptied
or deleted must lie in the run itself: a run from a stranger could else lead to any file of the user's.

Whoever writes holds the system's lock on `.lock` meanwhile, in which it says who it is. Whoever reads does
not ask for it, and begins again where what it was sent to has gone meanwhile.

A converted run has a checkpoint without training state, no text and no metrics, and maybe no tokenizer:

    {"kind": "nvidia", "n_vocab": 204, "has_tokenizer": true, "start_id": 0}
"""

import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from txlcli import UserError
from txlcli.config import Config, build, read_settings
from txlcli.files import (
    describe_error,
    describe_kind,
    is_folder,
    locked,
    look_at,
    open_regular,
    read_bounded,
    remove_leftovers,
    sync_folder,
    write_whole,
)
from txlcli.tokenizer import Tokenizer, load_tokenizer

RUNS = Path("runs")
MAKERS = {"huggingface": "Hugging Face", "authors": "the authors", "nvidia": "NVIDIA"}
"""Whose checkpoints become converted runs, by the kind that converted.json says."""

_ASKED = {
    False: "# As asked for; the text is yet to be prepared, and what this leaves open to be planned.",
    True: "# As asked for; the text is yet to be prepared, and what this leaves open takes its default.",
}
"""The first line of config.yaml until the text is prepared; whether it came of a configuration file."""

_CONFIG_LIMIT_BYTES = 1 << 20
_POINTERS_LIMIT_BYTES = 4096
_CONVERSION_LIMIT_BYTES = 4096
_METRICS_LINE_LIMIT_BYTES = 65_536
_MOST_DIGITS = 40
_NAME_LIMIT_BYTES = 200
_PROBE = ".write-test"
_LOCK = ".lock"
_BEGUN_NAME = re.compile(r"\.(\.write-test|config\.yaml)\.[0-9a-f]{8}\.tmp")
_STEP_NAME = re.compile(r"step-(\d{7,18})", re.ASCII)


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


@dataclass(frozen=True)
class Pointers:
    """The steps of the best and the last checkpoint, and the best's held-out nats per token."""

    best: int | None = None
    last: int | None = None
    best_nll: float | None = None


@dataclass(frozen=True)
class Conversion:
    """What a converted run knows in place of a training.

    Attributes:
        kind: Whose checkpoint it was made of: `huggingface`, `authors` or `nvidia`.
        n_vocab: Size of the model's vocabulary.
        has_tokenizer: Whether text can be turned into its ids.
        start_id: What an empty prompt starts from.
    """

    kind: str
    n_vocab: int
    has_tokenizer: bool
    start_id: int


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


# Finding and making runs


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
        probe.unlink()
        run.checkpoints_folder.mkdir(exist_ok=True)
    except (OSError, UserError) as error:
        discard_run(run)
        raise _cannot_make(run.folder, error) from error
    return run


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
    with locked(run.folder / _LOCK, str(run.folder)) as has_lock:
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
        with suppress(FileNotFoundError):
            if not is_kind(path.lstat().st_mode):
                kind = "folder" if is_kind is stat.S_ISDIR else "file"
                raise UserError(
                    f"{path}: is a link or no {kind}, and a run is written only within its own folder; "
                    "put the thing itself there, or link the whole run"
                )


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


def list_runs(root: Path = RUNS) -> list[Run]:
    """List the runs directly under `root`, by name.

    Raises:
        UserError: `root` is no folder that can be read.
    """
    try:
        # os.path's form is false, not an error, for a folder that is closed to us: it hides no other run.
        return [Run(folder) for folder in sorted(root.iterdir()) if os.path.isfile(folder / "config.yaml")]  # noqa: PTH113
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
        raise UserError(
            f"--out: `{path}` exists and is not empty; name another, or continue with `--resume {path}`"
        )
    return Run(path, tuple(missing))


def _is_left_over(entry: Path) -> bool:
    """Say whether it is what is in a run's folder before `config.yaml` is."""
    if entry.name == "checkpoints":
        return entry.is_dir() and next(entry.iterdir(), None) is None
    return entry.name in (_PROBE, _LOCK) or _BEGUN_NAME.fullmatch(entry.name) is not None


def _cannot_make(folder: Path, error: OSError | UserError) -> UserError:
    reason = describe_error(error) if isinstance(error, OSError) else str(error).rpartition("; ")[2]
    return UserError(f"{folder}: cannot write a run here; {reason}; name another folder with --out DIR")


# Checkpoints: their names and the pointers to them


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
            f"{run.folder}: has no checkpoint yet; continue it with `txl train --resume {run.folder}`"
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
        remove_checkpoint(run.checkpoint_path(step))
    return gone


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint so that what is half deleted never looks like one."""
    doomed = path.with_name(f".{path.name}.deleted.tmp")
    shutil.rmtree(doomed, ignore_errors=True)
    # A file that somebody is reading cannot go everywhere; it goes when the run is next swept.
    shutil.rmtree(path.rename(doomed), ignore_errors=True)


def sweep_run(run: Run) -> list[Path]:
    """Remove what a killed process left under temporary names; only for the run's one writer."""
    folders = [run.folder, run.checkpoints_folder, run.data_folder]
    return [path for folder in folders if folder.is_dir() for path in remove_leftovers(folder)]


def _enumerate(steps: list[int]) -> str:
    shown = steps if len(steps) <= 8 else [*steps[:3], *steps[-4:]]
    texts = [str(step) for step in shown]
    if len(shown) < len(steps):
        texts.insert(3, "...")
    return ", ".join(texts)


# Metrics


def append_metrics(run: Run, values: Mapping[str, object]) -> None:
    """Add one line to metrics.jsonl; numbers that are not finite become null."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
    line = json.dumps(finite, allow_nan=False, ensure_ascii=False) + "\n"
    with run.metrics_path.open("ab") as file:
        file.write(line.encode())


def metrics_length(run: Run) -> int:
    """Measure metrics.jsonl in bytes.

    A checkpoint records this length, so the lines that it counts are made durable first.
    """
    try:
        with run.metrics_path.open("r+b") as file:  # some systems flush only what may be written
            os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return 0


def cut_metrics(run: Run, n_bytes: int) -> bool:
    """Cut metrics.jsonl to the length that a checkpoint recorded, so that no line comes twice.

    Returns:
        False if the file is shorter than that: somebody has edited it, and it is left alone.
    """
    length = metrics_length(run)
    if length > n_bytes:
        with run.metrics_path.open("r+b") as file:
            file.truncate(n_bytes)
            os.fsync(file.fileno())
    return length >= n_bytes


def read_bits_per_byte(run: Run, step: int | None) -> float | None:
    """Find the held-out bits per byte that metrics.jsonl gives for `step`.

    The last step may have two scores: that of the slice, which chose the best, comes first.
    """
    # A summary does without: the file may be gone or cut by hand.
    with suppress(OSError, UserError), open(open_regular(run.metrics_path), "rb") as file:  # noqa: PTH123
        while line := file.readline(_METRICS_LINE_LIMIT_BYTES):
            if b'"eval"' in line:
                values = parse_json(line, run.metrics_path)
                if values.get("event") == "eval" and values.get("step") == step:
                    value = values.get("bits_per_byte")
                    return value if isinstance(value, float) else None
    return None


# Converted runs


def write_conversion(run: Run, conversion: Conversion) -> None:
    """Write what only a converted run has."""
    write_whole(run.conversion_path, dump_json(asdict(conversion)))


def read_conversion(run: Run) -> Conversion | None:
    """Read what only a converted run has; None: this run was trained.

    Raises:
        UserError: the file is damaged.
    """
    path = run.conversion_path
    if look_at(path) is None:
        return None
    values = parse_json(read_bounded(path, _CONVERSION_LIMIT_BYTES), path)
    kinds = {"kind": str, "n_vocab": int, "has_tokenizer": bool, "start_id": int}
    is_sound = values.keys() == kinds.keys() and all(
        type(values[name]) is kind for name, kind in kinds.items()
    )
    if not is_sound or values["kind"] not in MAKERS or not 0 <= values["start_id"] < values["n_vocab"]:
        raise UserError(f"{path}: damaged; must hold {', '.join(kinds)}; convert the checkpoint again")
    return Conversion(**values)


def refuse_converted(run: Run, what: str) -> None:
    """Refuse what a converted run cannot do, since it was not trained here.

    Args:
        run: Any run.
        what: What is missing; and what to do: `which has no held-out text; name a FILE`.

    Raises:
        UserError: the run was converted.
    """
    conversion = read_conversion(run)
    if conversion is not None:
        raise UserError(f"{run.folder}: was converted from a checkpoint of {MAKERS[conversion.kind]}, {what}")


def refuse_without_tokenizer(run: Run) -> None:
    """Refuse a converted run whose ids nobody can turn into text.

    Raises:
        UserError: it is one.
    """
    conversion = read_conversion(run)
    if conversion is not None and not conversion.has_tokenizer:
        raise UserError(
            f"{run.folder}: has no tokenizer, since its source had none that txl can use; "
            "text can be neither read nor written with it"
        )


def load_run_tokenizer(run: Run) -> Tokenizer:
    """Load a run's tokenizer.

    Raises:
        UserError: a file is missing or damaged, or this run has no tokenizer.
    """
    refuse_without_tokenizer(run)
    return load_tokenizer(run.tokenizer_folder)


def vocabulary_size(run: Run) -> int:
    """Return the number of ids of a run's model.

    Raises:
        UserError: a file is missing or damaged.
    """
    conversion = read_conversion(run)
    return load_tokenizer(run.tokenizer_folder).n_vocab if conversion is None else conversion.n_vocab


# Summary


def describe_run(run: Run) -> RunSummary:
    """Summarize a run for `txl runs`.

    Raises:
        UserError: a file of the run is missing or damaged.
    """
    if read_asked(run) is not None:
        raise UserError(
            f"{run.folder}: its text is not prepared; if nothing is at it, `txl train --resume {run.folder}` "
            "begins anew"
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


# JSON


def parse_json(data: bytes | str, place: object) -> dict[str, Any]:
    """Parse a JSON object; `Any` because JSON's values are, and whoever reads one checks it.

    Raises:
        UserError: it is not JSON, or no object; the message begins with `place`.
    """
    try:
        values = json.loads(data, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_whole)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: damaged, not valid JSON; {json_fault(error)}") from error
    if not isinstance(values, dict):
        raise UserError(f"{place}: damaged; must hold a JSON object, got {type(values).__name__}")
    return values


def json_fault(error: ValueError | RecursionError) -> str:
    """Say in plain words why Python's reader of JSON refused a text."""
    if isinstance(error, RecursionError):
        return "nested too deep"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 at byte {error.start:,}"
    if "integer string conversion" in str(error):
        return "a whole number of more than 4,300 digits"
    return str(error).lower()


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:  # so that it can be made a float
        raise ValueError(f"a whole number of more than {_MOST_DIGITS} digits")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits:.20} is too large a number")
    return number


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")


def dump_json(values: Mapping[str, object]) -> bytes:
    """Write a JSON object with sorted keys, so that equal values give equal bytes."""
    return (json.dumps(values, sort_keys=True, allow_nan=False, ensure_ascii=False, indent=1) + "\n").encode()
