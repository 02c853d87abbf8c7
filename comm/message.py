"""What every message is, and the names of rows and groups that messages speak of."""

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, tag_field="type", omit_defaults=True):
    """Base of all messages; `type` on the wire is the class name."""


class GroupId(msgspec.Struct, frozen=True, order=True):
    """A prompt's name: `epoch` over the data and index in the data set."""

    epoch: int
    prompt: int

    def row(self, sample: int) -> "RowId":
        """The name of one of its samples."""
        return RowId(self.epoch, self.prompt, sample)

    def __str__(self) -> str:
        return f"{self.epoch}.{self.prompt}"


class RowId(msgspec.Struct, frozen=True, order=True):
    """A trajectory's name: `epoch` over the data, `prompt` index in the data set, `sample` within the group."""

    epoch: int
    prompt: int
    sample: int

    @property
    def group(self) -> GroupId:
        """The group it belongs to."""
        return GroupId(self.epoch, self.prompt)

    @property
    def number(self) -> int:
        """The trajectory id of the sampler's random numbers: 63 bits, one for each (epoch, prompt, sample)."""
        return self.epoch << 48 | self.prompt << 12 | self.sample

    def key(self, attempt: int) -> str:
        """Where its bytes lie in a unit: those of another attempt can neither be read nor overwritten by mistake."""
        return f"{self}@{attempt}"

    def __str__(self) -> str:
        return f"{self.epoch}.{self.prompt}.{self.sample}"
