"""Triton kernels on a GPU, or in Triton's interpreter on a CPU (`TRITON_INTERPRET=1`).

In fp32 and fp16 alone there: the interpreter computes with bfloat16 as if it were its bits.
"""

import os
from importlib.util import find_spec

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAN_RUN = find_spec("triton") is not None and (DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
needs_triton = pytest.mark.skipif(not CAN_RUN, reason="needs Triton, and a GPU or TRITON_INTERPRET=1")


def mend_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Triton's interpreter do what a device does.

    Its loops take bounds that NumPy 2.4 and later do not make numbers of. Its products are those of NumPy's BLAS, where the bits of a
    row depend on its place in the block, by the kind of CPU; here each element is the same sum at any place.
    """
    if DEVICE == "cuda":
        return
    from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

    patch = interpreter._patch_lang_tensor

    def patch_with_bounds(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def dot(_self, a, b, d, _input_precision, _max_num_imprecise_acc):
        left, right = (each.data.astype(d.data.dtype) for each in (a, b))
        product = np.einsum("...ik,...kj->...ij", left, right, optimize=False)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_with_bounds)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
