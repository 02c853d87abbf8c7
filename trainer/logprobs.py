"""Log-probabilities of trajectories by a policy that is not in training: the tasks `reference` and `proximal`."""

from collections.abc import Sequence

import numpy as np
import torch

from ..relay.rounds import micro_batches
from ..relay.stream import Batch
from .batch import DUMMY, Trajectory, pack
from .model import Policy
from .parallel import ActorGroup
from .recipe import ActorRecipe

NEEDED = ("prompt_ids", "response_ids")


def response_logprobs(policy: Policy, batch: Batch, group: ActorGroup, recipe: ActorRecipe) -> list[np.ndarray]:
    """[R] float32 for each row of this rank's, in the order of `batch.rows`, tempered as in the loss.

    A collective of the ranks over which the policy is sharded: each runs as many micro-batches as the one with most.
    """
    parts = list(micro_batches(batch.rows, recipe.optimizer.micro_tokens))
    num_parts = int(group.maxima([float(len(parts))])[0])
    found: list[np.ndarray] = []
    for number in range(num_parts):
        rows = parts[number] if number < len(parts) else []
        trajectories = [_trajectory(batch.columns[row.key]) for row in rows]
        values = _forward(policy, trajectories or [DUMMY], group, recipe)
        found += np.split(values, np.cumsum([len(t.response_ids) for t in trajectories])[:-1]) if trajectories else []
    return found


@torch.no_grad()
def _forward(policy: Policy, trajectories: Sequence[Trajectory], group: ActorGroup, recipe: ActorRecipe) -> np.ndarray:
    packed = pack(list(trajectories), -1, group.device)
    with torch.autocast(group.device.type, torch.bfloat16, enabled=recipe.model.dtype == "bfloat16"):
        hidden = policy.forward_packed(packed.token_ids, packed.cu_seqlens)
    logprobs, _ = policy.token_logprobs(hidden[packed.predictors], packed.targets, recipe.sampling.temperature or 1.0)
    return logprobs.float().cpu().numpy()


def _trajectory(columns: dict[str, np.ndarray]) -> Trajectory:
    length = len(columns["response_ids"])
    nothing = np.zeros(length, np.float32)
    mask = np.ones(length, np.uint8)
    return Trajectory(columns["prompt_ids"], columns["response_ids"], nothing, mask, version=-1, reward=0.0)
