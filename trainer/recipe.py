"""The sections of a recipe that the trainer reads."""

from typing import Protocol

from ..comm.settings import CommSettings, EmulatedSettings, ModelSettings, RunSettings
from .settings import AlgorithmSettings, CheckpointSettings, OptimizerSettings, TrainerSettings


class Sampling(Protocol):
    """What training needs to know of how trajectories are drawn: how the ratios are tempered, which ones were cut."""

    temperature: float
    max_new_tokens: int


class Generator(Protocol):
    """What training needs to know of the generator: whether both have to agree bit for bit."""

    exact: bool


class Rollout(Protocol):
    """What publishing needs to know of the rollouts: the ranks of each, which take the weights in slices."""

    tp: int


class Roles(Protocol):
    """How many ranks the trainer has, and the reference policy of its own."""

    actor: int
    reference: int


class ActorRecipe(Protocol):
    """The sections that an actor reads."""

    run: RunSettings
    model: ModelSettings
    algorithm: AlgorithmSettings
    optimizer: OptimizerSettings
    checkpoint: CheckpointSettings

    @property
    def generator(self) -> Generator:
        """How the rollouts compute."""
        ...

    @property
    def sampling(self) -> Sampling:
        """How trajectories are drawn."""
        ...


class TrainerRecipe(ActorRecipe, Protocol):
    """The sections that the trainer's loop and its adapters read."""

    trainer: TrainerSettings
    emulated: EmulatedSettings
    comm: CommSettings

    @property
    def roles(self) -> Roles:
        """Ranks by role."""
        ...

    @property
    def rollout(self) -> Rollout:
        """What a rollout is."""
        ...
