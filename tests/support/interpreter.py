"""Triton kernels on a GPU, or in Triton's interpreter on a CPU (`TRITON_INTERPRET=1`).

In fp32 and fp16 alone there: the interpreter computes with bfloat16 as if it were its bits.
"""

import os
from importlib.util import find_spec

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAN_RUN = find_spec("triton") is not None and (DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
needs_triton = pytest.mark.skipif(not CAN_RUN, reason="needs Triton, and a GPU or TRITON_INTERPRET=1")


def let_loops_take_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's loops take bounds that NumPy 2.4 and later do not make numbers of."""
    if DEVICE == "cuda":
        return
    from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

    patch = interpreter._patch_lang_tensor

    def patch_with_bounds(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_with_bounds)
