"""The rows in a run's folder, against its journal: what was trained is what the rollouts have written, by the weights that were published."""

from collections.abc import Iterator, Sequence
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
from .published import Published, digests_problem, published_in

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
    versions: Sequence[int]
    """Those that drew its tokens."""
    digests: bytes | None
    """The digests of their weights as JSON; None where the row has no such column."""


def check_rows(run: Path, journal: Path) -> Iterator[str]:
    """For each row a line about what is wrong with it, "" if it is as the journal has it. Raises `SettingError` for a damaged file, `JournalError`.

    The run may be under way: rows are read first, and what they are made of is in the journal before.
    """
    rows = {row_id: saved for path, _ in saved_steps(run) for row_id, saved in _rows_of(path)}
    published = published_in(journal)
    journaled: dict[RowId, list[RowReady]] = {row_id: [] for row_id in rows}
    for _, event in read_events(journal, kinds=(RowReady,)):
        assert isinstance(event, RowReady)
        if event.row in journaled:
            journaled[event.row].append(event)
    for row_id, saved in rows.items():
        problem = _problem(saved, journaled[row_id], published)
        yield f"{saved.file}: row {saved.key}: {problem}" if problem else ""


def _rows_of(path: Path) -> Iterator[tuple[RowId, SavedRow]]:
    for key, columns in RowFile(path, SavedStep).read().items():
        receipt = row_receipt({name: column for name, column in columns.items() if name in _SEALED})
        row_id, _ = RowId.of_key(key)
        versions = np.unique(columns["versions"]).tolist()
        digests = columns["weight_digests"].tobytes() if "weight_digests" in columns else None
        yield row_id, SavedRow(path.name, key, receipt, float(columns["reward"][0]), versions, digests)


def _weights_problem(saved: SavedRow, published: Published) -> str:
    if saved.digests is None:
        return "it has no digests of weights: an earlier version of Headrace has written it"
    try:
        digests = _digests.decode(saved.digests)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "its digests of weights cannot be read"
    return digests_problem(saved.versions, digests, published)


def _problem(saved: SavedRow, ready: list[RowReady], published: Published) -> str:
    if not ready:
        return "the journal has no such row"
    weights = _weights_problem(saved, published)
    if any(event.receipt == saved.receipt for event in ready):
        return weights
    if not any(event.receipt for event in ready):
        return "the journal has no receipt of it: an earlier version of Headrace has written it"
    rewards = sorted({event.reward for event in ready})
    if not any(np.float32(reward) == np.float32(saved.reward) for reward in rewards):
        return f"its reward is {saved.reward:g}, and in the journal {' or '.join(f'{reward:g}' for reward in rewards)}"
    return weights or "its columns are not those of its receipt in the journal"
