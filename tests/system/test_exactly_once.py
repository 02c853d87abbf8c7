"""In any order of events, each trajectory is trained once or accounted for, and a reader gets the bytes of the right attempt.

A hub with in-memory storage; rollouts, relays and a trainer that follow their protocol, die, freeze, wake up and move rows
whenever the search for a counterexample decides so. The hub is killed at any event: its next process reads the journal, and
gets the last messages once more.
"""

import queue
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from support.in_memory import MemoryMailboxes
from support.in_memory_storage import MemoryRows

from headrace.comm.mailbox import Envelope, Mailbox
from headrace.comm.messages import (
    DropRows,
    LeaseGrant,
    LeaseRequest,
    LeaseReturn,
    Message,
    RequestRows,
    RowBatch,
    RowDone,
    RowId,
    RowsNotFound,
    StepTrained,
    TrainBatch,
    TrainerStarted,
    VersionReady,
)
from headrace.comm.messages.base import process_of
from headrace.comm.messages.migration import ClaimResult, ClaimRows, RowsReassigned
from headrace.comm.messages.queue import ColumnsAdded, GroupRef
from headrace.comm.recipe import AlgorithmSettings, BatchSettings, QueueSettings, RepackSettings
from headrace.relay.dataset.order import PromptPool
from headrace.relay.dataset.rows import JsonLines
from headrace.relay.hub.hub import Hub
from headrace.relay.journal import events as ev
from headrace.relay.journal.journal import Journal
from headrace.relay.journal.replay import replay
from headrace.relay.journal.state import HubState, RowStatus
from headrace.relay.queue.admission import Admission
from headrace.relay.queue.tasks import pipeline

M = TypeVar("M", RowBatch, TrainBatch)
ROLLOUTS = ("rollout-0", "rollout-1")
REFERENCES = ("reference-0", "reference-1")
RELAYS = ("relay-0", "relay-1")
PER_STEP, SAMPLES = 2, 2
BATCH = BatchSettings(prompts_per_step=PER_STEP, samples_per_prompt=SAMPLES)

rollouts = st.sampled_from(ROLLOUTS)
references = st.sampled_from(REFERENCES)
relays = st.sampled_from(RELAYS)
picks = st.integers(0, 7)
places = st.sampled_from([RELAYS, RELAYS[:1], RELAYS[1:]])


class HubKilledError(Exception):
    """The hub's process is killed."""


class MortalJournal(Journal):
    """A journal whose writer is killed after `left` more events, or before the next one if that is 0."""

    left: int | None = None

    def append(self, event: ev.Event) -> None:
        if self.left == 0:
            raise HubKilledError
        super().append(event)
        self.left = None if self.left is None else self.left - 1
        if self.left == 0:
            raise HubKilledError


class Outbox(Mailbox):
    """The hub's mailbox: messages leave with `deliver`, which a killed hub has not reached."""

    def __init__(self, mailboxes: MemoryMailboxes, epoch: int) -> None:
        super().__init__("hub", epoch, queue.SimpleQueue(), mailboxes)
        self.unsent: list[tuple[str, Message]] = []

    def send(self, to: str, message: Message) -> None:
        self.unsent.append((to, message))

    def deliver(self) -> None:
        for to, message in self.unsent:
            super().send(to, message)
        self.unsent.clear()


class World(RuleBasedStateMachine):
    """One run. `held` are the rows that each rollout believes to hold, with their attempts; that of a frozen one is out of date."""

    queue = QueueSettings(filter_zero_std=True)

    def __init__(self) -> None:
        super().__init__()
        self.tasks = pipeline(self.queue, AlgorithmSettings(kl_coef=0.1))
        self.folder = TemporaryDirectory()
        data = Path(self.folder.name, "data.jsonl")
        data.write_text("".join(f'{{"prompt": "p{i}"}}\n' for i in range(3)))
        self.path = Path(self.folder.name, "journal.jsonl")
        self.pool = PromptPool(JsonLines(data), shuffle=True, seed=1)
        self.mailboxes = MemoryMailboxes()
        self.boxes = {name: self.mailboxes.open(name) for name in (*ROLLOUTS, *REFERENCES, *RELAYS, "actor-0")}
        self.num_hubs = 0
        self.num_repeated = 0
        self.said: list[Envelope] = []
        self.held: dict[str, dict[RowId, int]] = {name: {} for name in ROLLOUTS}
        self.units: dict[str, MemoryRows] = {relay: MemoryRows() for relay in RELAYS}
        self.lives: dict[str, int] = dict.fromkeys(RELAYS, 1)
        self.received: list[GroupRef] = []
        self.batch: list[GroupRef] = []
        self.num_missing = 0
        self.trained: Counter[RowId] = Counter()
        self.request_id = 0
        self.work: dict[str, dict[int, RowBatch]] = {name: {} for name in REFERENCES}
        self.claims: dict[int, list[RowId]] = {}
        self.answered: dict[str, int] = dict.fromkeys(ROLLOUTS, 0)
        self.open_run(HubState())

    # -------------------------------------------------------------------------------------------------- the processes

    def open_hub(self, state: HubState) -> None:
        admission = Admission(BATCH, self.queue, num_steps=1000)
        self.journal, repack = MortalJournal(self.path), RepackSettings(period_s=0)
        self.num_hubs += 1
        self.outbox = Outbox(self.mailboxes, self.num_hubs)
        self.hub = Hub(self.outbox, state, self.journal, self.pool, admission, self.queue, repack, tasks=self.tasks)

    def open_run(self, state: HubState) -> None:
        self.said.clear()
        self.open_hub(state)
        needs = tuple(sorted(self.tasks["train"].needs))
        self.hub.context.commit(ev.Opened(epoch=state.epoch + 1, samples_per_prompt=SAMPLES, needs=needs))
        for relay in RELAYS:
            self.say(f"{relay}/weights", VersionReady(self.hub.state.step, "digest"))

    def restart_hub(self) -> None:
        """The next process of the hub: what the one before has not sent is lost, and its last messages come again."""
        self.journal.close()
        self.open_hub(replay(self.path))
        self.hub.context.commit(ev.HubRestarted())
        self.hub.leases.repeat_grants()
        for relay in RELAYS:
            self.hub.results.drop_needless(relay, self.units[relay].listing())
        for envelope in self.said[-1 - self.num_repeated :]:
            assert self.hub.handle(envelope)
        self.outbox.deliver()

    def act(self, action: Callable[[], object]) -> None:
        """Something that happens to the hub; if that is killed, the next one learns of it too."""
        try:
            action()
        except HubKilledError:
            self.restart_hub()
            action()
        self.outbox.deliver()

    def say(self, sender: str, message: Message) -> None:
        self.said.append(Envelope(sender, message))
        self.act(lambda: self.hub.handle(Envelope(sender, message)))

    def heard(self, name: str) -> Iterator[Message]:
        while (envelope := self.boxes[name].receive(0)) is not None:
            yield envelope.message

    def answers(self, name: str, kind: type[M]) -> list[M]:
        """The answer to the last request, if there is one; a second answer to it is ignored."""
        return [m for m in self.heard(name) if isinstance(m, kind) and m.request_id == self.request_id][:1]

    def unit(self, relay: str) -> str:
        return f"{relay}#{self.lives[relay]}"

    def read_messages(self, name: str) -> None:
        held = self.held[name]
        for message in self.heard(name):
            match message:
                case LeaseGrant(leases=leases) if message.request_id > self.answered[name]:
                    self.answered[name] = message.request_id
                    for lease in leases:
                        for sample in lease.samples:
                            held[lease.group.row(sample)] = lease.attempt
                case RowsReassigned(rows=rows, attempts=attempts):
                    for row, attempt in zip(rows, attempts, strict=True):
                        if held.get(row) == attempt:
                            del held[row]
                case ClaimResult(request_id=request_id, attempts=attempts) if request_id in self.claims:
                    held |= {row: a for row, a in zip(self.claims.pop(request_id), attempts, strict=True) if a}
                case _:
                    pass

    def pick(self, rollout: str, number: int) -> tuple[RowId, int]:
        rows = sorted(self.held[rollout].items())
        return rows[number % len(rows)]

    def write(self, row: RowId, attempt: int, relays: tuple[str, ...]) -> list[str]:
        content = np.array([row.epoch, row.prompt, row.sample, attempt])
        for relay in relays:
            self.units[relay].put(row.key(attempt), {"content": content})
        return [self.unit(relay) for relay in relays]

    # ------------------------------------------------------------------------------------------------------- rollouts

    @rule(rollout=rollouts, num_groups=st.integers(1, 3))
    def asks(self, rollout: str, num_groups: int) -> None:
        self.request_id += 1
        self.say(rollout, LeaseRequest(self.request_id, self.hub.state.step, num_groups))
        self.read_messages(rollout)

    @rule(rollout=rollouts, number=picks, to=places, is_equal=st.booleans())
    def finishes_one(self, rollout: str, number: int, to: tuple[str, ...], is_equal: bool) -> None:
        if self.held[rollout]:
            row, attempt = self.pick(rollout, number)
            self.finish(rollout, row, attempt, to, 1.0 if is_equal else float(row.sample))

    @rule(rollout=rollouts, to=places)
    def finishes_all(self, rollout: str, to: tuple[str, ...]) -> None:
        for row, attempt in list(self.held[rollout].items()):
            self.finish(rollout, row, attempt, to, float(row.sample))

    def finish(self, rollout: str, row: RowId, attempt: int, to: tuple[str, ...], reward: float) -> None:
        del self.held[rollout][row]
        units = self.write(row, attempt, to)
        self.say(rollout, RowDone(row, attempt, self.hub.state.step, units, 5, reward))

    @rule(rollout=rollouts, number=picks)
    def fails(self, rollout: str, number: int) -> None:
        if self.held[rollout]:
            row, attempt = self.pick(rollout, number)
            del self.held[rollout][row]
            self.say(rollout, RowDone(row, attempt, 0, [], 0, None, failure="no reward"))

    @rule(rollout=rollouts, number=picks)
    def gives_back(self, rollout: str, number: int) -> None:
        if self.held[rollout]:
            row, attempt = self.pick(rollout, number)
            group = self.hub.state.groups.get(row.group)
            mates = [r for r, a in self.held[rollout].items() if (r.group, a) == (row.group, attempt)]
            for mate in mates:
                del self.held[rollout][mate]
            if group is not None:
                self.say(rollout, LeaseReturn([row.group], [attempt]))

    def dies(self, rollout: str) -> None:
        """A rollout that holds rows dies between writing one and reporting it."""
        if self.held[rollout]:
            row, attempt = self.pick(rollout, 0)
            self.write(row, attempt, RELAYS)
        self.held[rollout].clear()
        self.act(lambda: self.hub.on_process_death(rollout, "dead"))

    def freezes(self, rollout: str) -> None:
        """A rollout counts as dead, and still acts on the rows that it believes to hold when it wakes up."""
        self.act(lambda: self.hub.on_process_death(rollout, "no heartbeat"))

    @rule(source=rollouts, destination=rollouts, both=st.booleans(), dead=st.booleans())
    def moves(self, source: str, destination: str, both: bool, dead: bool) -> None:
        """Rows move; the source dies on the way if it is `dead`, or claims them too if `both` do."""
        rows = dict(self.held[source])
        if source == destination or not rows:
            return
        if dead:
            self.dies(source)
        claimers = (source, destination) if both else (destination,)
        for rollout in claimers:
            if rollout == source and dead:
                continue
            self.request_id += 1
            self.claims[self.request_id] = list(rows)
            self.say(rollout, ClaimRows(self.request_id, list(rows), list(rows.values())))
        for rollout in (source, destination):
            self.read_messages(rollout)

    # --------------------------------------------------------------------------------------------- relays and the hub

    @rule(relay=relays)
    def forgets(self, relay: str) -> None:
        for message in self.heard(relay):
            if isinstance(message, DropRows):
                self.units[relay].drop(message.keys)

    @rule(
        what=st.sampled_from(["rollout", "frozen rollout", "relay", "relay", "run", "trainer"]),
        number=st.integers(0, 1),
    )
    def disaster(self, what: str, number: int) -> None:
        match what:
            case "rollout":
                self.dies(ROLLOUTS[number])
            case "frozen rollout":
                self.freezes(ROLLOUTS[number])
            case "relay":
                self.relay_dies(RELAYS[number])
            case "trainer":
                self.trainer_dies()
            case _:
                self.run_is_resumed()

    def relay_dies(self, relay: str) -> None:
        gone = self.unit(relay)
        list(self.heard(relay))
        self.units[relay] = MemoryRows()
        self.lives[relay] += 1
        self.act(lambda: self.hub.on_storage_lost(gone, "dead"))

    @rule(num_events=st.integers(0, 4), num_repeated=st.integers(0, 5))
    def hub_is_killed_soon(self, num_events: int, num_repeated: int) -> None:
        self.journal.left, self.num_repeated = num_events, num_repeated

    def trainer_dies(self) -> None:
        """The next incarnation trains the step from its beginning; a step that the last one reports too late does not count."""
        incarnation = self.hub.state.trainer_incarnation
        self.begin_step()
        self.say("actor-0", TrainerStarted(incarnation + 1))
        self.say("actor-0", StepTrained(self.hub.state.step, incarnation))
        list(self.heard("actor-0"))

    def run_is_resumed(self) -> None:
        """The run is resumed: the next hub knows the journal, the storage units are empty, and the trainer begins the step again."""
        self.journal.close()
        self.begin_step()
        for name in ("actor-0", *RELAYS):
            list(self.heard(name))
        for relay in RELAYS:
            self.units[relay] = MemoryRows()
            self.lives[relay] += 1
        self.open_run(replay(self.path))

    # ------------------------------------------------------------------------------------------------------ reference

    @rule(
        consumer=references,
        ends=st.sampled_from(["well", "reported twice", "dead before it writes", "dead before it reports"]),
    )
    def refers(self, consumer: str, ends: str) -> None:
        """A consumer requests rows, reads them, adds a column and reports it; or dies on the way."""
        self.request_id += 1
        self.say(
            consumer,
            RequestRows(
                self.request_id,
                ["reference"],
                open_batches=tuple(("reference", number) for number in self.work[consumer]),
                max_tokens=12,
            ),
        )
        for message in self.answers(consumer, RowBatch):
            done = self.add_column(consumer, message, is_written=ends != "dead before it writes")
            for _ in range(2 if ends == "reported twice" else ends == "well"):
                self.say(consumer, done)
        if ends.startswith("dead"):
            self.work[consumer].clear()
            self.act(lambda: self.hub.on_process_death(consumer, "dead"))

    @rule(consumer=references)
    def takes_work(self, consumer: str) -> None:
        """A consumer requests rows and computes while the next events happen."""
        self.request_id += 1
        self.say(
            consumer,
            RequestRows(
                self.request_id,
                ["reference"],
                open_batches=tuple(("reference", number) for number in self.work[consumer]),
                max_tokens=12,
            ),
        )
        for message in self.answers(consumer, RowBatch):
            self.work[consumer][message.batch_id] = message

    @rule(consumer=references, is_known=st.booleans())
    def finishes_work(self, consumer: str, is_known: bool) -> None:
        """A consumer reports a batch; the hub may count it as dead, which it does not know."""
        if self.work[consumer]:
            if not is_known:
                self.act(lambda: self.hub.on_process_death(consumer, "no heartbeat"))
            _, batch = self.work[consumer].popitem()
            self.say(consumer, self.add_column(consumer, batch, is_written=True))

    def add_column(self, consumer: str, batch: RowBatch, *, is_written: bool) -> ColumnsAdded:
        rows: list[RowId] = []
        units: list[list[str]] = []
        for group in batch.groups:
            readable = [n for n in range(len(group.samples)) if self.read(group, n, consumer)]
            for n in readable if is_written else ():
                row, attempt = group.row(n), group.attempts[n]
                living = [unit for unit in group.storage_ids[n] if unit == self.unit(process_of(unit))]
                for unit in living:
                    self.units[process_of(unit)].put(
                        row.key(attempt), {"ref_logprobs": np.array([row.number, attempt])}
                    )
                rows.append(row)
                units.append(living)
        return ColumnsAdded(batch.task, batch.batch_id, ["ref_logprobs"], rows, units)

    # -------------------------------------------------------------------------------------------------------- trainer

    @rule()
    def takes(self) -> None:
        step = self.hub.state.step
        self.request_id += 1
        self.say("actor-0", RequestRows(self.request_id, ["train"], step, len(self.received)))
        for message in self.answers("actor-0", TrainBatch):
            self.received += message.groups

    @rule()
    def trains(self) -> None:
        """Read the groups that were handed out since the last call, and make the step when there are enough."""
        for reference in self.received[len(self.batch) :]:
            if self.all_read(reference):
                self.batch.append(reference)
        self.received = list(self.batch)  # the other groups have left the step
        if len(self.batch) == PER_STEP:
            step = self.hub.state.step
            self.trained.update(reference.group.row(sample) for reference in self.batch for sample in reference.samples)
            self.begin_step()
            for _ in range(2):
                self.say("actor-0", StepTrained(step, self.hub.state.trainer_incarnation))

    @rule(first=rollouts, second=rollouts, num_groups=st.integers(1, 2), are_read=st.booleans())
    def all_goes_well(self, first: str, second: str, num_groups: int, are_read: bool) -> None:
        """Several steps of an undisturbed run, which is rare among random rules."""
        for rollout in (first, second):
            self.asks(rollout, num_groups)
        self.finishes_all(first, RELAYS)
        for consumer in REFERENCES:
            self.refers(consumer, "well")
        self.takes()
        if are_read:
            self.trains()

    def begin_step(self) -> None:
        self.received, self.batch = [], []

    def all_read(self, reference: GroupRef) -> bool:
        """As a stream does it: every row is tried, and each missing row is reported."""
        found = [self.read(reference, n) for n in range(len(reference.samples))]
        return all(found)

    def read(self, reference: GroupRef, n: int, reader: str = "actor-0") -> bool:
        row, attempt = reference.row(n), reference.attempts[n]
        units = [unit for unit in reference.storage_ids[n] if unit == self.unit(process_of(unit))]
        if reader != "actor-0":  # rows of an older batch may have left the queue; rows in training stay
            units = [unit for unit in units if self.units[process_of(unit)].has(row.key(attempt), "content")]
        for unit in units:
            columns = self.units[process_of(unit)].get(row.key(attempt))
            assert columns["content"].tolist() == [row.epoch, row.prompt, row.sample, attempt], (
                "the bytes of another attempt"
            )
            if reader == "actor-0":
                assert columns["ref_logprobs"].tolist() == [row.number, attempt], "trained without the reference"
        if not units:
            self.num_missing += 1
            self.say(reader, RowsNotFound([row], [attempt], "no unit has it"))
        return bool(units)

    # ----------------------------------------------------------------------------------------------------- invariants

    @invariant()
    def the_account_holds(self) -> None:
        assert self.hub.state.is_balanced
        assert self.hub.state.account.trained == self.trained.total()
        assert all(record.is_balanced for record in self.hub.state.tasks.values())

    @invariant()
    def nothing_is_trained_twice(self) -> None:
        assert all(times == 1 for times in self.trained.values())

    def storage_holds_what_the_hub_says(self) -> None:
        """Each ready row is in the units that the hub names. There may be other bytes, of attempts that cannot be read any more:
        their writer counted as dead, woke up, wrote, and died before it reported."""
        expected: dict[str, set[str]] = {relay: set() for relay in RELAYS}
        for group in self.hub.state.groups.values():
            for row_id in group.row_ids(RowStatus.READY):
                row = group.rows[row_id.sample]
                for unit in row.storage_ids:
                    expected[process_of(unit)].add(row_id.key(row.attempt))
        for relay in RELAYS:
            self.forgets(relay)
            held = set(self.units[relay].listing())
            assert held >= expected[relay]
            assert not (held - expected[relay]) & set.union(*expected.values()), "a copy of which the hub does not know"

    def teardown(self) -> None:
        """After any sequence of events the run continues."""
        self.journal.left = None
        step = self.hub.state.step
        for consumer in REFERENCES:
            while self.work[consumer]:
                self.finishes_work(consumer, is_known=True)
        for _ in range(6):
            self.all_goes_well(*ROLLOUTS, num_groups=2, are_read=True)
            self.all_goes_well(*reversed(ROLLOUTS), num_groups=2, are_read=True)
        assert self.hub.state.step > step + 1
        for _ in range(4):
            for consumer in REFERENCES:
                self.refers(consumer, "well")
        complete = [group for group in self.hub.state.queued() if group.is_complete]
        assert all(group.has(self.tasks["train"].needs) for group in complete), "rows that the reference never got"
        self.storage_holds_what_the_hub_says()
        self.hub.context.journal.close()
        assert replay(self.path) == self.hub.state
        self.mailboxes.close()
        self.folder.cleanup()


class Evicting(World):
    """The same, where groups that are too stale or lost a row leave the queue, even while their rows are held or read."""

    queue = QueueSettings(filter_zero_std=True, max_staleness=1)


@pytest.mark.parametrize("world", [World, Evicting])
def test_each_trajectory_is_trained_once_or_accounted_for(world: type[World]):
    run_state_machine_as_test(
        world,
        settings=settings(
            max_examples=250,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
