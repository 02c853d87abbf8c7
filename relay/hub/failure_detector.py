"""The failure detector: turns what is known of the fleet's members into deaths.

A process is dead when its connection to the run's store has ended, when it was silent for `comm.expiry_s`, or when its next
incarnation has joined.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from ...comm.fleet import Fleet, Member
from ...comm.messages.base import storage_id_of

WATCHED = ("rollout", "relay", "reference", "task", "front")


class Death(NamedTuple):
    """A member that counts as dead."""

    member: Member
    reason: str


class FailureDetector:
    """The members of the fleet, and the deaths among those that the hub watches."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.seen: dict[str, Member] = {}
        """The last member seen under each name."""
        self.members: Sequence[Member] = ()
        """All members at the last call, watched or not."""
        self.living: dict[str, Member] = {}
        """The watched members that were alive at the last call, by name."""
        self._declared: set[str] = set()

    def deaths(self) -> list[Death]:
        """The deaths since the last call, each reported once."""
        members = self.members = self._fleet.members()
        watched = [member for member in members if member.role in WATCHED]
        # One that joined and died between two looks may hold leases too.
        missed = [member for member in watched if not member.is_alive and not self._has_seen(member)]
        before = [*self.living.values(), *missed]
        self.seen |= {member.name: member for member in members}
        self.living = {member.name: member for member in watched if member.is_alive}
        deaths: list[Death] = []
        for member in before:
            now = self.living.get(member.name)
            if now is None or now.incarnation != member.incarnation:
                deaths.append(Death(member, f"incarnation {member.incarnation} is gone"))
        return deaths

    def survivors(self, lost_storage_ids: Collection[str]) -> list[Member]:
        """Relays that were silent and are back although their storage units were given up, each reported once."""
        units = {storage_id_of(relay.name, relay.incarnation): relay for relay in self._fleet.alive_members("relay")}
        found = [unit for unit in units if unit in lost_storage_ids and unit not in self._declared]
        self._declared.update(found)
        return [units[unit] for unit in found]

    def _has_seen(self, member: Member) -> bool:
        seen = self.seen.get(member.name)
        return seen is not None and seen.incarnation == member.incarnation
