"""The complete list of settings: adding, renaming or removing a setting also changes this file."""

import msgspec
import pytest

from headrace.comm.recipe import Recipe
from headrace.launch.config.load import known_settings, read_recipe, sections

SETTINGS = """
run.dir run.seed run.steps run.schedule run.mode run.save_rows run.resume
roles.actor roles.relay roles.rollout roles.reference roles.task
model.path model.dtype
data.path data.weights data.subset data.split data.prompt_column data.system_prompt data.chat_template
data.chat_template_kwargs data.shuffle data.curriculum data.too_long
reward.path reward.weights reward.batch reward.timeout_s reward.workers
environment.path environment.tools environment.max_turns environment.timeout_s environment.workers
batch.prompts_per_step batch.samples_per_prompt batch.updates_per_version batch.passes
queue.lead queue.capacity queue.max_staleness queue.filter_zero_std queue.on_stale queue.on_failed queue.max_lost_batches queue.sampler queue.tasks
repack.enabled repack.period_s repack.batch_bound repack.slowdown repack.transfer
sampling.max_new_tokens sampling.temperature sampling.top_p sampling.top_k sampling.min_p sampling.repetition_penalty
sampling.stop
generator.max_running generator.kv_gb generator.gpu_share generator.prefill_tokens generator.prefix_cache
generator.exact generator.attention
rollout.engine rollout.batch_groups rollout.max_age rollout.stream_tokens rollout.tp rollout.threads
eval.path eval.split eval.every eval.samples eval.temperature eval.threshold eval.max_prompts
trainer.engine trainer.activation_checkpointing trainer.offload trainer.shard_ranks trainer.threads
lora.rank lora.alpha lora.targets lora.path
algorithm.advantage algorithm.gamma algorithm.lam algorithm.scale_rewards algorithm.loss algorithm.loss_agg algorithm.clip_low algorithm.clip_high
algorithm.clip_dual algorithm.proximal algorithm.importance_sampling algorithm.importance_sampling_cap
algorithm.mismatch_cap algorithm.entropy_coef algorithm.kl_coef algorithm.kl_estimator algorithm.kl_in
algorithm.mask_truncated algorithm.overlong_buffer algorithm.overlong_penalty algorithm.router_aux_coef
optimizer.name optimizer.lr optimizer.lr_schedule optimizer.min_lr_ratio optimizer.warmup_steps
optimizer.beta1 optimizer.beta2 optimizer.eps optimizer.weight_decay optimizer.max_grad_norm optimizer.micro_tokens
critic.lr critic.clip_value critic.warmup_steps
checkpoint.every checkpoint.every_minutes checkpoint.keep checkpoint.best checkpoint.grace_s
relay.staging_device
comm.interface comm.heartbeat_s comm.expiry_s comm.deadline_s comm.tls comm.link comm.delta
"""


def test_the_recipe_has_these_settings_and_no_others():
    assert list(known_settings()) == SETTINGS.split()


def test_the_defaults_are_within_their_own_bounds():
    assert msgspec.convert(msgspec.to_builtins(Recipe()), Recipe) == Recipe() == read_recipe(None)


@pytest.mark.parametrize("section", dict(sections()))
def test_a_section_cannot_be_changed_after_it_is_read(section: str):
    settings = getattr(read_recipe(None), section)
    for field in msgspec.structs.fields(settings):
        with pytest.raises(AttributeError):
            setattr(settings, field.name, field.default)
