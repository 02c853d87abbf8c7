"""Rewards of emulated trajectories, which have no text."""

from ....rollout.rewards.calls import ScoreRequest


class EmulatedRewards:
    """Rewards 0 or 1, a function of the trajectory's number."""

    backlog = 0

    def __init__(self) -> None:
        self.done: list[ScoreRequest] = []
        """The requests that `finished` has not returned yet."""

    def submit(self, *requests: ScoreRequest) -> None:
        for request in requests:
            request.reward = float(request.key.row_id.number * 0x9E3779B97F4A7C15 >> 40 & 1)
        self.done += requests

    def finished(self) -> list[ScoreRequest]:
        done = self.done
        self.done = []
        return done

    def close(self) -> None:
        pass
