"""Checkpoints that other code bases wrote compute here what they computed there; see golden/README.md."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tests.foreign import FP32_BOUND, SEGMENTS, TGT_LEN, our_cached_step, our_step, run_segments, source_of
from tests.tolerance import assert_same
from txlcli.checkpoint import load_weights
from txlcli.cli import main
from txlcli.convert import convert
from txlcli.model import TransformerXL

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/case.json"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All cases, converted."""
    folder = tmp_path_factory.mktemp("golden")
    return {name: convert(source_of(GOLDEN / name), folder / name) for name in CASES}


def build(converted, **settings):
    """Build the converted model, or one of its weights and other settings."""
    model = TransformerXL(replace(converted.config.model, **settings), converted.n_vocab).eval()
    load_weights(converted.run.checkpoint_path(converted.step), model)
    return model


def expected(name):
    """Return the recorded numbers."""
    with np.load(GOLDEN / name / "expected.npz") as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files}


def log_probs(model, numbers, step=our_step):
    """Run the recorded segments."""
    return run_segments(step(model), numbers["tokens"][:, :-1].long(), SEGMENTS)


@pytest.mark.parametrize("name", CASES)
def test_log_probabilities_are_the_source_s(runs, name):
    model, numbers = build(runs[name]), expected(name)
    # Both sides round in float32, so the bound is not one of equal routes: it is what conversion promises.
    for step in (our_step, our_cached_step):
        assert (log_probs(model, numbers, step) - numbers["fp32"]).abs().max() <= FP32_BOUND
    assert_same(log_probs(model.double(), numbers), numbers["fp64"])


@pytest.mark.parametrize("name", CASES)
def test_a_text_scores_the_same_on_the_command_line(runs, name):
    command = ["eval", GOLDEN / name / "text.txt", "--run", runs[name].run.folder, "--json"]
    command += ["--tgt-len", TGT_LEN, "--device", "cpu", "--precision", "fp32"]
    result = CliRunner().invoke(main, [str(part) for part in command])
    assert result.exit_code == 0, result.stderr
    row, nats = json.loads(result.stdout)["rows"][0], expected(name)["text_fp64"]
    # The mean of many float32 losses, each within the bound of conversion.
    assert row["tokens"] == len(nats)
    assert abs(row["nll"] - nats.mean().item()) <= FP32_BOUND


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_would_show_a_lost_convention(runs, name):
    numbers, settings = expected(name), runs[name].config.model
    others = {"memory_start": {"empty": "zeros", "zeros": "empty"}[settings.memory_start]}
    if settings.same_length != "off":
        others["same_length"] = {"mem_len": "mem_len+1", "mem_len+1": "mem_len"}[settings.same_length]
    if settings.clamp_len is not None:
        others["clamp_len"] = None
    if settings.norm_eps != 1e-5:
        others["norm_eps"] = 1e-5
    for setting, value in others.items():
        wrong = log_probs(build(runs[name], **{setting: value}), numbers)
        assert (wrong - numbers["fp32"]).abs().max() > 100 * FP32_BOUND, setting
    model = build(runs[name])
    with torch.no_grad():
        for tensor in (model.head.cluster_weight, model.head.cluster_bias):
            tensor.copy_(tensor.flip(0))
    assert (log_probs(model, numbers) - numbers["fp32"]).abs().max() > 100 * FP32_BOUND


def test_the_files_cover_every_kind_and_transformation(runs):
    assert {converted.kind for converted in runs.values()} == {"authors", "huggingface", "nvidia"}
    done = {re.split("[:,]", row.what)[0] for converted in runs.values() for row in converted.rows}
    assert done == {"as is", "cut", "joined", "flipped", "copied", "dropped"}
    models = [converted.config.model for converted in runs.values()]
    for setting, values in {
        "tied": {True, False},
        "div_val": {1, 4},
        "untie_r": {True, False},
        "norm": {"post", "pre"},
        "final_norm": {True, False},
        "same_length": {"off", "mem_len", "mem_len+1"},
        "clamp_len": {None, 5},
        "memory_start": {"empty", "zeros"},
        "tie_projs": {"none", "tail"},
    }.items():
        assert {getattr(model, setting) for model in models} == values, setting


def test_the_files_hold_no_code_and_are_small():
    paths = [path for path in GOLDEN.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in paths) < 500_000
    stand_in = b"# The source text of this class is left out.\n"
    quoting = [
        path.parent.name for path in paths if path.name == "model.pt" and stand_in in path.read_bytes()
    ]
    assert sorted(quoting) == ["authors-div4-limits", "authors-old-golden"]
    for path in paths:
        if path.suffix != ".md":
            assert not re.search(rb"(?:^|\n) *(?:def|class|import|from) ", path.read_bytes()), path
