"""Every test gets folders of its own, and must leave nothing behind."""

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from support.closing import close_all
from support.job import job  # noqa: F401 - a fixture of several files

MARK = "HEADRACE_TEST"
PATIENCE_S = 60.0

# On a busy machine an example may take long without being wrong.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
settings.register_profile(
    "nightly", settings.get_profile("any machine"), max_examples=int(os.environ.get("INPUTS", "50000"))
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run folder that does not exist yet."""
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test that leaves a process, a thread, a shared-memory segment or a patched library behind.

    Its processes are known by a mark in the environment that they inherit, so orphans are found as well, and other tests
    that run at the same time are left alone. The functions that the test gave to `at_end` are called first; a process that is left
    after that is killed, so that it spoils no other test.
    """
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # a fleet of this process sets them, for its own host
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    threads, segments = set(threading.enumerate()), _segments()
    yield
    close_all()
    deadline = time.monotonic() + PATIENCE_S
    while (left := _left_over(mark, threads, segments)) and time.monotonic() < deadline:
        gc.collect()  # the frames of an error may hold a segment in a cycle
        time.sleep(0.02)
    for pid, _ in marked_processes(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"the test left behind: {'; '.join(left)}"


def _left_over(mark: str, threads: set[threading.Thread], segments: set[str]) -> list[str]:
    new_threads = [t for t in threading.enumerate() if t not in threads and not _is_library_thread(t)]
    return [
        *(f"process {pid} ({command})" for pid, command in marked_processes(mark)),
        *(f"thread {thread.name}" for thread in new_threads),
        *(f"segment {name}" for name in _segments() - segments),
        *_switched_off(),
    ]


def marked_processes(mark: str) -> list[tuple[int, str]]:
    """Process id and command line of each process that was started with this mark in its environment."""
    found: list[tuple[int, str]] = []
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.name) != os.getpid() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append((int(folder.name), (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()))
        except OSError:
            continue  # it has ended meanwhile, or belongs to another user
    return found


def _switched_off() -> Iterator[str]:
    """Two threads that load models at one time can leave a switch of transformers off for the rest of the process."""
    models = sys.modules.get("transformers.modeling_utils")
    if models is not None and models.PreTrainedModel.tie_weights.__name__ != "tie_weights":
        yield "transformers with its tie_weights switched off"


def _is_library_thread(thread: threading.Thread) -> bool:
    return type(thread).__module__.partition(".")[0] == "tqdm"


def _segments() -> set[str]:
    """Anonymous shared-memory files that this process holds; the project makes none that have a name."""
    held: set[str] = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        if "memfd:" in target:
            held.add(f"{descriptor.name} -> {target}")
    return held
