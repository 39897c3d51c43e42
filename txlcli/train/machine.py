"""The machine while a training runs on it: threads, determinism, and memory that runs out."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from txlcli import UserError
from txlcli.config import Config, MachineConfig
from txlcli.device import Precision, repeat_exactly

LOWER = "lower --batch-size, --tgt-len, --mem-len or --d-model, or raise --accumulate"


@contextmanager
def run_on(machine: MachineConfig) -> Iterator[None]:
    """Set threads and determinism for this process while the block runs."""
    threads, is_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    if machine.threads is not None:
        torch.set_num_threads(machine.threads)
    if machine.deterministic:
        repeat_exactly()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if machine.deterministic:  # else it would load torch's compiler, which takes a second
            torch.use_deterministic_algorithms(is_deterministic)


def scoring_precision(device: torch.device, precision: Precision) -> Precision:
    """Return the precision of evaluations and samples in training: exact on a CPU, else that of training."""
    return "fp32" if device.type == "cpu" else precision


def out_of_memory(config: Config, device: torch.device, checkpoint: str = "") -> UserError:
    """Word the error for a step that did not fit: which flags to lower, and what is saved."""
    model, optim = config.model, config.optim
    return UserError(
        f"{device}: out of memory at batch_size {optim.batch_size}, tgt_len {model.tgt_len}, "
        f"mem_len {model.mem_len}; {LOWER}" + (f"; last checkpoint: {checkpoint}" if checkpoint else "")
    )
