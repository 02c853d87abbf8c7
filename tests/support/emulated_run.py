"""The settings of short runs on emulated devices: virtual ones, and those of real processes, which really wait."""

EMULATED = {
    "rollout.engine": "emulated",
    "trainer.engine": "emulated",
    "roles.rollout": 2,
    "run.save_rows": "none",
    "batch.prompts_per_step": 4,
    "batch.samples_per_prompt": 4,
    "sampling.max_new_tokens": 2000,
    "emulated.median_tokens": 200,
}

FAST = EMULATED | {
    "emulated.weights_ms": 0.1, "emulated.request_us": 0.4, "emulated.kv_ns": 0.3, "emulated.prefill_us": 0.4,
    "emulated.train_us": 8.2, "emulated.weights_gb": 0.65, "repack.period_s": 0.1,
}  # fmt: skip
"""About a hundredth of the time of `EMULATED`, for real processes."""
