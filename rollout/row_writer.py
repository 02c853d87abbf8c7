"""Carries finished trajectories to two storage units, then tells the hub: the bytes are there before anybody hears of them."""

import queue
import threading
from dataclasses import dataclass

import numpy as np

from ..comm.mailbox import Mailbox
from ..comm.messages import RowDone, RowId
from ..relay.queue.replicated_rows import Units


@dataclass(slots=True)
class Delivery:
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


class Courier:
    """One thread that writes rows to their units; `ship` never blocks."""

    def __init__(self, mailbox: Mailbox, units: Units) -> None:
        self._mailbox = mailbox
        self._units = units
        self._outgoing: queue.Queue[Delivery | None] = queue.Queue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)
        self._thread.start()

    def ship(self, delivery: Delivery) -> None:
        """Hand a trajectory over. Raises the error that ended the thread, if one did."""
        if self._error is not None:
            raise self._error
        self._outgoing.put(delivery)

    def close(self) -> None:
        """Deliver what was handed over, then end, and the connections to the units with it."""
        self._outgoing.put(None)
        self._thread.join()
        self._units.close()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while (delivery := self._outgoing.get()) is not None:
                self._deliver(delivery)
        except Exception as error:  # noqa: BLE001 - the loop raises it at its next delivery
            self._error = error

    def _deliver(self, delivery: Delivery) -> None:
        units = [] if delivery.failure else self._units.store(delivery.row.key(delivery.attempt), delivery.columns())
        num_tokens = len(delivery.prompt_ids) + len(delivery.response_ids)
        done = RowDone(
            row=delivery.row,
            attempt=delivery.attempt,
            version=delivery.version,
            units=units,
            num_tokens=num_tokens,
            reward=delivery.reward,
            num_versions=len(set(delivery.versions)) or 1,
            failure=delivery.failure,
        )
        self._mailbox.send("hub", done)
