"""The failure detector: turns what is known of the fleet's members into deaths.

A process is dead when its supervisor reports its exit, when a relay reports that its connection ended or, at the latest, when its
heartbeat stops or its next incarnation has joined.
"""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from ...comm.fleet import Fleet, Member
from ...comm.messages import ConnectionLost
from ...comm.messages.base import storage_id_of
from .exits import ProcessExit, take_exits

WATCHED = ("rollout", "relay", "reference", "task")


class Death(NamedTuple):
    """A member that counts as dead."""

    member: Member
    reason: str


class FailureDetector:
    """The members of the fleet, and the deaths among those that the hub watches."""

    def __init__(self, fleet: Fleet, run_dir: Path) -> None:
        self._fleet = fleet
        self._run_dir = run_dir
        self.seen: dict[str, Member] = {}
        """The last member that was seen under each name."""
        self.living: dict[str, Member] = {}
        """The watched members that were in the fleet at the last look, by name."""
        self.broken: ProcessExit | None = None
        """The exit of a process that is not started again."""
        self._connections: list[ConnectionLost] = []
        self._reported: set[tuple[str, int]] = set()
        """Incarnations that count as dead by a report."""
        self._declared: set[str] = set()

    def on_connection_lost(self, report: ConnectionLost) -> None:
        """Take a relay's report for the next look."""
        self._connections.append(report)

    def deaths(self) -> list[Death]:
        """The deaths since the last look, each told once.

        A report may be wrong, and then the process goes on working. So the death is told again when its heartbeat stops, but
        not when its next incarnation joins, since that one may hold leases already.
        """
        return [*self._departures(), *self._reports()]

    def survivors(self, lost_storage_ids: Collection[str]) -> list[Member]:
        """Relays that were silent and are back though their storage units are given up, each told once."""
        units = {storage_id_of(relay.name, relay.incarnation): relay for relay in self._fleet.alive_members("relay")}
        found = [unit for unit in units if unit in lost_storage_ids and unit not in self._declared]
        self._declared.update(found)
        return [units[unit] for unit in found]

    def _departures(self) -> list[Death]:
        """The members whose heartbeat stopped, or whose next incarnation has joined, since the last look."""
        before = self.living
        self.seen |= {member.name: member for member in self._fleet.members()}
        self.living = {member.name: member for role in WATCHED for member in self._fleet.alive_members(role)}
        deaths: list[Death] = []
        for member in before.values():
            now = self.living.get(member.name)
            is_replaced = now is not None and now.incarnation != member.incarnation
            is_news = (member.name, member.incarnation) not in self._reported
            if now is None or (is_replaced and is_news):
                deaths.append(Death(member, f"incarnation {member.incarnation} is gone"))
        return deaths

    def _reports(self) -> Iterator[Death]:
        """The first report about each incarnation that is in the fleet."""
        for exit_ in take_exits(self._run_dir):
            if exit_.ends_run:
                self.broken = exit_
            member = self.living.get(exit_.name)
            if member is not None and member.pid == exit_.pid:
                yield from self._first_report(member, exit_.how)
        for report in self._connections:
            member = self.living.get(report.member)
            if member is not None and member.incarnation == report.incarnation:
                yield from self._first_report(member, f"the connection of incarnation {member.incarnation} ended")
        self._connections = []

    def _first_report(self, member: Member, reason: str) -> Iterator[Death]:
        incarnation = (member.name, member.incarnation)
        if incarnation not in self._reported:
            self._reported.add(incarnation)
            yield Death(member, reason)
