"""What a training will take: memory and disk by estimate, time by measurement on a copy."""

import functools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path

import torch

from txlcli import UserError
from txlcli.attention import fused, skew
from txlcli.checkpoint import describe_weights, save_checkpoint
from txlcli.config import LENGTHS, Config, ModelConfig, Settings, Sourced, build
from txlcli.data import Batches, open_counts, open_split, read_store_info
from txlcli.device import choose_device, choose_precision, free_bytes, is_out_of_memory
from txlcli.evaluate import EvalProgress, evaluate
from txlcli.model import TransformerXL, clusters_of
from txlcli.plan import Known, Measured
from txlcli.run import Run, list_checkpoints
from txlcli.tokenizer import Tokenizer
from txlcli.train.evaluating import sample_text
from txlcli.train.events import Event, Notice
from txlcli.train.machine import LOWER, out_of_memory, run_on, scoring_precision
from txlcli.train.state import TrainState, optimize

MEASURED_SHARE = 0.05
MEASURED_S = 15.0
MEASURED_STEPS = 3
MEASURED_EVAL_S = 1.0
MEASURED_EVAL_TOKENS = 20_000
_FLOAT = 4

# What torch and its libraries hold beside tensors once they have computed, and what the allocator wastes.
_BASE_BYTES = 120 << 20
_WASTE = 1.15

# Tail clusters are computed one after the other: by measurement no more than this share of their logits,
# were all targets theirs, is there at the peak, with a quarter of the targets beyond the first cluster.
_TAIL_AT_PEAK = 0.1


@functools.cache
def count_parameters(config: ModelConfig, n_vocab: int) -> tuple[int, int]:
    """Return the parameters of embedding and output, and all others, without allocating them."""
    with torch.device("meta"):
        return TransformerXL(config, n_vocab).n_parameters()


def state_bytes(config: Config, n_vocab: int) -> int:
    """Return the size of a checkpoint: weights, the optimizer's averages, memory."""
    averages = {"sgd": 0, "muon": 1.2}.get(config.optim.optimizer, 2)
    model = config.model
    memory = model.n_layer * config.optim.batch_size * model.mem_len * model.d_model
    return int(_FLOAT * (sum(count_parameters(model, n_vocab)) * (1 + averages) + memory))


def memory_bytes(config: Config, n_vocab: int) -> int:
    """Estimate the memory that training takes at its peak, from what backward keeps of each layer.

    Weights, gradients and optimizer state; per layer the rows of memory and segment with their keys and
    values, those of the segment (queries, feed-forward, residuals), the attention weights; then, once, the
    scores on their way through the softmax, and the logits with their gradient, of tail clusters the share
    that is there at once. What enters matrix products counts half in half precision. Checked against measured
    peaks on a CPU, in every scheme of positions and with clusters: up to four tenths above.
    """
    model, optim, machine = config.model, config.optim, config.machine
    b, t = optim.batch_size // optim.accumulate, model.tgt_len
    s = t + model.mem_len
    d, f, he = model.d_model, model.d_inner, model.n_head * model.d_head
    half = 0.5 if machine.precision in ("bf16", "fp16") else 1.0
    keyed = half * b * s * (d + 2 * he)
    queried = b * t * (half * (3 * he + d + f) + 4 * d + (2 * d + f if model.dropout else 0))
    scores = b * model.n_head * t * s
    attention = machine.attention
    if attention == "skew" and half * _FLOAT * b * t * s < skew.EAGER_BYTES:
        attention = "eager"
    n_kept, n_passing = _scores_at_once(model, attention, half)
    clusters = clusters_of(model, n_vocab)
    tail = _TAIL_AT_PEAK * sum(clusters.sizes[1:]) / max(1, clusters.n_tail)
    logits = b * t * (clusters.sizes[0] + clusters.n_tail + tail)
    memory = 2 * optim.batch_size * model.n_layer * model.mem_len * d
    layers = model.n_layer * (keyed + queried + n_kept * scores)
    activations = layers + n_passing * scores + 2 * b * t * f + 3.5 * logits + memory
    weights = 2 * sum(count_parameters(model, n_vocab))
    workspace = 2 * fused.WORKSPACE_BYTES if machine.attention == "triton" else 0
    total = int(_WASTE * _FLOAT * (activations + weights)) + state_bytes(config, n_vocab)
    return total + workspace + _BASE_BYTES


def _scores_at_once(model: ModelConfig, attention: str, half: float) -> tuple[float, float]:
    """Return how many numbers a score stands for that backward keeps, and that are there in passing."""
    has_values = model.position == "shaw" and model.shaw_values
    has_distances = model.position in ("relative", "shaw")
    if attention == "triton":
        return 0.0, 0.0
    if attention == "skew":
        return half, half * (4 + has_values) / model.n_head
    if attention == "sdpa":
        return (2 * half, 2 * half) if has_distances else (0.0, half)
    kept = half * (1.25 + (1.25 if model.dropatt else 0) + has_values)
    return kept, (4.5 if has_distances else 2.0) + has_values


def free_disk_bytes(folder: Path) -> int:
    """Return what may still be written where a folder lies."""
    return shutil.disk_usage(folder).free


def check_fits(config: Config, n_vocab: int, device: torch.device, run: Run | None) -> None:
    """Refuse what cannot fit into memory, or onto the disk of the run.

    Raises:
        UserError: the message has the numbers and the flags to lower.
    """
    needed, free = memory_bytes(config, n_vocab), free_bytes(device)
    model, optim = config.model, config.optim
    if free is not None and needed > free:
        raise UserError(
            f"{device}: too little memory; batch_size {optim.batch_size}, tgt_len {model.tgt_len}, "
            f"mem_len {model.mem_len} take about {needed / 1e9:,.1f} GB, {free / 1e9:,.1f} GB are free; "
            f"{LOWER}"
        )
    if run is not None:
        check_disk(config, n_vocab, run, "choose another place with --out, or lower --keep")


def check_disk(config: Config, n_vocab: int, run: Run, remedy: str) -> None:
    """Refuse a run whose disk is too full for the checkpoints that it is yet to write.

    Raises:
        UserError: the message has the numbers and the remedy.
    """
    # The newest, the best, and the one being written; those that are there make room for others.
    n_checkpoints = max(1, config.train.keep + 2 - len(list_checkpoints(run)))
    needed, free = n_checkpoints * state_bytes(config, n_vocab), free_disk_bytes(run.folder)
    if needed > free:
        raise UserError(
            f"{run.folder}: the disk is too full for {n_checkpoints} checkpoint{'s' * (n_checkpoints != 1)}; "
            f"about {needed / 1e6:.0f} MB are needed, {free / 1e6:.0f} MB are free; {remedy}"
        )


def without_length(settings: Settings) -> Config:
    """Build settings whose length is still open."""
    return build({name: sourced for name, sourced in settings.items() if name not in LENGTHS})


def is_timed(settings: Settings) -> bool:
    """Say whether steps must be timed to settle the length: neither steps nor epochs are set."""
    return not any(Known(settings).has(name) for name in ("steps", "epochs"))


class Interrupted(Exception):
    """The user asked to stop before there was anything to save."""


def measure(
    run: Run,
    config: Config,
    tokenizer: Tokenizer,
    *,
    length_s: float,
    started: float,
    should_stop: Callable[[], bool],
) -> Measured:
    """Time steps, an evaluation, a sample and a save on a copy of the training that `config` describes.

    Everything measured is thrown away: the training that follows starts from its own seed, at its own place
    in the text, and random states are as they were.

    Args:
        run: The run; only its store is read, and a temporary folder in it written.
        config: The settings; the length does not matter.
        tokenizer: The run's tokenizer.
        length_s: Seconds that the training should take; the longer, the longer its steps are timed.
        started: `time.monotonic()` when the command began.
        should_stop: Asked between steps.

    Raises:
        Interrupted: `should_stop` said so, between steps or after a KeyboardInterrupt.
        UserError: the device has too little memory.
    """
    try:
        if should_stop():
            raise Interrupted
        return _measure(run, config, tokenizer, length_s, started, should_stop)
    except KeyboardInterrupt:
        if not should_stop():
            raise
        raise Interrupted from None


def _measure(
    run: Run,
    config: Config,
    tokenizer: Tokenizer,
    length_s: float,
    started: float,
    should_stop: Callable[[], bool],
) -> Measured:
    device = choose_device(config.machine.device)
    precision = choose_precision(config.machine.precision, device, training=True)
    cuda = [device.index or 0] if device.type == "cuda" else []
    with run_on(config.machine), torch.random.fork_rng(cuda), open_split(run.folder, "train") as store:
        batches = Batches(store, config.optim.batch_size, config.model.tgt_len)
        try:
            state = TrainState.start(config, batches, tokenizer.n_vocab, device=device, precision=precision)
            compile_s, fault = _measure_compilation(state) if config.machine.compile else (0.0, None)
            step_s = _measure_steps(state, config, length_s, should_stop)
            eval_s, eval_token_s = _measure_evaluation(state, run, tokenizer, should_stop)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory(config, device) from error
        save_s = _measure_save(state, run, config, tokenizer)
    return Measured(
        step_s=step_s,
        eval_s=eval_s,
        eval_token_s=eval_token_s,
        save_s=save_s,
        spent_s=time.monotonic() - started,
        compile_s=compile_s,
        compile_fault=fault,
    )


def _measure_compilation(state: TrainState) -> tuple[float, str | None]:
    """Compile, and return the seconds that it took, and why it failed.

    What has been compiled is found again by the training, in the same process, within hundredths of a second.
    """
    begun = time.perf_counter()
    fault = state.compile()
    return time.perf_counter() - begun, fault


def _measure_steps(
    state: TrainState, config: Config, length_s: float, should_stop: Callable[[], bool]
) -> float:
    """Return the mean seconds of a step with as much memory as the text can fill.

    The mean and not the median, over more than a moment: whatever slows a machine down now and then will do
    so during the training too.
    """
    wanted_s = min(MEASURED_S, MEASURED_SHARE * length_s)
    model, per_epoch = config.model, state.batches.steps_per_epoch
    n_rows = max(state.model.lengths.n_rows_at_start, min(model.mem_len, (per_epoch - 1) * model.tgt_len))
    took: list[float] = []
    begun = time.perf_counter()
    while len(took) <= MEASURED_STEPS or time.perf_counter() - begun < wanted_s:
        if should_stop():
            raise Interrupted
        # Neither the first step of an epoch, where memory is empty, nor the last, where the segment is short.
        state.counters.step = min(1 + len(took) % max(per_epoch - 2, 1), per_epoch - 1)
        state.memory = state.blank_memory(n_rows)
        before = time.perf_counter()
        optimize(state, rate=0.0, clip=config.optim.clip)
        took.append(time.perf_counter() - before)
    # The first step pays for what libraries set up.
    return statistics.mean(took[1:])


def _measure_evaluation(
    state: TrainState, run: Run, tokenizer: Tokenizer, should_stop: Callable[[], bool]
) -> tuple[float, float]:
    """Return the seconds of a sample, and those of scoring one token."""
    info = read_store_info(run.folder)
    if "valid" not in info.splits or info.splits["valid"].n_tokens < 2:
        return 0.0, 0.0
    precision = scoring_precision(state.device, state.precision)
    n_tokens = min(info.splits["valid"].n_tokens, MEASURED_EVAL_TOKENS)
    with open_split(run.folder, "valid") as valid, open_counts(run.folder, "valid") as counts:
        done, total, begun = 0, 1, time.perf_counter()
        scoring = evaluate(state.model, valid, counts, n_tokens=n_tokens, precision=precision)
        for event in scoring:
            if should_stop():
                raise Interrupted
            if isinstance(event, EvalProgress):
                done, total = event.done, event.total
            if time.perf_counter() - begun > MEASURED_EVAL_S:
                break
        run_token_s = (time.perf_counter() - begun) / max(done, 1)
    begun = time.perf_counter()
    sample_text(state.model, tokenizer, info.start_id, seed=0, precision=precision)
    return time.perf_counter() - begun, run_token_s * total / n_tokens


def _measure_save(state: TrainState, run: Run, config: Config, tokenizer: Tokenizer) -> float:
    with tempfile.TemporaryDirectory(dir=run.folder, prefix=".measure.", suffix=".tmp") as folder:
        begun = time.perf_counter()
        save_checkpoint(
            Run(Path(folder)),
            state.model,
            step=0,
            metadata=describe_weights(config.model, tokenizer),
            tensors=state.tensors(),
            values=state.values(),
        )
        return time.perf_counter() - begun


def leave_out_failed_compile(
    settings: Settings, measured: Measured | None
) -> Generator[Event, None, Settings]:
    """Say that compiling failed while steps were timed, and leave it out, so that it is not tried again."""
    if measured is None or measured.compile_fault is None:
        return settings
    yield Notice(f"compile: failed, {measured.compile_fault}; going on uncompiled")
    return settings | {"compile": Sourced(False, "plan: failed here")}
