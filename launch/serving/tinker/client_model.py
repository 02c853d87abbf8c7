"""A model in training with what is sampled from it: its whole state, on the disk and back."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from safetensors.torch import load_file, save_file

from ....rollout.serving.samplers import Target, WeightVersion
from ....trainer.checkpoint import save_state, staged
from ....trainer.tinker.trained_model import TrainedModel
from .store import TrainingRun

ALPHA = 32.0
"""`lora.alpha` of every adapter; the API has no field for it."""
_FILE = "samplers.json"
_SAMPLERS = "samplers"


@dataclass(slots=True)
class ClientModel:
    """A model in training."""

    run: TrainingRun
    trained: TrainedModel
    problem: str = ""
    """Why a `forward_backward` since the last update has failed, which makes that update fail too."""
    inflight: Target | None = None
    """What its samplers of the kind `inflight` share."""
    samplers: dict[str, Target] = field(default_factory=dict)
    """What its sampling sessions without a path sample from, by their ids."""

    @property
    def scaling(self) -> float:
        """What the product of an adapter's matrices is multiplied by; 0 without an adapter."""
        return ALPHA / self.run.rank if self.run.rank else 0.0

    def stage(self, num_versions: int) -> Callable[[Path], None]:
        """A copy of the state after an update, as a function that writes it into a folder. num_versions: of all weights so far."""
        state = staged(self.trained.state.state_dict())
        versions = {sampler: target.version() for sampler, target in self.samplers.items()}
        numbers = {sampler: version.number for sampler, version in versions.items()}
        inflight = [sampler for sampler, target in self.samplers.items() if target is self.inflight]
        kept = _KeptSamplers(num_versions, numbers, inflight)

        def write(folder: Path) -> None:
            save_state(state, folder, None)
            (folder / _SAMPLERS).mkdir(exist_ok=True)
            for version in {version.number: version for version in versions.values()}.values():
                save_file(dict(version.weights), _weights_file(folder, version.number))
            (folder / _FILE).write_bytes(msgspec.json.encode(kept))

        return write

    def restore(self, folder: Path) -> int:
        """Take what `stage` wrote, for a model that has just been made; returns the number of versions. Raises `SettingError`."""
        self.trained.load(folder, with_optimizer=True)
        kept = msgspec.json.decode((folder / _FILE).read_bytes(), type=_KeptSamplers)
        versions = {
            number: WeightVersion(number, load_file(_weights_file(folder, number)), self.scaling)
            for number in {*kept.samplers.values()}
        }
        for sampler, number in kept.samplers.items():
            if sampler not in kept.inflight:
                self.samplers[sampler] = Target(versions[number])
                continue
            if self.inflight is None:
                self.inflight = Target(versions[number])
            self.samplers[sampler] = self.inflight
        return kept.num_versions


class _KeptSamplers(msgspec.Struct, frozen=True):
    """The numbers of the weights of a model's samplers, by their ids, and which of these are of the kind `inflight`."""

    num_versions: int
    samplers: dict[str, int]
    inflight: list[str]


def _weights_file(folder: Path, number: int) -> Path:
    return folder / _SAMPLERS / f"{number}.safetensors"
