"""How the ranks of a process group find each other. They are matched by incarnation, so a dead rank and its successor are never mixed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..waits import waiting

if TYPE_CHECKING:
    from ..fleet import Fleet, Member


class Meeting(NamedTuple):
    """The members of a process group by rank, and the name of the group, which is unique to these incarnations."""

    members: "list[Member]"
    name: str


def meet(fleet: "Fleet", names: Sequence[str], deadline_s: float, having: str = "") -> Meeting:
    """Meet the members with these names, by rank, once all have announced `having`; this process is one of them.

    Rank 0 announces the meeting once it sees the others without an earlier one. Each of them joins the announced meeting that
    lists its own incarnation, and announces it too.
    """
    is_lead = fleet.name == names[0]

    def announced() -> Meeting | None:
        present = {member.name: member for member in fleet.members()}
        found = [present[name] for name in names if name in present]
        if len(found) != len(names) or not all(m.is_alive and (not having or having in m.info) for m in found):
            return None
        meeting = Meeting(found, f"{names[0]}/" + ".".join(str(m.incarnation) for m in found))
        if is_lead:
            return None if any("meeting" in m.info for m in found[1:]) else meeting
        return meeting if found[0].info.get("meeting") == meeting.name else None

    with waiting(", ".join(name for name in names if name != fleet.name), "joining", deadline_s) as wait:
        meeting = wait.until(announced, interval_s=0.02)
    fleet.announce(meeting=meeting.name)
    return meeting
