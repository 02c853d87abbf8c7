"""Whether all processes read the same policy: on another host `model.path` may name other files."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ...comm.disk import say

if TYPE_CHECKING:
    from ...comm.fleet import Member

JOINED = "joined"
"""A process announces it if its host has joined the running job."""
_FACTS = {
    "config_digest": "another configuration or tokenizer",
    "weights_digest": "other weights",
    "exact_kernels": "other kernels",
}
"""Facts about the policy that members announce, and the meaning of a difference."""


class OtherModel(NamedTuple):
    """A member whose files are not those of the first one."""

    member: "Member"
    reason: str
    ends_run: bool


class ModelCheck:
    """Compares the facts about the policy that members announce; tells of each member once."""

    def __init__(self) -> None:
        self._first: dict[str, Member] = {}
        """The first member of the run's own hosts that announced each fact."""
        self._of_host: dict[tuple[str, str], Member] = {}
        self._told: set[tuple[str, int]] = set()

    def differences(self, members: list["Member"]) -> Iterator[OtherModel]:
        """Members with other files than the first one, those of a host that has joined alone not ending the run.

        Files that change under a run are a warning, which is printed: a process that is started again reads the new ones.
        """
        for member in sorted(members, key=lambda member: JOINED in member.info):
            for fact in [fact for fact in _FACTS if fact in member.info]:
                if JOINED not in member.info:
                    self._first.setdefault(fact, member)
                if (first := self._first.get(fact)) is None:
                    continue
                before = self._of_host.setdefault((member.host, fact), member)
                other = before if before.info[fact] != member.info[fact] else first
                if other.info[fact] == member.info[fact] or (member.name, member.incarnation) in self._told:
                    continue
                self._told.add((member.name, member.incarnation))
                reason = (
                    f"{member.name} on {member.host_name} has {_FACTS[fact]} than {other.name} on {other.host_name}"
                )
                if fact == "exact_kernels":
                    remedy = "use machines of one kind with the same packages"
                    yield OtherModel(member, f"generator.exact: {reason}; {remedy}", JOINED not in member.info)
                elif other.host == member.host:
                    say(f"warning: model.path: {reason}, since the files have changed")
                else:
                    give = "give all hosts the same files"
                    yield OtherModel(member, f"model.path: {reason}; {give}", JOINED not in member.info)
