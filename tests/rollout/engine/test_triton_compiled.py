"""The Triton kernels compiled for GPUs that are not here: registers, shared memory and spills under bounds.

Triton brings the assembler, which needs no GPU. `bash tests/extras.sh` installs it aside. Triton's interpreter (`test_triton.py`) multiplies the bit patterns of
bfloat16, so its numbers are checked on a GPU alone.
"""

import os
import re
import subprocess
from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = [
    pytest.mark.extra,
    pytest.mark.skipif(
        find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
        reason="needs Triton (pip install triton==3.6.0), outside of its interpreter",
    ),
]

ARCHITECTURES = (80, 90, 100)
POINTER, NUMBER = "tt.divisibility", 16
"""What Triton knows at a launch of the engine: pointers and strides are multiples of this."""


def resources(
    tmp_path, name: str, architecture: int, arguments: dict[str, str], constants: dict[str, Any], num_warps: int
):
    """Registers of a thread, bytes that it spills, and shared bytes of a program."""
    import triton  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

    from headrace.rollout.engine.attention import triton_decode

    signature = arguments | dict.fromkeys(constants, "constexpr")
    aligned = {
        (i,): [[POINTER, NUMBER]] for i, (k, v) in enumerate(arguments.items()) if v[0] == "*" or k.endswith("stride")
    }
    source = ASTSource(getattr(triton_decode, name), signature, constants, aligned)
    kernel = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": num_warps})
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    listing = subprocess.run(
        [tool, "-res-usage", binary], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    registers, stack, local = (int(re.findall(rf"{word}:(\d+)", listing)[-1]) for word in ("REG", "STACK", "LOCAL"))
    return registers, stack + local, kernel.metadata.shared


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("kind", "dim", "group", "registers", "shared"),
    [("bf16", 64, 7, 80, 16e3), ("fp16", 64, 7, 80, 16e3), ("bf16", 128, 4, 112, 32e3), ("bf16", 256, 2, 168, 48e3)],
)
def test_decode_attention_in_half_precision_spills_nothing(tmp_path, architecture, kind, dim, group, registers, shared):
    arguments = {
        "query": f"*{kind}", "keys": f"*{kind}", "values": f"*{kind}", "table": "*i32", "lengths": "*i32", "out": "*fp32",
        "lse": "*fp32", "scale": "fp32", "softcap": "fp32", "window": "i32", "table_stride": "i32", "page_stride": "i32",
        "head_stride": "i32", "num_splits": "i32",
    }  # fmt: skip
    constants = {
        "GROUP": group, "GROUP_ROWS": 16, "DIM": dim, "DIM_ROWS": dim, "PAGE": 64, "KV_HEADS": 2, "SPLIT": 512, "BLOCK": 32,
        "HAS_SOFTCAP": False,
    }  # fmt: skip
    found = resources(tmp_path, "_split_kernel", architecture, arguments, constants, 4)
    assert found[0] <= registers and found[1] == 0 and found[2] <= shared, found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_the_merge_of_splits_takes_few_registers_and_no_memory(tmp_path, architecture, has_sinks):
    arguments = {
        "parts": "*fp32", "lse": "*fp32", "lengths": "*i32", "sinks": "*bf16" if has_sinks else "*i32", "out": "*bf16",
        "window": "i32", "num_splits": "i32",
    }  # fmt: skip
    constants = {"HEADS": 14, "DIM": 128, "DIM_ROWS": 128, "SPLIT": 512, "HAS_SINKS": has_sinks}
    found = resources(tmp_path, "_merge_kernel", architecture, arguments, constants, 1)
    assert found[0] <= 64 and found[1] == 0 and found[2] <= 1024, found
