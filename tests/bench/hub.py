"""The hub: events per second through its mailbox and journal, the time to audit a journal, and that to recover from it.

python -m bench.hub FOLDER STORE_ADDRESS      (the hub's process)
"""

import itertools
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
from support.in_memory import MemoryMailboxes

from headrace.comm.fleet import StoreFleet
from headrace.comm.mailbox import Mailbox
from headrace.comm.messages import (
    GroupId,
    Lease,
    LeaseGrant,
    LeaseRequest,
    Message,
    RequestRows,
    RowDone,
    StepTrained,
    Stop,
    TrainBatch,
    TrainingDone,
)
from headrace.comm.recipe import CommSettings
from headrace.comm.store.server import StoreServer
from headrace.comm.waits import waiting
from headrace.launch.config.load import read_recipe
from headrace.launch.cores import usable_cores
from headrace.launch.report.journal_audit import audit_lines
from headrace.relay.hub.context import HubContext
from headrace.relay.hub.loop import run
from headrace.relay.journal import events as ev
from headrace.relay.journal.hub_state import HubState
from headrace.relay.journal.journal import Journal
from headrace.relay.journal.replay import recover, replay

from .harness import BenchProcess, Measurement, Options, command

M = TypeVar("M", bound=Message)

_SECRET = b"benchmark"
_PROMPTS, _SAMPLES, _STEPS = 64, 8, 64
_EVENTS_PER_STEP = _PROMPTS * (_SAMPLES + 2) + 1
_UNDER_WAY = 8192
_DEADLINE_S = 120.0


def hub_events(name: str, options: Options) -> list[Measurement]:
    """Events per second of the hub's process, journal on; this process plays all rollouts and the trainer."""
    return _measure(name, _PROMPTS)


def starving_trainer(name: str, options: Options) -> list[Measurement]:
    """The same with all groups of the run in the queue, of which the first is complete when all others nearly are."""
    return _measure(name, _PROMPTS * _STEPS)


def _measure(name: str, num_queued: int) -> list[Measurement]:
    hosted = StoreServer("127.0.0.1", _SECRET).start()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "data.jsonl").write_text('{"prompt": "p"}\n' * 1000)
        with BenchProcess(command("hub", folder, hosted.address)) as hub, ThreadPoolExecutor(1) as pool:
            fleet = StoreFleet.join(hosted.address, "actor", 0, _SECRET, {}, CommSettings())
            rollout, step = fleet.open_mailbox("rollout-0"), [0]
            generating = pool.submit(_generate, rollout, step, num_queued)
            train(fleet.open_mailbox("actor-0"), step, _STEPS, _PROMPTS)
            rollout.send("rollout-0", Stop("finished"))
            generating.result(_DEADLINE_S)
            assert hub.process.wait(_DEADLINE_S) == 0
            fleet.leave()
        hosted.close()
        journal = Path(folder) / "journal.jsonl"
        lines = [msgspec.json.decode(line) for line in journal.read_bytes().splitlines()]
        state = replay(journal)
    assert state.step == _STEPS and state.is_balanced, f"step {state.step}"
    # In the first steps processes start and files are opened.
    measured = [line["t"] for line in lines if "t" in line][len(lines) // 5 : -1]
    rate = len(measured) / (measured[-1] - measured[0])
    return [Measurement(name, "5,000 a second", rate, "1/s", rate / 5000)]


def train(mailbox: Mailbox, step: list[int], num_steps: int, num_prompts: int) -> None:
    """The trainer: it takes the groups of each step, `num_prompts`, and trains them in no time. `step` has the present one."""
    while step[0] < num_steps:
        received = 0
        is_complete = False
        while not is_complete:
            mailbox.send("hub", RequestRows(step[0] * num_prompts + received, ["train"], step[0], received))
            answer = _expect(mailbox, TrainBatch)
            assert answer is not None, "the hub ended the run"
            received += len(answer.groups)
            is_complete = answer.ends_step
        mailbox.send("hub", StepTrained(step[0]))
        step[0] += 1
    mailbox.send("hub", TrainingDone({}))


def _generate(mailbox: Mailbox, step: list[int], num_groups: int) -> None:
    """All rollouts: they lease so many groups, and then finish the first sample of each in no time, the second, and so on."""
    request = 0
    while step[0] < _STEPS:
        held: list[Lease] = []
        while len(held) < num_groups:
            request += 1
            mailbox.send("hub", LeaseRequest(request, 0, num_groups - len(held)))
            grant = _expect(mailbox, LeaseGrant)
            if grant is None:
                return
            held += grant.leases
        for sample in range(_SAMPLES):
            for lease in held:
                row = lease.group.row(sample)
                mailbox.send("hub", RowDone(row, lease.attempt, 0, ["relay-0"], 8192, float(sample)))


def _expect(mailbox: Mailbox, kind: type[M]) -> M | None:
    """The next message of a kind; None at the end of the run."""
    with waiting("hub", kind.__name__, _DEADLINE_S) as wait:
        while True:
            envelope = mailbox.receive(1.0)
            wait.check()
            if envelope is not None and isinstance(envelope.message, Stop):
                return None
            if envelope is not None and isinstance(envelope.message, kind):
                return envelope.message


def journal_replay(name: str, options: Options) -> list[Measurement]:
    """A journal of `options.events` events, with 65,536 trajectories in flight, as far as there are so many.

    Events per second of one process that folds all of them, and of `headrace audit` with a process for each core; seconds in which the
    next hub has the state; the longest stop of the hub for a snapshot.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        stop_s = _write_journal(path, options.events)
        rates = [
            options.events / _seconds(work)
            for work in (lambda: replay(path), lambda: [*audit_lines(path.parent, usable_cores())])
        ]
        recovery_s = min(_seconds(lambda: recover(path)) for _ in range(3))
    return [
        Measurement(name, "300,000 a second", rates[0], "1/s", rates[0] / 300_000),
        Measurement("journal-audit", "300,000 a second", rates[1], "1/s", rates[1] / 300_000),
        Measurement("journal-recovery", "2 s", recovery_s, "s", 2 / recovery_s),
        Measurement("journal-snapshot", ".2 s", stop_s, "s", 0.2 / stop_s),
    ]


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _write_journal(path: Path, num_events: int) -> float:
    """The journal of a run of whole steps: groups leased, finished, handed out and trained; returns the longest stop for a snapshot.

    A version is published after each step, a checkpoint written after every 50th.
    """
    hub = HubContext(MemoryMailboxes().open("hub"), HubState(), Journal(path), itertools.count().__next__)
    keep, stops = hub.journal.keep, list[float]()
    hub.journal.keep = lambda state: stops.append(_seconds(lambda: keep(state)))
    hub.commit(ev.Opened(epoch=1, samples_per_prompt=_SAMPLES))
    under_way: deque[tuple[GroupId, int]] = deque()
    for step in range(-(-num_events // (_EVENTS_PER_STEP + 1))):
        while len(under_way) < min(_UNDER_WAY, num_events // (4 * _SAMPLES)):
            group = GroupId(0, hub.state.cursor)
            under_way.append((group, step))
            samples, holder = list(range(_SAMPLES)), f"rollout-{group.prompt % 128}"
            hub.commit(ev.Leased(group=group, samples=samples, attempt=1, version=step, holder=holder))
        for _ in range(_PROMPTS):
            group, version = under_way.popleft()
            for sample in range(_SAMPLES):
                row, units = group.row(sample), ["relay-0#1", "relay-1#1"]
                hub.commit(ev.RowReady(row=row, units=units, version=version, num_tokens=8192, reward=float(sample)))
            hub.commit(ev.Handed(step=step, groups=[group]))
        hub.commit(ev.Trained(step=step, busy_s=30.0))
        hub.commit(ev.Published(version=step + 1, digest=f"{step:016x}", relay="relay-0"))
        if step % 50 == 49:
            hub.commit(ev.Checkpointed(step=step + 1, path=f"step_{step + 1}"))
    hub.journal.keep(hub.state)
    hub.journal.close()
    return max(stops)


def _serve_hub(folder: str, address: str) -> None:
    """The hub's process, until its run ends."""
    words = {
        "run.dir": folder,
        "run.steps": _STEPS,
        "data.path": f"{folder}/data.jsonl",
        "batch.prompts_per_step": _PROMPTS,
        "batch.samples_per_prompt": _SAMPLES,
        "queue.lead": _PROMPTS * _STEPS,
    }
    recipe = read_recipe(None, [f"{key}={value}" for key, value in words.items()])
    fleet = StoreFleet.join(address, "hub", 0, _SECRET, {}, recipe.comm)
    run(fleet, recipe)
    fleet.leave()


if __name__ == "__main__":
    _serve_hub(*sys.argv[1:])
