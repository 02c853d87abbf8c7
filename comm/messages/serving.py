"""Messages between the front of a run and its rollouts: sequences of HTTP requests, which are not leases."""

from typing import Any

import msgspec

from .base import Message


class ServedSample(msgspec.Struct, frozen=True):
    """One response: its number at the front, its random stream, and the tokens that it has already."""

    number: int
    key: int
    streams: bool = False
    """Whether its tokens are sent soon after they are drawn, and not only a few times a second."""
    token_ids: list[int] = msgspec.field(default_factory=list[int])


class ServedPrompt(msgspec.Struct, frozen=True):
    """A prompt with responses to it. `params`: the fields of `SamplingParams`."""

    prompt_ids: list[int]
    params: dict[str, Any]
    samples: list[ServedSample]


class ServeSequences(Message, frozen=True):
    """The front has a rollout begin sequences, or go on with them, and drop others; `front` is the front's incarnation."""

    front: int
    begin: list[ServedPrompt] = msgspec.field(default_factory=list[ServedPrompt])
    drop: list[int] = msgspec.field(default_factory=list[int])
    is_first: bool = False
    """The front has none of the sequences there: all are dropped first."""


class ServedPiece(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of a sequence, from position `start` of its response on; each has a log-prob and the version that drew it."""

    number: int
    start: int
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    end: str = ""
    """Why it has ended; empty while it goes on."""
    text: str = ""
    """Of an ended one: the whole response."""


class ServedTokens(Message, frozen=True):
    """What a rollout has generated for the front of this incarnation since its last message, and the version that it has."""

    front: int
    version: int
    pieces: list[ServedPiece] = msgspec.field(default_factory=list[ServedPiece])
    digest: str = ""
    """Of the weights of this version. The front hears of each version before it gets tokens of it."""
