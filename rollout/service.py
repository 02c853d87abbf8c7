"""A rollout with a loop of its own: prompts and weights come in, trajectories go out.

`GeneratorService` covers put_prompts_data and put_experience_data of AsyncFlow's service interface (section 5), seen from the
engine; see docs/use/service.md. An engine that fits into the project's loop is an adapter instead (`rollout.generators.base.Generator`).
"""

import time
from collections.abc import Sequence

from torch import Tensor

from ..comm.fleet import Fleet
from ..comm.mailbox import HUB
from ..comm.messages import LeaseGrant, Stop
from ..comm.recipe import Recipe
from ..comm.shared_memory import host_buffer
from ..comm.waits import waiting
from ..relay.queue.replicated_rows import ReplicatedRows
from ..relay.queue.schedules import schedule_of
from ..relay.queue.stream import RunStopped
from ..relay.weights.layout import Layout
from ..relay.weights.reader import WeightReader
from ..trainer.policy.model import load_policy
from ..trainer.policy.tensor_parallel import splits_for
from .engine.sequence import Completion
from .leased_row import LeasedRow
from .leases import HeldLeases
from .pacing import RolloutPacing
from .row_writer import RowWriter

_POLL_S = 0.01


class GeneratorService:
    """A generator's side of a run, for one thread. Call `start` first and `close` at the end."""

    def __init__(self, fleet: Fleet, recipe: Recipe) -> None:
        self.version = -1
        self._fleet = fleet
        self._deadline_s = recipe.comm.deadline_s
        self._mailbox = fleet.open_mailbox(fleet.name)
        schedule = schedule_of(recipe.run, recipe.rollout)
        pacing = RolloutPacing.of(schedule, recipe.batch.prompts_per_step, recipe.num_replicas)
        self._leases = HeldLeases(self._mailbox, fleet.incarnation, recipe.batch.samples_per_prompt, pacing)
        self._storage = ReplicatedRows(fleet)
        self._row_writer = RowWriter(self._mailbox, self._storage, self._deadline_s)
        policy = load_policy(recipe.model.path, recipe.model.compute_type, weights=False)
        self._vocab_size = policy.vocab_size
        shapes = policy.weights()
        self._layout = Layout.of(shapes, policy.dtype, recipe.weight_slices, splits_for(shapes, policy.config))
        self._buffer = host_buffer(self._layout.num_bytes)
        self._reader = WeightReader(fleet, self._layout, recipe.comm)

    def start(self) -> "GeneratorService":
        self._row_writer.start()
        return self

    @property
    def is_outdated(self) -> bool:
        """The relay has a newer version than `version`. Cheap."""
        return self.version < 0 or (self._reader.newest() or 0) > self.version

    def take_weights(self) -> dict[str, Tensor]:
        """Load the newest version; the first call waits for one. The views share one buffer, which the next call overwrites.

        Every sample of the previous version must have been `put`.
        """
        assert not self._leases.held, "samples of the previous version are unfinished"
        with waiting("relay", "a version", self._deadline_s) as wait:
            while self._reader.newest() is None:
                self._fleet.keep_waiting(wait)
                wait.check()
                time.sleep(_POLL_S)
            pulled = self._reader.pull(self._buffer, wait.remaining_s)
        self.version = pulled.version
        self._mailbox.send("hub", pulled)
        self._leases.begin_version(self.version)
        return self._layout.views(self._buffer)

    def prompts(self, room: int) -> list[LeasedRow]:
        """About `room` samples to generate, each with its `row` of the data set.

        Waits until admission allows some, which may take as long as the trainer's step; returns an empty list when a newer version
        should be taken first. Raises `RunStopped`, and `WaitTimeout` when there has been no hub for `comm.deadline_s`.
        """
        self._leases.drained()
        with waiting("hub", "prompts", self._deadline_s) as wait:
            alive_s = 0.0
            while not self.is_outdated:
                if self._fleet.alive_members(HUB):
                    alive_s = wait.elapsed_s
                elif wait.elapsed_s - alive_s >= self._deadline_s:
                    wait.check()
                self._leases.ask(self.version, room)
                envelope = self._mailbox.receive(0.05)
                match envelope.message if envelope else None:
                    case LeaseGrant() as grant:
                        if held := [h for _, fresh in self._leases.take(grant, self.version) for h in fresh]:
                            return held
                    case Stop(reason=reason):
                        raise RunStopped(reason)
        return []

    def put(
        self,
        sample: LeasedRow,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        logprobs: Sequence[float],
        reward: float | None,
        failure: str = "",
        *,
        truncated: bool = False,
    ) -> None:
        """Submit a finished trajectory: the response's tokens, a log-probability for each, and its reward. Never blocks.

        Log-probabilities are those of the policy at the temperature of sampling, before filters and penalties.
        `truncated`: the response was cut at its longest length. Raises ValueError, and keeps the lease, for tokens that cannot be trained: an
        empty prompt, or an id outside of the policy's vocabulary.
        """
        if len(response_ids) != len(logprobs):
            raise ValueError(f"{len(logprobs)} log-probabilities for {len(response_ids)} tokens of {sample.row_id}")
        if not failure and len(prompt_ids) == 0:
            raise ValueError(
                f"the prompt of {sample.row_id} has no tokens; the first token of a response needs one before it"
            )
        for part, ids in (("prompt", prompt_ids), ("response", response_ids)):
            if wrong := [token for token in ids if not 0 <= token < self._vocab_size]:
                raise ValueError(
                    f"the {part} of {sample.row_id} has the token id {wrong[0]}, outside of the policy's vocabulary of"
                    f" {self._vocab_size}"
                )
        del self._leases.held[sample.row_id.number]
        tokens = (list(prompt_ids), list(response_ids), list(logprobs))
        sample.completion = Completion(sample.row_id.number, *tokens, finish_reason="length" if truncated else "stop")
        sample.has_own_prompt = True
        sample.failure = failure
        sample.set_reward(reward)
        self._row_writer.submit(sample)

    def close(self) -> None:
        """Deliver the submitted trajectories, report the unfinished ones to the hub, close the connections."""
        self._row_writer.close()
        self._mailbox.send("hub", self._leases.held_rows())
        self._reader.close()
        self._mailbox.close()
