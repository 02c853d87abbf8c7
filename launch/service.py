"""The run as a service for engines of your own, when a trainer or a generator brings its own loop along.

The roles are those of AsyncFlow's service interface (section 5): `TrainerService` is get_experience_data and
weight_sync_notify, `GeneratorService` is put_prompts_data and put_experience_data seen from the engine, and
`init_engines` is the launch itself. See docs/service.md; who can do with the project's loops brings an adapter instead
(`rollout.adapter.Generator`, `trainer.adapter.Learner`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ..comm.fleet import Fleet
from ..comm.messages import HeldRows, LeaseGrant, RowId, StepTrained, Stop, TrainBatch, TrainingDone, WeightsPulled
from ..comm.recipe import Recipe
from ..comm.waits import waiting
from ..relay.queue.batch import TRAIN, Batch
from ..relay.queue.replicated_rows import ReplicatedRows
from ..relay.queue.stream import ExperienceStream, RunStopped
from ..relay.weights.layout import Layout, host_buffer
from ..relay.weights.publisher import WeightPublisher
from ..relay.weights.reader import WeightReader
from ..rollout.leases import HeldLeases, LeasedRow
from ..rollout.pacing import RolloutPacing
from ..rollout.row_writer import FinishedRow, RowWriter
from ..trainer.policy.model import Policy, load_policy
from ..trainer.policy.tensor_parallel import splits_for


@dataclass(frozen=True, slots=True)
class Experience:
    """One trajectory to train on; `columns` are those of its row (see `rollout.courier.FinishedRow.columns`)."""

    row: RowId
    version: int
    """The weights that generated it; the staleness is the service's `version` minus this."""
    reward: float
    columns: dict[str, np.ndarray]


class TrainerService:
    """A trainer's side of a run: experience comes in, versions of the weights go out. One rank, one thread.

    weights: the policy's parameters by transformers' name, in any order; they are published at once as version 0.
    """

    def __init__(self, fleet: Fleet, recipe: Recipe, weights: Mapping[str, Tensor]) -> None:
        self.version = 0
        self._mailbox = fleet.open_mailbox(fleet.name)
        self._storage = ReplicatedRows(fleet)
        steps, deadline_s = range(recipe.run.steps), recipe.comm.deadline_s
        stream = ExperienceStream(self._mailbox, self._storage, [TRAIN], steps=steps, deadline_s=deadline_s)
        self._stream = stream.start()
        self._structure = _structure(recipe)
        self._publisher = WeightPublisher.open(fleet, _layout(self._structure, recipe), recipe.comm)
        self._publish(weights)

    def experience(self) -> Iterator[list[Experience]]:
        """The groups of the step in progress, each as soon as it is complete; ends after the step's last.

        Raises `RunStopped` when the run ends.
        """
        received, total = 0, 1
        while received < total:
            batch = self._stream.next()
            assert isinstance(batch.row_batch, TrainBatch)
            received, total = received + len(batch.row_batch.groups), batch.row_batch.total
            yield from _groups_of(batch)

    def publish(self, weights: Mapping[str, Tensor]) -> None:
        """The step is trained: its rows are consumed, and these weights are the next version. Returns after one copy."""
        self._mailbox.send("hub", StepTrained(self.version))
        self.version += 1
        self._publish(weights)

    def close(self) -> None:
        """Deliver what was published, and end the run."""
        self._stream.close()
        self._publisher.close()
        self._storage.close()
        self._mailbox.send("hub", TrainingDone(self.version, {}))
        self._mailbox.close()

    def _publish(self, weights: Mapping[str, Tensor]) -> None:
        tensors = {name: weights[name] for name in self._structure.weights()}
        self._publisher.publish(self.version, tensors)


def _groups_of(batch: Batch) -> Iterator[list[Experience]]:
    for group in batch.row_batch.groups:
        yield [Experience(row.row, row.version, row.reward, batch.columns[row.key]) for row in group.rows()]


class GeneratorService:
    """A generator's side of a run: prompts and versions of the weights come in, trajectories go out. One thread."""

    def __init__(self, fleet: Fleet, recipe: Recipe) -> None:
        self._deadline_s = recipe.comm.deadline_s
        self._mailbox = fleet.open_mailbox(fleet.name)
        cycle = RolloutPacing.of(
            recipe.run.schedule, recipe.rollout.batch_groups, recipe.batch.prompts_per_step, recipe.num_replicas
        )
        self._leases = HeldLeases(self._mailbox, fleet.incarnation, recipe.batch.samples_per_prompt, cycle)
        self._rows = ReplicatedRows(fleet)
        self._row_writer = RowWriter(self._mailbox, self._rows)
        self._layout = _layout(_structure(recipe), recipe)
        self._buffer = host_buffer(self._layout.num_bytes)
        self._reader = WeightReader(fleet, self._layout, recipe.comm)
        self.version = -1

    @property
    def is_outdated(self) -> bool:
        """A newer version than `version` waits to be taken. Cheap."""
        return self.version < 0 or (self._reader.newest() or 0) > self.version

    def take_weights(self) -> dict[str, Tensor]:
        """Wait for the first version, later take the newest; views of one buffer that the next call fills again.

        Only with nothing begun: what is held was generated by the version before.
        """
        assert not self._leases.held, "finish what was begun on the version before"
        with waiting("relay", "a version", self._deadline_s) as wait:
            wait.until(lambda: self._reader.newest() is not None)
            receipt = self._reader.pull(self._buffer, wait.remaining_s)
        self._rows.attach()
        self.version = receipt.version
        self._mailbox.send("hub", WeightsPulled(receipt.version, receipt.digest))
        self._leases.begin_version()
        return self._layout.views(self._buffer)

    def prompts(self, room: int) -> list[LeasedRow]:
        """Samples to generate, about `room` of them: each with the `row` of the data that it answers.

        Waits until admission allows some; returns none when a newer version should be taken first. Raises `RunStopped`.
        """
        self._leases.drained()
        with waiting("hub", "prompts", self._deadline_s) as wait:
            while not self.is_outdated:
                wait.check()
                self._leases.ask(self.version, room)
                letter = self._mailbox.receive(0.05)
                match letter.message if letter else None:
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
    ) -> None:
        """A finished trajectory: tokens of the response with the log-probability of each, and its reward. Never blocks."""
        del self._leases.held[sample.row_id.number]
        versions = [self.version] * len(response_ids)
        ids = {"prompt_ids": list(prompt_ids), "response_ids": list(response_ids), "logprobs": list(logprobs)}
        facts: dict[str, Any] = {"versions": versions, "reward": reward, "failure": failure}
        self._row_writer.submit(FinishedRow(sample.row_id, sample.attempt, self.version, **ids, **facts))

    def close(self) -> None:
        """Deliver what was put, tell the hub what is still held, close the wires."""
        self._row_writer.close()
        held = list(self._leases.held.values())
        self._mailbox.send("hub", HeldRows([h.row_id for h in held], [h.attempt for h in held]))
        self._reader.close()
        self._mailbox.close()


def _structure(recipe: Recipe) -> Policy:
    """The policy without its weights."""
    return load_policy(recipe.model.path, recipe.model.dtype, weights=False)


def _layout(policy: Policy, recipe: Recipe) -> Layout:
    """What all processes of the run agree on: the order and the types of the weights on their way."""
    weights = policy.weights()
    return Layout.of(weights, policy.dtype, recipe.rollout.tp, splits_for(weights, policy.config))
