"""Checkpoints of the trainer: `checkpoints/step_N/{dcp,hf}` and the `latest` pointer, written last and atomically.

A folder that `latest` does not name may be incomplete; a run never resumes from it.
"""

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful

if TYPE_CHECKING:
    from .actor_group import ActorGroup


class TrainingState(Stateful):
    """The state that DCP saves: model, optimizer, the critic's, random number generators and the number of steps."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        critic: tuple[nn.Module, torch.optim.Optimizer] | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.critic = critic
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        rng = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            rng["cuda"] = torch.cuda.get_rng_state()
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "rng": rng, "step": torch.tensor(self.step)}
        if self.critic is not None:
            state["critic"], state["critic_optimizer"] = get_state_dict(*self.critic)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        model, optimizer = state_dict["model"], state_dict["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        if self.critic is not None:
            weights, moments = state_dict["critic"], state_dict["critic_optimizer"]
            set_state_dict(*self.critic, model_state_dict=weights, optim_state_dict=moments)
        torch.set_rng_state(state_dict["rng"]["cpu"])
        if "cuda" in state_dict["rng"]:
            torch.cuda.set_rng_state(state_dict["rng"]["cuda"])
        self.step = int(state_dict["step"])


class Checkpoints:
    """The folder `checkpoints/` of a run, with the newest `keep`. `save` and `load` are collectives of `group`."""

    def __init__(self, run_dir: Path, keep: int, group: "ActorGroup") -> None:
        self.folder = run_dir / "checkpoints"
        self.keep = keep
        self.group = group

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step}"

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint."""
        pointer = self.folder / "latest"
        return int(pointer.read_text().removeprefix("step_")) if pointer.exists() else None

    def save(self, state: TrainingState) -> Path:
        """Write the training state beside the `hf` folder that the caller has written, and move the pointer."""
        path = self.path(state.step)
        with _quiet():
            save({"trainer": state}, checkpoint_id=path / "dcp", no_dist=self.group.size == 1)
        if self.group.is_lead:
            pointer = self.folder / "latest.new"
            pointer.write_text(path.name)
            os.replace(pointer, self.folder / "latest")
            steps = sorted(int(path.name.removeprefix("step_")) for path in self.folder.glob("step_*"))
            for step in steps[: -self.keep]:
                shutil.rmtree(self.path(step))
        return path

    def load(self, state: TrainingState, step: int) -> None:
        """Load the checkpoint of a step into `state`."""
        with _quiet():
            load({"trainer": state}, checkpoint_id=self.path(step) / "dcp", no_dist=self.group.size == 1)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without DCP's warning that it runs in a single process, which is right for one actor rank."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
