"""What a client sends to train on: the tokens of a sequence, and for each of them what the loss reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...comm.errors import SettingError
from .losses import TARGETS, TokenLoss


@dataclass(frozen=True, slots=True)
class Datum:
    """A sequence of N tokens [N] int64, and arrays of any type and shape by their names in `loss_fn_inputs`."""

    token_ids: np.ndarray
    inputs: Mapping[str, np.ndarray]

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence."""
        return len(self.token_ids)


def check_data(data: Sequence[Datum], loss: TokenLoss, vocab_size: int, context: int) -> None:
    """Raise `SettingError`, which names the datum and the field, unless each has just what the loss reads, one number for each token."""
    if not data:
        raise SettingError("data: has no datum")
    for index, datum in enumerate(data):
        where = f"data[{index}]"
        if not 0 < datum.num_tokens <= context:
            raise SettingError(f"{where}.model_input: {datum.num_tokens} tokens; the context has 1 to {context}")
        _check_ids(datum.token_ids, vocab_size, f"{where}.model_input")
        _check_inputs(datum, (TARGETS, *loss.inputs), vocab_size, f"{where}.loss_fn_inputs")


def _check_inputs(datum: Datum, wanted: Sequence[str], vocab_size: int, where: str) -> None:
    for name in wanted:
        if name not in datum.inputs:
            raise SettingError(f"{where}.{name}: is missing")
    for name, array in datum.inputs.items():
        field = f"{where}.{name}"
        if name not in wanted:
            raise SettingError(f"{field}: this loss does not read it; it reads {', '.join(wanted)}")
        if array.shape != datum.token_ids.shape:
            shape = list(array.shape)
            problem = f"has the shape {shape}; one number for each of the {datum.num_tokens} tokens is supported"
            raise SettingError(f"{field}: {problem}")
        if name == TARGETS:
            _check_ids(array, vocab_size, field)
        elif not np.isfinite(array).all():
            raise SettingError(f"{field}: has a number that is not finite")


def _check_ids(ids: np.ndarray, vocab_size: int, field: str) -> None:
    if not np.issubdtype(ids.dtype, np.integer):
        raise SettingError(f"{field}: token ids must be whole numbers, not {ids.dtype}")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise SettingError(f"{field}: has token ids outside the vocabulary of {vocab_size}")
