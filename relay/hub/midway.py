"""Orders a rollout for which the trainer starves to take the newest weights in the middle of its trajectories.

The order names the version that the rollout had, so one that comes late or twice changes nothing. The rollout ignores it while it
sends or receives trajectories, or works on an evaluation. Each further report may bring the next order.
"""

from typing import TYPE_CHECKING

from ...comm.messages import LoadReport, SwitchWeights
from ..midway import takes_midway
from .context import Handler, HubContext

if TYPE_CHECKING:
    from ..queue.admission import Admission


class Midway(Handler):
    """The last report of each rollout."""

    def __init__(self, context: HubContext, admission: "Admission") -> None:
        super().__init__(context)
        self.routes = {}
        self._admission = admission
        self._loads: dict[str, LoadReport] = {}

    def observe(self, sender: str, load: LoadReport) -> None:
        """Record a report, and order new weights if they are due and would bring the rollout new groups.

        Not while an evaluation has open samples: a rollout that is never empty could not go back to its version.
        """
        self._loads[sender] = load
        state = self.state
        is_possible = self._admission.schedule.switches_if_starved and not state.evaluations.open
        if not is_possible or sender in state.drained or not self.context.is_leasing:
            return
        others = (other for name, other in self._loads.items() if name != sender)
        if takes_midway(load, others, state.version, state.window.starved_share) and self._admission.may_lease(
            state, state.version
        ):
            self.context.mailbox.send(sender, SwitchWeights(load.version))

    def on_process_death(self, process: str, reason: str) -> None:
        self._loads.pop(process, None)
