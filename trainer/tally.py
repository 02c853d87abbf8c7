"""Sums over the micro-batches of a step, and the metrics that they make."""

from collections import Counter, defaultdict

import torch
from torch import Tensor

from .batch import PackedBatch, Trajectory
from .loss import LossTerms


class StepTally:
    """Adds up what one optimizer step trains on. Importance weights count all tokens; `mismatch/*` only those drawn by the
    very version in training, so that engine mismatch and staleness stay apart."""

    def __init__(self) -> None:
        self.trajectories: list[Trajectory] = []
        self.group_stds: list[float] = []
        self.num_truncated = 0
        self.num_tokens = 0.0
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._max = {"ratio": 0.0, "prob": 0.0}

    def add_group(self, trajectories: list[Trajectory]) -> None:
        rewards = torch.tensor([t.reward for t in trajectories])
        self.group_stds.append(float(rewards.std(unbiased=False)))
        self.trajectories += trajectories

    def add_batch(self, batch: PackedBatch, logprobs: Tensor, terms: LossTerms) -> None:
        """logprobs [R] of the policy in training, without gradient."""
        mask = batch.mask.bool()
        self.num_tokens += float(batch.mask.sum())
        for name, value in terms._asdict().items():
            self._sums[name] += float(value.detach())
        ratio = (logprobs - batch.rollout_logprobs).exp()[mask]
        self._sums["ratio"] += float(ratio.sum())
        self._sums["ratio_squared"] += float(ratio.square().sum())
        self._max["ratio"] = max(self._max["ratio"], float(ratio.max()))
        fresh = mask & batch.is_fresh
        if fresh.any():
            ours, theirs = logprobs[fresh], batch.rollout_logprobs[fresh]
            prob_diff = (ours.exp() - theirs.exp()).abs()
            self._sums["fresh"] += float(fresh.sum())
            self._sums["prob_diff"] += float(prob_diff.sum())
            self._sums["logprob_diff"] += float((ours - theirs).abs().sum())
            self._sums["mismatch_kl"] += float(((ours - theirs).exp() - 1 - (ours - theirs)).sum())
            self._max["prob"] = max(self._max["prob"], float(prob_diff.max()))

    @property
    def mean_reward(self) -> float:
        return sum(t.reward for t in self.trajectories) / len(self.trajectories)

    def metrics(self, version: int, max_new_tokens: int) -> dict[str, float | dict[str, int]]:
        """The data's and the loss's metrics of a step that trained `version`."""
        rewards = torch.tensor([t.reward for t in self.trajectories])
        lengths = torch.tensor([float(len(t.response_ids)) for t in self.trajectories])
        staleness = [version - t.version for t in self.trajectories]
        n, s = self.num_tokens, self._sums
        out: dict[str, float | dict[str, int]] = {
            "reward/mean": self.mean_reward,
            "reward/std": float(rewards.std(unbiased=False)),
            "reward/min": float(rewards.min()),
            "reward/max": float(rewards.max()),
            "response_length/mean": float(lengths.mean()),
            "response_length/max": float(lengths.max()),
            "response_length/clip_ratio": float((lengths >= max_new_tokens).float().mean()),
            "group/zero_std_frac": sum(std < 1e-8 for std in self.group_stds) / len(self.group_stds),
            "actor/entropy": s["entropy"] / n,
            "actor/pg_loss": s["pg_loss"] / n,
            "actor/pg_clipfrac": s["clipped"] / n,
            "actor/ppo_kl": s["ppo_kl"] / n,
            "actor/kl_loss": 0.0,
            "is/mean": s["ratio"] / n,
            "is/max": self._max["ratio"],
            "is/clip_frac": s["clipped"] / n,
            "is/ess": s["ratio"] ** 2 / (n * s["ratio_squared"]),
            "staleness/mean": sum(staleness) / len(staleness),
            "staleness/max": float(max(staleness)),
            "staleness/hist": {str(k): v for k, v in sorted(Counter(staleness).items())},
        }
        if s["fresh"]:
            out["mismatch/probs_diff_mean"] = s["prob_diff"] / s["fresh"]
            out["mismatch/probs_diff_max"] = self._max["prob"]
            out["mismatch/logprob_abs_diff"] = s["logprob_diff"] / s["fresh"]
            out["mismatch/kl"] = s["mismatch_kl"] / s["fresh"]
        return out
