"""The recipe: every setting of a run, with its default, its bounds or choices, and its meaning.

`launch.config` reads and checks recipe files, and `--help` prints this list. Settings that are built in code are not checked.
A section is a struct in one of these files; `Recipe` below is their sum.
"""

# ruff: noqa: F401 - sections and types are for importers of the package
from typing import Any

from msgspec import Struct

from .comm import CommSettings
from .evaluation import EvalSettings
from .fields import ScheduleName
from .generation import GeneratorSettings, RolloutSettings, SamplingSettings
from .queue import BatchSettings, QueueSettings, RepackSettings, TaskSettings
from .run import DataSettings, EnvironmentSettings, ModelSettings, RewardSettings, RoleSettings, RunSettings
from .training import (
    AlgorithmSettings,
    CheckpointSettings,
    CriticSettings,
    LoraSettings,
    OptimizerSettings,
    TrainerSettings,
)


class Recipe(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting of a run, by section."""

    run: RunSettings = RunSettings()
    roles: RoleSettings = RoleSettings()
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    reward: RewardSettings = RewardSettings()
    environment: EnvironmentSettings = EnvironmentSettings()
    batch: BatchSettings = BatchSettings()
    queue: QueueSettings = QueueSettings()
    repack: RepackSettings = RepackSettings()
    sampling: SamplingSettings = SamplingSettings()
    generator: GeneratorSettings = GeneratorSettings()
    rollout: RolloutSettings = RolloutSettings()
    eval: EvalSettings = EvalSettings()
    trainer: TrainerSettings = TrainerSettings()
    lora: LoraSettings = LoraSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    critic: CriticSettings = CriticSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    comm: CommSettings = CommSettings()
    lab: dict[str, Any] = {}
    """Settings of emulated devices as they are written; `launch/lab` alone reads them."""

    @property
    def num_replicas(self) -> int:
        """Replicas of the generator."""
        return self.roles.rollout // self.rollout.tp

    @property
    def weight_slices(self) -> int:
        """Ranks of a replica that take slices of the weights; those of vLLM take all, and it slices them itself."""
        return 1 if self.rollout.engine == "vllm" else self.rollout.tp

    @property
    def checkpoint_steps(self) -> int | None:
        """Steps between two checkpoints, 0 and None as in `checkpoint.every`.

        Where `checkpoint.best` is a metric of evaluations, None becomes their period: a score comes when the weights are gone.
        """
        every = self.checkpoint.every
        return self.eval.every if every is None and self.checkpoint.is_best_evaluated else every

    @property
    def is_emulated(self) -> bool:
        """Whether the run's devices are emulated."""
        return "emulated" in (self.rollout.engine, self.trainer.engine)
