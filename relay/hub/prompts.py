"""The prompts in the order of the run, without those that no rollout can use.

A prompt is dropped once, with its reason in the journal: its row cannot be read, or a rollout refuses it, since it leaves no room
for a response or the template refuses it. Every later turn of a dropped prompt passes it over.
"""

import msgspec

from ...comm.messages import GroupId, PromptRefused
from ..dataset import MixedPrompts, PromptPool, row_problem
from ..journal import events as ev
from ..journal.records import RowStatus
from .context import Handler, HubContext, is_power_of_ten


class Prompts(Handler):
    """Finds the next prompt, and drops those that cannot be used."""

    def __init__(self, context: HubContext, pool: PromptPool | MixedPrompts) -> None:
        super().__init__(context)
        self.pool = pool
        self.routes = {PromptRefused: self._on_refused}

    def next(self) -> tuple[GroupId, int] | None:
        """The next group of the data, and the number of prompts passed over before it. Without any the run ends: None."""
        for passed_over in range(2 * len(self.pool)):  # an epoch at least
            group_id = self.pool.group_at(self.state.cursor + passed_over)
            if self.is_offered(group_id):
                return group_id, passed_over
        self.context.failure = "data.path: no prompt is left that can be used"
        return None

    def row(self, group_id: GroupId) -> msgspec.Raw:
        """The row of a group, as JSON."""
        return self.pool.row(group_id)

    def between(self, cursor: int) -> list[GroupId]:
        """The groups of the data from the present position up to another one, those that are passed over included."""
        return [self.pool.group_at(position) for position in range(self.state.cursor, cursor)]

    def is_offered(self, group_id: GroupId) -> bool:
        """Whether a prompt is given to rollouts; one whose row cannot be used is dropped here."""
        if group_id.prompt in self.state.dropped:
            return False
        if problem := row_problem(bytes(self.pool.row(group_id))):
            self._drop(group_id, f"row {group_id.prompt + 1} {problem}")
        return not problem

    def _on_refused(self, _sender: str, message: PromptRefused) -> None:
        group = self.state.groups.get(message.group)
        held = [] if group is None else [group.rows[sample] for sample in group.samples(RowStatus.LEASED)]
        if any(
            row.attempt == message.attempt for row in held
        ):  # else the report is repeated, or the group has another holder
            self._drop(message.group, message.reason)

    def _drop(self, group_id: GroupId, reason: str) -> None:
        """Print a reason the first time and whenever the count is 10, 100, ..."""
        self.context.commit(ev.PromptDropped(group=group_id, reason=reason))
        if is_power_of_ten(count := len(self.state.dropped)):
            print(f"dropped prompts: {count}, the last one because {reason}", flush=True)
