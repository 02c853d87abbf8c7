"""The invariants of a simulated run, held after each event of the hub's journal and at the end."""

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from headrace.comm.messages import RowId
from headrace.comm.recipe import Recipe
from headrace.relay.journal import events as ev
from headrace.relay.journal.events import decode_event
from headrace.relay.journal.files import named_by_place
from headrace.relay.journal.journal import Journal
from headrace.relay.journal.records import RowStatus
from headrace.relay.journal.replay import replay
from headrace.relay.journal.snapshots import snapshots_of
from headrace.relay.journal.state import HubState, apply
from headrace.relay.queue.schedules import schedule_of

from .processes import Killed, VirtualProcess

if TYPE_CHECKING:
    from headrace.relay.hub.hub import Hub
    from headrace.rollout.loop import Rollout

    from .cluster import Cluster

WIDEST_STEPS = 64.0
"""Most steps of groups that may be under way. A step of one group is short beside the time of a group, so some twenty are usual there."""
_TORN = 3
"""Each snapshot of this number is torn, as by a power cut."""
_LOOK_EVERY = 16
"""Events between two looks at what costs much: all rows of all units."""


class Watched(Protocol):
    """The run that is watched."""

    folder: Path
    recipe: Recipe
    hub: "Hub | None"
    cluster: "Cluster"
    num_starts: int
    applied: Counter[str]

    def kill(self, name: str, *, is_noticed: bool, down_s: float) -> None: ...


class Checks:
    """Watches a run. Each method raises `AssertionError` where something does not hold."""

    def __init__(self, run: Watched) -> None:
        self.run = run
        self.rollouts: dict[VirtualProcess, Rollout] = {}
        self.events_left: tuple[str, int, bool] | None = None
        """Events of this kind, or of any, that the hub still writes until it is killed, and whether it dies after the last one or before."""
        self.num_events = 0
        self.num_snapshots = 0
        self.errors = Errors()
        self.status = ""
        """How the last run ended."""
        self.digests: dict[int, str] = {}
        """Of each version, as the trainer published it last."""
        self.rows_of_steps: dict[int, list[str]] = {}
        """Keys of the rows that the trainer trained last in each step."""
        self.widest = 0.0
        """The widest window so far, in steps."""
        self._used: dict[int, str] = {}
        """Of each version that a rollout has generated with."""
        self._shadow = HubState()
        self._trained: dict[int, list[RowId]] = {}
        """Rows by the step that trained them."""

    def observe(self, hub: "Hub") -> None:
        """Watch the events of a hub, whose state is that of its journal."""
        journal, state = hub.context.journal, hub.state
        journal.tail_bytes, journal.part_bytes = 1 << 12, 1 << 14
        journal.keep = partial(self._keep, journal, journal.keep)  # pyright: ignore[reportAttributeAccessIssue] - of this one journal
        self.run.applied["hub: begins with a snapshot"] += any(True for _ in snapshots_of(journal.path))
        self._shadow = replay(journal.path)
        assert self._shadow == state, "the hub begins with another state than its journal's"
        self._trained = {step: rows for step, rows in self._trained.items() if step < state.step}
        if self.run.num_starts > 1 and not state.hub_restarts:  # steps that were given up are trained otherwise
            self._used = {version: digest for version, digest in self._used.items() if version <= state.step}
        if state.hub_restarts:
            self.look(state)
        write = journal.append

        def append(event: ev.Event) -> None:
            dies = self._is_last(event)
            if dies == "before":
                self._die()
            self._before(event, state)
            write(event)
            apply(decode_event(msgspec.json.encode(event)), self._shadow)
            if dies:
                self._die()

        journal.append = append  # pyright: ignore[reportAttributeAccessIssue] - of this one journal

    def _keep(self, journal: Journal, keep: Callable[[HubState], None], state: HubState) -> None:
        """Write a snapshot, and tear some."""
        keep(state)
        self.num_snapshots += 1
        if self.num_snapshots % _TORN == 0:
            *_, newest = named_by_place(journal.path, "state").values()
            newest.write_bytes(newest.read_bytes()[:-1])

    def _is_last(self, event: ev.Event) -> str:
        """Whether the hub dies `before` or `after` this event; empty if it does not."""
        if self.events_left is None or self.events_left[0] not in ("", type(event).__name__):
            return ""
        kind, left, is_after = self.events_left
        self.events_left = (kind, left - 1, is_after) if left else None
        return "" if left else "after" if is_after else "before"

    def _die(self) -> None:
        self.run.kill("hub", is_noticed=True, down_s=0.5)
        raise Killed

    def _before(self, event: ev.Event, state: HubState) -> None:
        self.num_events += 1
        assert self._shadow == state, f"the journal gives another state than the hub has before {event}"
        if isinstance(event, ev.Trained):
            self._look_at_step(event, state)
        if isinstance(event, ev.Received):
            expected = self.digests[event.version]
            assert event.digest == expected, (
                f"{event.holder} has other weights than the trainer's version {event.version}"
            )
            self._used[event.version] = event.digest
            self.run.applied["rollout: new weights midway"] += event.num_unfinished > 0
            is_allowed = (
                not event.is_ordered or schedule_of(self.run.recipe.run, self.run.recipe.rollout).switches_if_starved
            )
            assert is_allowed, f"{event.holder} was ordered to take new weights"
        if isinstance(event, ev.Ended):
            assert not self.errors.lines, f"errors in the log: {self.errors.lines}"
            self.status = event.reason
        self.look_at_holders()
        if self.num_events % _LOOK_EVERY == 0:
            self.look(state)

    def _look_at_step(self, event: ev.Trained, state: HubState) -> None:
        rows = [row_id for group in state.in_training for row_id in state.groups[group].row_ids(RowStatus.READY)]
        keys = [row_id.key(state.groups[row_id.group].rows[row_id.sample].attempt) for row_id in rows]
        assert sorted(keys) == self.rows_of_steps[event.step], (
            f"step {event.step} is counted with rows that were not trained"
        )
        before = {row_id for trained in self._trained.values() for row_id in trained}
        assert not before.intersection(rows), f"step {event.step} trains rows that a step before has trained"
        self._trained[event.step] = rows
        assert self.run.hub is not None
        window = self.run.hub.leases.admission.lead(state) / self.run.recipe.batch.prompts_per_step
        settings, schedule = self.run.recipe.queue, schedule_of(self.run.recipe.run, self.run.recipe.rollout)
        self.widest = max(self.widest, window)
        assert window <= WIDEST_STEPS, f"{window:.1f} steps of groups are under way at step {event.step}"
        bound = settings.max_staleness if schedule.staleness is None else schedule.staleness
        for row_id in rows:
            row = state.groups[row_id.group].rows[row_id.sample]
            assert bound is None or event.step - row.version <= bound, (
                f"{row_id} is {event.step - row.version} versions old"
            )
            may_mix = schedule.mixes_versions or (schedule.switches_if_starved and state.midway)
            assert may_mix or row.num_versions == 1, f"{row_id} has {row.num_versions} versions"

    def look(self, state: HubState) -> None:
        """The account is balanced, the index of leases is right, and units have what the hub says."""
        assert state.is_balanced, f"the account is not balanced: {state.account}"
        groups = (*state.groups.values(), *state.evaluations.groups.values())
        leased = {(group.rows[s].holder, group.row_id(s)) for group in groups for s in group.samples(RowStatus.LEASED)}
        held = {(holder, row_id) for holder, rows in state.held.items() for row_id in rows}
        assert held == leased, f"the index of leases differs by {held ^ leased}"
        for name, task in state.tasks.items():
            assert task.is_balanced, f"the account of task {name} is not balanced: {task}"
        units = self.run.cluster.units
        for row_id, row in state.rows(RowStatus.READY):
            for name in row.storage_ids:
                unit = units.get(name)
                if unit is not None and not unit.process.is_dead:
                    assert row_id.key(row.attempt) in unit.rows, f"{name} does not have {row_id.key(row.attempt)}"

    def look_at_holders(self) -> None:
        """No two rollouts hold the same attempt of a row."""
        held: Counter[tuple[RowId, int]] = Counter()
        for process, rollout in self.rollouts.items():
            if not process.is_dead:
                held.update((x.row_id, x.attempt) for x in rollout.leases.held.values() if not x.claim_id)
        twice = [row for row, count in held.items() if count > 1]
        assert not twice, f"two rollouts hold {twice}"

    def at_end(self) -> None:
        """The journal, read from its start, gives the last state, which is balanced, with all steps trained."""
        state = replay(self.run.folder / "journal.jsonl")
        assert state == self._shadow, "the journal gives another state than the hub had"
        other = {version for version, digest in self._used.items() if digest != self.digests[version]}
        assert not other, f"rollouts had versions {other} that are not those of the trained weights"
        assert not self.errors.lines, f"errors in the log: {self.errors.lines}"
        assert state.step == self.run.recipe.run.steps and state.is_balanced


class Errors(logging.Handler):
    """Collects the errors that the program logs while the body runs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []
        self._logger = logging.getLogger("headrace")

    def __enter__(self) -> None:
        self._logger.addHandler(self)

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
