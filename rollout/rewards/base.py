"""The interface of rewards, and the choice of the implementation."""

from typing import Protocol

from ...comm.recipe import RewardSettings
from .emulated import EmulatedRewards
from .pool import RewardPool, ScoreRequest


class Rewards(Protocol):
    """Scores trajectories; neither `submit` nor `finished` blocks."""

    def submit(self, request: ScoreRequest) -> None:
        """Queue a trajectory."""
        ...

    def finished(self) -> list[ScoreRequest]:
        """The trajectories scored since the last call."""
        ...

    def close(self) -> None:
        """Stop; pending trajectories stay unscored."""
        ...


def open_rewards(engine: str, settings: RewardSettings) -> Rewards:
    """The user's reward function in processes of its own. Emulated trajectories have no text that it could score."""
    return EmulatedRewards() if engine == "emulated" else RewardPool(settings).start()
