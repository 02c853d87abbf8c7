"""Messages between the consumers of the experience queue, the relays that store it, and the hub."""

import msgspec

from .base import GroupId, Message, RowId


class RequestRows(Message, frozen=True):
    """A consumer asks for rows of the first of `tasks` that has some. Repeated with the same id until answered.

    A request that `is_overdue` is answered at once; without rows the answer is `NoRowsYet`.

    Of `train` it gets groups of `step` beyond the first `received`. Of another task it gets rows of up to `max_tokens`, which
    is a micro-batch for each of its ranks. It lists its `open_batches`, each by task and number; the hub repeats one that is not
    among them.
    """

    request_id: int
    tasks: list[str]
    step: int = -1
    received: int = 0
    open_batches: tuple[tuple[str, int], ...] = ()
    max_tokens: int = 1 << 14
    evaluated: int = -1
    """The newest version whose evaluation it has received, for `train`."""
    is_overdue: bool = False
    has_trees: bool = False
    """It computes the prompt that rows of a group share once, so `max_tokens` counts it once."""
    least_tokens: int = 0
    """Tokens of groups of `train` that give each of its ranks work; 0 where one rank begins with what there is."""


class RowRef(msgspec.Struct, frozen=True, array_like=True):
    """Metadata of a row: its name, the units that have its bytes, and the figures that plan its training.

    One that `is_partial` has the first tokens of an unfinished trajectory: it has no reward yet, and `num_tokens` counts its response
    alone.

    Journals and saved queues have it as an array, in the order of the fields: a new field goes to the end, with a default.
    """

    row: RowId
    attempt: int
    storage_ids: list[str]
    version: int
    num_tokens: int
    reward: float = 0.0
    num_versions: int = 1
    is_partial: bool = False
    num_prompt_tokens: int = 0
    """Those of `num_tokens` that all samples of its group begin with; 0 where that is not known."""
    newest: int = -1
    """The version that drew the last token of a partial row; `version` is the oldest."""
    num_drawn: int = 0
    """Those of `num_tokens` that a policy drew."""

    @property
    def continued_by(self) -> int:
        """The version under which a partial row continues without one more."""
        return max(self.version, self.newest)

    @property
    def key(self) -> str:
        """The key of its bytes in each of its units."""
        return self.row.partial_key(self.attempt) if self.is_partial else self.row.key(self.attempt)


class GroupRef(msgspec.Struct, frozen=True):
    """Metadata of samples of a group, one entry of each list for a sample."""

    group: GroupId
    samples: list[int]
    attempts: list[int]
    storage_ids: list[list[str]]
    versions: list[int]
    num_tokens: list[int]
    rewards: list[float]
    num_prompt_tokens: int = 0
    """Those of each of `num_tokens`; 0 where that is not known."""

    def row(self, index: int) -> RowId:
        return self.group.row(self.samples[index])

    def rows(self) -> list[RowRef]:
        names = map(self.group.row, self.samples)
        columns = (names, self.attempts, self.storage_ids, self.versions, self.num_tokens, self.rewards)
        prompt = self.num_prompt_tokens
        return [RowRef(*values, num_prompt_tokens=prompt) for values in zip(*columns, strict=True)]


class TrainBatch(Message, frozen=True, kw_only=True):
    """An answer to `RequestRows` for `train`: groups of `step`, at least one, from number `first` of `total` on.

    `metrics` are the fleet's figures at this moment. A checkpoint of a later step than `checkpoint_after` is wanted.
    """

    request_id: int = 0
    step: int
    first: int
    total: int
    groups: list[GroupRef]
    metrics: dict[str, float]
    checkpoint_after: int = -1
    evaluation: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """Metrics of the next evaluation that is complete, with the first answer of a step."""

    @property
    def ends_step(self) -> bool:
        """Whether no group of the step is to come."""
        return self.first + len(self.groups) == self.total

    def rows(self) -> list[RowRef]:
        return [row for group in self.groups for row in group.rows()]


class NoRowsYet(Message, frozen=True):
    """An answer to an overdue `RequestRows`: the hub is at work and has no rows for the consumer."""

    request_id: int


class EvaluationResult(Message, frozen=True):
    """An answer to `RequestRows` for `train` after the last step: the metrics of the next evaluation that is complete."""

    request_id: int
    metrics: dict[str, float]


class EvaluationsDone(Message, frozen=True):
    """An answer to `RequestRows` for `train` after the last step, when all evaluations are done."""

    request_id: int


class RowBatch(Message, frozen=True, kw_only=True):
    """The answer to `RequestRows` for another task: rows to add columns to, until `ColumnsAdded` with the same `batch_id`."""

    request_id: int = 0
    task: str
    batch_id: int
    groups: list[GroupRef]

    def rows(self) -> list[RowRef]:
        return [row for group in self.groups for row in group.rows()]


TrainAnswer = TrainBatch | EvaluationResult | EvaluationsDone
Answer = TrainAnswer | RowBatch | NoRowsYet
"""The hub's answers to `RequestRows`."""


class ColumnsAdded(Message, frozen=True):
    """A consumer has done a `RowBatch`: for each row the units that have its new columns, none for a row given up."""

    task: str
    batch_id: int
    columns: list[str]
    rows: list[RowId]
    storage_ids: list[list[str]]


class RowsNotFound(Message, frozen=True):
    """A consumer found these attempts of rows in none of their units."""

    rows: list[RowId]
    attempts: list[int]
    reason: str


class DropRows(Message, frozen=True):
    """From the hub to a relay: no task needs these rows any more."""

    keys: list[str]


class ListStoredRows(Message, frozen=True):
    """The hub asks a relay for the rows in its unit. `at_end`: for the count at the end of the run."""

    at_end: bool = False


class StoredRows(Message, frozen=True):
    """A relay's answer to `ListStoredRows`, whose `at_end` it has: keys of the rows in its unit."""

    keys: list[str]
    at_end: bool = False
