"""Trajectories as bytes, between two rollouts: a frame with all but the caches, then keys, values and recurrent states as in memory.

The frame is padded to a multiple of 8 bytes. Floating-point numbers keep every bit. Nothing in it is executed; a malformed payload
is refused. A lease is JSON within the frame, as it came from the hub: a user's columns may have what msgpack lacks, such as integers
of more than 64 bits.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from ...comm.errors import MessageRefused
from ...comm.links.frames import decode_frame, encode_frame
from ..engine.sequence import SequenceState
from ..leased_row import LeasedRow

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ALIGNMENT = 8


class MovedRow(NamedTuple):
    """A trajectory on its way: its lease, and the state from which a generator continues it."""

    held: LeasedRow
    state: SequenceState


class _PayloadItem(msgspec.Struct, frozen=True):
    held: bytes
    """The lease, as JSON."""
    state: SequenceState
    """The state without the cache."""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    """Shape of the cache, whose bytes follow the frame in the order of the items; empty without a cache."""
    state_bytes: int = 0
    """Bytes of the recurrent state, which follow those of the item's cache; 0 without one."""


def _refuse(kind: type, _: Any) -> None:
    raise ValueError(f"unexpected {kind.__name__}")


_decoder = msgspec.msgpack.Decoder(list[_PayloadItem], dec_hook=_refuse)
_leases = msgspec.json.Decoder(LeasedRow)


def encode_rows(rows: Sequence[MovedRow]) -> list[np.ndarray]:
    """The payload in pieces, each uint8 [num_bytes]; caches are not copied."""
    cached = [t.state for t in rows if t.state.cache is not None]
    parts = [part for state in cached for part in (state.cache, state.states) if part is not None]
    leases = [msgspec.json.encode(t.held) for t in rows]
    states = [(replace(t.state, cache=None, states=None), *_form(t.state)) for t in rows]
    frame = encode_frame([_PayloadItem(lease, *state) for lease, state in zip(leases, states, strict=True)])
    return [np.pad(frame, (0, -frame.nbytes % _ALIGNMENT))] + [
        part.contiguous().flatten().view(torch.uint8).numpy() for part in parts
    ]


def decode_rows(payload: np.ndarray) -> list[MovedRow]:
    """The trajectories in a payload, uint8 [num_bytes]; their caches are views of it. Raises `MessageRefused`."""
    items, at = decode_frame(payload, _decoder)
    try:
        leases = [_leases.decode(item.held) for item in items]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageRefused(f"malformed payload: {error}") from error
    return list(_moved_rows(zip(leases, items, strict=True), payload, at + -at % _ALIGNMENT))


def _moved_rows(items: Iterable[tuple[LeasedRow, _PayloadItem]], payload: np.ndarray, at: int) -> Iterator[MovedRow]:
    for held, item in items:
        cache = None
        if item.shape:
            if item.dtype not in _DTYPES:
                raise MessageRefused(f"malformed payload: a cache of type {item.dtype!r}")
            stop = at + math.prod(item.shape) * _DTYPES[item.dtype].itemsize
            if min(item.shape) < 1 or stop > payload.nbytes:
                raise MessageRefused(f"malformed payload: a cache of shape {item.shape} in {payload.nbytes} bytes")
            cache = torch.from_numpy(payload[at:stop]).view(_DTYPES[item.dtype]).view(item.shape)
            at = stop
        states = None
        if item.state_bytes:
            stop = at + item.state_bytes
            if item.state_bytes < 0 or cache is None or item.state_bytes % cache.itemsize or stop > payload.nbytes:
                raise MessageRefused(
                    f"malformed payload: {item.state_bytes} bytes of a state in {payload.nbytes} bytes"
                )
            states = torch.from_numpy(payload[at:stop])
            at = stop
        params = replace(item.state.params, stop=tuple(item.state.params.stops))
        yield MovedRow(held, replace(item.state, cache=cache, states=states, params=params))


def _form(state: SequenceState) -> tuple[str, tuple[int, ...], int]:
    """Type and shape of a cache, and the bytes of the state beside it."""
    if state.cache is None:
        return "", (), 0
    size = 0 if state.states is None else state.states.numel()
    return str(state.cache.dtype).removeprefix("torch."), tuple(state.cache.shape), size
