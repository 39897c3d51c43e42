from types import SimpleNamespace

import numpy as np
import pytest
import torch

from txlcli import UserError, device
from txlcli.device import (
    autocast,
    choose_device,
    choose_precision,
    environment,
    free_bytes,
    has_bf16,
    is_out_of_memory,
)

CPU = torch.device("cpu")
has_cuda = torch.cuda.is_available()


def test_a_cpu_is_always_there():
    assert choose_device("cpu") == CPU
    assert choose_device("auto").type in ("cpu", "cuda", "mps")


@pytest.mark.skipif(has_cuda, reason="this machine has a GPU, so cuda is no error")
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_missing_gpu_is_refused_by_name(name):
    with pytest.raises(UserError) as error:
        choose_device(name)
    assert str(error.value) == f"--device: torch sees no CUDA device here; got `{name}`; use --device cpu"


@pytest.fixture
def two_gpus(monkeypatch):
    """Two GPUs of other generations, of which 0 is the current one: the Turing and the Ampere of Nvidia."""
    majors, current = [7, 8], [0]

    class Current:
        def __init__(self, device):
            self.index = device.index or 0

        def __enter__(self):
            self.before, current[0] = current[0], self.index

        def __exit__(self, *_):
            current[0] = self.before

    monkeypatch.setattr(torch.version, "cuda", "12.4")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(majors))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Current)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(major=majors[index])
    )
    # As it is there: every such GPU holds numbers in bfloat16, and older ones compute with others.
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda index: True)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    "name",
    [
        *("gpu", "", "cpu:", "cpu:0", "mps:", "mps:0", " cuda"),
        *(
            "cuda:",
            "cuda:x",
            "cuda:01",
            "cuda:00",
            "cuda:-1",
            "cuda:+1",
            "cuda:1 ",
            "cuda:\u0661",
            "cuda:\u00b9",
        ),
    ],
)
def test_an_unknown_device_is_refused_by_name(name):
    with pytest.raises(UserError) as error:
        choose_device(name)
    assert str(error.value) == (
        f"--device: unknown device; got `{name}`; choose from auto, cpu, cuda, cuda:N, mps"
    )


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_is_taken_by_its_number():
    assert [str(choose_device(name)) for name in ("cuda", "cuda:0", "cuda:1")] == ["cuda", "cuda:0", "cuda:1"]
    for name in ("cuda:2", "cuda:10", "cuda:" + "9" * 5000):
        with pytest.raises(UserError) as error:
            choose_device(name)
        assert str(error.value) == f"--device: no such device; got `{name}`; there are cuda:0 to cuda:1"


def test_a_cpu_has_no_fp16():
    with pytest.raises(
        UserError, match=r"^--precision: a CPU has no fp16 arithmetic; got `fp16`; use bf16 or fp32$"
    ):
        choose_precision("fp16", CPU, training=True)


def test_only_training_takes_bf16_by_itself(monkeypatch):
    for flags, expected in [
        ({"avx512_bf16"}, "bf16"),
        ({"amx_bf16"}, "bf16"),
        ({"avx2"}, "fp32"),
        (set(), "fp32"),
    ]:
        monkeypatch.setattr(device, "_cpu_facts", lambda flags=flags: ("some CPU", flags))
        assert has_bf16(CPU) == (expected == "bf16")
        assert choose_precision("auto", CPU, training=True) == expected
        assert choose_precision("auto", CPU, training=False) == "fp32"
        assert choose_precision("bf16", CPU, training=False) == "bf16"


@pytest.mark.usefixtures("two_gpus")
def test_only_a_gpu_that_multiplies_bf16_in_hardware_has_it():
    old, new = torch.device("cuda:0"), torch.device("cuda:1")
    assert (has_bf16(old), has_bf16(new), has_bf16(torch.device("cuda"))) == (False, True, False)
    assert choose_precision("auto", old, training=True) == "fp32"
    assert choose_precision("auto", new, training=True) == "bf16"
    assert choose_precision("bf16", new, training=False) == "bf16"
    with pytest.raises(UserError) as error:
        choose_precision("bf16", old, training=True)
    assert str(error.value) == ("--precision: this GPU has no bf16 arithmetic; got `bf16`; use fp16 or fp32")


@pytest.fixture
def memory_files(tmp_path, monkeypatch):
    """A system's files about memory, in a folder: 8 GB are available, of a container 2 GB minus 1.9 GB."""
    monkeypatch.setattr(device, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(device, "_CGROUP", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal: 9000000 kB\nMemFree: 100 kB\nMemAvailable: 8000000 kB\n")
    (tmp_path / "memory.max").write_text("2000000000\n")
    (tmp_path / "memory.current").write_text("1900000000\n")
    (tmp_path / "memory.stat").write_text("anon 1600000000\nactive_file 7\ninactive_file 20\nshmem 5\n")
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, 100_000_027),
        ({"memory.current": "2100000000"}, 0),  # for a moment it may be above
        ({"memory.max": "max"}, 8_192_000_000),
        ({"memory.max": "20000000000"}, 8_192_000_000),
        ({"memory.max": None}, 8_192_000_000),
        ({"memory.stat": "anon 9"}, 8_192_000_000),
        ({"meminfo": None}, 100_000_027),
        ({"meminfo": "MemTotal: 9 kB", "memory.max": None}, None),
    ],
)
def test_free_memory_is_what_system_and_container_leave(memory_files, changed, expected):
    for name, text in changed.items():
        (memory_files / name).unlink() if text is None else (memory_files / name).write_text(text)
    assert free_bytes(CPU) == expected


def test_this_machine_tells_its_free_memory():
    free = free_bytes(CPU)
    assert free is None or 1e6 < free < 1e15
    assert free_bytes(torch.device("mps")) is None


def test_free_memory_of_a_gpu_is_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 + device.index, 99))
    assert free_bytes(torch.device("cuda:1")) == 6


@pytest.mark.parametrize(
    "ask",
    [
        lambda: torch.zeros(1 << 50),  # the allocator's own words
        lambda: torch.zeros(1 << 62),  # more bytes than a number can count
        lambda: np.zeros(1 << 50),
        lambda: bytearray(1 << 50),
    ],
    ids=["torch", "torch, beyond any memory", "numpy", "python"],
)
def test_memory_that_runs_out_here_is_told_from_other_errors(ask):
    with pytest.raises((RuntimeError, MemoryError)) as error:
        ask()
    assert is_out_of_memory(error.value)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] data. DefaultCPUAllocator: not enough memory"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("MPS backend out of memory (MPS allocated: 18.02 GB, max allowed: 18.13 GB)."),
        RuntimeError("Invalid buffer size: 9.75 GB"),
    ],
    ids=str,
)
def test_memory_that_runs_out_elsewhere_is_told_from_other_errors(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        ValueError("out of memory is the name of a file"),
    ],
    ids=str,
)
def test_other_errors_are_not_memory_that_ran_out(error):
    assert not is_out_of_memory(error)


def test_autocast_changes_matrix_products_only_where_asked():
    a = torch.ones(2, 2)
    with autocast(CPU, "fp32"):
        assert (a @ a).dtype == torch.float32
    with autocast(CPU, "bf16"):
        assert (a @ a).dtype == torch.bfloat16


def test_the_environment_names_what_exact_repetition_needs():
    facts = environment(CPU, "fp32")
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert facts["device"] == "cpu"
    assert facts["precision"] == "fp32"
    assert facts["processor"]


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_on_a_gpu_the_environment_names_whether_only_what_repeats_is_allowed(monkeypatch, is_deterministic):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: is_deterministic)
    facts = environment(torch.device("cuda"), "bf16")
    assert facts["processor"] == "a GPU"
    assert facts["deterministic"] == ("on" if is_deterministic else "off")
