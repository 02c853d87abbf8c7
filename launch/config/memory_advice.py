"""The settings that reduce the memory of a role: one list for the plan before a start and for a process that memory has ended."""

from collections.abc import Mapping, Sequence

_EVERYWHERE: Mapping[str, Sequence[str]] = {
    "actor": (
        "a smaller optimizer.micro_tokens",
        "lora.rank=16 (an adapter in the place of all weights)",
        "trainer.activation_checkpointing=true",
        "optimizer.name=adamw8bit",
    ),
    "rollout": ("a smaller generator.kv_gb", "a smaller generator.max_running"),
    "relay": ("a smaller queue.lead", "a smaller batch.prompts_per_step"),
    "reference": ("a smaller optimizer.micro_tokens", "roles.reference=0, which shards it over the trainer's ranks"),
}
_ON_GPU: Mapping[str, Sequence[str]] = {
    "actor": ("more roles.actor", "trainer.offload=true"),
    "rollout": ("a larger rollout.tp", "another generator.gpu_share"),
}
ADVISED = tuple(_EVERYWHERE)
"""The roles for which there is advice. The others are small: their neighbours are too large."""


def advice(role: str, *, on_gpu: bool = False) -> str:
    """The settings for a role whose memory is too small, to follow the word "set"; empty for a small role."""
    of = "rollout" if role == "shard" else role
    words = [*_EVERYWHERE.get(of, ()), *(_ON_GPU.get(of, ()) if on_gpu else ())]
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
