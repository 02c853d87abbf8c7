"""The reference policy on ranks of its own: log-probabilities of the initial policy for every trajectory, as it comes in.

Consumes rows of the task `reference`; waits for the hub only; woken by its hand-outs. Each rank has the whole policy and asks
for itself, so the faster ones do more.
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
    """The reference's process, until the hub ends the run."""
    device = default_device(exact=recipe.generator.exact)
    policy = load_policy(recipe.model.path, recipe.model.dtype, device)
    mailbox, units = fleet.open_mailbox(fleet.name), ReplicatedRows(fleet)
    max_tokens = recipe.optimizer.micro_tokens
    stream = ExperienceStream(mailbox, units, [REFERENCE.name], NEEDED, max_tokens=max_tokens).start()
    for batch in stream:
        stream.put(batch, {"ref_logprobs": response_logprobs(policy, batch, device, recipe)})
    stream.close()
    mailbox.send("hub", HeldRows([], []))
    units.close()
    mailbox.close()
