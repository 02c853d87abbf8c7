"""The resident memory of each role over a long run of the quickstart: does it grow?"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..processes.spare import is_spare
from .harness import Measurement, Options

NUM_STEPS = 500
_PERIOD_S = 2.0
_DEADLINE_S = 3600.0
_ROLE = re.compile(r"--role (\w+) --index (\d+)")


def long_run(name: str, options: Options) -> list[Measurement]:
    """A row for each role: megabytes, and the median of the last quarter of the run over that of the second.

    The first quarter is left out: there caches fill and the longest batch has not been seen.
    """
    del name, options
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "headrace.launch.quickstart", f"run.dir={folder}/run", f"run.steps={NUM_STEPS}"]
        run = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        samples: dict[str, list[float]] = defaultdict(list)
        deadline = time.monotonic() + _DEADLINE_S
        try:
            while run.poll() is None and time.monotonic() < deadline:
                for role, megabytes in _resident(f"{folder}/run"):
                    samples[role].append(megabytes)
                time.sleep(_PERIOD_S)
        finally:
            run.terminate()
            run.wait(60)
    if run.returncode != 0:
        raise RuntimeError(f"the run ended with exit code {run.returncode}")
    return [_growth(role, values) for role, values in sorted(samples.items())]


def _growth(role: str, megabytes: Sequence[float]) -> Measurement:
    quarter = max(1, len(megabytes) // 4)
    early, late = (statistics.median(megabytes[part * quarter :][:quarter]) for part in (1, 3))
    return Measurement(role, "its second quarter", late, "MB", late / early)


def _resident(run_dir: str) -> Iterator[tuple[str, float]]:
    """Role and resident megabytes of each process of a run."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            role = _ROLE.search(command)
            if role is None or run_dir not in command or is_spare(folder):
                continue
            pages = int((folder / "statm").read_text().split()[1])
        except OSError:
            continue  # it has ended meanwhile
        yield f"{role[1]}-{role[2]}-memory", pages * os.sysconf("SC_PAGE_SIZE") / 1e6
