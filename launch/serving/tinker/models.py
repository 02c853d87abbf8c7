"""The models that clients train, in the main thread: created, trained, saved, and their weights given to samplers."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from ....comm.errors import SettingError
from ....comm.recipe import LoraSettings, Recipe
from ....rollout.serving.samplers import Samplers, Target, WeightVersion
from ....trainer.policy.lora import ALL_LINEAR, target_layers
from ....trainer.tinker.trained_model import AdamParams, TrainedModel
from .bodies import LossRequest, loss_answer
from .store import SAMPLERS, STATES, SavedPath, SavedWeights, TrainingRun

ALPHA = 32.0
"""`lora.alpha` of every adapter; the API has no field for it."""
KEPT_ADAPTERS = 8
KEPT_WHOLE = 3
"""Snapshots for samplers, without a name, that are kept in memory: the newest ones."""
_ATTENTION = "attn"
_FILE = "weights.safetensors"


@dataclass(slots=True)
class ClientModel:
    """A model in training."""

    run: TrainingRun
    trained: TrainedModel
    problem: str = ""
    """Why a `forward_backward` since the last update has failed, which makes that update fail too."""
    inflight: Target | None = None
    """What its samplers of the kind `inflight` share."""


class Models:
    """The models in training, and the weights that they gave to samplers."""

    def __init__(
        self, recipe: Recipe, samplers: Samplers, store: SavedWeights, most: int, is_alive: Callable[[str], bool]
    ) -> None:
        """most: models in training at a time. is_alive: whether the client of a model may still use it."""
        self._recipe = recipe
        self._samplers = samplers
        self._store = store
        self._most = most
        self._is_alive = is_alive
        self._models: dict[str, ClientModel] = {}
        self._snapshots: OrderedDict[Target, None] = OrderedDict()
        self._num_versions = 0

    # --------------------------------------------------------------------------------------------------- to and from life

    def has_room(self) -> bool:
        """Whether one more can be created, once those whose clients have gone are dropped."""
        for model_id in [model_id for model_id in self._models if not self._is_alive(model_id)]:
            del self._models[model_id]
        return len(self._models) < self._most

    def create(self, run: TrainingRun) -> dict[str, Any]:
        """Begin to train the initial weights."""
        self._store.begin(run)
        self._models[run.run_id] = ClientModel(run, TrainedModel(self._recipe_of(run)))
        return {"type": "create_model", "model_id": run.run_id}

    def create_from(self, run_id: str, path: SavedPath, *, with_optimizer: bool, metadata: Any) -> dict[str, Any]:
        """Begin to train saved weights, as a run of its own."""
        self._store.folder(path)
        before = self._store.run(path.run_id)
        run = replace(before, run_id=run_id, since=time.time(), user_metadata=metadata)
        self.create(run)
        try:
            return self.load(run_id, path, with_optimizer=with_optimizer)
        except BaseException:
            del self._models[run_id]
            raise

    def run(self, model_id: str) -> TrainingRun:
        """What a model is that was created; in any thread. Raises `SettingError` for one that is gone."""
        return self._model(model_id).run

    # ---------------------------------------------------------------------------------------------------------- training

    def loss(self, model_id: str, request: LossRequest) -> bytes:
        """The answer to `forward_backward` or `forward`."""
        model = self._model(model_id)
        try:
            result = model.trained.accumulate(
                request.data, request.loss, request.settings, needs_gradient=request.needs_gradient
            )
        except Exception as error:
            if request.needs_gradient:
                model.problem = str(error)  # it may have added a part of its gradient
            raise
        return loss_answer(result)

    def fail_gradient(self, model_id: str, problem: str) -> None:
        """Note that a `forward_backward` did not reach the model: the next update fails."""
        if model_id in self._models:
            self._models[model_id].problem = problem

    def step(self, model_id: str, params: AdamParams) -> dict[str, Any]:
        """The answer to `optim_step`."""
        model = self._model(model_id)
        problem = model.problem
        model.problem = ""
        if problem:
            model.trained.discard()
            raise SettingError(
                f"optim_step: a forward_backward before it has failed, so no weight is changed: {problem}"
            )
        return {"metrics": model.trained.step(params)}

    # ----------------------------------------------------------------------------------------------------------- weights

    def save_state(self, path: SavedPath, *, overwrite: bool, ttl_s: int | None, metadata: Any) -> dict[str, Any]:
        """The answer to `save_weights`."""
        model = self._model(path.run_id)
        self._store.check_name(path, overwrite=overwrite)
        self._store.write(path, model.trained.write, model.trained.num_updates, ttl_s, metadata)
        return {"type": "save_weights", "path": str(path)}

    def load(self, model_id: str, path: SavedPath, *, with_optimizer: bool) -> dict[str, Any]:
        """The answer to `load_weights`."""
        model = self._model(model_id)
        if path.kind != STATES:
            raise SettingError(f"path: {path} has weights for samplers alone; training continues from a {STATES} path")
        folder = self._store.folder(path)
        rank = self._store.run(path.run_id).rank
        if rank != model.run.rank:
            raise SettingError(f"path: {path} is of LoRA rank {rank}, and this model of {model.run.rank}")
        try:
            model.trained.load(folder, with_optimizer=with_optimizer)
        except SettingError as error:
            raise SettingError(f"path: {str(error).removeprefix('run.resume: ')}") from error
        model.problem = ""
        return {"type": "load_weights", "path": str(path), "model_id": model_id}

    def save_sampler(self, path: SavedPath, *, ttl_s: int | None, metadata: Any) -> dict[str, Any]:
        """The answer to `save_weights_for_sampler` with a name."""
        model = self._model(path.run_id)
        self._store.check_name(path, overwrite=True)
        weights = model.trained.sampler_weights()
        self._store.write(
            path, lambda folder: save_file(weights, folder / _FILE), model.trained.num_updates, ttl_s, metadata
        )
        return {"type": "save_weights_for_sampler", "path": str(path)}

    def snapshot(self, model_id: str, *, is_inflight: bool) -> Target:
        """What a sampler of the present weights samples from; of the kind `inflight`, those of the model's other ones too."""
        model = self._model(model_id)
        version = self._version(model.trained.sampler_weights(), model.run.rank)
        if is_inflight:
            if model.inflight is None:
                model.inflight = Target(version)
            model.inflight.replace(version)
            return model.inflight
        target = Target(version)
        self._snapshots[target] = None
        while len(self._snapshots) > (KEPT_ADAPTERS if model.run.rank else KEPT_WHOLE):
            oldest, _ = self._snapshots.popitem(last=False)
            oldest.replace(_forgotten)
        return target

    def saved_target(self, path: SavedPath) -> Target:
        """What a sampler of saved weights samples from; they are read when it samples. Raises `SettingError` where there are none."""
        if path.kind != SAMPLERS:
            raise SettingError(
                f"model_path: {path} is a state of training; save_weights_for_sampler makes a path for samplers"
            )
        self._store.folder(path)
        rank = self._store.run(path.run_id).rank

        def read() -> WeightVersion:
            return self._version(load_file(self._store.folder(path) / _FILE), rank)

        return Target(read)

    # --------------------------------------------------------------------------------------------------------- internals

    def _model(self, model_id: str) -> ClientModel:
        model = self._models.get(model_id)
        if model is None:
            raise SettingError(f"model_id: {model_id} is no longer on this server; continue from a state that it saved")
        return model

    def _version(self, weights: dict[str, Any], rank: int) -> WeightVersion:
        self._num_versions += 1
        return WeightVersion(self._num_versions, weights, ALPHA / rank if rank else 0.0)

    def _recipe_of(self, run: TrainingRun) -> Recipe:
        """The recipe of a training run."""
        lora = LoraSettings(rank=run.rank, alpha=ALPHA, targets=self._targets(run)) if run.rank else LoraSettings()
        return replace(self._recipe, lora=lora, run=replace(self._recipe.run, seed=run.seed))

    def _targets(self, run: TrainingRun) -> str | tuple[str, ...]:
        """The layers that get an adapter."""
        if run.train_attn and run.train_mlp:
            return ALL_LINEAR
        layers: Sequence[str] = [*target_layers(self._samplers.engine.policy.model, ALL_LINEAR)]
        names = tuple(sorted({name.rpartition(".")[2] for name in layers if (_ATTENTION in name) == run.train_attn}))
        if not names:
            raise SettingError("lora_config: no linear layer of this model is left to train")
        return names


def _forgotten() -> WeightVersion:
    raise SettingError(
        "sampling_session_id: its weights are no longer in memory, since newer ones were saved; give those that should stay a name"
    )


def make_folder(path: Path) -> None:
    """Make the folder of saved weights. Raises `SettingError` where it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"--dir={path}: {error.strerror}") from error
