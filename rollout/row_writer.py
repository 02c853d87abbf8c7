"""Carries finished trajectories to two storage units, then tells the hub: the bytes are there before anybody hears of them."""

import queue
import threading
from dataclasses import dataclass

import numpy as np

from ..comm.mailbox import Mailbox
from ..comm.messages import RowDone, RowId
from ..relay.queue.replicated_rows import ReplicatedRows


@dataclass(slots=True)
class FinishedRow:
    """A finished trajectory on its way: prompt and response tokens, log-probs, reward, and the lease it belongs to."""

    row: RowId
    attempt: int
    version: int
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    """The version that drew each token; `version` is the first of them."""
    reward: float | None
    failure: str = ""

    def columns(self) -> dict[str, np.ndarray]:
        """The row's columns, written together: token ids and log-probs of the response with version and loss mask each."""
        return {
            "prompt_ids": np.array(self.prompt_ids, dtype=np.int32),
            "response_ids": np.array(self.response_ids, dtype=np.int32),
            "rollout_logprobs": np.array(self.logprobs, dtype=np.float32),
            "versions": np.array(self.versions, dtype=np.int32),
            "loss_mask": np.ones(len(self.response_ids), dtype=np.uint8),
            "reward": np.array([self.reward], dtype=np.float32),
        }


class RowWriter:
    """One thread that writes rows to their units; `submit` never blocks."""

    def __init__(self, mailbox: Mailbox, storage: ReplicatedRows) -> None:
        self._mailbox = mailbox
        self._storage = storage
        self._outgoing: queue.Queue[FinishedRow | None] = queue.Queue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)
        self._thread.start()

    def submit(self, row: FinishedRow) -> None:
        """Hand a trajectory over. Raises the error that ended the thread, if one did."""
        if self._error is not None:
            raise self._error
        self._outgoing.put(row)

    def close(self) -> None:
        """Deliver what was handed over, then end, and the connections to the units with it."""
        self._outgoing.put(None)
        self._thread.join()
        self._storage.close()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while (delivery := self._outgoing.get()) is not None:
                self._write(delivery)
        except Exception as error:  # noqa: BLE001 - the loop raises it at its next delivery
            self._error = error

    def _write(self, row: FinishedRow) -> None:
        units = [] if row.failure else self._storage.put_row(row.row.key(row.attempt), row.columns())
        num_tokens = len(row.prompt_ids) + len(row.response_ids)
        done = RowDone(
            row=row.row,
            attempt=row.attempt,
            version=row.version,
            storage_ids=units,
            num_tokens=num_tokens,
            reward=row.reward,
            num_versions=len(set(row.versions)) or 1,
            failure=row.failure,
        )
        self._mailbox.send("hub", done)
