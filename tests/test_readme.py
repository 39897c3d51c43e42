"""The commands of the README, as written, on a small corpus and cut to a few steps."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from txlcli.cli.app import app

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
SMALL = "--steps 4 --n-layer 1 --d-model 16 --n-head 2 --tgt-len 8 --mem-len 8 --batch-size 2"


def commands():
    blocks = re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("txl ")]


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text("Once upon a time there was a text of two lines.\nIt repeats.\n" * 60)


def test_the_commands_run_in_order(corpus):
    assert commands()[0].startswith("txl train")
    for command in commands():
        arguments = shlex.split(command)[1:]
        if arguments[0] == "train":
            arguments += SMALL.split()
        if arguments[0] == "generate":
            arguments += ["--max-tokens", "20"]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, f"{command}: {result.output}"
        assert arguments[0] == "train" or result.stdout.strip(), command


def test_the_python_lines_run(corpus):
    assert CliRunner().invoke(app, ["train", "corpus.txt", *SMALL.split()]).exit_code == 0
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["lm"].score("Once upon a time").bits_per_byte > 0


# Flags of pip, of every command, and of the scripts that stand beside the tests.
OTHERS = {"--index-url", "--json", "--help", "--version", "--authors", "--hugging-face"}


def test_every_flag_named_is_a_flag():
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)) - OTHERS
    helps = [
        CliRunner().invoke(app, [c, "--help"], env={"COLUMNS": "200"}).output
        for c in ("train", "generate", "eval", "bench", "config", "runs")
    ]
    for flag in named | {"--json"}:
        assert any(re.search(rf"{flag}\b", text) for text in helps), flag


def test_every_test_file_named_is_there():
    for name in re.findall(r"`(tests/\w+\.py)`", README):
        assert (Path(__file__).parent.parent / name).is_file(), name
