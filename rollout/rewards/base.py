"""The interface of rewards, and the choice of the implementation."""

from typing import Protocol

from ...comm.plugins import load_object
from ...comm.recipe import RewardSettings
from ..row_writer import FinishedRow
from .pool import RewardPool


class Rewards(Protocol):
    """Scores trajectories; neither `submit` nor `finished` blocks."""

    @property
    def backlog(self) -> int:
        """Trajectories that wait although the next calls are full: more of them would only get older."""
        ...

    def submit(self, *requests: FinishedRow) -> None:
        """Queue trajectories that are scored together."""
        ...

    def finished(self) -> list[FinishedRow]:
        """The trajectories scored since the last call."""
        ...

    def close(self) -> None:
        """Stop; pending trajectories stay unscored."""
        ...


def open_rewards(settings: RewardSettings, num_steps: int, engine: str) -> Rewards:
    """The reward functions in processes of their own. The trajectories of `rollout.engine=emulated` have no text that they could score."""
    if engine == "emulated":
        return load_object("rollout.engine", "headrace.launch.lab.emulated.rewards:EmulatedRewards")()
    return RewardPool(settings, num_steps).start()
