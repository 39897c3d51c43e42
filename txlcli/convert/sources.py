"""What a checkpoint of another program is, and where its settings, tensors and vocabulary lie in it.

    huggingface   folder: config.json; model.safetensors or pytorch_model.bin; vocab.pkl, .bin, .json or .txt
    authors       model.pt, a pickled module, which holds the settings as attributes; cache.pt beside it, the
                  pickled corpus with its vocabulary, from the folder of the data
    nvidia        checkpoint_{best,last,STEP}.pt: model_config, model_state, vocab and the state of training

A file is told by its content, a folder by the names in it. No number of a tensor is read here.
"""

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from txlcli import UserError
from txlcli.checkpoint import open_tensors
from txlcli.config import shown
from txlcli.convert.archive import StoredTensor
from txlcli.convert.machine import Foreign
from txlcli.convert.names import Kind
from txlcli.convert.pickles import open_or_advise, read_pickled
from txlcli.convert.vocabulary import read_vocab
from txlcli.files import describe_error, is_folder, look_at, read_bounded
from txlcli.run import parse_json

_CONFIG = "config.json"
_CONFIG_LIMIT_BYTES = 1 << 20
_HUGGINGFACE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_HUGGINGFACE_VOCABULARIES = ("vocab.pkl", "vocab.bin", "vocab.json", "vocab.txt")
_AUTHORS_WEIGHTS = "model.pt"
_AUTHORS_VOCABULARY = "cache.pt"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class SourceTensor(Protocol):
    """A tensor that is still in its file, which is known to hold it."""

    @property
    def dtype(self) -> torch.dtype:
        """Its type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for two tensors that are the same numbers of the file."""

    def read(self) -> Tensor:
        """Read it into memory of the caller's own."""


@dataclass(frozen=True)
class SafeTensor:
    """A tensor of a safetensors file."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def identity(self) -> tuple[object, ...]:
        """Its name: the format shares no numbers."""
        return (self.name,)

    def read(self) -> Tensor:
        """Read it into memory of the caller's own."""
        with _open(self.path) as file:
            tensor: Tensor = file.get_tensor(self.name).clone()
        return tensor


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint of another program.

    Attributes:
        kind: Whose.
        path: The file of its weights.
        place: Where its settings are, for messages.
        settings: They, by their names there; the authors' are the attributes of the module.
        tensors: By their names there, each alias of one that has several.
        step: Steps of training that it tells of; 0: it does not.
        vocabulary: What it holds of a vocabulary; None: nothing.
        vocabulary_place: Where, for messages.
        notices: What the user should know of how it was found.
    """

    kind: Kind
    path: Path
    place: str
    settings: Mapping[str, Any]
    tensors: Mapping[str, SourceTensor]
    step: int
    vocabulary: object
    vocabulary_place: str
    notices: tuple[str, ...]


def open_source(path: Path, vocab: Path | None = None) -> Source:
    """Find out what a file or folder is.

    Args:
        path: A checkpoint's file or its folder.
        vocab: File of the vocabulary; None: the one in its usual place, if any.

    Raises:
        UserError: it is none of the known kinds, or damaged, or holds what is not allowed.
    """
    try:
        status = look_at(path)
    except UserError as error:
        raise UserError(f"{error}; {_READABLE}") from error
    if status is None:
        raise UserError(f"{path}: no such file or folder; name a checkpoint to convert")
    notices: list[str] = []
    file = _choose_file(path, notices) if is_folder(path) else path
    if file.name == _CONFIG:
        file = _choose_file(file.parent, notices)
    if file.suffix == ".safetensors":
        return _huggingface(file, _read_safetensors(file), vocab, notices)
    content = read_pickled(file, _EXPECTED)
    if isinstance(content, Foreign) and content.name.rpartition(".")[2] == "MemTransformerLM":
        return _authors(file, content, vocab, notices)
    if isinstance(content, dict) and {"model_config", "model_state"} <= content.keys():
        return _nvidia(file, content, vocab, notices)
    if isinstance(content, dict) and content and _are_tensors(content):
        return _huggingface(file, content, vocab, notices)
    raise UserError(f"{file}: {_describe(content)}; {_EXPECTED}")


_EXPECTED = (
    "expected a folder of Hugging Face's TransfoXL, the authors' model.pt or NVIDIA's checkpoint_*.pt; "
    "name one of them"
)


_READABLE = "name a checkpoint that you may read"


def is_usual_name(name: str) -> bool:
    """Whether a file's name is that of any checkpoint of its kind, so that its folder's name says more."""
    usual = (_CONFIG, *_HUGGINGFACE_WEIGHTS, _AUTHORS_WEIGHTS)
    return name in usual or _nvidia_rank(name) is not None


def _choose_file(folder: Path, notices: list[str]) -> Path:
    """Choose the file of weights of a folder by the names in it."""
    try:
        names = {entry.name for entry in folder.iterdir()}
    except OSError as error:
        raise UserError(f"{folder}: cannot be read; {describe_error(error)}; {_READABLE}") from error
    if "config.yaml" in names:
        raise UserError(f"{folder}: is a run of txl already; use it with --run or --init")
    found: list[list[str]] = []
    weights = [name for name in _HUGGINGFACE_WEIGHTS if name in names]
    if _CONFIG in names and weights:
        found.append(weights)
    if _AUTHORS_WEIGHTS in names:
        found.append([_AUTHORS_WEIGHTS])
    ranked = sorted(((rank, name) for name in names if (rank := _nvidia_rank(name))), reverse=True)
    if ranked:
        found.append([name for _, name in ranked])
    if len(found) > 1:
        listed = ", ".join(choices[0] for choices in found)
        raise UserError(f"{folder}: holds several checkpoints: {listed}; name the file to convert")
    if not found:
        raise UserError(f"{folder}: {_what_is_missing(names)}; {_EXPECTED}")
    chosen, *others = found[0]
    if others:
        notices.append(f"{folder}: took {chosen}; also there: {', '.join(others[:3])}")
    return folder / chosen


def _nvidia_rank(name: str) -> tuple[int, int] | None:
    """Order NVIDIA's files: best above last above the highest step; None: it is none of them."""
    match = re.fullmatch(r"checkpoint_(?:(best)|(last)|(\d{1,18}))\.pt", name, re.ASCII)
    if match is None:
        return None
    return (2, 0) if match[1] else (1, 0) if match[2] else (0, int(match[3]))


def _what_is_missing(names: set[str]) -> str:
    if any(name.endswith((".bin.index.json", ".safetensors.index.json")) for name in names):
        return "its weights are cut into several files, which are not read"
    if any(name.endswith(".ckpt.index") or ".ckpt-" in name for name in names):
        return "a TensorFlow checkpoint, which is not read"
    if _CONFIG in names:
        return f"has no {' or '.join(_HUGGINGFACE_WEIGHTS)} beside its {_CONFIG}"
    weights = [name for name in _HUGGINGFACE_WEIGHTS if name in names]
    if weights:
        return f"has no {_CONFIG} beside its {weights[0]}"
    return "holds no checkpoint that is known"


def _describe(content: object) -> str:
    if isinstance(content, Foreign):
        return f"holds a {shown(content.name)}"
    if isinstance(content, dict):
        keys = ", ".join(map(shown, itertools.islice(content, 4)))
        return f"holds a dict of {keys or 'nothing'}"
    return f"holds {show(content)}"


def show(value: object) -> str:
    """Return a stranger's value on one short line; of one that holds others not more than its type."""
    if isinstance(value, str):
        return f'"{shown(value)}"'
    if isinstance(value, (list, tuple)) and len(value) <= 20 and all(map(_is_plain, value)):
        return shown([*value])
    return shown(value) if _is_plain(value) else f"a {type(value).__name__}"


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


CONFIG_REMEDY = "put the checkpoint's own config.json there"


def _huggingface(
    file: Path, tensors: Mapping[str, SourceTensor], vocab: Path | None, notices: list[str]
) -> Source:
    config = file.with_name(_CONFIG)
    if look_at(config) is None:
        raise UserError(
            f"{file}: holds weights without settings; Hugging Face's config.json must lie beside it, "
            "and the authors' model.pt holds a module"
        )
    try:
        settings = parse_json(read_bounded(config, _CONFIG_LIMIT_BYTES), config)
    except UserError as error:
        raise UserError(f"{error}; {CONFIG_REMEDY}") from error
    model_type = settings.get("model_type", "transfo-xl")
    if model_type != "transfo-xl":
        raise UserError(
            f"{config}: model_type must be transfo-xl; got {show(model_type)}; name a TransfoXL checkpoint"
        )
    vocabulary, place = _read_vocabulary(vocab, [file.with_name(name) for name in _HUGGINGFACE_VOCABULARIES])
    return Source(
        kind="huggingface",
        path=file,
        place=str(config),
        settings=settings,
        tensors=tensors,
        step=0,
        vocabulary=vocabulary,
        vocabulary_place=place,
        notices=tuple(notices),
    )


def _authors(file: Path, module: Foreign, vocab: Path | None, notices: list[str]) -> Source:
    vocabulary, place = _read_vocabulary(vocab, [file.with_name(_AUTHORS_VOCABULARY)])
    return Source(
        kind="authors",
        path=file,
        place=f"{file}: module",
        settings=module.attributes,
        tensors=dict(_tensors_of(file, module)),
        step=0,
        vocabulary=vocabulary,
        vocabulary_place=place,
        notices=tuple(notices),
    )


def _nvidia(file: Path, content: Mapping[str, Any], vocab: Path | None, notices: list[str]) -> Source:
    settings, tensors = content["model_config"], content["model_state"]
    if not isinstance(settings, dict) or not isinstance(tensors, dict) or not _are_tensors(tensors):
        raise UserError(
            f"{file}: `model_config` and `model_state` must be dicts of settings and tensors; {_EXPECTED}"
        )
    step = content.get("train_step")
    if type(step) is not int or not 0 <= step < 10**18:
        raise UserError(
            f"{file}: train_step must be a whole number; got {show(step)}; take another checkpoint"
        )
    vocabulary, place = _read_vocabulary(vocab, [])
    return Source(
        kind="nvidia",
        path=file,
        place=f"{file}: model_config",
        settings=settings,
        tensors=tensors,
        step=step,
        vocabulary=content.get("vocab") if vocab is None else vocabulary,
        vocabulary_place=f"{file}: vocab" if vocab is None else place,
        notices=tuple(notices),
    )


def _read_vocabulary(given: Path | None, usual: list[Path]) -> tuple[object, str]:
    """Read the given file of a vocabulary, else the first of the usual ones that is there."""
    for path in [given] if given is not None else usual:
        if path == given or look_at(path) is not None:
            return read_vocab(path), str(path)
    return None, ", ".join(map(str, usual)) or "no file"


def _read_safetensors(path: Path) -> dict[str, SafeTensor]:
    tensors = {}
    os.close(open_or_advise(path, _EXPECTED))
    with _open(path) as file:
        for name in file.keys():  # noqa: SIM118
            stored = file.get_slice(name)
            dtype = stored.get_dtype()
            if dtype not in _DTYPES:
                raise UserError(
                    f"{path}: `{shown(name)}` must be of {', '.join(_DTYPES)}; got {dtype}; no weights"
                )
            tensors[name] = SafeTensor(path, name, _DTYPES[dtype], tuple(stored.get_shape()))
    return tensors


def _open(path: Path) -> Any:
    return open_tensors(path, "fetch the file again")


def _are_tensors(values: Mapping[Any, object]) -> bool:
    return all(isinstance(name, str) and isinstance(value, StoredTensor) for name, value in values.items())


def children(module: Foreign) -> dict[str, Foreign]:
    """Return a pickled module's children by their names."""
    modules = module.attributes.get("_modules")
    items = modules.items() if isinstance(modules, dict) else ()
    return {str(name): child for name, child in items if isinstance(child, Foreign)}


def _tensors_of(path: Path, module: Foreign, prefix: str = "") -> Iterator[tuple[str, StoredTensor]]:
    """Name a pickled module's tensors as its state has them: parameters, buffers, those of its children."""
    for group in ("_parameters", "_buffers"):
        tensors = module.attributes.get(group)
        for name, value in tensors.items() if isinstance(tensors, dict) else ():
            if isinstance(value, StoredTensor):
                yield f"{prefix}{name}", value
            elif value is not None:
                raise UserError(
                    f"{path}: `{shown(f'{prefix}{name}')}` must be a tensor; it {_describe(value)}"
                )
    for name, child in children(module).items():
        yield from _tensors_of(path, child, f"{prefix}{name}.")
