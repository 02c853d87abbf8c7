"""Messages from rank 0 of a replica to the other ranks: the calls of its engine and new weights, in order."""

import msgspec

from ..engine.sampling import SamplingParams
from ..engine.sequence import SequenceState


class _Call(msgspec.Struct, frozen=True, tag=True, tag_field="type", omit_defaults=True):
    """Base of all calls; `type` on the wire is the class name."""


class Add(_Call, frozen=True):
    """Queue samples of a prompt; one entry of `params` per sample."""

    prompt_ids: list[int]
    params: list[SamplingParams]
    trajectory_ids: list[int]


class Cancel(_Call, frozen=True):
    """Drop a trajectory."""

    trajectory_id: int


class ImportSequence(_Call, frozen=True):
    """Continue a trajectory of another engine, from its tokens alone: the state has no cache and no log-probs."""

    state: SequenceState


class Pause(_Call, frozen=True):
    """Hold a trajectory."""

    trajectory_id: int


class Resume(_Call, frozen=True):
    """Continue a trajectory after these tokens."""

    trajectory_id: int
    token_ids: list[int]


class Step(_Call, frozen=True):
    """One step of the engine."""


class TakeWeights(_Call, frozen=True):
    """Drop all keys and values, switch to this version, and answer whether it was available."""

    version: int


class End(_Call, frozen=True):
    """The run is over."""


Call = Add | Cancel | ImportSequence | Pause | Resume | Step | TakeWeights | End

encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(list[Call]).decode
