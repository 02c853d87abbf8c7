"""The members of a run: the processes that have joined it."""

from collections.abc import Iterable

import msgspec

TRAINS_AGAIN = "trains again"
"""A fact about an actor, "yes" while it trains steps again before its first version; "" after that."""


class Member(msgspec.Struct, frozen=True):
    """One member as another one sees it; `info` are the facts that it announced, `host` is the identity of its host
    (`comm.links.host`), and `host_name` is for messages.
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
    """ "rollout-1"; the one hub is just "hub"."""
    return role if role == "hub" else f"{role}-{index}"


def sorted_members(members: Iterable[Member], role: str | None) -> list[Member]:
    """Those of a role, or all, by role and index."""
    return sorted((m for m in members if role is None or m.role == role), key=lambda m: (m.role, m.index))
