"""The Triton kernels compile for NVIDIA's GPUs, with the registers and memory that these have; needs no GPU.

What spills is written down as Triton 3.6.0 has it; 3.7.1 spills 4 to 12 bytes more in 4 of the 54 slow cases.

Run as a script, this file compiles what it reads from stdin: in a process of its own, since other tests of
the same process may have imported the kernels for Triton's interpreter.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from txlcli.attention import fused

SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}  # what a block of threads may have
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
KERNELS = {
    "workspace": "attend_workspace",
    "queries": "differentiate_queries",
    "keys": "differentiate_keys",
    "gather": "attend_gather",
}


def has_compiler() -> bool:
    triton = find_spec("triton")
    if triton is None or not triton.submodule_search_locations or not fused.has_triton():
        return False
    return (Path(triton.submodule_search_locations[0]) / "backends/nvidia/bin/ptxas").exists()


pytestmark = pytest.mark.skipif(not has_compiler(), reason="no triton, too old, or without ptxas")


def compile_one(case):
    """Return the bytes of registers that a thread spills, and of shared memory that a block takes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from txlcli.attention import kernels

    launch, d_head, dtype = fused.Launch(*case["launch"]), case["d_head"], case["dtype"]
    kernel = getattr(kernels, KERNELS[case["part"]])
    constants = {
        "SCALE": d_head**-0.5,
        "HAS_BIAS": case["has_bias"],
        "HAS_FIRST": case["has_first"],
        "HAS_LSE": True,
        "E": d_head,
        "BLOCK_E": fused.block_e(d_head),
        "BLOCK_M": launch.block_m,
        "BLOCK_N": launch.block_n,
        "BLOCK": launch.block_m,
        "PRECISION": case["precision"],
    }
    if not case["has_first"]:
        constants["FIRST"] = None
    if not case["has_bias"]:
        constants["BY_DISTANCE"] = constants["D_BY_DISTANCE"] = None
    types = {"FIRST": "*i32", "LSE": "*fp32", "DELTA": "*fp32"}
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        is_pointer = name.isupper()
        signature[name] = types.get(name, f"*{dtype}") if is_pointer else "i32"
        # As a launch finds them: memory starts at multiples of 16 bytes, and rows of E numbers lie multiples
        # of E apart, which is one of 16. The strides of `first` and `lse` are counts of queries.
        is_stride = name.endswith(("_stream", "_head", "_row")) and not name.startswith(("first", "lse"))
        if is_pointer or is_stride:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        kernel, signature, {name: constants[name] for name in signature if name in constants}, attributes
    )
    target = GPUTarget("cuda", case["capability"], 32)
    options = {"num_warps": launch.n_warps, "num_stages": launch.n_stages}
    with contextlib.redirect_stdout(io.StringIO()) as log:
        compiled = triton.compile(source, target=target, options=options)
    (spilled,) = re.findall(r"(\d+) bytes spill stores", log.getvalue())
    return int(spilled), compiled.metadata.shared


def cases(capability, dtype, d_head, kinds):
    """Return the kernels that may be started there, each in these kinds: (has bias, has first)."""
    how = fused.launches(divmod(capability, 10), d_head, TYPES[dtype])
    return [
        {
            "capability": capability,
            "dtype": dtype,
            "d_head": d_head,
            "part": part,
            "launch": getattr(how, part),
            "has_bias": has_bias,
            "has_first": has_first,
            "precision": precision,
        }
        for part in KERNELS
        for has_bias, has_first in kinds
        for precision in (("ieee", "tf32") if dtype == "fp32" else ("tf32",))
        if getattr(how, part) is not None and (has_bias or part != "gather")
    ]


def check(all_cases, cache):
    """Compile in another process; hold each kernel to the spills of its table and the memory of its GPU."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(cache), "TRITON_DUMP_PTXAS_LOG": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__],
        check=False,
        input=json.dumps(all_cases),
        env=environment,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    faults = []
    for case, (spilled, shared) in zip(all_cases, json.loads(done.stdout), strict=True):
        launch = fused.Launch(*case["launch"])
        if spilled > launch.n_spilled_bytes or shared > SHARED_BYTES[case["capability"]]:
            faults.append({**case, "spilled": spilled, "shared": shared})
    assert not faults, "\n".join(map(str, faults))


def test_each_kernel_compiles_as_its_table_says(tmp_path):
    check(cases(90, "bf16", 64, [(True, False)]), tmp_path)  # the slow test has the other GPUs


@pytest.mark.slow
@pytest.mark.parametrize("d_head", [16, 32, 48, 64, 96, 128])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_all_compile_as_their_tables_say(capability, dtype, d_head, tmp_path):
    check(cases(capability, dtype, d_head, [(True, False), (True, True), (False, False)]), tmp_path)


def test_nothing_spills_where_scores_are_gathered():
    for d_head in range(1, 65):
        for dtype in (torch.float16, torch.bfloat16):
            how = fused.launches((9, 0), d_head, dtype)
            assert how.forward == "gather"
            assert how.gather is not None
            assert all(x.n_spilled_bytes == 0 for x in (how.workspace, how.gather, how.queries, how.keys))


if __name__ == "__main__":
    json.dump([compile_one(case) for case in json.load(sys.stdin)], sys.stdout)
