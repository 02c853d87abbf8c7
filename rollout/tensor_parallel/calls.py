"""Messages from rank 0 of a replica to the other ranks: the calls of its engine and new weights, in order."""

from collections.abc import Sequence
from typing import Union

import msgspec

from ..engine.sampling import SamplingParams


class Call(msgspec.Struct, frozen=True, tag=True, tag_field="type", omit_defaults=True):
    """Base of all calls; `type` on the wire is the class name."""


class Add(Call, frozen=True):
    """Queue samples of a prompt; one entry of `params` per sample."""

    prompt_ids: list[int]
    params: list[SamplingParams]
    trajectory_ids: list[int]


class Cancel(Call, frozen=True):
    """Drop a trajectory."""

    trajectory_id: int


class ImportSequence(Call, frozen=True):
    """Continue a trajectory of another engine, from its tokens."""

    trajectory_id: int
    key: int
    params: SamplingParams
    prompt_ids: list[int]
    token_ids: list[int]


class Pause(Call, frozen=True):
    """Hold a trajectory."""

    trajectory_id: int


class Resume(Call, frozen=True):
    """Continue a trajectory after these tokens."""

    trajectory_id: int
    token_ids: list[int]


class Recompute(Call, frozen=True):
    """Drop all keys and values."""


class Step(Call, frozen=True):
    """One step of the engine."""


class TakeWeights(Call, frozen=True):
    """Switch to this version, and answer whether it was available."""

    version: int


class End(Call, frozen=True):
    """The run is over."""


CALLS: Sequence[type[Call]] = (Add, Cancel, ImportSequence, Pause, Resume, Recompute, Step, TakeWeights, End)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[list[Call]] = msgspec.json.Decoder(list[Union[tuple(CALLS)]])  # noqa: UP007 # pyright: ignore


def encode(calls: list[Call]) -> bytes:
    """Calls as JSON."""
    return _encoder.encode(calls)


def decode(body: bytes) -> list[Call]:
    """Calls from JSON."""
    return _decoder.decode(body)
