"""The members of a run: the processes that have joined it."""

from collections.abc import Iterable

import msgspec

TRAINS_AGAIN = "trains again"
"""A fact that an actor announces: "yes" while it retrains steps before its first version, "" afterwards."""


class Member(msgspec.Struct, frozen=True):
    """One member as the others see it.

    `info` has the facts that it announced. `host` identifies its host (`comm.links.host`); `host_name` is only for messages.
    """

    name: str
    role: str
    index: int
    incarnation: int
    host: str
    pid: int
    info: dict[str, str]
    is_alive: bool = True
    host_name: str = ""


def member_name(role: str, index: int) -> str:
    """Such as "rollout-1"; the hub, of which there is one, is "hub"."""
    return role if role == "hub" else f"{role}-{index}"


def sorted_members(members: Iterable[Member], role: str | None) -> list[Member]:
    """The members of a role, or all of them, sorted by role and index."""
    return sorted((m for m in members if role is None or m.role == role), key=lambda m: (m.role, m.index))
