"""The machine that computes: device, precision, and what bit-exact repetition needs to be equal."""

import os
import platform
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

import torch

from txlcli import UserError

Precision = Literal["fp32", "bf16", "fp16"]

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(name: str) -> torch.device:
    """Turn `auto`, `cpu`, `cuda`, `cuda:N` or `mps` into a device of this machine.

    Raises:
        UserError: the machine has no such device, or the name is none.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind == "cpu" and not index:
        return torch.device("cpu")
    if kind == "mps" and not index:
        if torch.backends.mps.is_available():
            return torch.device("mps")
        raise UserError("--device: this machine has no mps device; got `mps`; use --device cpu")
    if kind == "cuda" and (not index or index.isdecimal()):
        n_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if n_devices == 0:
            raise UserError(f"--device: torch sees no CUDA device here; got `{name}`; use --device cpu")
        if index and int(index) >= n_devices:
            raise UserError(
                f"--device: no such device; got `{name}`; there are cuda:0 to cuda:{n_devices - 1}"
            )
        return torch.device(name)
    raise UserError(f"--device: unknown device; got `{name}`; choose from auto, cpu, cuda, cuda:N, mps")


def has_bf16(device: torch.device) -> bool:
    """Say whether the device multiplies bfloat16 in hardware.

    On a CPU that is a fixed rule, avx512_bf16 or AMX as the operating system reports them: a timing would
    make two runs of one command differ.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    return device.type == "cpu" and bool({"avx512_bf16", "amx_bf16"} & _cpu_facts()[1])


def choose_precision(name: str, device: torch.device, *, training: bool) -> Precision:
    """Turn `auto`, `fp32`, `bf16` or `fp16` into a precision that the device has.

    Training takes bf16 by itself where the device multiplies it in hardware; everything else is fp32 unless
    asked.

    Raises:
        UserError: the device cannot compute in the precision asked for.
    """
    if name == "auto":
        return "bf16" if training and has_bf16(device) else "fp32"
    if name == "fp16" and device.type == "cpu":
        raise UserError("--precision: a CPU has no fp16 arithmetic; got `fp16`; use bf16 or fp32")
    if name == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise UserError("--precision: this GPU has no bf16 arithmetic; got `bf16`; use fp16 or fp32")
    if name not in ("fp32", "bf16", "fp16"):
        raise UserError(f"--precision: unknown precision; got `{name}`; choose from auto, fp32, bf16, fp16")
    return name  # type: ignore[return-value]  # checked just above


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Return the context in which matrix products run in `precision`."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])


def repeat_exactly() -> None:
    """Allow only operations that repeat bit for bit, for the rest of this process."""
    # cuBLAS repeats its sums only with a workspace of its own, and reads this when it starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def environment(device: torch.device, precision: str) -> dict[str, str | int]:
    """Return what must be equal for two runs of the same settings to be equal bit for bit."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_facts()[0]
    facts: dict[str, str | int] = {
        "device": device.type,
        "processor": name,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "precision": precision,
    }
    if device.type == "cuda":  # there it chooses other operations; those of a CPU repeat anyway
        facts["deterministic"] = "on" if torch.are_deterministic_algorithms_enabled() else "off"
    return facts


def _cpu_facts() -> tuple[str, set[str]]:
    """Return the CPU's model name and feature flags (empty where the system does not tell)."""
    name, flags = platform.processor() or platform.machine(), set[str]()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() == "flags":
                flags = set(value.split())
            if not line.strip():
                break  # one processor tells for all
    return name, flags
