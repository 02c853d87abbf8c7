"""Everything in float64: what models and losses round to float32 on the way is not."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from headrace.trainer.policy.model import Policy


@contextmanager
def in_float64(*policies: Policy) -> Iterator[None]:
    """Inside, these policies are in float64, and `torch.float32` and `.float()` mean it too, for those who ask PyTorch for them."""
    for policy in policies:
        policy.double()
        policy.config._experts_implementation = "eager"  # the fused products of experts take no float64
    with pytest.MonkeyPatch.context() as patch:
        for name in ("float32", "float"):
            patch.setattr(torch, name, torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield
