"""Writes tests/trainer/algorithms/peer_numbers.json: losses, gradients and advantages by the code of TRL and verl.

Run it by hand in an environment of its own, when a peer's version changes (Headrace needs neither):

    pip install torch transformers trl==1.16.0 accelerate datasets
    pip install --no-deps verl==0.9.1 && pip install omegaconf tensordict codetiming hydra-core pyvers cloudpickle orjson
    python tests/support/peer_numbers.py

All numbers are float64. `settings` of a case are the Headrace settings that mean the same.
"""

# pyright: basic, reportMissingImports=false

import inspect
import json
import sys
import textwrap
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch

FILE = Path(__file__).parents[1] / "trainer" / "algorithms" / "peer_numbers.json"
LENGTHS, GROUP_SIZE, MAX_NEW_TOKENS = (5, 3, 1, 4, 2, 5), 3, 8
MASK = torch.tensor([[float(t < n) for t in range(max(LENGTHS))] for n in LENGTHS], dtype=torch.float64)
LOW, HIGH = 0.1, 0.15
CLIP = {"clip_low": LOW, "clip_high": HIGH}


def random_inputs() -> dict[str, torch.Tensor]:
    """Log-probs [n, T] around those of the old policy, rewards and advantages [n]."""
    rng = np.random.default_rng(7)
    shape = MASK.shape
    old = -rng.gamma(2.0, 0.6, shape)
    columns = {
        "logprobs": old + rng.normal(0, 0.3, shape),
        "old_logprobs": old,
        "ref_logprobs": old + rng.normal(0, 0.3, shape),
        "entropy": rng.gamma(2.0, 0.5, shape),
        "rewards": rng.normal(0, 1, shape[0]),
        "advantages": rng.normal(0, 1, shape[0]),
    }
    columns["rewards"][3:] = 0.25  # the second group has equal rewards
    return {name: torch.tensor(np.round(column, 6)) for name, column in columns.items()}


def packed(values: torch.Tensor) -> list[float]:
    """The tokens of all responses, one after the other."""
    return values[MASK.bool()].tolist()


def trl_loss(x: dict[str, torch.Tensor], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`GRPOTrainer._compute_loss` on a bare object; returns the loss and the log-probs with their gradient."""
    from trl import GRPOTrainer

    logprobs = x["logprobs"].clone().requires_grad_()
    sum_over_ranks = SimpleNamespace(
        num_processes=1, sync_gradients=True, gather=lambda v: v, reduce=lambda v, reduction: v
    )
    beta, entropy_coef = options.pop("beta", 0.0), options.pop("entropy_coef", 0.0)
    delta = options.pop("delta", None)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, x["entropy"], None),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _entropy_bonus_enabled=entropy_coef != 0,
        accelerator=sum_over_ranks,
        args=SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1),
        aux_loss_enabled=False,
        beta=beta,
        current_gradient_accumulation_steps=1,
        entropy_coef=entropy_coef,
        max_completion_length=MAX_NEW_TOKENS,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_adaptive_entropy=False,
        use_vllm=False,
        **{"epsilon_low": LOW, "epsilon_high": HIGH, "importance_sampling_level": "token", **options},
    )
    ids = torch.zeros(MASK.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": MASK,
        "advantages": x["advantages"], "old_per_token_logps": x["old_logprobs"],
        "ref_per_token_logps": x["ref_logprobs"], "num_items_in_batch": MASK.sum(),
    }  # fmt: skip
    return GRPOTrainer._compute_loss(trainer, trainer.model, inputs), logprobs


def trl_losses(x: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    constant = {"loss_agg": "seq-mean-token-sum-norm"}
    by_sequence = {"loss_agg": "seq-mean-token-mean"}
    gspo, cispo = {"loss": "gspo", **CLIP}, {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.2}
    return [
        case("trl", settings, *trl_loss(x, **options), options)
        for settings, options in [
            (CLIP, {"loss_type": "dapo"}),
            (CLIP, {"loss_type": "bnpo"}),
            (CLIP | by_sequence, {"loss_type": "grpo"}),
            (CLIP | constant, {"loss_type": "dr_grpo"}),
            (gspo | by_sequence, {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
            (
                gspo | {"loss_agg": "seq-mean-token-sum"},
                {"loss_type": "luspo", "importance_sampling_level": "sequence"},
            ),
            (cispo, {"loss_type": "cispo", "epsilon_high": 1.2}),
            (CLIP | {"clip_dual": 1.3}, {"loss_type": "dapo", "delta": 1.3}),
            (CLIP | {"kl_coef": 0.04}, {"loss_type": "dapo", "beta": 0.04}),
            (CLIP | by_sequence | {"kl_coef": 0.04}, {"loss_type": "grpo", "beta": 0.04}),
            (CLIP | {"entropy_coef": 0.01}, {"loss_type": "dapo", "entropy_coef": 0.01}),
        ]
    ]


def verl_losses(core: Any, x: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    from verl.workers.config import ActorConfig

    found = []
    for name, loss in (("vanilla", "clip"), ("gspo", "gspo"), ("cispo", "cispo")):
        for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"):
            config = ActorConfig(
                strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, clip_ratio_low=LOW, clip_ratio_high=HIGH,
                clip_ratio_c=1.3, loss_scale_factor=MAX_NEW_TOKENS,
            )  # fmt: skip
            config.global_batch_info["loss_scale_factor"] = MAX_NEW_TOKENS
            logprobs = x["logprobs"].clone().requires_grad_()
            advantages = x["advantages"].unsqueeze(-1).expand(MASK.shape)
            value, _ = core.get_policy_loss_fn(name)(x["old_logprobs"], logprobs, advantages, MASK, mode, config)
            settings = {"loss": loss, "loss_agg": mode, **CLIP} | ({"clip_dual": 1.3} if loss == "clip" else {})
            found.append(case("verl", settings, value, logprobs, {"loss_mode": name, "loss_agg_mode": mode}))
    return found


def case(peer: str, settings: dict, loss: torch.Tensor, logprobs: torch.Tensor, options: dict) -> dict[str, Any]:
    """A loss with its gradient by token."""
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return {"peer": peer, "options": options, "settings": settings, "loss": loss.item(), "gradient": packed(gradient)}


def trl_advantages(x: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """The lines of TRL's trainers between rewards and advantages."""
    from trl import GRPOTrainer, RLOOTrainer
    from trl.trainer import utils

    def run(trainer: type, first: str, last: str, rewards: torch.Tensor, **options: Any) -> list[float]:
        lines = inspect.getsource(trainer._generate_and_score_completions).splitlines()
        start = next(i for i, line in enumerate(lines) if first in line)
        end = next(i for i, line in enumerate(lines) if i > start and last in line)
        names: dict[str, Any] = {
            "torch": torch, "nanstd": utils.nanstd, "gather": lambda v: v, "num_generations": GROUP_SIZE, "mode": "train",
            "rewards": rewards, "rewards_per_func": rewards.unsqueeze(1), "device": "cpu", "completion_mask": MASK,
            "unscorable_mask": torch.zeros(len(rewards), dtype=torch.bool), "old_per_token_logps": x["old_logprobs"],
            "ref_per_token_logps": x["ref_logprobs"],
            "self": SimpleNamespace(
                reward_weights=torch.ones(1, dtype=torch.float64), multi_objective_aggregation="sum_then_normalize",
                normalize_advantages=False, **options,
            ),
        }  # fmt: skip
        exec(textwrap.dedent("\n".join(lines[start:end])), names)  # noqa: S102 - lines of the installed package
        return names["advantages"].tolist()

    grpo = 'if self.multi_objective_aggregation == "sum_then_normalize"', "is_std_zero ="
    found = []
    for scale in ("group", "batch", "none"):
        values = run(GRPOTrainer, *grpo, x["rewards"], scale_rewards=scale)
        found.append({"peer": "trl", "settings": {"advantage": "grpo", "scale_rewards": scale}, "advantages": values})
    values = run(RLOOTrainer, "grouped_rewards = rewards.view", "# Normalize advantages", x["rewards"], beta=0.0)
    found.append({"peer": "trl", "settings": {"advantage": "rloo"}, "advantages": values})
    settings = {"advantage": "rloo", "kl_in": "reward", "kl_estimator": "k1", "kl_coef": 0.05}
    values = run(RLOOTrainer, "# Include the KL penalty", "# Normalize advantages", x["rewards"], beta=0.05)
    return [*found, {"peer": "trl", "settings": settings, "advantages": values}]


def verl_advantages(core: Any, x: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    groups = np.arange(len(LENGTHS)) // GROUP_SIZE
    config = SimpleNamespace(gamma=1.0)
    found = []
    for settings, name, options in [
        ({"advantage": "grpo"}, "grpo", {"epsilon": 1e-4}),
        ({"advantage": "grpo", "scale_rewards": "none"}, "grpo", {"norm_adv_by_std_in_grpo": False}),
        ({"advantage": "rloo"}, "rloo", {}),
        ({"advantage": "reinforce_plus_plus"}, "reinforce_plus_plus", {}),
        ({"advantage": "reinforce_plus_plus_baseline"}, "reinforce_plus_plus_baseline", {}),
    ]:
        for kl_coef in (0.0, 0.05):
            rewards = torch.zeros_like(MASK)
            rewards[torch.arange(len(LENGTHS)), torch.tensor(LENGTHS) - 1] = x["rewards"]
            rewards -= kl_coef * core.kl_penalty(x["old_logprobs"], x["ref_logprobs"], "k1") * MASK
            extra = {"index": groups} if "plus_plus" not in name or "baseline" in name else {}
            values, _ = core.get_adv_estimator_fn(name)(rewards, MASK, config=config, **extra, **options)
            kl = {"kl_in": "reward", "kl_estimator": "k1", "kl_coef": kl_coef} if kl_coef else {}
            found.append({"peer": "verl", "settings": settings | kl, "token_advantages": packed(values)})
    return found


def main() -> None:
    for name in ("ray", "ray.util", "ray.experimental", "ray.experimental.state", "ray.experimental.state.api"):
        sys.modules[name] = MagicMock()  # verl's package imports it; the formulas do not use it
    import verl.trainer.ppo.core_algos as core

    x = random_inputs()
    columns = {name: packed(column) if column.dim() == 2 else column.tolist() for name, column in x.items()}
    kl = {name: packed(core.kl_penalty_forward(x["logprobs"], x["ref_logprobs"], name)) for name in ("k1", "k2", "k3")}
    numbers = {
        "lengths": LENGTHS, "group_size": GROUP_SIZE, "max_new_tokens": MAX_NEW_TOKENS, "inputs": columns, "kl": kl,
        "losses": trl_losses(x) + verl_losses(core, x), "advantages": trl_advantages(x) + verl_advantages(core, x),
    }  # fmt: skip
    FILE.write_text(_lines(numbers))


def _lines(numbers: dict[str, Any]) -> str:
    """JSON with one line for each case."""
    parts = []
    for name, value in numbers.items():
        cases = [json.dumps(case) for case in value] if name in ("losses", "advantages") else None
        parts.append(f'"{name}": ' + ("[\n" + ",\n".join(cases) + "\n]" if cases else json.dumps(value)))
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
