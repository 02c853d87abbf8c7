"""The rollout's loop: request leases, generate, score, write; load new weights once its own work has drained.

Consumes leases and weight versions. It waits only when it holds nothing: for the first version, or for a lease; messages of
the hub wake it. One version generates a trajectory from its first token to its last, unless the schedule is `partial`,
`rollout.max_age` is a number, or the hub orders new weights because the trainer starves (`relay/midway.py`).
"""

import logging
from pathlib import Path

from msgspec.structs import replace

from ..comm.clock import REAL_TIME, Clock
from ..comm.fleet import Fleet
from ..comm.host_memory import give_back_heap
from ..comm.mailbox import Envelope
from ..comm.messages import Lease, LeaseGrant, ServeSequences, Stop, SwitchWeights
from ..comm.recipe import Recipe, RewardSettings
from ..comm.trace import Trace
from ..comm.waits import waiting
from ..relay.queue.replicated_rows import ReplicatedRows
from ..relay.queue.schedules import schedule_of
from ..relay.receipts import note_digest
from ..relay.weights.slots import VersionNotAvailable
from .generation import Generation
from .generators.base import Generator, open_generator
from .leased_row import LeasedRow
from .leases import HeldLeases
from .load_report import LoadTotals, TokenAccount
from .migration.migration import Migration, MoveDeadlines
from .migration.transport import Transfers
from .pacing import RolloutPacing
from .partial_rows import PartialRows, StreamedRow
from .rewards.pool import Rewards, open_rewards
from .row_writer import RowWriter, Writer
from .scoring import Scoring
from .serving.served_side import SERVES, ServedSide

_log = logging.getLogger(__name__)

IDLE_S = 0.01
ENVIRONMENT_POLL_S = 0.002


class Rollout:
    """One replica of the generator with its connections. `run` is its main loop; tests call `start` and `step` instead."""

    def __init__(
        self,
        fleet: Fleet,
        recipe: Recipe,
        generator: Generator,
        rewards: Rewards,
        deadlines: MoveDeadlines | None = None,
        *,
        clock: Clock | None = None,
        row_writer: Writer | None = None,
        transfers: Transfers | None = None,
    ) -> None:
        self.generator = generator
        self.max_running = recipe.generator.num_slots
        """The number of trajectories up to which it requests leases."""
        self._fleet = fleet
        self._recipe = recipe
        self._mailbox = fleet.open_mailbox(fleet.name)
        self._pacing = RolloutPacing.of(
            schedule_of(recipe.run, recipe.rollout), recipe.batch.prompts_per_step, recipe.num_replicas
        )
        self._clock = clock or REAL_TIME
        streams = generator.can_stream and recipe.rollout.stream_tokens > 0
        settings = (recipe.batch.samples_per_prompt, self._pacing)
        self.leases = HeldLeases(
            self._mailbox, fleet.incarnation, *settings, can_continue=streams, clock=self._clock,
            is_bounded=recipe.queue.max_staleness is not None,
        )  # fmt: skip
        self._storage = ReplicatedRows(fleet)
        self._partial_rows = PartialRows(generator, self.leases, self._storage, recipe.rollout.stream_tokens)
        self._row_writer = row_writer or RowWriter(self._mailbox, self._storage, recipe.comm.deadline_s)
        self.served = ServedSide(self._mailbox, generator, self.max_running, self._clock)
        self._tokens = TokenAccount(generator, self.leases, fleet.incarnation, self.served)
        self._scoring = Scoring(rewards, recipe.reward, self.leases, self._row_writer, self._tokens)
        self._trace = Trace(Path(recipe.run.dir), fleet.name, self._clock)
        self._generation = Generation(
            generator, self._scoring, recipe, self.leases, lambda: generator.weights.version,
            drops_long=recipe.data.too_long == "drop",
        )  # fmt: skip
        self.migration = Migration(
            fleet, self._mailbox, generator, self.leases, recipe, self._trace, deadlines, transfers
        )
        self._is_stopped = False
        self._totals = LoadTotals()

    def run(self) -> None:
        """Run until the hub's `Stop`."""
        self.start()
        self._wait_for_weights()
        while not self._is_stopped:
            self.step()
        self.close()

    def start(self) -> None:
        """Wait for a storage unit, and start the thread that writes finished rows."""
        self._fleet.nearest("relay", having="unit")
        self._row_writer.start()
        self._generation.start()
        if self._recipe.rollout.serve:
            self.served.check()
            self._fleet.announce(**{SERVES: "yes"})

    def step(self) -> None:
        """One turn of the loop: messages, moves, weights, leases, a step of the generator, finished rows, a report."""
        self._totals.end_idle(self._clock.now())
        self._read_messages()
        self.migration.advance()
        has_turns = self._generation.advance()
        self._request_leases(self._update_weights())
        self.served.admit(has_leases=not self._is_idle)
        self._generate()
        self._scoring.advance()
        if self.leases.can_continue and (rows := self._partial_rows.due(has_turns=has_turns)):
            self._stream(rows)
        self._report()

    def close(self) -> None:
        """Write the scored rows and what there is of the others, report those to the hub, close the connections."""
        self._scoring.advance()
        if self.leases.can_continue and (rows := self._partial_rows.all()):
            self._stream(rows)
        self._row_writer.close()
        self._generation.close()
        held = self.leases.held_rows(*self.migration.held())
        held = replace(held, drawn=self._tokens.report(self.migration.moving(), is_whole=True))
        self.migration.close()
        self._mailbox.send("hub", held)
        self.generator.close()
        self._trace.close()
        self._mailbox.close()

    def _stream(self, rows: list[StreamedRow]) -> None:
        drawn = self._tokens.report(())
        self._row_writer.submit([row._replace(drawn=drawn) for row in rows])

    def handle(self, envelope: Envelope) -> None:
        match envelope.message:
            case LeaseGrant() as grant:
                self._take_leases(grant)
            case SwitchWeights(version=version):
                if version == self.generator.weights.version:
                    self._update_weights(is_ordered=True)
            case ServeSequences() as message:
                self.served.handle(envelope.sender, message)
            case Stop(reason=reason):
                _log.info("stopped by the hub (%s) with %d unfinished trajectories", reason, len(self.leases.held))
                self._is_stopped = True
            case message:
                self.migration.handle(envelope.sender, message)

    def _take_leases(self, grant: LeaseGrant) -> None:
        """Start the groups of a grant, on the newest version if nothing runs; begun ones and evaluations on their own."""
        is_begun = any(lease.partials for lease in grant.leases) and not self._pacing.rules.mixes_versions
        is_pinned = is_begun or grant.is_evaluation
        if too_old := self.leases.too_old(grant):
            self._drop(too_old)
            grant = self.leases.give_back(grant, lambda group: group in {held.row_id.group for held in too_old})
        if is_pinned and not self.leases.is_answered(grant):
            is_older = is_begun and grant.version < self.generator.weights.version
            if is_older and (own := self.leases.own(grant)):
                # They go on under the newer weights. A refusal would bring the same grant again, until they have ended.
                grant = self.leases.give_back(grant, lambda group: group not in own)
            elif grant.leases and not self._has_version(grant):
                return
        if not is_pinned:
            self._update_weights()  # a version may have come out since the last turn
        for lease, fresh in self.leases.take(grant, self.generator.weights.version):
            self._start_group(lease, fresh)

    def _drop(self, rows: list[LeasedRow]) -> None:
        """End unfinished trajectories; one whose turn has just ended is dropped with that turn."""
        numbers = {held.row_id.number for held in rows}
        for number in numbers:
            del self.leases.held[number]
        live = (part.trajectory_id for part in self.generator.unfinished())
        self.generator.export_sequences([number for number in live if number in numbers])

    def _has_version(self, grant: LeaseGrant) -> bool:
        """Switch to the version of a grant if nothing runs; without that version the grant goes back to the hub."""
        if self.generator.weights.version == grant.version:
            return True
        is_gone = False
        if self._is_idle and not self.migration.is_under_way:
            try:
                self._take_weights(grant.version)
            except VersionNotAvailable as error:
                _log.warning("%s", error)
                self._take_weights()
                is_gone = True
            else:
                return True
        self.leases.refuse(grant, is_gone=is_gone)
        return False

    def _wait_for_weights(self) -> None:
        weights = self.generator.weights
        with waiting("relay", "the first version", self._recipe.comm.deadline_s) as wait:
            while weights.newest() < 0 and not self._is_stopped:
                self._read_messages(IDLE_S)
                self._fleet.keep_waiting(wait)
                wait.check()
        if not self._is_stopped:
            self.begin()

    def begin(self) -> None:
        """Take the first version, which is there."""
        self._take_weights()
        if self._pacing.repacks:
            self.migration.begin()
        self._tokens.begin()

    def _update_weights(self, *, is_ordered: bool = False) -> bool:
        """Switch to the newest version if it is time for that; returns whether a newer one still waits."""
        weights = self.generator.weights
        age = weights.newest() - weights.version
        is_due = is_ordered or self._pacing.takes_weights(age, self._is_idle)
        if self.migration.is_under_way or age <= 0 or not is_due:
            return age > 0
        if self.leases.pins_version:
            return True
        self._take_weights(is_ordered=is_ordered)
        return False

    def _take_weights(self, version: int | None = None, *, is_ordered: bool = False) -> None:
        """Switch to the newest version, or to an older one; unfinished trajectories continue under it."""
        started = self._clock.now()
        self._trace.enter("pull")
        pulled = self.generator.take_weights(self._recipe.comm.deadline_s, version)
        num_unfinished = 0
        for live in self.generator.unfinished():
            # One that was dropped as its turn ended stays in the generator until the next step.
            if (held := self.leases.held.get(live.trajectory_id)) is not None:
                held.switches.append((live.num_tokens, pulled.version))
                note_digest(held.digests, pulled.version, pulled.digest)
                num_unfinished += 1
        self.served.switched(pulled.version, pulled.digest)
        self._mailbox.send("hub", replace(pulled, num_unfinished=num_unfinished, is_ordered=is_ordered))
        self.leases.begin_version(pulled.version, pulled.digest)
        self._totals.peak_running = 0
        self._totals.pull_s = self._clock.now() - started
        why = ", by order of the hub" if is_ordered else ""
        _log.info(
            "version %d taken in %.2f s%s; %d trajectories continue",
            pulled.version,
            self._totals.pull_s,
            why,
            num_unfinished,
        )
        give_back_heap()

    def _read_messages(self, timeout_s: float = 0.0) -> None:
        """Handle every message that has arrived; wait up to `timeout_s` for the first."""
        while (envelope := self._mailbox.receive(timeout_s)) is not None:
            timeout_s = 0.0
            self.handle(envelope)

    def _start_group(self, lease: Lease, fresh: list[LeasedRow]) -> None:
        begun = self._partial_rows.begun(lease, fresh, self._generation.params_of(lease.group))
        if begun:
            self.generator.import_sequences(begun)
        continued = {state.trajectory_id for state in begun}
        rows = [held for held in fresh if held.row_id.number not in continued]
        if not rows or not (problem := self._generation.begin(rows)):
            return
        if lease.group.is_evaluation:
            self._generation.fail(rows, problem)
        else:
            self.leases.refuse_prompt(rows, problem)

    @property
    def _is_idle(self) -> bool:
        """Whether no leased trajectory is unfinished here."""
        if self._generation.num_starting:
            return False
        if not self.served.num_served:
            return self.generator.idle
        return all(held.completion is not None for held in self.leases.held.values())

    def _request_leases(self, is_outdated: bool) -> None:
        if self._recipe.environment.is_served:
            return  # the front leases them, for agents
        if self._is_idle:
            self.leases.drained()
        # Those that it serves do not count: they get a part of the batch beside the trajectories of the run.
        in_batch = self.generator.num_running + self.generator.num_waiting - self.served.num_served
        busy = in_batch + self._generation.num_starting
        # Where rewards or writes are the slowest part, more trajectories would wait for them and get old.
        room = self._pacing.free_slots(self.max_running, busy + self._scoring.backlog)
        self.leases.ask(self.generator.weights.version, room, is_outdated=is_outdated)

    def _generate(self) -> None:
        """Step the generator; where nothing decodes, wait a moment for messages instead."""
        started = self._clock.now()
        self._trace.enter("idle" if self.generator.idle else "generate", version=self.generator.weights.version)
        if self.generator.idle:
            self._totals.idle_since = started
            self._read_messages(ENVIRONMENT_POLL_S if self._generation.num_starting else IDLE_S)
            return
        found = self._totals.step(self.generator, self._clock, self.migration.batch_bound, self.served.num_served)
        completions = self.served.take(found)
        if self._generation.episodes is not None and not (completions or self.generator.num_running):
            self._trace.enter("idle", version=self.generator.weights.version)
            self._totals.idle_since = started
            self._read_messages(ENVIRONMENT_POLL_S)
            return
        self._generation.end(completions)
        self._totals.busy_s += self._clock.now() - started

    def _report(self) -> None:
        now = self._clock.now()
        if now - self._totals.reported_at < self._recipe.repack.report_s:
            return
        self._totals.reported_at = now
        num_starting = self._generation.num_starting
        num_scoring = sum(held.completion is not None for held in self.leases.held.values())
        drawn = self._generation.num_drawn
        load = self._totals.report(self.generator, self.migration, drawn, num_starting, num_scoring, self.served)
        recomputed = self.generator.num_recomputed
        drawn = self._tokens.report(self.migration.moving(), is_whole=True)
        self._mailbox.send("hub", replace(load, drawn=drawn, recomputed=dict(self.generator.recomputed)))
        counters = {"running": load.num_running, "waiting": load.num_waiting, "kv_util": load.kv_util}
        self._trace.counters(**counters, recomputed=recomputed, **self._totals.counters(self.generator))


def run(fleet: Fleet, recipe: Recipe) -> None:
    """The rollout's process."""
    generator = open_generator(fleet, recipe)
    reward = RewardSettings() if recipe.environment.is_served else recipe.reward  # the front has them scored
    rewards = open_rewards(reward, recipe.run.steps, recipe.rollout.engine)
    Rollout(fleet, recipe, generator, rewards).run()
