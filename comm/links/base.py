"""The interface of a link."""

from typing import Protocol

import numpy as np


class Link(Protocol):
    """One end of a link. Buffers are one-dimensional uint8 arrays of any length, 0 included."""

    backend: str

    def send(self, buffer: np.ndarray, deadline_s: float) -> None:
        """Send all bytes of `buffer`, which is free for reuse afterwards. Raises `LinkBroken`."""

    def receive(self, buffer: np.ndarray, deadline_s: float) -> None:
        """Fill `buffer`. Raises `LinkBroken`."""

    def close(self) -> None:
        """End the link; the other end's next operation fails. Closing twice is allowed."""
