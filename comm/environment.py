"""Environment variables, keys of the store and memory for the children of a supervisor. Without numpy and torch, so a supervisor stays small."""

import fcntl
import os

SEGMENT_FD = "HEADRACE_SEGMENT_FD"
"""Descriptor of a relay's shared memory; other processes on the host open it as /proc/<supervisor pid>/fd/<number>."""

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""The GPUs of a job, and of a supervisor's child; empty hides every GPU."""

GPU_PROCESSES = "HEADRACE_GPU_PROCESSES"
"""The number of the run's processes on the GPU of a supervisor's child."""

RECIPE_KEY, SUMMARY_KEY = "headrace/recipe", "headrace/summary"
"""Keys of the run's store whose values are signed with the run's secret, as entries of these names."""

STREAMING_COPY_ENV = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x100000"}
"""Makes the C library copy large pieces past the caches, twice as fast; it reads this when the process starts."""


def create_memfd(name: str) -> int:
    """A memfd that only grows: a mapping of it never loses its pages."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd


def is_sealed(fd: int) -> bool:
    """Whether a descriptor is one that `create_memfd` made, as far as the kernel can tell."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # a file of a disk has no seals
        return False
