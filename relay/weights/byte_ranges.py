"""Byte ranges of a buffer read as one stream, and digests over a fixed grid of chunks.

The grid lets a receiver check bytes as they arrive, and each part by itself.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import xxhash

if TYPE_CHECKING:
    from ...comm.messages.weights import Offer

GRID_BYTES = 4 << 20


@dataclass(frozen=True)
class ByteRanges:
    """Byte ranges [start, end) of a buffer, in order, read as one stream."""

    spans: tuple[tuple[int, int], ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The offset in the stream at which each range begins, and last the length of the stream."""
        return tuple(accumulate((end - start for start, end in self.spans), initial=0))

    @property
    def num_bytes(self) -> int:
        return self.starts[-1]

    def locate(self, at: int) -> tuple[int, int]:
        """The offset in the buffer of byte `at` of the stream, and the end of its range; past the last byte, twice its end."""
        if at >= self.num_bytes:
            end = self.spans[-1][1] if self.spans else 0
            return end, end
        index = bisect_right(self.starts, at) - 1
        start, end = self.spans[index]
        return start + at - self.starts[index], end

    def chunks(self, at: int, most: int) -> Iterator[tuple[int, int, int]]:
        """(at, start, end) of the chunks from byte `at` of the stream on: at most `most` bytes each, within one range each."""
        while at < self.num_bytes:
            start, end = self.locate(at)
            end = min(end, start + most)
            yield at, start, end
            at += end - start


def ranges_of(offer: "Offer") -> ByteRanges:
    """The byte ranges of the part that is offered; a rank may have none."""
    return ByteRanges(((0, offer.num_bytes),) if offer.num_parts == 1 else offer.spans)


def chunk_digest(buffer: np.ndarray, start: int) -> bytes:
    """The digest of the chunk that begins at `start`, 8 bytes."""
    return xxhash.xxh3_64_digest(buffer[start : start + GRID_BYTES].data)


def digest(buffer: np.ndarray) -> str:
    """The digest of a buffer: xxh3 over the xxh3 of its chunks, 32 hex digits."""
    return digest_of_ranges(buffer, ((0, buffer.nbytes),))


def join_digests(chunks: Iterable[bytes]) -> str:
    """The digest of a buffer from the digests of its chunks, in order."""
    return xxhash.xxh3_128_hexdigest(b"".join(chunks))


def chunk_digests(buffer: np.ndarray, ranges: Iterable[tuple[int, int]]) -> Iterator[bytes]:
    """The digests of the chunks of byte ranges [start, end) of a buffer, in order."""
    for start, end in ranges:
        for at in range(start, end, GRID_BYTES):
            yield chunk_digest(buffer[:end], at)


def digest_of_ranges(buffer: np.ndarray, ranges: Iterable[tuple[int, int]]) -> str:
    """The digest of byte ranges [start, end) of a buffer, taken together."""
    return join_digests(chunk_digests(buffer, ranges))
