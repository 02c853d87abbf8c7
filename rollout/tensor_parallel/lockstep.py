"""The engines of one replica in lock-step: what rank 0's is asked, the others are asked too, in the same order.

Engines that get the same calls make the same steps: sampling is counter-based, and the first rank's tokens count.
"""

import logging
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any

from ...relay.weights.slots import Receipt, VersionNotAvailable
from ...trainer.policy.model import Policy
from ..engine.engine import Engine
from ..engine.sampling import SamplingParams
from ..engine.sequence import Completion, SequenceState
from ..weights import RolloutWeights
from .calls import Add, Call, Cancel, End, ImportSequence, Pause, Recompute, Resume, Step, TakeWeights
from .replica import TensorParallelGroup

log = logging.getLogger(__name__)


class LeadEngine(Engine):
    """The engine of rank 0: whatever it is asked, the other ranks are told, if there are any."""

    def __init__(self, replica: TensorParallelGroup, policy: Policy, **options: Any) -> None:
        self.replica = replica
        super().__init__(policy, **options)

    def step(self) -> list[Completion]:
        """See `Engine`."""
        self.replica.enqueue(Step())
        self.replica.flush()
        with self.replica.collective():
            return super().step()

    def recompute(self) -> None:
        """See `Engine`."""
        self.replica.enqueue(Recompute())
        super().recompute()

    def cancel(self, trajectory_id: int) -> bool:
        """See `Engine`."""
        self.replica.enqueue(Cancel(trajectory_id))
        return super().cancel(trajectory_id)

    def export_sequences(self, trajectory_ids: Many[int], with_cache: bool = False) -> list[SequenceState]:
        """See `Engine`; of several ranks no cache goes along, since each has but a part of it."""
        for trajectory_id in trajectory_ids:
            self.replica.enqueue(Cancel(trajectory_id))
        return super().export_sequences(trajectory_ids, with_cache and self.replica.size == 1)

    def import_sequences(self, states: Many[SequenceState]) -> None:
        """See `Engine`; several ranks compute caches again."""
        if self.replica.size > 1:
            states = [replace(parcel, cache=None) for parcel in states]
        super().import_sequences(states)
        for p in states:
            self.replica.enqueue(ImportSequence(p.trajectory_id, p.key, p.params, p.prompt_ids, p.token_ids))

    def pause(self, trajectory_id: int) -> bool:
        """See `Engine`."""
        self.replica.enqueue(Pause(trajectory_id))
        return super().pause(trajectory_id)

    def resume(self, trajectory_id: int, token_ids: Many[int] = ()) -> None:
        """See `Engine`."""
        self.replica.enqueue(Resume(trajectory_id, list(token_ids)))
        super().resume(trajectory_id, token_ids)

    def _add(
        self, prompt_ids: list[int], params: SamplingParams | Many[SamplingParams], ids: Many[int], streams: Many[int]
    ) -> None:
        each = [params] * len(ids) if isinstance(params, SamplingParams) else list(params)
        super()._add(prompt_ids, each, ids, streams)
        self.replica.enqueue(Add(list(prompt_ids), each, list(ids), list(streams)))


def take_newest(replica: TensorParallelGroup, weights: RolloutWeights, deadline_s: float) -> Receipt:
    """Rank 0: switch all ranks to the newest version."""
    while True:
        receipt = weights.pull(deadline_s)
        replica.enqueue(TakeWeights(receipt.version))
        replica.flush()
        if replica.all_agree(True):
            return receipt
        log.warning("not all ranks could have version %d any more: taking a newer one", receipt.version)


def close_together(replica: TensorParallelGroup) -> None:
    """Rank 0: the others end too."""
    replica.enqueue(End())
    replica.flush()
    replica.all_agree(True)
    replica.close()


def run_follower(replica: TensorParallelGroup, engine: Engine, weights: RolloutWeights) -> None:
    """The other ranks: do what rank 0 tells until the end. Waits for rank 0 alone."""
    while True:
        for call in replica.receive():
            if isinstance(call, End):
                replica.all_agree(True)
                replica.close()
                return
            _run_call(call, replica, engine, weights)


def _run_call(call: Call, replica: TensorParallelGroup, engine: Engine, weights: RolloutWeights) -> None:
    match call:
        case Add():
            engine._add(call.prompt_ids, call.params, call.ids, call.streams)
        case Cancel():
            engine.cancel(call.trajectory_id)
        case ImportSequence(trajectory_id, key, params, prompt_ids, token_ids):
            engine.import_sequences([SequenceState(trajectory_id, key, params, prompt_ids, token_ids, [], [])])
        case Pause():
            engine.pause(call.trajectory_id)
        case Resume():
            engine.resume(call.trajectory_id, call.token_ids)
        case Recompute():
            engine.recompute()
        case Step():
            with replica.collective():
                engine.step()
        case TakeWeights():
            replica.all_agree(_switch_weights(call.version, engine, weights))
        case _:
            raise AssertionError(f"no rule for {call}")


def _switch_weights(version: int, engine: Engine, weights: RolloutWeights) -> bool:
    try:
        weights.pull_version(version)
    except VersionNotAvailable:
        return False
    engine.weights_changed()
    return True
