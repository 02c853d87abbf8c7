"""Environment variables that a supervisor sets for its children. This module imports nothing, so a supervisor stays small."""

SEGMENT_FD = "HEADRACE_SEGMENT_FD"
"""Descriptor of a relay's shared memory; other processes on the host open it as /proc/<supervisor pid>/fd/<number>."""

STREAMING_COPY_ENV = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x100000"}
"""Makes the C library copy large pieces past the caches, twice as fast; it reads this when the process starts."""
