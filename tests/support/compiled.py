"""Triton kernels compiled for GPUs that are not here: Triton brings the assembler, which needs none."""

import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ARCHITECTURES = (80, 90, 100)
needs_compiler = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs Triton (pip install triton==3.6.0), outside of its interpreter",
)


class Resources(NamedTuple):
    """Registers of a thread, bytes that it spills, and shared bytes of a program.

    num_fused: products that are not rounded before a sum; those of a logarithm, `fma.rn.ftz`, do not count.
    """

    registers: int
    spilled: int
    shared: int
    num_fused: int


def resources(
    folder: Path,
    kernel: Any,
    architecture: int,
    arguments: dict[str, str],
    constants: dict[str, Any],
    num_warps: int,
    num_stages: int = 3,
    **options: Any,
) -> Resources:
    """The registers and memory of a kernel that is compiled for arguments of these types.

    As at a launch of the engine, pointers, strides and columns are multiples of 16.
    """
    import triton  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

    signature = arguments | dict.fromkeys(constants, "constexpr")
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(arguments.items())
        if kind[0] == "*" or name.endswith(("stride", "columns", "inputs"))
    }
    source = ASTSource(kernel, signature, constants, aligned)
    options |= {"num_warps": num_warps, "num_stages": num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    listing = subprocess.run(
        [tool, "-res-usage", binary], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    registers, stack, local = (int(re.findall(rf"{word}:(\d+)", listing)[-1]) for word in ("REG", "STACK", "LOCAL"))
    return Resources(registers, stack + local, compiled.metadata.shared, compiled.asm["ptx"].count("fma.rn.f32"))
