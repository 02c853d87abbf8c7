"""`batch`, `queue` and `repack`: the data of a step, how far generation runs ahead, and moved trajectories."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from ..errors import SettingError
from ..messages.base import MAX_SAMPLES
from .fields import MAX_SECONDS, Count, OptionalCount


class BatchSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`batch.*`: the data of one optimizer step."""

    prompts_per_step: Count = 16
    """Groups per optimizer step."""
    samples_per_prompt: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] = 8
    """Trajectories per group."""
    updates_per_version: Count = 1
    """Optimizer updates of a step, each on an equal part of its groups; the last one's weights are published."""
    passes: Count = 1
    """Passes over the groups of a step, each with `updates_per_version` updates."""

    @property
    def update_ends(self) -> list[int]:
        """The numbers of a step's groups after which its updates follow, in ascending order."""
        num = self.updates_per_version
        return [self.prompts_per_step * update // num for update in range(1, num + 1)]


class TaskSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of `queue.tasks`.

    FILE.py:FUNCTION gets the columns `needs` and returns the columns `yields`; a column is a list of one array for each row.
    """

    name: str = ""
    function: str = ""
    needs: tuple[str, ...] = ()
    yields: tuple[str, ...] = ()


class QueueSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`queue.*`: how far generation may run ahead of training."""

    lead: Literal["auto"] | Count = "auto"
    """Number of groups that are leased or ready, so how far generation runs ahead; auto keeps the fewest that keep the trainer busy."""
    max_staleness: OptionalCount | None = None
    """Largest (version in training - version that generated); with null only queue.lead limits it. A step waits for a group that is due."""
    filter_zero_std: bool = False
    """Drop and replace groups whose rewards are all equal (dynamic sampling)."""
    max_lost_batches: Count | None = 20
    """Most batches of groups in a row of which none can be trained, because they fail or are filtered out, and at
    least 64 groups; then the run ends. null sets no limit."""
    sampler: str = ""
    """FILE.py:CLASS that chooses the next groups to train (see relay/queue/samplers.py); empty takes the oldest."""
    tasks: tuple[TaskSettings, ...] = ()
    """Your own tasks for every trajectory, with `name`, `function`, `needs` and `yields`; the `roles.task` ranks run them."""


_USUAL_PERIOD_S = 5.0


class RepackSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`repack.*`: moving the last trajectories of a version to a few rollouts, so that the others can start the next version."""

    period_s: Annotated[float, Meta(ge=0, le=MAX_SECONDS)] = _USUAL_PERIOD_S
    """Seconds between two plans; a new version also causes one. Rollouts report their load twice as often. 0 moves no trajectory."""

    def __post_init__(self) -> None:
        if 0 < self.period_s < 0.01:
            raise SettingError(f"repack.period_s={self.period_s:g}: set 0 (no moves) or at least .01")

    @property
    def is_enabled(self) -> bool:
        """Whether trajectories are moved."""
        return self.period_s > 0

    @property
    def report_s(self) -> float:
        """Seconds between two reports of a rollout's load, which the metrics and the leases need too."""
        return (self.period_s or _USUAL_PERIOD_S) / 2
