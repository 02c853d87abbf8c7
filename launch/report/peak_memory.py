"""The memory of a run's processes: what the plan of its start expected, beside the most that each has held.

`memory.json` of the run folder has both, in bytes. A process counts with what it holds for itself; the shared memory of the weights
counts with the relay. `python -m headrace.launch.report.peak_memory RUN` prints the table.
"""

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

FILE = "memory.json"
_GB = 1e9


def write_planned(run_dir: Path, planned: Mapping[str, float]) -> None:
    """Keep what the plan of this start expects of each process."""
    path = run_dir / FILE
    path.write_text(json.dumps({name: {"planned": round(size)} for name, size in planned.items()}, indent=1) + "\n")


def write_peaks(run_dir: Path, supervisor: str, peaks: Mapping[str, int]) -> None:
    """Keep the most that each child of a supervisor has held; nothing if the folder is gone or full."""
    with suppress(OSError):
        (run_dir / "logs" / f"{supervisor}.peaks.json").write_text(json.dumps(dict(peaks)))


def merge_peaks(run_dir: Path) -> dict[str, dict[str, int]]:
    """`planned` and `peak` in bytes of each process, from the files of all supervisors; written to `memory.json`."""
    found: dict[str, dict[str, int]] = {}
    with suppress(OSError, ValueError):
        found = json.loads((run_dir / FILE).read_text())
    for file in sorted((run_dir / "logs").glob("*.peaks.json")):
        with suppress(OSError, ValueError):
            for name, size in json.loads(file.read_text()).items():
                found.setdefault(name, {})["peak"] = size
            file.unlink()
    with suppress(OSError):
        (run_dir / FILE).write_text(json.dumps(found, indent=1) + "\n")
    return found


def memory_row(found: Mapping[str, Mapping[str, int]]) -> str:
    """The largest processes as one line: peak, and in brackets what was planned."""
    known = {name: each for name, each in found.items() if "peak" in each and "planned" in each}
    largest = sorted(known, key=lambda name: -known[name]["peak"])[:4]
    return ", ".join(
        f"{name} {known[name]['peak'] / _GB:.2f} GB ({known[name]['planned'] / _GB:.2f} planned)" for name in largest
    )


def main(words: list[str]) -> int:
    """Print the table of a run folder; returns the exit code."""
    if len(words) != 1:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    print(f"{'process':14}{'planned GB':>12}{'peak GB':>12}{'ratio':>8}")
    for name, each in sorted(merge_peaks(Path(words[0])).items()):
        planned = each.get("planned", 0)
        peak = each.get("peak", 0)
        ratio = f"{planned / peak:8.2f}" if planned and peak else f"{'':8}"
        print(f"{name:14}{planned / _GB:12.3f}{peak / _GB:12.3f}{ratio}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
