"""The control plane of a large run on one machine: the store's CPU and memory, and how soon the hub acts on deaths.

    python -m bench.members hub FOLDER STORE_ADDRESS NUM_ROLLOUTS      (the hub's process)
    python -m bench.members trainer STORE_ADDRESS                      (a trainer that trains in no time)

Store and hub are those of a run, each in its process; each host is a process too (`member_host.py`). All processes end with the one
that started them. If the store may not open a file for each member, it says so and the benchmark ends.
"""

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from headrace.comm.fleet import StoreFleet
from headrace.comm.process_tree import end_with_parent
from headrace.comm.recipe import CommSettings
from headrace.comm.waits import waiting
from headrace.launch.config.load import read_recipe
from headrace.relay.hub.hub import Hub
from headrace.relay.hub.loop import run

from .harness import ENVIRONMENT, BenchProcess, Measurement, Options, command
from .hub import train
from .member_host import GROUPS_HELD, SAMPLES, SECRET, names_of

_STEPS = 1_000_000
_PROMPTS = 512
"""Groups of a step."""
_SETTLE_S = 10.0
"""Until the rollouts have their leases, and until a false death would be known."""
_PATIENCE_S = 120.0


def members(name: str, options: Options) -> list[Measurement]:
    """The figures of one run: `options.hosts` hosts with `options.members` members each, beside hub and trainer."""
    count = options.hosts * options.members
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        Path(folder, "data.jsonl").write_text('{"prompt": "p"}\n' * 1000)
        struck = _Strikes(Path(folder, "deaths"))
        store = stack.enter_context(_start_store(count + 2))
        stack.callback(store.process.send_signal, signal.SIGQUIT)
        address = store.line("store").split()[1]
        hub = stack.enter_context(BenchProcess(command("members", "hub", folder, address, count - options.hosts)))
        words = [
            command("member_host", address, host, options.members, options.expiry_s) for host in range(options.hosts)
        ]
        hosts = [stack.enter_context(BenchProcess(word)) for word in words]
        for process in (hub, *hosts):
            process.line("ready")
        began = time.monotonic()
        for host in hosts:
            _tell(host)
        join_s = max(float(host.line("joined").split()[1]) for host in hosts) - began
        stack.enter_context(BenchProcess(command("members", "trainer", address)))
        time.sleep(_SETTLE_S)
        before = _cpu_s(store), _cpu_s(hub)
        time.sleep(options.seconds)
        cores, hub_cores = ((_cpu_s(p) - s) / options.seconds for p, s in zip((store, hub), before, strict=True))
        memory = _memory_bytes(store)
        per_host = [names_of(host, options.members) for host in range(options.hosts)]
        close_s = struck.seconds(per_host[0][-1:], lambda: _tell(hosts[0]))
        kill_s = struck.seconds(per_host[1], hosts[1].process.kill)
        freeze_s = struck.seconds(per_host[2], lambda: hosts[2].process.send_signal(signal.SIGSTOP))
        hosts[2].process.kill()  # it would wait for its standard input for ever
        num_killed = -(-options.kill // options.members)
        names = [name for host in per_host[-num_killed:] for name in host]
        crash_s = struck.seconds(names, lambda: [host.process.kill() for host in hosts[-num_killed:]])
        time.sleep(_SETTLE_S)
        false = struck.others()
        num_returned = Path(folder, "journal.jsonl").read_bytes().count(b'"Returned"')
    assert num_returned >= struck.num_rollouts, f"{num_returned} leases came back of {struck.num_rollouts} rollouts"
    aim = 0.7 if count > 2000 else 0.2
    return [
        Measurement(f"{name}-join", f"{count} members", join_s, "s", count / join_s),
        Measurement(f"{name}-cpu", f"{aim} core", cores, "cores", cores / aim),
        Measurement(f"{name}-memory", f"{count} members", memory / 1e6, "MB", memory / 1e6 / count),
        Measurement(f"{name}-hub-cpu", "1 core", hub_cores, "cores", hub_cores),
        Measurement(f"{name}-close", "1 s", close_s, "s", close_s),
        Measurement(f"{name}-kill", "1 s", kill_s, "s", kill_s),
        Measurement(f"{name}-freeze", f"{options.expiry_s:g} s", freeze_s, "s", freeze_s / options.expiry_s),
        Measurement(
            f"{name}-crash",
            f"2 s, {len(names)} killed, others dead: {len(false)}",
            crash_s,
            "s",
            crash_s / 2,
            holds=not false,
        ),
    ]


class _Strikes:
    """The deaths that the hub writes into a file, and those that were caused."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._struck: set[str] = set()
        path.touch()

    @property
    def num_rollouts(self) -> int:
        """The rollouts that were struck."""
        return sum(name.startswith("rollout") for name in self._struck)

    def seconds(self, names: Sequence[str], strike: Callable[[], object]) -> float:
        """Strike these members; returns the seconds until the hub has taken back the leases of the last of them."""
        self._struck |= {*names}
        began = time.monotonic()
        strike()
        with waiting("the hub", f"the deaths of {len(names)} members", _PATIENCE_S) as wait:
            known = wait.until(lambda: found if {*names} <= (found := self._known()).keys() else None)
        return max(known[name] for name in names) - began

    def others(self) -> set[str]:
        """The members that count as dead and were not struck."""
        return self._known().keys() - self._struck

    def _known(self) -> dict[str, float]:
        lines = self._path.read_text().splitlines(keepends=True)
        return {name: float(at) for name, at in (line.split() for line in lines if line.endswith("\n"))}


def _start_store(num_members: int) -> BenchProcess:
    words = ["-m", "headrace.comm.store", "--expect", str(num_members)]
    return BenchProcess([sys.executable, *words], {**os.environ, **ENVIRONMENT, "HEADRACE_SECRET": SECRET.decode()})


def _tell(process: BenchProcess) -> None:
    """Let a process go on that waits for its standard input."""
    assert process.process.stdin is not None
    process.process.stdin.write(b"\n")


def _cpu_s(process: BenchProcess) -> float:
    """Seconds of CPU that a process has taken, user and system."""
    fields = Path(f"/proc/{process.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory_bytes(process: BenchProcess) -> int:
    """The resident memory of a process."""
    return int(Path(f"/proc/{process.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _serve_hub(folder: str, address: str, num_rollouts: str) -> None:
    """The hub's process. It writes each death, and when its leases were taken back, into the file `deaths`."""
    words = {
        "run.dir": folder,
        "run.steps": _STEPS,
        "data.path": f"{folder}/data.jsonl",
        "batch.prompts_per_step": _PROMPTS,
        "batch.samples_per_prompt": SAMPLES,
        "queue.lead": int(num_rollouts) * GROUPS_HELD + 2 * _PROMPTS,
    }
    recipe = read_recipe(None, [f"{key}={value}" for key, value in words.items()])
    with Path(folder, "deaths").open("a", buffering=1) as file:

        def record_deaths(hub: Hub) -> None:
            on_process_death = hub.on_process_death

            def recorded(process: str, reason: str) -> None:
                on_process_death(process, reason)
                file.write(f"{process} {time.monotonic()}\n")

            hub.on_process_death = recorded
            print("ready", flush=True)

        run(StoreFleet.join(address, "hub", 0, SECRET, {}, recipe.comm), recipe, on_open=record_deaths)


def _serve_trainer(address: str) -> None:
    fleet = StoreFleet.join(address, "actor", 0, SECRET, {}, CommSettings())
    train(fleet.open_mailbox("actor-0"), [0], _STEPS, _PROMPTS)


def _end_with_input() -> None:
    """End this process when standard input does; waits for that."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    end_with_parent(signal.SIGKILL, os.getppid())
    threading.Thread(target=_end_with_input, daemon=True).start()
    {"hub": _serve_hub, "trainer": _serve_trainer}[sys.argv[1]](*sys.argv[2:])
