"""The order of the house: who may import whom, what stays lazy, and what no module does."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import txlcli
from txlcli.config import LEAVES

PACKAGE = Path(txlcli.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

# Each noun may import only those before it. A folder is one noun.
ORDER = [
    *("config", "files", "checksums", "tokenizer", "sources", "data"),
    *("device", "attention", "single", "positions", "adaptive", "model"),
    *("run", "checkpoint", "convert"),
    *("evaluate", "generate", "plan", "train", "bench", "api"),
    *("report", "cli"),
]

# Procedures stand beside one another: only these may use another.
PROCEDURES = {
    "evaluate": set(),
    "generate": set(),
    "plan": set(),
    "train": {"evaluate", "generate", "plan"},
    "bench": {"evaluate", "generate", "plan", "train"},
}

CONFINED = {
    "yaml": {"config"},
    "safetensors": {"checkpoint"},
    "sentencepiece": {"tokenizer"},
    "sacremoses": {"tokenizer"},
    "zstandard": {"sources"},
    "typer": {"cli"},
    "click": {"cli"},
    "rich": {"report", "cli"},
    "tqdm": {"report"},
    "triton": {"attention"},
}

# Whoever asks for help, for the list of runs or for a setting does not wait for torch.
WITHOUT_TORCH = ("config", "files", "checksums", "tokenizer", "sources", "run", "plan", "report", "cli")


def noun(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path, *, only_at_import: bool = False) -> Iterator[str]:
    """Name what a module imports, in full: `txlcli.files`, `torch.nn`."""
    pending: list[ast.AST] = [parse(path)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: write `from txlcli...`"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        is_lazy = isinstance(node, ast.FunctionDef) or (
            isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        )
        if not (only_at_import and is_lazy):
            pending.extend(ast.iter_child_nodes(node))


def first_party(path: Path) -> set[str]:
    parts = [name.split(".") for name in imports(path)]
    return {part[1] for part in parts if part[0] == "txlcli" and part[1] in ORDER}


def third_party(path: Path, *, only_at_import: bool = False) -> set[str]:
    roots = {name.split(".")[0] for name in imports(path, only_at_import=only_at_import)}
    return roots - sys.stdlib_module_names - {"txlcli"}


def calls(path: Path) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(parse(path)) if isinstance(node, ast.Call)}


def test_every_module_has_its_place() -> None:
    assert {noun(path) for path in MODULES} - {"__init__", "__main__"} == set(ORDER)


def test_the_map_of_the_house_is_true() -> None:
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.split("## The map")[1].split("## ")[0]
    names = re.findall(r"^\| `([a-z]+)(/?)` \|", table, re.MULTILINE)
    assert [name for name, _ in names] == ORDER
    assert all((PACKAGE / name).is_dir() == bool(slash) for name, slash in names)


def test_each_module_imports_only_those_before_it() -> None:
    for path in MODULES:
        if noun(path) in ORDER:
            later = ORDER[ORDER.index(noun(path)) + 1 :]
            assert not first_party(path) & set(later), f"{path} imports what comes after {noun(path)}"


def test_procedures_do_not_lean_on_one_another() -> None:
    for path in MODULES:
        if noun(path) in PROCEDURES:
            others = PROCEDURES.keys() - {noun(path)} - PROCEDURES[noun(path)]
            assert not first_party(path) & others, f"{path} uses a procedure that is not its own"


def test_third_party_packages_stay_where_they_belong() -> None:
    for path in MODULES:
        for package in third_party(path) & CONFINED.keys():
            assert noun(path) in CONFINED[package], f"{path} imports {package}"
        at_import = third_party(path, only_at_import=True)
        assert "sentencepiece" not in at_import, f"{path} loads sentencepiece before it is needed"
        assert "sacremoses" not in at_import, f"{path} loads sacremoses, maybe absent"
        assert "zstandard" not in at_import, f"{path} loads zstandard, maybe absent"
        assert "triton" not in at_import or path.stem == "kernels", f"{path} loads triton, maybe absent"
        assert noun(path) not in WITHOUT_TORCH or "torch" not in at_import, f"{path} loads torch"


def test_no_module_unpickles_or_evaluates() -> None:
    for path in MODULES:
        roots = {name.split(".")[0] for name in imports(path)}
        assert not roots & {"pickle", "marshal", "shelve", "dill", "joblib"}, path
        banned = {"eval", "exec", "compile", "torch.load", "torch.save", "np.load", "np.save", "yaml.load"}
        assert not calls(path) & banned, path


def test_only_report_and_cli_speak() -> None:
    for path in MODULES:
        if noun(path) not in ("report", "cli"):
            assert "print" not in calls(path), path
            names = {ast.unparse(node) for node in ast.walk(parse(path)) if isinstance(node, ast.Attribute)}
            assert not names & {"sys.stdout", "sys.stderr"}, path


def run_python(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


def test_help_does_not_wait_for_torch() -> None:
    done = run_python(
        "import sys\n"
        "from txlcli.cli import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "heavy = {'torch', 'sentencepiece', 'safetensors', 'tqdm', 'txlcli.model'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout
    assert done.stderr == ""


def test_light_modules_do_not_load_torch() -> None:
    names = [f"txlcli.{name}" for name in WITHOUT_TORCH]
    done = run_python(f"import sys, {', '.join(names)}\nassert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_importing_has_no_effect(tmp_path: Path) -> None:
    names = [".".join(["txlcli", *path.relative_to(PACKAGE).with_suffix("").parts]) for path in MODULES]
    names = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    if find_spec("triton") is None:
        names.remove("txlcli.attention.kernels")
    done = run_python(
        "import os, random, signal, sys, threading\n"
        "import numpy, torch\n"
        "def state():\n"
        "    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]\n"
        "    flags = torch.is_grad_enabled(), torch.get_num_threads(), torch.get_default_dtype()\n"
        "    modes = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()\n"
        "    chance = random.getstate(), torch.get_rng_state().tolist(), str(numpy.random.get_state())\n"
        "    places = os.getcwd(), os.listdir(), dict(os.environ), sys.stdout, sys.stderr, sys.excepthook\n"
        "    return handlers, flags, modes, chance, places, threading.active_count()\n"
        "before = state()\n"
        f"import {', '.join(sorted(names))}\n"
        "assert state() == before\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_setting_has_help() -> None:
    names = [setting.name for setting in LEAVES]
    assert len(names) == len(set(names))
    for setting in LEAVES:
        assert setting.help, setting.name
        assert setting.help.strip() == setting.help, setting.name
        assert not setting.help.endswith("."), f"{setting.name}: help is a phrase, not a sentence"


def test_every_module_says_what_it_is_for() -> None:
    for path in MODULES:
        assert ast.get_docstring(parse(path)), path
