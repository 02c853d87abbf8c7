"""The trainer in virtual time: the real loop, with a stream that fetches no bytes and a publisher that sends none."""

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import Tensor

from ....comm.mailbox import Mailbox
from ....comm.messages import RequestRows, TrainBatch
from ....comm.recipe import Recipe
from ....relay.queue.batch import TRAIN, Batch
from ....relay.queue.micro_batches import rounds
from ....relay.queue.stream import PLACES
from ..settings import lab_of
from .world import World


class VirtualStream:
    """The trainer's stream. `on_message` takes the hub's answers; `next` lets the world go on until there is one."""

    def __init__(self, world: World, mailbox: Mailbox, recipe: Recipe) -> None:
        self._world = world
        self._mailbox = mailbox
        self._num_steps = recipe.run.steps
        e = lab_of(recipe.lab)
        self._micro_tokens = recipe.optimizer.micro_batch * e.trainer_ranks
        self._least_tokens = self._micro_tokens if e.trainer_ranks > 1 else 0
        self._prompt_tokens = e.prompt_tokens
        self._longest = recipe.sampling.max_new_tokens
        self._ones = np.ones(self._longest, np.uint8)
        self._ahead: deque[Batch] = deque()
        self._step = self._received = 0
        self._request_ids = itertools.count(1)
        self._is_asking = False

    def start(self) -> None:
        self._ask()

    def on_message(self) -> None:
        while (envelope := self._mailbox.receive(0.0)) is not None:
            answer = envelope.message
            if isinstance(answer, TrainBatch):
                self._is_asking = False
                self._ahead.append(self._batch(answer))
                self._received += len(answer.groups)
                if answer.ends_step:
                    self._step += 1
                    self._received = 0
                self._ask()

    def next(self) -> Batch:
        self._world.run_until(lambda: bool(self._ahead))
        batch = self._ahead.popleft()
        self._ask()
        return batch

    def put(self, batch: Batch, columns: Mapping[str, Sequence[np.ndarray]]) -> None:
        raise AssertionError("a virtual run has no other task than training")

    def close(self) -> None:
        """Nothing to end."""

    def _ask(self) -> None:
        if self._step < self._num_steps and len(self._ahead) < PLACES and not self._is_asking:
            self._is_asking = True
            place = (self._step, self._received)
            request = RequestRows(
                next(self._request_ids),
                [TRAIN],
                *place,
                max_tokens=self._micro_tokens,
                least_tokens=self._least_tokens,
            )
            self._mailbox.send("hub", request)

    def _batch(self, answer: TrainBatch) -> Batch:
        """A batch with only the columns that the statistics of an emulated trainer read."""
        batch = Batch(answer, [parts[0] for parts in rounds(answer.rows(), 1, self._micro_tokens)])
        for row in batch.rows:
            length = row.num_tokens - self._prompt_tokens
            is_cut = np.array([length >= self._longest], np.uint8)
            batch.columns[row.key] = {"loss_mask": self._ones[:length], "truncated": is_cut}
        return batch


class VirtualPublisher:
    """Hands versions to `show` at once, as the small buffer of an emulated run arrives at once."""

    def __init__(self, show: Callable[[int], None]) -> None:
        self._show = show

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        self._show(version)

    def close(self) -> None:
        """Nothing to end."""
