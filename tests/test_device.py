import pytest
import torch

from txlcli import UserError, device
from txlcli.device import autocast, choose_device, choose_precision, environment, has_bf16

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


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cpu:0", ""])
def test_an_unknown_device_is_refused_by_name(name):
    if name == "cuda:" and has_cuda:
        pytest.skip("cuda: is cuda where there is one")
    with pytest.raises(UserError, match=r"^--device: "):
        choose_device(name)


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
