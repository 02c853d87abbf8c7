"""A role's process for tests of the supervisor: each incarnation does the next action of the test's script.

The script is a JSON object in HEADRACE_SCRIPT, such as {"rollout-0": ["die", "end"]}. Each process appends lines to the
file `events` of the run folder.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

from headrace.comm.environment import SECOND_FD, SEGMENT_FD
from headrace.comm.errors import STORE_LOST_EXIT


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", default="store")
    parser.add_argument("--index", default="0")
    parser.add_argument("--run", type=Path, default=None)
    parser.add_argument("--start", default="")
    arguments, _ = parser.parse_known_args()
    name = arguments.role if arguments.role in ("hub", "store") else f"{arguments.role}-{arguments.index}"
    run = arguments.run or Path(os.environ["HEADRACE_EVENTS"])

    def note(event: str) -> None:
        with (run / "events").open("a") as stream:
            stream.write(f"{name} {event}\n")

    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, lambda received, _frame: signals.append(received))
    incarnation = sum(line.startswith(f"{name} start") for line in _lines(run / "events"))
    actions = json.loads(os.environ["HEADRACE_SCRIPT"]).get(name, ["end"])
    action = actions[min(incarnation, len(actions) - 1)]
    if name == "store" and action not in ("silent", "mistake"):
        (run / "address").write_text(f"127.0.0.1:1\n{arguments.start}\n")
    note(f"threads {os.environ['OMP_NUM_THREADS']} {os.environ['OMP_WAIT_POLICY']} {os.environ['GOMP_SPINCOUNT']}")
    note(f"start {os.getpid()} {os.environ.get('HEADRACE_SEGMENT_FD', '-')}")
    if "HEADRACE_LACKS_MEMORY" in os.environ:
        note("lacks memory")
    match action:
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "eat":
            held = bytearray()
            while True:
                held += bytes([1]) * (8 << 20)
                time.sleep(0.02)
        case "crash":
            sys.exit(1)
        case "fail":
            sys.stderr.write("ValueError: 7 is wrong\n")
            return 1
        case "lose":
            return STORE_LOST_EXIT
        case "lose at word":
            while not (run / "go").exists():
                time.sleep(0.01)
            return STORE_LOST_EXIT
        case "copy" | "copy and wait":  # of a training state, before an end that the supervisor does not mend
            _copy_state()
            note("copied")
            while action == "copy and wait":  # whatever signals come
                time.sleep(0.01)
            return 2
        case "mistake":
            sys.stderr.write("some.setting is wrong\n")
            return 2
        case "quit":  # as an interpreter that is about to end, which has no handlers any more
            signal.signal(signal.SIGQUIT, signal.SIG_DFL)
            signal.pause()
        case "wait" | "ignore" | "silent":
            while not signals or action == "ignore":
                time.sleep(0.01)
            note(f"signal {signals[0]}")
    return 0


def _copy_state() -> None:
    """Write copies of step 3 into the supervisor's memory: that of rank 0, and that of rank 1 of another host."""
    from headrace.comm.shared_memory import Segment  # with numpy, which the others need not load
    from headrace.relay.weights.slots import VersionSlots

    for rank, variable in enumerate((SEGMENT_FD, SECOND_FD)):
        if variable in os.environ:
            slots = VersionSlots(Segment.inherited(variable), 2)
            slots.prepare(100, 11)
            write = slots.begin(3, rank)
            assert write is not None
            slots.commit(write, "7")


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


if __name__ == "__main__":
    sys.exit(main())
