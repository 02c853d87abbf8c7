"""The reference policy on ranks of its own: log-probabilities of the initial policy for every trajectory.

It consumes rows of the task `reference` and waits for batches from the hub only. Each rank has the whole policy and requests
its own rows, so faster ranks do more.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from ..comm.fleet import Fleet
from ..comm.messages import HeldRows
from ..comm.recipe import Recipe
from ..relay.queue.batch import Batch
from ..relay.queue.replicated_rows import ReplicatedRows
from ..relay.queue.stream import ExperienceStream
from ..relay.queue.tasks import REFERENCE
from .logprobs import NEEDED, longest_in_tree, response_logprobs
from .policy.model import default_device, load_policy


def run(fleet: Fleet, recipe: Recipe, compute: Callable[[Batch], list[np.ndarray]] | None = None) -> None:
    """The process of a reference rank, until the hub ends the run.

    compute: [R] for each row of a batch, in the order of `batch.rows`; None for those of the initial policy.
    """
    longest = 0
    if compute is None:
        device = default_device()
        policy = load_policy(recipe.model.path, "float32", device)
        longest = longest_in_tree(policy, recipe)
        compute = partial(response_logprobs, policy, device=device, recipe=recipe)
    mailbox = fleet.open_mailbox(fleet.name)
    storage = ReplicatedRows(fleet)
    max_tokens = recipe.optimizer.micro_batch
    columns = None if recipe.environment.is_served else NEEDED  # rows of agents may have branches
    stream = ExperienceStream(
        mailbox, storage, [REFERENCE.name], columns, max_tokens=max_tokens, longest_in_tree=longest
    )
    for batch in stream.start():
        stream.put(batch, {"ref_logprobs": compute(batch)})
    stream.close()
    mailbox.send("hub", HeldRows([], []))
    storage.close()
    mailbox.close()
