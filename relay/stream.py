"""The trainer's side of the experience queue: asks the hub for groups, fetches their bytes from the units."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..comm.errors import HeadraceError
from ..comm.fleet import Fleet
from ..comm.mailbox import Mailbox
from ..comm.messages import GroupId, HandOut, RowId, Stop, TakeGroups
from ..comm.rows import RowClient, Rows
from ..comm.waits import waiting

REPEAT_S = 2.0  # a question is asked again after this long: the hub answers the same again


class RunStopped(HeadraceError):
    """The hub ended the run while this process worked or waited."""


@dataclass(slots=True)
class FetchedGroup:
    """A complete group: the columns of each usable sample, with its reward and the version that generated it."""

    id: GroupId
    rows: list[dict[str, np.ndarray]]
    rewards: list[float]
    versions: list[int]


class GroupStream:
    """Iterates over the groups of one step as they become ready. Raises `RunStopped` when the hub ends the run."""

    def __init__(self, mailbox: Mailbox, connect: Callable[[str], Rows], deadline_s: float) -> None:
        self.mailbox = mailbox
        self.metrics: dict[str, float] = {}
        self.waited_s = 0.0
        self._connect = connect
        self._deadline_s = deadline_s
        self._units: dict[str, Rows] = {}

    def take(self, step: int, received: int) -> tuple[list[FetchedGroup], int]:
        """The groups of `step` that are ready beyond the `received` first, at least one; and how many the step has.

        Waits for the hub; raises `WaitTimeout` past the deadline.
        """
        question = TakeGroups(step, received)
        with waiting("hub", f"groups of step {step} from {received} on", self._deadline_s) as wait:
            while True:
                self.mailbox.send("hub", question)
                answer = self._answer(step, received)
                if answer is not None:
                    self.waited_s += wait.elapsed_s
                    self.metrics = answer.metrics
                    return [self._fetch(answer, index) for index in range(len(answer.groups))], answer.total
                wait.check()

    def poll_stop(self) -> None:
        """Raise `RunStopped` if the hub has said so."""
        while (letter := self.mailbox.receive(0)) is not None:
            if isinstance(letter.message, Stop):
                raise RunStopped(letter.message.reason)

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

    def _fetch(self, answer: HandOut, index: int) -> FetchedGroup:
        ref = answer.groups[index]
        rows = [
            self._unit(unit).get(str(RowId(ref.group.epoch, ref.group.prompt, sample)))
            for sample, unit in zip(ref.samples, ref.units, strict=True)
        ]
        return FetchedGroup(ref.group, rows, ref.rewards, ref.versions)

    def _unit(self, name: str) -> Rows:
        if name not in self._units:
            self._units[name] = self._connect(name)
        return self._units[name]


def unit_connector(fleet: Fleet) -> Callable[[str], Rows]:
    """How to reach the storage unit of a relay by the relay's name."""

    def connect(name: str) -> Rows:
        (relay,) = [member for member in fleet.members("relay") if member.name == name]
        return RowClient(relay.info["unit"])

    return connect
