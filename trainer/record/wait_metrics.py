"""Seconds that the trainer's first rank waited in a step, by the part of the run that it waited for, as `wait_s/ROLE`."""

from ...comm.waits import waited_seconds

_ROLE_OF = {
    "hub": "hub",
    "store": "store",
    "relay": "relay",
    "unit": "relay",  # a relay's storage unit
    "storage": "relay",
    "the other actor ranks": "actor",
    "actor": "actor",
    "memory": "memory",
    "the disk": "disk",
    "end": "partner",  # of a link for weights
    "other hosts": "partner",
}
"""The role by how the name of a wait's other side begins. Names may have a host and a port, roles have neither."""
OTHER = "other"
ROLES = tuple(dict.fromkeys((*_ROLE_OF.values(), OTHER)))


def role_of_wait(whom: str) -> str:
    """The role of the other side of a wait: "relay" of "unit 10.0.0.7:41234"."""
    known = (role for start, role in _ROLE_OF.items() if whom == start or whom.startswith((f"{start} ", f"{start}-")))
    return next(known, OTHER)


class WaitMeter:
    """Splits the waits of this process by steps. Threads may wait at the same time, so the sum may exceed the step's seconds."""

    def __init__(self) -> None:
        self._before = _seconds_by_role()

    def step(self) -> dict[str, float]:
        """`wait_s/ROLE` since the last call, or since this was made; roles for which nothing has ever waited are left out."""
        seconds = _seconds_by_role()
        found = {
            f"wait_s/{role}": max(0.0, waited_s - self._before.get(role, 0.0)) for role, waited_s in seconds.items()
        }
        self._before = seconds
        return found


def _seconds_by_role() -> dict[str, float]:
    """Since the process started."""
    seconds: dict[str, float] = {}
    for whom, waited_s in waited_seconds().items():
        role = role_of_wait(whom)
        seconds[role] = seconds.get(role, 0.0) + waited_s
    return seconds
