"""A trainer with a loop of its own: experience comes in, versions of the weights go out.

`TrainerService` covers get_experience_data and weight_sync_notify of AsyncFlow's service interface (section 5); see
docs/use/service.md. A trainer that fits into the project's loop is an adapter instead (`trainer.learners.base.Learner`).
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..comm.errors import SettingError
from ..comm.fleet import Fleet
from ..comm.messages import RowId, StepTrained, TrainBatch, TrainingDone
from ..comm.recipe import Recipe
from ..relay.queue.batch import TRAIN, Batch
from ..relay.queue.replicated_rows import ReplicatedRows
from ..relay.queue.stream import ExperienceStream
from ..relay.weights.layout import Layout
from ..relay.weights.publisher import WeightPublisher
from .policy.model import load_policy
from .policy.tensor_parallel import splits_for


@dataclass(frozen=True, slots=True)
class Experience:
    """One trajectory to train on; `columns` are those of its row (see `rollout.leased_row.LeasedRow.columns`)."""

    row: RowId
    version: int
    """The weights that generated it; the staleness is the service's `version` minus this."""
    reward: float
    columns: dict[str, np.ndarray]


class TrainerService:
    """A trainer's side of a run, for one rank and one thread. Call `start` first and `close` at the end."""

    def __init__(self, fleet: Fleet, recipe: Recipe) -> None:
        if recipe.algorithm.kl_coef > 0 and not recipe.roles.reference:
            raise SettingError(
                "roles.reference: this trainer has no reference policy; take a rank, or algorithm.kl_coef=0"
            )
        self.version = 0
        self._resumed_at = time.monotonic()
        self._waited_s = 0.0
        self._mailbox = fleet.open_mailbox(fleet.name)
        self._storage = ReplicatedRows(fleet)
        steps = range(recipe.run.steps)
        deadline_s = recipe.comm.deadline_s
        self._stream = ExperienceStream(self._mailbox, self._storage, [TRAIN], steps=steps, deadline_s=deadline_s)
        policy = load_policy(recipe.model.path, recipe.model.compute_type, weights=False)
        shapes = policy.weights()
        self._names = list(shapes)
        layout = Layout.of(shapes, policy.dtype, recipe.weight_slices, splits_for(shapes, policy.config))
        self._publisher = WeightPublisher(fleet, layout, recipe.comm)

    def start(self, weights: Mapping[str, Tensor]) -> "TrainerService":
        """Publish the initial weights as version 0 and start to fetch experience.

        weights: the policy's parameters by transformers' name, in any order.
        """
        self._stream.start()
        self._publish(weights)
        return self

    def experience(self) -> Iterator[list[Experience]]:
        """The groups of the current step, each as soon as it is complete; ends after the last group of the step.

        Raises `RunStopped` when the run ends.
        """
        is_complete = False
        while not is_complete:
            asked_at = time.monotonic()
            batch = self._stream.next()
            self._waited_s += time.monotonic() - asked_at
            assert isinstance(batch, Batch) and isinstance(batch.row_batch, TrainBatch)
            is_complete = batch.row_batch.ends_step
            for group in batch.row_batch.groups:
                yield [Experience(row.row, row.version, row.reward, batch.columns[row.key]) for row in group.rows()]

    def publish(self, weights: Mapping[str, Tensor]) -> None:
        """Finish the step and publish its weights as the next version. Returns after one copy of them."""
        now = time.monotonic()
        busy_s = now - self._resumed_at - self._waited_s
        self._mailbox.send("hub", StepTrained(self.version, busy_s=busy_s, waited_s=self._waited_s))
        self._resumed_at = now
        self._waited_s = 0.0
        self.version += 1
        self._publish(weights)

    def close(self) -> None:
        """Deliver the last version and end the run."""
        self._stream.close()
        self._publisher.close()
        self._storage.close()
        self._mailbox.send("hub", TrainingDone({}))
        self._mailbox.close()

    def _publish(self, weights: Mapping[str, Tensor]) -> None:
        self._publisher.publish(self.version, {name: weights[name] for name in self._names})
