"""The message about a GPU whose memory is full: the bytes, and the settings that need less of it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from ...comm.errors import HeadraceError
from ..config.memory_advice import advice


def is_full_gpu(error: BaseException) -> bool:
    """Whether this is torch's error of a full device. Imports torch, which a process with that error has already."""
    import torch

    return isinstance(error, torch.OutOfMemoryError)


def describe_full_gpu(role: str, error: BaseException) -> str:
    """One line: the bytes that torch wanted and had, and the settings of this role that need less memory."""
    text = " ".join(str(error).split())
    # After these words torch's message has figures and settings of its allocator.
    facts = re.split(r" (?:Of the allocated memory|If reserved but unallocated)", text)[0]
    return f"{facts.rstrip('.')}; {f'set {words}' if (words := advice(role, on_gpu=True)) else 'use a larger GPU'}"


@contextmanager
def full_gpu_in_one_line(role: str) -> Iterator[None]:
    """For commands without a run. Raises `HeadraceError` in place of torch's error of a full device."""
    try:
        yield
    except RuntimeError as error:
        if not is_full_gpu(error):
            raise
        raise HeadraceError(describe_full_gpu(role, error)) from error
