"""Replacements for settings that were removed, and for those of TRL, verl or prime-rl, for the message about an unknown setting."""

from collections.abc import Mapping

EARLIER: Mapping[str, str] = {
    "algorithm.mismatch_cap": "algorithm.importance_sampling_cap bounds the weights of all tokens",
    "algorithm.scale_by_std": "it is algorithm.scale_rewards=group (true) or none (false) now",
    "checkpoint.every_minutes": "without checkpoint.every there is a checkpoint every 30 minutes, with it every so many steps",
    "comm.delta": "versions are always sent whole",
    "emulated": "emulated devices have settings of the lab, lab.*; headrace plan --help lists them",
    "generator.prefix_cache": "the prefix cache is always on",
    "queue.capacity": "queue.lead=N keeps N groups under way",
    "queue.on_failed": "the other trajectories of a group are always trained",
    "queue.on_stale": "a step always waits for a group that is due under queue.max_staleness",
    "relay.staging_device": "with comm.link=nccl the relays choose a GPU without an actor or rollout themselves",
    "repack.batch_bound": "each rollout measures it at its start",
    "repack.slowdown": "a moved trajectory slows the decode steps of its destination to three times an empty cache's at most",
    "repack.transfer": "each rollout measures which is cheaper, to send a cache or to compute it again",
    "rollout.batch_groups": "a rollout takes its share of a step or of the window; queue.lead=N sets the window",
}
"""The replacement of each setting, or section, of an earlier version."""
_TRL = {
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "beta": "algorithm.kl_coef",
    "bf16": "model.dtype",
    "dataset_config": "data.subset",
    "dataset_name": "data.path",
    "delta": "algorithm.clip_dual",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "eval_steps": "eval.every",
    "gradient_accumulation_steps": "optimizer.micro_tokens",
    "gradient_checkpointing": "trainer.activation_checkpointing",
    "importance_sampling_level": "algorithm.loss",
    "learning_rate": "optimizer.lr",
    "lora_alpha": "lora.alpha",
    "lora_r": "lora.rank",
    "lora_target_modules": "lora.targets",
    "loss_type": "algorithm.loss_agg",
    "lr_scheduler_type": "optimizer.lr_schedule",
    "mask_truncated_completions": "algorithm.mask_truncated",
    "max_completion_length": "sampling.max_new_tokens",
    "max_steps": "run.steps",
    "model_name_or_path": "model.path",
    "num_generations": "batch.samples_per_prompt",
    "num_iterations": "batch.passes",
    "num_train_epochs": "run.steps",
    "output_dir": "run.dir",
    "per_device_train_batch_size": "batch.prompts_per_step",
    "resume_from_checkpoint": "run.resume",
    "reward_funcs": "reward.path",
    "reward_weights": "reward.weights",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "steps_per_generation": "batch.updates_per_version",
    "use_vllm": "rollout.engine",
    "vllm_gpu_memory_utilization": "generator.gpu_share",
    "vllm_importance_sampling_cap": "algorithm.importance_sampling_cap",
    "vllm_importance_sampling_mode": "algorithm.importance_sampling",
    "vllm_tensor_parallel_size": "rollout.tp",
}
_VERL = {
    "adv_estimator": "algorithm.advantage",
    "clip_ratio": "algorithm.clip_low",
    "clip_ratio_c": "algorithm.clip_dual",
    "clip_ratio_high": "algorithm.clip_high",
    "clip_ratio_low": "algorithm.clip_low",
    "custom_reward_function.path": "reward.path",
    "default_local_dir": "run.dir",
    "entropy_coeff": "algorithm.entropy_coef",
    "filter_groups.enable": "queue.filter_zero_std",
    "gpu_memory_utilization": "generator.gpu_share",
    "kl_loss_coef": "algorithm.kl_coef",
    "kl_loss_type": "algorithm.kl_estimator",
    "loss_agg_mode": "algorithm.loss_agg",
    "max_prompt_length": "data.too_long",
    "max_response_length": "sampling.max_new_tokens",
    "n_gpus_per_node": "roles.actor",
    "norm_adv_by_std_in_grpo": "algorithm.scale_rewards",
    "optim.lr": "optimizer.lr",
    "ppo_epochs": "batch.passes",
    "ppo_max_token_len_per_gpu": "optimizer.micro_tokens",
    "ppo_micro_batch_size_per_gpu": "optimizer.micro_tokens",
    "ppo_mini_batch_size": "batch.updates_per_version",
    "prompt_key": "data.prompt_column",
    "resume_mode": "run.resume",
    "rollout.n": "batch.samples_per_prompt",
    "rollout.name": "rollout.engine",
    "save_freq": "checkpoint.every",
    "tensor_model_parallel_size": "rollout.tp",
    "test_freq": "eval.every",
    "total_epochs": "run.steps",
    "total_training_steps": "run.steps",
    "train_batch_size": "batch.prompts_per_step",
    "train_files": "data.path",
    "use_kl_in_reward": "algorithm.kl_in",
    "use_kl_loss": "algorithm.kl_coef",
    "val_files": "eval.path",
}
_PRIME_RL = {
    "ckpt.interval": "checkpoint.every",
    "max_async_level": "queue.max_staleness",
    "model.name": "model.path",
    "orchestrator.batch_size": "batch.prompts_per_step",
    "rollouts_per_example": "batch.samples_per_prompt",
    "sampling.max_tokens": "sampling.max_new_tokens",
}
PEERS: Mapping[str, Mapping[str, str]] = {"TRL": _TRL, "verl": _VERL, "prime-rl": _PRIME_RL}
"""For each project, its names of settings (with as many leading sections as needed) and the names here."""


def name_hint(name: str) -> str:
    """The replacement for an unknown dotted name, as the end of a sentence; empty if neither an earlier version nor a peer knows it."""
    for known in (name, name.partition(".")[0]):
        if known in EARLIER:
            return f"; {EARLIER[known]}"
    parts = name.split(".")
    for tail in (".".join(parts[first:]) for first in range(len(parts))):
        for peer, names in PEERS.items():
            if tail in names:
                return f"; {peer}'s {tail} is {names[tail]}"
    return ""
