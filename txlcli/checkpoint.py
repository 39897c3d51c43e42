"""Checkpoints: weights as safetensors, and the exact state of a training.

    checkpoints/step-0000100/
        model.safetensors     the weights, float32, under the model's parameter names
        state.safetensors     optimizer, memory and random states: tensors under names of training's choice
        state.json            counters and everything else that is no tensor, and checksums; written last

safetensors is 8 bytes (little-endian length of the header), a JSON header and the tensors' bytes; the library
checks that the header covers the file exactly. `model.safetensors` has one metadata key, `txl`: a JSON text
with sorted keys,

    {"model": {"clamp_len": null, ...}, "tokenizer": {"fingerprint": "9f86...", "kind": "char", ...}}

so weights describe themselves. It is one key because safetensors writes several in random order. Neither
safetensors file holds a path, a date or a duration: equal runs write equal bytes. A checkpoint's folder
appears whole or not at all. Converted weights have no training behind them that could go on, so they come
without the state's files; where their source has no tokenizer, the description says `"tokenizer": {}`.

`state.json` has two keys of its own beside those of the training: `files`, the size and sha256 of the other
two files as they were written, and `checksum`, the sha256 of itself as it would be without that key,

    {"checksum": "5e8c...", "files": {"model.safetensors": {"bytes": 1234, "sha256": "03ab..."}, ...}, ...}

so a disk's or a copy's damage is noticed before anything is made of it. One that has neither was written by
an older version: of its files no more is known than whether their headers fit them.

What to do about damage depends on what was asked for. To go on training, and where `last` was asked for, the
newest checkpoint that is whole is taken, and it is said which one is not. A step that was named, and the
best, are refused: a score of the best must not be that of another. Damage is what was read and does not fit,
and what is missing; of what the system does not let be read nobody knows, so it is refused.

Readers treat the files as a stranger's. Nothing is unpickled. Every size is held against the size of the file
before anything is allocated: a model is built only if the file is large enough for its matrices and tables.
Names, shapes and types must match exactly. A setting that a file does not name has its default: the file was
written before there was this setting.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from txlcli import UserError
from txlcli.adaptive import Clusters
from txlcli.checksums import check_written, checksum
from txlcli.config import (
    Config,
    ModelConfig,
    SettingError,
    blame,
    build,
    build_section,
    read_settings,
    shaping_leaves,
    shown,
)
from txlcli.files import (
    describe_error,
    folder_whole,
    is_unreadable,
    look_at,
    open_regular,
    read_at,
    read_bounded,
    shell_name,
)
from txlcli.model import TransformerXL, clusters_of
from txlcli.run import (
    Run,
    choose_checkpoint,
    dump_json,
    list_checkpoints,
    load_run_tokenizer,
    parse_json,
    read_pointers,
    step_of,
)
from txlcli.tokenizer import Tokenizer

_WEIGHTS = "model.safetensors"
_STATE_TENSORS = "state.safetensors"
_STATE_VALUES = "state.json"
_METADATA_KEY = "txl"
_HEADER_LIMIT_BYTES = 16 << 20
_VALUES_LIMIT_BYTES = 1 << 20
_READS = 5
"""Times that a reader begins again because a training replaced or deleted what it was reading."""
_READ_PAUSE_S = 0.01


class NonFiniteError(ArithmeticError):
    """Weights that are not finite were to be saved; the run's earlier checkpoints are untouched."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode with what belongs to it."""

    model: TransformerXL
    tokenizer: Tokenizer
    config: Config
    step: int
    run: Run
    damage: str | None = None
    """Which newer checkpoint is damaged, so that this one was taken; None: none."""


# Writing


def describe_weights(config: ModelConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return what the weights' file says about itself; None: there is no tokenizer."""
    described = {} if tokenizer is None else {**tokenizer.describe(), "fingerprint": tokenizer.fingerprint()}
    return {"model": _model_settings(config), "tokenizer": described}


def save_checkpoint(
    run: Run,
    model: nn.Module,
    *,
    step: int,
    metadata: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    values: Mapping[str, object],
) -> Path:
    """Write the checkpoint of `step`, whole or not at all, in place of one that has this step.

    Args:
        run: The run.
        model: The bare model, float32.
        step: Steps done.
        metadata: What `describe_weights` returns.
        tensors: The training state's tensors, under names of the caller's choice.
        values: The rest of the training state: finite JSON values under names but `files` and `checksum`.

    Returns:
        The checkpoint's folder.

    Raises:
        NonFiniteError: a weight is not finite. Nothing is written.
        UserError: the disk refuses. Nothing is left under the checkpoint's name.
    """
    with _writing(run, model.state_dict(), step, metadata) as (folder, written):
        written[_STATE_TENSORS] = _write_tensors(folder / _STATE_TENSORS, tensors)
        assert not {"files", "checksum"} & values.keys()
        sealed = {**values, "files": written}
        sealed["checksum"] = _checksum(sealed)
        (folder / _STATE_VALUES).write_bytes(dump_json(sealed))
    return run.checkpoint_path(step)


def save_weights(
    run: Run, weights: Mapping[str, Tensor], *, step: int, metadata: Mapping[str, object]
) -> Path:
    """Write a checkpoint without training state, which no training can go on from; else as `save_checkpoint`.

    Args:
        run: The run.
        weights: The model's parameters by their names, float32.
        step: The step that it counts as.
        metadata: What `describe_weights` returns.
    """
    with _writing(run, weights, step, metadata):
        return run.checkpoint_path(step)


@contextmanager
def _writing(
    run: Run, weights: Mapping[str, Tensor], step: int, metadata: Mapping[str, object]
) -> Iterator[tuple[Path, dict[str, dict[str, object]]]]:
    """Write weights into the folder of a checkpoint, which gets its name when the block ends well.

    Yields the folder, and sizes and checksums of what is written so far.
    """
    for name, tensor in weights.items():
        assert tensor.dtype is torch.float32, f"{name} is {tensor.dtype}"
        if not bool(torch.isfinite(tensor).all()):
            raise NonFiniteError(f"step {step}: `{name}` is not finite, so nothing was saved")
    run.checkpoints_folder.mkdir(exist_ok=True)
    description = json.dumps(metadata, sort_keys=True, allow_nan=False)
    with folder_whole(run.checkpoint_path(step), replace=True) as folder:
        yield folder, {_WEIGHTS: _write_tensors(folder / _WEIGHTS, weights, {_METADATA_KEY: description})}


def _checksum(values: Mapping[str, object]) -> str:
    return checksum(dump_json(values))


def _write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> dict[str, object]:
    """Write a safetensors file and return its size and checksum.

    By way of memory: the library's own way to a file (0.8) makes it readable to its owner only, and wraps
    what the operating system says about a full disk in an error of its own kind.
    """
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    data = save(plain, metadata)
    with path.open("xb") as file:
        file.write(data)
    return {"bytes": len(data), "sha256": checksum(data)}


# Finding one that is whole


def find_checkpoint(run: Run, which: str = "best") -> tuple[Path, str | None]:
    """Find the checkpoint that `which` names, with weights that are whole.

    Args:
        run: The run.
        which: `best`, `last` or a step. Before the first evaluation best is last.

    Returns:
        Its folder, and what to tell the user: that a newer one than this last is damaged; None: nothing.

    Raises:
        UserError: there is none, or the best or the step that was named is damaged.
    """
    if which == "last" or (which == "best" and read_pointers(run).best is None):
        path, notice = newest_checkpoint(run, with_state=False)
        return path or choose_checkpoint(run, "last"), notice
    path = choose_checkpoint(run, which)
    fault = find_damage(path, with_state=False)
    if fault is not None:
        raise UserError(f"{fault}; {_REMEDY}")
    return path, None


def newest_checkpoint(run: Run, *, with_state: bool) -> tuple[Path | None, str | None]:
    """Find the newest checkpoint whose files are whole.

    Args:
        run: The run.
        with_state: A training is to go on from it, so its state must be whole too.

    Returns:
        Its folder, None if the run has no checkpoint at all; and what to tell the user: which one is
        damaged and which is used instead; None: nothing.

    Raises:
        UserError: the run has checkpoints, and all of them are damaged, or one may not be read.
    """
    faults: list[str] = []
    for step in reversed(list_checkpoints(run)):
        path = run.checkpoint_path(step)
        fault = find_damage(path, with_state=with_state)
        if fault is None:
            more = f", and {len(faults) - 1} more before it" if len(faults) > 1 else ""
            return path, f"{faults[0]}{more}; step {step:,} is used instead" if faults else None
        faults.append(fault)
    if faults:
        remedy = f"no other checkpoint of {run.folder} is whole"
        if with_state:
            remedy = f"{remedy}; {put_back(run)}"
        elif len(faults) == 1:
            remedy = _REMEDY
        raise UserError(f"{faults[0]}; {remedy}")
    return None, None


def put_back(run: Run) -> str:
    """Say what to do where a run has no checkpoint left to go on from."""
    return f"put a whole one back, or begin anew with `txl train -c {shell_name(run.config_path)}`"


def find_damage(path: Path, *, with_state: bool) -> str | None:
    """Say what is wrong with the files of a checkpoint's folder; None: they are as they were written.

    Args:
        path: The folder.
        with_state: The training state counts too, and not the weights alone.

    Raises:
        UserError: the system does not let one of them be read, which says nothing of what it holds.
    """
    try:
        _check_files(path, with_state=with_state)
    except UserError as error:
        if is_unreadable(error):
            text = f"{error}; see to its permissions and its disk, or move {path.name} out of the run"
            raise UserError(text) from error.__cause__
        return str(error).removesuffix(f"; {_REMEDY}")
    return None


def _check_files(path: Path, *, with_state: bool) -> None:
    # Weights are used without their state too: those of converted runs have none.
    has_values = with_state or look_at(path / _STATE_VALUES) is not None
    written = _read_sealed(path)[1] if has_values else None
    for name in (_WEIGHTS, _STATE_TENSORS) if with_state else (_WEIGHTS,):
        if written is None:
            with open_tensors(path / name):
                pass
        else:
            _check_header(path / name, _REMEDY)
            _check_written(path / name, written.get(name))


def _check_written(path: Path, written: object) -> None:
    """Hold a file against its size and checksum."""
    if not isinstance(written, dict):
        raise UserError(f"{path}: damaged; {_STATE_VALUES} has no checksum of it; {_REMEDY}")
    for _ in check_written(path, written.get("bytes"), written.get("sha256"), _REMEDY):
        pass  # quick enough for nobody to watch


def _read_sealed(path: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Read the state.json of a checkpoint's folder: training's values, and what it says of the other files.

    The second is None where an older version has written it.

    Raises:
        UserError: it is missing or damaged.
    """
    place = path / _STATE_VALUES
    values = parse_json(read_bounded(place, _VALUES_LIMIT_BYTES), place)
    if "checksum" not in values and "files" not in values:
        return values, None
    expected, found = values.pop("checksum", None), None
    with suppress(ValueError):  # half a surrogate pair, which JSON can name and UTF-8 cannot hold
        found = _checksum(values)
    written = values.pop("files", None)
    if found != expected or not isinstance(written, dict):
        raise UserError(f"{place}: damaged; its checksum does not fit; {_REMEDY}")
    return values, written


# Reading


def load_model(run: Run, which: str = "best", device: str | torch.device = "cpu") -> LoadedModel:
    """Load the weights and tokenizer of a run.

    Args:
        run: The run.
        which: `best`, `last` or a step.
        device: Where the model goes.

    Raises:
        UserError: a file is missing, damaged, no safetensors, or does not belong to this run.
    """
    for n_left in reversed(range(_READS)):
        before = _look_around(run)
        try:
            path, notice = find_checkpoint(run, which)
            # What looks damaged may only have been deleted while it was looked at.
            if notice is None or not n_left or _look_around(run) == before:
                return _load_model(run, path, device, notice)
        except UserError:
            # A training may have deleted the step meanwhile, or be putting it in the place of another.
            time.sleep(_READ_PAUSE_S)
            if not n_left or _look_around(run) == before:
                raise
    raise AssertionError("the last time either returns or raises")


def _look_around(run: Run) -> list[tuple[str, int]]:
    """Return names and numbers of files that change when a training saves, points or deletes."""
    seen = []
    with suppress(OSError):
        seen.append(("", run.pointers_path.stat().st_ino))
    with suppress(OSError), os.scandir(run.checkpoints_folder) as entries:
        seen += sorted((entry.name, entry.inode()) for entry in entries)
    return seen


def _load_model(run: Run, path: Path, device: str | torch.device, damage: str | None) -> LoadedModel:
    settings = read_settings(run.config_path)
    config = build(settings)
    tokenizer = load_run_tokenizer(run)
    try:
        config.model.check_vocabulary(tokenizer.n_vocab)
    except SettingError as error:
        raise blame(error, settings) from None
    with open_tensors(path / _WEIGHTS, framework="numpy") as file:
        described = _read_description(path / _WEIGHTS, file.metadata())
        _check_tokenizer(path, described, tokenizer, run)
        _check_settings(path, described, config.model, [leaf.name for leaf in fields(ModelConfig)])
        check_size(path, config.model, tokenizer.n_vocab)
        # The first weights are drawn and thrown away: nobody's random numbers may depend on that.
        with torch.random.fork_rng(devices=[]):
            model = TransformerXL(config.model, tokenizer.n_vocab)
        _check_tensors(path / _WEIGHTS, file, model.state_dict())
        _copy_tensors(file, model)
    return LoadedModel(model.to(device).eval(), tokenizer, config, step_of(path), run, damage)


def load_weights(path: Path, model: nn.Module) -> None:
    """Copy the weights of a checkpoint's folder into a model of exactly their names and shapes.

    Raises:
        UserError: the file is missing, damaged, no safetensors, or written for another model.
    """
    with open_tensors(path / _WEIGHTS, framework="numpy") as file:
        _check_tensors(path / _WEIGHTS, file, model.state_dict())
        _copy_tensors(file, model)


def load_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Load the training state of a checkpoint's folder: tensors and values, as `save_checkpoint` took them.

    The tensors lie on the CPU and are the caller's own: the file is not kept open or mapped.

    Raises:
        UserError: a file is missing, damaged or no safetensors.
    """
    values = load_values(path)
    with open_tensors(path / _STATE_TENSORS) as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}, values  # noqa: SIM118


def load_values(path: Path) -> dict[str, Any]:
    """Load the plain values of a checkpoint's training state.

    Raises:
        UserError: the file is missing or damaged.
    """
    return _read_sealed(path)[0]


_REMEDY = "take another step with --checkpoint STEP, or delete its folder to resume from the step before"


@contextmanager
def remedied(remedy: str) -> Iterator[None]:
    """Put a remedy in the place of readers' own, for a command that has no --checkpoint."""
    try:
        yield
    except UserError as error:
        fault, _, readers_remedy = str(error).rpartition("; ")
        if "--checkpoint" not in readers_remedy:
            raise
        raise UserError(f"{fault}; {remedy}") from error.__cause__


@contextmanager
def open_tensors(
    path: Path, remedy: str = _REMEDY, framework: Literal["pt", "numpy"] = "pt"
) -> Iterator[Any]:
    """Open a safetensors file whose header fits the file; `Any` because the library has no types.

    Args:
        path: The file, also one that txl did not write.
        remedy: What to do where it is damaged.
        framework: Whose tensors it gives.

    Raises:
        UserError: it is missing, damaged or no safetensors; also while it is open.
    """
    _check_header(path, remedy)
    try:
        with _name_in_utf8(path) as name:
            opened = safe_open(name, framework=framework, device="cpu")
    except (OSError, RuntimeError) as error:  # a training has just deleted it, or the disk fails
        reason = describe_error(error) if isinstance(error, OSError) else " ".join(str(error).split())
        raise UserError(f"{path}: cannot be read; {reason}") from error
    except SafetensorError as error:
        raise UserError(f"{path}: damaged; {shown(error, 300)}; {remedy}") from error
    try:
        with opened as file:
            yield file
    except SafetensorError as error:
        raise UserError(f"{path}: damaged; {shown(error, 300)}; {remedy}") from error


@contextmanager
def _name_in_utf8(path: Path) -> Iterator[str]:
    """Give a name under which torch opens the file, which takes no bytes that are not UTF-8."""
    name = str(path)
    if name.encode("utf-8", "replace").decode() == name:
        yield name
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        yield f"/dev/fd/{fd}"
    finally:
        os.close(fd)


def _check_header(path: Path, remedy: str) -> None:
    """Tell a cut or foreign file by its first bytes, before any reader acts on the length it claims."""
    fd = open_regular(path)
    try:
        start, size = read_at(fd, 8, 0), os.fstat(fd).st_size
    except OSError as error:
        raise UserError(f"{path}: cannot be read; {describe_error(error)}") from error
    finally:
        os.close(fd)
    if start[:4] == b"PK\x03\x04" or (start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05"):
        raise UserError(f"{path}: a pickle or archive, not safetensors; txl never opens those; {remedy}")
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > size - 8:
        raise UserError(f"{path}: cut short or not safetensors; got {size:,} bytes; {remedy}")
    if length > _HEADER_LIMIT_BYTES:
        raise UserError(f"{path}: its header is too large; got {length:,} bytes; not a file of txl")


def _read_description(path: Path, metadata: dict[str, str] | None) -> dict[str, Any]:
    text = (metadata or {}).get(_METADATA_KEY)
    if text is None:
        raise UserError(f"{path}: has no metadata `{_METADATA_KEY}`; not a checkpoint of txl")
    described = parse_json(text, f"{path}: metadata `{_METADATA_KEY}`")
    if not all(isinstance(described.get(part), dict) for part in ("model", "tokenizer")):
        raise UserError(f"{path}: metadata `{_METADATA_KEY}` must hold `model` and `tokenizer`; damaged")
    return described


def _check_tokenizer(path: Path, described: Mapping[str, Any], tokenizer: Tokenizer, run: Run) -> None:
    expected, found = described["tokenizer"].get("fingerprint"), tokenizer.fingerprint()
    if expected != found:
        raise UserError(
            f"{path}: trained with another tokenizer than {run.tokenizer_folder / 'tokenizer.json'}; "
            f"sha256 {str(expected)[:12]}, got {found[:12]}; put the run's own tokenizer back"
        )


def check_model(path: Path, config: ModelConfig, n_vocab: int) -> None:
    """Refuse a model that the weights in a checkpoint's folder are not of, before it is built.

    Settings that leave the weights as they are may differ.
    """
    with open_tensors(path / _WEIGHTS, framework="numpy") as file:
        described = _read_description(path / _WEIGHTS, file.metadata())
    # Settings first: where they differ it is not the file that is at fault.
    names = [item.name for item in shaping_leaves(config) if item.section == "model"]
    _check_settings(path, described, config, names)
    check_size(path, config, n_vocab)


def _check_settings(
    path: Path, described: Mapping[str, Any], config: ModelConfig, names: Iterable[str]
) -> None:
    written: ModelConfig = build_section(
        "model", described["model"], f"{path / _WEIGHTS}: metadata `{_METADATA_KEY}`"
    )
    for name in sorted(names):
        expected, found = getattr(written, name), getattr(config, name)
        if expected != found:
            raise UserError(
                f"{path}: written for {name} {show_setting(expected)}, "
                f"config.yaml says {show_setting(found)}; put the run's own config.yaml back"
            )


def check_size(path: Path, config: ModelConfig, n_vocab: int) -> None:
    """Refuse weights in a checkpoint's folder that are too few for a model, before that is built.

    Building it on torch's meta device would check every shape first, but loads a second's worth of modules.
    """
    weights, least = path / _WEIGHTS, 4 * least_numbers(config, n_vocab)
    status = look_at(weights)
    if status is None:  # a training has just deleted it
        raise UserError(f"{weights}: cannot be read; no such file or directory")
    size = status.st_size
    if size < least:
        raise UserError(
            f"{weights}: too small for this model; got {size:,} bytes, the weights take {least:,}; {_REMEDY}"
        )


def least_numbers(config: ModelConfig, n_vocab: int) -> int:
    """Count the numbers in a model's matrices and tables, without building it: all but biases and norms."""
    width, clusters = config.n_head * config.d_head, clusters_of(config, n_vocab)
    attention, n_positions = 4 * config.d_model * width, 0
    if config.position == "relative":
        attention += config.d_model * width
    elif config.position == "shaw":
        assert config.max_relative_position is not None, "settled by the config"
        attention += (1 + config.shaw_values) * width * (config.max_relative_position + 1)
    elif config.position == "learned":
        n_positions = config.tgt_len * config.d_model
    layers = config.n_layer * (attention + 2 * config.d_model * config.d_inner)
    return _vocabulary_numbers(config, clusters) + layers + n_positions


def _vocabulary_numbers(config: ModelConfig, clusters: Clusters) -> int:
    """Count what embedding and head hold, but for biases."""
    tables = sum(size * width for size, width in zip(clusters.sizes, clusters.widths, strict=True))
    own = sum(config.d_model * clusters.widths[i] for i in clusters.output_projections(config.tie_projs))
    head = own + clusters.n_tail * clusters.d_embed + (0 if config.tied else tables)
    return clusters.n_embedding + head


def _check_tensors(path: Path, file: Any, expected: Mapping[str, Tensor]) -> None:
    """Hold names, shapes and types against the model's, from the header alone."""
    names = set(file.keys())
    missing, unknown = sorted(expected.keys() - names), sorted(names - expected.keys())
    if missing:
        found = f"it has `{unknown[0][:100]}` instead" if unknown else "the file is incomplete"
        raise UserError(f"{path}: has no tensor `{missing[0]}`; {found}; {_REMEDY}")
    if unknown:
        raise UserError(f"{path}: has a tensor that is not the model's; got `{unknown[0][:100]}`; {_REMEDY}")
    for name, tensor in expected.items():
        stored = file.get_slice(name)
        if list(stored.get_shape()) != list(tensor.shape):
            raise UserError(
                f"{path}: `{name}` has another shape than the model's; "
                f"got {stored.get_shape()}, expected {list(tensor.shape)}; {_REMEDY}"
            )
        if stored.get_dtype() != "F32":
            raise UserError(f"{path}: `{name}` must be float32; got {stored.get_dtype()}; {_REMEDY}")


@torch.no_grad()
def _copy_tensors(file: Any, model: nn.Module) -> None:
    # Copied, since a tensor of the library may be a view of the mapped file, which pruning deletes; in NumPy,
    # since for each tensor that safetensors 0.8 makes for torch 64 bytes are never given back.
    for name, tensor in model.state_dict().items():
        tensor.copy_(torch.from_numpy(file.get_tensor(name)))


def _model_settings(config: ModelConfig) -> dict[str, Any]:
    """List the model's settings; each is a plain JSON value, a tuple becoming a list."""
    return {leaf.name: getattr(config, leaf.name) for leaf in fields(config)}


def show_setting(value: object) -> str:
    """Show a setting's value, also one that was read from a file."""
    if isinstance(value, (tuple, list)):
        value = ",".join(map(str, value[:20]))
    return "nothing" if value in (None, "") else shown(value, 100)
