"""Sampling: from logits to tokens and their log-probabilities.

One random number per token, a hash of (seed, trajectory, position in the response), selects the token through the inverse
of the cumulative distribution. So a trajectory does not depend on its batch, on the place where it runs, or on
interruptions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...comm.errors import SettingError
from ...comm.recipe.generation import LEAST_TEMPERATURE
from .streams import uniforms
from .to_device import to_device

_HAS_TRITON = find_spec("triton") is not None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one prompt's responses. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.

    Of equally likely tokens at the border of top_k or top_p only as many are kept as the filter needs.
    """

    max_new_tokens: int = 256
    """Most tokens of a response; the policy's context bounds it too."""
    temperature: float = 1.0
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this."""
    top_k: int = 0
    """Keep the k most likely tokens."""
    min_p: float = 0.0
    """Keep tokens at least this many times as likely as the most likely one."""
    n: int = 1
    """Responses per prompt."""
    stop: str | int | Sequence[str | int] = ()
    """Stops in addition to the policy's own: token ids, or strings (the text ends before the string)."""
    repetition_penalty: float = 1.0
    """Scores of tokens already in prompt or response are divided by this if positive, else multiplied."""
    ignore_eos: bool = False
    """Continue past the policy's own stop tokens."""
    seed: int | None = None
    """Seed of this prompt alone; None: the engine's."""
    pause_at_stop: bool = False
    """A response that stops is a turn: it stays in the engine, paused, until `resume` or `cancel`."""

    def __post_init__(self) -> None:
        rules = {
            "max_new_tokens must be a whole number, at least 1": _is_count(self.max_new_tokens),
            f"temperature must be 0, or at least {LEAST_TEMPERATURE:g} and finite": self.temperature == 0
            or LEAST_TEMPERATURE <= self.temperature < math.inf,
            "top_p must be in (0, 1]": 0 < self.top_p <= 1,
            "top_k must be a whole number, 0 or more": self.top_k == 0 or _is_count(self.top_k),
            "min_p must be in [0, 1)": 0 <= self.min_p < 1,
            "n must be a whole number, at least 1": _is_count(self.n),
            "repetition_penalty must be above 0 and finite": 0 < self.repetition_penalty < math.inf,
            "stop must be token ids or strings that are not empty": not isinstance(self.stop, bytes)
            and all(isinstance(stop, str | int) and stop != "" for stop in self.stops),
        }
        for rule, is_kept in rules.items():
            if not is_kept:
                raise SettingError(f"sampling.{rule}")

    @property
    def stops(self) -> tuple[str | int, ...]:
        return (self.stop,) if isinstance(self.stop, str | int) else tuple(self.stop)

    @property
    def has_filter(self) -> bool:
        """Whether tokens may be filtered out; the most likely one, which greedy sampling draws, never is."""
        return self.temperature != 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def is_plain(self) -> bool:
        """Whether tokens are drawn by the policy's probabilities, without a filter and without a penalty."""
        return not self.has_filter and self.repetition_penalty == 1

    @property
    def row(self) -> tuple[int | float | bool, ...]:
        """The fields of `ROW`."""
        is_greedy = self.temperature == 0
        filters = (self.top_k, self.top_p, self.min_p) if self.has_filter else (0, 1.0, 0.0)
        kind = _GREEDY if is_greedy else _RANDOM
        kind += _SCALED * (self.temperature not in (0, 1)) + _FILTERED * self.has_filter
        kind += _PENALIZED * (self.repetition_penalty != 1)
        return (filters[0], 1 / (self.temperature or 1), *filters[1:], self.repetition_penalty, is_greedy, kind)


def _is_count(number: object) -> bool:
    return isinstance(number, int) and number >= 1


ROW = np.dtype(
    [("top_k", "i8"), ("scale", "f4"), ("top_p", "f4"), ("min_p", "f4"), ("penalty", "f4"), ("is_greedy", "?"), ("kind", "u1")], align=True
)  # fmt: skip
"""The sampling of a row; filters and penalty are off as in `SamplingParams`. `kind` is a sum of the following."""
_GREEDY, _RANDOM, _SCALED, _FILTERED, _PENALIZED = 1, 2, 4, 8, 16


class Filters(NamedTuple):
    """Filters and repetition penalties of rows, [B, 1] each."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    penalty: Tensor


class SamplingBatch:
    """The sampling parameters of the sequences that decode together, by row, on the device of the logits."""

    def __init__(self, keys: Tensor, scale: Tensor | None, is_greedy: Tensor) -> None:
        """Plain rows with any mixture of greedy and random ones."""
        self.keys = keys
        self.is_greedy = is_greedy
        self.has_greedy = True
        self.has_random = True
        self.scale = scale
        """None: the temperature of all rows is 1, or 0."""
        self.has_filter = False
        self.filters: Filters | None = None
        """None where all rows are plain."""
        self.seen: Tensor | None = None
        self._has_penalty = False

    @staticmethod
    def columns(rows: np.ndarray) -> dict[str, np.ndarray]:
        """What `of` needs on the device of rows [B] of type `ROW`: [B], or [B, 1] where logits meet it."""
        is_plain = not _kinds(rows) & (_FILTERED | _PENALIZED)
        names = ("scale",) if is_plain else ("scale", *Filters._fields)
        columns = {name: np.ascontiguousarray(rows[name])[:, None] for name in names}
        return columns | {"is_greedy": np.ascontiguousarray(rows["is_greedy"])}

    @classmethod
    def of(cls, rows: np.ndarray, keys: Tensor, columns: Mapping[str, Tensor]) -> "SamplingBatch":
        """Of rows [B] of type `ROW`, with their `columns` on the device."""
        kinds = _kinds(rows)
        found = cls(keys, columns["scale"] if kinds & _SCALED else None, columns["is_greedy"])
        found.has_greedy = kinds & _GREEDY > 0
        found.has_random = kinds & _RANDOM > 0
        found.has_filter = kinds & _FILTERED > 0
        found._has_penalty = kinds & _PENALIZED > 0
        if "penalty" in columns:
            found.filters = Filters(*(columns[name] for name in Filters._fields))
        return found

    def record_tokens(self, seen: Tensor | None, entering: Sequence[Sequence[int]], vocab_size: int) -> None:
        """Mark seen tokens, if a row has a repetition penalty: `seen` [rows that stay, vocab], and those of rows behind them that enter.

        Without `seen` no row that stays has a penalty.
        """
        if not self._has_penalty:
            return
        marks = np.zeros((len(entering), vocab_size), dtype=bool)
        for row, own in zip(marks, entering, strict=True):
            row[own] = True
        device = self.keys.device
        if seen is None:
            seen = torch.zeros(len(self.keys) - len(entering), vocab_size, dtype=torch.bool, device=device)
        self.seen = torch.cat((seen, to_device(marks, device)))


def _kinds(rows: np.ndarray) -> int:
    """The kinds of all rows of type `ROW` together."""
    return int(np.bitwise_or.reduce(rows["kind"], initial=0))


class Sample(NamedTuple):
    """Tokens int64 [B], and fp32 [B] their log-probabilities under the policy at the temperature of sampling."""

    tokens: Tensor
    logprobs: Tensor

    def to_host(self) -> "tuple[Sample, torch.cuda.Event | None]":
        """A copy on the host, and the event that marks its arrival: later steps do not delay it."""
        if not self.tokens.is_cuda:
            return self, None
        copy = Sample(*(x.to("cpu", non_blocking=True) for x in self))
        ready = torch.cuda.Event()
        ready.record()
        return copy, ready


def sample(logits: Tensor, rows: SamplingBatch, positions: Tensor, scratch: Tensor | None = None) -> Sample:
    """One token per row, with its log-probability under the policy at the temperature of sampling.

    The log-probability is the one that the trainer computes for the token: before the repetition penalty and before filters.
    Greedy rows report it at temperature 1. A row whose logits are not finite gets the log-probability NaN. logits: fp32 [B, vocab], may be overwritten; positions: int64 [B], index in the response
    of the token to draw; scratch: a tensor of the logits' shape, which saves an allocation where `has_kernels` is false.
    """
    if rows.filters is None and has_kernels(logits.device):
        from .triton_draw import draw  # Triton is installed only where there is a GPU

        scale = logits.new_ones(len(logits), 1) if rows.scale is None else rows.scale
        return Sample(*draw(logits, scale, rows.is_greedy, rows.keys, positions))
    scratch = torch.empty_like(logits) if scratch is None else scratch
    scaled = logits if rows.scale is None else logits.mul_(rows.scale)
    logprobs = torch.ops.aten._log_softmax.out(scaled, -1, False, out=scratch)
    drawn_by = logprobs if rows.filters is None else _filtered(_penalized(scaled, rows), rows).log_softmax(-1)
    if rows.has_random:
        cdf = torch.exp(drawn_by, out=scaled).cumsum_(-1)
        total = cdf[:, -1:]
        aim = torch.minimum(uniforms(rows.keys, positions)[:, None] * total, torch.nextafter(total, -total))
        # In a row that is not finite nothing is above the aim.
        tokens = torch.searchsorted(cdf, aim, right=True)[:, 0].clamp_(max=cdf.shape[1] - 1)
        if rows.has_greedy:
            tokens = torch.where(rows.is_greedy, drawn_by.argmax(-1), tokens)
    else:
        tokens = drawn_by.argmax(-1)
    at = tokens[:, None]
    if rows.seen is not None:
        rows.seen.scatter_(1, at, True)
    return Sample(tokens, logprobs.gather(1, at)[:, 0])


def has_kernels(device: torch.device) -> bool:
    """Whether plain sampling is kernels on this device. They take no `scratch`."""
    return device.type == "cuda" and _HAS_TRITON


def _penalized(scaled: Tensor, rows: SamplingBatch) -> Tensor:
    """Logits [B, vocab] with those of seen tokens lowered by the row's repetition penalty."""
    if rows.seen is None or rows.filters is None:
        return scaled
    penalty = rows.filters.penalty
    return torch.where(rows.seen, torch.where(scaled > 0, scaled / penalty, scaled * penalty), scaled)


def _filtered(scaled: Tensor, rows: SamplingBatch) -> Tensor:
    """Logits [B, vocab] with -inf where top-k, then top-p, then min-p drop a token."""
    if not rows.has_filter or rows.filters is None:
        return scaled
    top_k, top_p, min_p, _ = rows.filters
    values, order = scaled.sort(dim=-1, descending=True)
    rank = torch.arange(values.shape[-1], device=values.device)
    values = values.masked_fill(rank >= torch.where(top_k > 0, top_k, values.shape[-1]), float("-inf"))
    probs = values.softmax(-1)
    before = probs.cumsum(-1) - probs
    # Where top-p is off a rounded sum may reach 1 before the last token.
    drop = ((before >= top_p) & (top_p < 1)) | (probs < min_p * probs[:, :1])
    drop[:, 0] = False
    values = values.masked_fill(drop, float("-inf"))
    return torch.empty_like(scaled).scatter_(1, order, values)
