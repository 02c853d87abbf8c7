"""Writes finished trajectories to two storage units, then reports them: the hub learns only of rows that can be read.

No row is written for a sample of an evaluation: its score is reported.
"""

import json
import queue
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from ..comm import threads
from ..comm.mailbox import Mailbox
from ..comm.messages import RowDone, SampleScored
from ..comm.waits import waiting
from ..relay.queue.replicated_rows import ReplicatedRows
from .partial_rows import StreamedRow, write_streamed

if TYPE_CHECKING:
    from .leases import LeasedRow

POLL_S = 0.05
LARGEST = 3.4e38
"""Largest reward in size: a row stores it in 32 bits."""
MOST_TEXT = 1 << 15
"""Most characters of a response of an evaluation that the hub gets."""


@dataclass(slots=True)
class FinishedRow:
    """A finished trajectory with its lease, then its reward or failure. One that has failed may have no completion."""

    held: "LeasedRow"
    response: str | list[dict[str, Any]] = ""
    """For the reward functions: text, or the messages of several turns."""
    reward: float | None = None
    failure: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    """`metrics`: numbers to average over a step, each function's reward among them; `extra`: other notes on the sample."""
    frames: list[str] = field(default_factory=list)
    """The lines of the user's code on the way to the error that is the failure."""

    def set_reward(self, reward: float | None) -> None:
        """Take its whole reward; the trajectory fails with one that no row stores."""
        is_usable = reward is None or abs(reward) <= LARGEST  # not so for NaN
        self.reward = reward if is_usable else None
        self.failure = self.failure or ("" if is_usable else f"the reward is {reward}")

    def report(self, storage_ids: list[str]) -> RowDone | SampleScored:
        """The message to the hub about the row, which these units have, or about the sample of an evaluation."""
        held = self.held
        done = self.held.completion
        versions = self.held.drawn_by()
        if held.row_id.is_evaluation:
            return self._sample_scored()
        return RowDone(
            row=held.row_id,
            attempt=held.attempt,
            version=min(versions, default=held.version),
            storage_ids=storage_ids,
            num_tokens=len(done.prompt_ids) + len(done.token_ids) if done else 0,
            reward=self.reward,
            num_versions=len(versions) or 1,
            failure=self.failure,
            num_kept=held.num_kept,
        )

    def columns(self) -> dict[str, np.ndarray]:
        """The row's columns; log-probs, versions and the loss mask have one entry per token of the response."""
        done = self.held.completion
        assert done is not None
        return {
            "prompt_ids": np.array(done.prompt_ids, dtype=np.int32),
            "response_ids": np.array(done.token_ids, dtype=np.int32),
            "rollout_logprobs": np.array(done.logprobs, dtype=np.float32),
            "versions": np.array(self.held.token_versions(), dtype=np.int32),
            "loss_mask": self._loss_mask(len(done.token_ids)),
            "reward": np.array([self.reward], dtype=np.float32),
            "truncated": np.array([done.finish_reason == "length"], dtype=np.uint8),
            "reward_info": np.frombuffer(msgspec.json.encode(self.info), dtype=np.uint8),
        }

    def _sample_scored(self) -> SampleScored:
        held = self.held
        done = self.held.completion
        text = self.response if isinstance(self.response, str) else json.dumps(self.response)
        return SampleScored(
            row=held.row_id,
            attempt=held.attempt,
            versions=sorted(set(held.token_versions())) or [held.version],
            num_tokens=len(done.token_ids) if done else 0,
            is_truncated=done is not None and done.finish_reason == "length",
            reward=self.reward,
            failure=self.failure,
            text=text[:MOST_TEXT],
        )

    def _loss_mask(self, num_tokens: int) -> np.ndarray:
        """1 for the tokens that the policy drew, 0 for those that its environment inserted."""
        episode = self.held.episode
        return np.array([1] * num_tokens if episode is None else episode.loss_mask(num_tokens), dtype=np.uint8)


class Writer(Protocol):
    """Takes finished trajectories, and the first tokens of unfinished ones."""

    @property
    def backlog(self) -> int:
        """Items that are not written yet."""
        ...

    def start(self) -> None: ...

    def submit(self, row: FinishedRow | list[StreamedRow]) -> None: ...

    def close(self) -> None: ...


class RowWriter:
    """A thread that writes rows, from `start` to `close`; `submit` never blocks."""

    def __init__(self, mailbox: Mailbox, storage: ReplicatedRows, deadline_s: float) -> None:
        self._mailbox = mailbox
        self._storage = storage
        self._deadline_s = deadline_s
        self._rows: queue.Queue[FinishedRow | list[StreamedRow]] = threads.new_queue()
        self._is_closing = False
        self._error: BaseException | None = None
        self._thread = threads.new_thread(self._run, "row writer")

    @property
    def backlog(self) -> int:
        return self._rows.qsize()

    def start(self) -> None:
        self._thread.start()

    def submit(self, row: FinishedRow | list[StreamedRow]) -> None:
        """Queue a trajectory, or the first tokens of some. Raises the error that ended the thread, if one did."""
        if self._error is not None:
            raise self._error
        self._rows.put(row)

    def close(self) -> None:
        """Write the queued rows, then close the connections to the units. Raises `WaitTimeout` or the thread's error."""
        self._is_closing = True
        with waiting("storage", f"{self._rows.qsize()} rows", self._deadline_s) as wait:
            wait.until(lambda: not self._thread.is_alive())
        self._storage.close()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not (self._is_closing and self._rows.empty()):
                with suppress(queue.Empty):
                    item = self._rows.get(timeout=POLL_S)
                    if isinstance(item, FinishedRow):
                        self._write(item)
                    elif (report := write_streamed(item, self._storage)) is not None:
                        self._mailbox.send("hub", report)
        except Exception as error:  # noqa: BLE001 - `submit` or `close` raises it in the loop
            self._error = error

    def _write(self, row: FinishedRow) -> None:
        held = row.held
        has_row = not row.failure and not held.row_id.is_evaluation
        units = self._storage.put_row(held.row_id.key(held.attempt), row.columns()) if has_row else []
        self._mailbox.send("hub", row.report(units))
