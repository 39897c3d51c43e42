"""Checkpoints: exact, equal bytes for equal states, and nothing a stranger's file can do."""

import errno
import hashlib
import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from txlcli import UserError, checkpoint
from txlcli.checkpoint import (
    NonFiniteError,
    describe_weights,
    find_damage,
    load_model,
    load_state,
    load_values,
    load_weights,
    save_checkpoint,
)
from txlcli.config import Config, DataConfig, ModelConfig, dump
from txlcli.model import TransformerXL
from txlcli.run import Pointers, Run, choose_checkpoint, list_checkpoints, write_pointers
from txlcli.tokenizer import build_tokenizer

MODEL = ModelConfig(n_layer=2, d_model=8, n_head=2, tgt_len=4, mem_len=4)
TOKENIZER = build_tokenizer("byte", vocab_size=None, text=lambda: iter([b"abc"]), n_bytes=3, seed=0)


@pytest.fixture
def run() -> Run:
    """Make a run with a checkpoint of step 3."""
    run = Run(Path("run"))
    run.folder.mkdir()
    run.config_path.write_text(dump(Config(model=MODEL)), encoding="utf-8")
    TOKENIZER.save(run.tokenizer_folder)
    save(run, TransformerXL(MODEL, TOKENIZER.n_vocab), 3)
    return run


def save(run: Run, model: TransformerXL, step: int, **changes: Any) -> Path:
    state: dict[str, Any] = {
        "metadata": describe_weights(MODEL, TOKENIZER),
        "tensors": {"memory.0": torch.ones(2, 3)},
        "values": {"step": step},
    }
    return save_checkpoint(run, model, step=step, **{**state, **changes})


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@contextmanager
def refused(text: str) -> Iterator[None]:
    with pytest.raises(UserError) as caught:
        yield
    assert str(caught.value) == text


def unseal(path: Path) -> None:
    """Take the checksums out of a checkpoint, as if an older version had written it."""
    values = json.loads((path / "state.json").read_text())
    for key in ("checksum", "files"):
        values.pop(key, None)
    (path / "state.json").write_text(json.dumps(values))


@contextmanager
def rewritten(run: Run) -> Iterator[tuple[dict[str, Tensor], dict[str, str]]]:
    """Change the tensors and the metadata of the weights' file, of which there is no checksum then."""
    unseal(run.checkpoint_path(3))
    path = run.checkpoint_path(3) / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    yield tensors, metadata
    save_file(tensors, path, metadata)


STEP = "run/checkpoints/step-0000003"
WEIGHTS = f"{STEP}/model.safetensors"
REMEDY = "take another step with --checkpoint STEP, or delete its folder to resume from the step before"


# What goes in comes out


@pytest.mark.parametrize("which", ["best", "last", "3"])
def test_a_model_comes_back_bit_for_bit(run: Run, which: str) -> None:
    model = TransformerXL(MODEL, TOKENIZER.n_vocab)
    save(run, model, 3)
    loaded = load_model(run, which)
    assert loaded.step == 3
    assert loaded.run == run
    assert loaded.config == Config(model=MODEL)
    assert loaded.tokenizer.fingerprint() == TOKENIZER.fingerprint()
    assert not loaded.model.training
    expected = model.state_dict()
    assert list(loaded.model.state_dict()) == list(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.model.state_dict().items())
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded.model(tokens, None, tokens)[0], model.eval()(tokens, None, tokens)[0])


@pytest.mark.parametrize(
    "config",
    [
        replace(MODEL, tied=False),
        replace(MODEL, norm="post"),
        replace(MODEL, n_layer=1, d_head=3, d_inner=5, clamp_len=2, same_length="mem_len"),
        replace(MODEL, untie_r=True),
        replace(MODEL, position="shaw", max_relative_position=2),
        replace(MODEL, position="shaw", shaw_values=False, clamp_len=3),
        replace(MODEL, position="sinusoid", absolute_positions="continue"),
        replace(MODEL, position="learned"),
        replace(MODEL, reset_memory_at_documents=True),
        replace(MODEL, cutoffs=(20, 100), div_val=2, d_embed=12),
        replace(MODEL, cutoffs=(20,), d_embed=4, tied=False, tie_projs="none"),
        replace(MODEL, cutoffs=(20, 100), div_val=2, proj_same_dim=False, tie_projs="all"),
    ],
    ids=lambda config: str(config.position) + str(config.cutoffs),
)
def test_every_kind_of_model_comes_back(run: Run, config: ModelConfig) -> None:
    model = TransformerXL(config, TOKENIZER.n_vocab)
    whole = Config(model=config, data=DataConfig(document_per_file=config.reset_memory_at_documents))
    run.config_path.write_text(dump(whole), encoding="utf-8")
    save(run, model, 3, metadata=describe_weights(config, TOKENIZER))
    for name, tensor in load_model(run).model.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@given(
    shapes=st.dictionaries(
        st.text(min_size=1).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=4)),
        max_size=5,
    ),
    values=st.dictionaries(
        st.text().filter(lambda name: name not in ("files", "checksum")),
        st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    ),
)
def test_a_state_comes_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, shapes: Mapping[str, Any], values: dict[str, object]
) -> None:
    run = Run(tmp_path_factory.mktemp("run"))
    tensors = {name: torch.randn(shape).mul(3).to(dtype) for name, (dtype, shape) in shapes.items()}
    path = save(run, TransformerXL(MODEL, 5), 1, tensors=tensors, values=values)
    found_tensors, found_values = load_state(path)
    assert found_values == values
    assert found_tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found_tensors[name].dtype == tensor.dtype
        assert torch.equal(found_tensors[name], tensor)


def test_a_state_keeps_values_that_are_not_finite(run: Run) -> None:
    tensors = {"x": torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])}
    found, _ = load_state(save(run, TransformerXL(MODEL, 5), 1, tensors=tensors))
    assert found["x"].view(torch.int32).tolist() == tensors["x"].view(torch.int32).tolist()


def test_views_are_saved_as_what_they_show(run: Run) -> None:
    base = torch.arange(24.0).view(4, 6)
    tensors = {"rows": base.clone()[1:3], "column": base.clone()[:, 2], "turned": base.clone().T}
    found, _ = load_state(save(run, TransformerXL(MODEL, 5), 1, tensors=tensors))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_loaded_tensors_do_not_depend_on_the_file(run: Run) -> None:
    tensors = {"x": torch.arange(1000.0)}
    path = save(run, TransformerXL(MODEL, TOKENIZER.n_vocab), 3, tensors=tensors)
    found, _ = load_state(path)
    model = load_model(run).model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for file in (path / "model.safetensors", path / "state.safetensors"):
        with file.open("r+b") as handle:
            handle.write(bytes(file.stat().st_size))
    assert torch.equal(found["x"], tensors["x"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_loading_leaves_random_numbers_alone(run: Run) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load_model(run)
    assert torch.equal(torch.rand(3), expected)


def test_weights_go_into_an_existing_model(run: Run) -> None:
    model = TransformerXL(MODEL, TOKENIZER.n_vocab)
    weight = model.embed.weight
    load_weights(run.checkpoint_path(3), model)
    assert model.embed.weight is weight
    assert torch.equal(weight, load_model(run).model.embed.weight)


# The files


def test_all_files_may_be_read_by_whom_the_umask_lets(run: Run) -> None:
    modes = {path.stat().st_mode & 0o777 for path in run.checkpoint_path(3).iterdir()}
    assert modes == {run.config_path.stat().st_mode & 0o777}


def test_equal_states_write_equal_bytes_whatever_the_order(run: Run) -> None:
    model = TransformerXL(MODEL, TOKENIZER.n_vocab)
    tensors = {f"t{i}": torch.full((i,), float(i)) for i in range(12)}
    values = {f"v{i}": i for i in range(12)}
    found = []
    for step, order in ((1, 1), (2, -1)):
        found.append(
            hashes(
                save(
                    run,
                    model,
                    step,
                    tensors=dict(list(tensors.items())[::order]),
                    values=dict(list(values.items())[::order]),
                    metadata=dict(list(describe_weights(MODEL, TOKENIZER).items())[::order]),
                )
            )
        )
    assert found[0] == found[1]
    assert sorted(found[0]) == ["model.safetensors", "state.json", "state.safetensors"]


def test_weights_describe_themselves_in_one_key(run: Run) -> None:
    with safe_open(WEIGHTS, "pt") as file:
        metadata = file.metadata()
    assert list(metadata) == ["txl"]
    described = json.loads(metadata["txl"])
    assert metadata["txl"] == json.dumps(described, sort_keys=True)
    assert described["model"]["d_model"] == 8
    assert described["model"]["clamp_len"] is None
    assert described["tokenizer"]["kind"] == "byte"
    assert described["tokenizer"]["fingerprint"] == TOKENIZER.fingerprint()


def test_a_save_that_fails_leaves_what_was_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    before = hashes(run.checkpoint_path(3))

    def fail(*_: object) -> bytes:
        raise OSError(28, "No space left on device")

    model = TransformerXL(MODEL, TOKENIZER.n_vocab)
    monkeypatch.setattr(checkpoint, "dump_json", fail)  # the last of the three files
    for step in (3, 4):
        with refused(f"run/checkpoints/step-000000{step}: cannot be written; no space left on device"):
            save(run, model, step)
    assert list_checkpoints(run) == [3]
    assert [path.name for path in run.checkpoints_folder.iterdir()] == ["step-0000003"]
    assert hashes(run.checkpoint_path(3)) == before


def test_a_step_saved_again_replaces_the_old(run: Run) -> None:
    model = TransformerXL(MODEL, TOKENIZER.n_vocab)
    save(run, model, 3, values={"again": True})
    assert load_state(run.checkpoint_path(3))[1] == {"again": True}
    assert torch.equal(load_model(run).model.embed.weight, model.embed.weight)
    assert [path.name for path in run.checkpoints_folder.iterdir()] == ["step-0000003"]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_never_saved(run: Run, value: float) -> None:
    model = TransformerXL(MODEL, TOKENIZER.n_vocab)
    with torch.no_grad():
        model.layers[1].attention.q.weight[2, 1] = value
    text = r"^step 4: `layers\.1\.attention\.q\.weight` is not finite, so nothing was saved$"
    with pytest.raises(NonFiniteError, match=text):
        save(run, model, 4)
    assert list_checkpoints(run) == [3]
    assert len(list(run.checkpoints_folder.iterdir())) == 1


# What does not belong together


def test_a_renamed_tensor_is_refused(run: Run) -> None:
    with rewritten(run) as (tensors, _):
        tensors["module.embed.weight"] = tensors.pop("embed.weight")
    text = f"{WEIGHTS}: has no tensor `embed.weight`; it has `module.embed.weight` instead; {REMEDY}"
    with refused(text):
        load_model(run)
    with refused(text):
        load_weights(run.checkpoint_path(3), TransformerXL(MODEL, TOKENIZER.n_vocab))


def test_a_missing_tensor_is_refused(run: Run) -> None:
    with rewritten(run) as (tensors, _):
        del tensors["position_bias"]
    with refused(f"{WEIGHTS}: has no tensor `position_bias`; the file is incomplete; {REMEDY}"):
        load_model(run)


def test_a_tensor_too_many_is_refused(run: Run) -> None:
    with rewritten(run) as (tensors, _):
        tensors["x" * 5000] = torch.zeros(1)
    with refused(f"{WEIGHTS}: has a tensor that is not the model's; got `{'x' * 100}`; {REMEDY}"):
        load_model(run)


def test_another_shape_is_refused(run: Run) -> None:
    with rewritten(run) as (tensors, _):
        tensors["content_bias"] = torch.zeros(4, 2)
    with refused(
        f"{WEIGHTS}: `content_bias` has another shape than the model's; got [4, 2], expected [2, 4]; {REMEDY}"
    ):
        load_model(run)


def test_another_type_is_refused(run: Run) -> None:
    with rewritten(run) as (tensors, _):
        tensors["content_bias"] = tensors["content_bias"].half()
    with refused(f"{WEIGHTS}: `content_bias` must be float32; got F16; {REMEDY}"):
        load_model(run)


def test_another_config_is_refused(run: Run) -> None:
    run.config_path.write_text(dump(Config(model=replace(MODEL, d_inner=16))), encoding="utf-8")
    with refused(f"{STEP}: written for d_inner 32, config.yaml says 16; put the run's own config.yaml back"):
        load_model(run)
    run.config_path.write_text(dump(Config(model=replace(MODEL, clamp_len=7))), encoding="utf-8")
    with refused(
        f"{STEP}: written for clamp_len nothing, config.yaml says 7; put the run's own config.yaml back"
    ):
        load_model(run)


@contextmanager
def redescribed(run: Run) -> Iterator[dict[str, Any]]:
    """Change what the weights' file says of the model."""
    with rewritten(run) as (_, metadata):
        described = json.loads(metadata["txl"])
        yield described["model"]
        metadata["txl"] = json.dumps(described, sort_keys=True)


# Of these settings there were none when the first files were written.
YOUNG = (
    *("position", "untie_r", "max_relative_position", "shaw_values", "absolute_positions", "d_embed"),
    *("cutoffs", "div_val", "tie_projs", "proj_same_dim", "init_std", "proj_init_std"),
    *("final_norm", "norm_eps", "memory_start", "reset_memory_at_documents"),
)


def test_settings_that_an_older_file_does_not_name_have_their_defaults(run: Run) -> None:
    expected = load_model(run).model.state_dict()
    with redescribed(run) as described:
        for name in YOUNG:
            del described[name]
    assert sorted(described) == [
        *("clamp_len", "d_head", "d_inner", "d_model", "dropatt", "dropout", "mem_len", "n_head", "n_layer"),
        *("norm", "same_length", "tgt_len", "tied"),
    ]
    assert all(torch.equal(t, expected[name]) for name, t in load_model(run).model.state_dict().items())
    run.config_path.write_text(dump(Config(model=replace(MODEL, cutoffs=(3, 7)))), encoding="utf-8")
    with refused(
        f"{STEP}: written for cutoffs nothing, config.yaml says 3,7; put the run's own config.yaml back"
    ):
        load_model(run)
    run.config_path.write_text(dump(Config(model=replace(MODEL, position="learned"))), encoding="utf-8")
    with refused(
        f"{STEP}: written for position relative, config.yaml says learned; put the run's own config.yaml back"
    ):
        load_model(run)


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("d_attic", 3, "unknown setting `d_attic` in `model`"),
        ("d_model", "wide", "model.d_model: must be a whole number of at least 2"),
        ("d_model", 10**39, "model.d_model: must be a whole number of at least 2 and at most 1000000; got"),
        ("d_model", 10**400, "damaged, not valid JSON; a whole number of more than 40 digits"),
        ("cutoffs", [5, 3], "model.cutoffs: must be ascending whole numbers"),
        ("cutoffs", [[]], "model.cutoffs: must be ascending whole numbers"),
        ("div_val", 1000, "written for div_val 1000, config.yaml says 1"),
    ],
)
def test_settings_of_a_file_that_cannot_be_are_refused(
    run: Run, name: str, value: object, fault: str
) -> None:
    with redescribed(run) as described:
        described[name] = value
    with pytest.raises(UserError) as caught:
        load_model(run)
    assert str(caught.value).startswith(STEP)
    assert fault in str(caught.value)
    assert len(str(caught.value)) < 400


def test_cutoffs_beyond_the_vocabulary_are_refused_at_their_line(run: Run) -> None:
    run.config_path.write_text(dump(Config(model=replace(MODEL, cutoffs=(7, 256)))), encoding="utf-8")
    line = 1 + run.config_path.read_text().splitlines().index("  cutoffs: [7, 256]")
    with pytest.raises(UserError, match=rf"^run/config\.yaml:{line}: .*cutoffs must stay below .* of 256; "):
        load_model(run)


def test_a_multitude_of_cutoffs_is_refused_at_once(run: Run) -> None:
    many = ", ".join(map(str, range(1, 20_000)))
    with redescribed(run) as described:
        described["cutoffs"] = list(range(1, 1_000_000))
    begun = time.monotonic()
    with pytest.raises(UserError) as caught:
        load_model(run)
    assert str(caught.value).endswith("metadata `txl`: cutoffs: must be 64 at most; got 999,999")
    plain = run.config_path.read_text()
    assert "cutoffs: []" in plain
    run.config_path.write_text(plain.replace("cutoffs: []", f"cutoffs: [{many}]"), encoding="utf-8")
    with pytest.raises(UserError, match="cutoffs must be 64 at most; got 19,999"):
        load_model(run)
    # Many times what it takes; building a model of so many parts would take longer.
    assert time.monotonic() - begun < 30


def test_another_tokenizer_is_refused(run: Run) -> None:
    other = build_tokenizer("char", vocab_size=None, text=lambda: iter([b"abc"]), n_bytes=3, seed=0)
    other.save(run.tokenizer_folder)
    with refused(
        f"{STEP}: trained with another tokenizer than run/tokenizer.json; "
        f"sha256 {TOKENIZER.fingerprint()[:12]}, got {other.fingerprint()[:12]}; "
        "put the run's own tokenizer back"
    ):
        load_model(run)


def test_weights_of_another_program_are_refused(run: Run) -> None:
    with rewritten(run) as (_, metadata):
        metadata.clear()
        metadata["format"] = "pt"
    with refused(f"{WEIGHTS}: has no metadata `txl`; not a checkpoint of txl"):
        load_model(run)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "metadata `txl`: damaged, not valid JSON; "),
        ("[" * 100_000, "metadata `txl`: damaged, not valid JSON; "),
        ("[]", "metadata `txl`: damaged; must hold a JSON object, got list"),
        ('{"model": [], "tokenizer": {}}', "metadata `txl` must hold `model` and `tokenizer`; damaged"),
    ],
)
def test_damaged_metadata_is_refused(run: Run, text: str, fault: str) -> None:
    with rewritten(run) as (_, metadata):
        metadata["txl"] = text
    with pytest.raises(UserError, match=f"^{re.escape(f'{WEIGHTS}: {fault}')}"):
        load_model(run)


# Files that are damaged, hostile or gone


def overwrite(path: Path, data: bytes) -> None:
    if path.name != "state.json":
        unseal(path.parent)
    path.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors"])
def test_a_file_cut_anywhere_is_refused(run: Run, name: str) -> None:
    path = run.checkpoint_path(3) / name
    whole = path.read_bytes()
    for length in sorted({0, 1, 7, 8, 9, 40, len(whole) // 2, len(whole) - 1}):
        overwrite(path, whole[:length])
        with pytest.raises(
            UserError, match=f"^{path}: (cut short or not safetensors|damaged); .*; {REMEDY}$"
        ):
            load_model(run) if name == "model.safetensors" else load_state(run.checkpoint_path(3))


def test_a_file_that_is_too_long_is_refused(run: Run) -> None:
    with Path(WEIGHTS).open("ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match=f"^{WEIGHTS}: damaged; .*; {REMEDY}$"):
        load_model(run)


class Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Path.touch, (Path("pwned"),)


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors", "state.json"])
@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_a_pickle_is_never_opened(run: Run, name: str, kind: str) -> None:
    path = run.checkpoint_path(3) / name
    path.unlink()
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Bomb()))
    else:
        torch.save(Bomb(), path)
    with pytest.raises(UserError, match=f"^{path}: "):
        load_model(run) if name == "model.safetensors" else load_state(run.checkpoint_path(3))
    assert not Path("pwned").exists()
    if name != "state.json":
        with refused(f"{path}: a pickle or archive, not safetensors; txl never opens those; {REMEDY}"):
            load_model(run) if name == "model.safetensors" else load_state(run.checkpoint_path(3))


def header(values: dict[str, Any], n_data: int = 0) -> bytes:
    text = json.dumps(values).encode()
    return struct.pack("<Q", len(text)) + text + bytes(n_data)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2) + b"{}" + b"left over",
        struct.pack("<Q", 200_000) + b"[" * 200_000,
        header({"x": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4]}}, 4),
        header({"x": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}, 4),
        header({"x": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 0]}}),
        header({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, 4),
        header({"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, 8),
        header({"x": {"dtype": "Q9", "shape": [1], "data_offsets": [0, 4]}}, 4),
    ],
)
def test_headers_that_lie_are_refused_without_taking_memory(run: Run, data: bytes) -> None:
    for path in (Path(WEIGHTS), run.checkpoint_path(3) / "state.safetensors"):
        overwrite(path, data)
    before = peak_bytes()
    with pytest.raises(UserError, match=f"^{WEIGHTS}: (cut short or not safetensors|damaged|)"):
        load_model(run)
    with pytest.raises(UserError, match=r"/state\.safetensors: "):
        load_state(run.checkpoint_path(3))
    assert peak_bytes() - before < 100 << 20


@pytest.mark.parametrize(
    "giant",
    [
        ModelConfig(d_model=4096, n_head=2, d_inner=1 << 20),
        replace(MODEL, n_layer=10_000),
        replace(MODEL, position="learned", tgt_len=1 << 30),
        replace(MODEL, position="shaw", max_relative_position=10**6),
        replace(MODEL, d_embed=10**6),
        replace(MODEL, d_embed=10**6, cutoffs=(2, 4), div_val=1000),
    ],
    ids=["wide", "deep", "positions", "distances", "embedding", "clusters"],
)
def test_a_config_that_asks_for_a_giant_takes_no_memory(run: Run, giant: ModelConfig) -> None:
    run.config_path.write_text(dump(Config(model=giant)), encoding="utf-8")
    with rewritten(run) as (_, metadata):
        metadata["txl"] = json.dumps(describe_weights(giant, TOKENIZER), sort_keys=True)
    before = peak_bytes()
    with pytest.raises(
        UserError, match=f"^{WEIGHTS}: too small for this model; got [0-9,]+ bytes, the weights "
    ):
        load_model(run)
    assert peak_bytes() - before < 100 << 20


@given(
    sizes=st.fixed_dictionaries(
        {
            "n_layer": st.integers(1, 3),
            "d_model": st.sampled_from([4, 6]),
            "n_head": st.integers(1, 3),
            "d_head": st.integers(1, 4),
            "d_inner": st.integers(1, 9),
            "tgt_len": st.integers(1, 5),
            "norm": st.sampled_from(["pre", "post"]),
        }
    ),
    scheme=st.sampled_from(
        [
            {},
            {"untie_r": True},
            {"position": "shaw", "max_relative_position": 3},
            {"position": "shaw", "max_relative_position": 0, "shaw_values": False},
            {"position": "sinusoid"},
            {"position": "learned"},
        ]
    ),
    vocabulary=st.fixed_dictionaries(
        {
            "tied": st.booleans(),
            "cutoffs": st.sampled_from([(), (2,), (1, 3)]),
            "d_embed": st.sampled_from([None, 4, 5]),
            "div_val": st.sampled_from([1, 2]),
            "tie_projs": st.sampled_from(["none", "tail", "all"]),
            "proj_same_dim": st.booleans(),
        }
    ),
)
@settings(max_examples=60)
def test_the_size_that_a_model_must_have_is_that_of_its_matrices(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: dict[str, Any],
    scheme: dict[str, Any],
    vocabulary: dict[str, Any],
) -> None:
    config = ModelConfig(**sizes, **scheme, **vocabulary)
    run, model = Run(tmp_path_factory.mktemp("run")), TransformerXL(config, 5)
    weights = save(run, model, 1) / "model.safetensors"
    checkpoint.check_size(weights.parent, config, 5)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim >= 2 and "bias" not in name)
    weights.write_bytes(bytes(4 * matrices))
    checkpoint.check_size(weights.parent, config, 5)
    weights.write_bytes(bytes(4 * matrices - 1))
    with pytest.raises(UserError, match="too small for this model"):
        checkpoint.check_size(weights.parent, config, 5)


def test_loading_does_not_load_what_it_does_not_need(run: Run) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from txlcli.checkpoint import load_model\n"
        "from txlcli.run import Run\n"
        "load_model(Run(Path('run')))\n"
        "assert 'sympy' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


# Damage is noticed by checksums


def damage(path: Path, how: str) -> None:
    """Damage a file as disks and copies do."""
    data = path.read_bytes()
    path.unlink()
    if how == "cut":
        path.write_bytes(data[:-7])
    elif how == "zeroed":
        path.write_bytes(bytes(len(data)))
    elif how == "flipped":
        path.write_bytes(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])
    else:
        assert how == "gone"


DAMAGES = ("cut", "zeroed", "flipped", "gone")


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors", "state.json"])
def test_any_damage_is_noticed(run: Run, name: str, how: str) -> None:
    folder = run.checkpoint_path(3)
    assert find_damage(folder, with_state=True) is None
    damage(folder / name, how)
    fault = find_damage(folder, with_state=True)
    assert fault is not None
    assert fault.startswith(f"{folder / name}: ")
    # Of the state's tensors nothing hangs for those who only want the weights, and a run may do without any.
    is_fine = name == "state.safetensors" or (name, how) == ("state.json", "gone")
    assert (find_damage(folder, with_state=False) is None) == is_fine


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_disk_that_fails_is_no_damage(run: Run, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    n_reads, plain = 0, os.pread

    def fail(*args: Any) -> bytes:
        nonlocal n_reads
        n_reads += 1
        if n_reads > at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(*args)

    monkeypatch.setattr(os, "pread", fail)
    place = WEIGHTS if at == 2 else f"{STEP}/state.json"  # which is read until nothing more comes
    with refused(
        f"{place}: cannot be read; input/output error; see to its permissions and its disk, "
        "or move step-0000003 out of the run"
    ):
        find_damage(run.checkpoint_path(3), with_state=True)


def test_faults_in_plain_words(run: Run) -> None:
    folder = run.checkpoint_path(3)
    size = Path(WEIGHTS).stat().st_size
    damage(Path(WEIGHTS), "flipped")
    for which in ("best", "last", "3"):  # it is the only one
        with refused(f"{WEIGHTS}: damaged; its bytes are not those that were written; {REMEDY}"):
            load_model(run, which)
    with Path(WEIGHTS).open("ab") as file:
        file.write(b"more")
    with refused(f"{WEIGHTS}: damaged; got {size + 4:,} bytes, it was written with {size}; {REMEDY}"):
        load_model(run)
    damage(folder / "state.json", "flipped")
    with pytest.raises(UserError, match=r"/state\.json: damaged"):
        load_model(run)
    save(run, TransformerXL(MODEL, TOKENIZER.n_vocab), 3)
    assert load_model(run).damage is None


def test_a_bit_that_flips_anywhere_in_the_values_is_noticed(run: Run) -> None:
    path = run.checkpoint_path(3) / "state.json"
    whole = path.read_bytes()
    values = json.loads(whole)
    for at in range(len(whole)):
        data = whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :]
        path.write_bytes(data)
        with suppress(UserError):
            load_values(path.parent)
            assert json.loads(data) == values  # one blank for another


def test_values_cannot_pretend_to_have_checksums(run: Run) -> None:
    path = run.checkpoint_path(3) / "state.json"
    plain = json.loads(path.read_text())
    for changes in ({"checksum": None}, {"files": None}, {"files": []}, {"files": {}}, {"x": "\ud800"}):
        path.write_text(json.dumps({**plain, **changes}))
        assert find_damage(path.parent, with_state=True)
    for files in ([], {}, {"model.safetensors": 1}, {"model.safetensors": {"bytes": "x", "sha256": []}}):
        values = {"step": 3, "files": files}
        path.write_text(json.dumps({**values, "checksum": checkpoint._checksum(values)}))
        assert find_damage(path.parent, with_state=True)


def test_last_is_the_newest_that_is_whole_and_it_is_said(run: Run) -> None:
    model = TransformerXL(MODEL, TOKENIZER.n_vocab)
    for step in (5, 7, 9):
        save(run, model, step)
    write_pointers(run, Pointers(7, 9, 1.0))
    damage(run.checkpoint_path(9) / "model.safetensors", "flipped")
    weights = "run/checkpoints/step-000000{}/model.safetensors"
    fault = ": damaged; its bytes are not those that were written"
    loaded = load_model(run, "last")
    assert loaded.step == 7
    assert loaded.damage == f"{weights.format(9)}{fault}; step 7 is used instead"
    assert load_model(run).damage is None
    damage(run.checkpoint_path(7) / "model.safetensors", "flipped")
    loaded = load_model(run, "last")
    assert loaded.step == 5
    assert loaded.damage == f"{weights.format(9)}{fault}, and 1 more before it; step 5 is used instead"
    # Another's weights are not what was asked for.
    for which, step in (("best", 7), ("7", 7), ("9", 9)):
        with refused(f"{weights.format(step)}{fault}; {REMEDY}"):
            load_model(run, which)
    write_pointers(run, Pointers(None, 9, None))  # before the first evaluation best is last
    assert load_model(run).step == 5
    for step in (3, 5):
        damage(run.checkpoint_path(step) / "model.safetensors", "flipped")
    with refused(f"{weights.format(9)}{fault}; no other checkpoint of run is whole"):
        load_model(run, "last")


def test_checkpoints_of_before_there_were_checksums_load(run: Run) -> None:
    expected = load_state(run.checkpoint_path(3))
    unseal(run.checkpoint_path(3))
    assert find_damage(run.checkpoint_path(3), with_state=True) is None
    assert load_state(run.checkpoint_path(3))[1] == expected[1]
    assert load_model(run, "last").damage is None
    (run.checkpoint_path(3) / "state.safetensors").write_bytes(b"short")
    assert find_damage(run.checkpoint_path(3), with_state=True)
    for name in ("state.safetensors", "state.json"):
        (run.checkpoint_path(3) / name).unlink()
    assert load_model(run, "last").damage is None


def test_what_is_written_is_what_is_hashed(run: Run) -> None:
    folder = run.checkpoint_path(3)
    values = json.loads((folder / "state.json").read_text())
    assert set(values) == {"checksum", "files", "step"}
    expected = hashes(folder)
    del expected["state.json"]
    assert {name: entry["sha256"] for name, entry in values["files"].items()} == expected
    assert {name: entry["bytes"] for name, entry in values["files"].items()} == {
        name: (folder / name).stat().st_size for name in expected
    }


def peak_bytes() -> int:
    if sys.platform == "win32":
        pytest.skip("no resource module here")
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def test_missing_files_are_named(run: Run) -> None:
    folder = run.checkpoint_path(3)
    for name in ("state.safetensors", "state.json"):
        (folder / name).rename(folder / "away")
        with refused(f"{folder / name}: cannot be read; no such file or directory"):
            load_state(folder)
        (folder / "away").rename(folder / name)
    Path(WEIGHTS).unlink()
    with refused(f"{WEIGHTS}: cannot be read; no such file or directory; {REMEDY}"):
        load_model(run)


def test_a_large_state_json_is_not_read(run: Run) -> None:
    path = run.checkpoint_path(3) / "state.json"
    overwrite(path, b'{"x": "' + b"x" * (1 << 20) + b'"}')
    with pytest.raises(UserError, match=f"^{path}: too large; "):
        load_state(run.checkpoint_path(3))


def test_a_run_moved_elsewhere_loads(run: Run) -> None:
    write_pointers(run, Pointers(3, 3, 1.0))
    expected = load_model(run).model.embed.weight
    shutil.move("run", "elsewhere")
    moved = Run(Path("elsewhere"))
    assert choose_checkpoint(moved) == Path("elsewhere/checkpoints/step-0000003")
    assert torch.equal(load_model(moved).model.embed.weight, expected)
