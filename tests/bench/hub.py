"""The hub: events per second through its mailbox and journal, and the time to replay a journal.

python -m bench.hub FOLDER STORE_ADDRESS      (the hub's process)
"""

import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

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
from headrace.relay.hub.loop import run
from headrace.relay.journal import events as ev
from headrace.relay.journal.journal import Journal
from headrace.relay.journal.replay import replay

from .harness import BenchProcess, Measurement, Options, command

M = TypeVar("M", bound=Message)

_SECRET = b"benchmark"
_PROMPTS, _SAMPLES, _STEPS = 64, 8, 64
_EVENTS_PER_STEP = _PROMPTS * (_SAMPLES + 2) + 1
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
    """Seconds to replay a journal of `options.events` events."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        _write_journal(path, options.events)
        started = time.perf_counter()
        replay(path)
        replay_s = time.perf_counter() - started
    return [Measurement(name, "30 s", replay_s, "s", 30 / replay_s)]


def _write_journal(path: Path, num_events: int) -> None:
    """The journal of a run of whole steps: groups leased, finished, handed out and trained."""
    journal, samples = Journal(path), list(range(_SAMPLES))
    journal.append(ev.Opened(epoch=1, samples_per_prompt=_SAMPLES))
    for step in range(-(-num_events // _EVENTS_PER_STEP)):
        groups = [GroupId(0, step * _PROMPTS + i) for i in range(_PROMPTS)]
        for group in groups:
            journal.append(ev.Leased(group=group, samples=samples, attempt=1, version=step, holder="rollout-0"))
        for group in groups:
            for sample in samples:
                row, reward = group.row(sample), float(sample)
                journal.append(ev.RowReady(row=row, units=["relay-0"], version=step, num_tokens=8192, reward=reward))
            journal.append(ev.Handed(step=step, groups=[group]))
        journal.append(ev.Trained(step=step))
    journal.close()


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
