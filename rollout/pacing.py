"""When a rollout requests work and when it loads weights: the rollouts' side of the schedules."""

import math
from dataclasses import dataclass

from ..relay.queue.schedules import Schedule


@dataclass(frozen=True, slots=True)
class RolloutPacing:
    """The rules that one rollout follows under a schedule."""

    rules: Schedule
    share: int | None
    """Groups that it takes before it drains, at least; None without a limit."""
    num_sharing: int = 0
    """Rollouts that share the hub's window; 0 where the share does not depend on it."""
    repacks: bool = False
    """Whether its long trajectories may move to another rollout."""

    @staticmethod
    def of(rules: Schedule, prompts_per_step: int, num_rollouts: int) -> "RolloutPacing":
        """The rules of a schedule; the share is an equal part of a step."""
        never_drains = rules.max_age == 0
        share = None if never_drains else -(-prompts_per_step // num_rollouts)
        repacks = rules.repacks and num_rollouts > 1
        num_sharing = 0 if never_drains or rules.takes_share_at_once else num_rollouts
        return RolloutPacing(rules, share, num_sharing, repacks)

    def share_of(self, window: int) -> float:
        """Groups that it takes before it drains, where all rollouts together have `window` groups under way.

        That is its part of a step, or of the window where this is longer: where a drain lasts for several steps, a part of one
        step would leave the rollouts half empty.
        """
        if self.share is None:
            return math.inf
        return max(self.share, math.ceil(window / self.num_sharing)) if self.num_sharing else self.share

    def free_slots(self, max_running: int, num_held: int) -> int:
        """Trajectories that it may start now, its share aside."""
        return 1 << 30 if self.rules.takes_share_at_once else max_running - num_held

    def takes_weights(self, age: int, is_idle: bool) -> bool:
        """Whether it switches to the newest version now without an order, which is `age` versions after its own."""
        return age > 0 and (is_idle or age > self.rules.max_age)
