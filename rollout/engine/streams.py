"""Random numbers of trajectories: entry `position` of a stream is a hash of (key, position), in the manner of SplitMix64.

So a number depends on nothing that was drawn before, and a trajectory on no other one.
"""

from torch import Tensor

_MASK = (1 << 64) - 1


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
FACTORS = tuple(map(_signed, (_GOLDEN, _MIX_1, _MIX_2)))
"""The factors of `uniforms`, as signed 64-bit numbers."""


def stream_key(seed: int, trajectory_id: int) -> int:
    """The random stream of one trajectory, as a signed 64-bit number."""
    return _signed(_mix((_mix(seed & _MASK) + trajectory_id * _GOLDEN) & _MASK))


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Numbers in (0, 1), fp32 [B]: entry `positions` [B] of the streams `keys` [B], both int64."""
    golden, mix_1, mix_2 = FACTORS
    x = keys + (positions + 1) * golden
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * mix_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * mix_2
    x = x ^ ((x >> 31) & ((1 << 33) - 1))
    return ((x >> 41) & ((1 << 23) - 1)).float().add_(0.5).mul_(2.0**-23)


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)
