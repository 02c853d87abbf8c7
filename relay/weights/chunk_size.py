"""The chunk size of a version on its way down the chain, by Laminar's model, in seconds and bytes.

With p nodes (the sender included), M bytes in k chunks, and a chunk costing M / k * T_byte + T_start per hop, the last node has
the last chunk after T(k) = (p + k - 2) * (M * T_byte / k + T_start). With few chunks the nodes behind wait long; many chunks
cost start-ups.
"""

import math

START_S = 400e-6
"""Seconds that a data frame costs besides its bytes: headers, wake-ups and Python at both ends."""
_LEAST_BYTES, _MOST_BYTES = 64 << 10, 32 << 20


def push_seconds(num_nodes: int, num_bytes: float, num_chunks: float, byte_s: float, start_s: float) -> float:
    """T(k): seconds until the last of `num_nodes` nodes has everything."""
    return (num_nodes + num_chunks - 2) * (num_bytes * byte_s / num_chunks + start_s)


def best_num_chunks(num_nodes: int, num_bytes: float, byte_s: float, start_s: float) -> float:
    """k*: the number of chunks with the smallest T(k), at least 1."""
    return max(1.0, math.sqrt(max(num_nodes - 2, 0) * num_bytes * byte_s / start_s))


def chunk_bytes(num_nodes: int, num_bytes: int, byte_s: float, start_s: float) -> int:
    """Bytes of a chunk at k*, within the range that links carry well (64 KiB to 32 MiB)."""
    best = num_bytes / best_num_chunks(num_nodes, num_bytes, byte_s, start_s)
    return int(min(max(best, _LEAST_BYTES), _MOST_BYTES))
