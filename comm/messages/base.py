"""The base class of messages, and the names of rows, groups, processes and storage units that they mention."""

import msgspec

_EPOCH_BITS = 15
_PROMPT_BITS = 35
_SAMPLE_BITS = 12
_PARTIAL = "/partial"
_MARK = "e"
"""Before the name of a prompt of an evaluation."""
MAX_SAMPLES = 1 << _SAMPLE_BITS
"""Most samples of one group."""


class Message(msgspec.Struct, frozen=True, tag=True, tag_field="type", omit_defaults=True):
    """Base of all messages; `type` on the wire is the class name."""


class GroupId(msgspec.Struct, frozen=True, order=True, omit_defaults=True, gc=False):
    """A prompt's name: `epoch` over the data and index in the data set; of an evaluation, its number and the index in its prompts."""

    epoch: int
    prompt: int
    is_evaluation: bool = False

    def row(self, sample: int) -> "RowId":
        return RowId(self.epoch, self.prompt, sample, self.is_evaluation)

    def __str__(self) -> str:
        return f"{_MARK if self.is_evaluation else ''}{self.epoch}.{self.prompt}"


class RowId(msgspec.Struct, frozen=True, order=True, omit_defaults=True, gc=False):
    """A trajectory's name: the `sample` within the group of the other fields."""

    epoch: int
    prompt: int
    sample: int
    is_evaluation: bool = False

    @property
    def group(self) -> GroupId:
        return GroupId(self.epoch, self.prompt, self.is_evaluation)

    @property
    def number(self) -> int:
        """The trajectory id of the sampler's random numbers: 63 bits, one for each row of training and of evaluations."""
        assert 0 <= self.epoch < 1 << _EPOCH_BITS, f"{self}: the epoch takes more than {_EPOCH_BITS} bits"
        assert 0 <= self.prompt < 1 << _PROMPT_BITS, f"{self}: the prompt takes more than {_PROMPT_BITS} bits"
        assert 0 <= self.sample < MAX_SAMPLES, f"{self}: the sample takes more than {_SAMPLE_BITS} bits"
        group = (self.epoch << 1 | self.is_evaluation) << _PROMPT_BITS | self.prompt
        return group << _SAMPLE_BITS | self.sample

    def key(self, attempt: int) -> str:
        """The key of its bytes in a storage unit; it names the attempt, so that no attempt overwrites another's bytes."""
        return f"{self}@{attempt}"

    def partial_key(self, attempt: int) -> str:
        """The key of its first tokens in a storage unit, while this attempt is generated."""
        return f"{self}@{attempt}{_PARTIAL}"

    @staticmethod
    def of_key(key: str) -> "tuple[RowId, int]":
        """The row and the attempt that a key of a storage unit names, be it of the whole row or of its first tokens."""
        name, _, attempt = key.removesuffix(_PARTIAL).partition("@")
        epoch, prompt, sample = map(int, name.removeprefix(_MARK).split("."))
        return RowId(epoch, prompt, sample, name.startswith(_MARK)), int(attempt)

    def __str__(self) -> str:
        return f"{self.group}.{self.sample}"


def is_partial(key: str) -> bool:
    """Whether a row of a storage unit is the beginning of a trajectory."""
    return key.endswith(_PARTIAL)


def trajectory_group(number: int) -> int:
    """The bits that the numbers of all samples of one group share; `number` is a `RowId.number`."""
    return number >> _SAMPLE_BITS


def storage_id_of(relay: str, incarnation: int) -> str:
    """The name of the storage unit in one incarnation of a relay's process: "relay-1#2"."""
    return f"{relay}#{incarnation}"


def process_of(name: str) -> str:
    """The process that an inbox ("relay-1/weights") or a storage unit ("relay-1#2") belongs to."""
    return name.partition("/")[0].partition("#")[0]


def role_of(process: str) -> str:
    """The role of a process: "relay" of "relay-1"."""
    return process.partition("-")[0]
