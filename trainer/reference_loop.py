"""The reference policy on ranks of its own: log-probabilities of the initial policy for every trajectory.

It consumes rows of the task `reference` and waits for batches from the hub only. Each rank has the whole policy and requests
its own rows, so faster ranks do more.
"""

from ..comm.fleet import Fleet
from ..comm.messages import HeldRows
from ..comm.recipe import Recipe
from ..relay.queue.replicated_rows import ReplicatedRows
from ..relay.queue.stream import ExperienceStream
from ..relay.queue.tasks import REFERENCE
from .logprobs import NEEDED, response_logprobs
from .policy.model import default_device, load_policy


def run(fleet: Fleet, recipe: Recipe) -> None:
    """The process of a reference rank, until the hub ends the run."""
    device = default_device()
    policy = load_policy(recipe.model.path, "float32", device)
    mailbox, storage = fleet.open_mailbox(fleet.name), ReplicatedRows(fleet)
    stream = ExperienceStream(mailbox, storage, [REFERENCE.name], NEEDED, max_tokens=recipe.optimizer.micro_batch)
    for batch in stream.start():
        stream.put(batch, {"ref_logprobs": response_logprobs(policy, batch, device, recipe)})
    stream.close()
    mailbox.send("hub", HeldRows([], []))
    storage.close()
    mailbox.close()
