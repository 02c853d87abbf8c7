"""The engines of one replica in lock-step: each call that changes the engine of rank 0 is repeated by the other ranks, in order.

Engines that get the same calls make the same steps: sampling is counter-based, and all ranks use the same tokens.
"""

import logging
from collections.abc import Generator, Mapping
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...comm.errors import SettingError
from ...relay.weights.slots import VersionNotAvailable
from ..engine.engine import Engine
from .calls import Add, Call, Cancel, End, ImportSequence, Pause, Resume, Step, TakeWeights

if TYPE_CHECKING:
    from torch import Tensor

    from ...comm.messages.weights import WeightsPulled
    from ...trainer.policy.model import Policy
    from ..engine.sampling import SamplingParams
    from ..engine.sequence import Completion, SequenceState
    from ..weights import RolloutWeights
    from .replica import TensorParallelGroup

log = logging.getLogger(__name__)

_AnyEngine = Engine if TYPE_CHECKING else object


class Lead(_AnyEngine):
    """What rank 0 adds to an engine: the other ranks, if there are any, repeat its calls. To be mixed into an engine's class."""

    def __init__(
        self, replica: "TensorParallelGroup", weights: "RolloutWeights", policy: "Policy", **settings: Any
    ) -> None:
        """weights: those that fill the policy. settings: the other arguments of the engine."""
        super().__init__(policy, **settings)
        self.replica = replica
        self.weights = weights

    def add_group(
        self, prompt_ids: list[int], params: "SamplingParams | Many[SamplingParams]", trajectory_ids: Many[int]
    ) -> None:
        super().add_group(prompt_ids, params, trajectory_ids)
        each = list(params) if isinstance(params, Many) else [params] * len(trajectory_ids)
        self.replica.enqueue(Add(prompt_ids, each, list(trajectory_ids)))

    def step(self) -> "list[Completion]":
        self.replica.enqueue(Step())
        self.replica.flush()
        with self.replica.collective():
            return super().step()

    def export_sequences(self, trajectory_ids: Many[int], with_cache: bool = False) -> "list[SequenceState]":
        """With several ranks the states have no cache, since each rank holds a part of it only."""
        if not trajectory_ids:
            return []  # nothing would be sent, so this rank alone would read its step
        states = super().export_sequences(trajectory_ids, with_cache and self.replica.size == 1)
        exported = {state.trajectory_id for state in states}
        for number in trajectory_ids:  # one that stays is not running: the others read their step, as this rank has
            self.replica.enqueue(Cancel(number) if number in exported else Pause(number))
        return states

    def import_sequences(self, states: "Many[SequenceState]") -> None:
        """Several ranks compute the caches again."""
        if self.replica.size > 1:
            states = [replace(state, cache=None) for state in states]
        super().import_sequences(states)
        for state in states:
            self.replica.enqueue(ImportSequence(replace(state, logprobs=[])))

    def pause(self, trajectory_id: int) -> bool:
        self.replica.enqueue(Pause(trajectory_id))
        return super().pause(trajectory_id)

    def resume(self, trajectory_id: int, token_ids: Many[int] = ()) -> bool:
        self.replica.enqueue(Resume(trajectory_id, list(token_ids)))
        return super().resume(trajectory_id, token_ids)

    def cancel(self, trajectory_id: int) -> bool:
        self.replica.enqueue(Cancel(trajectory_id))
        return super().cancel(trajectory_id)

    def take_weights(self, deadline_s: float, version: int | None = None) -> "WeightsPulled":
        """Switch all ranks to the newest version that all of them can get, or to `version`.

        Raises `VersionNotAvailable` if a rank cannot get that one; the ranks may have different versions then.
        """
        while True:
            super().recompute()
            # Not sent if it raises: the other ranks keep their version, and repeat the next call. No step comes before that one.
            pulled = self.weights.pull(deadline_s) if version is None else self.weights.pull_version(version)
            self.replica.enqueue(TakeWeights(pulled.version))
            self.replica.flush()
            if self.replica.all_agree(True):
                super().weights_changed()
                return pulled
            if version is not None:
                raise VersionNotAvailable(f"version {version} is not available to every rank")
            log.warning("version %d is no longer available to every rank: taking a newer one", pulled.version)

    def close(self) -> None:
        """End the other ranks."""
        self.replica.enqueue(End())
        self.replica.flush()
        self.replica.all_agree(True)
        self.replica.close()


class LeadEngine(Lead, Engine):
    """The built-in engine of rank 0.

    With several ranks `generate`, `stream`, `bind`, `weights_changed` and `recompute` raise `SettingError`: no other rank would
    repeat them.
    """

    def stream(
        self,
        prompts: "Many[list[int]] | Many[str]",
        params: "SamplingParams | Many[SamplingParams] | None" = None,
        order: list[int] | None = None,
    ) -> "Generator[Completion, None, None]":
        self._check_alone("generate and stream")
        return super().stream(prompts, params, order)

    def bind(self, views: "Mapping[str, Tensor]") -> None:
        self._check_alone("bind")
        super().bind(views)

    def weights_changed(self) -> None:
        self._check_alone("weights_changed")
        super().weights_changed()

    def recompute(self) -> None:
        self._check_alone("recompute")
        super().recompute()

    def _check_alone(self, method: str) -> None:
        """Raise `SettingError` with several ranks: the others do not repeat this method."""
        if self.replica.size > 1:
            raise SettingError(f"rollout.tp={self.replica.size}: {method} would act on the first rank alone")


def run_follower(replica: "TensorParallelGroup", engine: Any, weights: "RolloutWeights") -> None:
    """Repeat the calls of rank 0 on another rank, whose engine is of the same kind, until `End`. Waits for rank 0 alone."""
    while True:
        for call in replica.receive():
            if isinstance(call, End):
                replica.all_agree(True)
                replica.close()
                return
            _run_call(call, replica, engine, weights)


def _run_call(call: Call, replica: "TensorParallelGroup", engine: Any, weights: "RolloutWeights") -> None:
    match call:
        case Add(prompt_ids, params, trajectory_ids):
            engine.add_group(prompt_ids, params, trajectory_ids)
        case Cancel(trajectory_id):
            engine.cancel(trajectory_id)
        case ImportSequence(state):
            engine.import_sequences([state])
        case Pause(trajectory_id):
            engine.pause(trajectory_id)
        case Resume(trajectory_id, token_ids):
            engine.resume(trajectory_id, token_ids)
        case Step():
            with replica.collective():
                engine.step()
        case TakeWeights(version):
            engine.recompute()
            replica.all_agree(_switch_weights(version, engine, weights))
        case _:
            raise AssertionError(f"no rule for {call}")


def _switch_weights(version: int, engine: Any, weights: "RolloutWeights") -> bool:
    try:
        weights.pull_version(version)
    except VersionNotAvailable:
        return False
    engine.weights_changed()
    return True
