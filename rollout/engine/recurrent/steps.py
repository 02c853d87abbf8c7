"""The recurrence of prefill and of decoding, over the states of a `StateCache`. Inference only."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....trainer.policy.attention import PaddedClasses
from ....trainer.policy.recurrent.delta_rule import read_in_chunks, read_one
from ....trainer.policy.recurrent.network import DeltaNet, MixedAttention, Projected
from ..to_device import to_device

if TYPE_CHECKING:
    from ....trainer.policy.model import Policy
    from ..attention.backends import DecodeAttention
    from ..batch import DecodeBatch
    from .state_cache import StateCache


class StateRun(NamedTuple):
    """Tokens [start, stop) of a sequence that are prefilled now."""

    start: int
    stop: int
    place: int
    """Its state: that before the first of these tokens becomes that behind the last one."""
    saves: Sequence[tuple[int, int]] = ()
    """Numbers of tokens, in rising order, behind which the state is copied to a place."""


class _Class(NamedTuple):
    """Parts of about equal length, one for each of several sequences, that are computed as one batch."""

    tokens: Tensor
    size: tuple[int, int]
    is_real: Tensor
    """[members, longest, 1]: not padding."""
    window: Tensor
    """[members, width - 1]: where the last inputs of each part are, behind the window before it."""
    places: Tensor
    savers: Tensor
    """The members whose states are copied."""
    targets: Tensor


class _Round:
    """Parts of different sequences, at most one of each, in the order of their tokens."""

    def __init__(self, parts: "list[_Part]", width: int, device: torch.device) -> None:
        lengths = [part.stop - part.start for part in parts]
        self.tokens = to_device(np.concatenate([np.arange(part.start, part.stop) for part in parts]), device)
        self._padded = PaddedClasses(lengths, device)
        self.unpad = self._padded.unpad
        self.classes: list[_Class] = []
        for members, (tokens, size) in zip(self._padded.members, self._padded.classes, strict=True):
            sizes = np.array([lengths[index] for index in members])
            savers = [row for row, index in enumerate(members) if parts[index].save]
            arrays = (
                np.arange(size[1]) < sizes[:, None],
                sizes[:, None] + np.arange(width),
                np.array([parts[index].place for index in members]),
                np.array(savers, dtype=np.int64),
                np.array([parts[members[row]].save for row in savers], dtype=np.int64),
            )
            is_real, *others = (to_device(array, device) for array in arrays)
            self.classes.append(_Class(tokens, size, is_real[..., None], *others))


class _Part(NamedTuple):
    """Tokens [start, stop) of all that are prefilled; `save`: where the state behind them is copied to, or 0."""

    start: int
    stop: int
    place: int
    save: int


class PrefillRecurrence:
    """Runs of several sequences, packed one after the other. A run with saves is divided there, and its parts follow one another."""

    def __init__(self, states: "StateCache", runs: Sequence[StateRun], device: torch.device) -> None:
        self._states = states
        width = states.window_length
        rounds: list[list[_Part]] = []
        first = 0
        for run in runs:
            ends = {run.stop: 0} | dict(run.saves)
            start = run.start
            for number, end in enumerate(sorted(ends)):
                if number == len(rounds):
                    rounds.append([])
                rounds[number].append(_Part(first + start - run.start, first + end - run.start, run.place, ends[end]))
                start = end
            first += run.stop - run.start
        self._rounds = [_Round(parts, width, device) for parts in rounds]

    def __call__(self, layer: int, net: DeltaNet, projected: Projected) -> Tensor:
        read: Tensor | None = None
        for each in self._rounds:
            outputs = [self._of_class(part, each.tokens, layer, net, projected) for part in each.classes]
            found = each.unpad(outputs)
            if read is None:
                read = found.new_empty(len(projected.mixed), *found.shape[1:])
            read.index_copy_(0, each.tokens, found)
        assert read is not None, "a prefill has tokens"
        return read

    def _of_class(self, part: _Class, tokens: Tensor, layer: int, net: DeltaNet, projected: Projected) -> Tensor:
        windows = self._states.windows[layer]
        matrices = self._states.matrices[layer]
        chosen = tokens[part.tokens]
        mixed, decay, beta = (
            x.index_select(0, chosen).unflatten(0, part.size)
            for x in (projected.mixed, projected.decay, projected.beta)
        )
        window = windows.index_select(0, part.places)
        inputs = net.convolve(mixed, window)
        # Behind its last token a sequence's state stays as it is.
        decay, beta = (x * part.is_real for x in (decay, beta))
        read, state = read_in_chunks(*inputs, decay, beta, matrices.index_select(0, part.places))
        members = torch.arange(len(mixed), device=mixed.device)[:, None]
        window = torch.cat((window, mixed), 1)[members, part.window]
        for tensor, value in ((windows, window), (matrices, state)):
            tensor.index_copy_(0, part.places, value)
            tensor.index_copy_(0, part.targets, value.index_select(0, part.savers))
        return read.flatten(0, 1)


class DecodeRecurrence:
    """One token of each row: from the state behind the tokens before it to that behind it, which is in the row's other place."""

    def __init__(self, states: "StateCache") -> None:
        self._states = states

    def prepare(self, batch: "DecodeBatch") -> None:
        """Take the rows' places of this step."""
        rows = np.arange(len(batch))
        parity = batch.positions % 2
        self._before = to_device(batch.states[rows, parity], batch.device)
        self._behind = to_device(batch.states[rows, 1 - parity], batch.device)

    def __call__(self, layer: int, net: DeltaNet, projected: Projected) -> Tensor:
        windows = self._states.windows[layer]
        matrices = self._states.matrices[layer]
        window = windows.index_select(0, self._before)
        mixed = projected.mixed[:, None]
        query, key, value = (x[:, 0] for x in net.convolve(mixed, window))
        state = matrices.index_select(0, self._before)
        read, state = read_one(query, key, value, projected.decay, projected.beta, state)
        windows.index_copy_(0, self._behind, torch.cat((window, mixed), 1)[:, 1:])
        matrices.index_copy_(0, self._behind, state)
        return read


class MixedDecodeAttention(MixedAttention):
    """A back-end of decoding beside the recurrence, for a policy of both kinds of layers."""

    def __init__(self, attention: "DecodeAttention", states: "StateCache", policy: "Policy") -> None:
        self._decode = attention
        self._recurrence = DecodeRecurrence(states)
        super().__init__(attention, self._recurrence, policy.kv_layers)
        self.name = attention.name

    def prepare(self, batch: "DecodeBatch") -> None:
        """Update the plan to the batch's positions, once per step."""
        self._decode.prepare(batch)
        self._recurrence.prepare(batch)
