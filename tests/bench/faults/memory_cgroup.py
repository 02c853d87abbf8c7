"""A cgroup of bounded memory, of either version, in which the kernel kills for memory."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def own_cgroup() -> Path | None:
    """The folder of this process's memory cgroup, if it may make others there."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            folder, limit = _ROOT / "memory" / path.lstrip("/"), "memory.limit_in_bytes"
        elif not controllers:
            folder, limit = _ROOT / path.lstrip("/"), "memory.max"
        else:
            continue
        for place in (folder, _ROOT / "memory" if "memory" in controllers else _ROOT):
            with suppress(OSError):
                made = place / f"headrace-{uuid.uuid4().hex}"
                made.mkdir()
                has_limit = (made / limit).exists()
                made.rmdir()
                if has_limit and os.access(place, os.W_OK):
                    return place
    return None


@contextmanager
def memory_cgroup(megabytes: int) -> Iterator[Path]:
    """A new cgroup without swap whose processes may hold so much together; they have ended when the context does."""
    above = own_cgroup()
    assert above is not None
    folder = above / f"headrace-{uuid.uuid4().hex}"
    folder.mkdir()
    try:
        for name in ("memory.limit_in_bytes", "memory.max", "memory.memsw.limit_in_bytes"):
            if (folder / name).exists():
                (folder / name).write_text(str(megabytes << 20))
        yield folder
    finally:
        folder.rmdir()
