"""The operators of a micro-batch of the trainer, its copies to another type, and its reads that wait for the device.

Counted on a CPU for small policies in bfloat16 of 2 and of 4 layers, of which the difference is that of two layers; forward and backward
pass together. Each of these counts is a launch or a wait on a GPU, whatever the sizes. About a fifth of the operators are the CPU's
attention, which on a GPU is one.
"""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.comm.recipe import BatchSettings, ModelSettings, OptimizerSettings, Recipe, TrainerSettings
from headrace.trainer.actor_group import ActorGroup
from headrace.trainer.learners.actor import Actor
from headrace.trainer.step_metrics import StepMetrics

from .harness import Measurement, Options
from .shared_tokens import NUM_SAMPLES, batch_of

_READS = ("_local_scalar_dense", "nonzero", "masked_select", "repeat_interleave")
"""Operators that wait for the device; so does an index by a mask."""
_VIEWS = ("view", "_unsafe_view", "t", "transpose", "detach", "slice", "select", "expand", "as_strided", "alias", "unsqueeze",
          "squeeze", "permute", "split", "split_with_sizes", "unbind", "_reshape_alias", "empty", "empty_like")  # fmt: skip
"""They launch nothing and do not count."""
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
          "vocab_size")  # fmt: skip
_FIGURES = ("operators", "copies", "reads", "update")
"""Operators and copies to another type of a layer; reads of a micro-batch; operators of an update."""
_BEFORE = {
    "llama": (205, 40, 36, 511),
    "qwen2": (217, 46, 36, 667),
    "qwen3": (253, 46, 36, 615),
    "qwen3-sharded": (293, 46, 36, 615),
}
"""The same before metrics stayed on the device and weights were gathered in bfloat16."""


class Operators(TorchDispatchMode):
    """Counts operators by their name; views do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.num_copies = 0
        self.num_reads = 0

    @property
    def num_operators(self) -> int:
        return self.counts.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        if name not in _VIEWS:
            self.counts[name] += 1
        self.num_copies += name == "_to_copy" and result.dtype != args[0].dtype
        is_sized = (kwargs or {}).get("output_size") is not None
        self.num_reads += (name in _READS and not is_sized) or (
            name == "index" and any(_is_mask(index) for index in args[1])
        )
        return result


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype == torch.bool


def measure(_name: str, _options: Options) -> list[Measurement]:
    """Of each family, with rows alone, over what was counted before (docs/develop/benchmarks.md); above 1 there are fewer now."""
    rows: list[Measurement] = []
    with tempfile.TemporaryDirectory(prefix="headrace-bench") as made:
        for name, before in _BEFORE.items():
            family, _, kind = name.partition("-")
            few, many = (_counted(Path(made), family, num, is_sharded=bool(kind)) for num in (2, 4))
            layer = [(b - a) / 2 for a, b in zip(few[:2], many[:2], strict=True)]
            for what, count, old in zip(_FIGURES, (*layer, *many[2:]), before, strict=True):
                rows.append(Measurement(f"{name}-{what}", "before", count, "", old / max(count, 1)))
    return rows


def _counted(folder: Path, family: str, num_layers: int, *, is_sharded: bool) -> tuple[int, int, int, int]:
    """Operators, copies to another type and reads of a micro-batch, the second of a step, and operators of the update."""
    actor = _actor(folder, family, num_layers, TrainerSettings(offload=is_sharded))
    batch = batch_of(prompt=12, response=20, longest_in_tree=0, micro_tokens=2 * NUM_SAMPLES * 32)
    stats = StepMetrics()
    actor.accumulate(batch, stats)
    assert len(batch.micro_batches) == 1
    with Operators() as found:
        actor.accumulate(batch, stats)
    with Operators() as update:
        actor.step(stats)
    actor.group.close()
    return found.num_operators, found.num_copies, found.num_reads, update.num_operators


def _actor(folder: Path, family: str, num_layers: int, trainer: TrainerSettings) -> Actor:
    path = folder / f"{family}-{num_layers}"
    sizes = dict(zip(_SIZES, (64, num_layers, 4, 2, 16, 96, 4096), strict=True))
    config = AutoConfig.for_model(family, **sizes, tie_word_embeddings=True, eos_token_id=None, bos_token_id=None)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    recipe = Recipe(
        model=ModelSettings(path=str(path), dtype="bfloat16"),
        batch=BatchSettings(prompts_per_step=4, samples_per_prompt=NUM_SAMPLES),
        optimizer=OptimizerSettings(micro_tokens=4096),
        trainer=trainer,
    )
    return Actor(recipe, ActorGroup(0, 1, torch.device("cpu"), deadline_s=60.0, settings=trainer))
