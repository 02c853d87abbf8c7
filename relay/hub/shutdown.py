"""The end of a run: everybody is told, what is still held is counted, the account is closed.

The count of *in flight* comes from those who hold trajectories (rollouts and units), not from the hub's own books: so the
accounting identity is a check and not a definition.
"""

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ...comm.fleet import Fleet
from ...comm.messages import HeldRows, ListStoredRows, Message, Stop, StoredRows, TrainingDone
from ...comm.waits import waiting
from ..journal import events as ev
from ..journal.journal import account_dict
from ..journal.state import RowStatus
from ..queue.replicated_rows import relay_of
from .hub import Hub

log = logging.getLogger(__name__)
M = TypeVar("M", bound=Message)

POLL_S = 0.1


class RunEnd(NamedTuple):
    """How a run ends: `status` is finished, interrupted or failed; `gone` names the process whose word it was."""

    status: str
    error: str = ""
    exit_code: int = 0
    done: TrainingDone | None = None
    gone: str = ""


class Shutdown:
    """Brings one run to its end."""

    def __init__(self, hub: Hub, fleet: Fleet, deadline_s: float) -> None:
        self.hub = hub
        self.fleet = fleet
        self.deadline_s = deadline_s
        self._early: dict[str, Message] = {}

    def run(self, end: RunEnd) -> dict[str, Any]:
        """Stop everybody, count, write the last event; returns the summary."""
        hub, gone, done = self.hub, {end.gone}, end.done
        hub.leases.is_open = hub.repacking.is_open = False
        actors = [] if done else self._tell("actor", Stop(end.status), gone)[:1]  # rank 0 tells the others
        rollouts = self._tell("rollout", Stop(end.status), gone)
        for role in ("reference", "task"):  # they hold no trajectory, but may still write into the units
            rollouts += self._tell(role, Stop(end.status), gone)
        holdings = self._collect(HeldRows, rollouts)
        done = done or next(iter(self._collect(TrainingDone, actors).values()), None)
        for missing in hub.leases.holders() - set(holdings):
            hub.on_process_death(missing, "gone when the run ended")
        units = self._collect(StoredRows, self._tell("relay", ListStoredRows(), gone))
        self._give_up(relay.name for relay in self.fleet.members("relay") if relay.name not in units)
        num_held = sum(self._confirmed(holder, holding) for holder, holding in holdings.items())
        num_ready = self._found({key for unit in units.values() for key in unit.keys})
        counted = num_held + num_ready + self._num_unassigned()
        if counted != hub.state.in_flight:
            log.error(
                "holders and units have %d trajectories in flight, the books say %d", counted, hub.state.in_flight
            )
        hub.context.commit(ev.Ended(reason=end.status))
        self._tell("relay", Stop(end.status), gone)
        return self._summary(end, done, counted)

    def _tell(self, role: str, message: Message, gone: set[str]) -> list[str]:
        names = [m.name for m in self.fleet.members(role) if m.is_alive and m.name not in gone]
        for name in names:
            self.hub.mailbox.send(name, message)
        return names

    def _collect(self, kind: type[M], senders: list[str]) -> dict[str, M]:
        """One letter of this kind from each sender that lives; what the hub has no rule for is kept for a later call."""
        answers = {name: letter for name, letter in self._early.items() if isinstance(letter, kind)}
        with waiting(", ".join(senders), f"{kind.__name__} at the end of the run", self.deadline_s) as wait:
            while wait.remaining_s > 0 and not answers.keys() >= set(senders):
                alive = {m.name for m in self.fleet.members() if m.is_alive}
                letter = self.hub.mailbox.receive(POLL_S)
                if letter is None and not alive & (set(senders) - answers.keys()):
                    break  # whoever is missing has left, and nothing of it is under way
                if letter is None:
                    continue
                if isinstance(letter.message, kind):
                    answers[letter.sender] = letter.message
                elif not self.hub.handle(letter):
                    self._early[letter.sender] = letter.message
        return answers

    def _give_up(self, relays: Iterable[str]) -> None:
        """Nobody answers for these relays: what lay there alone is lost, even if it was handed out."""
        state = self.hub.state
        for relay in relays:
            for unit in {
                u for g in state.groups.values() for row in g.rows for u in row.storage_ids if relay_of(u) == relay
            }:
                self.hub.on_storage_lost(unit, "gone when the run ended")
        for group in list(state.groups.values()):
            samples = [sample for sample in group.samples(RowStatus.READY) if not group.rows[sample].storage_ids]
            if samples:
                rows = [group.row_id(sample) for sample in samples]
                attempts = [group.rows[sample].attempt for sample in samples]
                reason = "no copy left when the run ended"
                self.hub.context.commit(ev.RowsLost(rows=rows, attempts=attempts, reason=reason))

    def _found(self, keys: set[str]) -> int:
        """How many of the rows that should lie in the units do; two copies are one row.

        Others may lie there too: of a writer that was given up for dead, woke, wrote, and died before it told.
        """
        groups = self.hub.state.groups.values()
        expected = {g.row_id(s).key(g.rows[s].attempt) for g in groups for s in g.samples(RowStatus.READY)}
        if keys - expected:
            log.warning("the units hold %d rows that nobody asks for", len(keys - expected))
        return len(keys & expected)

    def _confirmed(self, holder: str, holding: HeldRows) -> int:
        """How many of the rows that a rollout says it holds are leased to it: others were leased anew, or moved.

        A claim's answer may have come too late for it to know the newest attempt; what it holds is its own all the same.
        """
        rows = [self.hub.state.row(row_id) for row_id in holding.rows]
        return sum(
            row is not None and row.status is RowStatus.LEASED and row.holder == holder and attempt <= row.attempt
            for row, attempt in zip(rows, holding.attempts, strict=True)
        )

    def _num_unassigned(self) -> int:
        state = self.hub.state
        return sum(len(state.groups[group_id].samples(RowStatus.WANTED)) for group_id in state.unassigned)

    def _summary(self, end: RunEnd, done: TrainingDone | None, counted: int) -> dict[str, Any]:
        state = self.hub.state
        account = account_dict(state)
        account["holds"] = state.is_balanced and counted == state.in_flight
        return {
            "status": end.status,
            "error": end.error,
            "exit_code": end.exit_code,
            "steps": state.step,
            "accounting": account,
            "staleness": {str(k): v for k, v in sorted(state.staleness.items())},
            "versions_per_trajectory": {str(k): v for k, v in sorted(state.versions_per_trajectory.items())},
            "fenced": self.hub.results.num_fenced,
            "moved": state.num_moved,
            "moves_refused": dict(self.hub.repacking.refusals),
            "regenerated": state.regenerated,
            "version": state.version,
            "digest": state.digest,
            "tokens_per_s": 0.0,
            "export": "",
            **(done.facts if done else {}),
        }


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    """`summary.json`, whole or not at all."""
    new = run_dir / "summary.json.new"
    new.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    new.replace(run_dir / "summary.json")
