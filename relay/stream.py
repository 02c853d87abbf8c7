"""The trainer's side of the experience queue: references from the hub; the bytes come straight from the units."""

from ..comm.errors import HeadraceError
from ..comm.mailbox import Mailbox
from ..comm.messages import HandOut, Stop, TakeGroups
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
