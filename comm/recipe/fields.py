"""Types of settings that several sections share, with their bounds."""

from sys import float_info
from typing import Annotated, Literal

from msgspec import Meta

FINITE = float_info.max
"""Any number but infinity is within it."""
Count = Annotated[int, Meta(ge=1)]
OptionalCount = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
SomeShare = Annotated[float, Meta(gt=0, le=1)]
ShareBelowOne = Annotated[float, Meta(ge=0, lt=1)]
Finite = Annotated[float, Meta(ge=-FINITE, le=FINITE)]
NotNegative = Annotated[float, Meta(ge=0, le=FINITE)]
Positive = Annotated[float, Meta(gt=0, le=FINITE)]
AtLeastOne = Annotated[float, Meta(ge=1, le=FINITE)]
Bound = Annotated[float, Meta(ge=0)]
"""A bound that `inf` lifts."""
Cap = Annotated[float, Meta(ge=1)]
"""A largest factor; `inf` means no limit."""
MAX_SECONDS = 1e6
"""Longest period or deadline, 11 days: the timers of sockets, threads and torch take no infinity."""
Seconds = Annotated[float, Meta(gt=0, le=MAX_SECONDS)]
SecondsOrNone = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
ScheduleName = Literal["sync", "stream_sync", "one_step", "stream", "partial", "headrace"]


def words(*words: str, own: str = "FILE.py:CLASS") -> Meta:
    """One of the words, or a user's own object."""
    return Meta(pattern=f"^({'|'.join(words)})$|:", examples=[*words, own])
