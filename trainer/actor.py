"""The actor: policy, optimizer, and the one step that turns groups of trajectories into an update."""

import time
from collections.abc import Iterable
from typing import Protocol

import torch

from ..comm.settings import ModelSettings, RunSettings
from ..relay.stream import FetchedGroup
from .batch import Trajectory, micro_batches, pack
from .checkpoint import TrainingState
from .loss import group_advantages, grpo_loss
from .model import Policy, load_policy
from .settings import AlgorithmSettings, CheckpointSettings, OptimizerSettings
from .tally import StepTally


class Sampling(Protocol):
    """What training needs to know of how trajectories are drawn: how the ratios are tempered, which ones were cut."""

    temperature: float
    max_new_tokens: int


class ActorRecipe(Protocol):
    """The sections of a recipe that an actor reads."""

    run: RunSettings
    model: ModelSettings
    algorithm: AlgorithmSettings
    optimizer: OptimizerSettings
    checkpoint: CheckpointSettings

    @property
    def sampling(self) -> Sampling:
        """`sampling.*`"""
        ...


class Actor:
    """fp32 master weights, AdamW, and gradients accumulated as groups stream in."""

    def __init__(self, recipe: ActorRecipe, device: torch.device) -> None:
        self.recipe = recipe
        self.device = device
        self.policy: Policy = load_policy(recipe.model.path, "float32", device)
        o = recipe.optimizer
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay
        )
        self.state = TrainingState(self.policy.model, self.optimizer)
        self.update_s = 0.0

    @property
    def version(self) -> int:
        """The version of the weights in training: the number of updates behind them."""
        return self.state.step

    def lr(self) -> float:
        """Learning rate of the step to come: linear warm-up, then constant."""
        o = self.recipe.optimizer
        return o.lr * min(1.0, (self.state.step + 1) / (o.warmup_steps + 1))

    def accumulate(self, groups: Iterable[FetchedGroup], tally: StepTally) -> None:
        """Add the gradient of these groups, as a sum over tokens."""
        started = time.monotonic()
        trajectories: list[Trajectory] = []
        for group in groups:
            members = self._advantaged(group)
            tally.add_group(members)
            trajectories += members
        for part in micro_batches(trajectories, self.recipe.optimizer.micro_tokens):
            self._backward(part, tally)
        self.update_s += time.monotonic() - started

    def step(self, tally: StepTally) -> dict[str, float]:
        """Scale the accumulated gradient to the mean over tokens, clip, update; returns the optimizer's metrics."""
        started = time.monotonic()
        lr = self.lr()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for parameter in self.policy.parameters():
            if parameter.grad is not None:
                parameter.grad /= max(tally.num_tokens, 1.0)
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.recipe.optimizer.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.state.step += 1
        update_s, self.update_s = self.update_s + time.monotonic() - started, 0.0
        return {"actor/grad_norm": float(norm), "actor/lr": lr, "timing_s/update_actor": update_s}

    def _advantaged(self, group: FetchedGroup) -> list[Trajectory]:
        advantages = group_advantages(
            torch.tensor(group.rewards), scale_by_std=self.recipe.algorithm.scale_by_std
        ).tolist()
        return [
            Trajectory(
                prompt_ids=row["prompt_ids"],
                response_ids=row["response_ids"],
                rollout_logprobs=row["rollout_logprobs"],
                loss_mask=row["loss_mask"],
                version=version,
                reward=reward,
                advantage=advantage,
            )
            for row, version, reward, advantage in zip(
                group.rows, group.versions, group.rewards, advantages, strict=True
            )
        ]

    def _backward(self, part: list[Trajectory], tally: StepTally) -> None:
        batch = pack(part, self.version, self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.model.dtype == "bfloat16"):
            hidden = self.policy.forward_packed(batch.token_ids, batch.cu_seqlens)
        logprobs, entropy = self.policy.token_logprobs(
            hidden[batch.predictors], batch.targets, self.recipe.sampling.temperature or 1.0
        )
        terms = grpo_loss(
            logprobs, batch.rollout_logprobs, batch.advantages, entropy, batch.mask, self.recipe.algorithm
        )
        terms.loss.backward()
        tally.add_batch(batch, logprobs.detach(), terms)
