"""The state of a training, saved whole and restored whole, and the step that moves it on.

`state.safetensors` holds

    optimizer.<optimizer>.<key>.<parameter>    as torch names them: exp_avg, exp_avg_sq, momentum_buffer, step
    memory.<layer>                             [B, M, D], the streams of all parts one after the other
    memory.position                            [B], tokens that each stream has read since memory was empty
    memory.n_document                          [B], rows of the running document, with
                                               reset_memory_at_documents only
    random.cpu, random.<device>                states of the random generators

and `state.json` the counters, the gradient scaler of fp16, the environment (what must be equal for bit-exact
repetition), the settings that may not change on resume, but for those of the text, and the length of
metrics.jsonl in bytes. Position in the text and learning rate are functions of the step and so need no place.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from txlcli import UserError
from txlcli.checkpoint import load_state, load_weights
from txlcli.config import Config
from txlcli.data import Batches, Segment
from txlcli.device import Precision, autocast, is_out_of_memory
from txlcli.model import Memory, TransformerXL
from txlcli.positions import AbsoluteSinusoids
from txlcli.train.compiled import Forward, Shape, compile_forward, quietly, reason
from txlcli.train.optim import build_optimizers, move, set_learning_rate

_MOST = 1 << 53
_MOMENTS = {"step", "exp_avg", "exp_avg_sq"}
_KEYS = {"adam": _MOMENTS, "adamw": _MOMENTS, "muon": {"momentum_buffer"}}
"""What the state of each optimizer holds for a parameter; plain SGD is not here, since it holds nothing."""


@dataclass
class Counters:
    """What a training counts and remembers as plain numbers.

    Attributes:
        step: Steps done, skipped ones too.
        tokens: Targets passed since the run began.
        best_step: Step of the best evaluation; None: none yet.
        best_nll: Its nats per token.
        n_since_best: Evaluations since then.
        evaluated_step: Step of the last evaluation that was completed; 0: none.
        is_scored_whole: The last evaluation after this step scored all held-out text.
        n_skipped: Steps without an update, because loss or gradient was not finite.
        n_skipped_in_row: How many of them came last without a good one between.
        n_overflows: Steps without an update, because fp16 could not hold the scaled gradient.
        smoothed: Moving average of the loss in nats per token.
        lowest: The lowest that average has been.
        is_alarmed: It was said that the loss is far above its best.
        elapsed_s: Seconds of training so far.
    """

    step: int = 0
    tokens: int = 0
    best_step: int | None = None
    best_nll: float | None = None
    n_since_best: int = 0
    evaluated_step: int = 0
    is_scored_whole: bool = False
    n_skipped: int = 0
    n_skipped_in_row: int = 0
    n_overflows: int = 0
    smoothed: float | None = None
    lowest: float | None = None
    is_alarmed: bool = False
    elapsed_s: float = 0.0


@dataclass(frozen=True)
class StepResult:
    """What a step measured.

    Attributes:
        loss: Mean nats per token.
        grad_norm: Norm of the gradient before clipping.
        n_targets: Tokens that the loss is the mean of.
        fault: Why there was no update; None: there was one.
        is_overflow: The fault is fp16's scale, which has been lowered; nothing is wrong with the weights.
        compile_fault: Why the step, and all after it, had to run uncompiled; None: no such thing happened.
    """

    loss: float
    grad_norm: float
    n_targets: int
    fault: str | None = None
    is_overflow: bool = False
    compile_fault: str | None = None


@dataclass
class TrainState:
    """Everything that the next step depends on.

    Attributes:
        model: The bare model, in training mode.
        optimizers: By name; each parameter belongs to one.
        scaler: Loss scale of fp16; None in other precisions.
        batches: The training text as parallel streams.
        memory: One a part of the streams; None: empty.
        counters: Plain numbers.
        device: Where the model lies.
        precision: Of the matrix products.
        compiled: The compiled forward; None: steps run uncompiled.
    """

    model: TransformerXL
    optimizers: dict[str, Optimizer]
    scaler: torch.amp.GradScaler | None
    batches: Batches
    memory: list[Memory | None]
    device: torch.device
    precision: Precision
    counters: Counters = field(default_factory=Counters)
    compiled: Forward | None = None

    @classmethod
    def start(
        cls,
        config: Config,
        batches: Batches,
        n_vocab: int,
        *,
        device: torch.device,
        precision: Precision,
        init: Path | None = None,
    ) -> "TrainState":
        """Build the state before the first step: the seed decides the weights and all that follows.

        Args:
            config: The settings.
            batches: The training text.
            n_vocab: Size of the vocabulary.
            device: Where to train.
            precision: Of the matrix products.
            init: Folder of a checkpoint whose weights to start from.
        """
        torch.manual_seed(config.optim.seed)
        model = TransformerXL(config.model, n_vocab)
        if init is not None:
            load_weights(init, model)
        model.to(device).train()
        model.use_attention(config.machine.attention)
        n_parts = min(config.optim.accumulate, batches.n_stream)
        return cls(
            model=model,
            optimizers=build_optimizers(model, config.optim),
            scaler=torch.amp.GradScaler(device.type) if precision == "fp16" else None,
            batches=batches,
            memory=[None] * n_parts,
            device=device,
            precision=precision,
        )

    def parts(self) -> list[slice]:
        """Return the rows of each part in which the streams are run, equal to one stream."""
        n_parts, n_stream = len(self.memory), self.batches.n_stream
        bounds = [i * n_stream // n_parts for i in range(n_parts + 1)]
        return [slice(*pair) for pair in itertools.pairwise(bounds)]

    def compile(self) -> str | None:
        """Compile the forward and backward of a step, by running them; return why that failed, None if not.

        Nothing else changes, random states neither. Steps run compiled only after this.
        """
        shape = Shape.usual(self.batches, self.model.lengths.mem_len)
        before = _random_states(self.device)
        try:
            with quietly():
                self.compiled = compile_forward(self.model, shape)
                _run_parts(
                    self, _blank_segment(self.batches, shape.n_tokens), self.blank_memory(shape.n_memory)
                )
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self.compiled = None
            return reason(error)
        finally:
            self.model.zero_grad(set_to_none=True)
            _restore_random(before, self.device)
        return None

    def blank_memory(self, n_rows: int | None) -> list[Memory | None]:
        """Return a memory of `n_rows` zeros for each part; None: an empty one."""
        return [
            None if n_rows is None else _zeros(self, part.stop - part.start, n_rows) for part in self.parts()
        ]

    def forget(self) -> None:
        """Let all streams restart with an empty memory."""
        self.memory = [None] * len(self.memory)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the state but the weights, by the names of the module's docstring."""
        names: dict[Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        tensors = {
            f"optimizer.{kind}.{key}.{names[parameter]}": value
            for kind, optimizer in self.optimizers.items()
            for parameter, entries in optimizer.state.items()
            for key, value in entries.items()
            if isinstance(value, Tensor)
        }
        filled = [part for part in self.memory if part is not None]
        if filled:
            for layer, rows in enumerate(zip(*(part.hidden for part in filled), strict=True)):
                tensors[f"memory.{layer}"] = torch.cat(rows)
            tensors["memory.position"] = torch.cat([part.position for part in filled])
            n_document = [part.n_document for part in filled if part.n_document is not None]
            if n_document:
                tensors["memory.n_document"] = torch.cat(n_document)
        return tensors | _random_states(self.device)

    def values(self) -> dict[str, object]:
        """Return the state's plain numbers."""
        return {
            "counters": dataclasses.asdict(self.counters),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }

    def restore(self, path: Path) -> dict[str, Any]:
        """Take over the state that a checkpoint's folder holds, and return its `state.json`.

        Raises:
            UserError: the checkpoint is damaged or of another model.
        """
        tensors, values = load_state(path)
        load_weights(path, self.model)
        try:
            self.counters = read_counters(values, path)
            if self.scaler is not None and values["scaler"]:
                self.scaler.load_state_dict(values["scaler"])
            self._restore_optimizers(tensors)
            self._restore_memory(tensors)
            _restore_random(tensors, self.device)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            text = " ".join(str(error).split())
            raise UserError(f"{path}: the training state is damaged; {text}") from error
        return values

    def _restore_optimizers(self, tensors: Mapping[str, Tensor]) -> None:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        found: dict[tuple[str, str], dict[str, Tensor]] = {}
        for full, tensor in tensors.items():
            if full.startswith("optimizer."):
                _, kind, key, name = full.split(".", 3)
                found.setdefault((kind, name), {})[key] = tensor
        for kind, optimizer in self.optimizers.items():
            if kind not in _KEYS:
                continue
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            state = {}
            for index, parameter in enumerate(parameters):
                entries = found.pop((kind, names[parameter]), None)
                if entries is None:
                    continue
                if entries.keys() != _KEYS[kind]:
                    raise ValueError(f"the optimizer's state of {names[parameter]} is incomplete")
                if any(t.shape != (() if key == "step" else parameter.shape) for key, t in entries.items()):
                    raise ValueError(f"the optimizer's state of {names[parameter]} has another shape")
                state[index] = entries
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        if found:
            raise ValueError(f"it has optimizer state that is not ours: {sorted(found)[0]}")

    def _restore_memory(self, tensors: Mapping[str, Tensor]) -> None:
        rows = [tensors[f"memory.{i}"] for i in range(len(self.model.layers)) if f"memory.{i}" in tensors]
        if not rows:
            return self.forget()
        lengths, n_rows = self.model.lengths, rows[0].shape[1]
        expected = (self.batches.n_stream, n_rows, self.model.d_model)
        if len(rows) != len(self.model.layers) or any(t.shape != expected for t in rows):
            raise ValueError("the memory has another shape than the model's")
        if any(t.dtype != torch.float32 for t in rows):
            raise ValueError("the memory must be float32")
        if n_rows > lengths.mem_len:
            raise ValueError(f"the memory has {n_rows} rows, more than mem_len {lengths.mem_len}")
        position = tensors.get("memory.position")
        if position is None and not self._positions_run_on():
            position = torch.zeros(self.batches.n_stream, dtype=torch.int64)  # written before there were any
        if position is None or position.shape != (self.batches.n_stream,) or position.dtype != torch.int64:
            raise ValueError("the memory has no position for each stream")
        on_device, position = [t.to(self.device) for t in rows], position.to(self.device)
        n_document = self._rows_of_documents(tensors, n_rows)
        self.memory = [
            Memory(
                tuple(t[part] for t in on_device),
                position[part],
                None if n_document is None else n_document[part],
            )
            for part in self.parts()
        ]
        return None

    def _rows_of_documents(self, tensors: Mapping[str, Tensor], n_rows: int) -> Tensor | None:
        if self.model.document_end is None:
            return None
        found = tensors.get("memory.n_document")
        if found is None or found.shape != (self.batches.n_stream,) or found.dtype != torch.int64:
            raise ValueError("the memory has no number of the running document's rows for each stream")
        if found.min() < 0 or found.max() > n_rows:
            raise ValueError(f"the running document has more or less rows than the memory's {n_rows}")
        return found.to(self.device)

    def _positions_run_on(self) -> bool:
        positions = self.model.positions
        return isinstance(positions, AbsoluteSinusoids) and positions.runs_on


def optimize(state: TrainState, *, rate: float, clip: float) -> StepResult:
    """Do one step: all streams one segment on, one update of the weights.

    The streams are run in equal parts, each with its own rows of memory; losses are summed over tokens and
    divided by the number of tokens of all parts, so the number of parts changes nothing but rounding.

    Where loss or gradient norm is not finite nothing is updated: the step counts, the text moves on, and
    the memory, which may hold the same poison, is thrown away. An fp16 gradient beyond the type's range is
    no such fault: its loss and memory are good, and only the scale was too large.
    """
    segment = state.batches.segment(state.counters.step)
    state.counters.step += 1
    state.counters.is_scored_whole = False
    state.counters.tokens += segment.n_targets
    if segment.first_of_epoch:
        state.forget()
    optimizers = list(state.optimizers.values())
    set_learning_rate(optimizers, rate)
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)

    losses, memory, compile_fault = _differentiate(state, segment)
    if state.scaler is not None:
        for optimizer in optimizers:
            state.scaler.unscale_(optimizer)
    # Clipping a gradient that turns out not to be finite does no harm: it is not used.
    norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), clip if clip > 0 else math.inf)
    # The only wait for the device in a step: whether to update depends on these two numbers.
    loss_value, norm_value = torch.stack([torch.stack(losses).sum(), norm]).tolist()

    fault, is_overflow = None, False
    if not math.isfinite(loss_value):
        fault = "the loss is not finite"
    elif not math.isfinite(norm_value):
        fault = "the gradient norm is not finite"
        is_overflow = state.scaler is not None
    if fault is None:
        move(optimizers)
    if state.scaler is not None:
        state.scaler.update()
    state.memory = memory
    if fault is not None and not is_overflow:
        state.forget()
    return StepResult(loss_value, norm_value, segment.n_targets, fault, is_overflow, compile_fault)


def _differentiate(
    state: TrainState, segment: Segment
) -> tuple[list[Tensor], list[Memory | None], str | None]:
    """Compute loss, gradients and new memory of a step, and why it had to be done uncompiled.

    A compiled graph may fail at any call, in backward too, so the whole step is then repeated without.
    """
    if state.compiled is None:
        return *_run_parts(state, segment, state.memory), None
    before = _random_states(state.device)
    try:
        with quietly():
            return *_run_parts(state, segment, state.memory), None
    except Exception as error:
        if is_out_of_memory(error):
            raise
        compile_fault = reason(error)
    state.compiled = None
    state.model.zero_grad(set_to_none=True)
    _restore_random(before, state.device)
    return *_run_parts(state, segment, state.memory), compile_fault


def _run_parts(
    state: TrainState, segment: Segment, memory: Sequence[Memory | None]
) -> tuple[list[Tensor], list[Memory | None]]:
    """Add the gradients of all parts of a segment; return their losses and their new memory."""
    forward = state.model if state.compiled is None else state.compiled
    losses, new_memory = list[Tensor](), list[Memory | None]()
    for part, past in zip(state.parts(), memory, strict=True):
        tokens = segment.tokens[part].to(state.device, non_blocking=True)
        targets = segment.targets[part].to(state.device, non_blocking=True)
        with autocast(state.device, state.precision):
            nll, new = forward(tokens, past, targets)  # [B, T]
        if segment.weights is not None:
            nll = nll * segment.weights[part].to(state.device, non_blocking=True)
        loss = nll.sum() / segment.n_targets
        (loss if state.scaler is None else state.scaler.scale(loss)).backward()
        losses.append(loss.detach())
        new_memory.append(new)
    return losses, new_memory


def _blank_segment(batches: Batches, n_tokens: int) -> Segment:
    """Return a segment of token 0, which lies in memory as those of `Batches` do."""
    window = torch.zeros(batches.n_stream, n_tokens + 1, dtype=torch.int64)
    return Segment(window[:, :-1], window[:, 1:], None, False, batches.n_stream * n_tokens)


def _zeros(state: TrainState, n_stream: int, n_rows: int) -> Memory:
    shape = (n_stream, n_rows, state.model.d_model)
    hidden = tuple(torch.zeros(shape, device=state.device) for _ in state.model.layers)
    n_each = torch.full((n_stream,), n_rows, device=state.device)
    return Memory(hidden, n_each, None if state.model.document_end is None else n_each.clone())


def is_finite(tensors: Sequence[Tensor]) -> bool:
    """Say whether all numbers of all tensors are finite."""
    return all(bool(torch.isfinite(t).all()) for t in tensors if t.is_floating_point())


def read_counters(values: Mapping[str, Any], path: Path) -> Counters:
    """Read the counters out of a checkpoint's `state.json`.

    Raises:
        UserError: they are damaged.
    """
    counters = values.get("counters")
    kinds = {"best_step": int, "best_nll": float, "smoothed": float, "lowest": float}
    names = {f.name for f in dataclasses.fields(Counters)}
    fresh = Counters()
    if not isinstance(counters, dict) or set(counters) != names:
        raise UserError(f"{path}: state.json has no counters of this version; damaged, or of another txl")
    for name, value in counters.items():
        kind = kinds.get(name, type(getattr(fresh, name)))
        is_sound = type(value) is kind or (value is None and name in kinds)
        if type(value) is int:
            is_sound &= 0 <= value <= _MOST
        if not is_sound:
            raise UserError(
                f"{path}: state.json: `{name}` must be {kind.__name__}, got {value!r:.40}; damaged"
            )
    return Counters(**counters)


def _random_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the random generators that a step draws from."""
    states = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["random.cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        states["random.mps"] = torch.mps.get_rng_state()
    return states


def _restore_random(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(tensors["random.cpu"])
    own = tensors.get(f"random.{device.type}")
    if own is not None and device.type == "cuda":
        torch.cuda.set_rng_state(own, device)
    elif own is not None and device.type == "mps":
        torch.mps.set_rng_state(own)
