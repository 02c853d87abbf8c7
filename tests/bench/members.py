"""The control plane of a large run on one machine: the store's CPU and memory, and how soon the hub acts on deaths.

    python -m bench.members hub FOLDER STORE_ADDRESS NUM_ROLLOUTS      (the hub's process)
    python -m bench.members trainer STORE_ADDRESS                      (a trainer that trains in no time)
    python -m bench.members host STORE_ADDRESS HOST NUM_MEMBERS        (the members of one host)

Store and hub are those of a run, each in its process. Each host is a process with a relay and rollouts, which have identities and
connections of their own, and send what they do in a run. All processes end with the one that started them. If the store may not open
a file for each member, it says so and the benchmark ends.
"""

import os
import random
import signal
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from headrace.comm.fleet import Fleet, StoreFleet
from headrace.comm.messages import (
    BusyReport,
    LeaseGrant,
    LeaseRequest,
    LoadReport,
    Message,
    RowDone,
    RowId,
    RowsStreamed,
)
from headrace.comm.messages.base import storage_id_of
from headrace.comm.process_tree import end_with_parent
from headrace.comm.recipe import CommSettings
from headrace.comm.waits import waiting
from headrace.launch.config.load import read_recipe
from headrace.relay.hub.hub import Hub
from headrace.relay.hub.loop import run

from .harness import ENVIRONMENT, BenchProcess, Measurement, Options, command
from .hub import train

_SECRET = b"benchmark"
_STEPS = 1_000_000
_PROMPTS, _SAMPLES = 512, 16
_GROUPS_HELD = 2
_ROW_S, _LOAD_S, _STREAM_S, _BUSY_S, _REPEAT_S = 2.0, 2.5, 2.0, 1.0, 2.0
"""Seconds between two messages of a kind: a rollout on one GPU finishes a row of 2,000 tokens in 2 s (docs/develop/reproduction.md),
reports its load and first tokens by the settings' defaults, and repeats an open request."""
_TURN_S = 0.1
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
        words = [("hub", folder, address, count - options.hosts), ("trainer", address)]
        words += [("host", address, host, options.members) for host in range(options.hosts)]
        hub, _, *hosts = started = [stack.enter_context(BenchProcess(command("members", *word))) for word in words]
        for process in started:
            process.line("ready")
        began = time.monotonic()
        for host in hosts:
            _tell(host)
        join_s = max(float(host.line("joined").split()[1]) for host in hosts) - began
        time.sleep(_SETTLE_S)
        before = _cpu_s(store), _cpu_s(hub)
        time.sleep(options.seconds)
        cores, hub_cores = ((_cpu_s(p) - s) / options.seconds for p, s in zip((store, hub), before, strict=True))
        memory = _memory_bytes(store)
        per_host = [_names(host, options.members) for host in range(options.hosts)]
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
    aim, expiry_s = 0.7 if count > 2000 else 0.2, CommSettings().expiry_s
    return [
        Measurement(f"{name}-join", f"{count} members", join_s, "s", count / join_s),
        Measurement(f"{name}-cpu", f"{aim} core", cores, "cores", cores / aim),
        Measurement(f"{name}-memory", f"{count} members", memory / 1e6, "MB", memory / 1e6 / count),
        Measurement(f"{name}-hub-cpu", "1 core", hub_cores, "cores", hub_cores),
        Measurement(f"{name}-close", "1 s", close_s, "s", close_s),
        Measurement(f"{name}-kill", "1 s", kill_s, "s", kill_s),
        Measurement(f"{name}-freeze", f"{expiry_s:g} s", freeze_s, "s", freeze_s / expiry_s),
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
    words = ["-m", "headrace.comm.store", "--end-with-parent", "--expect", str(num_members)]
    return BenchProcess([sys.executable, *words], {**os.environ, **ENVIRONMENT, "HEADRACE_SECRET": _SECRET.decode()})


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


def _names(host: int, num_members: int) -> list[str]:
    first = host * (num_members - 1)
    return [f"relay-{host}", *(f"rollout-{index}" for index in range(first, first + num_members - 1))]


class _Played(ABC):
    """A member of a host: it joins with its own connection, and its messages to the hub are those of a run."""

    def __init__(self, address: str, name: str) -> None:
        role, _, index = name.partition("-")
        info = {"unit": "127.0.0.1:1", "segment": "played"} if role == "relay" else {}
        self.fleet: StoreFleet = Fleet.join(address, role, int(index), _SECRET, info, CommSettings())
        self.mailbox = self.fleet.open_mailbox(name)
        self._due: dict[str, float] = {}

    @abstractmethod
    def turn(self) -> None:
        """Take the messages that have come and send those that are due."""

    def is_due(self, kind: str, period_s: float) -> bool:
        """Whether `period_s` have passed since this was last true for the kind; the first time is random."""
        now = time.monotonic()
        is_due = now >= self._due.setdefault(kind, now + random.random() * period_s)
        if is_due:
            self._due[kind] += period_s
        return is_due

    def send(self, message: Message) -> None:
        self.mailbox.send("hub", message)


class _Relay(_Played):
    def turn(self) -> None:
        while self.mailbox.receive(0) is not None:
            pass
        if self.is_due("busy", _BUSY_S):
            self.send(BusyReport(1.0, 1.0))


class _Rollout(_Played):
    """It finishes its rows one after the other, the oldest first."""

    def __init__(self, address: str, name: str) -> None:
        super().__init__(address, name)
        relay = self.fleet.nearest("relay", having="unit")
        self._units = [storage_id_of(relay.name, relay.incarnation)]
        self._held: deque[tuple[RowId, int]] = deque()
        self._request = LeaseRequest(self.fleet.incarnation << 32, 0, 0)

    def turn(self) -> None:
        while (envelope := self.mailbox.receive(0)) is not None:
            grant = envelope.message
            if isinstance(grant, LeaseGrant) and grant.request_id == self._request.request_id:
                self._held += [(each.group.row(s), each.attempt) for each in grant.leases for s in each.samples]
                self._request = LeaseRequest(grant.request_id + 1, 0, 0)
        groups = (_GROUPS_HELD * _SAMPLES - len(self._held)) // _SAMPLES
        is_new = self._request.num_groups == 0
        if groups > 0 and (is_new or self.is_due("repeat", _REPEAT_S)):
            self._request = LeaseRequest(self._request.request_id, 0, groups if is_new else self._request.num_groups)
            self.send(self._request)
        if self._held and self.is_due("row", _ROW_S):
            row, attempt = self._held.popleft()
            self.send(RowDone(row, attempt, 0, self._units, 2000, random.random()))
        if self._held and self.is_due("stream", _STREAM_S):
            rows, attempts = zip(*list(self._held)[::2], strict=True)
            numbers = [0] * len(rows), [1000] * len(rows)
            self.send(
                RowsStreamed(
                    rows=[*rows],
                    attempts=[*attempts],
                    versions=numbers[0],
                    num_tokens=numbers[1],
                    storage_ids=self._units,
                )
            )
        if self.is_due("load", _LOAD_S):
            n = len(self._held)
            self.send(
                LoadReport(
                    version=0, num_running=n, num_waiting=0, kv_util=0.5, tokens=0, busy_s=1.0, idle_s=0.0, pull_s=0.0
                )
            )


def _serve_host(address: str, host: str, num_members: str) -> None:
    """The process of a host. A line on standard input starts its members; another one ends the connection of the last one."""
    names = _names(int(host), int(num_members))
    _report_ready()
    sys.stdin.readline()
    with ThreadPoolExecutor(len(names)) as pool:  # at once, as the processes of a host do
        played = list(pool.map(lambda name: (_Relay if name.startswith("relay") else _Rollout)(address, name), names))
    print(f"joined {time.monotonic()}", flush=True)
    threading.Thread(target=_play, args=[played], daemon=True).start()
    if sys.stdin.readline():
        played.pop().fleet.store.close()
        sys.stdin.read()
    os._exit(0)


def _play(played: list[_Played]) -> None:
    while True:
        for member in list(played):
            if member in played:
                member.turn()
        time.sleep(_TURN_S)


def _serve_hub(folder: str, address: str, num_rollouts: str) -> None:
    """The hub's process. It writes each death, and when its leases were taken back, into the file `deaths`."""
    words = {
        "run.dir": folder,
        "run.steps": _STEPS,
        "data.path": f"{folder}/data.jsonl",
        "batch.prompts_per_step": _PROMPTS,
        "batch.samples_per_prompt": _SAMPLES,
        "queue.lead": int(num_rollouts) * _GROUPS_HELD + 2 * _PROMPTS,
    }
    recipe = read_recipe(None, [f"{key}={value}" for key, value in words.items()])
    with Path(folder, "deaths").open("a", buffering=1) as file:

        def record_deaths(hub: Hub) -> None:
            on_process_death = hub.on_process_death

            def recorded(process: str, reason: str) -> None:
                on_process_death(process, reason)
                file.write(f"{process} {time.monotonic()}\n")

            hub.on_process_death = recorded
            _report_ready()

        run(Fleet.join(address, "hub", 0, _SECRET, {}, recipe.comm), recipe, on_open=record_deaths)


def _serve_trainer(address: str) -> None:
    fleet = Fleet.join(address, "actor", 0, _SECRET, {}, CommSettings())
    _report_ready()
    train(fleet.open_mailbox("actor-0"), [0], _STEPS, _PROMPTS)


def _report_ready() -> None:
    print("ready", flush=True)


def _end_with_input() -> None:
    """End this process when standard input does; waits for that."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    end_with_parent(signal.SIGKILL, os.getppid())
    serve = {"hub": _serve_hub, "trainer": _serve_trainer, "host": _serve_host}[sys.argv[1]]
    if serve is not _serve_host:
        threading.Thread(target=_end_with_input, daemon=True).start()
    serve(*sys.argv[2:])
