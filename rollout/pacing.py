"""When a rollout asks for work and when it takes weights: the rollouts' side of the schedules."""

from dataclasses import dataclass

from ..relay.queue.schedules import SCHEDULES


@dataclass(frozen=True, slots=True)
class RolloutPacing:
    """One rollout's habits under a schedule."""

    updates_mid_trajectory: bool
    """It takes new weights at once, under its running trajectories; else when its own work has drained."""
    share: int | None
    """Groups that it takes before it drains."""
    takes_share_at_once: bool
    """It takes its share of a batch when the batch begins, however many trajectories it can run together."""
    repacks: bool = False
    """Its long trajectories may move to another rollout."""

    @staticmethod
    def of(schedule: str, batch_groups: int | None, prompts_per_step: int, num_rollouts: int) -> "RolloutPacing":
        """The habits under `run.schedule`; a rollout's share is what each contributes to a step if all do alike."""
        share = -(-prompts_per_step // num_rollouts)
        rules = SCHEDULES[schedule]
        quota = None if rules.takes_share_at_once else batch_groups
        if quota is None and not rules.updates_mid_trajectory:
            quota = share
        repacks = rules.repacks and num_rollouts > 1
        return RolloutPacing(rules.updates_mid_trajectory, quota, rules.takes_share_at_once, repacks)

    def free_slots(self, max_running: int, num_held: int) -> int:
        """Trajectories that it would start now, the quota apart."""
        return 1 << 30 if self.takes_share_at_once else max_running - num_held

    def takes_weights(self, is_outdated: bool, is_idle: bool) -> bool:
        """Whether it switches to the newest version now."""
        return is_outdated and (is_idle or self.updates_mid_trajectory)
