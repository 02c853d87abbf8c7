"""The rows in a run's folder, against its journal: what was trained is what the rollouts have written, by the weights that were published."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from ...comm.messages import RowId
from ...relay.journal.events import RowReady
from ...relay.journal.files import read_events
from ...relay.queue.row_file import RowFile
from ...relay.queue.tasks import ROLLOUT_COLUMNS
from ...relay.receipts import row_receipt
from ...trainer.step_log import SavedStep, saved_steps
from .published import Published, digests_problem

_SEALED = frozenset((*ROLLOUT_COLUMNS, "branch_starts"))
"""The columns of a receipt."""
_digests = msgspec.json.Decoder(dict[str, str])


@dataclass(frozen=True, slots=True)
class SavedRow:
    """What is compared of a row."""

    file: str
    key: str
    receipt: str
    """Of its columns, as they are."""
    reward: float
    weights: str
    """What is wrong with the digests of its versions."""


def check_rows(run: Path, journal: Path, published: Published) -> Iterator[str]:
    """For each row a line about what is wrong with it, "" if it is as the journal has it. Raises `SettingError` for a damaged file, `JournalError`."""
    rows = {row_id: saved for path, _ in saved_steps(run) for row_id, saved in _rows_of(path, published)}
    journaled: dict[RowId, list[RowReady]] = {row_id: [] for row_id in rows}
    for _, event in read_events(journal, kinds=(RowReady,)):
        assert isinstance(event, RowReady)
        if event.row in journaled:
            journaled[event.row].append(event)
    for row_id, saved in rows.items():
        problem = _problem(saved, journaled[row_id])
        yield f"{saved.file}: row {saved.key}: {problem}" if problem else ""


def _rows_of(path: Path, published: Published) -> Iterator[tuple[RowId, SavedRow]]:
    for key, columns in RowFile(path, SavedStep).read().items():
        receipt = row_receipt({name: column for name, column in columns.items() if name in _SEALED})
        row_id, _ = RowId.of_key(key)
        yield (
            row_id,
            SavedRow(path.name, key, receipt, float(columns["reward"][0]), _weights_problem(columns, published)),
        )


def _weights_problem(columns: Mapping[str, np.ndarray], published: Published) -> str:
    if "weight_digests" not in columns:
        return "it has no digests of weights: an earlier version of Headrace has written it"
    try:
        digests = _digests.decode(columns["weight_digests"].tobytes())
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "its digests of weights cannot be read"
    return digests_problem(map(int, np.unique(columns["versions"])), digests, published)


def _problem(saved: SavedRow, ready: list[RowReady]) -> str:
    if not ready:
        return "the journal has no such row"
    if any(event.receipt == saved.receipt for event in ready):
        return saved.weights
    if not any(event.receipt for event in ready):
        return "the journal has no receipt of it: an earlier version of Headrace has written it"
    rewards = sorted({event.reward for event in ready})
    if not any(np.float32(reward) == np.float32(saved.reward) for reward in rewards):
        return f"its reward is {saved.reward:g}, and in the journal {' or '.join(f'{reward:g}' for reward in rewards)}"
    return saved.weights or "its columns are not those of its receipt in the journal"
