"""The hub's office for the trainer: complete groups go out to the step in progress."""

from ..comm.messages import GroupRef, HandOut, StepTrained, TakeGroups
from . import events as ev
from .admission import Admission
from .books import Books, Rules
from .state import Group, RowStatus
from .telemetry import Telemetry


class HandOuts:
    """What was handed out for the step in progress, and who asks for more."""

    def __init__(self, books: Books, admission: Admission, telemetry: Telemetry) -> None:
        self.books = books
        self.admission = admission
        self.telemetry = telemetry
        self._taker: tuple[str, TakeGroups] | None = None
        self._given: list[GroupRef] = []
        self.rules: Rules = {TakeGroups: self._on_take_groups, StepTrained: self._on_step_trained}

    def serve(self) -> None:
        """Hand out what is ready, if somebody asks."""
        if self._taker is None:
            return
        sender, request = self._taker
        while (group := self.admission.next_ready(self.books.state)) is not None:
            self.books.decide(ev.Handed(step=request.step, groups=[group.id]))
            self._given.append(_reference(group))
        if len(self._given) > request.received:
            groups, metrics = self._given[request.received :], self.telemetry.metrics(self.books.state)
            answer = HandOut(request.step, request.received, self.admission.per_step, groups, metrics)
            self.books.mailbox.send(sender, answer)
            self._taker = None

    def lose(self, holder: str, reason: str) -> None:
        """The trainer's death ends the run elsewhere; rollouts hold nothing here."""

    def _on_take_groups(self, sender: str, request: TakeGroups) -> None:
        if request.step == self.books.state.step:
            self._taker = (sender, request)

    def _on_step_trained(self, sender: str, message: StepTrained) -> None:
        state = self.books.state
        if message.step != state.step:
            return
        groups = [state.groups[group_id] for group_id in state.handed]
        self.books.drop((group, sample) for group in groups for sample in group.samples(RowStatus.READY))
        self.books.decide(ev.Trained(step=message.step))
        self._taker = None  # an older question, asked again, is not one about the next step
        self._given.clear()
        self.telemetry.begin_step()


def _reference(group: Group) -> GroupRef:
    samples = group.samples(RowStatus.READY)
    rows = [group.rows[sample] for sample in samples]
    return GroupRef(
        group=group.id,
        samples=samples,
        attempts=[row.attempt for row in rows],
        units=[row.units for row in rows],
        versions=[row.version for row in rows],
        num_tokens=[row.num_tokens for row in rows],
        rewards=[row.reward for row in rows],
    )
