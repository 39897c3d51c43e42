"""The presets: what their headers say, what they count, and that each trains on a user's text."""

import json
import math
import re
import shlex
from pathlib import Path

import pytest
import torch
import typer.main
from typer.testing import CliRunner

from txlcli.cli import main
from txlcli.cli.app import app
from txlcli.config import DEFAULT, LEAVES, dump, flatten, load, presets, read_settings
from txlcli.model import TransformerXL
from txlcli.train.optim import has_muon

# The vocabulary of the published model, and its parameters there.
PUBLISHED = {
    "enwik8-base": (204, 41_055_436),
    "enwik8-large": (204, 277_231_820),
    "text8-base": (27, 40_964_635),
    "text8-large": (27, 277_050_395),
    "wt103-base": (267_735, 151_107_538),
    "wt103-large": (267_735, 285_205_322),
    "lm1b-base": (793_471, 357_812_082),
    "lm1b-large": (793_471, 838_078_062),
}
OPENING = ["Reproduces", "Command", "Expected", "Hardware, time"]
SIZES = "--n-layer 2 --d-model 64 --n-head 2 --d-head 16 --d-inner 32 --tgt-len 16 --mem-len 16"
SMALL = f"{SIZES} --batch-size 2 --steps 2 --eval-every 2 --eval-tokens 40 --device cpu --precision fp32"
LINES = [f"the quick brown fox jumps over {number % 7} lazy dogs\n" for number in range(20)]
TEST_TEXT = "".join(LINES[:3])


def header(name: str) -> dict[str, str]:
    """The comment lines that open a preset: `# Key: text`, and lines that continue it."""
    found: dict[str, str] = {}
    for line in presets()[name].read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if line.startswith("#   "):
            key = list(found)[-1]
            found[key] += " " + line[1:].strip()
        else:
            key, _, text = line.removeprefix("# ").partition(": ")
            found[key] = text
    return found


def arguments(name: str, key: str) -> list[str]:
    """The command in a header, without `txl`."""
    program, *rest = shlex.split(header(name)[key])
    assert program == "txl"
    return rest


def run(*args: str, code: int = 0) -> str:
    """Run a command line; its stdout, or stderr where it is to fail."""
    result = CliRunner().invoke(main, list(args))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.stderr
    return result.stderr if code else result.stdout


def count(name: str, n_vocab: int) -> int:
    with torch.device("meta"):
        model = TransformerXL(load(presets()[name]).model, n_vocab)
    assert sum(model.n_parameters()) == sum(p.numel() for p in model.parameters())
    return sum(model.n_parameters())


@pytest.fixture
def texts(tmp_path: Path) -> None:
    """What a user brings, in the working folder."""
    for name in ("corpus", "train", "valid"):
        Path(f"{name}.txt").write_text("".join(LINES))
    Path("test.txt").write_text(TEST_TEXT)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_parameters_to_the_digit(name: str) -> None:
    n_vocab, n_parameters = PUBLISHED[name]
    assert count(name, n_vocab) == n_parameters
    text = header(name)["Parameters"]
    assert text.startswith(f"{n_parameters:,} with the published vocabulary of {n_vocab:,}")
    of_bytes = re.search(r"([\d,]+) with the 256 bytes of txl", text)
    assert (of_bytes is not None) == (load(presets()[name]).data.tokenizer == "byte")
    if of_bytes is not None:
        assert of_bytes[1] == f"{count(name, 256):,}"


def test_untying_the_two_biases_is_what_the_large_word_model_has_beyond_the_pytorch_script() -> None:
    model = load(presets()["wt103-large"]).model
    n_more = (model.n_layer - 1) * 2 * model.n_head * model.d_head
    assert f"{PUBLISHED['wt103-large'][1] - n_more:,}" in header("wt103-large")["Settings"]


@pytest.mark.parametrize("name", presets())
def test_a_preset_opens_with_its_header_and_keeps_its_settings(name: str, tmp_path: Path) -> None:
    lines = presets()[name].read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    assert lines[first] == "data:"
    assert name not in PUBLISHED or all(len(line) <= 110 for line in lines[:first])
    assert first <= 10
    keys = list(header(name))
    assert keys[:4] == OPENING
    assert all(header(name).values())
    if name in PUBLISHED:
        assert keys[4:7] == ["Evaluate", "Parameters", "Conventions"]
    config = load(presets()[name])
    (tmp_path / "config.yaml").write_text(dump(config), encoding="utf-8")
    assert load(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_preset_leaves_nothing_to_defaults(name: str) -> None:
    settings = read_settings(presets()[name])
    config = load(presets()[name])
    left = {leaf.name for leaf in LEAVES if leaf.section in ("model", "optim")} - set(settings)
    absent = {"max_relative_position", "shaw_values", "absolute_positions", "d_embed", "accumulate"}
    absent |= {"final_norm"}  # of pre-norm models only
    absent |= {"reset_memory_at_documents"}  # of corpora that are made of documents only
    if config.model.div_val == 1:
        absent |= {"tie_projs", "proj_same_dim"}
    if config.data.tokenizer == "byte":
        absent |= {"cutoffs", "div_val"}
    assert left == absent
    assert config.model.d_embed is None
    assert (config.optim.accumulate, config.model.norm, config.model.same_length) == (1, "post", "off")
    assert all(sourced.origin != DEFAULT for sourced in settings.values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_lengths_of_evaluation_are_flags_and_plausible(name: str) -> None:
    command, *rest = arguments(name, "Evaluate")
    assert command == "eval"
    group = typer.main.get_command(app)
    given = group.commands["eval"].make_context("txl eval", rest, resilient_parsing=False).params
    trained = load(presets()[name]).model
    mem_len, tgt_len = int(given["mem_len"]), int(given["tgt_len"])
    assert given["split"] == "test"
    assert mem_len > trained.mem_len
    assert 1 < tgt_len <= trained.tgt_len
    assert given["clamp_len"] == "none" or trained.tgt_len < int(given["clamp_len"]) < mem_len
    assert given["same_length"] == ("mem_len" if name.endswith("base") else "mem_len+1")


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_commands_of_a_header_run_on_a_users_text(name: str, texts: None) -> None:
    is_words = load(presets()[name]).data.tokenizer == "word"
    cutoffs = ["--cutoffs", "4,8"] if is_words else []
    run(*arguments(name, "Command"), *SMALL.split(), *cutoffs)
    asked = dict(zip(arguments(name, "Evaluate")[1::2], arguments(name, "Evaluate")[2::2], strict=True))
    scored = json.loads(run(*arguments(name, "Evaluate"), "--device", "cpu", "--json"))
    (row,) = scored["rows"]
    assert (str(row["mem_len"]), str(row["tgt_len"])) == (asked["--mem-len"], asked["--tgt-len"])
    assert scored["protocol"]["same_length"] == asked["--same-length"]
    assert str(scored["protocol"]["clamp_len"] or "none") == asked["--clamp-len"]
    n_lines = TEST_TEXT.count("\n")
    n_characters, n_words = len(TEST_TEXT) - n_lines, len(TEST_TEXT.split())
    units = {"enwik8": n_characters, "text8": n_characters + n_lines}
    assert row["tokens"] == units.get(name.partition("-")[0], n_words + n_lines) - 1
    if name.startswith("enwik8"):
        assert row["bits_per_byte"] == pytest.approx(row["nll"] / math.log(2))
    # What no flag changed is what the preset says.
    (made,) = Path("runs").iterdir()
    here, there = flatten(load(made / "config.yaml")), flatten(load(presets()[name]))
    changed = {flag.removeprefix("--").replace("-", "_") for flag in SMALL.split() if flag.startswith("--")}
    changed |= {"corpus", "valid", "test", "d_embed", "save_every", "attention", *(["cutoffs"] * is_words)}
    assert {name: here[name] for name in here if name not in changed} == {
        name: there[name] for name in there if name not in changed
    }


@pytest.mark.parametrize("name", [name for name in presets() if name not in PUBLISHED])
def test_the_other_presets_train_too(name: str, texts: None) -> None:
    optimizer = [] if has_muon() else ["--optimizer", "adamw"]
    run(*arguments(name, "Command"), *SMALL.split(), *optimizer)


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name.startswith(("wt103", "lm1b"))])
def test_published_cutoffs_are_refused_where_the_words_are_few(name: str, texts: None) -> None:
    path = presets()[name]
    line = 1 + next(i for i, text in enumerate(path.read_text().splitlines()) if "cutoffs:" in text)
    cutoffs = ",".join(map(str, load(path).model.cutoffs))
    *_, last = run(*arguments(name, "Command"), *SMALL.split(), code=2).splitlines()
    assert re.fullmatch(
        rf"error: {re.escape(str(path))}:{line}: cutoffs must stay below the vocabulary of \d+; "
        rf"got {cutoffs}; give smaller ones, or auto to derive them",
        last,
    )
    assert not list(Path().glob("runs/*"))
    run(*arguments(name, "Command"), *SMALL.split(), "--cutoffs", "auto")
