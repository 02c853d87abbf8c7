"""Digests over a fixed grid of chunks, so that bytes can be checked as they arrive and pieces by those who brought them."""

from collections.abc import Iterable

import numpy as np
import xxhash

GRID_BYTES = 4 << 20


def grid(num_bytes: int) -> range:
    """The offsets at which the chunks of a buffer's digest begin."""
    return range(0, num_bytes, GRID_BYTES)


def chunk_digest(buffer: np.ndarray, start: int) -> bytes:
    """The digest of the chunk that begins at `start`, 8 bytes."""
    return xxhash.xxh3_64_digest(buffer[start : start + GRID_BYTES].data)


def digest(buffer: np.ndarray) -> str:
    """The digest of a buffer: xxh3 over the xxh3 of its chunks, 32 hex digits."""
    return join_digests(chunk_digest(buffer, start) for start in grid(buffer.nbytes))


def join_digests(chunks: Iterable[bytes]) -> str:
    """The digest of a buffer from those of its chunks, in order."""
    return xxhash.xxh3_128_hexdigest(b"".join(chunks))


def digest_of_ranges(buffer: np.ndarray, ranges: Iterable[tuple[int, int]]) -> str:
    """The digest of byte ranges [start, end) of a buffer, taken together."""
    return join_digests(chunk_digest(buffer[start:end], at) for start, end in ranges for at in grid(end - start))
