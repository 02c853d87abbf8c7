"""What changed between two versions: the new elements and the gaps between them, lossless.

A step at a small learning rate leaves most bf16 weights as they were (about 97 % at 1e-6). A delta is the gaps as uint16,
then the new values; an element more than 65,535 behind the one before is reached over elements that did not change.
"""

import numpy as np

_FARTHEST = (1 << 16) - 1


def encode(base: np.ndarray, new: np.ndarray, width: int) -> np.ndarray:
    """The delta that turns `base` into `new`, both uint8 [num_bytes] of elements of `width` bytes."""
    return encode_at(new, np.flatnonzero(base.view(f"u{width}") != new.view(f"u{width}")), width)


def encode_at(new: np.ndarray, changed: np.ndarray, width: int) -> np.ndarray:
    """The delta that brings the elements of `new` at the places `changed`, int64 in ascending order."""
    positions = _with_waypoints(changed)
    gaps = np.diff(positions, prepend=-1).astype(np.uint16)
    return np.concatenate([gaps.view(np.uint8), new.view(f"u{width}")[positions].view(np.uint8)])


def decode(delta: np.ndarray, width: int, num_elements: int) -> tuple[np.ndarray, np.ndarray]:
    """Places, int64 ascending, and new values of a delta. Raises `ValueError` for what is none of `num_elements`."""
    count, rest = divmod(delta.nbytes, 2 + width)
    positions = np.cumsum(delta[: 2 * count].view(np.uint16), dtype=np.int64) - 1
    if rest or (count and positions[-1] >= num_elements):
        raise ValueError(f"{delta.nbytes} bytes are no delta of {num_elements} elements")
    return positions, delta[2 * count :].copy().view(f"u{width}")


def _with_waypoints(changed: np.ndarray) -> np.ndarray:
    before = np.concatenate([[-1], changed[:-1]]) if changed.size else changed
    far = np.flatnonzero(changed - before > _FARTHEST)
    if not far.size:
        return changed
    waypoints = [np.arange(before[i] + _FARTHEST, changed[i], _FARTHEST) for i in far]
    return np.sort(np.concatenate([changed, *waypoints]))
