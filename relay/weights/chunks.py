"""How fine to cut a version on its way down the chain: Laminar's model, in seconds and bytes.

With p nodes (the sender included), M bytes in k chunks, and a chunk costing M / k * T_byte + T_start per hop, the last node has
the last chunk after T(k) = (p + k - 2) * (M * T_byte / k + T_start). Few chunks keep the nodes behind waiting, many cost start-ups.
"""

import math

START_S = 400e-6
"""What a data frame costs besides its bytes, in seconds: headers, wake-ups and Python on both sides."""
_FIRST_BYTE_S = 1 / 2e9  # before the link's speed is known
_LEAST_BYTES, _MOST_BYTES = 64 << 10, 32 << 20


def push_seconds(num_nodes: int, num_bytes: float, num_chunks: float, byte_s: float, start_s: float) -> float:
    """T(k): seconds until the last of `num_nodes` nodes holds everything."""
    return (num_nodes + num_chunks - 2) * (num_bytes * byte_s / num_chunks + start_s)


def best_num_chunks(num_nodes: int, num_bytes: float, byte_s: float, start_s: float) -> float:
    """k*: the number of chunks with the smallest T(k), at least 1."""
    return max(1.0, math.sqrt(max(num_nodes - 2, 0) * num_bytes * byte_s / start_s))


def chunk_bytes(num_nodes: int, num_bytes: int, byte_s: float, start_s: float) -> int:
    """Bytes of a chunk at k*, within what links carry well (64 KiB to 32 MiB)."""
    best = num_bytes / best_num_chunks(num_nodes, num_bytes, byte_s, start_s)
    return int(min(max(best, _LEAST_BYTES), _MOST_BYTES))


class ChunkSizer:
    """The chunks of one sender: k* of the speed that its link had last, or what `comm.chunk_bytes` says."""

    def __init__(self, fixed_bytes: int | None = None) -> None:
        self._fixed_bytes = fixed_bytes
        self._byte_s = _FIRST_BYTE_S

    def chunk_bytes(self, num_nodes: int, num_bytes: int) -> int:
        """Bytes of a chunk of the next version, for a chain of `num_nodes`."""
        return self._fixed_bytes or chunk_bytes(num_nodes, num_bytes, self._byte_s, START_S)

    def record(self, num_bytes: int, seconds: float) -> None:
        """The last version's transfer."""
        self._byte_s = seconds / max(num_bytes, 1)
