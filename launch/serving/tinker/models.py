"""The models that clients train, in the main thread: created, trained, saved, and their weights given to samplers."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from ....comm.errors import SettingError
from ....comm.recipe import LoraSettings, Recipe
from ....rollout.serving.samplers import Samplers, Target, WeightVersion
from ....trainer.policy.lora import ALL_LINEAR, target_layers
from ....trainer.tinker.trained_model import AdamParams, TrainedModel
from .bodies import LossRequest, loss_answer
from .checkpoints import ModelCheckpoints
from .client_model import ALPHA, ClientModel
from .store import SAMPLERS, STATES, SavedPath, SavedWeights, TrainingRun

KEPT_ADAPTERS = 8
KEPT_WHOLE = 3
"""Snapshots for samplers, without a name, that are kept in memory: the newest ones."""
_ATTENTION = "attn"
_FILE = "weights.safetensors"


class Models:
    """The models in training, and the weights that they gave to samplers."""

    def __init__(
        self,
        recipe: Recipe,
        samplers: Samplers,
        store: SavedWeights,
        checkpoints: ModelCheckpoints,
        most: int,
        is_alive: Callable[[str], bool],
    ) -> None:
        """most: models in training at a time. is_alive: whether the client of a model may still use it."""
        self._recipe = recipe
        self._settings = _settings_of(recipe)
        self._samplers = samplers
        self._store = store
        self._checkpoints = checkpoints
        self._most = most
        self._is_alive = is_alive
        self._models: dict[str, ClientModel] = {}
        self._asleep: set[str] = set()
        """Models of an earlier server whose clients have given no sign of life yet: their places are kept for a while."""
        self._lost: dict[str, str] = {}
        """Why models of an earlier server could not be continued."""
        self._snapshots: OrderedDict[Target, tuple[str, str]] = OrderedDict()
        """The weights of samplers without a path, with their models and sampling sessions."""
        self._num_versions = 0

    # --------------------------------------------------------------------------------------------------- to and from life

    def has_room(self, model_id: str) -> bool:
        """Whether this one can be created, or continued, once those whose clients have gone are dropped."""
        for gone in [each for each in self._models if not self._is_alive(each)]:
            self.drop(gone)
            self._checkpoints.remove(gone)
        self._asleep = {each for each in self._asleep if self._is_alive(each)}
        return len(self._models) + len(self._asleep - {model_id}) < self._most

    def create(self, run: TrainingRun) -> dict[str, Any]:
        """Begin to train the initial weights. A run that an earlier server has begun is begun again as it was."""
        run = self._store.find_run(run.run_id) or replace(run, settings=self._settings)
        self._check_settings(run)
        self._store.begin(run)
        self._models[run.run_id] = ClientModel(run, TrainedModel(self._recipe_of(run)))
        self._asleep.discard(run.run_id)
        return {"type": "create_model", "model_id": run.run_id}

    def create_from(self, run_id: str, path: SavedPath, *, with_optimizer: bool, metadata: Any) -> dict[str, Any]:
        """Begin to train saved weights, as a run of its own."""
        self._store.folder(path)
        before = self._store.run(path.run_id)
        run = replace(before, run_id=run_id, since=time.time(), user_metadata=metadata, settings=self._settings)
        self.create(run)
        try:
            return self.load(run_id, path, with_optimizer=with_optimizer)
        except BaseException:
            del self._models[run_id]
            raise

    def sleep(self, model_id: str) -> None:
        """Keep a place for a model of an earlier server, while its client is alive."""
        self._asleep.add(model_id)

    def restore(self, model_id: str) -> int:
        """Continue a model of an earlier server from its newest checkpoint; returns the number of the first request after it.

        0 without a checkpoint: there is no such model yet. Raises `SettingError` where the server has other settings now.
        """
        newest = self._checkpoints.newest(model_id)
        if newest is None:
            return 0
        number, folder = newest
        run = self._store.run(model_id)
        self._check_settings(run)
        model = ClientModel(run, TrainedModel(self._recipe_of(run)))
        self._num_versions = max(self._num_versions, model.restore(folder))
        self._models[model_id] = model
        for sampler, target in model.samplers.items():
            if target is not model.inflight:
                self._keep(model, sampler, target)
        self._asleep.discard(model_id)
        return number

    def awake(self, model_id: str) -> None:
        """A model needs no place any more that is kept for it: it is here, or it does not exist."""
        self._asleep.discard(model_id)

    def lose(self, model_id: str, problem: str) -> None:
        """A model of an earlier server cannot be continued: its requests fail with this reason."""
        self.drop(model_id)
        self._lost[model_id] = problem

    def drop(self, model_id: str) -> None:
        """Forget a model, if it is here."""
        self._checkpoints.drop(model_id)
        self._models.pop(model_id, None)
        self._asleep.discard(model_id)

    def samplers_of(self, model_id: str) -> dict[str, Target]:
        """What the sampling sessions of a model sample from, but for those of saved weights."""
        return self._model(model_id).samplers

    def run(self, model_id: str) -> TrainingRun:
        """What a model is that was created; in any thread. Raises `SettingError` for one that is gone."""
        if model_id in self._asleep:
            return self._store.run(model_id)
        return self._model(model_id).run

    def offer_checkpoint(self, model_id: str, number: int) -> None:
        """Write the state of a model before a request, if it is here, no gradient waits and it is time for a checkpoint."""
        model = self._models.get(model_id)
        if model is not None and not model.problem and not model.trained.num_data:
            num_updates = model.trained.num_updates
            stage = partial(model.stage, self._num_versions)
            self._checkpoints.offer(model_id, number, num_updates, stage)

    def write_checkpoint(self, model_id: str, number: int) -> None:
        """Write the state of a model before a request, where no gradient waits. Raises `OSError`."""
        model = self._model(model_id)
        stage = partial(model.stage, self._num_versions)
        self._checkpoints.write(model_id, number, model.trained.num_updates, stage)

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

    def save_state(
        self, path: SavedPath, number: int, *, overwrite: bool, ttl_s: int | None, metadata: Any
    ) -> dict[str, Any]:
        """The answer to `save_weights`; number: of the request, which may have saved this before the server was started again."""
        model = self._model(path.run_id)
        self._store.check_name(path, overwrite=overwrite, request=number)
        self._store.write(path, model.trained.write, model.trained.num_updates, ttl_s, metadata, number)
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

    def snapshot(self, model_id: str, sampler: str, *, is_inflight: bool) -> Target:
        """What a sampling session has of the present weights; of the kind `inflight`, the model's other ones of this kind too."""
        model = self._model(model_id)
        version = self._version(model.trained.sampler_weights(), model.run.rank)
        if is_inflight:
            if model.inflight is None:
                model.inflight = Target(version)
            model.inflight.replace(version)
            model.samplers[sampler] = model.inflight
            return model.inflight
        target = Target(version)
        self._keep(model, sampler, target)
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
            problem = f"{model_id} is no longer on this server; continue from a state that it saved"
            raise SettingError(f"model_id: {self._lost.get(model_id, problem)}")
        return model

    def _keep(self, model: ClientModel, sampler: str, target: Target) -> None:
        """Keep weights in memory for a sampling session; those of the oldest ones go."""
        model.samplers[sampler] = target
        self._snapshots[target] = (model.run.run_id, sampler)
        while len(self._snapshots) > (KEPT_ADAPTERS if model.run.rank else KEPT_WHOLE):
            oldest, (model_id, old_sampler) = self._snapshots.popitem(last=False)
            oldest.replace(_forgotten)
            if model_id in self._models:
                self._models[model_id].samplers.pop(old_sampler, None)

    def _check_settings(self, run: TrainingRun) -> None:
        """Raise `SettingError` unless a run was begun with the weights and the settings of this server."""
        if run.settings != self._settings:
            problem = f"{run.run_id} was begun with other weights or settings than this server has now"
            raise SettingError(f"{problem}; start it with those, or continue from a saved state")

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


def _settings_of(recipe: Recipe) -> str:
    """A digest of what the training of a model depends on: the initial weights, by their files' sizes and times, and settings."""
    given = (recipe.model, recipe.generator.exact, recipe.optimizer.micro_batch, recipe.trainer)
    state = xxhash.xxh3_64(msgspec.json.encode([*map(repr, given)]))
    for file in sorted(Path(recipe.model.path).glob("*.safetensors")):
        status = file.stat()
        state.update(f"{file.name} {status.st_size} {status.st_mtime_ns}".encode())
    return state.hexdigest()
