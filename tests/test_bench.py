import dataclasses
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from txlcli import UserError, config
from txlcli.attention import BACKENDS, Backend, hidden_keys, relative_attention
from txlcli.attention.choice import BY_DEVICE
from txlcli.bench import KINDS, Options, Progress, Report, bench, preset_subject
from txlcli.bench import agreement as agreement_module
from txlcli.bench import clock as clock_module
from txlcli.bench.agreement import Reference, agreement_cases, draw_inputs, worse
from txlcli.bench.clock import Candidate, PeakMemory, time_in_turn
from txlcli.bench.flops import (
    StepSize,
    attention_flops,
    inference_flops,
    training_flops,
    visible_pairs,
)
from txlcli.bench.subject import Subject
from txlcli.bench.works import Setting, bare_model, draw_tokens, training
from txlcli.cli import bench as bench_command
from txlcli.cli import main
from txlcli.config import Config, MachineConfig, ModelConfig
from txlcli.evaluate.streams import StepSize as StreamSize
from txlcli.model import Lengths, Memory, TransformerXL
from txlcli.report import Screen, bench_table, column_names, comparison_table

N_VOCAB = 23
SIZES = {"n_layer": 2, "d_model": 8, "n_head": 2, "d_head": 5, "d_inner": 12, "tgt_len": 6, "mem_len": 9}
SCHEMES = {
    "relative": {},
    "relative, biases of each layer": {"untie_r": True},
    "shaw": {"position": "shaw"},
    "shaw, keys alone": {"position": "shaw", "shaw_values": False},
    "sinusoid": {"position": "sinusoid", "absolute_positions": "continue"},
    "learned": {"position": "learned"},
}
HEADS = {
    "one table": {},
    "two tables": {"tied": False},
    "narrow": {"d_embed": 4},
    "clusters": {"cutoffs": (5, 11)},
    "narrow clusters": {"cutoffs": (5, 11), "div_val": 2, "tie_projs": "all"},
    "narrow clusters of their own": {"cutoffs": (5, 11), "div_val": 2, "tie_projs": "none", "tied": False},
    "clusters of one narrow table": {"cutoffs": (5,), "d_embed": 4},
}


@pytest.fixture(autouse=True)
def _small_matrices(monkeypatch):
    """Multiply small matrices: how fast this machine is does not matter here."""
    monkeypatch.setattr(clock_module, "_LIMIT_SIZES", {"cpu": (32,)})
    monkeypatch.setattr(clock_module, "_LIMIT_S", 0.0)


@pytest.fixture
def _in_a_hurry(monkeypatch):
    """Draw little and leave garbage: how fast forms are and what they take does not matter here.

    Beside the eager form there is `twin`, the same, which `auto` takes: whether others are as accurate is not
    for these tests to say.
    """
    monkeypatch.setattr(clock_module, "gc", SimpleNamespace(collect=lambda: 0))
    monkeypatch.setattr(agreement_module, "N_STREAM", 2)
    # Backwards, since what is undone last comes last in the table again.
    for name in [name for name in reversed(BACKENDS) if name != "eager"]:
        monkeypatch.delitem(BACKENDS, name)
    monkeypatch.setitem(BACKENDS, "twin", Backend(relative_attention, lambda demands: None))
    monkeypatch.setitem(BY_DEVICE, "cpu", ("twin",))


# FLOPs


def counted(function):
    """The FLOPs of matrix products that torch sees; what is added in place it has to be told."""
    in_place = {torch.ops.aten.addmm_: lambda _, a, b, **kw: 2 * math.prod(a) * b[-1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        function()
    return counter.get_total_flops()


def by_cluster(model, tokens):
    clusters = model.head.clusters
    return torch.bincount(clusters.cluster_of(tokens.flatten()), minlength=clusters.n_tail + 1).tolist()


def dense(model, tokens, targets, n_memory):
    """The size of a step in which every query meets every key, as the eager form computes."""
    n_stream, n_query = tokens.shape
    n_pair = n_query * (n_memory + n_query)
    heads = [targets.numel(), *by_cluster(model, targets)[1:]]
    return StepSize(n_stream, n_query, n_memory, n_pair, by_cluster(model, tokens), heads)


def draw_step(settings, n_memory):
    model_config = ModelConfig(**{**SIZES, **settings})
    model = TransformerXL(model_config, N_VOCAB)
    tokens, targets = torch.randint(N_VOCAB, (3, 6)), torch.randint(N_VOCAB, (3, 6))
    # One target of each cluster at least: gradients of an empty cluster are no products.
    targets.view(-1)[:3] = torch.tensor([0, 7, 20])
    hidden = tuple(torch.randn(3, n_memory, 8) for _ in range(2))
    return model_config, model, tokens, targets, Memory(hidden, torch.full((3,), n_memory))


@pytest.mark.parametrize("n_memory", [0, 9])
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("settings", [*SCHEMES.values(), *HEADS.values()], ids=[*SCHEMES, *HEADS])
def test_flops_of_training_are_those_that_torch_sees(settings, norm, n_memory):
    model_config, model, tokens, targets, memory = draw_step({**settings, "norm": norm}, n_memory)
    expected = training_flops(model_config, model.head.clusters, dense(model, tokens, targets, n_memory))
    assert counted(lambda: model(tokens, memory, targets)[0].sum().backward()) == expected


@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("settings", SCHEMES.values(), ids=SCHEMES)
def test_flops_of_a_measured_step_are_those_that_torch_sees_in_any_parts(settings, accumulate, tmp_path):
    # A single query sees all keys, as the eager form computes.
    of = subject(**settings, tgt_len=1)
    of = dataclasses.replace(of, config=dataclasses.replace(of.config, optim=streams_in(accumulate)))
    with training(Setting(of, torch.device("cpu"), "fp32", ("eager",)), tmp_path) as work:
        (eager,) = work.candidates
        eager.ready(1)
        assert counted(eager.step) == work.flops


@pytest.mark.parametrize("settings", [*SCHEMES.values(), *HEADS.values()], ids=[*SCHEMES, *HEADS])
def test_flops_of_inference_are_those_that_torch_sees(settings):
    model_config, model, tokens, targets, _ = draw_step(settings, 0)
    model.eval().requires_grad_(False)
    with torch.no_grad():
        cache = model.new_cache(3)  # projects the distances, once for all steps
        _, cache = model.extend(tokens, cache)

        def score():
            hidden, _ = model.extend(targets, cache)
            model.nll(hidden, tokens)

        clusters = model.head.clusters
        expected = inference_flops(model_config, clusters, dense(model, targets, tokens, 6))
        assert counted(score) == expected
        one = StepSize(3, 1, 0, 1, by_cluster(model, tokens[:, :1]), [3] * (clusters.n_tail + 1))
        cache = model.new_cache(3)
        expected = inference_flops(model_config, clusters, one)
        assert counted(lambda: model.log_probs(model.extend(tokens[:, :1], cache)[0])) == expected


@pytest.mark.parametrize("settings", SCHEMES.values(), ids=SCHEMES)
def test_flops_of_attention_are_those_that_torch_sees(settings):
    model_config, model, *_ = draw_step(settings, 0)
    reference = Reference(model, model.lengths, 2, "fp32", torch.Generator())
    q, k, v, bias, first, gradient = reference.draws[0]
    leaves = [leaf.requires_grad_() for leaf in reference.draws[0].leaves().values()]
    size = StepSize(2, 6, 9, 6 * 15, (), ())

    def attend(has_backward):
        out = relative_attention(q, k, v, bias, first=first)
        if has_backward:
            torch.autograd.grad(out, leaves, gradient)

    for has_backward in (False, True):
        expected = attention_flops(model_config, size, has_backward=has_backward)
        assert counted(lambda: attend(has_backward)) == expected  # noqa: B023  # called at once


@pytest.mark.parametrize("span", [None, 1, 4, 9, 100])
@pytest.mark.parametrize(("n_query", "n_memory"), [(1, 0), (1, 9), (6, 0), (6, 9), (9, 4)])
def test_visible_pairs_are_those_of_the_mask(n_query, n_memory, span):
    first = None
    if span is not None:
        first = (torch.arange(n_memory, n_memory + n_query) - span + 1).clamp(min=0)[None]
    hidden = hidden_keys(n_query, n_memory + n_query, first, torch.device("cpu"))
    assert visible_pairs(n_query, n_memory, span) == int((~hidden).sum())


def test_tokens_follow_the_law_of_zipf():
    for n_vocab in (1, 2, 23, 100_000):
        ids = draw_tokens(n_vocab, 10_000)
        assert ids.min() >= 0
        assert ids.max() < n_vocab
    # log(20001) / log(100001) = 0.8602; four standard errors of 10,000 draws are 0.014.
    assert np.mean(ids < 20_000) == pytest.approx(0.8602, abs=0.014)


# Timing


def test_candidates_take_turns_and_warm_up_first(monkeypatch):
    calls, now = [], 0.0

    def candidate(name, seconds):
        def step():
            nonlocal now
            now += seconds
            calls.append(name)

        return Candidate(name, lambda n_steps: calls.append(n_steps), step)

    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: now)
    device = torch.device("cpu")
    both = [candidate("a", 1.0), candidate("b", 2.0)]
    timing = time_in_turn(both, device=device, peak=PeakMemory(device), repeats=4, seconds=32)
    progress = []
    while True:
        try:
            progress.append(next(timing))
        except StopIteration as end:
            timings, n_steps = end.value
            break
    assert n_steps == 2  # 32 s in 8 repetitions of steps of at most 2 s
    warm_up = [1, "a", 1, "a", 1, "b", 1, "b"]
    assert calls == warm_up + [2, "a", "a", 2, "b", "b"] * 4
    assert progress == [(0, 8)] * 4 + [(n, 8) for n in range(8)]
    assert [(timing.name, timing.step_s) for timing in timings] == [("a", [1.0] * 4), ("b", [2.0] * 4)]


def test_slow_steps_are_timed_three_times(monkeypatch):
    now = 0.0

    def step():
        nonlocal now
        now += 100.0

    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: now)
    device, slow = torch.device("cpu"), Candidate("a", lambda _: None, step)
    timing = time_in_turn([slow], device=device, peak=PeakMemory(device), repeats=9, seconds=1)
    assert len(list(timing)) == 2 + 3


@pytest.mark.skipif(PeakMemory(torch.device("cpu")).read() is None, reason="the system does not tell")
def test_peak_memory_shows_what_is_held_at_once_also_the_second_time():
    peak, peaks = PeakMemory(torch.device("cpu")), []
    for _ in range(2):
        peak.restart()
        torch.ones(1 << 24)  # 64 MiB
        peaks.append(peak.read())
    peak.restart()
    # The system counts pages in lots, so a few tens of pages per core are missing or there in addition.
    slack = 8 << 20
    assert all(abs(n_bytes - (64 << 20)) < slack for n_bytes in peaks)
    assert peak.read() < slack


# Agreement


def without_u(q, k, v, bias=None, *, first=None, dropout=0.0):
    return relative_attention(q, k, v, bias and bias._replace(u=bias.u * 0.99), first=first)


def without_gradient_of_keys(q, k, v, bias=None, *, first=None, dropout=0.0):
    return relative_attention(q, k.detach(), v, bias, first=first)


def without_gradient(q, k, v, bias=None, *, first=None, dropout=0.0):
    return relative_attention(q, k, v, bias, first=first).detach()


def not_a_number(q, k, v, bias=None, *, first=None, dropout=0.0):
    return relative_attention(q, k, v, bias, first=first) * torch.nan


def of_another_shape(q, k, v, bias=None, *, first=None, dropout=0.0):
    return relative_attention(q, k, v, bias, first=first)[:1]


def wrong_for_single_tokens(q, k, v, bias=None, *, first=None, dropout=0.0):
    return relative_attention(q, k, v, bias, first=first) * (1 if q.shape[2] > 1 else 1.001)


def sees_the_future(q, k, v, bias=None, *, first=None, dropout=0.0):
    return relative_attention(q, k, v, bias, first=first) + 1e-3 * v[:, :, -q.shape[2] :]


LIARS = [
    without_u,
    without_gradient_of_keys,
    without_gradient,
    not_a_number,
    of_another_shape,
    wrong_for_single_tokens,
    sees_the_future,
]


def found_errors(attend, precision="fp32", **settings):
    model = TransformerXL(ModelConfig(**{**SIZES, **settings}), 1).eval()
    generator, found = torch.Generator().manual_seed(0), None
    for lengths in agreement_cases(model.lengths):
        found = worse(found, Reference(model, lengths, 2, precision, generator).errors(attend))
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("settings", SCHEMES.values(), ids=SCHEMES)
def test_the_eager_form_agrees_with_itself(settings, precision):
    for rule in ("off", "mem_len", "mem_len+1"):
        errors = found_errors(relative_attention, precision, **settings, same_length=rule)
        assert errors.agree
        # Its own error is within half of what is allowed, or a third.
        assert errors.forward <= errors.forward_allowed / 2
        assert errors.gradient <= errors.gradient_allowed / 3


@pytest.mark.parametrize("liar", LIARS, ids=lambda liar: liar.__name__)
def test_a_form_that_lies_is_caught(liar):
    assert not found_errors(liar).agree


def sees_all_documents(q, k, v, bias=None, *, first=None, dropout=0.0):
    return relative_attention(q, k, v, bias)


def sees_documents_of_the_first_stream(q, k, v, bias=None, *, first=None, dropout=0.0):
    return relative_attention(q, k, v, bias, first=first[:1].expand_as(first))


def sees_one_key_too_many(q, k, v, bias=None, *, first=None, dropout=0.0):
    return relative_attention(q, k, v, bias, first=(first - 1).clamp(min=0))


@pytest.mark.parametrize("rule", ["off", "mem_len"])
@pytest.mark.parametrize(
    "liar", [sees_all_documents, sees_documents_of_the_first_stream, sees_one_key_too_many]
)
def test_a_form_that_looks_into_other_documents_is_caught(liar, rule):
    documents = {"reset_memory_at_documents": True, "same_length": rule}
    assert found_errors(relative_attention, **documents).agree
    assert not found_errors(liar, **documents).agree


@pytest.mark.parametrize("rule", ["off", "mem_len"])
def test_drawn_documents_end_anywhere_in_memory_and_segment(rule):
    model = TransformerXL(ModelConfig(**SIZES, reset_memory_at_documents=True, same_length=rule), 1)
    inputs = draw_inputs(model, model.lengths, 500, "fp32", torch.Generator().manual_seed(0))
    # Queries stand at keys 9 to 14; rule mem_len shows 9 keys.
    expected = {
        tuple(max(end + 1 if end < key else 0, key - 8 if rule == "mem_len" else 0) for key in range(9, 15))
        for end in range(15)
    }
    assert set(map(tuple, inputs.first.tolist())) == expected


@pytest.mark.usefixtures("_in_a_hurry")
@pytest.mark.parametrize("is_reset", [False, True])
def test_attention_is_measured_with_the_documents_that_training_has(monkeypatch, is_reset):
    firsts = []

    def spy(q, k, v, bias=None, *, first=None, dropout=0.0):
        firsts.append(first)
        return relative_attention(q, k, v, bias, first=first)

    monkeypatch.setitem(BACKENDS, "twin", Backend(spy, lambda demands: None))
    row, _ = measured(subject(reset_memory_at_documents=is_reset), kinds=("attention",)).rows
    timed = firsts[0]
    assert all((first is None) != is_reset for first in firsts)
    # Each head of 5 numbers meets key, distance and value of what its query sees.
    n_seen = int((~hidden_keys(6, 15, timed, torch.device("cpu"))).sum()) * (1 if is_reset else 2)
    assert row.flops_per_token * 2 * 6 == 2 * 2 * 5 * 3 * n_seen


def test_a_lie_about_gradients_names_the_input():
    errors = found_errors(without_gradient_of_keys)
    assert (errors.gradient_of, errors.gradient) == ("k", pytest.approx(1.0))
    assert errors.forward <= errors.forward_allowed


def test_the_last_token_of_a_segment_is_compared_too():
    assert agreement_cases(Lengths(6, 9)) == (Lengths(6, 9), Lengths(1, 14))
    assert agreement_cases(Lengths(1, 9)) == (Lengths(1, 9),)
    kept = Lengths(6, 9, same_length="mem_len")
    assert agreement_cases(kept) == (kept, kept._replace(tgt_len=1))


# The whole


def streams_in(accumulate):
    return config.OptimConfig(batch_size=4, accumulate=accumulate)


def subject(**model):
    settings = Config(
        data=config.DataConfig(document_per_file=True),
        model=ModelConfig(**{**SIZES, **model}),
        optim=streams_in(2),
    )
    lengths = TransformerXL(settings.model, N_VOCAB).lengths
    return Subject(name="x", config=settings, lengths=lengths, n_vocab=N_VOCAB)


def measured(of, **options):
    events = list(bench(of, Options(**{"seconds": 0.001, "repeats": 3, "device": "cpu", **options})))
    assert all(isinstance(event, Progress) for event in events[:-1])
    assert isinstance(events[-1], Report)
    return events[-1]


@pytest.mark.usefixtures("_in_a_hurry")
@pytest.mark.parametrize("name", [*SCHEMES, "narrow clusters", "clusters of one narrow table"])
def test_every_scheme_and_head_is_measured(name):
    report = measured(subject(**{**SCHEMES, **HEADS}[name]), precision="fp32")
    whats = ["training", "scoring", "generation", "attention", "attention+backward"]
    assert [row.what for row in report.rows] == whats
    for row in report.rows:
        assert len(row.tokens_per_s) == 3
        assert min(*row.tokens_per_s, row.flops_per_token, row.ratio_to_eager) > 0
    assert (report.rows[0].n_stream, report.rows[0].n_query) == (4, 6)
    assert (report.rows[2].n_stream, report.rows[2].n_query) == (1, 1)
    assert report.rows[3].n_stream == 2  # a part of the streams
    assert report.precision == "fp32"
    assert report.disagreeing == ()
    assert [compared.attention for compared in report.comparisons] == ["eager", "twin"]
    assert report.attention == "twin"


def test_the_forms_that_are_built_in_are_compared_and_the_eager_one_agrees():
    report = measured(subject(), kinds=("attention",), precision="fp32")
    found = {compared.attention: compared for compared in report.comparisons}
    assert set(found) == set(BACKENDS)
    assert found["eager"].agrees
    assert found["eager"].ratio_to_eager == 1.0
    for compared in found.values():
        assert (compared.errors is None) == (compared.reason is not None)


@pytest.mark.usefixtures("_in_a_hurry")
def test_only_what_is_asked_for_is_measured_and_nothing_changes_around_it():
    of, before = subject(), (torch.get_rng_state(), torch.get_num_threads())
    for kind in KINDS[:3]:
        n_thread = 2 if kind == "generation" else 1
        report = measured(of, kinds=(kind,), threads=n_thread, is_deterministic=True, attention="eager")
        assert [row.what for row in report.rows] == [kind]
        assert report.comparisons == ()
        assert report.environment["threads"] == n_thread
        assert report.attention == "eager"
        assert (report.rows[0].eager_tokens_per_s, report.rows[0].ratio_to_eager) == ((), 1.0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_num_threads() == before[1]
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.usefixtures("_in_a_hurry")
def test_a_form_that_refuses_is_listed_with_its_reason(monkeypatch):
    monkeypatch.setitem(BACKENDS, "shy", Backend(relative_attention, lambda demands: "it does not want to"))
    report = measured(subject(), kinds=("attention",))
    shy = next(compared for compared in report.comparisons if compared.attention == "shy")
    assert (shy.agrees, shy.reason, shy.tokens_per_s_mean) == (None, "it does not want to", None)
    with pytest.raises(UserError, match=r"^--attention: cannot run here; got `shy`; it does not want"):
        measured(subject(), attention="shy")


@pytest.mark.usefixtures("_in_a_hurry")
def test_dropped_attention_weights_are_left_out_of_the_comparison():
    report = measured(subject(dropatt=0.2), kinds=("training", "attention"))
    assert "attention alone is measured and compared without its dropout" in report.notices
    assert report.disagreeing == ()


@pytest.mark.usefixtures("_in_a_hurry")
def test_too_little_memory_is_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr("txlcli.bench.measuring.free_bytes", lambda device: 1000)
    with pytest.raises(
        UserError, match=r"^cpu: too little memory to train; batch_size 4, tgt_len 6, mem_len"
    ):
        measured(subject())
    measured(subject(), kinds=("scoring",))


@pytest.mark.usefixtures("_in_a_hurry")
def test_memory_that_runs_out_is_told_in_one_line(monkeypatch):
    def run_out(*_, **__):
        torch.zeros(1 << 50)  # more than any machine has, in the words of its allocator

    monkeypatch.setattr(TransformerXL, "extend", run_out)
    many = "lower --batch-size, --tgt-len or --mem-len, or leave kinds of work out with --only"
    for kinds, remedy in (
        (("generation",), "lower --tgt-len or --mem-len"),
        (("scoring",), "lower --batch-size, --tgt-len or --mem-len"),
        (("scoring", "generation"), many),
    ):
        with pytest.raises(UserError) as caught:
            measured(subject(), kinds=kinds)
        assert str(caught.value) == f"cpu: out of memory; {remedy}"


@pytest.mark.usefixtures("_in_a_hurry")
@pytest.mark.skipif(PeakMemory(torch.device("cpu")).read() is None, reason="the system does not tell")
def test_what_is_set_up_once_is_no_memory_of_the_work_that_comes_first(monkeypatch):
    kept = []

    def attend(q, k, v, bias=None, *, first=None, dropout=0.0):
        name = "backward" if torch.is_grad_enabled() else "forward"
        if name not in [known for known, _ in kept]:
            kept.append((name, torch.ones(1 << 24)))  # 64 MiB
        return relative_attention(q, k, v, bias, first=first)

    monkeypatch.setitem(BACKENDS, "twin", Backend(attend, lambda demands: None))
    report = measured(subject(), kinds=("attention",))
    assert [name for name, _ in kept] == ["forward", "backward"]
    for row in report.rows:
        assert row.peak_memory_bytes < 32 << 20
        assert row.eager_peak_memory_bytes < 32 << 20


@pytest.mark.usefixtures("_in_a_hurry")
def test_streams_that_are_asked_for_are_scored_or_it_is_said(monkeypatch):
    report = measured(subject(), kinds=("scoring",), n_stream=150)
    assert report.rows[0].n_stream == 150  # more than any evaluation takes
    assert report.notices == ()
    report = measured(subject(), kinds=("scoring",), n_stream=1)
    assert report.rows[0].n_stream == 1
    monkeypatch.setattr(StreamSize, "fit", lambda self, n_stream: min(n_stream, 7))
    report = measured(subject(), kinds=("scoring",), n_stream=150)
    assert report.rows[0].n_stream == 7
    assert report.notices == ("scoring: 150 streams asked for, 7 fit into memory",)


@pytest.mark.usefixtures("_in_a_hurry")
def test_forms_are_compared_at_the_streams_of_training(monkeypatch):
    seen = []

    def attend(q, k, v, bias=None, *, first=None, dropout=0.0):
        seen.append(len(q))
        return relative_attention(q, k, v, bias, first=first)

    monkeypatch.setitem(BACKENDS, "twin", Backend(attend, lambda demands: None))
    of = subject()
    optim = dataclasses.replace(of.config.optim, batch_size=60, accumulate=2)
    measured(
        dataclasses.replace(of, config=dataclasses.replace(of.config, optim=optim)), kinds=("attention",)
    )
    assert set(seen) == {30}


@pytest.mark.usefixtures("_in_a_hurry")
def test_a_form_of_the_settings_that_cannot_run_is_told_once(monkeypatch):
    monkeypatch.setitem(BACKENDS, "shy", Backend(relative_attention, lambda demands: "shy does not want to"))
    of = subject()
    of = dataclasses.replace(
        of, config=dataclasses.replace(of.config, machine=MachineConfig(attention="triton"))
    )
    monkeypatch.setitem(
        BACKENDS, "triton", Backend(relative_attention, lambda _: "triton needs another machine")
    )
    report = measured(of)
    assert report.notices == ("attention: triton needs another machine, using twin",)
    assert measured(of, kinds=("scoring",), attention="eager").notices == ()


@pytest.mark.parametrize(
    ("data", "model", "n_vocab", "expected"),
    [
        ("tokenizer: byte", "", None, (256, False)),
        ("tokenizer: char", "", None, (352, True)),
        ("tokenizer: char", "", 50, (50, False)),
        ("vocab_size: 700", "", None, (700, False)),
        ("tokenizer: word", "cutoffs: [20000, 40000, 200000]", None, (266_666, True)),
    ],
)
def test_vocabulary_of_a_preset(tmp_path, data, model, n_vocab, expected):
    path = tmp_path / "a.yaml"
    path.write_text(f"data: {{{data}}}\nmodel: {{n_layer: 1, d_model: 8, n_head: 2, {model}}}\n")
    found = preset_subject("a.yaml", config.read_settings(path), n_vocab)
    assert (found.n_vocab, found.is_assumed) == expected


@pytest.mark.parametrize("name", ["wt103-base", "wt103-large", "lm1b-base"])
def test_presets_assume_their_published_vocabularies(name):
    path = config.find_preset(name)
    for given in (name, str(path)):
        found = preset_subject(given, config.read_settings(path), None)
        assert f"the published vocabulary of {found.n_vocab:,}" in path.read_text()
        assert found.is_assumed == name.startswith("wt103")
        assert preset_subject(given, config.read_settings(path), 900_000).n_vocab == 900_000


def test_a_file_of_the_name_of_a_preset_has_not_its_vocabulary():
    shutil.copy(config.find_preset("wt103-base"), "wt103-base.yaml")
    found = preset_subject("wt103-base.yaml", config.read_settings(Path("wt103-base.yaml")), None)
    assert (found.n_vocab, found.is_assumed) == (266_666, True)
    assert (
        preset_subject("wt103-base", config.read_settings(Path("wt103-base.yaml")), None).n_vocab == 267_735
    )


def test_a_bare_model_has_the_attention_of_its_model():
    for settings in [*SCHEMES.values(), *HEADS.values()]:
        of = subject(**settings)
        bare, whole = bare_model(of, torch.device("cpu")), of.build(torch.device("cpu"))
        biases = (model.new_cache(1).biases[0] for model in (bare, whole))
        shapes = [bias and [None if t is None else t.shape for t in bias] for bias in biases]
        assert shapes[0] == shapes[1]
        assert (bare.n_head, bare.d_head, bare.lengths) == (whole.n_head, whole.d_head, whole.lengths)


# The command


def run(*args, code=0):
    result = CliRunner().invoke(main, ["bench", *map(str, args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.stderr
    return result


QUICK = ["--device", "cpu", "--seconds", "0.001", "--repeats", "3"]
PRESET = """
data: {tokenizer: byte}
model: {n_layer: 1, d_model: 8, n_head: 2, tgt_len: 4, mem_len: 4}
optim: {batch_size: 2}
"""


@pytest.fixture
def preset(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(PRESET)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that the program itself has trained, to be read only."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("the quick brown fox jumps over lazy dogs.\n" * 30)
    torch.set_num_threads(1)
    sizes = "--d-model 8 --n-layer 1 --n-head 2 --tgt-len 8 --mem-len 8 --batch-size 4 --tokenizer char"
    line = f"train {folder}/text.txt --steps 2 --device cpu --attention eager --out {folder}/runs/a {sizes}"
    result = CliRunner().invoke(main, line.split())
    assert result.exit_code == 0, result.stderr
    return folder / "runs" / "a"


def hashes(folder):
    return {
        path: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


NUMBER, TEXT = (int, float), str
FIELDS = {"device": TEXT, "precision": TEXT, "attention": TEXT, "rows": list, "backends": list}
ROW_FIELDS = {
    "what": TEXT,
    "shape": dict,
    "tokens_per_s_mean": NUMBER,
    "tokens_per_s_sd": NUMBER,
    "peak_memory_bytes": (int, type(None)),
    "ratio_to_eager": NUMBER,
    "share_of_matmul_limit": NUMBER,
    "precision": TEXT,
    "attention": TEXT,
}


@pytest.mark.usefixtures("_in_a_hurry")
def test_json_of_a_run_has_the_fixed_names_and_the_run_stays_as_it_is(trained):
    before = hashes(trained)
    result = run("--run", trained, *QUICK, "--json")
    assert hashes(trained) == before
    document = json.loads(result.stdout)
    for fields, found in ((FIELDS, document), *((ROW_FIELDS, row) for row in document["rows"])):
        for name, kind in fields.items():
            assert isinstance(found[name], kind), name
    assert document["rows"][0]["shape"] == {"n_stream": 4, "n_query": 8, "tgt_len": 8, "mem_len": 8}
    assert (document["model"], document["n_vocab"]) == (str(trained), 256 + 29)
    assert [(compared["attention"], compared["agrees"]) for compared in document["backends"][:2]] == [
        ("eager", True),
        ("twin", True),
    ]
    assert "training: " in result.stderr


@pytest.mark.usefixtures("_in_a_hurry")
def test_the_latest_run_is_taken_and_sizes_are_plain_parameters(trained, monkeypatch):
    monkeypatch.chdir(trained.parent.parent)
    sizes = ["--batch-size", 2, "--tgt-len", 3, "--mem-len", 17]
    document = json.loads(run(*QUICK, *sizes, "--json", "--quiet").stdout)
    assert document["model"] == "runs/a"
    shapes = [row["shape"] for row in document["rows"]]
    assert {(shape["tgt_len"], shape["mem_len"]) for shape in shapes} == {(3, 17)}
    assert shapes[0]["n_stream"] == 2
    assert shapes[1]["n_stream"] <= 2


@pytest.mark.usefixtures("_in_a_hurry")
def test_tables_of_a_preset_say_what_they_rest_on(preset):
    result = run("-c", preset, *QUICK)
    assert result.stderr.count("repetitions") == 5
    told = " ".join(result.stdout.split())
    for text in ("fresh weights", "vocabulary 256", "without warm-up", "ratio of median speeds", "GFLOP/s"):
        assert text in told
    assert "assumed" not in told
    assert "deterministic" not in told
    preset.write_text(PRESET.replace("byte", "char"))
    assert "vocabulary 352 (assumed; --vocab-size N)" in run("-c", preset, *QUICK).stdout
    only = run("-c", preset, *QUICK, "--vocab-size", 40, "--only", "generation", "--quiet")
    assert "vocabulary 40\n" in only.stdout
    assert "training" not in only.stdout
    assert only.stderr == ""
    once = ["--only", "scoring", "--deterministic"]
    assert "attention twin · deterministic" in " ".join(run("-c", preset, *QUICK, *once).stdout.split())
    assert json.loads(run("-c", preset, *QUICK, *once, "--json").stdout)["deterministic"] is True


@pytest.mark.usefixtures("_in_a_hurry")
def test_settings_of_a_run_have_its_vocabulary(trained, tmp_path):
    quick = [*QUICK, "--only", "generation", "--json"]
    assert json.loads(run("-c", trained / "config.yaml", *quick).stdout)["n_vocab"] == 256 + 29
    assert (
        json.loads(run("-c", trained / "config.yaml", *quick, "--vocab-size", 300).stdout)["n_vocab"] == 300
    )
    (tmp_path / "config.yaml").write_text(PRESET.replace("byte", "char"))
    assert json.loads(run("-c", tmp_path / "config.yaml", *quick).stdout)["n_vocab"] == 352


@pytest.mark.parametrize("is_asked_for", [False, True])
@pytest.mark.parametrize("line", ["bench --only scoring", "eval --json", "generate --max-tokens 2"])
def test_attention_of_another_machine_is_told_once_by_every_command(trained, tmp_path, line, is_asked_for):
    shutil.copytree(trained, tmp_path / "run")
    path = tmp_path / "run" / "config.yaml"
    assert "attention: eager" in path.read_text()
    path.write_text(path.read_text().replace("attention: eager", "attention: triton"))
    quick = QUICK if line.startswith("bench") else QUICK[:2]
    asked = ["--attention", "eager"] if is_asked_for else []
    result = CliRunner().invoke(main, [*line.split(), "--run", str(path.parent), *quick, *asked])
    assert result.exit_code == 0, result.stderr
    told = "attention: triton needs a CUDA device, using skew"
    assert " ".join((result.stdout + result.stderr).split()).count(told) == (not is_asked_for)


@pytest.mark.parametrize("line", ["bench", "eval", "generate", "config", "train --steps 3"])
def test_an_empty_name_of_a_run_is_refused(line):
    flag = "--resume" if line.startswith("train") else "--run"
    result = CliRunner().invoke(main, [*line.split(), flag, ""])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == f"error: {flag}: must not be empty; got ``\n"


@pytest.mark.usefixtures("_in_a_hurry")
def test_a_form_that_disagrees_ends_with_1_after_the_table(preset, monkeypatch):
    monkeypatch.setitem(BACKENDS, "liar", Backend(sees_the_future, lambda demands: None))
    only = ["--only", "attention", "--precision", "fp32"]
    result = run("-c", preset, *QUICK, *only, code=1)
    line = next(line for line in result.stdout.splitlines() if line.startswith("liar"))
    assert " NO " in line
    assert result.stderr.endswith("error: attention: liar does not agree with eager; see the table\n")
    document = json.loads(run("-c", preset, *QUICK, *only, "--json", code=1).stdout)
    found = {compared["attention"]: compared["agrees"] for compared in document["backends"]}
    assert (found["liar"], found["eager"]) == (False, True)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("--run nowhere", "nowhere: no such run folder; `txl runs` lists those under runs/"),
        ("--run a -c b", "--config: cannot go with --run; give one of them"),
        ("-c nothing.yaml", "nothing.yaml: no such file"),
        ("-c laptop-chr", "--config: no preset `laptop-chr`; did you mean `laptop-char`?"),
        ("", "runs: no run with a checkpoint here; train one with `txl train FILE`, or name one with --run"),
        ("--vocab-size 9", "--vocab-size: goes with --config only; a run has its own vocabulary"),
        (
            "--only training,speed",
            "--only: must be some of training,scoring,generation,attention; got `speed`",
        ),
        ("--repeats 2", "--repeats: must be 3 or more; got 2"),
        ("--repeats x", "--repeats: must be a whole number; got `x`"),
        ("--seconds 0", "--seconds: must be above 0 and at most 3600; got 0"),
        ("--seconds nan", "--seconds: must be a number; got `nan`"),
        ("-c tiny.yaml --batch-size 0", "--batch-size: must be a whole number of at least 1; got `0`"),
        ("-c tiny.yaml --attention fast", "--attention: must be one of "),
        (
            "-c tiny.yaml --precision fp16 --device cpu",
            "--precision: a CPU has no fp16 arithmetic; got `fp16`",
        ),
        ("-c wt103-base --vocab-size 9", "cutoffs"),
    ],
)
def test_refusals(line, error, preset):
    assert preset.parent == Path.cwd()
    result = run(*line.split(), code=2)
    assert result.stdout == ""
    last = result.stderr.splitlines()[-1].removeprefix("error: ")
    assert last.startswith(error) or (error == "cutoffs" and "must stay below the vocabulary of 9" in last)


def test_facts_written_twice_are_the_same():
    assert bench_command.__name__ == "txlcli.cli.bench"
    assert bench_command._KINDS == KINDS
    assert bench_command._LEAST_REPEATS == clock_module.LEAST_REPEATS


def test_a_legend_explains_the_columns_that_are_shown():
    report, of = measured_by_hand("eager"), subject()
    texts = []
    for width in (200, 60):
        names = column_names(bench_table(report.rows, width))
        rows = bench_command._facts(of, report, names)
        texts.append(" ".join(f"{name} {text}" for name, text in rows))
    assert all(text in texts[0] for text in ("then eager's", "standard deviation", "matmul limit"))
    assert not any(text in texts[1] for text in ("then eager's", "standard deviation", "matmul limit"))
    assert "mean of 3 repetitions" in texts[1]


@pytest.mark.parametrize("width", [100, 80])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_tables_fit_the_window(width, is_mixed):
    report = measured_by_hand(*(["eager"] if is_mixed else []))
    screen = dataclasses.replace(Screen.of(sys.stdout), width=width, is_unicode=True)
    for table in (bench_table(report.rows, width), comparison_table(report.comparisons)):
        lines = screen.render(table).splitlines()
        assert max(map(len, lines)) <= width
        assert not any("…" in line for line in lines)
        # A line for each row beside the heading of two lines and its rule: nothing was folded.
        assert len(lines) == 3 + len(report.rows)


def measured_by_hand(*names):
    """A report with the widest numbers that a machine may give; `names` are the first rows' forms."""
    from txlcli.bench import Comparison, Errors, Measured

    whats = ["training", "scoring", "generation", "attention", "attention+backward"]
    rows = [
        Measured(
            what=what,
            n_stream=128,
            n_query=1024,
            tgt_len=1024,
            mem_len=4096,
            precision="bf16",
            attention=name,
            n_steps=1,
            tokens_per_s=(1e5, 9e5, 9.9e5),
            eager_tokens_per_s=(1e4, 9e4, 9e4),
            peak_memory_bytes=12_345_678_901,
            eager_peak_memory_bytes=123_456_789_012,
            flops_per_token=1e9,
            matmul_limit=1e15,
        )
        for what, name in zip(whats, [*names, *["triton"] * 5], strict=False)
    ]
    errors = Errors(1.5e-3, 2e-3, float("inf"), 0.0, "k")
    comparisons = [
        Comparison(
            attention="triton", precision="bf16", errors=errors, tokens_per_s=(9e5,), ratio_to_eager=12.345
        )
    ] * 5
    return Report(
        device="cuda:0",
        rows=tuple(rows),
        comparisons=tuple(comparisons),
        matmul_limits={"bf16": 1e15},
        environment={"processor": "x", "torch": "2", "threads": 1},
        is_deterministic=False,
        notices=(),
    )


def test_an_interruption_ends_with_130(preset):
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    line = ["-m", "txlcli", "bench", "-c", str(preset), "--device", "cpu", "--seconds", "3600"]
    process = subprocess.Popen(
        [sys.executable, *line, "--repeats", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        text=True,
    )
    assert process.stderr is not None
    for told in process.stderr:
        if told.startswith("training"):
            break
    process.send_signal(signal.SIGINT)
    out, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "stopping; once more to stop at once" in told
    assert "Traceback" not in told
