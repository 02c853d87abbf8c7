"""How fast this machine trains SmolLM2: the products of one of its layers, forward and backward, on one thread.

    python -m headrace.launch.recipes.step_speed

prints the seconds in each type as JSON. It is a process of its own, so that the launcher need not import torch.
"""

import json
import os
import subprocess
import sys
import time
from statistics import median

TOKENS = 432
WIDTHS = ((576, 960), (576, 576), (576, 3072), (1536, 576))
"""Inputs and outputs of a layer's matrices: queries, keys and values together; attention's output; gate and up; down."""
REPEATS = 7
TIMEOUT_S = 60.0


def measured() -> dict[str, float]:
    """Seconds by `model.dtype`, in another process; empty if that fails."""
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(
            command, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=TIMEOUT_S, check=True
        )
        return json.loads(done.stdout)
    except (subprocess.SubprocessError, OSError, ValueError):
        return {}


def measure() -> dict[str, float]:
    """Seconds of CPU by `model.dtype`, the median of some repetitions; other programs that run now count little."""
    import torch

    def once(matrices: list[torch.Tensor], inputs: list[torch.Tensor]) -> float:
        start = time.process_time()
        for matrix, given in zip(matrices, inputs, strict=True):
            (given @ matrix).sum().backward()
        return time.process_time() - start

    torch.set_num_threads(1)
    found: dict[str, float] = {}
    for name in ("bfloat16", "float32"):
        options = {"dtype": getattr(torch, name), "requires_grad": True}
        matrices = [torch.randn(width, out, **options) for width, out in WIDTHS]
        inputs = [torch.randn(TOKENS, width, **options) for width, _ in WIDTHS]
        found[name] = median([once(matrices, inputs) for _ in range(REPEATS + 2)][2:])
    return found


if __name__ == "__main__":
    print(json.dumps(measure()))
