"""The arithmetic of a step: prefill and decode of the policy over the cache, with the attention back-end chosen at start."""

import logging
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ...comm.errors import SettingError
from ...trainer.policy.decoder import Head, LeanDecoder
from ...trainer.policy.exact.operators import ExactOperators, Run
from ...trainer.policy.model import Policy
from .attention.backends import DecodeAttention, choose
from .attention.cuda import TableAttention
from .attention.prefill import ExactPrefillAttention, PrefillAttention
from .cuda_graphs import DecodeGraphs
from .sampling import Sample, SamplingBatch, has_kernels, sample
from .to_device import to_device

if TYPE_CHECKING:
    from ...trainer.policy.attention import Attention
    from .batch import DecodeBatch
    from .kv_cache import KVCache
    from .scheduler import Chunk


log = logging.getLogger(__name__)

UNPROVEN = "exact mode is unproven on a GPU until `bash tests/gpu.sh` has passed there"


class Runner:
    """Runs the policy for an engine: chunks of prompts into the cache, one token for every row of a batch.

    `description` names the choices. The space for logits is kept, so that a step allocates little. A runner takes memory of a
    GPU, and the cache gets the rest: make the runner, then the cache, then call `use`.
    """

    cache: "KVCache"
    attention: DecodeAttention

    def __init__(self, policy: Policy, max_running: int, exact: bool) -> None:
        self.policy = policy
        self.exact: ExactOperators | None = None
        self._max_running = max_running
        tp = policy.tensor_parallel.size
        if exact and tp > 1:
            raise SettingError(f"rollout.tp: exact mode runs on one rank only, not on {tp}")
        if exact:
            self.forward = policy.exact or policy.make_exact()
            self.exact = self.forward.operators
        else:
            self.forward = LeanDecoder(policy) if LeanDecoder.supports(policy) else policy
        self.head = Head(policy, self.exact)
        rows = 1 if self.exact is None else self.exact.rows
        self._logits = torch.empty(-(-max_running // rows) * rows, policy.vocab_size, device=policy.device)
        self._scratch = None if has_kernels(policy.device) else torch.empty_like(self._logits)
        self._graphs: DecodeGraphs | None = None

    def use(self, cache: "KVCache", attention: str) -> None:
        """Take the cache, and choose the back-end of decoding by its name in `generator.attention`."""
        policy = self.policy
        tp = self.policy.tensor_parallel.size
        self.cache = cache
        self.attention = choose(attention, policy, cache, self.exact)
        # Sums over ranks are not captured.
        if tp == 1 and isinstance(self.attention, TableAttention) and not isinstance(self.forward, Policy):
            max_pages = -(-policy.context // cache.page_size)
            self._graphs = DecodeGraphs(
                self._forward_newest,
                self.head,
                self.attention,
                self._logits,
                max_pages,
                self._max_running,
                self._sample,
            )
        forward = "module" if self.forward is policy else "lean" if self.exact is None else "exact"
        dtype = str(policy.dtype).removeprefix("torch.")
        ranks = f", tp {tp}" if tp > 1 else ""
        graphs = "" if self._graphs is None else ", CUDA graphs"
        self.description = (
            f"{forward} forward in {dtype} on {policy.device}{ranks}, attention '{self.attention.name}'{graphs}"
        )
        if self.exact is not None and self.exact.has_tables:
            self.description += f", {UNPROVEN}"
            log.warning("generator.exact: %s", UNPROVEN)

    def bind(self) -> None:
        """Use the policy's parameters, which are now other tensors."""
        if isinstance(self.forward, LeanDecoder):
            self.forward.bind()
        self.head.bind()
        if self._graphs is not None:
            self._graphs.forget()

    def refresh(self) -> None:
        """Update what depends on the policy's parameters, which were overwritten or replaced."""
        if not self.head.is_bound:
            self.bind()
            return
        if isinstance(self.forward, LeanDecoder):
            self.forward.refresh()
        self.head.refresh()

    def prefill(self, chunks: "list[Chunk]") -> None:
        """Compute the keys and values of chunks of prompts."""
        chunks = sorted(chunks, key=lambda chunk: chunk.start > 0)
        tokens = [t for c in chunks for t in c.group.tokens[c.start : c.stop]]
        rope = self.policy.rope
        positions = [p for c in chunks for p in rope.of_chunk(c.start, c.stop, c.group.prefix_length + 1)]
        device = self.policy.device
        runs = [Run(c.start, c.stop, c.group.pages) for c in chunks]
        prefill = PrefillAttention if self.exact is None else partial(ExactPrefillAttention, self.exact)
        attention: Attention = prefill(self.cache, runs, device)
        token_ids, places = (to_device(np.array(values, dtype=np.int64), device) for values in (tokens, positions))
        self.forward(token_ids, places, attention)

    def decode(self, batch: "DecodeBatch") -> Sample:
        """Draw the next token of every row."""
        if self._graphs is not None:
            return self._graphs.decode(batch)
        self.attention.prepare(batch)
        positions = to_device(batch.positions, self.policy.device)
        hidden = self._forward_newest(batch.tokens, positions, self.attention)
        logits = self.head(hidden, out=self._logits)
        scratch = None if self._scratch is None else self._scratch[: len(batch)]
        drawn = self._sample(logits, batch.sampling, batch.num_drawn, scratch)
        self.policy.tensor_parallel.broadcast_tokens(drawn.tokens)
        return drawn

    def _sample(self, logits: Tensor, rows: SamplingBatch, positions: Tensor, scratch: Tensor | None = None) -> Sample:
        """See `sample`; where exact mode has kernels, log-probabilities are by those of the trainer."""
        if self.exact is None or not self.exact.has_tables:
            return sample(logits, rows, positions, scratch)
        tokens = sample(logits.clone(), rows, positions).tokens
        scaled = logits if rows.scale is None else logits.mul_(rows.scale)
        return Sample(tokens, self.exact.log_softmax(scaled).gather(1, tokens[:, None])[:, 0])

    def _forward_newest(self, token_ids: Tensor, positions: Tensor, attention: "Attention") -> Tensor:
        """Hidden states [B, hidden] of the last tokens of sequences."""
        return self.forward(token_ids, self.policy.rope.of_newest(positions), attention)
