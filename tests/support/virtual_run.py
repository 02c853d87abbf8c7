"""The real hub in virtual time: simulated rollouts, trainer and relay on one heap of events, without processes or sleeps.

A rollout decodes all its trajectories together: a decode step takes max(fixed, per request * n) seconds for n of them. It takes
new weights once it is empty, and at most its share of groups on one version, as real rollouts do.
"""

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from support.in_memory import MemoryNetwork

from headrace.comm.messages import LeaseGrant, LeaseRequest, RequestRows, RowDone, RowId, StepTrained, TrainBatch
from headrace.comm.messages.weights import VersionReady
from headrace.comm.recipe import BatchSettings, QueueSettings, RepackSettings
from headrace.comm.signing import Envelope
from headrace.relay.dataset.order import PromptPool
from headrace.relay.dataset.rows import JsonLines
from headrace.relay.hub.hub import Hub
from headrace.relay.journal import events as ev
from headrace.relay.journal.journal import Journal
from headrace.relay.journal.state import HubState
from headrace.relay.queue.admission import Admission
from headrace.relay.queue.schedules import SCHEDULES
from headrace.rollout.pacing import RolloutPacing


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """A job on emulated devices; times in seconds, lengths in tokens."""

    per_step: int
    samples: int
    num_rollouts: int
    token_s: float
    """The trainer's time for a token."""
    batch_s: float = 0.0
    """The trainer's time for a hand-out beside its tokens."""
    publish_s: float = 0.65
    decode_s: float = 0.0115
    request_s: float = 41e-6
    max_running: int = 512
    median: float = 1600.0
    tail: float = 10.0
    """The 99th percentile of the lengths over their median."""
    longest: int = 16384
    growth: float = 1.0
    """Factor on the lengths from the middle of the run on."""
    filtered: float = 0.0
    """Share of the groups that are filtered out."""
    micro_tokens: int = 16384


@dataclass
class Rollout:
    """A replica; `progress` counts the tokens that each of its trajectories has drawn since the run began."""

    version: int = -1
    taken: int = 0
    window: int = 0
    progress: float = 0.0
    at: float = 0.0
    running: list[tuple[float, RowId, int, int]] = field(default_factory=list)
    waiting: list[tuple[RowId, int]] = field(default_factory=list)
    is_asking: bool = False
    turn: int = 0
    """Makes the scheduled end of an earlier batch void."""


class VirtualRun:
    """One run. `steps` has the time and the mean staleness of each."""

    def __init__(self, folder: Path, fleet: Fleet, num_steps: int, seed: int = 0, **queue: int | str | bool) -> None:
        data = folder / "data.jsonl"
        data.write_text('{"prompt": "p"}\n' * 64)
        self.path = folder / "journal.jsonl"
        self.fleet, self.num_steps, self.seed = fleet, num_steps, seed
        self.now, self.heap, self.order = 0.0, [], itertools.count()
        self.boxes = MemoryNetwork().mailboxes
        self.rollouts = {f"rollout-{i}": Rollout() for i in range(fleet.num_rollouts)}
        self.inboxes = {name: self.boxes.open(name) for name in (*self.rollouts, "actor-0")}
        batch = BatchSettings(prompts_per_step=fleet.per_step, samples_per_prompt=fleet.samples)
        settings = QueueSettings(filter_zero_std=fleet.filtered > 0, **queue)  # pyright: ignore[reportArgumentType]
        admission = Admission(batch, settings, num_steps, micro_tokens=fleet.micro_tokens)
        self.journal = Journal(self.path)
        self.hub = Hub(
            self.boxes.open("hub"), HubState(), self.journal, PromptPool(JsonLines(data), shuffle=True, seed=3), admission,
            settings, RepackSettings(enabled=False), clock=lambda: self.now, wall_clock=lambda: self.now,
        )  # fmt: skip
        self.hub.context.commit(ev.Opened(epoch=1, samples_per_prompt=fleet.samples))
        self.pacing = RolloutPacing.of(SCHEDULES["headrace"], None, fleet.per_step, fleet.num_rollouts)
        self.requests = itertools.count(1)
        self.published = 0
        self.batches: list[TrainBatch] = []
        self.is_asking = False
        self.lags: list[int] = []
        self.is_training, self.received, self.trained, self.fetched = False, 0, 0, 0
        self.busy_s = self.waited_s = 0.0
        self.idle_since = 0.0
        self.ends: list[float] = []
        self.staleness: list[float] = []
        self.windows: list[int] = []
        self.num_tokens, self.tokens = 0, []

    def run(self) -> "VirtualRun":
        self.say("relay-0/weights", VersionReady(0, ""))
        for name in self.rollouts:
            self.turn(name)
        self.request()
        while self.trained < self.num_steps:
            assert self.heap, "the run is stuck"
            self.now, _, act = heapq.heappop(self.heap)
            act()
        self.journal.close()
        self.boxes.close()
        return self

    def measured(self) -> tuple[float, float]:
        """Tokens a second and mean staleness, without the first steps, which fill the queue, and the last two."""
        first, last = self.num_steps // 2 - 1, self.num_steps - 3
        staleness = self.staleness[first + 1 : last + 1]
        tokens = self.tokens[last] - self.tokens[first]
        return tokens / (self.ends[last] - self.ends[first]), sum(staleness) / len(staleness)

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (self.now + seconds, next(self.order), act))

    def say(self, sender: str, message: object) -> None:
        assert self.hub.handle(Envelope(sender, message))  # pyright: ignore[reportArgumentType]
        self.deliver()

    def deliver(self) -> None:
        """Hand the hub's answers to those that they are for, after the delay of a message."""
        for name, inbox in self.inboxes.items():
            while (envelope := inbox.receive(0)) is not None:
                message = envelope.message
                if isinstance(message, TrainBatch):
                    self.after(0.005, lambda message=message: self.take(message))
                elif isinstance(message, LeaseGrant):
                    self.after(0.005, lambda name=name, message=message: self.start(name, message))

    # ------------------------------------------------------------------------------------------------------- rollouts

    def length(self, row: RowId) -> int:
        random = Random(f"{self.seed} {row}")
        grown = self.fleet.growth if self.trained >= self.num_steps // 2 else 1.0
        drawn = self.fleet.median * grown * math.exp(random.gauss(0, math.log(self.fleet.tail) / 2.326))
        return max(1, min(self.fleet.longest, int(drawn)))

    def advance(self, name: str) -> Rollout:
        """Bring a rollout to the present moment."""
        rollout = self.rollouts[name]
        if rollout.running:
            rollout.progress += (self.now - rollout.at) / self.step_s(len(rollout.running))
        rollout.at = self.now
        return rollout

    def step_s(self, running: int) -> float:
        return max(self.fleet.decode_s, self.fleet.request_s * running)

    def turn(self, name: str) -> None:
        """Finish, take weights, start what waits, ask for more, and plan the next end."""
        rollout = self.advance(name)
        done: list[tuple[RowId, int]] = []
        while rollout.running and rollout.running[0][0] <= rollout.progress + 1e-9:
            done.append(heapq.heappop(rollout.running)[1:3])
        for row, attempt in done:
            reward = float(row.sample) * (Random(f"{row.group}").random() >= self.fleet.filtered)
            tokens = self.length(row)
            self.say(name, RowDone(row, attempt, rollout.version, ["relay-0#1"], tokens, reward))
        if not rollout.running and not rollout.waiting and rollout.version < self.published:
            rollout.version, rollout.taken = self.published, 0
        while rollout.waiting and len(rollout.running) < self.fleet.max_running:
            row, attempt = rollout.waiting.pop()
            heapq.heappush(rollout.running, (rollout.progress + self.length(row), row, attempt, next(self.order)))
        room = self.fleet.max_running - len(rollout.running)
        if not rollout.running:
            rollout.taken = 0
        share = self.pacing.share_of(rollout.window)
        groups = int(min(math.ceil(room / self.fleet.samples), share - rollout.taken))
        if groups > 0 and rollout.version == self.published and not rollout.is_asking:
            rollout.is_asking = True
            self.say(name, LeaseRequest(next(self.requests), rollout.version, groups))
        rollout.turn += 1
        if rollout.running:
            left = (rollout.running[0][0] - rollout.progress) * self.step_s(len(rollout.running))
            self.after(max(0.0, left), lambda turn=rollout.turn: self.turn(name) if turn == rollout.turn else None)

    def start(self, name: str, grant: LeaseGrant) -> None:
        rollout = self.advance(name)
        if not rollout.running and rollout.version < self.published:
            rollout.version, rollout.taken = self.published, 0
        rollout.is_asking = False
        rollout.taken, rollout.window = rollout.taken + len(grant.leases), grant.window
        rollout.waiting += [
            (lease.group.row(sample), lease.attempt) for lease in grant.leases for sample in lease.samples
        ]
        self.turn(name)

    # -------------------------------------------------------------------------------------------------------- trainer

    def request(self) -> None:
        """Ask for rows while fewer than two answers wait, as the trainer's stream does."""
        if self.fetched < self.num_steps and len(self.batches) < 2 and not self.is_asking:
            self.is_asking = True
            self.say(
                "actor-0",
                RequestRows(next(self.requests), ["train"], self.fetched, self.received, (), self.fleet.micro_tokens),
            )

    def take(self, batch: TrainBatch) -> None:
        self.is_asking = False
        self.batches.append(batch)
        self.received += len(batch.groups)
        if self.received == batch.total:
            self.fetched, self.received = self.fetched + 1, 0
        self.request()
        self.work()

    def work(self) -> None:
        if self.is_training or not self.batches:
            return
        self.waited_s += self.now - self.idle_since
        batch = self.batches.pop(0)
        self.is_training = True
        rows = batch.rows()
        tokens = sum(row.num_tokens for row in rows)
        self.num_tokens += tokens
        self.lags += [batch.step - row.version for row in rows]
        seconds = tokens * self.fleet.token_s + self.fleet.batch_s
        self.busy_s += seconds
        is_last = batch.first + len(batch.groups) == batch.total
        self.after(seconds, self.end_step if is_last else self.end_batch)
        self.request()

    def end_batch(self) -> None:
        self.is_training, self.idle_since = False, self.now
        self.work()

    def end_step(self) -> None:
        step, self.trained = self.trained, self.trained + 1
        self.windows.append(self.hub.leases.admission.lead(self.hub.state))
        self.staleness.append(sum(self.lags) / len(self.lags))
        self.lags = []
        self.ends.append(self.now)
        self.tokens.append(self.num_tokens)
        self.after(self.fleet.publish_s, lambda: self.publish(step + 1))
        self.say("actor-0", StepTrained(step, busy_s=self.busy_s, waited_s=self.waited_s))
        self.busy_s = self.waited_s = 0.0
        self.end_batch()

    def publish(self, version: int) -> None:
        self.published = version
        self.say("relay-0/weights", VersionReady(version, ""))
        for name in self.rollouts:
            self.turn(name)
