"""Resuming: a run that was stopped and continued is the run that was not, bit for bit."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.crash import tree
from tests.test_checkpoint import damage, unseal
from tests.test_train import make_run, metrics, of_kind, train_run, write_corpus
from txlcli import UserError
from txlcli.checkpoint import find_damage, load_model, load_state, save_checkpoint
from txlcli.config import Config, DataConfig, ModelConfig, OptimConfig, from_flags, load, read_origins
from txlcli.data import Batches, TokenStore, stream_start
from txlcli.device import has_bf16
from txlcli.run import Pointers, Run, list_checkpoints, read_pointers
from txlcli.train import (
    Event,
    Finished,
    Notice,
    Ready,
    Saved,
    begin,
    cost,
    evaluating,
    learning_rate,
    resume,
    train,
)
from txlcli.train.state import TrainState, optimize

# 667 tokens in 4 streams of 8: an epoch has 21 steps.
EPOCH = 21


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluating, "SAMPLE_TOKENS", 3)


def never() -> bool:
    return False


def after(n: int) -> Callable[[], bool]:
    """Return a `should_stop` that says yes from the n-th question on."""
    n_asked = 0

    def ask() -> bool:
        nonlocal n_asked
        n_asked += 1
        return n_asked >= n

    return ask


def go_on(run: Run, *, should_stop: Callable[[], bool] = never, **changes: object) -> list[Event]:
    """Resume a run to its end, and return all events."""
    events = list(resume(run, from_flags(changes)))
    ready = events[-1]
    if isinstance(ready, Ready):
        events += train(ready.run, ready.config, should_stop=should_stop)
    return events


def texts(events: list[Event]) -> list[str]:
    return [event.text for event in of_kind(events, Notice)]


def assert_equal_ends(one: Run, other: Run) -> None:
    """Both runs end with the same bytes."""
    step = list_checkpoints(one)[-1]
    assert list_checkpoints(other)[-1] == step
    for name in ("model.safetensors", "state.safetensors"):
        assert (one.checkpoint_path(step) / name).read_bytes() == (
            other.checkpoint_path(step) / name
        ).read_bytes(), name
    assert read_pointers(one) == read_pointers(other)
    values = [load_state(run.checkpoint_path(step))[1] for run in (one, other)]
    for value in values:
        del value["counters"]["elapsed_s"], value["metrics_bytes"]
    assert values[0] == values[1]


def lines_but_saves_of(run: Run, *steps: int) -> list[dict[str, Any]]:
    """Return metrics without times and without the save lines of some steps."""
    return [
        line
        for line in metrics(run, timeless=True)
        if not (line["event"] == "save" and line["step"] in steps)
    ]


@pytest.mark.parametrize(
    ("n", "flags"),
    [
        (10, {"optimizer": "adamw", "dropout": 0.2, "dropatt": 0.1, "mem_len": 20}),
        (EPOCH, {"optimizer": "muon", "dropout": 0.2, "accumulate": 2}),
        (9, {"optimizer": "sgd", "lr": 0.1, "mem_len": 0, "eval_every": 9, "dropout": 0.1}),
        (4, {"optimizer": "adam", "precision": "bf16", "norm": "post", "save_every": 4, "dropout": 0.1}),
    ],
    ids=["inside an epoch", "at an epoch's end", "at an evaluation", "at a save"],
)
def test_stopped_and_resumed_is_not_stopped(tmp_path: Path, n: int, flags: dict[str, Any]) -> None:
    if flags["optimizer"] == "muon" and not hasattr(torch.optim, "Muon"):
        flags["optimizer"] = "adamw"
    flags = {"steps": 2 * n, "log_every": 3, "eval_every": 6, "save_every": 7, **flags}
    straight, _ = train_run(tmp_path, "straight", **flags)
    ready = make_run(tmp_path, "stopped", **flags)
    end = list(train(ready.run, ready.config, stop_at=n))[-1]
    assert isinstance(end, Finished)
    assert (end.reason, end.step) == ("stop_at", n)
    torch.manual_seed(99)  # another process would have another random state
    end = go_on(ready.run)[-1]
    assert isinstance(end, Finished)
    assert (end.reason, end.step) == ("length", 2 * n)
    assert_equal_ends(straight, ready.run)
    saved = [line["step"] for line in metrics(straight) if line["event"] == "save"]
    own = () if n in saved else (n,)
    assert lines_but_saves_of(straight) == lines_but_saves_of(ready.run, *own)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("attention", ["auto", "eager"])
def test_deterministic_on_a_gpu_stopped_and_resumed_is_not_stopped(
    tmp_path: Path, precision: str, attention: str
) -> None:
    if precision == "bf16" and not has_bf16(torch.device("cuda")):
        pytest.skip("this GPU has no bf16")
    settings = {
        **{"n_layer": 2, "d_model": 64, "n_head": 2, "tgt_len": 32, "mem_len": 48, "batch_size": 4},
        **{"steps": 40, "eval_every": 15, "save_every": 10, "dropout": 0.2, "optimizer": "adamw"},
        **{"tokenizer": "char", "device": "cuda", "precision": precision, "attention": attention},
    }
    flags = [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    corpus = write_corpus(tmp_path, n_bytes=20_000)

    def command(*args: object) -> None:
        # Each in a process of its own, as users resume; and cuBLAS reads how it is to sum when it starts.
        line = [sys.executable, "-m", "txlcli", "train", *map(str, args)]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
        done = subprocess.run(line, capture_output=True, text=True, env=env, check=False)
        assert done.returncode == 0, done.stderr

    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    command(corpus, *flags, "--deterministic", "--out", straight)
    command(corpus, *flags, "--deterministic", "--out", stopped, "--stop-at", 17)
    command("--resume", stopped)
    assert_equal_ends(Run(straight), Run(stopped))
    assert lines_but_saves_of(Run(straight)) == lines_but_saves_of(Run(stopped), 17)


SCHEMES: dict[str, dict[str, Any]] = {
    "biases of each layer": {"untie_r": True, "optimizer": "sgd", "weight_decay": 0.1},
    "shaw": {"position": "shaw", "max_relative_position": 5, "accumulate": 2},
    "shaw, keys alone": {"position": "shaw", "shaw_values": False, "optimizer": "adam"},
    "sinusoid": {"position": "sinusoid", "mem_len": 20},
    "sinusoid that runs on": {"position": "sinusoid", "absolute_positions": "continue", "accumulate": 2},
    "runs on without memory": {"position": "sinusoid", "absolute_positions": "continue", "mem_len": 0},
    "learned": {"position": "learned", "weight_decay": 0.1},
    "clusters": {"tokenizer": "word", "cutoffs": (4, 8), "div_val": 2, "d_embed": 12, "weight_decay": 0.1},
    "one table": {"tokenizer": "word", "cutoffs": (4, 8), "tied": False, "mem_len": 20},
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_stopped_and_resumed_is_not_stopped_in_every_scheme(tmp_path: Path, scheme: str) -> None:
    flags = {"steps": 8, "log_every": 8, "eval_every": 8, "save_every": 8, "dropout": 0.2, **SCHEMES[scheme]}
    straight, _ = train_run(tmp_path, "straight", **flags)
    ready = make_run(tmp_path, "stopped", **flags)
    list(train(ready.run, ready.config, stop_at=4))
    torch.manual_seed(99)
    go_on(ready.run)
    assert_equal_ends(straight, ready.run)
    # Steps of eight tokens; the words of the corpus make epochs of six steps, of the last a short one.
    n_steps = 2 if flags.get("tokenizer") == "word" else 8
    assert load_state(straight.checkpoint_path(8))[0]["memory.position"].tolist() == [8 * n_steps] * 4


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_words_that_have_not_come_yet_have_no_state_and_resume_the_same(
    tmp_path: Path, optimizer: str
) -> None:
    if optimizer == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    # One stream: the words of the tail come after 60 tokens and more, the seventh step.
    (tmp_path / "words.txt").write_text("ox and " * 30 + "fox dog cat " * 20 + "ox and " * 30)
    flags = {
        **{"tokenizer": "word", "cutoffs": (5,), "div_val": 2, "tied": False, "tie_projs": "none"},
        **{"batch_size": 1, "optimizer": optimizer, "weight_decay": 0.1, "lr": 0.01},
        **{"steps": 12, "eval_every": 12, "save_every": 4, "keep": 9},
    }
    straight, _ = train_run(tmp_path, "straight", **flags)
    ready = make_run(tmp_path, "stopped", **flags)
    list(train(ready.run, ready.config, stop_at=5))
    go_on(ready.run)
    assert_equal_ends(straight, ready.run)
    weights = [load_file(straight.checkpoint_path(step) / "model.safetensors") for step in (0, 4, 12)]
    owned = [{name.split(".", 3)[3] for name in of_optimizer(straight, step)} for step in (4, 12)]
    for name in ("head.weights.1", "head.projections.1"):
        assert torch.equal(weights[0][name], weights[1][name])
        assert not torch.equal(weights[1][name], weights[2][name])
        assert name not in owned[0]
        assert (name in owned[1]) == (optimizer != "sgd")


def of_optimizer(run: Run, step: int) -> list[str]:
    """Name the tensors of the optimizers' state."""
    return [name for name in load_state(run.checkpoint_path(step))[0] if name.startswith("optimizer.")]


@contextmanager
def changed_state(run: Run, step: int) -> Iterator[dict[str, Tensor]]:
    """Change the tensors of a checkpoint's state."""
    path = run.checkpoint_path(step)
    tensors, _ = load_state(path)
    yield tensors
    save_file(tensors, path / "state.safetensors")
    unseal(path)


def test_state_of_an_optimizer_that_has_none_is_refused(tmp_path: Path) -> None:
    ready = make_run(tmp_path, optimizer="sgd", steps=2)
    list(train(ready.run, ready.config, stop_at=1))
    with changed_state(ready.run, 1) as tensors:
        assert not [name for name in tensors if name.startswith("optimizer.")]
        tensors["optimizer.sgd.momentum_buffer.norm.weight"] = torch.zeros(16)
    with pytest.raises(
        UserError, match=r"the training state is damaged; it has optimizer state that is not ours: .*sgd"
    ):
        go_on(ready.run)


@pytest.mark.parametrize("scheme", ["shaw", "sinusoid", "sinusoid that runs on", "learned"])
def test_states_without_positions_go_on_unless_positions_run_on(tmp_path: Path, scheme: str) -> None:
    ready = make_run(tmp_path, **{**SCHEMES[scheme], "steps": 5})
    list(train(ready.run, ready.config, stop_at=3))
    with changed_state(ready.run, 3) as tensors:
        del tensors["memory.position"]
    if SCHEMES[scheme].get("absolute_positions") == "continue":
        with pytest.raises(UserError, match=r"is damaged; the memory has no position for each stream$"):
            go_on(ready.run)
    else:
        end = go_on(ready.run)[-1]
        assert isinstance(end, Finished)
        assert end.step == 5


def start_with_documents(folder: Path, *, is_reset: bool = True, **settings: Any) -> TrainState:
    """Begin training on ids of which one among six ends a document."""
    ids = np.random.default_rng(3).integers(0, 6, 700)
    path = folder / "documents.ids"
    path.write_bytes(ids.astype("<u2").tobytes())
    sizes = {"n_layer": 2, "d_model": 8, "n_head": 2, "tgt_len": 8, "mem_len": 12, "dropout": 0.1}
    config = Config(
        data=DataConfig(document_per_file=True),
        model=ModelConfig(**{**sizes, **settings}, reset_memory_at_documents=is_reset),
        optim=OptimConfig(batch_size=4, accumulate=2, optimizer="adamw"),
    )
    store = TokenStore(path, dtype="uint16", n_tokens=len(ids), n_vocab=6)
    return TrainState.start(config, Batches(store, 4, 8), 6, device=torch.device("cpu"), precision="fp32")


def saved(state: TrainState, run: Run) -> Path:
    run.folder.mkdir(exist_ok=True)
    return save_checkpoint(
        run,
        state.model,
        step=state.counters.step,
        metadata={"model": {}, "tokenizer": {}},
        tensors=state.tensors(),
        values=state.values(),
    )


@pytest.mark.parametrize("memory_start", ["empty", "zeros"])
@pytest.mark.parametrize("n", [1, 5, 20])
def test_the_running_document_of_each_stream_is_resumed(tmp_path: Path, n: int, memory_start: str) -> None:
    straight = start_with_documents(tmp_path, memory_start=memory_start)
    assert straight.batches.steps_per_epoch == 22
    for _ in range(n):
        optimize(straight, rate=0.01, clip=0.25)
    path = saved(straight, Run(tmp_path / "run"))
    kept = load_state(path)[0]["memory.n_document"]
    assert kept.tolist() == [_rows_after_the_last_end(straight, stream, n) for stream in range(4)]
    for _ in range(6):
        optimize(straight, rate=0.01, clip=0.25)
    resumed = start_with_documents(tmp_path, memory_start=memory_start)
    resumed.restore(path)
    for _ in range(6):
        optimize(resumed, rate=0.01, clip=0.25)
    for one, other in (
        (straight.tensors(), resumed.tensors()),
        (straight.model.state_dict(), resumed.model.state_dict()),
    ):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def _rows_after_the_last_end(state: TrainState, stream: int, n_segments: int) -> int:
    begin = stream_start(stream, 700, 4)
    stop = min(begin + 8 * n_segments, stream_start(stream + 1, 700, 4))
    ids = state.batches.store.read(begin, stop).tolist()
    n_before = state.model.lengths.n_rows_at_start
    n_rows = min(12, n_before + len(ids))
    return min(n_rows, ids[::-1].index(5) if 5 in ids else n_before + len(ids))


def test_without_documents_the_state_has_the_names_it_had(tmp_path: Path) -> None:
    state = start_with_documents(tmp_path, is_reset=False)
    optimize(state, rate=0.01, clip=0.25)
    names = {name for name in state.tensors() if name.startswith("memory.")}
    assert names == {"memory.0", "memory.1", "memory.position"}


@pytest.mark.parametrize(
    ("n_document", "text"),
    [
        (None, "the memory has no number of the running document's rows for each stream"),
        (
            torch.zeros(3, dtype=torch.int64),
            "the memory has no number of the running document's rows for each stream",
        ),
        (torch.zeros(4), "the memory has no number of the running document's rows for each stream"),
        (torch.tensor([0, 0, 0, -1]), "the running document has more or less rows than the memory's 8"),
        (torch.tensor([0, 9, 0, 0]), "the running document has more or less rows than the memory's 8"),
    ],
    ids=["none", "too few", "no integers", "negative", "too many"],
)
def test_documents_that_cannot_be_are_refused(tmp_path: Path, n_document: Tensor | None, text: str) -> None:
    state = start_with_documents(tmp_path)
    optimize(state, rate=0.01, clip=0.25)
    run = Run(tmp_path / "run")
    saved(state, run)
    with changed_state(run, 1) as tensors:
        del tensors["memory.n_document"]
        if n_document is not None:
            tensors["memory.n_document"] = n_document
    with pytest.raises(UserError, match=f"the training state is damaged; {text}$"):
        state.restore(run.checkpoint_path(1))


@pytest.mark.parametrize("position", [torch.zeros(3, dtype=torch.int64), torch.zeros(4), torch.tensor(0)])
def test_positions_that_cannot_be_are_refused(tmp_path: Path, position: Tensor) -> None:
    ready = make_run(tmp_path)
    list(train(ready.run, ready.config, stop_at=3))
    with changed_state(ready.run, 3) as tensors:
        tensors["memory.position"] = position
    with pytest.raises(UserError, match=r"is damaged; the memory has no position for each stream$"):
        go_on(ready.run)


def test_interrupted_again_and_again_is_not_stopped(tmp_path: Path) -> None:
    flags = {"steps": 12, "eval_every": 4, "save_every": 5, "dropout": 0.2}
    straight, _ = train_run(tmp_path, "straight", **flags)
    run = make_run(tmp_path, "stopped", **flags).run
    n_rounds, end = 0, None
    while end is None or end.reason != "length":
        n_rounds += 1
        assert n_rounds < 60
        # The questions fall on steps and into evaluations, the last one's two parts included.
        end = go_on(run, should_stop=after(2 + n_rounds % 3))[-1]  # type: ignore[assignment]
        assert isinstance(end, Finished)
    assert n_rounds > 5
    assert_equal_ends(straight, run)
    wanted = [line for line in metrics(straight, timeless=True) if line["event"] != "save"]
    assert [line for line in metrics(run, timeless=True) if line["event"] != "save"] == wanted


def test_a_run_killed_between_checkpoints_leaves_no_line_twice(tmp_path: Path) -> None:
    flags = {"steps": 12, "eval_every": 6, "save_every": 6}
    straight, _ = train_run(tmp_path, "straight", **flags)
    ready = make_run(tmp_path, "killed", **flags)
    for event in train(ready.run, ready.config):
        if getattr(event, "step", 0) == 9:
            break  # nothing is saved after step 6
    assert metrics(ready.run)[-1]["step"] == 9
    with ready.run.metrics_path.open("ab") as file:
        file.write(b'{"event": "step", "st')
    (ready.run.checkpoints_folder / ".step-0000012.abcdef01.tmp").mkdir()
    go_on(ready.run)
    assert metrics(ready.run, timeless=True) == metrics(straight, timeless=True)
    assert_equal_ends(straight, ready.run)
    assert sorted(path.name for path in ready.run.checkpoints_folder.iterdir()) == [
        "step-0000006",
        "step-0000012",
    ]


def test_a_run_killed_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    straight, _ = train_run(tmp_path, "straight")
    run = make_run(tmp_path, "killed").run
    run.metrics_path.write_text('{"event": "save", "step": 0, "path": "checkpoints/step-0000000"}\n')
    go_on(run)
    assert metrics(run, timeless=True) == metrics(straight, timeless=True)
    assert_equal_ends(straight, run)


@pytest.mark.parametrize("how", ["folder", "steps", "pointers", "no pointers", "damaged pointers"])
def test_a_run_whose_checkpoints_are_gone_is_refused_and_keeps_its_metrics(tmp_path: Path, how: str) -> None:
    ready = make_run(tmp_path, steps=8)
    run = ready.run
    list(train(run, ready.config, stop_at=3))
    for step in list_checkpoints(run):
        shutil.rmtree(run.checkpoint_path(step))
    was = "pointers.json names step 3 as the last"
    if how == "folder":
        run.checkpoints_folder.rmdir()
    if how == "pointers":
        run.metrics_path.unlink()
    if how == "no pointers":
        run.pointers_path.unlink()
        was = "metrics.jsonl tells of some"
    if how == "damaged pointers":
        run.pointers_path.write_text("{")
        was = "pointers.json tells of some"
    before = tree(run.folder)
    for work in (lambda: go_on(run), lambda: list(train(run, ready.config))):
        with pytest.raises(UserError) as caught:
            work()
        assert str(caught.value) == (
            f"{run.checkpoints_folder}: has no checkpoint any more; {was}; "
            f"put a whole one back, or begin anew with `txl train -c {run.config_path}`"
        )
        assert tree(run.folder) == before


def test_a_longer_run_says_how_the_rate_changes(tmp_path: Path) -> None:
    run, _ = train_run(tmp_path, steps=12)
    before = load(run.config_path)
    events = go_on(run, steps=20)
    config = load(run.config_path)
    assert config == replace(before, train=replace(before.train, steps=20))
    rate = learning_rate(13, config.optim, 20)
    assert texts(events) == [
        f"length 12 -> 20 steps: the learning rate of step 13 is {rate:.4g} instead of 0",
    ]
    assert list_checkpoints(run)[-1] == 20
    rates = {line["step"]: line["lr"] for line in metrics(run) if line["event"] == "step"}
    assert rates[13] == rate
    assert read_origins(run.config_path)["steps"] == "flag"


def test_epochs_and_minutes_set_a_new_length_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ready = make_run(tmp_path)
    list(train(ready.run, ready.config, stop_at=3))
    again = list(resume(ready.run, from_flags({"epochs": 2})))[-1]
    assert isinstance(again, Ready)
    assert (again.config.train.steps, again.config.train.epochs) == (2 * EPOCH, None)
    again = list(resume(ready.run, from_flags({"minutes": 0.001})))[-1]
    assert isinstance(again, Ready)
    # Too little for even one step: one is done.
    assert (again.config.train.steps, again.config.train.minutes) == (4, None)
    assert again.budget is not None
    assert load(ready.run.config_path) == again.config


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"lr": 0.1},
            "--lr: cannot change on resume; leave it out, or begin a new run: txl train -c {run}/config.yaml",
        ),
        ({"corpus": ("a.txt",)}, "CORPUS: cannot change on resume; "),
        ({"batch_size": 8}, "--batch-size: cannot change on resume; "),
        ({"patience": 8}, "--patience: cannot change on resume; "),
        ({"eval_tokens": 8}, "--eval-tokens: cannot change on resume; "),
        ({"steps": 2}, "--steps: below the saved step; got 2 steps, {run} is at step 3; give 3 or more"),
        ({"epochs": 0.01}, "--epochs: below the saved step; got 1 steps, {run} is at step 3; give 3 or more"),
    ],
)
def test_what_may_not_change_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], text: str
) -> None:
    ready = make_run(tmp_path)
    list(train(ready.run, ready.config, stop_at=3))
    before = ready.run.config_path.read_bytes()
    with pytest.raises(UserError) as error:
        list(resume(ready.run, from_flags(changes)))
    assert text.format(run=ready.run.folder) in str(error.value)
    assert ready.run.config_path.read_bytes() == before


def test_a_length_made_too_short_by_hand_is_named_by_its_file(tmp_path: Path) -> None:
    ready = make_run(tmp_path, steps=4)
    list(train(ready.run, ready.config, stop_at=3))
    path = ready.run.config_path
    path.write_text(re.sub(r"steps: 4\b", "steps: 2", path.read_text()))
    with pytest.raises(UserError) as error:
        list(resume(ready.run, {}))
    place = f"{path}: steps: below the saved step"
    assert str(error.value) == f"{place}; got 2 steps, {ready.run.folder} is at step 3; give 3 or more"


def test_a_place_to_stop_that_lies_behind_is_refused(tmp_path: Path) -> None:
    ready = make_run(tmp_path)
    list(train(ready.run, ready.config, stop_at=3))
    with pytest.raises(UserError) as error:
        list(train(ready.run, ready.config, stop_at=2))
    expected = f"--stop-at: below the saved step; got 2, {ready.run.folder} is at step 3; give 3 or more"
    assert str(error.value) == expected


def test_resuming_says_where_it_goes_on(tmp_path: Path) -> None:
    ready = make_run(tmp_path, steps=8)
    list(train(ready.run, ready.config, stop_at=3))
    again = list(resume(ready.run, {}))[-1]
    assert isinstance(again, Ready)
    assert again.step == 3


def test_what_may_change_is_written_to_the_run(tmp_path: Path) -> None:
    ready = make_run(tmp_path, steps=8)
    list(train(ready.run, ready.config, stop_at=3))
    go_on(ready.run, log_every=2, eval_every=8, save_every=8, keep=1, attention="eager", threads=1)
    config = load(ready.run.config_path)
    assert (config.train.log_every, config.train.keep, config.machine.threads) == (2, 1, 1)
    assert [line["step"] for line in metrics(ready.run) if line["event"] == "step"] == [1, 2, 3, 4, 6, 8]
    assert list_checkpoints(ready.run) == [8]


def test_a_finished_run_says_so(tmp_path: Path) -> None:
    run, _ = train_run(tmp_path)
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    events = go_on(run)
    assert texts(events) == [f"{run.folder}: is finished at step 12; a larger --steps continues it"]
    end = events[-1]
    assert isinstance(end, Finished)
    assert (end.reason, end.step, end.best_step) == ("length", 12, read_pointers(run).best)
    assert {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()} == before


def test_a_run_that_lost_patience_stays_ended(tmp_path: Path) -> None:
    # A rate of nearly nothing: after the first evaluation none is better.
    flags = {"lr": 1e-30, "patience": 2, "steps": 40, "eval_every": 2, "save_every": 40}
    run, events = train_run(tmp_path, **flags)
    end = events[-1]
    assert isinstance(end, Finished)
    assert (end.reason, end.step) == ("patience", 6)
    events = go_on(run)
    assert texts(events) == [f"{run.folder}: ended at step 6, its evaluations had stopped improving"]
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "patience"


def test_another_machine_is_told(tmp_path: Path) -> None:
    ready = make_run(tmp_path, steps=4)  # a step and an evaluation more: threads that tests share are slow
    list(train(ready.run, ready.config, stop_at=3))
    n = torch.get_num_threads()
    events = go_on(ready.run, threads=n + 1, precision="bf16")
    assert texts(events) == [
        f"resuming elsewhere: threads {n} -> {n + 1}, precision fp32 -> bf16; "
        "the rest will not repeat bit for bit"
    ]
    assert isinstance(events[-1], Finished)


def test_settings_changed_by_hand_are_told(tmp_path: Path) -> None:
    ready = make_run(tmp_path, steps=8, lr=0.02, dropout=0.1, save_every=5)
    run = ready.run
    list(train(run, ready.config, stop_at=3))
    text = run.config_path.read_text()
    for old, new in (
        ("lr: 0.02", "lr: 0.01"),
        ("dropout: 0.1", "dropout: 0.2"),
        ("tgt_len: 8", "tgt_len: 4"),
        ("warmup: 2", "warmup: 3"),
        ("eval_every: 6", "eval_every: 8"),  # a flag may change it too
    ):
        assert text.count(f" {old} ") == 1
        text = text.replace(f" {old} ", f" {new} ")
    run.config_path.write_text(text)
    told = "config.yaml changed since step {}: {}; the rest will not be what it would have been"
    changes = "dropout 0.1 -> 0.2, tgt_len 8 -> 4, lr 0.02 -> 0.01, warmup 2 -> 3"
    again = list(resume(run, {}))[-1]
    assert isinstance(again, Ready)
    assert texts(list(train(run, again.config, stop_at=4))) == [told.format(3, changes)]
    # From the next checkpoint on that is how the run is trained.
    assert texts(list(train(run, again.config, stop_at=6))) == []


def test_states_without_settings_go_on(tmp_path: Path) -> None:
    ready = make_run(tmp_path, steps=4)
    list(train(ready.run, ready.config, stop_at=3))
    path = ready.run.checkpoint_path(3)
    unseal(path)
    values = json.loads((path / "state.json").read_text())
    for settings in ({"lr": ready.config.optim.lr, "unknown": 1}, {}):
        (path / "state.json").write_text(json.dumps({**values, "settings": settings}))
        assert texts(list(train(ready.run, ready.config, stop_at=3))) == []
    (path / "state.json").write_text(json.dumps({**values, "settings": [1]}))
    with pytest.raises(UserError, match=r"state\.json: `settings` cannot be; damaged$"):
        list(train(ready.run, ready.config))
    del values["settings"]
    (path / "state.json").write_text(json.dumps(values))
    events = go_on(ready.run)
    assert texts(events) == []
    assert isinstance(events[-1], Finished)


def test_a_model_changed_by_hand_is_refused_by_the_setting(tmp_path: Path) -> None:
    ready = make_run(tmp_path, steps=8, position="learned")
    list(train(ready.run, ready.config, stop_at=3))
    plain = ready.run.config_path.read_text()
    for name, old, new in (("n_layer", 2, 3), ("d_inner", 64, 32), ("norm_eps", "1.0e-05", "1.0e-06")):
        text = plain.replace(f" {name}: {old}", f" {name}: {new}")
        assert text != plain
        ready.run.config_path.write_text(text)
        with pytest.raises(UserError) as caught:
            go_on(ready.run)
        was, now = (float(value) if name == "norm_eps" else value for value in (old, new))
        assert str(caught.value) == (
            f"{ready.run.checkpoint_path(3)}: written for {name} {was}, config.yaml says {now}; "
            "put the run's own config.yaml back"
        )
    # A table of positions has a row for each of a segment.
    ready.run.config_path.write_text(plain.replace(" tgt_len: 8", " tgt_len: 4"))
    with pytest.raises(UserError, match=r": written for tgt_len 8, config\.yaml says 4; "):
        go_on(ready.run)


def refusing(monkeypatch: pytest.MonkeyPatch, place: Path, number: int) -> None:
    """Let the system refuse to open a file."""
    plain = os.open

    def refuse(path: Any, flags: int, *args: Any, **rest: Any) -> int:
        if Path(path) == place:
            raise OSError(number, os.strerror(number), str(path))
        return plain(path, flags, *args, **rest)

    monkeypatch.setattr(os, "open", refuse)


@pytest.mark.parametrize(
    ("name", "number"),
    [("model.safetensors", errno.EACCES), ("state.safetensors", errno.EPERM), ("state.json", errno.EIO)],
)
def test_a_newest_checkpoint_that_may_not_be_read_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, number: int
) -> None:
    ready = make_run(tmp_path, steps=8)
    run = ready.run
    list(train(run, ready.config, stop_at=3))
    before = tree(run.folder)
    place = run.checkpoint_path(3) / name
    refusing(monkeypatch, place, number)
    works: list[Callable[[], object]] = [lambda: go_on(run), lambda: list(train(run, ready.config))]
    if name != "state.safetensors":
        works += [partial(load_model, run, which) for which in ("best", "last", "3")]
    for work in works:
        with pytest.raises(UserError) as caught:
            work()
        assert str(caught.value) == (
            f"{place}: cannot be read; {os.strerror(number).lower()}; "
            "see to its permissions and its disk, or move step-0000003 out of the run"
        )
    monkeypatch.undo()
    assert tree(run.folder) == before


def test_a_best_that_may_not_be_read_is_not_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ready = make_run(tmp_path, steps=8, eval_every=2, save_every=2)
    run = ready.run
    list(train(run, ready.config, stop_at=5))
    best = read_pointers(run).best
    assert best == 4
    refusing(monkeypatch, run.checkpoint_path(4) / "model.safetensors", errno.EACCES)
    for work in (lambda: list(train(run, ready.config)), lambda: load_model(run)):
        with pytest.raises(UserError, match=r"step-0000004/model\.safetensors: cannot be read; permission "):
            work()
    monkeypatch.undo()
    assert read_pointers(run).best == 4
    assert texts(go_on(run)) == []


def test_a_run_that_cannot_be_saved_to_is_refused_before_it_is_trained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ready = make_run(tmp_path, steps=8)
    run = ready.run
    list(train(run, ready.config, stop_at=3))
    before = tree(run.folder)
    with monkeypatch.context() as patch:
        patch.setattr(cost, "free_disk_bytes", lambda folder: 10_000)
        # Of four checkpoints two are there.
        with pytest.raises(UserError) as caught:
            go_on(run)
        needed = cost.state_bytes(ready.config, 256) * 2 / 1e6
        assert str(caught.value) == (
            f"{run.folder}: the disk is too full for 2 checkpoints; about {needed:.0f} MB are needed, "
            "0 MB are free; free some space, then resume again"
        )
    plain = Path.open
    for number in (errno.EACCES, errno.ENOSPC, errno.EROFS):

        def refuse(path: Path, mode: str = "r", *args: Any, number: int = number, **rest: Any) -> Any:
            if path.parent == run.checkpoints_folder and mode == "xb":
                raise OSError(number, os.strerror(number), str(path))
            return plain(path, mode, *args, **rest)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", refuse)
            with pytest.raises(UserError) as caught:
                go_on(run, keep=9)
        assert str(caught.value) == (
            f"{run.checkpoints_folder}: cannot be written, so nothing would be saved; "
            f"{os.strerror(number).lower()}; see to its permissions and its disk, then resume again"
        )
    assert tree(run.folder) == before
    go_on(run)
    # A run that is finished needs no space.
    monkeypatch.setattr(cost, "free_disk_bytes", lambda folder: 0)
    assert isinstance(go_on(run)[-1], Finished)


@pytest.mark.parametrize(
    ("number", "mend"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EACCES, "see to its permissions"),
        (errno.EIO, "see to the disk"),
    ],
)
def test_a_save_that_fails_says_what_is_saved_and_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, mend: str
) -> None:
    ready = make_run(tmp_path, steps=5, save_every=2, eval_every=8)
    run, plain = ready.run, Path.mkdir

    def refuse(path: Path, *args: Any, **rest: Any) -> None:
        if path.name.startswith(".step-0000004"):
            raise OSError(number, os.strerror(number), str(path))
        plain(path, *args, **rest)

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError) as caught:
        list(train(run, ready.config))
    assert str(caught.value) == (
        f"{run.checkpoint_path(4)}: cannot be written; {os.strerror(number).lower()}; step 2 is saved; "
        f"{mend}, then `txl train --resume {run.folder}`"
    )
    monkeypatch.undo()
    assert list_checkpoints(run) == [0, 2]
    assert go_on(run)[-1].step == 5  # type: ignore[union-attr]


def test_what_cannot_be_removed_is_told_once_and_stands_in_nobodys_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flags = {"steps": 8, "save_every": 2, "eval_every": 8, "keep": 1}
    straight, _ = train_run(tmp_path, "straight", **flags)
    ready = make_run(tmp_path, "stopped", **flags)
    run = ready.run
    list(train(run, ready.config, stop_at=4))
    older = run.checkpoints_folder / ".step-0000006.deleted.tmp"  # as an older version named it
    old = run.checkpoints_folder / ".step-0000004.old.tmp"
    for folder in (older, old):
        shutil.copytree(run.checkpoint_path(4), folder)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, **_: None)
        events = list(train(run, ready.config))
        assert texts(events) == [
            f"{path}: is left over, and cannot be removed; remove it by hand" for path in (old, older)
        ]
        assert list_checkpoints(run) == [8]
        left = {path for path in run.checkpoints_folder.iterdir() if path.name.startswith(".")}
        assert {older, old} < left
        # Steps that are saved again once more.
        shutil.move(run.checkpoint_path(8), tmp_path / "away")
        shutil.copytree(old, run.checkpoint_path(4))
        list(train(run, ready.config))
        assert list_checkpoints(run) == [8]
    assert_equal_ends(straight, run)
    assert texts(go_on(run)) == [f"{run.folder}: is finished at step 8; a larger --steps continues it"]
    assert [path.name for path in run.checkpoints_folder.iterdir()] == ["step-0000008"]


def test_a_changed_corpus_is_told_and_a_missing_one_is_not(tmp_path: Path) -> None:
    ready = make_run(tmp_path, steps=8)
    list(train(ready.run, ready.config, stop_at=3))
    corpus = tmp_path / "words.txt"
    stopped = tmp_path / "copy"
    shutil.copytree(ready.run.folder, stopped)

    os.utime(corpus, (1, 1))
    assert texts(list(resume(ready.run, {}))) == []
    told = f"{corpus}: has changed since this run encoded it; the run goes on with its own copy, "
    write_corpus(tmp_path, seed=1)
    assert texts(list(resume(ready.run, {}))) == [told + "the new text needs a new run"]
    write_corpus(tmp_path, n_bytes=900)
    assert texts(list(resume(ready.run, {}))) == [told + "the new text needs a new run"]
    corpus.unlink()
    assert texts(go_on(ready.run)) == []
    go_on(Run(stopped))
    assert_equal_ends(ready.run, Run(stopped))


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    ready = make_run(tmp_path)
    list(train(ready.run, ready.config, stop_at=3))
    path = ready.run.checkpoint_path(3)
    unseal(path)
    plain = (path / "state.json").read_text()
    values = json.loads(plain)
    values["counters"]["tokens"] = "many"
    (path / "state.json").write_text(json.dumps(values))
    with pytest.raises(
        UserError, match=r"step-0000003: state.json: `tokens` must be int, got 'many'; damaged$"
    ):
        list(resume(ready.run, {}))
    del values["counters"]["tokens"]
    (path / "state.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"step-0000003: state.json has no counters of this version; "):
        list(resume(ready.run, {}))
    (path / "state.json").write_text(plain)
    with changed_state(ready.run, 3) as tensors:
        tensors["memory.0"] = tensors["memory.0"][:, :, :3].contiguous()
    with pytest.raises(UserError, match=r"the training state is damaged; the memory has another shape"):
        list(train(ready.run, ready.config))


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("model.safetensors", "flipped"),
        ("state.safetensors", "cut"),
        ("state.json", "flipped"),
        ("state.json", "gone"),
    ],
)
def test_a_damaged_newest_checkpoint_is_told_and_the_one_before_used(
    tmp_path: Path, name: str, how: str
) -> None:
    flags = {"steps": 8, "eval_every": 4, "save_every": 2, "dropout": 0.2}
    straight, _ = train_run(tmp_path, "straight", **flags)
    ready = make_run(tmp_path, "damaged", **flags)
    list(train(ready.run, ready.config, stop_at=6))
    damage(ready.run.checkpoint_path(6) / name, how)
    (told,) = texts(go_on(ready.run))
    assert told.startswith(f"{ready.run.checkpoint_path(6) / name}: ")
    assert told.endswith("; step 4 is used instead")
    assert "\n" not in told
    assert_equal_ends(straight, ready.run)
    assert metrics(ready.run, timeless=True) == metrics(straight, timeless=True)
    assert list_checkpoints(ready.run) == list_checkpoints(straight)
    assert all(find_damage(ready.run.checkpoint_path(n), with_state=True) is None for n in (6, 8))


def test_a_damaged_checkpoint_that_is_not_reached_again_does_not_count(tmp_path: Path) -> None:
    ready = make_run(tmp_path, steps=8, save_every=2, eval_every=8, keep=2)
    list(train(ready.run, ready.config, stop_at=6))
    damage(ready.run.checkpoint_path(6) / "model.safetensors", "gone")
    assert list_checkpoints(ready.run) == [4, 6]
    list(train(ready.run, ready.config, stop_at=5))
    # It is neither one of the newest two nor taken for the last.
    assert list_checkpoints(ready.run) == [4, 5, 6]
    assert read_pointers(ready.run).last == 5
    loaded = load_model(ready.run, "last")
    assert loaded.step == 5
    assert loaded.damage is not None
    assert loaded.damage.endswith("; step 5 is used instead")
    assert go_on(ready.run)[-1].step == 8  # type: ignore[union-attr]
    assert list_checkpoints(ready.run) == [6, 8]


@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_a_lost_best_is_told_and_best_is_last_until_there_is_a_better_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    ready = make_run(tmp_path, steps=8, eval_every=2, save_every=2, keep=1)
    run, plain, nlls = ready.run, evaluating.evaluate, iter([2.0, 3.0, 4.0, 1.0])

    def scores(*args: Any, **rest: Any) -> Iterator[Any]:
        for event in plain(*args, **rest):
            if isinstance(event, evaluating.Score):
                yield replace(event, total_nll=next(nlls) * event.tokens)
            else:
                yield event

    monkeypatch.setattr(evaluating, "evaluate", scores)
    list(train(run, ready.config, stop_at=4))
    assert list_checkpoints(run) == [2, 4]
    best = run.checkpoint_path(2)
    shutil.rmtree(best) if how == "gone" else damage(best / "model.safetensors", how)
    events = list(train(run, ready.config, stop_at=6))
    (told,) = texts(events)
    faults = {
        "gone": ": is not there any more",
        "flipped": "/model.safetensors: damaged; its bytes are not those that were written",
    }
    assert told == (
        f"{best}{faults[how]}; it was the best, so best is last until an evaluation is better "
        "than its 2.0000 nats"
    )
    end = events[-1]
    assert isinstance(end, Finished)
    assert (end.best_step, end.is_best_lost) == (2, True)
    # No evaluation since was better, so nothing else counts as best; and the damaged one is not deleted.
    assert list_checkpoints(run) == ([6] if how == "gone" else [2, 6])
    assert read_pointers(run) == Pointers(None, 6, None)
    assert load_model(run).step == 6
    end = go_on(run)[-1]
    assert isinstance(end, Finished)
    assert (end.best_step, end.is_best_lost) == (8, False)
    assert read_pointers(run) == Pointers(8, 8, 1.0)
    assert list_checkpoints(run) == [8]


def test_a_run_whose_checkpoints_are_all_damaged_is_refused(tmp_path: Path) -> None:
    ready = make_run(tmp_path, steps=8)
    list(train(ready.run, ready.config, stop_at=3))
    for step in (0, 3):
        damage(ready.run.checkpoint_path(step) / "state.json", "gone")
    newest = ready.run.checkpoint_path(3) / "state.json"
    for work in (lambda: go_on(ready.run), lambda: list(train(ready.run, ready.config))):
        with pytest.raises(UserError) as caught:
            work()
        assert str(caught.value) == (
            f"{newest}: cannot be read; no such file or directory; "
            f"no other checkpoint of {ready.run.folder} is whole; "
            f"put a whole one back, or begin anew with `txl train -c {ready.run.config_path}`"
        )


@pytest.mark.parametrize(
    "values", [{"metrics_bytes": -1}, {"metrics_bytes": "7"}, {"metrics_bytes": True}, {"environment": []}]
)
def test_a_state_with_lengths_that_cannot_be_is_refused(tmp_path: Path, values: dict[str, object]) -> None:
    ready = make_run(tmp_path, steps=8)
    list(train(ready.run, ready.config, stop_at=3))
    path = ready.run.checkpoint_path(3)
    unseal(path)
    plain = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**plain, **values}))
    with pytest.raises(UserError, match=r"state\.json: `metrics_bytes` or `environment` cannot be; damaged$"):
        go_on(ready.run)


def test_a_last_step_whose_end_was_killed_is_pointed_at_on_resume(tmp_path: Path) -> None:
    straight, _ = train_run(tmp_path, "straight", keep=1)
    run, _ = train_run(tmp_path, "killed", keep=1)
    assert list_checkpoints(run) == [12]
    shutil.copytree(run.checkpoint_path(12), run.checkpoint_path(6))  # what was to be deleted
    run.pointers_path.write_text('{"best": 6, "best_nll": 9.0, "last": 6}')
    assert of_kind(go_on(run), Notice)[0].text.endswith(
        "is finished at step 12; a larger --steps continues it"
    )
    assert read_pointers(run) == read_pointers(straight)
    assert list_checkpoints(run) == [12]
    at = run.pointers_path.stat().st_mtime_ns
    go_on(run)
    assert (
        run.pointers_path.stat().st_mtime_ns == at
    )  # nothing was saved, so it is not the run that saved last


def test_a_length_shorter_than_the_checkpoint_is_refused_in_training(tmp_path: Path) -> None:
    run, _ = train_run(tmp_path)
    config = load(run.config_path)
    with pytest.raises(
        UserError, match=r"is past the length of the run; got step 12 of 5; resume with --steps 12"
    ):
        list(train(run, replace(config, train=replace(config.train, steps=5))))


def test_config_yaml_repeats_the_run(tmp_path: Path) -> None:
    from txlcli.config import read_settings

    run, _ = train_run(tmp_path, dropout=0.1)
    ready = list(begin(read_settings(run.config_path), out=tmp_path / "again"))[-1]
    assert isinstance(ready, Ready)
    assert ready.config == load(run.config_path)
    events = list(train(ready.run, ready.config))
    assert of_kind(events, Saved)
    assert_equal_ends(run, ready.run)
    assert metrics(run, timeless=True) == metrics(ready.run, timeless=True)
