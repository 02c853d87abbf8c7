"""The end of a run: stops all processes, counts the trajectories that they hold, and closes the account.

The count of trajectories in flight comes from the rollouts and storage units that hold them, not from the hub's state. So the
accounting identity is a check and not a definition.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...comm.disk import when_writable
from ...comm.fleet import Fleet, Member
from ...comm.messages import (
    HeldRows,
    LeaseRequest,
    ListStoredRows,
    Message,
    QueueSaved,
    RequestRows,
    Stop,
    StoredRows,
    TrainerStarted,
    TrainingDone,
)
from ...comm.messages.base import is_partial, storage_id_of
from ...comm.waits import waiting
from ..checkpoints import write_durably
from ..journal import events as ev
from ..journal.hub_state import account_dict
from ..journal.records import RowStatus
from .saved_queue import KEEPER

if TYPE_CHECKING:
    from .hub import Hub

log = logging.getLogger(__name__)
M = TypeVar("M", bound=Message)

POLL_S = 0.1
SUMMARY_WAIT_S = 5.0
_MAX_REASONS = 10
"""Most reasons for failed trajectories in the summary, the most frequent ones, and for dropped prompts, the last ones."""


class Shutdown:
    """Brings one run to its end."""

    def __init__(self, hub: "Hub", fleet: Fleet, deadline_s: float, grace_s: float = 0.0) -> None:
        """Each group of processes has `deadline_s` to answer, the trainer of an interrupted run `grace_s` more."""
        self.hub = hub
        self.fleet = fleet
        self.deadline_s = deadline_s
        self.grace_s = grace_s
        self._early: dict[str, Message] = {}
        self._status = ""

    def run(self, end: ev.Ending) -> dict[str, Any]:
        """Stop all processes, count, write the last event; returns the summary."""
        hub = self.hub
        gone = {end.gone}
        self._status = end.status
        hub.context.is_leasing = False
        if hub.state.ending is None:
            hub.context.commit(end)
        if hub.state.ended:  # the hub before had counted already
            self._tell("relay", Stop(end.status), gone)
            self._tell("front", Stop(end.status), gone)
            return self._summary(end, end.facts, hub.state.in_flight)
        has_trained = end.facts is not None
        actors = [] if has_trained else self._tell("actor", Stop(end.status), gone)[:1]  # rank 0 tells the others
        rollouts = self._tell("rollout", Stop(end.status), gone)
        fronts = self._tell("front", Stop(end.status), gone)
        rollouts += [front for front in fronts if front in hub.state.held]  # those that lease for agents
        for role in ("reference", "task"):  # they hold no trajectory, but may still write to the storage units
            rollouts += self._tell(role, Stop(end.status), gone)
        holdings = self._collect(HeldRows, rollouts)
        extra_s = self.grace_s if end.status == "interrupted" else 0.0
        for holder, holding in holdings.items():
            hub.tokens.observe(holder, holding)
        reports = self._collect(TrainingDone, actors, extra_s).values()
        facts = end.facts if has_trained else next((report.facts for report in reports), None)
        for holder in sorted(hub.state.held):
            # The next incarnation of a process that died after its `Stop` answers in its place, and has none of its rows.
            if holder not in holdings or holdings[holder].incarnation > hub.state.incarnations[holder]:
                hub.on_process_death(holder, "gone when the run ended")
        units = self._collect(StoredRows, self._tell("relay", ListStoredRows(at_end=True), gone))
        self._give_up_beside(
            {storage_id_of(m.name, m.incarnation) for m in self.fleet.members("relay") if m.name in units}
        )
        num_held = sum(self._num_leased(holder, holding) for holder, holding in holdings.items())
        num_ready = self._num_ready({key for unit in units.values() for key in unit.keys if not is_partial(key)})
        unassigned = [hub.state.groups[group_id] for group_id in hub.state.unassigned]
        counted = num_held + num_ready + sum(len(group.samples(RowStatus.WANTED)) for group in unassigned)
        if counted != hub.state.in_flight:
            log.error("%d trajectories were counted in flight, the hub's state has %d", counted, hub.state.in_flight)
        if number := hub.saved_queue.save():
            while (answer := self._collect(QueueSaved, [KEEPER]).get(KEEPER)) and answer.number < number:
                pass
        hub.context.commit(ev.Ended(reason=end.status))
        self._tell("relay", Stop(end.status), gone)
        return self._summary(end, facts, counted)

    def _tell(self, role: str, message: Message, gone: set[str]) -> list[str]:
        names = [m.name for m in self.fleet.members(role) if m.is_alive and m.name not in gone]
        for name in names:
            self.hub.mailbox.send(name, message)
        return names

    def _collect(self, kind: type[M], senders: list[str], extra_s: float = 0.0) -> dict[str, M]:
        """One message of this kind from each living sender; messages without a route are kept for a later call."""
        answers = {name: message for name, message in self._early.items() if isinstance(message, kind)}
        deadline_s = self.deadline_s + extra_s
        with waiting(", ".join(senders), f"{kind.__name__} at the end of the run", deadline_s) as wait:
            while wait.remaining_s > 0 and not answers.keys() >= set(senders):
                alive = {m.name for m in self.fleet.members() if m.is_alive}
                envelope = self.hub.mailbox.receive(POLL_S)
                if envelope is None and not alive & (set(senders) - answers.keys()):
                    break  # the missing senders have left, and no message of theirs is on its way
                if envelope is None:
                    continue
                if isinstance(envelope.message, StoredRows) and not envelope.message.at_end:
                    continue  # what a hub that had just started asked for: rows may have come since
                if isinstance(envelope.message, kind):
                    answers[envelope.sender] = envelope.message
                elif not self.hub.handle(envelope):
                    self._early[envelope.sender] = envelope.message
                if isinstance(envelope.message, TrainerStarted | RequestRows | LeaseRequest):
                    # It may be the next process of one that has died after its `Stop`.
                    self.hub.mailbox.send(envelope.sender, Stop(self._status))
        return answers

    def _give_up_beside(self, units: Collection[str]) -> None:
        """The relays of these units answered: rows in others alone are lost, even if they were handed out.

        A relay may have died just before, and its next process answer: it has none of the rows of the unit before.
        """
        state = self.hub.state
        stored = {unit for _, row in state.rows(RowStatus.READY) for unit in row.storage_ids}
        for unit in sorted(stored.difference(units)):
            self.hub.on_storage_lost(unit, "gone when the run ended")
        lost = {row_id: row.attempt for row_id, row in state.rows(RowStatus.READY) if not row.storage_ids}
        if lost:
            reason = "no copy left when the run ended"
            self.hub.context.commit(ev.RowsLost(rows=list(lost), attempts=list(lost.values()), reason=reason))

    def _num_ready(self, keys: set[str]) -> int:
        """The number of ready rows that are in a storage unit; two copies count as one row.

        Units may hold other rows too: of a writer that counted as dead, woke up, wrote, and died before it reported.
        """
        expected = {row_id.key(row.attempt) for row_id, row in self.hub.state.rows(RowStatus.READY)}
        if keys - expected:
            log.warning(
                "the storage units hold %d rows that are not in the queue; they are not counted", len(keys - expected)
            )
        return len(keys & expected)

    def _num_leased(self, holder: str, holding: HeldRows) -> int:
        """The number of rows in a rollout's report that are leased to it; the others were moved or leased again.

        The answer to its claim may have come too late for it to know the newest attempt; the row is its own all the same.
        """
        held = zip(holding.rows, holding.attempts, strict=True)
        rows = [(self.hub.state.row(row_id), attempt) for row_id, attempt in held if not row_id.is_evaluation]
        return sum(
            row is not None and row.status is RowStatus.LEASED and row.holder == holder and attempt <= row.attempt
            for row, attempt in rows
        )

    def _summary(self, end: ev.Ending, facts: Mapping[str, object] | None, counted: int) -> dict[str, Any]:
        state = self.hub.state
        account = account_dict(state)
        account["holds"] = state.is_balanced and counted == state.in_flight
        return {
            "status": end.status,
            "error": end.error,
            "exit_code": end.exit_code,
            "steps": state.step,
            "accounting": account,
            "tokens": self.hub.tokens.account(),
            "tokens_recomputed": self.hub.tokens.recomputed(),
            "evaluations": state.evaluations.results,
            "evaluated": state.evaluations.account,
            "staleness": {str(k): v for k, v in sorted(state.staleness.items())},
            "versions_per_trajectory": {str(k): v for k, v in sorted(state.versions_per_trajectory.items())},
            "midway": dict(sorted(state.midway.items())),
            "failures": dict(state.failures.most_common(_MAX_REASONS)),
            "dropped": len(state.dropped),
            "drop_reasons": list(state.dropped.values())[-_MAX_REASONS:],
            "fenced": self.hub.results.num_fenced,
            "moved": state.num_moved,
            "moves_refused": dict(self.hub.repacking.refusals),
            "regenerated": state.regenerated,
            "hub_restarts": state.hub_restarts,
            "restored": state.num_restored,
            "continued": state.num_continued,
            "tokens_kept": state.tokens_kept,
            "restarted": self.hub.partials.num_restarted,
            "trainer_restarts": state.trainer_restarts,
            "version": state.version,
            "digest": state.digest,
            "tokens_per_s": 0.0,
            "export": "",
            **(facts or {}),
        }


def names_by_host(members: Iterable[Member]) -> dict[str, list[str]]:
    """The names of processes by the name of their host; of two hosts with one name the second has a number."""
    by_host: dict[str, list[Member]] = defaultdict(list)
    for member in members:
        by_host[member.host].append(member)
    named: dict[str, list[str]] = {}
    for there in by_host.values():
        host_name = there[0].host_name
        number = 1
        while (title := host_name if number == 1 else f"{host_name} ({number})") in named:
            number += 1
        named[title] = sorted(member.name for member in there)
    return named


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    """Write `summary.json`; a reader never sees a part of it. On a full disk it waits a moment for room."""
    path = run_dir / "summary.json"
    text = json.dumps(summary, indent=2) + "\n"
    when_writable(path, lambda: write_durably(path, text.encode()), SUMMARY_WAIT_S)
