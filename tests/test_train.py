"""Training: the rate, the optimizers, the step, what happens between steps, and how a run begins."""

import errno
import json
import math
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from tests.tolerance import assert_same
from txlcli import UserError, plan
from txlcli.api import load
from txlcli.attention import BACKENDS, Backend, Demands, relative_attention
from txlcli.attention.choice import BY_DEVICE
from txlcli.config import FLAG, Config, ModelConfig, OptimConfig, Sourced, from_flags
from txlcli.data import Batches, open_split
from txlcli.model import TransformerXL
from txlcli.run import Run, list_checkpoints, open_run, read_pointers
from txlcli.tokenizer import load_tokenizer
from txlcli.train import (
    Budget,
    Evaluated,
    Event,
    Finished,
    FirstLine,
    NonFinite,
    Notice,
    Planned,
    Progress,
    Ready,
    Sampled,
    Saved,
    Skipped,
    Stepped,
    begin,
    cost,
    evaluating,
    learning_rate,
    loop,
    train,
)
from txlcli.train.optim import build_optimizers, is_hidden_matrix, set_learning_rate
from txlcli.train.request import choose_attention
from txlcli.train.state import TrainState, optimize

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "and", "then", "some", "more", "ox")

TINY = {
    "tokenizer": "byte",
    "n_layer": 2,
    "d_model": 16,
    "n_head": 2,
    "tgt_len": 8,
    "mem_len": 8,
    "batch_size": 4,
    "optimizer": "adamw",
    "warmup": 2,
    "steps": 12,
    "eval_every": 6,
    "save_every": 6,
    "log_every": 1,
    "eval_tokens": 20,
    "precision": "fp32",
}


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluating, "SAMPLE_TOKENS", 3)


def write_corpus(folder: Path, n_bytes: int = 702, seed: int = 0) -> Path:
    path = folder / "words.txt"
    chooser = random.Random(seed)
    text = ""
    while len(text) < n_bytes:
        text += " ".join(chooser.choices(WORDS, k=5)) + ".\n"
    path.write_text(text[:n_bytes])
    return path


def make_run(folder: Path, name: str = "run", **flags: object) -> Ready:
    """Prepare a run of the tiny settings, changed by flags."""
    corpus = folder / "words.txt"
    if not corpus.exists():
        write_corpus(folder)
    events = list(begin(from_flags({**TINY, "corpus": (str(corpus),), **flags}), out=folder / name))
    assert isinstance(events[-1], Ready)
    return events[-1]


def train_run(folder: Path, name: str = "run", **flags: object) -> tuple[Run, list[Event]]:
    ready = make_run(folder, name, **flags)
    return ready.run, list(train(ready.run, ready.config))


def of_kind(events: list[Event], *kinds: type) -> list[Any]:
    return [event for event in events if isinstance(event, kinds)]


def metrics(run: Run, *, timeless: bool = False) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    times = ("tokens_per_s", "elapsed_s") if timeless else ()
    return [{key: value for key, value in line.items() if key not in times} for line in lines]


def losses(run: Run) -> list[float]:
    return [line["loss"] for line in metrics(run) if line["event"] == "step"]


# the rate


def test_the_rate_rises_to_its_peak_and_falls_to_its_end() -> None:
    optim = OptimConfig(lr=1.0, lr_end=0.1, warmup=4, schedule="linear")
    rates = [learning_rate(step, optim, 10) for step in range(1, 11)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1], rel=1e-15)


def test_the_cosine_is_halfway_down_at_half_of_the_rest() -> None:
    optim = OptimConfig(lr=1.0, lr_end=0.2, warmup=10, schedule="cosine")
    assert learning_rate(15, optim, 20) == pytest.approx(0.6, rel=1e-15)
    assert learning_rate(20, optim, 20) == 0.2


def test_inv_sqrt_and_constant() -> None:
    optim = OptimConfig(lr=1.0, warmup=4, schedule="inv_sqrt", lr_end=0.3)
    assert [learning_rate(step, optim, 100) for step in (4, 16, 100)] == [1.0, 0.5, 0.3]
    optim = OptimConfig(lr=0.5, warmup=0, schedule="constant")
    assert {learning_rate(step, optim, 9) for step in range(1, 10)} == {0.5}


@given(
    schedule=st.sampled_from(["cosine", "linear", "inv_sqrt", "constant"]),
    warmup=st.integers(0, 50),
    steps=st.integers(1, 60),
)
def test_the_rate_stays_within_its_bounds(schedule: Any, warmup: int, steps: int) -> None:
    optim = OptimConfig(lr=0.5, lr_end=0.01, warmup=warmup, schedule=schedule)
    rates = [learning_rate(step, optim, steps) for step in range(1, steps + 1)]
    assert rates[0] == (0.5 / warmup if warmup else 0.5)
    assert all(0 < rate <= 0.5 for rate in rates)
    rise, fall = rates[:warmup], rates[max(warmup, 1) - 1 :]
    assert rise == sorted(rise)
    assert fall == sorted(fall, reverse=True)
    if schedule in ("cosine", "linear") and steps > max(warmup, 1):
        assert rates[-1] == pytest.approx(0.01, rel=1e-12)


# the optimizers


def tiny_model(**values: Any) -> TransformerXL:
    return TransformerXL(ModelConfig(n_layer=2, d_model=16, n_head=2, tgt_len=4, mem_len=4, **values), 20)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_takes_the_hidden_matrices_at_ten_times_the_rate() -> None:
    model = tiny_model(tied=False)
    optimizers = build_optimizers(model, OptimConfig(optimizer="muon", lr=0.01, weight_decay=0.1))
    names = {id(p): name for name, p in model.named_parameters()}
    taken = {
        kind: sorted(names[id(p)] for group in optimizer.param_groups for p in group["params"])
        for kind, optimizer in optimizers.items()
    }
    assert taken["muon"] == sorted(
        f"layers.{i}.{part}.weight"
        for i in range(2)
        for part in (
            "attention.q",
            "attention.k",
            "attention.v",
            "attention.o",
            "feedforward.inner",
            "feedforward.outer",
        )
    )
    assert sorted(taken["muon"] + taken["adamw"]) == sorted(names.values())
    set_learning_rate(optimizers.values(), 0.003)
    assert {group["lr"] for group in optimizers["muon"].param_groups} == {0.03}
    assert {group["lr"] for group in optimizers["adamw"].param_groups} == {0.003}


@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd"])
def test_weight_decay_pulls_on_matrices_only(kind: Any) -> None:
    model = tiny_model()
    (optimizer,) = build_optimizers(model, OptimConfig(optimizer=kind, weight_decay=0.1)).values()
    names = {id(p): name for name, p in model.named_parameters()}
    decayed = {
        names[id(p)]
        for group in optimizer.param_groups
        for p in group["params"]
        if group["weight_decay"] == 0.1
    }
    matrices = {name for name, p in model.named_parameters() if name.endswith(".weight") and p.ndim == 2}
    assert decayed == matrices
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(names)


def test_muon_is_refused_by_name_where_torch_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(
        UserError, match=r"^--optimizer: torch .* has no Muon; got `muon`; use adamw, or torch 2.9"
    ):
        make_run(tmp_path, optimizer="muon")
    assert not (tmp_path / "run").exists()


# the step


@pytest.fixture
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def start(ready: Ready, **optim: Any) -> TrainState:
    config = replace(ready.config, optim=replace(ready.config.optim, **optim))
    batches = Batches(open_split(ready.run.folder, "train"), config.optim.batch_size, config.model.tgt_len)
    return TrainState.start(config, batches, 256, device=torch.device("cpu"), precision="fp32")


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_parts_with_their_own_memory_give_the_result_of_one(tmp_path: Path, optimizer: str) -> None:
    ready = make_run(tmp_path)
    results, weights = [], []
    for n_parts in (1, 2, 4):
        state = start(ready, accumulate=n_parts, optimizer=optimizer)
        n_steps = state.batches.steps_per_epoch + 3  # over the short last segment and a new epoch's beginning
        results.append([optimize(state, rate=0.01, clip=0.25) for _ in range(n_steps)])
        weights.append(list(state.model.parameters()))
        assert len(state.memory) == n_parts
        state.batches.store.close()
    for n_parts in (1, 2):
        for one, other in zip(results[0], results[n_parts], strict=True):
            assert_same(torch.tensor([one.loss, one.grad_norm]), torch.tensor([other.loss, other.grad_norm]))
        for a, b in zip(weights[0], weights[n_parts], strict=True):
            assert_same(a.detach(), b.detach())


@pytest.mark.usefixtures("in_float64")
def test_the_loss_is_the_mean_over_the_tokens_present(tmp_path: Path) -> None:
    ready = make_run(tmp_path)
    state = start(ready)
    last = state.batches.steps_per_epoch - 1
    segment = state.batches.segment(last)
    assert segment.weights is not None
    assert segment.n_targets < segment.targets.numel()
    with torch.no_grad():
        nll, _ = state.model(segment.tokens, None, segment.targets)
    expected = (nll * segment.weights).sum() / segment.weights.sum()
    state.counters.step = last
    assert_same(torch.tensor(optimize(state, rate=0.0, clip=0.0).loss), expected)
    state.batches.store.close()


def test_the_gradient_is_clipped_to_its_norm(tmp_path: Path) -> None:
    ready = make_run(tmp_path)
    before, after = start(ready, optimizer="sgd"), start(ready, optimizer="sgd")
    result = optimize(before, rate=1.0, clip=0.0)
    assert optimize(after, rate=1.0, clip=result.grad_norm / 2).grad_norm == result.grad_norm
    fresh = start(ready, optimizer="sgd")
    moves = [
        torch.cat(
            [(a - b).flatten() for a, b in zip(fresh.model.parameters(), s.model.parameters(), strict=True)]
        )
        for s in (before, after)
    ]
    # Half the gradient up to fp32 rounding of weights near 1 and moves near 0.01.
    torch.testing.assert_close(moves[1], moves[0] / 2, rtol=1e-3, atol=1e-6)
    for state in (before, after, fresh):
        state.batches.store.close()


def test_memory_is_never_longer_than_asked_and_empty_at_an_epochs_start(tmp_path: Path) -> None:
    ready = make_run(tmp_path, mem_len=11)
    state = start(ready)
    per_epoch = state.batches.steps_per_epoch
    seen = 0
    for step in range(per_epoch + 2):
        if step == per_epoch:
            seen = 0
        seen += state.batches.segment(step).tokens.shape[1]
        optimize(state, rate=0.0, clip=0.0)
        (memory,) = state.memory
        assert memory is not None
        assert {rows.shape[1] for rows in memory.hidden} == {min(11, seen)}
    state.batches.store.close()


# numbers that go wrong


def poison(monkeypatch: pytest.MonkeyPatch, change: Callable[[int, Tensor], Tensor]) -> None:
    """Change the losses of the n-th training step, counted from 1."""
    n_calls = 0
    plain = TransformerXL.forward

    def forward(self: TransformerXL, tokens: Tensor, memory: Any, targets: Tensor) -> Any:
        nonlocal n_calls
        n_calls += 1
        nll, new = plain(self, tokens, memory, targets)
        return change(n_calls, nll), new

    monkeypatch.setattr(TransformerXL, "forward", forward)


def test_a_step_that_is_not_finite_updates_nothing_and_empties_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    poison(monkeypatch, lambda n, nll: nll * (math.nan if n == 3 else 1))
    state = start(make_run(tmp_path))
    for _ in range(2):
        assert optimize(state, rate=0.01, clip=1.0).fault is None
    before = [p.detach().clone() for p in state.model.parameters()]
    tensors = {name: t.clone() for name, t in state.tensors().items() if name.startswith("optimizer")}
    result = optimize(state, rate=0.01, clip=1.0)
    assert result.fault == "the loss is not finite"
    assert state.memory == [None]
    assert state.counters.step == 3
    assert all(torch.equal(a, b) for a, b in zip(before, state.model.parameters(), strict=True))
    assert all(torch.equal(t, state.tensors()[name]) for name, t in tensors.items())
    assert optimize(state, rate=0.01, clip=1.0).fault is None
    state.batches.store.close()


def test_a_gradient_that_is_not_finite_is_a_fault_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The square root's slope at 0 is infinite, its value is not.
    poison(monkeypatch, lambda n, nll: nll + (nll - nll).sqrt())
    state = start(make_run(tmp_path))
    result = optimize(state, rate=0.01, clip=1.0)
    assert result.fault == "the gradient norm is not finite"
    assert math.isfinite(result.loss)
    state.batches.store.close()


def test_skipped_steps_are_told_and_written_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ready = make_run(tmp_path)
    poison(monkeypatch, lambda n, nll: nll * (math.inf if n in (3, 4, 5, 6, 8) else 1))
    events = list(train(ready.run, ready.config))
    assert [event.step for event in of_kind(events, Skipped)] == [3, 4, 5, 6, 8]
    assert isinstance(events[-1], Finished)
    skips = [line for line in metrics(ready.run) if line["event"] == "skip"]
    assert skips == [
        {"event": "skip", "step": n, "reason": "the loss is not finite"} for n in (3, 4, 5, 6, 8)
    ]
    lines = [line for line in metrics(ready.run) if line["event"] == "step"]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert lines[2]["loss"] is None
    assert lines[6]["loss"] is not None


def test_five_in_a_row_end_the_run_and_name_the_last_good_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ready = make_run(tmp_path, steps=30, save_every=2)
    poison(monkeypatch, lambda n, nll: nll * (math.nan if n >= 5 else 1))
    with pytest.raises(NonFinite) as error:
        list(train(ready.run, ready.config))
    last = ready.run.checkpoint_path(8)
    assert str(error.value) == (
        "step 9: the loss is not finite, 5 steps in a row; rate 0.00341, loss nan, gradient norm nan; "
        f"last good checkpoint: {last}; a lower --lr or a longer --warmup may help"
    )
    assert [line["event"] for line in metrics(ready.run)].count("skip") == 5
    for step in list_checkpoints(ready.run):
        tensors = load_file(ready.run.checkpoint_path(step) / "model.safetensors")
        assert all(torch.isfinite(t).all() for t in tensors.values())


def test_weights_that_are_not_finite_are_never_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ready = make_run(tmp_path)
    plain = loop.optimize

    def ruin(state: TrainState, **rest: Any) -> Any:
        result = plain(state, **rest)
        if state.counters.step == 6:
            with torch.no_grad():
                state.model.embed.weight[0, 0] = math.inf
        return result

    monkeypatch.setattr(loop, "optimize", ruin)
    with pytest.raises(NonFinite, match=r"^step 6: the weights are not finite; rate .*step-0000000; "):
        list(train(ready.run, ready.config))
    assert list_checkpoints(ready.run) == [0]
    assert [line["step"] for line in metrics(ready.run) if line["event"] == "save"] == [0]


def test_a_loss_far_above_its_best_is_told_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ready = make_run(tmp_path, steps=60, eval_every=60, save_every=60)
    poison(monkeypatch, lambda n, nll: nll + (5 if n > 30 else 0))
    notices = [event.text for event in of_kind(list(train(ready.run, ready.config)), Notice)]
    assert len(notices) == 1
    assert "the loss has risen far above its best" in notices[0]


def test_a_run_that_goes_well_raises_no_alarm(tmp_path: Path) -> None:
    _, events = train_run(tmp_path, steps=40, eval_every=40, save_every=40, optimizer="adamw", lr=0.02)
    assert of_kind(events, Notice, Skipped) == []


def test_an_fp16_overflow_keeps_the_memory_and_lowers_the_scale(tmp_path: Path) -> None:
    state = start(make_run(tmp_path))
    state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    limit = 2.0**10
    state.model.embed.weight.register_hook(lambda grad: grad.masked_fill(grad.abs() > limit, math.inf))
    before = state.model.embed.weight.detach().clone()
    result = optimize(state, rate=0.01, clip=1.0)
    assert result.is_overflow
    assert math.isfinite(result.loss)
    assert state.memory[0] is not None
    assert torch.equal(state.model.embed.weight, before)
    assert state.scaler.get_scale() == 2.0**15
    assert state.values()["scaler"] == state.scaler.state_dict()
    limit = math.inf
    assert optimize(state, rate=0.01, clip=1.0).fault is None
    state.batches.store.close()


def scaled(monkeypatch: pytest.MonkeyPatch, is_over: Callable[[int], bool], scale: float = 2.0**16) -> None:
    """Train on the CPU with fp16's scaler; at some steps the scaled gradient does not fit."""
    plain = TrainState.start

    def begin(*args: Any, **rest: Any) -> TrainState:
        state = plain(*args, **rest)
        state.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        state.model.embed.weight.register_hook(
            lambda grad: grad * (math.inf if is_over(state.counters.step) else 1)
        )
        return state

    monkeypatch.setattr(TrainState, "start", begin)


def test_overflows_are_told_once_counted_apart_and_no_fault_in_a_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scaled(monkeypatch, lambda step: 2 <= step <= 8)
    ready = make_run(tmp_path)
    events = list(train(ready.run, ready.config))
    assert of_kind(events, Skipped) == [Skipped(2, "fp16 overflow, scale now 32768")]
    assert isinstance(events[-1], Finished)
    values = json.loads((ready.run.checkpoint_path(12) / "state.json").read_text())
    assert values["scaler"]["scale"] == 2.0**9
    assert [values["counters"][name] for name in ("n_overflows", "n_skipped", "n_skipped_in_row")] == [
        7,
        0,
        0,
    ]
    assert [line["step"] for line in metrics(ready.run) if line["event"] == "skip"] == list(range(2, 9))


def test_the_scale_is_part_of_what_is_resumed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scaled(monkeypatch, lambda step: step in (2, 3, 9))
    straight, _ = train_run(tmp_path, "straight")
    ready = make_run(tmp_path, "stopped")
    list(train(ready.run, ready.config, stop_at=4))
    list(train(ready.run, ready.config))
    states = [
        json.loads((run.checkpoint_path(12) / "state.json").read_text()) for run in (straight, ready.run)
    ]
    assert states[0]["scaler"] == states[1]["scaler"]
    assert states[0]["scaler"]["scale"] == 2.0**13
    for name in ("model.safetensors", "state.safetensors"):
        assert states[0]["files"][name] == states[1]["files"][name]


def test_a_scale_below_its_floor_ends_the_run_with_advice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scaled(monkeypatch, lambda step: step > 7, scale=4.0)
    ready = make_run(tmp_path)
    with pytest.raises(NonFinite) as error:
        list(train(ready.run, ready.config))
    last = ready.run.checkpoint_path(6)
    assert str(error.value).startswith("step 10: fp16 cannot hold the gradients; rate ")
    assert str(error.value).endswith(
        f"gradient norm inf; last good checkpoint: {last}; --precision bf16 or a lower --lr may help"
    ), str(error.value)
    assert list_checkpoints(ready.run)[-1] == 6


# between steps


def test_evaluations_do_not_disturb_training(tmp_path: Path) -> None:
    often, _ = train_run(tmp_path, "often", eval_every=2, save_every=5, dropout=0.2)
    never, _ = train_run(tmp_path, "never", eval_every=1000, save_every=1000, dropout=0.2)
    assert losses(often) == losses(never)
    for name in ("model.safetensors", "state.safetensors"):
        assert (often.checkpoint_path(12) / name).read_bytes() == (
            never.checkpoint_path(12) / name
        ).read_bytes()


def test_what_is_written_and_yielded_and_in_what_order(tmp_path: Path) -> None:
    run, events = train_run(tmp_path, steps=7, eval_every=3, save_every=4, log_every=2, keep=9)
    lines = [(line["event"], line["step"]) for line in metrics(run)]
    best = {event.step for event in of_kind(events, Evaluated) if event.is_best}
    assert 3 in best
    expected = [
        ("save", 0),
        ("step", 2),
        ("eval", 3),
        ("save", 3),
        ("step", 4),
        ("save", 4),
        ("step", 6),
        ("eval", 6),
    ]
    expected += [("save", 6)] * (6 in best) + [("step", 7), ("eval", 7), ("save", 7)]
    assert lines == expected
    assert [list(line) for line in metrics(run)[1:4]] == [
        ["event", "step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "elapsed_s"],
        ["event", "step", "mem_len", "nll", "perplexity", "bits_per_byte", "tokens"],
        ["event", "step", "path"],
    ]
    assert metrics(run)[3]["path"] == "checkpoints/step-0000003"
    told = [(type(event), event.step) for event in events if isinstance(event, Evaluated | Saved | Sampled)]
    assert told.index((Evaluated, 3)) < told.index((Sampled, 3)) < told.index((Saved, 3))
    assert [event.step for event in of_kind(events, Stepped) if event.is_logged] == [2, 4, 6, 7]


def test_equal_runs_write_equal_bytes(tmp_path: Path) -> None:
    one, _ = train_run(tmp_path, "one", dropout=0.1)
    other, _ = train_run(tmp_path, "other", dropout=0.1)
    different, _ = train_run(tmp_path, "different", dropout=0.1, seed=1)
    for step in list_checkpoints(one):
        for name in ("model.safetensors", "state.safetensors"):
            data = (one.checkpoint_path(step) / name).read_bytes()
            assert data == (other.checkpoint_path(step) / name).read_bytes()
            assert data != (different.checkpoint_path(step) / name).read_bytes()
    assert metrics(one, timeless=True) == metrics(other, timeless=True)


def test_the_newest_and_the_best_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ready = make_run(tmp_path, steps=20, eval_every=2, save_every=2, keep=2)
    plain, n_evals = evaluating.evaluate, 0

    def scores(*args: Any, **rest: Any) -> Iterator[Any]:
        nonlocal n_evals
        n_evals += 1
        for event in plain(*args, **rest):
            nll = 1.0 if n_evals == 3 else 2.0 + n_evals
            yield (
                replace(event, total_nll=nll * event.tokens) if isinstance(event, evaluating.Score) else event
            )

    monkeypatch.setattr(evaluating, "evaluate", scores)
    events = list(train(ready.run, ready.config))
    assert list_checkpoints(ready.run) == [6, 18, 20]
    assert read_pointers(ready.run).best == 6
    assert read_pointers(ready.run).best_nll == 1.0
    end = events[-1]
    assert isinstance(end, Finished)
    assert (end.best_step, end.best_nll, end.reason) == (6, 1.0, "length")
    assert end.best_score is not None
    assert end.best_score.nll == 1.0


def test_patience_ends_a_run_that_stops_improving(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ready = make_run(tmp_path, steps=40, eval_every=2, save_every=40, patience=3)
    plain, nll = evaluating.evaluate, iter([3.0, 2.0, 2.5, 2.0, 2.1, 1.0])

    def scores(*args: Any, **rest: Any) -> Iterator[Any]:
        for event in plain(*args, **rest):
            is_score = isinstance(event, evaluating.Score)
            yield replace(event, total_nll=next(nll) * event.tokens) if is_score else event

    monkeypatch.setattr(evaluating, "evaluate", scores)
    end = list(train(ready.run, ready.config))[-1]
    assert isinstance(end, Finished)
    assert (end.reason, end.step, end.best_step) == ("patience", 10, 4)
    assert list_checkpoints(ready.run) == [2, 4, 10][1:]


def test_the_last_evaluation_scores_all_if_that_is_a_tenth_of_the_work(tmp_path: Path) -> None:
    # 35 held-out tokens; a step is 32.
    _, events = train_run(tmp_path, "long", steps=12)
    assert [(event.step, event.score.tokens, event.is_whole) for event in of_kind(events, Evaluated)] == [
        (6, 19, False),
        (12, 19, False),
        (12, 34, True),
    ]
    _, events = train_run(tmp_path, "short", steps=6)
    assert [(event.step, event.is_whole) for event in of_kind(events, Evaluated)] == [(6, False)]


def test_without_held_out_text_best_is_last(tmp_path: Path) -> None:
    run, events = train_run(tmp_path, valid_fraction=0)
    assert of_kind(events, Evaluated) == []
    assert read_pointers(run).best is None
    assert read_pointers(run).last == 12
    assert list_checkpoints(run) == [6, 12]


def test_samples_come_from_their_own_seed(tmp_path: Path) -> None:
    _, one = train_run(tmp_path, "one", log_every=12)
    _, other = train_run(tmp_path, "other", log_every=12)
    texts = [[event.text for event in of_kind(events, Sampled)] for events in (one, other)]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 2
    assert all(texts[0])


def test_stopping_saves_and_says_why(tmp_path: Path) -> None:
    ready = make_run(tmp_path)
    n_asked = 0

    def soon() -> bool:
        nonlocal n_asked
        n_asked += 1
        return n_asked > 3

    events = list(train(ready.run, ready.config, should_stop=soon))
    end = events[-1]
    assert isinstance(end, Finished)
    assert end.reason == "interrupted"
    assert 0 < end.step < 6
    assert list_checkpoints(ready.run) == [0, end.step]
    assert isinstance(events[-2], Saved)


def test_an_overrun_is_said_once(tmp_path: Path) -> None:
    ready = make_run(tmp_path)
    late = Budget(time.monotonic() - 100, 60)
    notices = [event.text for event in of_kind(list(train(ready.run, ready.config, budget=late)), Notice)]
    assert len(notices) == 1
    assert notices[0].startswith("more than 10 % over the 1 minute asked for, at step 1 of 12;")


def test_the_machine_is_left_as_it_was(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    _, events = train_run(tmp_path, threads=threads + 1, deterministic=True, steps=1)
    assert isinstance(events[-1], Finished)
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()


def _burst_a_gpu(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def _burst_this_cpu(*_: Any) -> None:
    torch.zeros(1 << 50)  # more than any has, in the words of the allocator


@pytest.mark.parametrize("burst", [_burst_a_gpu, _burst_this_cpu])
def test_memory_that_runs_out_names_the_flags_to_lower(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, burst: Callable[..., None]
) -> None:
    ready = make_run(tmp_path)
    monkeypatch.setattr(TransformerXL, "nll", burst)
    with pytest.raises(UserError) as error:
        list(train(ready.run, ready.config))
    assert str(error.value) == (
        "cpu: out of memory at batch_size 4, tgt_len 8, mem_len 8; lower --batch-size, --tgt-len, --mem-len "
        f"or --d-model, or raise --accumulate; last checkpoint: {ready.run.checkpoint_path(0)}"
    )


def test_memory_that_runs_out_before_the_first_step_is_told_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ready = make_run(tmp_path)
    monkeypatch.setattr(TransformerXL, "initialize", _burst_this_cpu)
    with pytest.raises(UserError, match=r"^cpu: out of memory at batch_size 4, .* or raise --accumulate$"):
        list(train(ready.run, ready.config))
    with pytest.raises(UserError, match=r"^cpu: out of memory at batch_size "):
        make_run(tmp_path, "timed", steps=None, minutes=1.0)


def test_a_disk_that_fills_up_ends_the_run_with_its_checkpoints_intact(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ready = make_run(tmp_path)
    plain = loop.append_metrics

    def fill(run: Run, values: Any) -> None:
        if values["step"] == 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(run, values)

    monkeypatch.setattr(loop, "append_metrics", fill)
    with pytest.raises(UserError) as error:
        list(train(ready.run, ready.config))
    folder = ready.run.folder
    assert str(error.value) == (
        f"{folder}: cannot be written; no space left on device; step 6 is saved; free some space, "
        f"then `txl train --resume {folder}`"
    )
    monkeypatch.undo()
    assert isinstance(list(train(ready.run, ready.config))[-1], Finished)


# the beginning


def test_the_plan_says_what_will_be_trained(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    events = list(begin(from_flags({**TINY, "corpus": (str(corpus),)}), out=tmp_path / "run"))
    (planned,) = of_kind(events, Planned)
    summary = planned.summary
    assert (summary.n_bytes, summary.n_train_tokens, summary.n_valid_tokens) == (702, 667, 35)
    assert (summary.tokenizer, summary.n_vocab, summary.steps) == ("byte", 256, 12)
    assert summary.n_embedding + summary.n_rest == sum(
        p.numel() for p in TransformerXL(summary.config.model, 256).parameters()
    )
    assert summary.last_eval_tokens == 35
    assert summary.expected_s is None
    assert summary.memory_bytes > 100e6
    ready = events[-1]
    assert isinstance(ready, Ready)
    assert ready.origins["n_layer"] == "flag"
    assert ready.origins["lr"].startswith("plan: ")
    assert ready.origins["dropout"] == "default"
    assert open_run(tmp_path / "run") == ready.run


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"corpus": ("nowhere.txt",)}, "nowhere.txt: cannot be read; no such file or directory"),
        ({"device": "cuda:77"}, "--device: "),
        ({"precision": "fp16"}, "--precision: a CPU has no fp16"),
        ({"init": "nowhere"}, "nowhere: no such run folder"),
        ({"n_head": 3}, "n_head 3 does not divide d_model 16"),
        ({"batch_size": 4096, "tgt_len": 100_000, "accumulate": 1}, None),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_nothing(
    tmp_path: Path, flags: dict[str, object], text: str | None
) -> None:
    corpus = write_corpus(tmp_path)
    settings = from_flags({**TINY, "corpus": (str(corpus),), **flags})
    if text is None:
        return
    with pytest.raises(UserError) as error:
        list(begin(settings, out=tmp_path / "run"))
    assert text in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["words.txt"]


def test_what_does_not_fit_into_memory_is_refused_with_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    corpus = write_corpus(tmp_path, 5000)
    flags = {**TINY, "corpus": (str(corpus),), "batch_size": 500, "tgt_len": 2048}
    monkeypatch.setattr(cost, "free_bytes", lambda device: 2_000_000_000)
    with pytest.raises(UserError) as error:
        list(begin(from_flags(flags), out=tmp_path / "run"))
    message = str(error.value)
    assert message.startswith("cpu: too little memory; batch_size 500, tgt_len 2048, mem_len 8 take about ")
    assert message.endswith(
        " GB, 2.0 GB are free; lower --batch-size, --tgt-len, --mem-len or --d-model, or raise --accumulate"
    )
    assert not (tmp_path / "run").exists()


def test_a_disk_that_is_too_full_for_checkpoints_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cost, "free_disk_bytes", lambda folder: 100_000)
    with pytest.raises(
        UserError, match=r"the disk is too full for 4 checkpoints; about .* MB are needed, 0 MB are free; "
    ):
        make_run(tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "flags", [{"tokenizer": "char"}, {"tokenizer": "word"}, {"tokenizer": "char", "minutes": 0.001}]
)
def test_a_beginning_interrupted_anywhere_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: dict[str, Any]
) -> None:
    monkeypatch.setattr(cost, "MEASURED_S", 0)
    corpus = write_corpus(tmp_path)
    settings = {**TINY, "corpus": (str(corpus),), **flags}
    if "minutes" in flags:
        del settings["steps"]
    n_allowed = 0
    while True:
        asked = iter([False] * n_allowed)
        events = list(
            begin(
                from_flags(settings),
                out=tmp_path / "run",
                should_stop=lambda asked=asked: next(asked, True),  # type: ignore[misc]
            )
        )
        if of_kind(events, Ready):
            break
        assert sorted(path.name for path in tmp_path.iterdir()) == ["words.txt"]
        n_allowed += 1
    assert n_allowed >= (8 if "minutes" in flags else 4)


def test_a_beginning_that_is_not_awaited_leaves_nothing(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    events = begin(from_flags({**TINY, "corpus": (str(corpus),)}), out=tmp_path / "run")
    next(events)
    assert (tmp_path / "run").exists()
    events.close()  # type: ignore[attr-defined]
    assert not (tmp_path / "run").exists()


def test_a_dry_run_shows_the_plan_and_the_first_line_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("\n\nżółw and ox\nmore\n" * 40)
    monkeypatch.chdir(tmp_path)
    flags = {**TINY, "corpus": ("text.txt",), "tokenizer": "char"}
    events = list(begin(from_flags(flags), dry_run=True))
    assert isinstance(events[-2], Planned)
    line = events[-1]
    assert isinstance(line, FirstLine)
    assert line.text == "żółw and ox"
    assert line.pieces == tuple("żółw and ox")
    assert len(line.ids) == 11
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_minutes_become_steps_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured = plan.Measured(step_s=0.01, eval_s=0.1, eval_token_s=1e-5, save_s=0.05, spent_s=2.0)
    monkeypatch.setattr("txlcli.train.preparing.measure", lambda *args, **rest: measured)
    ready = make_run(tmp_path, steps=None, minutes=0.5, eval_every=None, save_every=None, eval_tokens=None)
    assert ready.budget is not None
    assert ready.budget.limit_s == 30
    steps = ready.config.train.steps
    assert steps is not None
    # 28 s are left; 20 evaluations with their saves take 3 s of them.
    assert 2300 < steps < 2600
    assert ready.config.train.minutes is None
    assert f"steps: {steps}  # plan: 0.5 minutes at 0.01 s a step" in ready.run.config_path.read_text()


def test_measuring_changes_nothing(tmp_path: Path) -> None:
    ready = make_run(tmp_path, optimizer="adamw")
    random_state = torch.get_rng_state()
    before = {path: path.read_bytes() for path in ready.run.folder.rglob("*") if path.is_file()}
    from txlcli.tokenizer import load_tokenizer

    started = time.monotonic()
    measured = cost.measure(
        ready.run,
        ready.config,
        load_tokenizer(ready.run.folder),
        length_s=2.0,
        started=started,
        should_stop=lambda: False,
    )
    assert 0 < measured.step_s < measured.spent_s
    assert min(measured.eval_s, measured.eval_token_s, measured.save_s) > 0
    assert torch.equal(torch.get_rng_state(), random_state)
    assert {path: path.read_bytes() for path in ready.run.folder.rglob("*") if path.is_file()} == before


def test_a_run_can_start_from_the_weights_of_another(tmp_path: Path) -> None:
    first, _ = train_run(tmp_path, "first", dropout=0.1)
    (tmp_path / "words.txt").unlink()
    write_corpus(tmp_path, seed=1)
    free = dict.fromkeys(("tokenizer", "n_layer", "d_model", "n_head"))
    second, _ = train_run(tmp_path, "second", **free, init=str(first.folder), mem_len=5, keep=9)
    best = read_pointers(first).best
    assert best is not None
    ours = load_file(second.checkpoint_path(0) / "model.safetensors")
    theirs = load_file(first.checkpoint_path(best) / "model.safetensors")
    assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())
    assert (second.folder / "tokenizer.json").read_bytes() == (first.folder / "tokenizer.json").read_bytes()
    config = open_config(second)
    assert (config.model.mem_len, config.model.n_layer, config.model.dropout) == (5, 2, 0.0)
    with pytest.raises(
        UserError, match=r"^--d-model: comes with --init; got 32, .*first has 16; leave it out"
    ):
        make_run(tmp_path, "third", init=str(first.folder), d_model=32)
    assert not (tmp_path / "third").exists()


def open_config(run: Run) -> Config:
    from txlcli.config import load

    return load(run.config_path)


def test_a_short_text_gets_fewer_streams_with_a_notice(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_bytes(b"hello\n")
    events = list(
        begin(
            from_flags({**TINY, "corpus": (str(tmp_path / "words.txt"),), "batch_size": 64}),
            out=tmp_path / "r",
        )
    )
    ready = events[-1]
    assert isinstance(ready, Ready)
    texts = [event.text for event in of_kind(events, Notice)]
    assert any(text.startswith("batch_size: 64 asked for, ") for text in texts)
    assert (
        "tgt_len: 8 asked for, 1 taken: 6 tokens in 5 streams; a smaller --batch-size gives longer segments"
        in texts
    )
    end = list(train(ready.run, replace(ready.config, train=replace(ready.config.train, steps=5))))[-1]
    assert isinstance(end, Finished)
    assert end.step == 5
    assert np.isfinite(losses(ready.run)).all()


@pytest.mark.parametrize(("kind", "mebibytes"), [("sentencepiece", 8), ("word", 32)])
def test_a_vocabulary_learned_from_a_part_says_so(
    kind: str, mebibytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "words.txt").write_bytes(b"the quick brown fox jumps.\n" * 60)
    flags = {**TINY, "corpus": (str(tmp_path / "words.txt"),), "tokenizer": kind}
    told = f"vocabulary: learned from {mebibytes} MiB drawn from all over the text"
    events = list(begin(from_flags(flags), dry_run=True))
    assert told not in [event.text for event in of_kind(events, Notice)]
    monkeypatch.setattr("txlcli.train.ids.sampled_bytes", lambda kind, newlines: 1 << 10)
    told = told.replace(f"{mebibytes} MiB", "0 MiB")
    events = list(begin(from_flags(flags), dry_run=True))
    assert told in [event.text for event in of_kind(events, Notice)]


def test_white_space_is_refused_for_words_and_pieces(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_bytes(b" \n" * 300)
    with pytest.raises(
        UserError, match=r"has only white space; a word vocabulary needs words; use --tokenizer char"
    ):
        make_run(tmp_path, tokenizer="word")
    run, _ = train_run(tmp_path, tokenizer="char")
    assert list_checkpoints(run)[-1] == 12


def test_muon_leaves_the_distance_projection_alone() -> None:
    model = tiny_model()
    taken = [name for name, p in model.named_parameters() if is_hidden_matrix(name, p)]
    assert not [
        name for name in taken if ".r." in name or "embed" in name or "bias" in name or "norm" in name
    ]


# what is drawn to zero, and what has no gradient

KINDS: dict[str, dict[str, Any]] = {
    "relative": {},
    "biases of each layer": {"untie_r": True},
    "shaw": {"position": "shaw", "max_relative_position": 2},
    "sinusoid": {"position": "sinusoid"},
    "learned": {"position": "learned"},
    "clusters": {"cutoffs": (5, 10), "div_val": 2, "tied": False, "tie_projs": "none"},
    "one table": {"cutoffs": (5, 10), "d_embed": 8, "tie_projs": "tail"},
}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("kind", KINDS)
def test_weight_decay_pulls_on_matrices_and_tables(kind: str, optimizer: Any) -> None:
    if optimizer == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    model = tiny_model(**KINDS[kind])
    optimizers = build_optimizers(model, OptimConfig(optimizer=optimizer, weight_decay=0.1)).values()
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, free = (
        {names[id(p)] for group in groups for p in group["params"] if bool(group["weight_decay"]) is wanted}
        for wanted in (True, False)
    )
    assert not decayed & free
    assert decayed | free == set(names.values())
    kinds_of_free = {name.rpartition(".")[2] for name in free}
    assert kinds_of_free <= {"bias", "weight", "content_bias", "position_bias", "cluster_bias"}
    assert all("norm" in name for name in free if name.endswith(".weight"))
    tables = {name for name in decayed if not name.startswith("layers.")}
    expected = {
        "shaw": {"embed.weight"},
        "learned": {"embed.weight", "positions.weight"},
        "clusters": {
            f"{part}.{place}.{i}"
            for part in ("embed", "head")
            for place in ("weights", "projections")
            for i in range(3)
        }
        | {"head.cluster_weight"},
        "one table": {"embed.weight", "embed.projections.0", "head.projections.0", "head.cluster_weight"},
    }
    assert tables == expected.get(kind, {"embed.weight"})
    assert ("layers.1.attention.r.keys" in decayed) == ("layers.0.attention.r.values" in decayed)
    assert ("layers.1.attention.r.keys" in decayed) == (kind == "shaw")


@pytest.mark.parametrize("kind", KINDS)
def test_muon_takes_the_same_matrices_in_every_scheme(kind: str) -> None:
    taken = [name for name, p in tiny_model(**KINDS[kind]).named_parameters() if is_hidden_matrix(name, p)]
    assert taken == [name for name, p in tiny_model().named_parameters() if is_hidden_matrix(name, p)]


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "muon"])
def test_a_step_leaves_what_no_token_touched(optimizer: Any) -> None:
    if optimizer == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    model = tiny_model(cutoffs=(5, 10), div_val=2, tied=False, tie_projs="none")
    optimizers = list(build_optimizers(model, OptimConfig(optimizer=optimizer, weight_decay=0.1)).values())
    set_learning_rate(optimizers, 0.01)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    tokens = torch.tensor([[1, 2, 12, 13]])
    model(tokens, None, tokens)[0].sum().backward()
    untouched = {"head.weights.1", "head.projections.1"}
    assert {name for name, p in model.named_parameters() if p.grad is None} == untouched
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for each in optimizers:
        each.step()
    assert untouched == {name for name, p in model.named_parameters() if torch.equal(before[name], p)}


@pytest.mark.parametrize("clip", [0.25, 0.0])
def test_parts_of_which_some_miss_a_cluster_give_the_result_of_one(tmp_path: Path, clip: float) -> None:
    (tmp_path / "words.txt").write_text("ox and " * 60 + "fox dog cat " * 20)
    ready = make_run(tmp_path, tokenizer="word", cutoffs=(5,), div_val=2, tied=False, tie_projs="none")
    torch.set_default_dtype(torch.float64)
    try:
        results = []
        for n_parts in (1, 4):
            config = replace(ready.config, optim=replace(ready.config.optim, accumulate=n_parts))
            batches = Batches(open_split(ready.run.folder, "train"), 4, 8)
            n_vocab = load_tokenizer(ready.run.tokenizer_folder).n_vocab
            state = TrainState.start(config, batches, n_vocab, device=torch.device("cpu"), precision="fp32")
            steps = [optimize(state, rate=0.01, clip=clip) for _ in range(5)]
            results.append([[step.loss, step.grad_norm] for step in steps])
            state.batches.store.close()
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(*(torch.tensor(result, dtype=torch.float64) for result in results))


def test_the_estimate_of_memory_knows_clusters_and_tables(tmp_path: Path) -> None:
    config = Config(model=ModelConfig(tgt_len=256, mem_len=0), optim=OptimConfig(batch_size=32))
    n_vocab = 50_000

    def estimate(**changes: Any) -> int:
        return cost.memory_bytes(replace(config, model=replace(config.model, **changes)), n_vocab)

    plain, clustered = estimate(), estimate(cutoffs=(5_000, 20_000))
    # Of 50,000 logits a token, 5,002 and a tenth of half the others are left.
    saved = 3.5 * 32 * 256 * (50_000 - 5_002 - 2_250) * 4
    assert plain - clustered == pytest.approx(cost._WASTE * saved, rel=0.02)
    assert cost.count_parameters(replace(config.model, position="learned"), n_vocab)[1] > 0
    assert estimate(position="learned", tgt_len=257) > 0


def test_cutoffs_that_a_vocabulary_does_not_have_are_refused_at_their_place(tmp_path: Path) -> None:
    ready = make_run(tmp_path, tokenizer="word", cutoffs=(5,))
    text = ready.run.config_path.read_text()
    assert text.count("cutoffs: [5]") == 1
    ready.run.config_path.write_text(text.replace("cutoffs: [5]", "cutoffs: [5, 5000]"))
    with pytest.raises(UserError, match=r"config\.yaml:[0-9]+: .*cutoffs must stay below the vocabulary of"):
        list(train(ready.run, open_config(ready.run)))


# clusters, schemes and attention on the way from flags to a run


def test_clusters_are_derived_from_the_vocabulary_that_the_text_gives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plan, "ADAPTIVE_FROM", 17)
    monkeypatch.setattr(plan, "CLUSTER_STARTS", (0.1, 0.2, 0.8))
    ready = make_run(tmp_path, tokenizer="word", div_val=2)
    n_vocab = load_tokenizer(ready.run.tokenizer_folder).n_vocab
    assert n_vocab == 17
    assert ready.config.model.cutoffs == open_config(ready.run).model.cutoffs == (1, 3, 14)
    assert ready.origins["cutoffs"] == "plan: for a vocabulary of 17"
    assert "cutoffs: [1, 3, 14]" in ready.run.config_path.read_text()
    assert np.isfinite(losses(train_run(tmp_path, "trained", tokenizer="word", div_val=2)[0])).all()


@pytest.mark.parametrize("kind", ["byte", "char", "word", "sentencepiece"])
def test_clusters_beyond_the_vocabulary_are_refused_before_the_text_is_encoded(
    tmp_path: Path, kind: str
) -> None:
    corpus = write_corpus(tmp_path, 3000)
    flags = {**TINY, "corpus": (str(corpus),), "tokenizer": kind, "cutoffs": (20_000, 40_000)}
    events = []
    with pytest.raises(UserError) as error:
        events.extend(begin(from_flags(flags), out=tmp_path / "run"))
    message = (
        r"--cutoffs: must stay below the vocabulary of \d+; got 20000,40000; give smaller ones, or auto "
    )
    assert re.match(message, str(error.value))
    assert not any(event.stage.startswith("encoding") for event in of_kind(events, Progress))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["words.txt"]


@pytest.mark.parametrize(
    ("text", "kind", "floor"),
    [("abc" * 400, "char", 0.0), ("a" * 1200, "char", 0.0), ("", "word", math.log(50))],
)
def test_small_vocabularies_asked_for_clusters_train_towards_their_floor(
    tmp_path: Path, text: str, kind: str, floor: float
) -> None:
    chooser = random.Random(0)
    words = [f"w{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(50)]
    (tmp_path / "words.txt").write_text(text or " ".join(chooser.choices(words, k=3000)))
    flags = {
        "cutoffs": "auto",
        "div_val": 4,
        "lr": 0.03,
        "warmup": 10,
        "steps": 60,
        "eval_every": 60,
        "save_every": 60,
        "tgt_len": 16,
    }
    run, _ = train_run(tmp_path, tokenizer=kind, **flags)
    assert open_config(run).model.cutoffs == ()
    # After 60 steps no more than a tenth of a nat is left to learn.
    assert abs(np.mean(losses(run)[-5:]) - floor) < 0.1


@pytest.mark.parametrize("mem_len", [0, 8])
def test_words_in_clusters_train_in_half_precision(tmp_path: Path, mem_len: int) -> None:
    flags = {"tokenizer": "word", "cutoffs": (4, 9), "div_val": 2, "mem_len": mem_len}
    run, events = train_run(tmp_path, precision="bf16", **flags)
    assert np.isfinite(losses(run)).all()
    assert isinstance(events[-1], Finished)
    scores = [load(run.folder, precision=name).score(tmp_path / "words.txt") for name in ("fp32", "bf16")]
    assert abs(scores[0].nll - scores[1].nll) < 0.02  # what the half type may cost; measured: 0.001


@pytest.fixture
def no_value_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose best attention, `fast`, takes no rows of distances for the values."""

    def refuses(demands: Demands) -> str | None:
        return "fast takes no rows for the values" if demands.has_values else None

    monkeypatch.setitem(BACKENDS, "fast", Backend(relative_attention, refuses))
    monkeypatch.setitem(BY_DEVICE, "cpu", ("fast",))


@pytest.mark.usefixtures("no_value_rows")
def test_a_fall_back_of_attention_is_told_once_with_its_reason(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    flags = {**TINY, "corpus": (str(corpus),), "position": "shaw"}
    events = list(begin(from_flags(flags), out=tmp_path / "run"))
    told = [event.text for event in of_kind(events, Notice) if "attention" in event.text]
    assert told == ["attention: fast takes no rows for the values, using eager"]
    (planned,) = of_kind(events, Planned)
    assert (planned.summary.attention, events[-1].config.machine.attention) == ("eager", "eager")
    assert events[-1].origins["attention"] == "plan: fast takes no rows for the values, using eager"
    for unaffected in ({"shaw_values": False}, {"attention": "eager"}):
        events = list(
            begin(from_flags({**flags, "steps": 1, "attention": "eager", **unaffected}), dry_run=True)
        )
        assert not [event for event in of_kind(events, Notice) if "attention" in event.text]


@pytest.mark.usefixtures("no_value_rows")
def test_attention_named_on_the_command_line_is_refused_and_in_a_file_replaced() -> None:
    scheme = {"position": Sourced("shaw", FLAG)}
    with pytest.raises(UserError) as error:
        choose_attention(scheme | {"attention": Sourced("fast", FLAG)})
    assert str(error.value) == (
        "--attention: cannot run here; got `fast`; fast takes no rows for the values; leave it out, "
        "or give eager"
    )
    told = "fast takes no rows for the values, using eager"
    assert choose_attention(scheme | {"attention": Sourced("fast", "c.yaml:9")}) == ("eager", told)
    assert choose_attention({"attention": Sourced("fast", FLAG)}) == ("fast", None)
    assert choose_attention({}) == ("fast", None)


def test_learned_positions_start_another_run_at_their_own_length(tmp_path: Path) -> None:
    first, _ = train_run(tmp_path, "first", position="learned", steps=2)
    free = dict.fromkeys(("tokenizer", "n_layer", "d_model", "n_head", "tgt_len"))
    second, _ = train_run(tmp_path, "second", **free, init=str(first.folder), mem_len=3, steps=2)
    assert open_config(second).model.tgt_len == 8
    with pytest.raises(UserError, match=r"^--tgt-len: comes with --init and its learned positions; got 4, "):
        make_run(tmp_path, "third", **{**free, "tgt_len": 4}, init=str(first.folder))
    assert not (tmp_path / "third").exists()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            {"tokenizer": "char", "cutoffs": "20"},
            "cutoffs: clusters pay where frequent tokens have small ids; those of a char vocabulary are not "
            "sorted by frequency",
        ),
        (
            {"tokenizer": "word", "div_val": "2"},
            "div_val: 2 asked for; without cutoffs there is one cluster, so it changes nothing",
        ),
        ({"tokenizer": "word", "cutoffs": "5", "div_val": "2"}, None),
    ],
)
def test_clusters_that_bring_nothing_are_told(
    flags: dict[str, str], told: str | None, tmp_path: Path
) -> None:
    settings = from_flags({**TINY, "corpus": (str(write_corpus(tmp_path)),), **flags, "steps": "1"})
    texts = [event.text for event in of_kind(list(begin(settings, dry_run=True)), Notice)]
    assert [text for text in texts if text.startswith(("cutoffs", "div_val"))] == [told] * (told is not None)


def test_contradictions_are_refused_before_the_text_is_read(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    flags = from_flags({"corpus": (str(corpus),), "position": "shaw", "untie_r": True})
    events = begin(flags, out=tmp_path / "run")
    with pytest.raises(UserError, match=r"^--untie-r: untie_r true needs position relative; got shaw$"):
        next(events)
    assert not (tmp_path / "run").exists()
