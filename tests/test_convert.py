"""Other implementations' checkpoints: every tensor finds its place, and whatever does not fit is refused."""

import itertools
import json
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from typer.testing import CliRunner

from txlcli import UserError
from txlcli.bench import run_subject
from txlcli.checkpoint import load_model
from txlcli.cli import main
from txlcli.config import ModelConfig, load
from txlcli.convert import Row, convert
from txlcli.convert.machine import Foreign
from txlcli.convert.names import Kind, Naming
from txlcli.convert.pickles import read_pickled
from txlcli.convert.settings import settings_of
from txlcli.convert.sources import open_source
from txlcli.convert.weights import match
from txlcli.model import TransformerXL, clusters_of
from txlcli.run import (
    Conversion,
    Pointers,
    Run,
    describe_run,
    read_conversion,
    read_pointers,
    write_conversion,
)

KINDS: tuple[Kind, ...] = ("huggingface", "authors", "nvidia")
WORDS = "<eos> the of and in to was <unk> on as for with old over light they north again river"
SYMBOLS = WORDS.split()
N_VOCAB = len(SYMBOLS)
BASE = ModelConfig(n_layer=2, d_model=8, n_head=2, d_head=3, d_inner=10, tgt_len=4, mem_len=6, norm="post")


# Sources: files as the three would write them, made of weights of ours


def naming_of(kind: Kind, config: ModelConfig, ties: tuple[bool, ...] | None = None) -> Naming:
    clusters = clusters_of(config, N_VOCAB)
    own = clusters.output_projections(config.tie_projs)
    found = ties or tuple(i not in own and clusters.has_projection(i) for i in range(clusters.n_tail + 1))
    return Naming(
        kind=kind,
        clusters=clusters,
        n_layer=config.n_layer,
        is_tied=config.tied,
        is_untied_r=config.untie_r,
        ties=found,
    )


@cache
def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        state = TransformerXL(config, N_VOCAB).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def state_of(naming: Naming, weights: Mapping[str, Tensor], *, aliases: bool = True) -> dict[str, Tensor]:
    """Put weights of ours under the names of a source: the table of names, read the other way."""
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    state: dict[str, Tensor] = {}
    for piece in naming.pieces(shapes):
        if not piece.is_copy:
            tensor = state.setdefault(piece.names[0], torch.empty(piece.shape))
            start, end = piece.rows
            rows = weights[piece.target][slice(*piece.target_rows)].reshape(end - start, *piece.shape[1:])
            tensor[start:end] = rows.flip(0) if piece.is_flipped else rows
            if aliases:
                state |= dict.fromkeys(piece.names, tensor)
    d_model = weights["layers.0.attention.o.weight"].shape[0]
    state[naming.frequencies] = 1 / 10000 ** (torch.arange(0.0, d_model, 2.0) / d_model)
    return state


def model_config(config: ModelConfig, ties: tuple[bool, ...]) -> dict[str, Any]:
    """Say settings with the names of the family."""
    return {
        "n_token": N_VOCAB,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "d_model": config.d_model,
        "d_head": config.d_head,
        "d_inner": config.d_inner,
        "dropout": config.dropout,
        "dropatt": config.dropatt,
        "tie_weight": config.tied,
        "d_embed": config.d_embed or config.d_model,
        "div_val": config.div_val,
        "tie_projs": list(ties),
        "pre_lnorm": config.norm == "pre",
        "tgt_len": config.tgt_len,
        "ext_len": 0,
        "mem_len": config.mem_len,
        "cutoffs": list(config.cutoffs),
        "same_length": config.same_length != "off",
        "attn_type": 0,
        "clamp_len": -1 if config.clamp_len is None else config.clamp_len,
        "sample_softmax": -1,
    }


class Authors:
    """Stand-ins for the authors' classes, by their names, so that files mention these."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._modules = {name: ModuleType(name) for name in ("mem_transformer", "proj_adaptive_softmax")}
        for name, module in self._modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    def make(self, name: str, /, **attributes: Any) -> nn.Module:
        module = self._modules["proj_adaptive_softmax" if name.startswith("Projected") else "mem_transformer"]
        if not hasattr(module, name):
            setattr(module, name, type(name, (nn.Module,), {"__module__": module.__name__}))
        made: nn.Module = getattr(module, name)()
        for key, value in attributes.items():
            setattr(made, key, value)
        return made

    def model(self, config: ModelConfig, state: Mapping[str, Tensor]) -> Any:
        """Make a model of a state, in which one tensor may have several names."""
        parameters = {id(tensor): nn.Parameter(tensor) for tensor in state.values()}

        def fill(module: nn.Module, prefix: str) -> nn.Module:
            for name in dict(module.named_parameters(recurse=False)):
                setattr(module, name, parameters[id(state[f"{prefix}.{name}"])])
            return module

        def listed(prefix: str) -> nn.ParameterList:
            names = [name for name in state if re.fullmatch(rf"{re.escape(prefix)}\.\d+", name)]
            return nn.ParameterList(parameters[id(state[name])] for name in sorted(names))

        sizes = {"d_model": config.d_model, "n_head": config.n_head, "d_head": config.d_head}
        is_pre = config.norm == "pre"
        table = {
            "n_token": N_VOCAB,
            "d_embed": config.d_embed or config.d_model,
            "d_proj": config.d_model,
            "cutoffs": [*config.cutoffs, N_VOCAB],
            "div_val": config.div_val,
        }
        n_table = sum(name.startswith("word_emb.emb_layers.") for name in state)
        top = self.make("MemTransformerLM", **sizes, n_token=N_VOCAB, n_layer=config.n_layer, ext_len=0)
        top.tgt_len, top.mem_len, top.d_embed = config.tgt_len, config.mem_len, table["d_embed"]
        top.attn_type, top.sample_softmax = 0, -1
        top.same_length = config.same_length != "off"
        top.clamp_len = -1 if config.clamp_len is None else config.clamp_len
        top.drop = nn.Dropout(config.dropout)
        for name in ("r_w_bias", "r_r_bias"):
            setattr(top, name, parameters[id(state[name])])
        top.word_emb = self.make("AdaptiveEmbedding", **table, emb_scale=config.d_model**0.5)
        top.word_emb.emb_layers = nn.ModuleList(
            fill(nn.Embedding(1, 1), f"word_emb.emb_layers.{i}") for i in range(n_table)
        )
        top.word_emb.emb_projs = listed("word_emb.emb_projs")
        top.crit = self.make("ProjectedAdaptiveLogSoftmax", **table)
        if config.cutoffs:
            top.crit.cluster_weight = parameters[id(state["crit.cluster_weight"])]
            top.crit.cluster_bias = parameters[id(state["crit.cluster_bias"])]
        top.crit.out_layers = nn.ModuleList(
            fill(nn.Linear(1, 1), f"crit.out_layers.{i}") for i in range(n_table)
        )
        top.crit.out_projs = listed("crit.out_projs")
        top.layers = nn.ModuleList()
        for n in range(config.n_layer):
            attention = self.make(
                "RelPartialLearnableMultiHeadAttn", **sizes, scale=1 / config.d_head**0.5, pre_lnorm=is_pre
            )
            for name in ("qkv_net", "r_net", "o_net"):
                linear = fill(nn.Linear(1, 1, bias=False), f"layers.{n}.dec_attn.{name}")
                setattr(attention, name, linear)
            attention.drop, attention.dropatt = nn.Dropout(config.dropout), nn.Dropout(config.dropatt)
            attention.layer_norm = fill(
                nn.LayerNorm(1, eps=config.norm_eps), f"layers.{n}.dec_attn.layer_norm"
            )
            feedforward = self.make(
                "PositionwiseFF", d_model=config.d_model, d_inner=config.d_inner, pre_lnorm=is_pre
            )
            prefix = f"layers.{n}.pos_ff"
            feedforward.CoreNet = nn.Sequential(
                fill(nn.Linear(1, 1), f"{prefix}.CoreNet.0"),
                nn.ReLU(inplace=True),
                nn.Dropout(config.dropout),
                fill(nn.Linear(1, 1), f"{prefix}.CoreNet.3"),
                nn.Dropout(config.dropout),
            )
            feedforward.layer_norm = fill(nn.LayerNorm(1, eps=config.norm_eps), f"{prefix}.layer_norm")
            top.layers.append(
                self.make("RelPartialLearnableDecoderLayer", dec_attn=attention, pos_ff=feedforward)
            )
        top.pos_emb = self.make("PositionalEmbedding")
        top.pos_emb.register_buffer("inv_freq", state["pos_emb.inv_freq"])
        return top


@pytest.fixture
def authors(monkeypatch: pytest.MonkeyPatch) -> Authors:
    return Authors(monkeypatch)


def settle(kind: Kind, config: ModelConfig) -> ModelConfig:
    """Give settings what those of a source always have."""
    rule = {"huggingface": "mem_len", "authors": "mem_len", "nvidia": "mem_len+1"}[kind]
    return replace(
        config,
        d_embed=config.d_embed or config.d_model,
        final_norm=config.norm == "post",
        same_length=config.same_length if config.same_length == "off" else rule,
        memory_start="zeros" if kind == "huggingface" else "empty",
    )


def draw(config: ModelConfig) -> dict[str, Tensor]:
    """Draw weights, biases too, so that no two rows are equal."""
    state = TransformerXL(config, N_VOCAB).state_dict()
    return {name: torch.randn_like(tensor) * 0.3 for name, tensor in state.items()}


def write_huggingface(
    config: ModelConfig, state: Mapping[str, Tensor], *, form: str = "bin", **changes: Any
) -> Path:
    folder = Path("source")
    folder.mkdir()
    values = {
        **model_config(config, naming_of("huggingface", config).ties),
        "untie_r": config.untie_r,
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "model_type": "transfo-xl",
        "init_std": 0.02,
        **changes,
    }
    values["vocab_size"] = values.pop("n_token")
    for name in [name for name, value in values.items() if value is None]:
        del values[name]
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    if form == "bin":
        torch.save(dict(state), folder / "pytorch_model.bin")
    else:
        save_file({name: tensor.clone() for name, tensor in state.items()}, folder / "model.safetensors")
    return folder


def write_nvidia(config: ModelConfig, state: Mapping[str, Tensor], **changes: Any) -> Path:
    path = Path("checkpoint_best.pt")
    values = model_config(config, naming_of("nvidia", config).ties) | changes
    torch.save(
        {
            "model_config": values,
            "model_state": dict(state),
            "vocab": None,
            "train_step": 40,
            "memory": [[torch.ones(3)]],
            "optimizer_state": {"state": {0: {"exp_avg": torch.ones(2)}}},
            "best_val_loss": 3.25,
        },
        path,
    )
    return path


def write_authors(authors: Authors, config: ModelConfig, state: Mapping[str, Tensor]) -> Path:
    path = Path("model.pt")
    torch.save(authors.model(config, state), path)
    return path


def write(kind: Kind, authors: Authors, config: ModelConfig, state: Mapping[str, Tensor]) -> Path:
    if kind == "huggingface":
        return write_huggingface(config, state)
    return write_nvidia(config, state) if kind == "nvidia" else write_authors(authors, config, state)


def bare_model(run: Run) -> TransformerXL:
    return run_subject(run, {}).build(torch.device("cpu"))


def check_same(run: Run, weights: Mapping[str, Tensor]) -> None:
    state = bare_model(run).state_dict()
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[name], weights[name]) for name in weights)


@contextmanager
def refused(text: str) -> Iterator[None]:
    """Expect a refusal by its whole text, and nothing left of the run."""
    before = sorted(Path().rglob("*"))
    with pytest.raises(UserError) as caught:
        yield
    assert str(caught.value) == text
    assert "\n" not in text
    assert sorted(Path().rglob("*")) == before


# Names


ALL = [
    replace(
        BASE,
        n_layer=1 + untie_r,
        tied=tied,
        div_val=div_val,
        cutoffs=cutoffs,
        d_embed=d_embed,
        tie_projs=tie_projs,
        untie_r=untie_r,
        # Names do not depend on it, so each form takes its turn.
        norm="pre" if i % 3 == 2 else "post",
        final_norm=i % 3 != 2,
    )
    for i, (tied, (div_val, d_embed), cutoffs, tie_projs, untie_r) in enumerate(
        itertools.product(
            (True, False),
            ((1, 8), (1, 6), (2, 8), (2, 12), (4, 64)),
            ((), (5,), (4, 9, 12)),
            ("none", "tail", "all"),
            (True, False),
        )
    )
]


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_bijections(kind: Kind) -> None:
    # One covering in each direction, whatever the settings: rows of ours once, rows of theirs once.
    for config in ALL:
        if config.untie_r and kind != "huggingface":
            continue
        shapes = shapes_of(config)
        pieces = naming_of(kind, config).pieces(shapes)
        ours = Counter((piece.target, row) for piece in pieces for row in range(*piece.target_rows))
        theirs = Counter((piece.names[0], row) for piece in pieces for row in range(*piece.rows))
        assert not any(piece.is_copy for piece in pieces)
        assert ours == Counter((name, row) for name, shape in shapes.items() for row in range(shape[0]))
        expected = {piece.names[0]: piece.shape for piece in pieces}
        assert theirs == Counter((name, row) for name, shape in expected.items() for row in range(shape[0]))
        for piece in pieces:
            assert expected[piece.names[0]] == piece.shape
        # No name means two things.
        of_name: dict[str, set[str]] = {}
        for piece in pieces:
            for name in piece.names:
                of_name.setdefault(name, set()).add(piece.names[0])
        assert all(len(mains) == 1 for mains in of_name.values())
        assert not of_name.keys() & {naming_of(kind, config).frequencies}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_come_back_through_the_names_of_a_source(kind: Kind) -> None:
    for config in ALL[:: 7 if kind == "huggingface" else 5]:
        if config.untie_r and kind != "huggingface":
            continue
        weights = {name: torch.randn(shape) for name, shape in shapes_of(config).items()}
        naming = naming_of(kind, config)
        state = state_of(naming, weights)
        found = {name: torch.full_like(tensor, torch.nan) for name, tensor in weights.items()}
        for piece in naming.pieces(shapes_of(config)):
            rows = found[piece.target][slice(*piece.target_rows)]
            rows.copy_(piece.cut(state[piece.names[-1]]).reshape(rows.shape))
        assert all(torch.equal(found[name], weights[name]) for name in weights)


IN_LAYER = {
    "dec_attn.qkv_net.weight": [18, 8],
    "dec_attn.r_net.weight": [6, 8],
    "dec_attn.o_net.weight": [8, 6],
    "dec_attn.layer_norm.weight": [8],
    "dec_attn.layer_norm.bias": [8],
    "pos_ff.CoreNet.0.weight": [10, 8],
    "pos_ff.CoreNet.0.bias": [10],
    "pos_ff.CoreNet.3.weight": [8, 10],
    "pos_ff.CoreNet.3.bias": [8],
    "pos_ff.layer_norm.weight": [8],
    "pos_ff.layer_norm.bias": [8],
}


def expected_names(prefix: str, *groups: dict[str, list[int]]) -> dict[str, list[int]]:
    layers = {f"{prefix}layers.{n}.{name}": shape for n in (0, 1) for name, shape in IN_LAYER.items()}
    joined = {f"{prefix}pos_emb.inv_freq": [4], **layers}
    for group in groups:
        joined |= group
    return joined


def test_names_are_those_of_the_authors() -> None:
    config = replace(BASE, div_val=2, cutoffs=(5, 9), tie_projs="tail")
    state = state_of(naming_of("authors", config), draw(config))
    assert {name: list(tensor.shape) for name, tensor in state.items()} == expected_names(
        "",
        {"r_w_bias": [2, 3], "r_r_bias": [2, 3]},
        {f"word_emb.emb_layers.{i}.weight": [n, e] for i, (n, e) in enumerate([(5, 8), (4, 4), (10, 2)])},
        {f"word_emb.emb_projs.{i}": [8, e] for i, e in enumerate([8, 4, 2])},
        {"crit.cluster_weight": [2, 8], "crit.cluster_bias": [2]},
        {f"crit.out_layers.{i}.weight": [n, e] for i, (n, e) in enumerate([(5, 8), (4, 4), (10, 2)])},
        {f"crit.out_layers.{i}.bias": [n] for i, n in enumerate([5, 4, 10])},
        {f"crit.out_projs.{i}": [8, e] for i, e in enumerate([8, 4, 2])},
    )


def test_names_are_those_of_nvidia() -> None:
    config = replace(BASE, div_val=2, cutoffs=(5, 9), tie_projs="tail", tied=False)
    state = state_of(naming_of("nvidia", config), draw(config))
    assert {name: list(tensor.shape) for name, tensor in state.items()} == expected_names(
        "",
        {"r_w_bias": [2, 3], "r_r_bias": [2, 3]},
        {f"word_emb.emb_layers.{i}.weight": [n, e] for i, (n, e) in enumerate([(5, 8), (4, 4), (10, 2)])},
        {f"word_emb.emb_projs.{i}": [8, e] for i, e in enumerate([8, 4, 2])},
        {"crit.cluster_weight": [2, 8], "crit.cluster_bias": [2]},
        {f"crit.out_layers_weights.{i}": [n, e] for i, (n, e) in enumerate([(5, 8), (4, 4), (10, 2)])},
        {f"crit.out_layers_biases.{i}": [n] for i, n in enumerate([5, 4, 10])},
        {"crit.out_projs.0": [8, 8]},
        {f"crit.shared_out_projs.{i}": [8, e] for i, e in enumerate([8, 4, 2])},
    )


def test_names_are_those_of_hugging_face() -> None:
    config = replace(BASE, d_embed=6, cutoffs=(5,), tie_projs="tail", untie_r=True)
    state = state_of(naming_of("huggingface", config), draw(config))
    biases = {
        f"transformer.layers.{n}.dec_attn.{b}": [2, 3] for n in (0, 1) for b in ("r_w_bias", "r_r_bias")
    }
    assert {name: list(tensor.shape) for name, tensor in state.items()} == expected_names(
        "transformer.",
        biases,
        {"transformer.word_emb.emb_layers.0.weight": [19, 6], "transformer.word_emb.emb_projs.0": [8, 6]},
        {"crit.cluster_weight": [1, 6], "crit.cluster_bias": [1]},
        {"crit.out_layers.0.weight": [19, 6], "crit.out_layers.0.bias": [19]},
        {"crit.out_projs.0": [8, 6], "crit.out_projs.1": [8, 6]},
    )


# What goes in comes out


CONFIGS = {
    "plain": BASE,
    "untied": replace(BASE, tied=False, dropout=0.125, dropatt=0.25),
    "embed": replace(BASE, d_embed=6, tie_projs="all", clamp_len=5),
    "embed-cutoffs": replace(BASE, d_embed=6, cutoffs=(5, 9), same_length="mem_len"),
    "div": replace(BASE, div_val=2, cutoffs=(5, 9), norm_eps=1e-3),
    "div-untied": replace(BASE, div_val=2, cutoffs=(5, 9), tied=False, tie_projs="none"),
    "pre": replace(BASE, norm="pre", final_norm=False, mem_len=0),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_comes_through_bit_for_bit(kind: Kind, name: str, authors: Authors) -> None:
    # NVIDIA's file does not say what LayerNorm adds, since its code has only one number for it.
    config = settle(kind, CONFIGS[name] if kind != "nvidia" else replace(CONFIGS[name], norm_eps=1e-5))
    weights = draw(config)
    state = state_of(naming_of(kind, config), weights)
    converted = convert(write(kind, authors, config, state), Path("run"))
    assert converted.config.model == config
    assert load(Path("run/config.yaml")) == converted.config
    assert (converted.kind, converted.n_vocab, converted.tokenizer) == (kind, N_VOCAB, None)
    assert converted.n_parameters == sum(tensor.numel() for tensor in weights.values())
    assert converted.step == (40 if kind == "nvidia" else 0)
    check_same(converted.run, weights)
    # Every tensor of the source is accounted for, and every one of ours.
    assert {row.source for row in converted.rows} == state.keys()
    assert {row.target for row in converted.rows} - {None} == weights.keys()


def test_biases_of_each_layer_come_through() -> None:
    config = settle("huggingface", replace(BASE, untie_r=True))
    weights = draw(config)
    folder = write_huggingface(config, state_of(naming_of("huggingface", config), weights))
    converted = convert(folder, Path("run"))
    check_same(converted.run, weights)
    assert (
        Row("transformer.layers.1.dec_attn.r_w_bias", "content_bias", (2, 3), "joined: as rows 1 to 1 of 2")
        in converted.rows
    )


@pytest.mark.parametrize("form", ["bin", "safetensors"])
@pytest.mark.parametrize("keep", [0, -1])
def test_any_name_of_a_tied_tensor_is_enough(form: str, keep: int) -> None:
    config = settle("huggingface", replace(BASE, d_embed=6, cutoffs=(5, 9)))
    weights = draw(config)
    naming = naming_of("huggingface", config)
    state = state_of(naming, weights)
    for piece in naming.pieces(shapes_of(config)):
        kept = piece.names[keep]
        for name in piece.names:
            if name != kept:
                state.pop(name, None)
    assert ("crit.out_layers.0.weight" in state) == (keep == -1)
    assert ("transformer.r_w_bias" in state) == (keep == 0)
    converted = convert(write_huggingface(config, state, form=form), Path("run"))
    check_same(converted.run, weights)


def test_equal_aliases_in_a_file_that_shares_nothing_are_dropped() -> None:
    config = settle("huggingface", BASE)
    weights = draw(config)
    folder = write_huggingface(
        config, state_of(naming_of("huggingface", config), weights), form="safetensors"
    )
    converted = convert(folder, Path("run"))
    check_same(converted.run, weights)
    table = "transformer.word_emb.emb_layers.0.weight"
    assert (
        Row("crit.out_layers.0.weight", None, (N_VOCAB, 8), f"dropped: the same as {table}") in converted.rows
    )


def test_rows_say_what_was_done(authors: Authors) -> None:
    config = settle("authors", replace(BASE, n_layer=1, div_val=2, cutoffs=(5,)))
    state = state_of(naming_of("authors", config), draw(config))
    rows = convert(write_authors(authors, config, state), Path("run")).rows
    assert (
        Row(
            "layers.0.dec_attn.qkv_net.weight",
            "layers.0.attention.k.weight",
            (6, 8),
            "cut: rows 6 to 11 of 18",
        )
        in rows
    )
    assert Row("crit.cluster_weight", "head.cluster_weight", (1, 8), "flipped") in rows
    assert Row("crit.out_layers.1.bias", "head.bias", (14,), "joined: as rows 5 to 18 of 19") in rows
    assert Row("r_w_bias", "content_bias", (2, 3), "as is") in rows
    assert Row("crit.out_projs.1", None, (8, 4), "dropped: the same as word_emb.emb_projs.1") in rows
    assert Row("pos_emb.inv_freq", None, (4,), "dropped: computed here") in rows


@pytest.mark.parametrize("kind", KINDS)
def test_ties_without_a_rule_become_copies(kind: Kind, authors: Authors) -> None:
    config = settle(kind, replace(BASE, div_val=2, cutoffs=(5, 9), tie_projs="none"))
    ties = (True, False, True)
    weights = draw(config)
    for i in (0, 2):
        weights[f"head.projections.{i}"] = weights[f"embed.projections.{i}"]
    state = state_of(naming_of(kind, config, ties), weights)
    if kind == "huggingface":
        path = write_huggingface(config, state, tie_projs=ties)
    elif kind == "nvidia":
        path = write_nvidia(config, state, tie_projs=list(ties))
    else:
        path = write_authors(authors, config, state)
    converted = convert(path, Path("run"))
    assert converted.config.model == config
    check_same(converted.run, weights)
    place = {
        "huggingface": "source/config.json",
        "nvidia": "checkpoint_best.pt: model_config",
        "authors": "model.pt: module",
    }[kind]
    assert (
        f"{place}: only the projections of clusters 0, 2 serve input and output; each side has its own here, "
        "equal until it is trained"
    ) in converted.notices
    copies = [row for row in converted.rows if row.what == "copied"]
    assert [row.target for row in copies] == ["head.projections.0", "head.projections.2"]


def test_tables_of_which_some_are_tied_become_copies(authors: Authors) -> None:
    config = settle("authors", replace(BASE, div_val=2, cutoffs=(5, 9), tied=False))
    weights = draw(config)
    weights["head.weights.1"] = weights["embed.weights.1"]
    state = state_of(naming_of("authors", config), weights)
    state["crit.out_layers.1.weight"] = state["word_emb.emb_layers.1.weight"]
    converted = convert(write_authors(authors, config, state), Path("run"))
    check_same(converted.run, weights)
    assert (
        "model.pt: only the tables of clusters 1 serve input and output; each side has its own here, equal "
        "until it is trained"
    ) in converted.notices


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_of_numbers_become_float32(dtype: torch.dtype) -> None:
    config = settle("nvidia", BASE)
    weights = {name: tensor.to(dtype) for name, tensor in draw(config).items()}
    state = state_of(naming_of("nvidia", config), weights)
    state = {name: tensor.to(dtype) for name, tensor in state.items()}
    converted = convert(write_nvidia(config, state), Path("run"))
    check_same(converted.run, {name: tensor.float() for name, tensor in weights.items()})
    name = str(dtype).removeprefix("torch.")
    notices = [f"checkpoint_best.pt: weights in {name} became float32"]
    if dtype is not torch.float64:
        notices.append(
            f"checkpoint_best.pt: the frequencies of its sinusoids are rounded to {name}; here they are "
            "exact, so scores differ a little from the source's"
        )
    assert list(converted.notices[:-1]) == notices


def test_a_pickled_module_of_an_old_torch_comes_through(authors: Authors) -> None:
    config = settle("authors", replace(BASE, div_val=2, cutoffs=(5,)))
    weights = draw(config)
    model = authors.model(config, state_of(naming_of("authors", config), weights))
    with warnings.catch_warnings():
        # It looks for the classes' source text, which stand-ins do not have.
        warnings.simplefilter("ignore")
        torch.save(model, "model.pt", _use_new_zipfile_serialization=False)
    check_same(convert(Path("model.pt"), Path("run")).run, weights)


# Settings


def test_an_older_module_of_the_authors_has_no_sampled_softmax(authors: Authors) -> None:
    config = settle("authors", BASE)
    weights = draw(config)
    model = authors.model(config, state_of(naming_of("authors", config), weights))
    del model.sample_softmax
    torch.save(model, "model.pt")
    check_same(convert(Path("model.pt"), Path("run")).run, weights)


def test_settings_that_a_folder_of_hugging_face_leaves_out_are_its_classs() -> None:
    config = settle(
        "huggingface",
        ModelConfig(
            n_layer=1,
            d_model=16,
            n_head=16,
            d_head=64,
            d_inner=8,
            d_embed=16,
            norm="post",
            untie_r=True,
            tgt_len=128,
            mem_len=1600,
            clamp_len=1000,
            same_length="mem_len",
            dropout=0.1,
        ),
    )
    weights = draw(config)
    left_out = ("pre_lnorm", "n_head", "d_head", "tgt_len", "mem_len", "clamp_len", "same_length", "untie_r")
    folder = write_huggingface(
        config,
        state_of(naming_of("huggingface", config), weights),
        **dict.fromkeys(
            (*left_out, "tie_projs", "dropout", "dropatt", "attn_type", "sample_softmax", "model_type"), None
        ),
        layer_norm_epsilon=None,
        tie_word_embeddings=None,
        tie_weight=None,
    )
    converted = convert(folder, Path("run"))
    assert converted.config.model == config
    assert converted.notices[0] == "source/config.json: has no tgt_len; took segments of 128 tokens"


def test_older_names_of_settings_are_known() -> None:
    config = settle("huggingface", BASE)
    folder = write_huggingface(config, state_of(naming_of("huggingface", config), draw(config)))
    values = json.loads((folder / "config.json").read_text())
    values["n_token"] = values.pop("vocab_size")
    values["hidden_size"], values["num_hidden_layers"] = values.pop("d_model"), values.pop("n_layer")
    (folder / "config.json").write_text(json.dumps(values))
    assert convert(folder, Path("run")).config.model == config
    (folder / "config.json").write_text(json.dumps({**values, "vocab_size": 20}))
    with refused(
        "source/config.json: `n_token` and `vocab_size` contradict each other; got 19 and 20; "
        "put the checkpoint's own config.json there"
    ):
        convert(folder, Path("other"))


TAKE = "; take another checkpoint"
REFUSED_SETTINGS = [
    (
        {"attn_type": 1},
        "attn_type must be 0, the attention of the paper; got 1; the others have no place here",
    ),
    ({"sample_softmax": 5}, "sample_softmax must be off; got 5; its output layer has no place here"),
    ({"ext_len": 2}, "ext_len must be 0; got 2; context that is run again has no place here"),
    ({"n_layer": 2.0}, f"`n_layer` must be a whole number of at least 1; got 2.0{TAKE}"),
    ({"n_layer": True}, f"`n_layer` must be a whole number of at least 1; got True{TAKE}"),
    ({"n_layer": 0}, f"`n_layer` must be a whole number of at least 1; got 0{TAKE}"),
    ({"n_layer": "2"}, f'`n_layer` must be a whole number of at least 1; got "2"{TAKE}'),
    ({"n_token": -3}, f"`n_token` must be a whole number of at least 1; got -3{TAKE}"),
    ({"n_layer": 10**30}, f"`n_layer` is too large; got {10**30}, at most 10,000{TAKE}"),
    ({"d_model": 10**30}, f"`d_model` is too large; got {10**30}, at most 1,000,000{TAKE}"),
    ({"mem_len": 10**6 + 1}, f"`mem_len` is too large; got 1000001, at most 1,000,000{TAKE}"),
    ({"tgt_len": 2**40}, f"`tgt_len` is too large; got {2**40}, at most 1,000,000{TAKE}"),
    ({"tgt_len": [[1]]}, f"`tgt_len` must be a whole number of at least 1; got a list{TAKE}"),
    ({"mem_len": "\x1b[2J\n"}, f'`mem_len` must be a whole number of at least 0; got "\\x1b[2J\\n"{TAKE}'),
    ({"dropout": "much"}, f'`dropout` must be a number of at least 0 and below 1; got "much"{TAKE}'),
    ({"dropout": float("nan")}, f"`dropout` must be a number of at least 0 and below 1; got nan{TAKE}"),
    ({"dropatt": 1.5}, f"`dropatt` must be a number of at least 0 and below 1; got 1.5{TAKE}"),
    ({"clamp_len": 1e30}, f"`clamp_len` is too large; got 1e+30, at most {2**53:,}{TAKE}"),
    ({"pre_lnorm": "no"}, f'`pre_lnorm` must be true or false; got "no"{TAKE}'),
    ({"tie_projs": [0]}, f"`tie_projs` must be a list of true and false; got [0]{TAKE}"),
    ({"cutoffs": "all"}, f'`cutoffs` must be a list of whole numbers; got "all"{TAKE}'),
    (
        {"cutoffs": [9, 5]},
        "model.cutoffs: must be ascending whole numbers such as 2000,8000 or none or auto; got `9,5`",
    ),
    (
        {"cutoffs": [40]},
        "cutoffs: must stay below the vocabulary of 19; got 40; give smaller ones, or auto to derive them",
    ),
    ({"mem_len": 0, "same_length": True}, None),
    (
        {"div_val": 2},
        "div_val 2 without cutoffs projects d_embed 8 to a d_model just as wide; there is no place for that "
        "projection here",
    ),
]


@pytest.mark.parametrize(("changes", "text"), REFUSED_SETTINGS, ids=str)
def test_settings_without_a_place_are_refused(changes: dict[str, Any], text: str | None) -> None:
    config = settle("nvidia", BASE)
    path = write_nvidia(config, state_of(naming_of("nvidia", config), draw(config)), **changes)
    if text is None:  # NVIDIA's rule always leaves a query itself to see
        assert convert(path, Path("run")).config.model.same_length == "mem_len+1"
        return
    with refused(f"checkpoint_best.pt: model_config: {text}"):
        convert(path, Path("run"))


def test_a_missing_setting_is_refused() -> None:
    config = settle("nvidia", BASE)
    path = write_nvidia(config, state_of(naming_of("nvidia", config), draw(config)))
    content = torch.load(path)
    del content["model_config"]["clamp_len"]
    torch.save(content, path)
    with refused(
        "checkpoint_best.pt: model_config: has no `clamp_len`; not a file of the kind that it looks like"
    ):
        convert(path)


def set_at(*path: str, **attributes: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for name in path:
            model = getattr(model, name)
        for name, value in attributes.items():
            setattr(model, name, value)

    return change


def drop_attribute(model: Any) -> None:
    del model.clamp_len


def use_two_activations(model: Any) -> None:
    model.layers[1].pos_ff.CoreNet.insert(2, nn.ReLU())


REFUSED_MODULES: list[tuple[Callable[[Any], None], str]] = [
    (
        set_at(attn_type=2),
        "attn_type must be 0, the attention of the paper; got 2; the others have no place here",
    ),
    (set_at(sample_softmax=7), "sample_softmax must be off; got 7; its output layer has no place here"),
    (set_at(ext_len=7), "ext_len must be 0; got 7; context that is run again has no place here"),
    (drop_attribute, "has no `clamp_len`; not a file of the kind that it looks like"),
    (
        set_at("crit", div_val=2),
        ".crit: `div_val` must be the same everywhere; got 2 here and 1 at model.pt: module.word_emb",
    ),
    (set_at("word_emb", emb_scale=1.0), ".word_emb: emb_scale must be sqrt(d_model); got 1"),
    (
        set_at("word_emb", cutoffs=[5]),
        ".crit: `cutoffs` must be the same everywhere; got [19] here and [5] at model.pt: module.word_emb",
    ),
    (
        lambda model: set_at(scale=1.0)(model.layers[1].dec_attn),
        ".layers.1.dec_attn: scale must be 1 / sqrt(d_head); got 1",
    ),
    (
        lambda model: set_at("drop", p=0.5)(model.layers[1].dec_attn),
        ".layers.1.dec_attn.drop: `p` must be the same everywhere; got 0.5 here and 0.0 at model.pt: "
        "module.drop",
    ),
    (
        lambda model: set_at("layer_norm", eps=0.5)(model.layers[1].pos_ff),
        ".layers.1.pos_ff.layer_norm: `eps` must be the same everywhere; got 0.5 here and 1e-05 at model.pt: "
        "module.layers.0.dec_attn.layer_norm",
    ),
    (
        lambda model: set_at(pre_lnorm=True)(model.layers[0].pos_ff),
        ".layers.0.pos_ff: `pre_lnorm` must be the same everywhere; got True here and False at model.pt: "
        "module.layers.0.dec_attn",
    ),
    (
        use_two_activations,
        ".layers.1.pos_ff: CoreNet must be Linear, ReLU, Dropout, Linear, Dropout; got Linear, ReLU, ReLU, "
        "Dropout, Linear, Dropout",
    ),
]


@pytest.mark.parametrize(("change", "text"), REFUSED_MODULES, ids=[text[-40:] for _, text in REFUSED_MODULES])
def test_modules_that_compute_something_else_are_refused(
    change: Callable[[Any], None], text: str, authors: Authors
) -> None:
    config = settle("authors", BASE)
    model = authors.model(config, state_of(naming_of("authors", config), draw(config)))
    change(model)
    torch.save(model, "model.pt")
    with refused(f"model.pt: module{text}" if text.startswith(".") else f"model.pt: module: {text}"):
        convert(Path("model.pt"), Path("run"))


# Tensors


def huggingface_state() -> tuple[ModelConfig, dict[str, Tensor]]:
    config = settle("huggingface", BASE)
    return config, state_of(naming_of("huggingface", config), draw(config))


def test_a_missing_tensor_is_refused() -> None:
    config, state = huggingface_state()
    del state["transformer.layers.1.dec_attn.r_net.weight"]
    folder = write_huggingface(config, state)
    with refused(
        "source/pytorch_model.bin: has no tensor `transformer.layers.1.dec_attn.r_net.weight`, which the "
        "model that source/config.json describes needs for layers.1.attention.r.weight; not converted"
    ):
        convert(folder, Path("run"))


def test_leftovers_are_refused_by_name() -> None:
    config, state = huggingface_state()
    state |= {f"extra.{i}": torch.zeros(1) for i in range(5)}
    folder = write_huggingface(config, state)
    with refused(
        "source/pytorch_model.bin: 5 of its tensors have no place in the model that source/config.json "
        "describes; `extra.0`, `extra.1`, `extra.2`, ...; not converted"
    ):
        convert(folder, Path("run"))


@pytest.mark.parametrize("change", [lambda tensor: tensor + 1, lambda tensor: tensor.half()])
def test_an_output_that_settings_tie_but_weights_do_not_is_refused(
    change: Callable[[Tensor], Tensor],
) -> None:
    config, state = huggingface_state()
    state["crit.out_layers.0.weight"] = change(state["crit.out_layers.0.weight"])
    folder = write_huggingface(config, state)
    with refused(
        "source/pytorch_model.bin: `transformer.word_emb.emb_layers.0.weight` and `crit.out_layers.0.weight` "
        "differ, but source/config.json ties them; not converted"
    ):
        convert(folder, Path("run"))


def test_biases_that_settings_share_but_weights_do_not_are_refused() -> None:
    config, state = huggingface_state()
    name = "transformer.layers.1.dec_attn.r_r_bias"
    state[name] = state[name] + 1
    folder = write_huggingface(config, state)
    with refused(
        f"source/pytorch_model.bin: `transformer.r_r_bias` and `{name}` differ, but source/config.json ties "
        "them; not converted"
    ):
        convert(folder, Path("run"))


def test_another_shape_is_refused() -> None:
    config, state = huggingface_state()
    state["transformer.r_w_bias"] = torch.zeros(3, 2)
    folder = write_huggingface(config, state)
    with refused(
        "source/pytorch_model.bin: `transformer.r_w_bias` has another shape than source/config.json says; "
        "got [3, 2], expected [2, 3]; not converted"
    ):
        convert(folder, Path("run"))


@pytest.mark.parametrize("form", ["bin", "safetensors"])
def test_whole_numbers_are_no_weights(form: str) -> None:
    config, state = huggingface_state()
    name = "transformer.r_w_bias"
    state[name] = torch.zeros(2, 3, dtype=torch.int64)
    folder = write_huggingface(config, state, form=form)
    text = {
        "bin": "must hold floating point numbers; got torch.int64; not converted",
        "safetensors": "must be of F64, F32, F16, BF16; got I64; no weights",
    }[form]
    file = {"bin": "pytorch_model.bin", "safetensors": "model.safetensors"}[form]
    with refused(f"source/{file}: `{name}` {text}"):
        convert(folder, Path("run"))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e300])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    config, state = huggingface_state()
    name = "transformer.layers.0.pos_ff.CoreNet.3.bias"
    state[name] = state[name].double()
    state[name][3] = value
    folder = write_huggingface(config, state)
    with refused(
        f"source/pytorch_model.bin: `{name}` is not finite in float32; not converted; "
        "take an earlier checkpoint"
    ):
        convert(folder, Path("run"))


def test_other_sinusoids_are_refused() -> None:
    config, state = huggingface_state()
    state["transformer.pos_emb.inv_freq"] = 1 / 500 ** (torch.arange(0.0, 8, 2.0) / 8)
    folder = write_huggingface(config, state)
    with refused(
        "source/pytorch_model.bin: `transformer.pos_emb.inv_freq` is not 10000^(-2t/d_model); other "
        "sinusoids have no place here"
    ):
        convert(folder, Path("run"))


def test_another_number_of_layers_is_refused_before_any_is_built() -> None:
    config, state = huggingface_state()
    folder = write_huggingface(config, state, n_layer=10**4)
    with refused(
        "source/pytorch_model.bin: holds 2 layers, source/config.json says n_layer 10,000; not converted"
    ):
        convert(folder, Path("run"))


@pytest.mark.parametrize("name", ["n_token", "d_inner", "d_head", "n_head"])
def test_a_model_larger_than_its_file_is_refused_before_it_is_built(name: str) -> None:
    config = settle("nvidia", BASE)
    path = write_nvidia(config, state_of(naming_of("nvidia", config), draw(config)), **{name: 10**6})
    with pytest.raises(
        UserError,
        match=r"^checkpoint_best.pt: too small for the model that checkpoint_best.pt: model_config "
        r"describes; got [0-9,]+ bytes, the weights take [0-9,]+ at least; not converted$",
    ):
        convert(path, Path("run"))
    assert not Path("run").exists()


def test_tensors_that_share_their_numbers_cannot_claim_more_than_the_file() -> None:
    config = settle("huggingface", replace(BASE, d_inner=400))
    state = state_of(naming_of("huggingface", config), draw(config), aliases=False)
    claim = sum(4 * tensor.numel() for tensor in state.values())
    # Each begins a little further on in the same numbers, so that none is the same as another.
    numbers = torch.zeros(3 * 400 * 8 + len(state))
    for i, (name, tensor) in enumerate(sorted(state.items())):
        state[name] = numbers[i : i + tensor.numel()].view(tensor.shape)
    folder = write_huggingface(config, state)
    size = (folder / "pytorch_model.bin").stat().st_size
    with refused(
        f"source/pytorch_model.bin: its tensors claim {claim:,} bytes, more than the file's {size:,}; "
        "damaged; fetch the file again"
    ):
        convert(folder, Path("run"))


# Sources


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], "source: holds no checkpoint that is known"),
        (["config.json"], "source: has no model.safetensors or pytorch_model.bin beside its config.json"),
        (["pytorch_model.bin"], "source: has no config.json beside its pytorch_model.bin"),
        (
            ["config.json", "model.safetensors.index.json"],
            "source: its weights are cut into several files, which are not read",
        ),
        (["model.ckpt-0.index", "checkpoint"], "source: a TensorFlow checkpoint, which is not read"),
    ],
)
def test_a_folder_without_a_known_checkpoint_is_refused(names: list[str], text: str) -> None:
    Path("source").mkdir()
    for name in names:
        Path("source", name).write_bytes(b"{}")
    with refused(
        f"{text}; expected a folder of Hugging Face's TransfoXL, the authors' model.pt or NVIDIA's "
        "checkpoint_*.pt; name one of them"
    ):
        convert(Path("source"))


def test_a_folder_with_several_kinds_is_refused() -> None:
    Path("source").mkdir()
    for name in ("config.json", "model.safetensors", "model.pt", "checkpoint_3.pt"):
        Path("source", name).touch()
    with refused(
        "source: holds several checkpoints: model.safetensors, model.pt, checkpoint_3.pt; "
        "name the file to convert"
    ):
        convert(Path("source"))


def test_of_several_files_of_a_kind_the_best_is_taken() -> None:
    config = settle("nvidia", BASE)
    weights = draw(config)
    write_nvidia(config, state_of(naming_of("nvidia", config), weights))
    Path("source").mkdir()
    Path("checkpoint_best.pt").rename("source/checkpoint_best.pt")
    for name in ("last", "9", "10", "old"):
        Path("source", f"checkpoint_{name}.pt").touch()
    converted = convert(Path("source"))
    assert converted.source == Path("source/checkpoint_best.pt")
    assert converted.notices[0] == (
        "source: took checkpoint_best.pt; also there: checkpoint_last.pt, checkpoint_10.pt, checkpoint_9.pt"
    )


def test_a_run_is_no_source() -> None:
    config, state = huggingface_state()
    convert(write_huggingface(config, state), Path("run"))
    with refused("run: is a run of txl already; use it with --run or --init"):
        convert(Path("run"))


def test_other_contents_are_refused() -> None:
    expected = (
        "expected a folder of Hugging Face's TransfoXL, the authors' model.pt or NVIDIA's checkpoint_*.pt; "
        "name one of them"
    )
    contents: list[tuple[object, str]] = [
        ({"model": 1, "step": 2}, "holds a dict of model, step"),
        ([1], "holds [1]"),
        ([[1]], "holds a list"),
        ({}, "holds a dict of nothing"),
    ]
    for content, text in contents:
        torch.save(content, "x.pt")
        with refused(f"x.pt: {text}; {expected}"):
            convert(Path("x.pt"))
    torch.save({"a": torch.zeros(2)}, "x.pt")
    with refused(
        "x.pt: holds weights without settings; Hugging Face's config.json must lie beside it, and the "
        "authors' model.pt holds a module"
    ):
        convert(Path("x.pt"))
    with refused("y.pt: no such file or folder; name a checkpoint to convert"):
        convert(Path("y.pt"))


HUGGINGFACE_FAULTS = [
    ({"vocab_size": "19"}, '`vocab_size` must be a whole number of at least 1; got "19"'),
    ({"num_hidden_layers": 0}, "`num_hidden_layers` must be a whole number of at least 1; got 0"),
    ({"layer_norm_epsilon": 1e30}, "`layer_norm_epsilon` is too large; got 1e+30, at most 1"),
    ({"layer_norm_epsilon": 0}, "`layer_norm_epsilon` must be a number above 0 and at most 1; got 0"),
]


@pytest.mark.parametrize(("changes", "text"), HUGGINGFACE_FAULTS, ids=str)
def test_a_fault_is_told_by_the_name_in_the_file(changes: dict[str, Any], text: str) -> None:
    config, state = huggingface_state()
    folder = write_huggingface(config, state)
    values = json.loads((folder / "config.json").read_text())
    others = {"vocab_size": "n_token", "num_hidden_layers": "n_layer"}
    for name in changes:
        values.pop(others.get(name, name), None)
    (folder / "config.json").write_text(json.dumps({**values, **changes}))
    with refused(f"source/config.json: {text}; put the checkpoint's own config.json there"):
        convert(folder)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b'{"a": "\x80"}', "damaged, not valid JSON; not UTF-8 at byte 7"),
        (
            b'{"a": ' + b"1" * 5000 + b"}",
            "damaged, not valid JSON; a whole number of more than 40 digits",
        ),
        (b"[]", "damaged; must hold a JSON object, got list"),
    ],
)
def test_a_damaged_config_is_refused_with_what_to_do(data: bytes, text: str) -> None:
    config, state = huggingface_state()
    folder = write_huggingface(config, state)
    (folder / "config.json").write_bytes(data)
    with refused(f"source/config.json: {text}; put the checkpoint's own config.json there"):
        convert(folder)


def test_a_name_with_a_line_end_stays_on_one_line() -> None:
    with refused("a\\nb\\x1b: no such file or folder; name a checkpoint to convert"):
        convert(Path("a\nb\x1b"))


def test_a_text_or_folder_in_place_of_a_checkpoint_is_told_with_what_is_expected() -> None:
    expected = (
        "expected a folder of Hugging Face's TransfoXL, the authors' model.pt or NVIDIA's checkpoint_*.pt; "
        "name one of them"
    )
    Path("corpus.txt").write_text("First Citizen:\nBefore we proceed")
    with refused(f"corpus.txt: a text file, not a checkpoint; got 'First Citizen:'; {expected}"):
        convert(Path("corpus.txt"))
    Path("source/model.pt").mkdir(parents=True)
    with refused(f"source/model.pt: is a folder, not a file; {expected}"):
        convert(Path("source"))


def test_a_run_is_called_after_the_folder_of_a_file_with_a_usual_name() -> None:
    config, state = huggingface_state()
    folder = write_huggingface(config, state)
    assert convert(folder / "pytorch_model.bin").run.folder == Path("runs/source")
    (folder / "pytorch_model.bin").rename(folder / "large.bin")
    assert convert(folder / "large.bin").run.folder == Path("runs/large")


def test_a_folder_of_another_model_is_refused() -> None:
    config, state = huggingface_state()
    folder = write_huggingface(config, state, model_type="bert")
    with refused(
        'source/config.json: model_type must be transfo-xl; got "bert"; name a TransfoXL checkpoint'
    ):
        convert(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "config.json"])
def test_a_file_of_a_folder_stands_for_it(name: str) -> None:
    config, state = huggingface_state()
    folder = write_huggingface(config, state)
    assert convert(folder / name, Path("run")).source == folder / "pytorch_model.bin"


def test_a_damaged_safetensors_file_is_refused() -> None:
    config, state = huggingface_state()
    folder = write_huggingface(config, state, form="safetensors")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError, match=r"^source/model.safetensors: damaged; .*; fetch the file again$"):
        convert(folder, Path("run"))
    path.write_bytes(b"PK\x03\x04" + bytes(20))
    with refused(
        "source/model.safetensors: a pickle or archive, not safetensors; txl never opens those; "
        "fetch the file again"
    ):
        convert(folder, Path("run"))


# What a stranger's file may hold in place of what it should

JUNK = (
    None,
    True,
    -1,
    0,
    1,
    3,
    2**60,
    0.5,
    float("nan"),
    float("inf"),
    "x",
    b"x",
    (),
    [],
    {},
    [None],
    {"a": 1},
)


def containers(value: object) -> Iterator[Any]:
    """Walk the dicts and lists of what a file holds."""
    if isinstance(value, Foreign):
        yield from containers(value.state)
    elif isinstance(value, (dict, list)):
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from containers(item)


@pytest.mark.parametrize("kind", ["nvidia", "authors"])
def test_junk_is_refused_in_one_line(kind: Kind, authors: Authors, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settle(kind, replace(BASE, div_val=2, cutoffs=(5,)))
    path = write(kind, authors, config, state_of(naming_of(kind, config), draw(config)))
    rng = random.Random(3)
    texts = []
    for _ in range(80):
        content = read_pickled(path)
        places = [
            (c, key) for c in containers(content) for key in (c if isinstance(c, dict) else range(len(c)))
        ]
        container, key = rng.choice(places)
        if rng.random() < 0.2:
            del container[key]
        else:
            container[key] = rng.choice(JUNK)
        monkeypatch.setattr("txlcli.convert.sources.read_pickled", lambda *_, found=content: found)
        try:
            source = open_source(path)
            match(source, settings_of(source))
        except UserError as error:
            texts.append(str(error))
    assert 5 < len(texts) < 80
    assert all(text.startswith(f"{path}: ") and text.isprintable() for text in texts)


# The run


@pytest.fixture
def folder() -> Path:
    """Make a folder of Hugging Face's with a vocabulary of words."""
    config, state = huggingface_state()
    folder = write_huggingface(config, state)
    (folder / "vocab.txt").write_text("\n".join(SYMBOLS) + "\n", encoding="utf-8")
    return folder


def command(*args: object, code: int = 0) -> Any:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert result.exit_code == code, result.stderr
    return result


def test_a_run_is_whole_and_describes_itself(folder: Path) -> None:
    converted = convert(folder)
    run = converted.run
    assert run.folder == Path("runs/source")
    files = sorted(str(path.relative_to(run.folder)) for path in run.folder.rglob("*") if path.is_file())
    assert files == [
        "checkpoints/step-0000000/model.safetensors",
        "config.yaml",
        "converted.json",
        "pointers.json",
        "tokenizer.json",
    ]
    assert read_pointers(run) == Pointers(best=0, last=0)
    assert read_conversion(run) == Conversion("huggingface", N_VOCAB, has_tokenizer=True, start_id=0)
    loaded = load_model(run)
    assert (loaded.step, loaded.config, loaded.tokenizer.n_vocab) == (0, converted.config, N_VOCAB)
    summary = describe_run(run)
    assert (summary.tokenizer, summary.n_vocab, summary.step) == ("word", N_VOCAB, 0)
    assert converted.config.data.newlines == "eos"
    assert convert(folder).run.folder == Path("runs/source-2")


def test_equal_sources_make_equal_runs(folder: Path) -> None:
    runs = [convert(folder, Path(name)).run.folder for name in ("a", "b")]
    contents = [
        {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}
        for run in runs
    ]
    assert contents[0] == contents[1]


def test_a_run_scores_and_generates(folder: Path) -> None:
    convert(folder, Path("run"))
    Path("text.txt").write_text("the old river\nthey was north of the light\n", encoding="utf-8")
    result = json.loads(command("eval", "text.txt", "--run", "run", "--json", "--device", "cpu").stdout)
    assert result["rows"][0]["tokens"] == 10
    assert result["step"] == 0
    generated = command("generate", "--run", "run", "--max-tokens", 5, "--seed", 1, "--device", "cpu").stdout
    assert generated.strip()


def test_a_run_is_where_another_begins(folder: Path) -> None:
    convert(folder, Path("run"))
    Path("text.txt").write_text("the old river\nthey was north of the light\n" * 50, encoding="utf-8")
    command("train", "text.txt", "--init", "run", "--steps", 1, "--batch-size", 2, "--out", "new", "--quiet")
    old, new = load_model(Run(Path("run"))), load_model(Run(Path("new")), "0")
    assert new.tokenizer.fingerprint() == old.tokenizer.fingerprint()
    assert new.config.model.norm == "post"
    state = new.model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in old.model.state_dict().items())
    assert read_conversion(new.run) is None


def test_what_a_converted_run_cannot_do_is_refused(folder: Path) -> None:
    convert(folder, Path("run"))
    why = "run: was converted from a checkpoint of Hugging Face, which has"
    assert command("train", "--resume", "run", code=2).stderr == (
        f"error: {why} no training to continue; begin one with its weights: txl train CORPUS --init run\n"
    )
    assert command("eval", "--run", "run", code=2).stderr.splitlines()[-1] == (
        f"error: {why} no held-out text; name a file: txl eval FILE --run run"
    )


def test_without_a_tokenizer_there_is_no_text(folder: Path) -> None:
    (folder / "vocab.txt").unlink()
    run = convert(folder, Path("runs/a")).run
    assert not (run.folder / "tokenizer.json").exists()
    assert read_conversion(run) == Conversion("huggingface", N_VOCAB, has_tokenizer=False, start_id=0)
    Path("text.txt").write_text("the old river\n" * 50, encoding="utf-8")
    for args in (
        ("eval", "text.txt", "--run", "runs/a"),
        ("generate", "--run", "runs/a", "--prompt", "the"),
        ("train", "text.txt", "--init", "runs/a"),
    ):
        assert command(*args, code=2).stderr.splitlines()[-1] == (
            "error: runs/a: has no tokenizer, since its source had none that txl can use; text can be "
            "neither read nor written with it"
        )
    assert "none" in command("runs").stdout
    assert list(Path("runs").iterdir()) == [run.folder]


def test_a_vocabulary_of_its_own_may_be_named(folder: Path) -> None:
    (folder / "vocab.txt").rename("words.txt")
    assert convert(folder, Path("run")).tokenizer is None
    converted = convert(folder, Path("other"), vocab=Path("words.txt"))
    assert converted.tokenizer is not None
    assert converted.tokenizer.n_vocab == N_VOCAB
    with refused(
        "none.txt: cannot be read; no such file or directory; name the model's own with --vocab FILE"
    ):
        convert(folder, Path("third"), vocab=Path("none.txt"))


def test_a_folder_in_use_is_refused(folder: Path) -> None:
    Path("run").mkdir()
    Path("run/x").touch()
    with refused("--out: `run` exists and is not empty; name a new or empty folder"):
        convert(folder, Path("run"))


def test_a_run_that_fails_half_way_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("txlcli.convert.writing.write_pointers", fail)
    with pytest.raises(KeyboardInterrupt):
        convert(folder, Path("new/run"))
    assert not Path("new").exists()


def test_a_damaged_record_of_a_conversion_is_refused(folder: Path) -> None:
    run = convert(folder, Path("run")).run
    good = json.loads(run.conversion_path.read_text())
    for change in ({"kind": "gpt"}, {"n_vocab": 0}, {"start_id": 19}, {"has_tokenizer": 1}, {"more": 1}):
        run.conversion_path.write_text(json.dumps({**good, **change}))
        with refused(
            "run/converted.json: damaged; must hold kind, n_vocab, has_tokenizer, start_id; "
            "convert the checkpoint again"
        ):
            read_conversion(run)
    write_conversion(run, Conversion(**good))
    assert read_conversion(run) == Conversion(**good)
