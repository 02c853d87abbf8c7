"""Where a rollout takes new weights in the middle of its trajectories: a pure function of the rollouts' reports.

One version generates a trajectory, so a rollout that is behind takes no prompts until its last trajectory has ended. While others
have work this costs little, and repack shortens it. But a rollout that no other can relieve decodes a few long
trajectories, or waits for tools, while the trainer starves. There a second version within a trajectory costs less than the wait:
the step's tokens are a little older, and keys and values are computed again.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..comm.messages import LoadReport

STARVED = 0.02
"""The share of the last step for which the trainer must have starved."""
_FEW = 0.5
"""The part of its peak below which a rollout decodes few trajectories."""
_AT_TOOLS = 0.5
"""The part of a rollout's trajectories from which on those that wait for tools are many: other rollouts would wait for them as well."""


def takes_midway(load: "LoadReport", others: Iterable["LoadReport"], newest: int, starved_share: float) -> bool:
    """Whether a rollout takes version `newest` now, with unfinished trajectories.

    It does where the trainer starves, the rollout is behind and decodes few trajectories, and repack cannot take them from it: it or
    each other one with work on its version cannot move trajectories, or many of its trajectories wait for tools. `others`: those
    that repack may move trajectories to, none where it is off.
    """
    is_behind = load.num_unfinished > 0 and load.version < newest
    if starved_share <= STARVED or not is_behind or load.num_running >= _FEW * load.peak_running:
        return False
    if load.num_at_tools >= _AT_TOOLS * load.num_unfinished:
        return True
    return not load.batch_bound or not any(
        other.batch_bound and other.version == load.version and other.num_unfinished for other in others
    )
