"""The engines of one replica in lock-step: what rank 0's is asked, the others are asked too, in the same order.

Engines that get the same calls make the same steps: sampling is counter-based, and the first rank's tokens count.
"""

import logging
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any

from ...relay.weights.slots import NothingReadable, Receipt
from ...trainer.policy.model import Policy
from ..engine.engine import Engine
from ..engine.sampling import SamplingParams
from ..engine.sequence import Completion, Parcel
from ..weights import RolloutWeights
from .calls import Add, Call, Cancel, End, Pause, PutIn, Recompute, Resume, Step, TakeWeights
from .replica import Replica

log = logging.getLogger(__name__)


class LeadEngine(Engine):
    """The engine of rank 0: whatever it is asked, the other ranks are told, if there are any."""

    def __init__(self, replica: Replica, policy: Policy, **options: Any) -> None:
        self.replica = replica
        super().__init__(policy, **options)

    def step(self) -> list[Completion]:
        """See `Engine`."""
        self.replica.tell(Step())
        self.replica.flush()
        with self.replica.together():
            return super().step()

    def recompute(self) -> None:
        """See `Engine`."""
        self.replica.tell(Recompute())
        super().recompute()

    def cancel(self, trajectory_id: int) -> bool:
        """See `Engine`."""
        self.replica.tell(Cancel(trajectory_id))
        return super().cancel(trajectory_id)

    def take_out(self, trajectory_ids: Many[int], with_cache: bool = False) -> list[Parcel]:
        """See `Engine`; of several ranks no cache goes along, since each has but a part of it."""
        for trajectory_id in trajectory_ids:
            self.replica.tell(Cancel(trajectory_id))
        return super().take_out(trajectory_ids, with_cache and self.replica.size == 1)

    def put_in(self, parcels: Many[Parcel]) -> None:
        """See `Engine`; several ranks compute caches again."""
        if self.replica.size > 1:
            parcels = [replace(parcel, cache=None) for parcel in parcels]
        super().put_in(parcels)
        for p in parcels:
            self.replica.tell(PutIn(p.trajectory_id, p.key, p.params, p.prompt_ids, p.token_ids))

    def pause(self, trajectory_id: int) -> bool:
        """See `Engine`."""
        self.replica.tell(Pause(trajectory_id))
        return super().pause(trajectory_id)

    def resume(self, trajectory_id: int, token_ids: Many[int] = ()) -> None:
        """See `Engine`."""
        self.replica.tell(Resume(trajectory_id, list(token_ids)))
        super().resume(trajectory_id, token_ids)

    def _add(
        self, prompt_ids: list[int], params: SamplingParams | Many[SamplingParams], ids: Many[int], streams: Many[int]
    ) -> None:
        each = [params] * len(ids) if isinstance(params, SamplingParams) else list(params)
        super()._add(prompt_ids, each, ids, streams)
        self.replica.tell(Add(list(prompt_ids), each, list(ids), list(streams)))


def take_newest(replica: Replica, weights: RolloutWeights, deadline_s: float) -> Receipt:
    """Rank 0: switch all ranks to the newest version."""
    while True:
        receipt = weights.pull(deadline_s)
        replica.tell(TakeWeights(receipt.version))
        replica.flush()
        if replica.all_say(True):
            return receipt
        log.warning("not all ranks could have version %d any more: taking a newer one", receipt.version)


def end_together(replica: Replica) -> None:
    """Rank 0: the others end too."""
    replica.tell(End())
    replica.flush()
    replica.all_say(True)
    replica.leave()


def follow(replica: Replica, engine: Engine, weights: RolloutWeights) -> None:
    """The other ranks: do what rank 0 tells until the end. Waits for rank 0 alone."""
    while True:
        for call in replica.listen():
            if isinstance(call, End):
                replica.all_say(True)
                replica.leave()
                return
            _do(call, replica, engine, weights)


def _do(call: Call, replica: Replica, engine: Engine, weights: RolloutWeights) -> None:
    match call:
        case Add():
            engine._add(call.prompt_ids, call.params, call.ids, call.streams)
        case Cancel():
            engine.cancel(call.trajectory_id)
        case PutIn(trajectory_id, key, params, prompt_ids, token_ids):
            engine.put_in([Parcel(trajectory_id, key, params, prompt_ids, token_ids, [], [])])
        case Pause():
            engine.pause(call.trajectory_id)
        case Resume():
            engine.resume(call.trajectory_id, call.token_ids)
        case Recompute():
            engine.recompute()
        case Step():
            with replica.together():
                engine.step()
        case TakeWeights():
            replica.all_say(_take(call.version, engine, weights))
        case _:
            raise AssertionError(f"no rule for {call}")


def _take(version: int, engine: Engine, weights: RolloutWeights) -> bool:
    try:
        weights.pull_version(version)
    except NothingReadable:
        return False
    engine.weights_changed()
    return True
