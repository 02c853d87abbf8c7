"""Environment variables and keys of the store. Without numpy and torch, so a supervisor stays small."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

ADDRESS_FILE = "address"
"""File of the run folder: the address of the run's store, and the start of the run (`launch.processes.store_address`)."""
JOINING = "HEADRACE_JOINING"
"""Set on a host that joins a running job: the arguments of `launch.placement.place_joining`, with commas."""
RUN_ID = "HEADRACE_RUN_ID"
"""Set for the processes of a supervisor: a text that is unique to this start of the run."""
SEGMENT_FD = "HEADRACE_SEGMENT_FD"
"""Descriptor of the shared memory of a relay or a rank of the trainer; its supervisor has it under the same number."""
SECOND_FD = "HEADRACE_SECOND_FD"
"""The same for the copies of another rank of the trainer, which is on another host."""
LACKS_MEMORY = "HEADRACE_LACKS_MEMORY"
"""Set for a role's process that comes after one which the kernel has killed for memory."""

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""The GPUs of a job, and of a supervisor's child; empty hides every GPU."""

GPU_PROCESSES = "HEADRACE_GPU_PROCESSES"
"""The number of the run's processes on the GPU of a supervisor's child."""

STORE = "HEADRACE_STORE"
"""The address of the run's store, "host:port": set by a supervisor for its children, and by a user who joins a run."""
RECIPE_KEY = "recipe"
SUMMARY_KEY = "summary"
REFUSAL_KEY = "refusal"
"""Keys of the store: the run's recipe as YAML, its summary as JSON, and why a process cannot join the run, which ends it."""

RESOLVER_ENV = {"RES_OPTIONS": "timeout:1"}
"""A client of the store looks up the name of the address that it connects to. Where the name server does not answer, the
resolver would wait 5 s before it asks again."""

STREAMING_COPY_ENV = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x100000"}
"""Makes the C library copy large pieces past the caches, twice as fast; it reads this when the process starts."""


CORES = "HEADRACE_CORES"
"""Set for the trainer where the whole run is on one host without GPUs: the host's cores, the threads of a rank of the trainer and of one of
a rollout, and whether the policy is too small for more than one (1 or 0), with commas."""

OVERLAP_CORES = 3
"""Most cores of a host whose trainer has a thread for each core, though rollouts work there too. On more cores the rollouts have cores
of their own, since a thread that waits for its core holds up all other threads of the trainer."""

NUM_THREADS = "OMP_NUM_THREADS"
_SLEEPING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0", "OMP_PROC_BIND": "false"}
"""Makes threads without work sleep at once, with GNU's OpenMP and with Intel's. None is bound to a core: all processes would bind theirs
to the same cores."""

_OF_THE_RUN = ("HEADRACE_SECRET", STORE, JOINING, RUN_ID, SEGMENT_FD, SECOND_FD, LACKS_MEMORY)


def environment_of_threads(num: int) -> dict[str, str]:
    """The variables of a process that computes with `num` threads, which sleep while they wait."""
    return {NUM_THREADS: str(num), "MKL_NUM_THREADS": str(num), **_SLEEPING}


@contextmanager
def sleeping_threads() -> Iterator[None]:
    """Have threads without work sleep in the processes that are started meanwhile, and in this one if it imports torch meanwhile."""
    before = {name: os.environ.get(name) for name in _SLEEPING}
    os.environ.update(_SLEEPING)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def environment_of_users_code() -> dict[str, str]:
    """This process's environment for a child that runs the user's code, or the policy's: without what speaks for the run.

    It has one thread, whatever this process has: rewards and tools are computed beside the policy.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _OF_THE_RUN}
    return kept | environment_of_threads(1)
