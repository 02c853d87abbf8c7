"""Sums over the micro-batches of a step, and the metrics computed from them."""

import math
import sys
from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from torch import Tensor

from ..comm.messages.queue import RowRef
from ..comm.recipe.run import REWARD_STATISTICS
from .algorithms.kl_table import KLTable, kl_metrics
from .algorithms.losses import MAX_LOG_RATIO
from .algorithms.objective import LossTerms
from .algorithms.ratio_table import EDGES, RatioTable
from .batch import PackedBatch
from .policy.device import DeviceSums
from .record.shown_rows import ShownRows
from .record.trackers.tracker import Histogram
from .turn_metrics import TurnMetrics

if TYPE_CHECKING:
    from ..relay.queue.batch import Batch
    from .actor_group import ActorGroup

_SUMS = (
    "tokens", "weight", "pg_loss", "clipped", "ppo_kl", "entropy", "ratio", "ratio_squared", "fresh", "prob_diff", "logprob_diff",
    "mismatch_kl", "limited", "limited_fresh", "stale_kl", "kl", "responses", "response_tokens", "truncated", "non_finite",
    "router_loss", "staleness", "row_tokens", "tree_tokens", "prompts_with_turns", "prompts_looked_at",
)  # fmt: skip
_MAXIMA = ("ratio", "prob_diff", "response_tokens")
_INTERVALS = 30


class StepMetrics:
    """Statistics of the data of one optimizer step.

    `is/*` counts all tokens. `mismatch/*` counts only tokens that the version in training drew, so it shows the mismatch of
    generator and trainer apart from staleness; `staleness/kl` and `staleness/limited_frac` count only the others. `kl/*` counts all
    tokens, by staleness and by place in the response.
    """

    def __init__(self, num_shown: int = 0) -> None:
        """num_shown: the number of groups of the step whose rows are kept as samples (`run.samples`)."""
        self.shown = ShownRows(num_shown)
        self.rows: list[RowRef] = []
        """The rows of all ranks."""
        self.num_micro_batches = 0
        """Micro-batches of each rank; all ranks run the same number."""
        self.group_stds: list[float] = []
        self._sums: dict[str, float] = dict.fromkeys(_SUMS, 0.0)
        self._maxima: dict[str, float] = dict.fromkeys(_MAXIMA, 0.0)
        self._on_device = DeviceSums()
        """Of the micro-batches since the last reading."""
        self._kl_table = KLTable()
        self._kl_totals: list[float] | None = None
        """Those of all ranks, after `reduce`."""
        self._ratio_table = RatioTable()
        self._ratio_totals: list[float] | None = None
        """The same."""
        self._notes: dict[str, tuple[float, int]] = {}
        """Sum and count of each number that reward functions noted on responses."""
        self._turns = TurnMetrics()

    @property
    def mean_reward(self) -> float:
        return sum(row.reward for row in self.rows) / len(self.rows)

    def add(self, batch: "Batch") -> None:
        """Add the groups of a batch, which are the same on all ranks, and the responses of this rank."""
        self.shown.add(batch)
        self.num_micro_batches += len(batch.micro_batches)
        for group in batch.row_batch.groups:
            self.group_stds.append(float(np.std(group.rewards)))
            self.rows += group.rows()
        for mask, truncated in zip(batch["loss_mask"], batch["truncated"], strict=True):
            drawn = int((mask != 0).sum())  # without what an environment inserted
            self._add(responses=1, response_tokens=drawn, truncated=float(truncated[0]))
            self._update_max(response_tokens=drawn)
        for row in batch.rows:
            columns = batch.columns[row.key]
            if (info := columns.get("reward_info")) is not None:
                notes = msgspec.json.decode(info.tobytes())
                for name, value in notes.get("metrics", {}).items():
                    total, count = self._notes.get(name, (0.0, 0))
                    self._notes[name] = (total + value, count + 1)
                if (turns := notes.get("turns")) is not None:
                    self._turns.add(turns, int((columns["loss_mask"] == 0).sum()))

    def add_turns(self, batch: "Batch", turn_tokens: frozenset[int]) -> None:
        """Count the prompts of this rank's rows that have any of the tokens by which the model's own chat template marks turns."""
        if turn_tokens:
            has_turns = [not turn_tokens.isdisjoint(prompt.tolist()) for prompt in batch["prompt_ids"]]
            self._add(prompts_with_turns=sum(has_turns), prompts_looked_at=len(has_turns))

    def add_non_finite(self, num_tokens: int) -> None:
        """Count tokens that have no loss, since a column has no finite number for them."""
        self._add(non_finite=num_tokens)

    def add_batch(self, batch: PackedBatch, logprobs: Tensor, terms: LossTerms) -> None:
        """logprobs [R] of the policy in training, without gradient. Nothing waits for the device."""
        if not len(logprobs):
            return
        figures = self._on_device
        figures.add(**{name: term for name, term in terms._asdict().items() if name != "loss"})
        self._kl_table.add(batch, logprobs)
        mask = batch.mask > 0
        fresh, stale = mask & batch.is_fresh, mask & ~batch.is_fresh
        difference = (logprobs - batch.rollout_logprobs).clamp(max=MAX_LOG_RATIO)
        self._ratio_table.add(difference, mask)
        ratio = difference.exp()
        kl = ratio - 1 - difference
        prob_diff = (logprobs.exp() - batch.rollout_logprobs.exp()).abs()
        ones = torch.ones_like(ratio)
        figures.add_by_token(
            tokens=(ones, mask), ratio=(ratio, mask), ratio_squared=(ratio.square(), mask), staleness=(batch.staleness, mask),
            fresh=(ones, fresh), prob_diff=(prob_diff, fresh), logprob_diff=(difference.abs(), fresh),
            mismatch_kl=(kl, fresh), stale_kl=(kl, stale),
        )  # fmt: skip
        figures.raise_by_token(ratio=(ratio, mask), prob_diff=(prob_diff, fresh))

    def add_packed(self, batch: PackedBatch, *, is_real: bool) -> None:
        """Count the tokens of a micro-batch, and those that are computed for them; none where it only keeps other ranks company."""
        if is_real:
            num_tokens = len(batch.token_ids)
            self._add(
                row_tokens=num_tokens, tree_tokens=num_tokens if batch.tree is None else len(batch.tree.token_ids)
            )

    def add_router_loss(self, router_loss: Tensor) -> None:
        """Add the load-balancing loss of a micro-batch, times its weight."""
        self._on_device.add(router_loss=router_loss)

    def reduce(self, group: "ActorGroup") -> None:
        """Sum over the ranks; a collective."""
        self._read()
        self.shown.gather(group)
        self._sums = dict(zip(_SUMS, group.all_reduce_sum(list(self._sums.values())), strict=True))
        self._maxima = dict(zip(_MAXIMA, group.all_reduce_max(list(self._maxima.values())), strict=True))
        self._kl_totals = group.all_reduce_sum(self._kl_table.totals())
        self._ratio_totals = group.all_reduce_sum(self._ratio_table.totals())
        self._turns.reduce(group)
        names = group.union(self._notes)
        totals = group.all_reduce_sum([float(part) for name in names for part in self._notes.get(name, (0.0, 0))])
        self._notes = {name: (totals[2 * i], int(totals[2 * i + 1])) for i, name in enumerate(names)}

    def metrics(self, version: int) -> dict[str, float | dict[str, int]]:
        """Metrics of the data and of the loss, for a step that trained `version`."""
        self._read()
        rewards = [row.reward for row in self.rows]
        staleness = [version - row.version for row in self.rows]
        s = self._sums
        n = max(self._sums["tokens"], 1.0)
        out: dict[str, float | dict[str, int]] = {
            "response_length/mean": s["response_tokens"] / s["responses"],
            "response_length/max": self._maxima["response_tokens"],
            "response_length/clip_ratio": s["truncated"] / max(s["responses"], 1),
            "perf/micro_batches": float(self.num_micro_batches),
            "group/zero_std_frac": sum(std < 1e-8 for std in self.group_stds) / len(self.group_stds),
            "actor/entropy": s["entropy"] / n,
            "actor/pg_loss": s["pg_loss"] / max(s["weight"], 1.0),
            "actor/pg_clipfrac": s["clipped"] / n,
            "actor/ppo_kl": s["ppo_kl"] / n,
            "actor/kl_loss": s["kl"] / n,
            "actor/non_finite_tokens": s["non_finite"],
            "is/mean": s["ratio"] / n,
            "is/max": self._maxima["ratio"],
            "is/clip_frac": s["clipped"] / n,
            "is/ess": s["ratio"] ** 2 / max(n * s["ratio_squared"], 1e-9),
            "staleness/mean": sum(staleness) / len(staleness),
            "staleness/max": float(max(staleness)),
            "staleness/token_mean": s["staleness"] / n,
            "staleness/hist": {str(k): v for k, v in sorted(Counter(staleness).items())},
        }
        notes = {f"reward/{name}": total / count for name, (total, count) in self._notes.items()}
        out = notes | {f"reward/{name}": statistic(rewards) for name, statistic in REWARD_STATISTICS.items()} | out
        if s["router_loss"]:
            out["actor/router_aux_loss"] = s["router_loss"] / max(s["weight"], 1.0)
        if s["tree_tokens"]:
            out["actor/tree_ratio"] = s["row_tokens"] / s["tree_tokens"]
        if s["prompts_looked_at"]:
            out["prompt/turn_frac"] = s["prompts_with_turns"] / s["prompts_looked_at"]
        if s["fresh"]:
            out["mismatch/probs_diff_mean"] = s["prob_diff"] / s["fresh"]
            out["mismatch/probs_diff_max"] = self._maxima["prob_diff"]
            out["mismatch/logprob_abs_diff"] = s["logprob_diff"] / s["fresh"]
            out["mismatch/kl"] = s["mismatch_kl"] / s["fresh"]
            out["mismatch/limited_frac"] = s["limited_fresh"] / s["fresh"]
        if stale := s["tokens"] - s["fresh"]:
            out["staleness/kl"] = s["stale_kl"] / stale
            out["staleness/limited_frac"] = s["limited"] / stale
        out |= self._turns.metrics()
        return out | kl_metrics(self._kl_totals or self._kl_table.totals())

    def histograms(self, version: int) -> dict[str, Histogram]:
        """Distributions over the trajectories of all ranks, and over all tokens, for a step that trained `version`."""
        lengths = [row.num_tokens - row.num_prompt_tokens for row in self.rows if row.num_prompt_tokens]
        ages = Counter(version - row.version for row in self.rows)
        oldest = max(ages)
        out = {
            "reward": _histogram([row.reward for row in self.rows]),
            "staleness": Histogram([age - 0.5 for age in range(oldest + 2)], [ages[age] for age in range(oldest + 1)]),
            "is/log_ratio": Histogram(EDGES, self._ratio_totals or self._ratio_table.totals()),
        }
        return out | ({"response_length": _histogram(lengths)} if lengths else {})

    def _read(self) -> None:
        sums, maxima = self._on_device.read()
        self._add(**sums)
        self._update_max(**maxima)

    def _add(self, **values: float) -> None:
        for name, value in values.items():
            self._sums[name] += value

    def _update_max(self, **values: float) -> None:
        for name, value in values.items():
            self._maxima[name] = max(self._maxima[name], value)


def _histogram(values: list[float] | list[int]) -> Histogram:
    """In 30 equal intervals; those that are not finite are left out.

    All are in one interval where 30 edges would be too near each other, as for sums of the same parts in another order, or too far apart.
    """
    numbers = np.array(values, np.float64)
    numbers = numbers[np.isfinite(numbers)]
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            counts, edges = np.histogram(numbers, bins=_INTERVALS)
    except ValueError:  # the edges would not be finite or would not rise
        low, high = math.nextafter(numbers.min(), -math.inf), math.nextafter(numbers.max(), math.inf)
        return Histogram([max(low, -sys.float_info.max), min(high, sys.float_info.max)], [len(numbers)])
    return Histogram(edges.tolist(), counts.tolist())
