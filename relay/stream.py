"""The trainer's side of the experience queue: references from the hub, bytes straight from the units."""

import numpy as np

from ..comm.errors import HeadraceError
from ..comm.fleet import Fleet
from ..comm.mailbox import Mailbox
from ..comm.messages import HandOut, Stop, TakeGroups
from ..comm.rows import Rows
from ..comm.waits import waiting

REPEAT_S = 2.0  # a question is asked again after this long: the hub answers the same again


class RunStopped(HeadraceError):
    """The hub ended the run while this process worked or waited."""


class GroupStream:
    """The groups of one step after the other, as they become ready. Raises `RunStopped` when the hub ends the run."""

    def __init__(self, mailbox: Mailbox, deadline_s: float) -> None:
        self.mailbox = mailbox
        self._deadline_s = deadline_s

    def take(self, step: int, received: int) -> HandOut:
        """References to the groups of `step` that are ready beyond the `received` first, at least one.

        Waits for the hub; raises `WaitTimeout` past the deadline.
        """
        question = TakeGroups(step, received)
        with waiting("hub", f"groups of step {step} from {received} on", self._deadline_s) as wait:
            while True:
                self.mailbox.send("hub", question)
                answer = self._answer(step, received)
                if answer is not None:
                    return answer
                wait.check()

    def _answer(self, step: int, received: int) -> HandOut | None:
        letter = self.mailbox.receive(REPEAT_S)
        if letter is None:
            return None
        match letter.message:
            case Stop(reason=reason):
                raise RunStopped(reason)
            case HandOut() as answer if (answer.step, answer.first) == (step, received):
                return answer
        return self._answer(step, received)


class Units:
    """The storage units of all relays, connected when first needed."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._clients: dict[str, Rows] = {}

    def fetch(self, unit: str, key: str) -> dict[str, np.ndarray]:
        """The columns of a row by its key. Raises `PeerGone` if its unit is gone, `KeyError` if the unit does not hold it."""
        if unit not in self._clients:
            (relay,) = [member for member in self._fleet.members("relay") if member.name == unit]
            self._clients[unit] = self._fleet.open_rows(relay.info["unit"])
        return self._clients[unit].get(key)

    def close(self) -> None:
        """End the connections."""
        for client in self._clients.values():
            client.close()
