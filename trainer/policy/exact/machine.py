"""The facts that two machines must share for equal bits in exact mode."""

from importlib.metadata import version

import torch


def kernels_of_machine() -> str:
    """The device of this process and the versions of what computes on it, such as "cuda 9.0, torch 2.13.0, triton 3.7.1"."""
    if not torch.cuda.is_available():
        return f"cpu {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"
    major, minor = torch.cuda.get_device_capability()
    return f"cuda {major}.{minor}, torch {torch.__version__}, triton {version('triton')}"
