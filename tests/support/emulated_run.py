"""The settings of a short run on emulated devices."""

EMULATED = {
    "rollout.engine": "emulated",
    "trainer.engine": "emulated",
    "roles.rollout": 2,
    "run.save_rows": "none",
    "batch.prompts_per_step": 4,
    "batch.samples_per_prompt": 4,
    "sampling.max_new_tokens": 2000,
    "emulated.median_tokens": 200,
    "emulated.speed": 100,
}
