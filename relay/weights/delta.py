"""Lossless differences between two versions: the gaps between changed elements, and their new values.

A step at a small learning rate leaves most bf16 weights as they were (about 97 % at 1e-6). A delta is the gaps as uint16,
then the new values; across a gap of more than 65,535 elements it repeats elements that did not change.
"""

import logging
import threading
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...comm.errors import HeadraceError
from ...comm.messages.weights import Delta, Offer
from .byte_ranges import ByteRanges, ranges_of

if TYPE_CHECKING:
    from .slots import VersionSlots

_log = logging.getLogger(__name__)
_FARTHEST = (1 << 16) - 1


class Difference(NamedTuple):
    """A version, or a part of it, as its difference to an older one: the offered delta, and its bytes."""

    delta: Delta
    changes: np.ndarray


class DeltaSource:
    """The sender's end: keeps the version that was sent last, the base of the next difference."""

    def __init__(self) -> None:
        self._last: tuple[int, np.ndarray] | None = None

    def offer(self, version: int, buffer: np.ndarray, width: int) -> Difference | None:
        """A version as its difference to the last one; None where that is half of it or more."""
        if self._last is None or self._last[0] >= version:
            return None
        base, old = self._last
        started = time.monotonic()
        changes = encode(old, buffer, width)
        is_worth_it = 2 * changes.nbytes < buffer.nbytes
        _log.info(
            "version %d: a delta has %.1f %% of the bytes and took %.3f s to make; %s",
            version, 100 * changes.nbytes / buffer.nbytes, time.monotonic() - started,
            "sent as a delta" if is_worth_it else "sent whole",
        )  # fmt: skip
        return Difference(Delta(base, changes.nbytes, width), changes) if is_worth_it else None

    def remember(self, version: int, buffer: np.ndarray) -> None:
        self._last = version, buffer.copy()


class DeltaCodec:
    """The receiver's end: the parts of one arriving version that come as differences. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._accepted: dict[int, Delta] = {}
        self._changed: dict[int, np.ndarray] = {}
        """The places of the elements that each part changed."""

    def accept(self, offer: Offer, slots: "VersionSlots") -> bool:
        """Take a part as the difference that is offered; False if the base is not stored."""
        if offer.delta is None or slots.find(offer.delta.base) is None:
            return False
        with self._lock:
            self._accepted[offer.part] = offer.delta
        return True

    def forget(self, part: int) -> None:
        """Expect a part whole: another upstream sends it, or the same one sends it again."""
        with self._lock:
            self._accepted.pop(part, None)
            self._changed.pop(part, None)

    def covers(self, parts: Collection[int]) -> bool:
        with self._lock:
            return bool(self._accepted) and self._accepted.keys() == set(parts)

    def apply(self, offer: Offer, delta: Delta, changes: np.ndarray, buffer: np.ndarray, slots: "VersionSlots") -> bool:
        """Write a part from its base and the changes; False if the base is gone or the changes do not fit it."""
        ranges = ranges_of(offer)

        def copy(base: np.ndarray) -> None:
            for _, start, end in ranges.chunks(0, ranges.num_bytes):
                np.copyto(buffer[start:end], base[start:end])

        try:
            slots.read_with(copy, delta.base)
            elements, values = decode(changes, delta.width, ranges.num_bytes // delta.width)
        except (HeadraceError, ValueError) as error:
            _log.warning("version %d: %s", offer.version, str(error))
            return False
        places = _places(ranges, elements, delta.width)
        buffer.view(values.dtype)[places] = values
        with self._lock:
            self._changed[offer.part] = places
        return True

    def encode(self, buffer: np.ndarray, num_parts: int) -> Difference | None:
        """The whole version as one difference; None unless all parts came as differences to the same version."""
        with self._lock:
            kinds = {(delta.base, delta.width) for delta in self._accepted.values()}
            changed = list(self._changed.values())
        if len(changed) < num_parts or len(kinds) != 1:
            return None
        base, width = kinds.pop()
        changes = encode_at(buffer, np.sort(np.concatenate(changed)), width)
        return Difference(Delta(base, changes.nbytes, width), changes)


def encode(base: np.ndarray, new: np.ndarray, width: int) -> np.ndarray:
    """The delta that turns `base` into `new`, both uint8 [num_bytes] of elements of `width` bytes."""
    return encode_at(new, np.flatnonzero(base.view(f"u{width}") != new.view(f"u{width}")), width)


def encode_at(new: np.ndarray, changed: np.ndarray, width: int) -> np.ndarray:
    """The delta that carries the elements of `new` at the places `changed`, int64 in ascending order."""
    gaps = np.diff(changed, prepend=-1)
    far = np.flatnonzero(gaps > _FARTHEST)
    if far.size:
        waypoints = [np.arange(changed[i] - gaps[i] + _FARTHEST, changed[i], _FARTHEST) for i in far]
        changed = np.sort(np.concatenate([changed, *waypoints]))
        gaps = np.diff(changed, prepend=-1)
    return np.concatenate([gaps.astype(np.uint16).view(np.uint8), new.view(f"u{width}")[changed].view(np.uint8)])


def decode(delta: np.ndarray, width: int, num_elements: int) -> tuple[np.ndarray, np.ndarray]:
    """Places, int64 ascending, and new values of a delta. Raises `ValueError` if it does not fit `num_elements` elements."""
    count, rest = divmod(delta.nbytes, 2 + width)
    positions = np.cumsum(delta[: 2 * count].view(np.uint16), dtype=np.int64) - 1
    if rest or (count and positions[-1] >= num_elements):
        raise ValueError(f"a delta of {delta.nbytes} bytes does not fit {num_elements} elements")
    return positions, delta[2 * count :].copy().view(f"u{width}")


def _places(ranges: ByteRanges, elements: np.ndarray, width: int) -> np.ndarray:
    """Places in the buffer of a part's elements, int64; both counted in elements of `width` bytes."""
    starts = np.array(ranges.starts[:-1], np.int64) // width
    shifts = np.array([start for start, _ in ranges.spans], np.int64) // width - starts
    return elements + shifts[np.searchsorted(starts, elements, "right") - 1]
