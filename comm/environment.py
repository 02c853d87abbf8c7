"""The environment that a seat gives to its children. This module imports nothing, so that a seat stays small."""

SEGMENT_FD = "HEADRACE_SEGMENT_FD"
"""Names a relay's shared memory in its environment; others on the host open it as /proc/<seat pid>/fd/<number>."""

STREAMING_COPY_ENV = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x100000"}
"""Environment in which the C library copies large pieces past the caches, twice as fast; it is read at a process's start."""
