"""The machine that computes: device, precision, memory, and what bit-exact repetition needs to be equal."""

import os
import platform
import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

import torch

from txlcli import UserError

Precision = Literal["fp32", "bf16", "fp16"]

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")

# What torch says in a plain RuntimeError where memory has run out: its allocator for CPUs on Linux and macOS,
# that on Windows, the C++ library, CUDA's driver and Metal, Metal for one tensor, cuBLAS. Last: a size beyond
# any memory.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "std::bad_alloc",
    "out of memory",
    "Invalid buffer size",
    "STATUS_ALLOC_FAILED",
    "Storage size calculation overflowed",
)


def choose_device(name: str) -> torch.device:
    """Turn `auto`, `cpu`, `cuda`, `cuda:N` or `mps` into a device of this machine.

    Raises:
        UserError: the machine has no such device, or the name is none.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    if name == "mps":
        if torch.backends.mps.is_available():
            return torch.device("mps")
        raise UserError("--device: this machine has no mps device; got `mps`; use --device cpu")
    if re.fullmatch(r"cuda(:(0|[1-9]\d*))?", name, re.ASCII):
        n_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if n_devices == 0:
            raise UserError(f"--device: torch sees no CUDA device here; got `{name}`; use --device cpu")
        if name != "cuda" and name not in [f"cuda:{n}" for n in range(n_devices)]:
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
        with torch.cuda.device(device):  # torch asks the current one
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
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
    if name == "bf16" and device.type == "cuda" and not has_bf16(device):
        raise UserError("--precision: this GPU has no bf16 arithmetic; got `bf16`; use fp16 or fp32")
    if name not in ("fp32", "bf16", "fp16"):
        raise UserError(f"--precision: unknown precision; got `{name}`; choose from auto, fp32, bf16, fp16")
    return name  # type: ignore[return-value]  # checked just above


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Return the context in which matrix products run in `precision`."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])


def free_bytes(device: torch.device) -> int | None:
    """Return the memory that is free on a device; None: the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    free = []
    if _MEMINFO.exists():
        lines = _MEMINFO.read_text(encoding="ascii", errors="replace").splitlines()
        free += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    # Inside a container the limit of its control group counts; what caches files can be had back.
    try:
        limit = int((_CGROUP / "memory.max").read_text(encoding="ascii"))
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        lines = (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()
        stat = dict(line.split() for line in lines)
        free.append(max(0, limit - used + int(stat["active_file"]) + int(stat["inactive_file"])))
    except (OSError, ValueError, KeyError):
        pass  # no such limit here
    return min(free, default=None)


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error means that memory ran out, on whatever device and system."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


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
