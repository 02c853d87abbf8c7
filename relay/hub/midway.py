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

    def __init__(self, context: HubContext, admission: "Admission", *, repacks: bool) -> None:
        """`repacks`: trajectories may move between rollouts."""
        super().__init__(context)
        self.routes = {}
        self._admission = admission
        self._repacks = repacks
        self._loads: dict[str, LoadReport] = {}

    def observe(self, sender: str, load: LoadReport) -> None:
        """Record a report, and order new weights if they are due and would bring the rollout new groups.

        Not while an evaluation has open samples: a rollout that is never empty could not go back to its version.
        """
        self._loads[sender] = load
        state = self.state
        is_possible = self._admission.schedule.switches_if_starved and sender not in state.drained
        if not is_possible or not self.context.is_leasing:
            return
        # One without leases has left, or is about to take new weights.
        others = [name for name in state.held if name != sender] if self._repacks else []
        loads = [self._loads[name] for name in others if name in self._loads]
        if not takes_midway(load, loads, state.version, state.window.starved_share) or len(loads) < len(others):
            return  # a rollout that this process of the hub has not heard of may take the trajectories
        # The count of open samples takes a while.
        if self._admission.may_lease(state, state.version) and not state.evaluations.open:
            self.context.mailbox.send(sender, SwitchWeights(load.version))

    def on_process_death(self, process: str, reason: str) -> None:
        self._loads.pop(process, None)
