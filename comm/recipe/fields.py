"""Types of settings that several sections share, with their bounds."""

from typing import Annotated, Literal

from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
OptionalCount = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
NotNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
AtLeastOne = Annotated[float, Meta(ge=1)]
ScheduleName = Literal["sync", "stream_sync", "one_step", "stream", "partial", "headrace"]


def words(*words: str, own: str = "FILE.py:CLASS") -> Meta:
    """One of the words, or a user's own object."""
    return Meta(pattern=f"^({'|'.join(words)})$|:", examples=[*words, own])
