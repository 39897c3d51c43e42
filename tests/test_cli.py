import errno
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer.main
import yaml
from typer.testing import CliRunner

from tests.stores import write_sealed
from txlcli import UserError, config, train
from txlcli.api import load
from txlcli.cli import main
from txlcli.cli.flags import parse_mem_lens
from txlcli.cli.interactive import Conversation
from txlcli.cli.signals import Interruption
from txlcli.generate import SamplingOptions
from txlcli.report import Screen
from txlcli.run import Run

SIZES = "--d-model 16 --n-layer 2 --n-head 2 --tgt-len 8 --mem-len 8 --batch-size 4 --clamp-len none"
TINY = f"{SIZES} --device cpu --precision fp32 --optimizer adamw --lr 0.02".split()
LOWER_BOUNDS = ", so bits per byte and character are lower bounds"
TEXT = "".join(f"the quick brown fox jumps over {number % 7} lazy dogs.\n" for number in range(60))


def run(*args, code=0, stdin=None, env=None):
    """Run a command line in this process; return what it wrote and check its exit code."""
    result = CliRunner().invoke(main, [str(arg) for arg in args], input=stdin, env=env)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.stderr
    return result


def refusal(*args):
    """Run a command line that is refused; return the last line on stderr without `error: `."""
    result = run(*args, code=2)
    assert result.stdout == ""
    *before, line = result.stderr.splitlines()
    assert not any(line.startswith(("error", "Traceback")) for line in before)
    return line.removeprefix("error: ")


def start(*args, **kwargs):
    """Start the program in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    env |= kwargs.pop("env", {})
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *map(str, args)], stdout=pipe, stderr=pipe, env=env, **kwargs)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that the program itself has trained, to be read only."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text(TEXT)
    torch.set_num_threads(1)
    out = folder / "runs" / "text"
    flags = ["--tokenizer", "char", "--steps", "12", "--eval-every", "4", "--valid-fraction", "0.2"]
    run("train", folder / "text.txt", *TINY, *flags, "--test", folder / "text.txt", "--out", out)
    return out


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


# The flags of every command

SHARED_MACHINE = {
    "--device": "auto",
    "--precision": "auto",
    "--attention": "auto",
    "--threads": None,
    "--deterministic": False,
}
SETTINGS = {
    flag: None
    for leaf in config.LEAVES
    if leaf.flag is not None
    for flag in ([leaf.flag] if leaf.negative_flag is None else [f"{leaf.flag}/{leaf.negative_flag}"])
}
FLAGS = {
    "train": {
        "CORPUS": None,
        "--config/-c": None,
        "--out/-o": None,
        "--resume": None,
        "--stop-at": None,
        "--dry-run": False,
        "--quiet": False,
        **SETTINGS,
    },
    "generate": {
        "--prompt": None,
        "--prompt-file": None,
        "--echo/--no-echo": True,
        "--interactive": False,
        "--run": None,
        "--checkpoint": "best",
        "--moses": False,
        "--json": False,
        "--logprobs": False,
        "--quiet": False,
        "--max-tokens": 500,
        "--temperature": 0.8,
        "--top-k": 0,
        "--top-p": 0.95,
        "--min-p": 0.0,
        "--repetition-penalty": 1.0,
        "--seed": None,
        "--num-samples": 1,
        "--stop": None,
        "--mem-len": None,
        "--tgt-len": None,
        **SHARED_MACHINE,
    },
    "eval": {
        "FILE": None,
        "--run": None,
        "--checkpoint": "best",
        "--split": None,
        "--encoding": None,
        "--moses": False,
        "--text-field": None,
        "--document-separator": None,
        "--document-per-file": False,
        "--no-documents": False,
        "--by-line": False,
        "--per-token": None,
        "--sliding-window": False,
        "--window-tokens": None,
        "--json": False,
        "--quiet": False,
        "--mem-len": None,
        "--tgt-len": None,
        "--clamp-len": None,
        "--same-length": None,
        "--batch-size": None,
        **SHARED_MACHINE,
    },
    "convert": {"SOURCE": None, "--out/-o": None, "--vocab": None, "--json": False, "--quiet": False},
    "bench": {
        "--run": None,
        "--config/-c": None,
        "--vocab-size": None,
        "--only": None,
        "--json": False,
        "--quiet": False,
        "--repeats": 5,
        "--seconds": 3.0,
        "--batch-size": None,
        "--tgt-len": None,
        "--mem-len": None,
        **SHARED_MACHINE,
    },
    "config": {"KEY": None, "--list": False, "--run": None, "--config/-c": None, "--json": False},
    "runs": {"DIR": "runs", "--json": False},
}


def test_commands():
    assert list(typer.main.get_command(main).commands) == list(FLAGS)


@pytest.mark.parametrize("command", FLAGS)
def test_flags_and_defaults(command):
    found = {}
    for parameter in typer.main.get_command(main).commands[command].params:
        is_flag = parameter.opts[0].startswith("-")
        names = [*parameter.opts, *parameter.secondary_opts]
        found["/".join(names) if is_flag else parameter.metavar] = parameter.default
    assert found == FLAGS[command]


def test_settings_of_a_model_that_cannot_be_built_yet_have_no_flag():
    unbuilt = {"--plot", "--effective-context"}
    for command in FLAGS:
        text = run(command, "--help").stdout
        assert not unbuilt & set(re.findall(r"--[a-z-]+", text))
    assert "auto|eager|skew|sdpa|triton" in run("train", "--help", env={"COLUMNS": "200"}).stdout


def test_help_names_every_flag_with_its_default_and_real_examples():
    text = run("train", "--help", env={"COLUMNS": "240"}).stdout
    for leaf in config.LEAVES:
        if leaf.flag is not None:
            row = next(line for line in text.splitlines() if f"│ {leaf.flag} " in line)
            assert f"{leaf.help} [default: {leaf.default_text}]" in row
    assert "\n   txl train corpus.txt" in text
    for command in FLAGS:
        assert f"txl {command}" in run(command, "--help").stdout.partition("Examples:")[2]


def test_defaults_of_sampling_are_those_of_python():
    for flag, default in FLAGS["generate"].items():
        name = flag.removeprefix("--").replace("-", "_")
        if hasattr(SamplingOptions, name) and name != "stop":
            assert getattr(SamplingOptions, name) == default


def test_program_without_a_command_shows_its_help():
    assert run().stdout == run("--help").stdout
    assert "txl train corpus.txt" in run("-h").stdout


def test_version_names_what_a_bug_report_needs():
    lines = run("--version").stdout.splitlines()
    assert lines[0].startswith("txl ")
    assert lines[2].startswith(f"torch {torch.__version__}, ")
    assert lines[3].startswith("device c")
    assert lines[4].startswith("attention eager, skew, sdpa, ")
    if lines[3].startswith("device cpu"):
        assert lines[4].endswith(", no triton (triton needs a CUDA device)")


@pytest.mark.parametrize("args", [["train", "--help"], ["config"], ["generate", "--top-p", "0", "--x"]])
def test_help_does_not_load_torch(args):
    code = f"""if True:
        import sys
        from txlcli.cli import main
        try:
            main({args})
        except SystemExit:
            pass
        heavy = {{"torch", "numpy", "tqdm", "sentencepiece"}} & set(sys.modules)
        assert not heavy, heavy
    """
    process = start("-c", code)
    _, errors = process.communicate()
    assert process.returncode == 0, errors


# Flags to settings


def settings_of(monkeypatch, *args):
    """The settings and parameters that `train` hands over for a command line."""
    given = {}

    def begin(settings, **parameters):
        given.update(parameters, settings=settings)
        return iter(())

    monkeypatch.setattr(train, "begin", begin)
    run("train", *args)
    return given


def test_each_flag_sets_its_setting(monkeypatch):
    values = {"int": "3", "float": "0.5", "str": "utf-8", "bool": None, "paths": "*.txt"}
    special = {"device": "cpu", "epochs": None, "minutes": None, "valid_fraction": None}
    special |= {"valid_every": None, "document_separator": None}
    args, expected = [], {"corpus": ("a.txt", "b")}
    for leaf in config.LEAVES:
        value = special.get(leaf.name, leaf.choices[-1] if leaf.choices else values.get(leaf.kind, ""))
        if leaf.name in expected or (value is None and leaf.kind != "bool"):
            continue
        args += [leaf.negative_flag] if leaf.kind == "bool" else [leaf.flag, value]
        expected[leaf.name] = False if leaf.kind == "bool" else config.parse(leaf, value, config.FLAG)
    given = settings_of(monkeypatch, "a.txt", "b", *args)
    assert {name: sourced.value for name, sourced in given["settings"].items()} == expected
    assert {sourced.origin for sourced in given["settings"].values()} == {config.FLAG}
    assert given["out"] is None
    assert given["dry_run"] is False
    assert given["is_from_file"] is False


def test_flags_win_over_the_file_and_a_length_over_every_length(monkeypatch, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("model:\n  n_layer: 3\n  d_model: 32\ntrain:\n  minutes: 2\n")
    given = settings_of(
        monkeypatch, "a.txt", "-c", path, "--n-layer", "5", "--steps", "7", "-o", "x", "--dry-run"
    )
    values = {name: sourced.value for name, sourced in given["settings"].items()}
    assert values == {"corpus": ("a.txt",), "n_layer": 5, "d_model": 32, "steps": 7}
    assert given["settings"]["d_model"].origin == f"{path}:3"
    assert (given["out"], given["dry_run"], given["is_from_file"]) == (Path("x"), True, True)


def test_none_unsets_a_setting_of_the_file(monkeypatch, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("data:\n  corpus: a.txt\nmodel:\n  clamp_len: 3\n")
    given = settings_of(monkeypatch, "-c", path, "--clamp-len", "none")
    assert given["settings"]["clamp_len"].value is None


# Refusals


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("trian", "trian: no such command; did you mean train?"),
        ("xyzzy", "xyzzy: no such command; see txl --help"),
        ("--vresion", "--vresion: no such option; did you mean --version?"),
        ("train a.txt --n-layers 3", "--n-layers: no such option; did you mean --n-layer?"),
        ("train a.txt --n_layer 3", "--n_layer: no such option; did you mean --n-layer?"),
        ("train a.txt --xyzzy", "--xyzzy: no such option; see txl train --help"),
        ("train a.txt --steps", "--steps: needs a value"),
        ("train", "CORPUS: missing; name text files, folders, or - for standard input; see txl train --help"),
        (
            "train a.txt --n-layer 0",
            "--n-layer: must be a whole number of at least 1 and at most 10000; got `0`",
        ),
        ("train a.txt --lr fast", "--lr: must be a number above 0; got `fast`"),
        ("train a.txt --norm per", "--norm: must be one of post, pre; got `per`; did you mean `pre`?"),
        ("train a.txt --steps 3 --minutes 2", "--minutes: cannot go with --steps; give one of them"),
        ("train a.txt --stop-at 0", "--stop-at: must be a step of at least 1; got 0"),
        ("train a.txt --stop-at x", "--stop-at: must be a whole number; got `x`"),
        ("train a.txt -c nope.yaml", "nope.yaml: no such file"),
        ("train a.txt", "a.txt: cannot be read; no such file or directory"),
        ("train a.txt --resume r", "CORPUS: cannot go with --resume; the run has its own text and settings"),
        ("train --resume r --out x", "--out: cannot go with --resume; the run has its own text and settings"),
        ("train --resume r", "r: no such run folder; `txl runs` lists those under runs/"),
        ("generate x", "got unexpected extra argument(s) (x); see txl generate --help"),
        ("generate --temperature -1", "--temperature: must be a finite number, 0 or more; got -1.0"),
        ("generate --temperature nan", "--temperature: must be a number; got `nan`"),
        ("generate --temperature 1e999", "--temperature: must be a finite number, 0 or more; got inf"),
        ("generate --temperature hot", "--temperature: must be a number; got `hot`"),
        ("generate --top-k -1", "--top-k: must be 0 (off) or more; got -1"),
        ("generate --max-tokens 1_0", "--max-tokens: must be a whole number; got `1_0`"),
        ("generate --temperature 0_1", "--temperature: must be a number; got `0_1`"),
        ("generate --top-k \u0663", "--top-k: must be a whole number; got `\u0663`"),
        ("generate --top-k 1.5", "--top-k: must be a whole number; got `1.5`"),
        ("generate --top-p 0", "--top-p: must be above 0 and at most 1; got 0.0"),
        ("generate --top-p 1.5", "--top-p: must be above 0 and at most 1; got 1.5"),
        ("generate --logprobs", "--logprobs: goes with --json only"),
        ("generate --prompt a --prompt-file b", "--prompt-file: cannot go with --prompt; give one of them"),
        ("generate --threads 0", "--threads: must be a whole number of at least 1 and at most 4096; got `0`"),
        ("generate --precision fp8", "--precision: must be one of auto, fp32, bf16, fp16; got `fp8`"),
        ("eval --split dev", "--split: must be valid or test; got `dev`"),
        ("eval a.txt --split test", "--split: cannot go with FILE; give one of them"),
        ("eval --encoding utf-8", "--encoding: goes with FILE only; held-out text is stored as tokens"),
        ("eval --tgt-len 0", "--tgt-len: must be a whole number of at least 1; got `0`"),
        ("eval --same-length on", "--same-length: must be one of off, mem_len, mem_len+1; got `on`"),
        ("eval --per-token a --mem-len 1,2", "--per-token: takes one memory length; got --mem-len 1,2"),
        ("eval --sliding-window --by-line", "--sliding-window: cannot go with --by-line; give one of them"),
        (
            "eval --sliding-window --per-token a",
            "--sliding-window: cannot go with --per-token; give one of them",
        ),
        ("eval --window-tokens 9", "--window-tokens: goes with --sliding-window only"),
        ("eval --sliding-window --window-tokens 0", "--window-tokens: must be at least 1; got 0"),
        ("eval --sliding-window --window-tokens x", "--window-tokens: must be a whole number; got `x`"),
        ("config n_layers", "n_layers: unknown setting; did you mean `n_layer`?"),
        ("config --run a -c b", "--config: cannot go with --run; give one of them"),
    ],
)
def test_refusals(line, error):
    assert refusal(*line.split()) == error


def test_an_empty_name_is_refused_by_every_argument_and_flag():
    # As a path it is the working folder: all of it would be read, or written over.
    told = []
    for name, one in typer.main.get_command(main).commands.items():
        for parameter in one.params:
            flag = parameter.opts[0] if parameter.opts[0].startswith("--") else parameter.metavar
            if not parameter.metavar or flag == "--prompt":
                continue
            given = [""] if flag == parameter.metavar else [flag, ""]
            assert refusal(name, *given) == f"{flag}: must not be empty; got ``"
            told.append(f"{name} {flag}")
    paths = (
        "train CORPUS --out --resume --config --valid --test --init --include --exclude",
        "generate --run --prompt-file",
        "eval FILE --run --per-token",
        "convert SOURCE --out --vocab",
        "bench --run --config",
        "config --run --config",
        "runs DIR",
    )
    for name, *flags in map(str.split, paths):
        assert {f"{name} {flag}" for flag in flags} <= set(told)


@pytest.mark.parametrize(
    "line",
    [
        "train PATH",
        "train text.txt --out PATH",
        "train text.txt --config PATH",
        "train text.txt --valid PATH",
        "train text.txt --test PATH",
        "train text.txt --init PATH",
        "train --resume PATH",
        "generate --run PATH",
        "generate --run RUN --prompt-file PATH",
        "eval --run PATH",
        "eval PATH --run RUN",
        "eval --run RUN --per-token PATH",
        "config --run PATH",
        "config --config PATH",
        "runs PATH",
    ],
)
@pytest.mark.parametrize("kind", ["name too long", "closed folder", "loop", "below a file"])
def test_a_path_that_the_system_refuses_is_told_in_one_line(trained, text, monkeypatch, line, kind):
    Path("loop").symlink_to("loop")
    path = {"name too long": "l" * 300, "loop": "loop", "below a file": "text.txt/x"}.get(kind, "closed/x")
    ask = os.stat

    def closed(place, *args, **kwargs):  # root, who may run this, is refused nothing
        if str(place).startswith("closed"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
        return ask(place, *args, **kwargs)

    monkeypatch.setattr(os, "stat", closed)
    # Python 3.10 asks through a reference of its own.
    monkeypatch.setattr(Path, "stat", lambda path, **kwargs: closed(path, **kwargs))
    before = sorted(Path().iterdir())
    words = [{"PATH": path, "RUN": str(trained)}.get(word, word) for word in line.split()]
    if words[:2] == ["train", "text.txt"]:
        words += ["--steps", "1", "--device", "cpu"]
    assert path[:40] in refusal(*words)
    assert sorted(Path().iterdir()) == before


@pytest.mark.parametrize("line", ["--device cuda:99", "--device tpu", "--precision fp16 --device cpu"])
def test_a_device_or_precision_that_is_not_there_is_refused(trained, text, line):
    for command in (
        ["train", text, "--steps", 2],
        ["generate", "--run", trained],
        ["eval", "--run", trained],
    ):
        assert re.match("--(device|precision): ", refusal(*command, *line.split()))
    assert not Path("runs").exists()


def test_without_a_run_generate_and_eval_say_what_to_do():
    assert refusal("generate").startswith(
        "runs: no run with a checkpoint here; train one with `txl train FILE`"
    )
    assert refusal("eval") == refusal("generate")


@pytest.mark.parametrize("item", [" ", "-1", "1e3", "x", "²", "1" * 4999])
def test_memory_lengths_that_are_none(item):
    for line in (item, f"64,{item}", f"{item},64"):
        with pytest.raises(UserError) as caught:
            parse_mem_lens(line)
        assert str(caught.value).startswith(
            "--mem-len: each length must be a whole number from 0 to 999999999; got `"
        )
        assert len(str(caught.value)) < 160


def test_memory_lengths():
    assert parse_mem_lens("0, 64,512 ,64") == (0, 64, 512, 64)


# Errors to exit codes


def test_a_bug_keeps_its_traceback(monkeypatch):
    def begin(*_, **__):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(train, "begin", begin)
    result = CliRunner().invoke(main, ["train", "a.txt"])
    assert isinstance(result.exception, ZeroDivisionError)
    assert result.exit_code == 1


def test_weights_to_start_from_are_read_before_anything_is_made(trained, text):
    shutil.copytree(trained, "theirs")
    for path in Path("theirs/checkpoints").glob("*/model.safetensors"):
        path.write_bytes(path.read_bytes()[:-10])
    refused = refusal("train", text, "--init", "theirs", "--steps", "3", "--out", "new/run")
    assert refused.startswith("theirs/checkpoints/")
    assert not Path("new").exists()


def test_a_training_that_goes_non_finite_fails_in_one_line(monkeypatch):
    def begin(*_, **__):
        raise train.NonFinite("step 7: 5 steps in a row were not finite")

    monkeypatch.setattr(train, "begin", begin)
    result = run("train", "a.txt", code=1)
    assert (result.stdout, result.stderr) == ("", "error: step 7: 5 steps in a row were not finite\n")


@pytest.mark.parametrize("error", [KeyboardInterrupt, typer.Abort])
def test_an_interruption_without_a_signal(monkeypatch, error):
    def begin(*_, **__):
        raise error

    monkeypatch.setattr(train, "begin", begin)
    assert run("train", "a.txt", code=130).stderr == ""


def test_control_codes_in_errors_are_shown():
    assert refusal("runs", "a\x1b[31mb").startswith("a\\x1b[31mb: no folder of runs here")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_asks_and_the_command_ends_by_itself(monkeypatch, number, code):
    asked = []

    def begin(*_, should_stop, **__):
        asked.append(should_stop())
        os.kill(os.getpid(), number)
        deadline = time.monotonic() + 5
        while not should_stop() and time.monotonic() < deadline:
            time.sleep(0.01)
        asked.append(should_stop())
        yield train.Notice("saved")

    monkeypatch.setattr(train, "begin", begin)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), threading.active_count()
    result = run("train", "a.txt", code=code)
    assert asked == [False, True]
    assert result.stderr == "note: saved\n"
    assert before == (
        signal.getsignal(signal.SIGINT),
        signal.getsignal(signal.SIGTERM),
        threading.active_count(),
    )


@pytest.mark.parametrize(("second", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_ends_at_once(second, code):
    script = """if True:
        import time
        from txlcli.cli.signals import listening
        with listening("asked") as interruption:
            print("ready", flush=True)
            time.sleep(60)
    """
    process = start("-c", script)
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == b"asked\n"
    process.send_signal(second)
    assert process.wait(timeout=10) == code
    process.communicate()


def test_whoever_stops_reading_ends_a_command_quietly_in_any_locale(trained):
    args = ["generate", "--run", trained, "--max-tokens", 50_000, "--prompt", "東京"]
    process = start("-m", "txlcli", *args, env={"PYTHONIOENCODING": "ascii"})
    assert process.stdout.read(20).startswith("東京".encode())
    process.stdout.close()
    assert re.fullmatch(rb"note: prompt: [ -~]+\n.* - step [ -~]+\n", process.stderr.read())
    assert process.wait(timeout=60) == 0
    process.stderr.close()


def test_whoever_stops_reading_help_ends_it_quietly():
    process = start("-m", "txlcli", "train", "--help")
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 0
    process.stderr.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [["config"], ["train", "--help"], ["runs", "--json"]])
def test_a_full_disk_under_a_result_is_told_in_one_line(tmp_path, arguments):
    (tmp_path / "runs").mkdir()
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-m", "txlcli", *arguments]
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=env, check=False)
    assert result.stderr == b"error: output: cannot be written; no space left on device\n"
    assert result.returncode == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_the_program_starts_ends_it_quietly(number, code):
    # What is imported first after the program has taken its signals stands for all that is.
    script = f"""if True:
        import os, sys
        from txlcli import __main__ as program
        class Signalled:
            def find_spec(self, name, path=None, target=None):
                os.kill(os.getpid(), {int(number)})
        sys.meta_path.insert(0, Signalled())
        program.main()
    """
    process = start("-c", script)
    assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == code


def test_next_to_nothing_is_loaded_before_the_program_listens_for_signals():
    # Without what the environment loads of itself (-S).
    code = "import sys, txlcli.__main__; print({'re', 'typing', 'inspect'} & set(sys.modules))"
    assert start("-S", "-c", code).communicate()[0] == b"set()\n"


def test_a_training_that_ends_early_since_nobody_reads_it_is_not_done(trained):
    shutil.copytree(trained, "a")
    process = start("-m", "txlcli", "train", "--resume", "a", "--steps", 10**6)
    assert process.stderr.readline()
    process.stderr.close()
    process.stdout.close()
    assert process.wait(timeout=60) == 130


@pytest.mark.parametrize("error", [BrokenPipeError, OSError(errno.ENOSPC, "No space left on device")])
def test_a_training_that_nobody_watches_any_more_is_saved(monkeypatch, error):
    shown = []

    def begin(*_, should_stop, **__):
        yield train.Notice("one")
        assert should_stop()
        yield train.Notice("two")

    def show(_, event):
        shown.append(event.text)
        raise error

    monkeypatch.setattr(train, "begin", begin)
    monkeypatch.setattr("txlcli.report.Training.show", show)
    run("train", "a.txt", code=130)
    assert shown == ["one", "two"]


def test_a_training_whose_result_nobody_reads_is_done(monkeypatch):
    def begin(*_, **__):
        yield train.Finished(3, Run(Path("a")), "length", None, None, None, None, None, 8)

    def show(*_):
        raise BrokenPipeError

    monkeypatch.setattr(train, "begin", begin)
    monkeypatch.setattr("txlcli.report.Training.show", show)
    # What the program closes then is this process' own output.
    monkeypatch.setattr("txlcli.cli.errors._silence", lambda *_: None)
    run("train", "a.txt", code=0)


# Train


def test_training_in_a_log_file(text):
    flags = ["--tokenizer", "byte", "--steps", "60", "--valid-fraction", "0.2", "--eval-every", "30"]
    result = run("train", text, *TINY, *flags, env={"NO_COLOR": "1", "TERM": "dumb"})
    names = [line.split()[0] for line in result.stdout.splitlines()]
    assert names in (["done", "best", "run"], ["done", "best", "last", "run"])
    assert result.stdout.splitlines()[-1] == "run   runs/text"
    assert not re.search("[\r\x1b]", result.stdout + result.stderr)
    lines = [line for line in result.stderr.splitlines() if line.startswith("step ")]
    assert 20 <= len(lines) <= 60
    assert re.fullmatch(
        r"step 1/60  loss \d\.\d{3}  \d\.\d{3} bits/byte  lr \d\.\de-\d\d  [\d,]+ tokens/s", lines[0]
    )
    hints = result.stderr.splitlines()[-2:]
    assert hints == [
        "next  txl generate --run runs/text --prompt 'Once'",
        "      txl eval --run runs/text --mem-len 0,8,16,32",
    ]
    again = run("train", text, *TINY, "--tokenizer", "byte", "--steps", 1, "--quiet")
    assert again.stdout.splitlines()[-1] == "run   runs/text-2"
    assert again.stderr == ""


def test_stopping_and_resuming(trained, text):
    flags = ["--tokenizer", "char", "--steps", "12", "--eval-every", "4", "--valid-fraction", "0.2"]
    first = run("train", text, *TINY, *flags, "--test", text, "--out", "a", "--stop-at", 5)
    assert "stopped as asked" in first.stdout
    assert "next  txl train --resume a\n" in first.stderr
    second = run("train", "--resume", "a")
    assert "done  step 12 in " in second.stdout
    weights = Path("checkpoints/step-0000012/model.safetensors")
    assert ("a" / weights).read_bytes() == (trained / weights).read_bytes()
    third = run("train", "--resume", "a")
    assert "note: a: is finished at step 12; a larger --steps continues it\n" in third.stderr
    assert "next  txl generate --run a " in third.stderr
    assert "--mem-len 0,8,16,32\n" in third.stderr
    assert re.search(r"^best  step \d+ · [\d.]+ nats/token · [\d.]+ bits/byte held out$", third.stdout, re.M)
    assert refusal("train", "--resume", "a", "--lr", 1).startswith("--lr: cannot change on resume; ")
    assert refusal("train", "--resume", "a", "--no-tied").startswith("--no-tied: cannot change on resume; ")


def test_a_damaged_checkpoint_is_told_where_another_is_used_and_refused_where_it_was_named(trained):
    shutil.copytree(trained, "a")
    weights = Path("a/checkpoints/step-0000012/model.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    fault = f"{weights}: damaged; its bytes are not those that were written"
    used = f"warning: {fault}; step 11 is used instead\n"
    last = ("generate", "--run", "a", "--checkpoint", "last", "--max-tokens", 3, "--seed", 1)
    assert run(*last).stderr.startswith(used)
    assert run(*last, "--quiet").stderr == used  # another model than the one named
    scored = run("eval", "--run", "a", "--checkpoint", "last", "--mem-len", 8, "--json")
    assert json.loads(scored.stdout)["notices"][0] == used.strip().removeprefix("warning: ")
    Path("a/pointers.json").write_text('{"best": 12, "best_nll": 1.0, "last": 12}')
    for flags in ([], ["--checkpoint", "12"]):
        assert refusal("generate", "--run", "a", *flags).startswith(f"{fault}; take another step with ")
    assert refusal("bench", "--run", "a") == f"{fault}; put it back, or measure another run"
    shutil.copytree("a", "b")
    assert run("train", "--resume", "b", "--quiet").stderr.startswith(used.replace("a/", "b/"))
    resumed = run("train", "--resume", "a")
    assert used in resumed.stderr
    assert weights.read_bytes() == (trained / weights.relative_to("a")).read_bytes()
    assert "warning: " not in run("generate", "--run", "a", "--max-tokens", 3).stderr


def test_resuming_never_begins_anew_by_itself(trained):
    shutil.copytree(trained, "a")
    lines = Path("a/metrics.jsonl").read_bytes()
    shutil.rmtree("a/checkpoints")
    assert refusal("train", "--resume", "a") == (
        "a/checkpoints: has no checkpoint any more; pointers.json names step 12 as the last; "
        "put a whole one back, or begin anew with `txl train -c a/config.yaml`"
    )
    assert Path("a/metrics.jsonl").read_bytes() == lines


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("n_layer: 2", "n_layer: 3", "n_layer 2, config.yaml says 3"),
        ("d_model: 16", "d_model: 32", "d_model 16, config.yaml says 32"),
        (None, "", "d_head 8, config.yaml says 40"),
    ],
    ids=["deeper", "wider", "emptied"],
)
def test_a_config_of_another_model_is_told_alike_by_all(trained, old, new, told):
    shutil.copytree(trained, "a")
    path = Path("a/config.yaml")
    path.write_text(new if old is None else path.read_text().replace(old, new))
    step = json.loads(Path("a/pointers.json").read_text())["best"]
    expected = "a/checkpoints/step-{:07d}: written for {}; put the run's own config.yaml back"
    assert refusal("train", "--resume", "a") == expected.format(12, told)
    if old is not None:  # else a setting that readers compare and a training does not may come first
        assert refusal("generate", "--run", "a") == expected.format(step, told)


def test_training_names_no_flag_that_it_does_not_have(trained, text):
    shutil.copytree(trained, "a")
    for state in Path("a/checkpoints").glob("*/state.json"):
        values = json.loads(state.read_text())
        del values["checksum"], values["files"]
        state.write_text(json.dumps(values))
    weights = Path("a/checkpoints/step-0000012/model.safetensors")
    data = weights.read_bytes()
    weights.write_bytes(data.replace(b'"position_bias"', b'"position_bits"'))
    fault = f"{weights}: has no tensor `position_bias`; it has `position_bits` instead; "
    told = refusal("train", "--resume", "a", "--steps", 13)
    assert told == f"{fault}delete its folder to resume from the step before"
    Path("a/pointers.json").write_text('{"best": 12, "best_nll": 1.0, "last": 12}')
    assert refusal("train", text, "--init", "a") == f"{fault}begin with the weights of another run"
    Path("a/pointers.json").write_text('{"best": 1, "best_nll": 1.0, "last": 12}')
    told = refusal("train", text, "--init", "a")
    assert told == "a: no checkpoint of step 1; begin with the weights of another run"


def test_silence_does_not_change_the_result(text):
    flags = ["--tokenizer", "char", "--steps", "4", "--valid-fraction", "0.2", "--eval-tokens", "9"]
    loud, quiet = (
        run("train", text, *TINY, *flags, *more).stdout.splitlines()[1:-1] for more in ([], ["--quiet"])
    )
    assert "first 9 tokens" in loud[-1]
    assert quiet == loud


def test_dry_run_writes_nothing(text):
    before = sorted(Path.cwd().rglob("*"))
    result = run("train", text, "--dry-run", "--steps", 5, "--device", "cpu")
    assert "steps       5 of " in result.stdout
    assert "|t|h|e|" in result.stdout.replace("│", "|")
    assert sorted(Path.cwd().rglob("*")) == before


# Generate


def generate(trained, *args, **kwargs):
    return run("generate", "--run", trained, "--max-tokens", 30, "--seed", 1, *args, **kwargs)


@pytest.mark.parametrize("prompt", ["the", "t", "", "ﬁx ", "x" * 100])
def test_echo_is_the_prompt_and_nothing_else(trained, prompt):
    with_echo = generate(trained, "--prompt", prompt)
    without = generate(trained, "--prompt", prompt, "--no-echo")
    assert with_echo.stdout_bytes == prompt.encode() + without.stdout_bytes
    assert "seed 1 " in with_echo.stderr


def test_prompts_from_files_and_standard_input(trained, tmp_path):
    prompt = "the quick\r\n\nfox "
    (tmp_path / "p.txt").write_bytes(prompt.encode())
    expected = generate(trained, "--prompt", prompt).stdout_bytes
    assert generate(trained, "--prompt-file", tmp_path / "p.txt").stdout_bytes == expected
    assert generate(trained, "--prompt-file", "-", stdin=prompt).stdout_bytes == expected
    # Standard input is not read unasked.
    assert generate(trained, stdin="abc").stdout_bytes == generate(trained).stdout_bytes


@pytest.mark.parametrize("flag", ["text.txt", "-"])
def test_a_prompt_has_a_bound(trained, text, monkeypatch, flag):
    monkeypatch.setattr("txlcli.cli.generate._LARGEST_PROMPT_BYTES", len(TEXT) - 1)
    told = generate(trained, "--prompt-file", flag, stdin=TEXT, code=2).stderr
    assert re.fullmatch(f"error: {flag}: too large; (got .*, )?expected at most 2,639( bytes)?\n", told)


@pytest.mark.parametrize(
    "line",
    ["train -", "eval - --run RUN", "generate --prompt-file - --run RUN", "generate --interactive --run RUN"],
)
def test_standard_input_that_cannot_be_read_is_told_in_one_line(trained, tmp_path, monkeypatch, line):
    words = [str(trained) if word == "RUN" else word for word in line.split()]
    # As `<&-` and `0>file` leave it.
    monkeypatch.setattr("txlcli.cli.errors._prepare_streams", lambda: setattr(sys, "stdin", None))
    assert refusal(*words) == "-: standard input is closed; give a file, or send text to it"
    with (tmp_path / "out").open("wb") as file, open(file.fileno(), closefd=False) as unreadable:
        monkeypatch.setattr("txlcli.cli.errors._prepare_streams", lambda: setattr(sys, "stdin", unreadable))
        assert refusal(*words) == "-: standard input cannot be read; bad file descriptor"
    assert not Path("runs").exists()


def test_samples_are_parted_by_an_empty_line(trained):
    result = generate(trained, "--num-samples", 3, "--stop", "\n", "--no-echo")
    assert len(result.stdout.split("\n\n")) == 3
    assert generate(trained, "--quiet").stderr == ""


# Writing in turn


def screen(*, is_terminal=False, is_quiet=False):
    stream = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    return Screen(stream, is_terminal, False, False, True, 80, is_quiet)


def written(screen):
    return screen.stream.buffer.getvalue().decode()


@pytest.fixture
def hold(trained, monkeypatch):
    """Hold a conversation at a terminal, and return what was written to both streams."""

    def hold(typed, prompt=None, *, should_stop=None, **more):
        torch.set_num_threads(1)
        stdin = SimpleNamespace(buffer=io.BytesIO(typed), isatty=lambda: True)
        monkeypatch.setattr("sys.stdin", stdin)
        error, out = screen(), screen(is_terminal=True)
        lm, interruption = load(trained, device="cpu"), Interruption()
        flags = {"is_echoed": True, "is_json": False, "has_logprobs": False, **more}
        options = SamplingOptions(max_tokens=4, seed=1, temperature=0)
        conversation = Conversation(lm, options, error, out, interruption, **flags)
        if should_stop is not None:
            should_stop(conversation, interruption)
        conversation.hold(prompt)
        return written(error), written(out)

    return hold


def test_at_a_terminal_nothing_typed_is_repeated_and_each_line_is_asked_for(hold):
    told, shown = hold(b"the \n\nquick\n")
    assert told == "» » » » "
    lines = shown.split("\n")
    assert "the" not in lines[0]
    assert shown.endswith("\n")
    told, shown = hold(b"quick\n", b"the ")
    assert shown.startswith("the ")
    assert told == "» » "


def test_what_a_model_cannot_read_ends_nothing_at_a_terminal(hold):
    told, shown = hold(b"\xff\nthe\n")
    assert told.startswith("» warning: prompt: not UTF-8; got byte 0xff at offset 0; ")
    assert told.endswith("\n» » ")
    assert shown == hold(b"the\n")[1]
    told, _ = hold("東\n".encode())
    assert told == "» note: prompt: not in the vocabulary, read as bytes: `東`\n» "


def test_ctrl_c_ends_an_answer_and_then_the_command(hold):
    notices = []

    def stop(conversation, interruption):
        answer, n_events = conversation.lm.answer, iter(range(100))

        def interrupted(*args):
            for event in answer(*args):
                if next(n_events) == 1:
                    interruption.stop()
                notices.append(interruption.notice)
                yield event

        # A frozen dataclass, of which this test needs one that is interrupted.
        object.__setattr__(conversation.lm, "answer", interrupted)

    told, shown = hold(b"the \nthe \n", should_stop=stop)
    assert set(notices) == {"ending this answer; once more to leave at once"}
    assert told == "» » » "
    first, second = shown.rstrip("\n").split("\n")[0], shown
    assert len(first) == 2
    assert len(second) > 5


def test_lines_of_a_pipe_are_answered_in_turn(trained):
    args = ("generate", "--run", trained, "--max-tokens", 7, "--seed", 1, "--interactive")
    result = run(*args, "--json", "--logprobs", stdin="the \n\nfox\n")
    first, second, third = map(json.loads, result.stdout.splitlines())
    assert [one["prompt"] for one in (first, second, third)] == ["the \n", "", "fox\n"]
    assert [one["sample"] for one in (first, second, third)] == [0, 1, 2]
    assert len(third["logprobs"]) == third["tokens"] == 7
    text = "the \n" + first["text"] + second["text"] + "fox\n" + third["text"]
    assert run(*args, stdin="the \n\nfox\n").stdout == text
    assert run(*args, "--no-echo", stdin="the \n\nfox\n").stdout == text.replace("the \n", "", 1).replace(
        "fox\n", "", 1
    )
    assert run(*args, "--prompt", "the ", stdin="").stdout == run(*args[:-1], "--prompt", "the ").stdout
    assert run(*args, stdin="").stdout == ""
    assert run(*args, "--quiet", stdin="the \n").stderr == ""


def test_what_does_not_go_with_it_is_refused(trained):
    assert refusal("generate", "--interactive", "--num-samples", 2) == (
        "--num-samples: must be 1 with --interactive; got 2"
    )
    assert refusal("generate", "--interactive", "--prompt-file", "-") == (
        "--prompt-file: standard input is what --interactive reads; give a file or --prompt"
    )
    error = run("generate", "--run", trained, "--interactive", stdin=b"\xff\n", code=2).stderr
    assert error.splitlines()[-1].startswith("error: prompt: not UTF-8; got byte 0xff at offset 0; ")


def test_the_hint_after_a_training_is_one_that_works(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = ("train", text, *TINY, "--tokenizer", "char", "--steps", 1, "--out", "n")
    told = run(*args, "--valid-fraction", 0).stderr
    assert "txl eval FILE --run n --mem-len " in told
    assert run("eval", text, "--run", "n", "--mem-len", "0").stdout


def test_a_penalty_without_memory_to_look_at_is_told(trained):
    told = "note: repetition penalty: does nothing at mem_len 0: it looks at the last mem_len tokens\n"
    assert told in generate(trained, "--repetition-penalty", 2, "--mem-len", 0).stderr
    assert "does nothing" not in generate(trained, "--repetition-penalty", 2).stderr


def test_generated_json(trained):
    args = ["--prompt", "the ", "--num-samples", 2, "--json"]
    lines = [json.loads(line) for line in generate(trained, *args, "--logprobs").stdout.splitlines()]
    for line in lines:
        names = ["sample", "prompt", "text", "tokens", "stop", "seed", "tokens_per_s", "logprobs"]
        assert list(line) == names
        assert (line["prompt"], line["tokens"], line["stop"], line["seed"]) == ("the ", 30, "length", 1)
        assert len(line["logprobs"]) == 30
    assert "logprobs" not in json.loads(generate(trained, *args).stdout.splitlines()[0])
    texts = generate(trained, "--prompt", "the ", "--num-samples", 2).stdout
    assert texts == "the " + lines[0]["text"] + "\n\n" + "the " + lines[1]["text"]


def test_the_run_that_saved_last_is_taken_and_named(trained, monkeypatch):
    monkeypatch.chdir(trained.parent.parent)
    result = run("generate", "--max-tokens", 5)
    assert result.stderr.startswith("runs/text · step ")
    seeds = {re.search(r"seed (\d+)", run("generate", "--max-tokens", 5).stderr)[1] for _ in range(3)}
    assert len(seeds) == 3


# Eval


def evaluate(trained, *args, **kwargs):
    return run("eval", "--run", trained, *args, **kwargs)


def test_eval_table(trained):
    result = evaluate(trained, "--mem-len", "0, 64,8,64")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [line[0] for line in lines[3:7]] == ["0", "64*", "8", "64*"]
    assert lines[4] == lines[6]
    for fact in (
        "text      valid text of the run",
        "scored    from empty memory over the whole text, every token but the first scored",
        "newlines  part of the text, scored like every other token",
        "rules     position relative · same_length off · no clamp_len · fp32 on cpu",
        "* longer than in training: mem_len 8, tgt_len 8",
        "this text chose the checkpoint",
    ):
        assert fact in result.stdout
    assert re.search(rf"model     {re.escape(str(trained))} · step \d+ \(best\)", result.stdout)
    assert evaluate(trained, "--quiet").stderr == ""


def test_eval_json(trained, text):
    result = json.loads(evaluate(trained, text, "--json", "--mem-len", "0,8", "--batch-size", 3).stdout)
    assert {"run", "step", "file", "bytes", "protocol", "rows"} <= set(result)
    assert (result["file"], result["split"], result["bytes"]) == (str(text), None, len(TEXT))
    assert result["protocol"]["memory_start"] == "empty"
    assert [row["mem_len"] for row in result["rows"]] == [0, 8]
    for row in result["rows"]:
        names = (
            "mem_len tgt_len context_min context_max tokens nll total_nll perplexity bytes_scored"
            " chars_scored bits_per_byte bits_per_char tokens_per_s"
        )
        assert set(names.split()) <= set(row)
        assert row["tokens"] == row["bytes_scored"] == len(TEXT) - 1
        assert row["nll"] == row["total_nll"] / row["tokens"]
        # Rounding of three operations in float64.
        assert row["bits_per_byte"] * row["bytes_scored"] == pytest.approx(
            row["total_nll"] / math.log(2), rel=1e-14
        )


def test_eval_reads_standard_input_and_the_splits_of_the_run(trained, text):
    def total(*args, **kwargs):
        result = json.loads(evaluate(trained, *args, "--json", **kwargs).stdout)
        return result["rows"][0]["total_nll"], result["file"], result["split"]

    assert total("-", stdin=TEXT) == (total(text)[0], "-", None)
    assert total("--split", "test") == (total(text)[0], None, "test")
    assert total()[1:] == (None, "valid")


def test_eval_reads_text_as_its_run_did(trained, tmp_path):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"caf\xe9 na\x92ve\n" * 30)
    assert refusal("eval", bad, "--run", trained) == (
        f"{bad}: not utf-8 at byte 3, line 1; got 0xe9; name its encoding (is it cp1252? --encoding cp1252), "
        "or train with --encoding-errors replace or --tokenizer byte"
    )
    flags = ["--tokenizer", "char", "--encoding-errors", "replace", "--steps", "1", "--out", "r"]
    run("train", bad, *TINY, *flags)
    result = json.loads(run("eval", bad, "--run", "r", "--json").stdout)
    assert result["notices"][0] == f"60 bytes of {bad} are not utf-8 and are read as U+FFFD{LOWER_BOUNDS}"
    assert result["rows"][0]["bytes_scored"] == bad.stat().st_size - 1


def test_eval_says_what_the_patterns_of_its_run_leave_out(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text(TEXT)
    (folder / "b.log").write_text(TEXT)
    run("train", folder, "--include", "*.txt", *TINY, "--tokenizer", "char", "--steps", 1, "--out", "r")
    found = json.loads(run("eval", folder, "--run", "r", "--json").stdout)
    assert found["bytes"] == len(TEXT)
    assert f"{folder / 'b.log'} (not included): skipped" in found["notices"]
    assert "b.log (not included): skipped" in " ".join(run("eval", folder, "--run", "r").stdout.split())


def test_eval_with_other_lengths(trained):
    def row(*args):
        return json.loads(evaluate(trained, "--json", *args).stdout)["rows"][0]

    assert row("--tgt-len", 5, "--mem-len", 3)["context_max"] == 8
    assert row("--same-length", "mem_len+1")["context_max"] == 9
    assert row("--clamp-len", 2)["total_nll"] != row()["total_nll"]
    assert row("--clamp-len", "none")["total_nll"] == row()["total_nll"]


def test_per_token_scores_add_up(trained, text):
    result = json.loads(evaluate(trained, text, "--json", "--per-token", "a.tsv").stdout)
    header, *lines = Path("a.tsv").read_text().splitlines()
    assert header == "token\ttext\tnats\tbyte_offset"
    rows = [line.split("\t") for line in lines]
    assert "".join(row[1] for row in rows).replace("\\n", "\n") == TEXT[1:]
    assert [int(row[3]) for row in rows] == list(range(1, len(TEXT)))
    # The sum is made in another order.
    assert sum(float(row[2]) for row in rows) == pytest.approx(result["rows"][0]["total_nll"], rel=1e-12)


@pytest.mark.parametrize(("encoding", "mark"), [("utf-8", 3), ("utf-16", 2), ("utf-32", 4)])
def test_byte_offsets_count_byte_order_marks(trained, tmp_path, encoding, mark):
    data = b"\xef\xbb\xbfthe\n" if encoding == "utf-8" else "the\n".encode(encoding)
    unit = (len(data) - mark) // 4
    for name in ("one/1.txt", "two/1.txt", "two/2.txt"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(data)
    offsets = []
    for name in ("one", "two"):
        flags = ["--encoding", encoding, "--json", "--per-token", "a.tsv"]
        result = json.loads(evaluate(trained, tmp_path / name, *flags).stdout)
        lines = [line.split("\t") for line in Path("a.tsv").read_text().splitlines()[1:]]
        assert (result["bytes"], result["rows"][0]["bytes_scored"]) == (
            unit * (len(lines) + 1),
            unit * len(lines),
        )
        offsets.append([int(line[3]) for line in lines])
    first = [mark + unit * place for place in range(4)]
    assert offsets == [first[1:], first[1:] + [len(data) + place for place in first]]


def test_bytes_that_are_no_text_make_bits_lower_bounds(text):
    held_out = b"\xef\xbb\xbfcaf\xe9 \xe9 the quick\n"
    Path("valid.txt").write_bytes(held_out)
    Path("one.txt").write_bytes(b"the \xff fox")
    flags = ["--tokenizer", "char", "--encoding-errors", "replace", "--valid", "valid.txt", "--steps", 1]
    run("train", text, *TINY, *flags, "--out", "r")

    def lower_bounds(*args):
        result = json.loads(run("eval", *args, "--run", "r", "--json").stdout)
        said = [one for one in result["notices"] if "U+FFFD" in one]
        assert result["protocol"]["is_lower_bound"] == bool(said)
        return said

    assert lower_bounds(text) == []
    one = f"1 byte of one.txt is not utf-8 and is read as U+FFFD{LOWER_BOUNDS}"
    assert lower_bounds("one.txt") == [one]
    assert one in re.sub(r"\s+", " ", run("eval", "one.txt", "--run", "r").stdout)
    two = f"2 bytes of the run's text are not utf-8 and are read as U+FFFD{LOWER_BOUNDS}"
    assert lower_bounds("--per-token", "a.tsv") == [two]
    places = [int(line.split("\t")[3]) for line in Path("a.tsv").read_text().splitlines()[1:]]
    assert (places[0], places[-1]) == (4, len(held_out) - 1)

    # A store of before tells neither.
    values = json.loads(Path("r/data/store.json").read_text())
    for part in values["splits"].values():
        del part["n_replaced"], part["marks"]
    write_sealed(Path("r/data/store.json"), values)
    result = json.loads(run("eval", "--run", "r", "--json", "--per-token", "a.tsv").stdout)
    assert result["protocol"]["is_lower_bound"]
    some = "bytes of the run's text that are not utf-8, not counted here, are read as U+FFFD"
    assert some + LOWER_BOUNDS in result["notices"]
    assert "byte offsets are left out: not all that stands between the tokens is counted" in result["notices"]
    assert {line.split("\t")[3] for line in Path("a.tsv").read_text().splitlines()[1:]} == {""}


def test_a_file_of_token_scores_is_whole_or_not_there(trained, tmp_path):
    (tmp_path / "one.txt").write_text("a")
    refusal("eval", tmp_path / "one.txt", "--run", trained, "--per-token", "a.tsv")
    assert [path.name for path in Path.cwd().iterdir()] == ["one.txt"]
    assert "no such file" in refusal("eval", "--run", trained, "--per-token", "nowhere/a.tsv")


def test_eval_by_line(trained, text):
    row = json.loads(evaluate(trained, text, "--by-line", "--json").stdout)["rows"][0]
    assert row["tokens"] == len(TEXT)


@pytest.fixture
def _in_a_hurry(monkeypatch):
    """Time steps one by one: what they take does not matter here."""
    monkeypatch.setattr("txlcli.evaluate.window.PIECE_S", 0.0)


@pytest.mark.usefixtures("_in_a_hurry")
def test_eval_with_a_sliding_window(trained, text):
    args = ["--sliding-window", "--window-tokens", 40, "--mem-len", "8,0"]
    result = json.loads(evaluate(trained, text, *args, "--json").stdout)
    assert [row["mem_len"] for row in result["sliding_window"]] == [8, 0]
    assert [row["attention_length"] for row in result["sliding_window"]] == [16, 8]
    for row in result["sliding_window"]:
        assert (row["tgt_len"], row["tokens"]) == (8, 40)
        assert row["ratio"] == pytest.approx(row["tokens_per_s_with_memory"] / row["tokens_per_s"], rel=1e-14)
        assert row["share_of_ideal"] == row["ratio"] / row["ideal_ratio"]
        assert min(row["nll"], row["nll_with_memory"], row["batch_size"], row["batch_size_with_memory"]) > 0
    macs = result["protocol"]["sliding_window"]
    assert (macs["macs_per_token"], macs["macs_per_key"]) == (12 * 16**2, 3 * 16)
    plain = json.loads(evaluate(trained, text, "--json").stdout)
    assert (plain["sliding_window"], plain["protocol"]["sliding_window"]) == ([], None)
    assert plain["rows"][0]["total_nll"] == result["rows"][0]["total_nll"]


@pytest.mark.usefixtures("_in_a_hurry")
def test_eval_shows_the_sliding_window_below_its_table(trained, text):
    result = evaluate(trained, text, "--sliding-window", "--window-tokens", 50, "--mem-len", "8, 32,8")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [line[:2] for line in lines[10:13]] == [["8", "16"], ["32", "40"], ["8", "16"]]
    told = " ".join(result.stdout.split())
    assert "sample 50 tokens, one drawn from each of as many equal stretches" in told
    assert "ideal w (C + a w/2) / (C + a w)" in told
    assert "side by side windows and streams in a step" in told
    assert "sliding window beside mem_len 32: trying batch sizes" in result.stderr
    assert "sliding window beside mem_len 32: 50 tokens" in result.stderr


@pytest.mark.usefixtures("_in_a_hurry")
def test_a_sliding_window_longer_than_learned_positions_is_refused_before_anything_is_scored(text):
    run("train", text, *TINY, "--position", "learned", "--tokenizer", "char", "--steps", 1, "--out", "l")
    assert refusal("eval", text, "--run", "l", "--sliding-window", "--mem-len", "0,8") == (
        "--sliding-window: this model has learned 8 positions; got windows of 16 tokens "
        "(mem_len 8 and tgt_len 8); lower --mem-len or --tgt-len"
    )
    run("eval", text, "--run", "l", "--sliding-window", "--mem-len", 4, "--tgt-len", 4)


@pytest.mark.parametrize("content", ["", "a"])
def test_eval_refuses_what_has_no_token_to_score(trained, tmp_path, content):
    (tmp_path / "a.txt").write_text(content)
    assert refusal("eval", tmp_path / "a.txt", "--run", trained).startswith(f"{tmp_path / 'a.txt'}: ")


# Config and runs


def test_config_shows_defaults_and_explains_one():
    lines = run("config").stdout.splitlines()
    assert lines[0] == "data"
    assert any(line.split() == ["n_layer", "4", "default"] for line in lines)
    assert run("config", "mem-len").stdout == config.leaf("mem_len").explain() + "\n"


def test_config_of_a_run_names_every_origin(trained):
    text = run("config", "--run", trained).stdout
    rows = {line.split()[0]: line for line in text.splitlines()}
    assert rows["n_layer"].split() == ["n_layer", "2", "flag"]
    assert "plan: " in rows["warmup"]
    shown = run("config", "n_layer", "--run", trained).stdout
    assert shown.splitlines()[-1] == "  here     2  (flag)"


def test_config_of_a_file_as_json(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("model:\n  n_layer: 3\n")
    rows = json.loads(run("config", "-c", path, "--json").stdout)
    assert len(rows) == len(config.LEAVES)
    assert next(row for row in rows if row["key"] == "model.n_layer")["origin"] == f"{path}:2"
    assert json.loads(run("config", "n_layer", "-c", path, "--json").stdout)["value"] == 3


def test_presets_are_listed_with_what_they_say_of_themselves():
    text = run("config", "--list").stdout
    rows = json.loads(run("config", "--list", "--json").stdout)
    assert [row["name"] for row in rows] == list(config.presets())
    assert all(row["name"] in text and row["summary"] in text for row in rows)


@pytest.mark.parametrize("more", ["n_layer", "--run=a", "--config=a.yaml"])
def test_a_list_of_presets_takes_nothing_else(more):
    assert refusal("config", "--list", more).startswith("--list: goes alone or with --json; ")


def test_runs(trained):
    text = run("runs", trained.parent).stdout
    assert "12/12" in text
    (row,) = json.loads(run("runs", trained.parent, "--json").stdout)
    assert (row["run"], row["step"], row["steps"], row["tokenizer"]) == (str(trained), 12, 12, "char")
    assert row["settings"]["d_model"] == 16


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_json_of_names_that_are_no_text(trained, text):
    folder, file, settings = Path("runs/a\udce9"), text.rename("b\udce9.txt"), Path("c\udce9.yaml")
    shutil.copytree(trained, folder)
    origin = re.sub("corpus: .*", r'corpus: ["d\\uDCE9"]', (folder / "config.yaml").read_text(), count=1)
    (folder / "config.yaml").write_text(origin)
    settings.write_text("model: {n_layer: 1, d_model: 8, tgt_len: 4, mem_len: 4}\ndata: {tokenizer: byte}\n")

    def told(*args):
        return json.loads(
            run(*args, "--json", "--quiet" if args[0] in ("eval", "bench") else "--json").stdout
        )

    scored = told("eval", file, "--run", folder)
    assert (scored["file"], scored["run"]) == (str(file), str(folder))
    assert [row["run"] for row in told("runs")] == [str(folder)]
    assert told("config", "corpus", "--run", folder)["value"] == ["d\udce9"]
    assert told("config", "n_layer", "-c", settings)["origin"] == f"{settings}:1"
    quick = ["--device", "cpu", "--only", "generation", "--seconds", "0.001", "--repeats", "3"]
    assert told("bench", "-c", settings, *quick)["model"] == str(settings)
    assert json.loads(generate(folder, "--json").stdout)["tokens"] == 30
    run("eval", "--run", folder, "--per-token", "e\udce9.tsv", "--quiet")
    assert Path("e\udce9.tsv").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_run_whose_name_is_no_text_is_resumed(trained):
    folder = shutil.copytree(trained, "a\udce9")
    assert "done  step 13" in run("train", "--resume", folder, "--steps", 13).stdout
    assert json.loads(evaluate(folder, "--checkpoint", "last", "--json").stdout)["step"] == 13


def test_a_damaged_run_does_not_hide_the_others(trained, tmp_path):
    (tmp_path / "runs" / "bad").mkdir(parents=True)
    (tmp_path / "runs" / "bad" / "config.yaml").write_text("model:\n  n_layers: 3\n")
    result = run("runs")
    assert result.stdout == ""
    assert result.stderr.startswith("note: runs/bad/config.yaml:2: ")
    assert len(result.stderr.splitlines()) == 1


def test_an_empty_folder_of_runs(tmp_path):
    (tmp_path / "runs").mkdir()
    assert json.loads(run("runs", "--json").stdout) == []
    assert run("runs").stderr == "note: runs: no runs here; train one with `txl train FILE`\n"


def test_config_yaml_of_a_run_is_what_its_flags_said(trained):
    values = yaml.safe_load((trained / "config.yaml").read_text())
    assert values["model"]["d_model"] == 16
    assert values["train"]["steps"] == 12


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (
            "--cutoffs 20000,40000",
            "--cutoffs: must stay below the vocabulary of 292; got 20000,40000; "
            "give smaller ones, or auto to derive them",
        ),
        (
            "--cutoffs 10,5",
            "--cutoffs: must be ascending whole numbers such as 2000,8000 or none or auto; got `10,5`",
        ),
        ("--cutoffs 0,5", "--cutoffs: must be ascending whole numbers such as 2000,8000 or none or auto; "),
        ("--cutoffs autoo", "--cutoffs: must be ascending whole numbers such as 2000,8000 or none or auto; "),
        ("--cutoffs 5,10 --div-val 5", "--div-val: div_val 5 leaves no width for cluster 2 of d_embed 16; "),
        ("--div-val 2000", "--div-val: must be a whole number of at least 1 and at most 1024; got `2000`"),
        ("--d-model 17", "--d-model: must be even, for pairs of sine and cosine; got 17; try 18"),
        ("--n-head 3", "--n-head: n_head 3 does not divide d_model 16; change one or give --d-head"),
        ("--position shawn", "--position: must be one of relative, shaw, sinusoid, learned; got `shawn`"),
        (
            "--position learned --absolute-positions continue",
            "--absolute-positions: absolute_positions continue needs position sinusoid; got learned",
        ),
        ("--position shaw --untie-r", "--untie-r: untie_r true needs position relative; got shaw"),
        (
            "--position sinusoid --clamp-len 5",
            "--clamp-len: clamp_len 5 needs position relative or shaw; got sinusoid",
        ),
        (
            "--max-relative-position 5",
            "--max-relative-position: max_relative_position 5 needs position shaw; got relative",
        ),
        ("--device cuda:99", "--device: "),
        ("--precision fp16", "--precision: a CPU has no fp16 arithmetic; got `fp16`; use bf16 or fp32"),
    ],
)
def test_a_model_that_cannot_be_is_refused_and_leaves_nothing(text, tmp_path, flags, error):
    line = f"--tokenizer char --steps 5 --out {tmp_path / 'run'} {flags}".split()
    assert refusal("train", text, *TINY, *line).startswith(error)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]


@pytest.mark.parametrize(
    ("flags", "row"),
    [
        ("--position shaw", "positions   shaw · rows to distance 8 · also on values"),
        ("--position sinusoid", "positions   sinusoid · restart in each segment, rows of memory repeat them"),
        ("--position learned --mem-len 0", "positions   learned · restart in each segment"),
        (
            "--tokenizer word --cutoffs 5,12 --div-val 2",
            "clusters from 5, 12 · each 2 times narrower, projections tied: tail",
        ),
    ],
)
def test_a_dry_run_names_scheme_and_clusters(text, tmp_path, flags, row):
    sizes = [flag for flag in SIZES.split() if flag != "--clamp-len" and flag != "none"]
    result = run("train", text, *sizes, "--tokenizer", "char", "--steps", "9", "--dry-run", *flags.split())
    assert row in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]


def test_newlines_dropped_and_spaces_as_underscores_wherever_text_comes_in(text, tmp_path):
    data = (TEXT + "\n\n last é_line\r\n\n").encode()
    text.write_bytes(data)
    flags = [
        "--tokenizer",
        "byte",
        "--newlines",
        "drop",
        "--spaces",
        "underscore",
        "--steps",
        2,
        "--out",
        "r",
    ]
    run("train", text, *TINY, *flags, "--valid", text, "--test", text)
    assert Path("r/data/train.ids").read_bytes() == data.replace(b"\n", b"").replace(b" ", b"_")

    result = json.loads(run("eval", text, "--run", "r", "--json", "--per-token", "a.tsv").stdout)
    row, scored = result["rows"][0], data.replace(b"\n", b"")
    assert row["tokens"] == row["bytes_scored"] == len(scored) - 1
    assert row["chars_scored"] == len(scored.decode()) - 1
    # Newlines and underscores end words.
    assert row["words_scored"] == len(data.decode().replace("_", " ").split())
    assert result["protocol"]["newlines"] == "left out of the text, neither scored nor counted"
    assert result["protocol"]["spaces"] == "read as underscores"
    lines = [line.split("\t") for line in Path("a.tsv").read_text().splitlines()[1:]]
    assert [int(line[3]) for line in lines] == [i for i, byte in enumerate(data) if byte != 10][1:]
    assert [data[int(line[3])] for line in lines if line[1] != "_"] == [
        int(line[0]) for line in lines if line[1] != "_"
    ]
    for args, stdin in ((["-"], data), (["--split", "valid"], None), (["--split", "test"], None)):
        other = json.loads(run("eval", *args, "--run", "r", "--json", stdin=stdin).stdout)["rows"][0]
        assert (other["total_nll"], other["words_scored"]) == (row["total_nll"], row["words_scored"])
    assert "spaces    read as underscores" in run("eval", text, "--run", "r").stdout
    assert result["protocol"]["is_lower_bound"]
    assert f"spaces and underscores are one character{LOWER_BOUNDS}" in result["notices"]
    assert refusal("eval", text, "--run", "r", "--by-line") == (
        "--by-line: lines start after a newline token; the vocabulary has none; leave it out"
    )

    def generated(prompt):
        Path("prompt.txt").write_bytes(prompt.encode())
        flags = ["--run", "r", "--json", "--logprobs", "--seed", 1, "--max-tokens", 4]
        return json.loads(run("generate", *flags, "--prompt-file", "prompt.txt").stdout)

    assert generated("the\n quick\n")["prompt"] == "the\n quick\n"
    assert generated("the\n quick\n")["logprobs"] == generated("the_quick")["logprobs"]
    # Spaces are the most frequent byte, as underscores; a newline that never came in training starts nothing.
    assert generated("\n")["logprobs"] == generated("")["logprobs"] == generated(" ")["logprobs"]


def test_words_of_a_corpus_with_newlines_as_eos(text):
    lines = [f" the {number} quick <unk> \n" for number in range(40)]
    text.write_text("".join(lines) + "last")
    flags = ["--tokenizer", "word", "--newlines", "eos", "--vocab-size", "none", "--steps", 2, "--out", "w"]
    run("train", text, *TINY, *flags, "--valid", text)
    vocabulary = json.loads(Path("w/tokenizer.json").read_text())
    assert vocabulary["tokens"][:4] == ["<eos>", "<unk>", "quick", "the"]
    assert len(vocabulary["tokens"]) == 1 + len(set(text.read_text().split()))

    def row(*args):
        return json.loads(run("eval", text, "--run", "w", "--json", *args).stdout)["rows"][0]

    n_tokens = len(text.read_text().replace("\n", " <eos> ").split())
    assert (row()["tokens"], row()["words_scored"]) == (n_tokens - 1, n_tokens - 41)
    assert row()["bytes_scored"] == len(text.read_text()) - len(" the")
    assert (row("--by-line")["tokens"], row("--by-line")["bytes_scored"]) == (n_tokens, len(text.read_text()))
    result = json.loads(run("eval", text, "--run", "w", "--json").stdout)
    assert result["protocol"]["newlines"] == "the word <eos>, scored like every other token"
    assert result["protocol"]["is_lower_bound"]
    unknown = f"{40 / n_tokens:.2%} of the tokens are unknown words{LOWER_BOUNDS}"
    blanks = f"of the white space only newlines are scored{LOWER_BOUNDS}"
    assert [one for one in result["notices"] if "lower bounds" in one] == [unknown, blanks]
    Path("known.txt").write_text("the \t quick\r\n")
    result = json.loads(run("eval", "known.txt", "--run", "w", "--json").stdout)
    assert result["protocol"]["is_lower_bound"]
    assert [one for one in result["notices"] if "lower bounds" in one] == [blanks]
    made = run("generate", "--run", "w", "--prompt", "the 7", "--max-tokens", 300, "--seed", 1).stdout
    assert made.startswith("the 7")
    assert "\n" in made
    assert "<unk>" not in made
    assert "<eos>" not in made
    assert not re.search(r" \n|\n |  ", made)
