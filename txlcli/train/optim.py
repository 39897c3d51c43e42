"""The learning-rate curve, and which optimizer moves which weights."""

import inspect
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from txlcli import UserError
from txlcli.config import OptimConfig

MUON_FACTOR = 10.0
"""Muon's rate over that of all other weights; an orthogonalized update has no scale of its own."""


def learning_rate(step: int, optim: OptimConfig, steps: int) -> float:
    """Return the rate of a step, a function of its arguments and of nothing stored.

        step <= warmup      lr step / warmup                          so that the first step is not at zero
        cosine              lr_end + (lr - lr_end) (1 + cos(pi x)) / 2
        linear              lr_end + (lr - lr_end) (1 - x)
        inv_sqrt            lr sqrt(w / step), at least lr_end
        constant            lr

    with w = max(warmup, 1) and x = (step - w) / (steps - w), from 0 at the end of the warm-up to 1 at the
    last step.

    Args:
        step: The step, from 1 to `steps`.
        optim: Rates, warm-up and shape.
        steps: Length of the run.
    """
    if step <= optim.warmup:
        return optim.lr * step / optim.warmup
    start = max(optim.warmup, 1)
    x = min(1.0, (step - start) / max(steps - start, 1))
    fall = optim.lr - optim.lr_end
    if optim.schedule == "cosine":
        return optim.lr_end + fall * (1 + math.cos(math.pi * x)) / 2
    if optim.schedule == "linear":
        return optim.lr_end + fall * (1 - x)
    if optim.schedule == "inv_sqrt":
        return max(optim.lr_end, optim.lr * math.sqrt(start / step))
    return optim.lr


def has_muon() -> bool:
    """Say whether this torch has the Muon optimizer (2.9 and newer)."""
    return hasattr(torch.optim, "Muon")


def refuse_missing_muon() -> None:
    """Refuse Muon where this torch has none.

    Raises:
        UserError: it has none; the message names what has.
    """
    if not has_muon():
        raise UserError(
            f"--optimizer: torch {torch.__version__} has no Muon; got `muon`; "
            "use adamw, or torch 2.9 or newer"
        )


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Say whether Muon takes this weight: the matrices between hidden states.

    Not the embedding and the head, whose rows are tokens, nor their projections; not the distance projection
    W_r, which reads no hidden state but sinusoids, nor tables of positions; not biases and norms.
    """
    is_matrix = name.startswith("layers.") and name.endswith(".weight") and parameter.ndim == 2
    return is_matrix and not name.endswith("attention.r.weight")


def build_optimizers(model: nn.Module, optim: OptimConfig) -> dict[str, Optimizer]:
    """Return the optimizers by name; every parameter belongs to exactly one.

    Weight decay pulls on matrices and tables: biases, norms and the two query biases are free of it. Every
    group of parameters carries the factor of its rate as `lr_factor`.

    Raises:
        UserError: Muon is asked for and this torch has none.
    """
    _leave_compiler_alone()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decay = optim.weight_decay
    if optim.optimizer != "muon":
        return {optim.optimizer: _elementwise(optim.optimizer, named, decay)}
    refuse_missing_muon()
    matrices = [p for name, p in named if is_hidden_matrix(name, p)]
    others = [(name, p) for name, p in named if not is_hidden_matrix(name, p)]
    group = {"params": matrices, "lr_factor": MUON_FACTOR}
    return {
        "muon": torch.optim.Muon([group], lr=optim.lr * MUON_FACTOR, weight_decay=decay),
        "adamw": _elementwise("adamw", others, decay),
    }


def _elementwise(kind: str, named: Sequence[tuple[str, nn.Parameter]], decay: float) -> Optimizer:
    # Fused: one pass over weights and state; each element's arithmetic is its own, so it repeats bit for bit.
    is_decayed = [p.ndim >= 2 and not name.endswith("bias") for name, p in named]
    groups = [
        {
            "params": [p for (_, p), is_ours in zip(named, is_decayed, strict=True) if is_ours == wanted],
            "lr_factor": 1.0,
            "weight_decay": decay if wanted else 0.0,
        }
        for wanted in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    is_fused = named[0][1].device.type in ("cpu", "cuda")
    optimizers = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    optimizer: Optimizer = optimizers[kind](groups, lr=0.0, fused=is_fused)
    return optimizer


def _leave_compiler_alone() -> None:
    """Keep torch from loading its compiler for an optimizer, which takes a second and is of no use here.

    It does so to keep some methods out of what is compiled, unless it finds on them that this is done.
    Nothing here compiles an optimizer.
    """
    for name in dir(Optimizer):
        method = getattr(Optimizer, name)
        bare = inspect.unwrap(method) if inspect.isfunction(method) else method
        if bare is not method and not hasattr(bare, "__dynamo_disable"):
            setattr(bare, "__dynamo_disable", bare)  # torch's own, which nobody declares


def move(optimizers: Iterable[Optimizer]) -> None:
    """Let each optimizer move its weights along their gradients.

    As its `step`, but for the same reason without what that is wrapped in.
    """
    with torch.no_grad():
        for optimizer in optimizers:
            inspect.unwrap(type(optimizer).step)(optimizer)


def set_learning_rate(optimizers: Iterable[Optimizer], rate: float) -> None:
    """Set every group to `rate` times its factor."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * group["lr_factor"]
