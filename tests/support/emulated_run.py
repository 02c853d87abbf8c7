"""The settings of short runs on emulated devices: virtual ones, and those of real processes, which really wait."""

EMULATED = {
    "rollout.engine": "emulated",
    "trainer.engine": "emulated",
    "roles.rollout": 2,
    "run.save_rows": "none",
    "batch.prompts_per_step": 4,
    "batch.samples_per_prompt": 4,
    "sampling.max_new_tokens": 2000,
    "lab.profile": "papers",
    "lab.median_tokens": 200,
}

FAST = EMULATED | {
    "lab.weights_ms": 0.1, "lab.request_us": 0.4, "lab.kv_ns": 0.3, "lab.prefill_us": 0.4,
    "lab.train_us": 8.2, "lab.weights_gb": 0.65, "repack.period_s": 0.1,
}  # fmt: skip
"""About a hundredth of the time of `EMULATED`, for real processes."""
