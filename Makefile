# What contributors run. `make` alone lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MINUTES ?= 40
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-long soak format lint types losses

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

demo: $(INSTALLED) demo/corpus.txt ## Train two minutes on Python's own library, generate, score (4 minutes)
	rm -rf demo/run
	$(BIN)/txl train demo/corpus.txt --minutes 2 --out demo/run
	$(BIN)/txl generate --run demo/run --prompt "def " --seed 1
	$(BIN)/txl eval --run demo/run --mem-len 0,64,128,256

test: lint types ## Check everything that must hold: format, lint, types, tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

# One after the other: the soak measures speed.
test-long: lint types ## Check it with the slow tests, new random examples, the soak and the demo (hours, by hand)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "slow or not slow" --hypothesis-profile=long
	$(MAKE) soak
	$(MAKE) demo

soak: $(INSTALLED) ## Train and read one run at once, and see that nothing grows: make soak MINUTES=40 (Linux)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak --minutes $(MINUTES)

format: $(INSTALLED) ## Format the code and mend what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: $(INSTALLED) ## Check format and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(INSTALLED) ## Check types
	$(BIN)/mypy

# Bits depend on processor, torch and threads, so they are compared here and never recorded.
losses: $(INSTALLED) demo/corpus.txt ## Compare 50 steps with those of another commit: make losses BASE=main
	@test -n "$(BASE)" || { echo "error: name the commit to compare with: make losses BASE=main" >&2; exit 2; }
	rm -rf demo/losses && mkdir -p demo/losses/base
	git archive "$(BASE)" | tar -x -C demo/losses/base
	$(BIN)/python -c "$$TRAIN_FROM" demo/losses/base demo/losses/before
	$(BIN)/python -c "$$TRAIN_FROM" . demo/losses/after
	$(BIN)/python -c "$$COMPARE" demo/losses/before demo/losses/after

# A pinned torch makes two machines test the same thing; pip's own settings say where it comes from, and a build
# that is there already is taken. So is the Triton of a build for CUDA, which wants no other.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "error: needs Python 3.10 or newer; got $$($(PYTHON) --version); try make PYTHON=python3.12" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install "torch==2.13.0"
	$(BIN)/python -c "import triton" 2>/dev/null || \
	  test "$$(uname -sm)" != "Linux x86_64" || $(BIN)/python -m pip install "triton==3.6.0"
	$(BIN)/python -m pip install --editable ".[dev]"
	@touch $@

demo/corpus.txt: | $(INSTALLED)
	@mkdir -p demo
	$(BIN)/python -c "$$CORPUS" demo/corpus.txt

define CORPUS
"""Write the Python library's own source files into one text, in order of their names, up to 5 MB."""
import sys, sysconfig
from pathlib import Path

library = Path(sysconfig.get_paths()["stdlib"])
names = sorted(path.relative_to(library).as_posix() for path in library.rglob("*.py"))
text, n_files = b"", 0
for name in names:
    source = (library / name).read_bytes()
    try:
        source.decode()
    except UnicodeDecodeError:
        continue
    if "site-packages" not in name and "dist-packages" not in name:
        if len(text) + len(source) > 5_000_000:
            break
        text, n_files = text + source, n_files + 1
if not text:
    sys.exit(f"error: no Python source files under {library}")
Path(sys.argv[1]).write_bytes(text)
print(f"{sys.argv[1]}: {n_files} files of {library}, {len(text):,} bytes")
endef
export CORPUS

define TRAIN_FROM
"""Train the small model with the code of one tree, whatever is installed."""
import subprocess, sys
from pathlib import Path

tree, out = (Path(name).resolve() for name in sys.argv[1:])
settings = ["-c", "configs/tiny-char.yaml", "--steps", "50", "--log-every", "1", "--device", "cpu", "--quiet"]
corpus = Path("demo/corpus.txt").resolve()
command = [Path(sys.prefix) / "bin/python", "-m", "txlcli", "train", corpus, *settings, "--out", out]
sys.exit(subprocess.run(command, cwd=tree).returncode)
endef
export TRAIN_FROM

define COMPARE
"""Compare the losses of two runs and their last weights, bit for bit."""
import json, sys
from pathlib import Path

before, after = (Path(name) for name in sys.argv[1:])
def lines(run):
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(e["event"], e["step"], e.get("loss", e.get("nll")), e.get("grad_norm")) for e in events]
old_lines, new_lines = lines(before), lines(after)
for old, new in zip(old_lines, new_lines):
    if old != new:
        sys.exit(f"different from step {old[1]} on: (event, step, loss, grad_norm) was {old}, is {new}")
if len(old_lines) != len(new_lines):
    sys.exit(f"metrics.jsonl had {len(old_lines)} lines, has {len(new_lines)}")
last = "checkpoints/step-0000050/model.safetensors"
if (before / last).read_bytes() != (after / last).read_bytes():
    sys.exit("same losses, but different weights after 50 steps")
print("the same: 50 losses, their gradient norms and the last weights, bit for bit")
endef
export COMPARE
