"""The project's sampling inside vLLM: one logits processor that leaves vLLM a single token to choose.

vLLM can report log-probabilities before the temperature or after the filters; the rule is between them. So each request is greedy
for vLLM, and this processor draws the token, by the same function and the same random numbers as the built-in engine. It sets
every other logit to -inf, and the token's to its log-probability, which vLLM then reports (`logprobs_mode=processed_logits`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor.interface import (  # pyright: ignore[reportMissingImports] - an extra
    LogitsProcessor,
    MoveDirectionality,
)

from ...engine.sampling import ROW, SamplingBatch, SamplingParams, sample
from ...engine.to_device import to_device, to_device_together

NOT_FINITE = 1.0
"""Stands for the log-probability NaN, which the largest logit cannot be; a log-probability is never above 0."""
DRAW = "headrace_draw"
"""The key of a request's `Draw` in `extra_args`."""


class Draw(NamedTuple):
    """How the tokens of one request are drawn."""

    params: SamplingParams
    key: int
    """The random stream of its trajectory."""
    num_drawn: int
    """Tokens of the response that are in the request's prompt."""


class _Row(NamedTuple):
    draw: Draw
    prompt_ids: Sequence[int]
    output_ids: list[int]
    """vLLM's own list, which grows with each step."""

    @property
    def position(self) -> int:
        """Index in the response of the token to draw."""
        return self.draw.num_drawn + len(self.output_ids)


class RuleSampler(LogitsProcessor):
    """Draws one token per row of vLLM's batch."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._rows: dict[int, _Row] = {}
        self._batch: SamplingBatch | None = None
        """Of the present rows; None after a change of them."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow the changes of vLLM's batch: rows that left, came and moved, in this order."""
        if batch_update is None:
            return
        self._batch = None
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, prompt_ids, output_ids in batch_update.added:
            self._rows[index] = _Row(params.extra_args[DRAW], prompt_ids, output_ids)
        for source, target, direction in batch_update.moved:
            moved = self._rows.pop(source)
            if direction == MoveDirectionality.SWAP:
                self._rows[source] = self._rows[target]
            self._rows[target] = moved

    def apply(self, logits: Tensor) -> Tensor:
        """Logits [B, vocab] in fp32 become those of which one token can be drawn.

        A row whose prompt is not whole yet is drawn too; vLLM drops its token, and no state is left behind.
        """
        rows = [self._rows[index] for index in range(len(logits))]
        if self._batch is None or self._has_penalty(rows):
            self._batch = self._sampling(rows, logits.shape[1])
        positions = to_device(np.array([row.position for row in rows], dtype=np.int64), self._device)
        drawn = sample(logits, self._batch, positions)
        logprobs = torch.where(drawn.logprobs.isnan(), NOT_FINITE, drawn.logprobs)
        return logits.fill_(float("-inf")).scatter_(1, drawn.tokens[:, None], logprobs[:, None])

    def _sampling(self, rows: Sequence[_Row], vocab_size: int) -> SamplingBatch:
        params = np.array([row.draw.params.row for row in rows], dtype=ROW)
        keys = np.array([row.draw.key for row in rows], dtype=np.int64)
        columns = to_device_together({"keys": keys, **SamplingBatch.columns(params)}, self._device)
        batch = SamplingBatch.of(params, columns["keys"], columns)
        batch.record_tokens(None, [[*row.prompt_ids, *row.output_ids] for row in rows], vocab_size)
        return batch

    @staticmethod
    def _has_penalty(rows: Sequence[_Row]) -> bool:
        """Whether tokens that were drawn lower the scores of later ones: then they are recorded before each step."""
        return any(row.draw.params.repetition_penalty != 1 for row in rows)
