"""Checkpoints of the trainer: the state that they hold, and the thread that writes them while training goes on.

The state is copied into the host's memory between two steps (`staged`, or `state_copies.py`); a thread writes the copy. `relay/checkpoints.py`
says what makes a checkpoint whole.
"""

import shutil
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..comm import threads
from ..comm.disk import describe_unwritable, folder_bytes, is_unwritable, raise_if_unwritable, say
from ..comm.errors import SettingError
from ..comm.recipe import CheckpointSettings
from ..comm.trace import failpoint
from ..comm.waits import waiting
from ..relay.checkpoints import CheckpointFolder
from ..relay.weights.copies_on_disk import CopiesOnDisk
from .checkpoint_reader import load_checked

if TYPE_CHECKING:
    from .actor_group import ActorGroup, ThreadGroup

# DCP says that it runs in a single process, which is right for one rank of the trainer.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

CHECKPOINT_PERIOD_S = 1800.0
"""Seconds between two checkpoints where `checkpoint.every` is null."""
_TRAINED = StateDictOptions(strict=False)
"""Frozen weights are not in the state. DCP itself refuses a checkpoint that lacks a trained one."""
_CUDA_RNG = "trainer.rng.cuda"
"""DCP's name of the state that is there with a GPU alone."""


class TrainingState(Stateful):
    """The state that DCP saves: trained weights, optimizer, the critic's, random number generators and the number of steps."""

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
        model, optimizer = _trained_state(self.model, self.optimizer)
        rng = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            rng["cuda"] = torch.cuda.get_rng_state()
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "rng": rng, "step": torch.tensor(self.step)}
        if self.critic is not None:
            state["critic"], state["critic_optimizer"] = _trained_state(*self.critic)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        _load_trained(self.model, self.optimizer, state_dict["model"], state_dict["optimizer"])
        if self.critic is not None:
            _load_trained(*self.critic, state_dict["critic"], state_dict["critic_optimizer"])
        torch.set_rng_state(state_dict["rng"]["cpu"])
        if "cuda" in state_dict["rng"]:
            torch.cuda.set_rng_state(state_dict["rng"]["cuda"])
        self.step = int(state_dict["step"])


def _trained_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """State of a model without its frozen weights (below an adapter, tied ones under all names), and of its optimizer."""
    is_new = not optimizer.state
    weights, moments = get_state_dict(model, optimizer)
    if is_new:  # DCP has made the moments by an update without gradients, which is no step of the training
        for moments_of_one in optimizer.state.values():
            moments_of_one["step"].zero_()
    named = model.state_dict(keep_vars=True)
    frozen = {name for name, tensor in named.items() if isinstance(tensor, nn.Parameter) and not tensor.requires_grad}
    return {name: tensor for name, tensor in weights.items() if name not in frozen}, moments


def _load_trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, weights: dict[str, Any], moments: dict[str, Any]
) -> None:
    """Load what `_trained_state` gave; the optimizer keeps its settings, which may be others than those of the checkpoint."""
    settings = [{name: own for name, own in group.items() if name != "params"} for group in optimizer.param_groups]
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=_TRAINED)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


def mapped(state: Any, change: Callable[[str, Tensor], Tensor], name: str = "") -> Any:
    """A state with each tensor, or part of a shard or of an 8-bit state, replaced by what `change` makes of its name and of it."""
    if is_traceable_wrapper_subclass(state):  # `to` would not copy its parts on a CPU
        names, context = state.__tensor_flatten__()
        parts = {part: mapped(getattr(state, part), change, f"{name}.{part}") for part in names}
        return type(state).__tensor_unflatten__(parts, context, state.size(), state.stride())
    if isinstance(state, Tensor):
        return change(name, state.detach())
    if isinstance(state, dict):
        return {key: mapped(value, change, f"{name}.{key}") for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(mapped(value, change, f"{name}.{index}") for index, value in enumerate(state))
    return state


def staged(state: Any, copies: dict[int, Tensor] | None = None) -> Any:
    """A state with all its tensors, or shards of tensors, copied into the host's memory.

    copies: receives each copy by the address of the bytes that it has, for others who need a copy of the same.
    """

    def copy_of(_: str, tensor: Tensor) -> Tensor:
        copy = tensor.to("cpu", copy=True)
        if copies is not None:
            copies[tensor.data_ptr()] = copy
        return copy

    return mapped(state, copy_of)


def save_state(state: dict[str, Any], folder: Path, team: "ThreadGroup | None") -> None:
    """Write a staged state; a collective of `team`, None for a single rank. Raises the error of a rank that failed."""
    try:
        group = None if team is None else team.process_group
        save({"trainer": state}, checkpoint_id=folder / "dcp", no_dist=team is None, process_group=group)
    except CheckpointException as error:  # it is not an `Exception`
        raise _first_failure(error) from error


def load_state(state: TrainingState, folder: Path, *, is_alone: bool) -> str:
    """Load what `save_state` wrote; a collective unless `is_alone`. Raises `SettingError` if it does not fit.

    Returns a line about a checkpoint that was written without a GPU where there is one now, or the reverse; "" for others.
    """
    try:
        stored = load_checked({"trainer": state}, folder / "dcp", is_alone=is_alone, optional=[_CUDA_RNG])
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
        cause = _first_failure(error) if isinstance(error, CheckpointException) else error
        first_line = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise SettingError(f"run.resume: {folder} does not fit this run: {first_line}") from error
    was_on_gpu = _CUDA_RNG in stored
    if was_on_gpu == torch.cuda.is_available():
        return ""
    where = "with a GPU, and this trainer has none" if was_on_gpu else "without a GPU, and this trainer has one"
    return f"{folder.name} was written {where}: the GPU's random numbers do not continue, everything else does"


class CheckpointWriter:
    """Writes one checkpoint at a time, each in a thread of its own, until `close`.

    An error of a thread is raised by the next call. Rank 0 of the trainer (`is_lead`) seals what all ranks wrote.
    """

    def __init__(
        self,
        run_dir: Path,
        settings: CheckpointSettings,
        deadline_s: float,
        *,
        is_lead: bool,
        on_written: Callable[[int, str], None],
    ) -> None:
        """`on_written` is called in the thread of rank 0 with the step and the path of a whole checkpoint."""
        self.folder = CheckpointFolder(run_dir)
        self.newest = 0
        """The step of the newest checkpoint that was begun."""
        self._settings = settings
        self._scores: dict[int, float] = {}
        """Scores by evaluations that came after their checkpoints, until they are on the disk."""
        self._evaluated: int | None = -1 if settings.is_best_evaluated else None
        """The newest version that was evaluated; None if evaluations give no score."""
        self._has_scored = True
        """Whether all of these scores are on the disk."""
        self._deadline_s = deadline_s
        self._is_lead = is_lead
        self._on_written = on_written
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def begin(self, step: int, stage: Callable[[], Callable[[Path], None]], score: float | None = None) -> None:
        """Write the state after `step` steps by the result of `stage`, which copies it once the copy before is written."""
        self.close()
        self.newest = step
        self._thread = threads.new_thread(partial(self._run, step, stage(), score), "checkpoint")
        self._thread.start()

    def check(self) -> None:
        """Raise the error that ended a thread, if one did; write the scores that came since, unless a thread runs."""
        if self._error is not None:
            raise self._error
        if not self._has_scored and not (self._thread is not None and self._thread.is_alive()):
            try:
                self._prune(self.newest)
            except OSError as error:
                if not is_unwritable(error):
                    raise
                say(f"{describe_unwritable(self.folder.root)}; the scores of checkpoints are not written")

    def score(self, evaluation: Mapping[str, float]) -> None:
        """Note the metrics of an evaluation, which scores the checkpoint of its version if `checkpoint.best` is one of them."""
        version = int(evaluation["eval/version"])
        best = evaluation.get(self._settings.best)
        if not self._is_lead or self._evaluated is None:
            return
        if best is not None:
            self._scores[version] = best
        self._evaluated = max(self._evaluated, version)
        self._has_scored = False

    def close(self, group: "ActorGroup | None" = None) -> None:
        """Wait for the checkpoint that is being written, for as long as its files grow. With the trainer's ranks, a collective, until all
        of them have written theirs, and rank 0 has sealed it."""
        thread = self._thread
        self._thread = None
        while True:
            is_alive = thread is not None and thread.is_alive()
            if not (is_alive if group is None else group.all_reduce_max([float(is_alive)])[0]):
                break
            if thread is not None:  # for less than the deadline of a collective
                self._wait_for(thread, self._num_bytes())
        self.check()

    def _wait_for(self, thread: threading.Thread, num_bytes: int) -> None:
        """Wait for a deadline; raises `WaitTimeout` if the checkpoint has not grown beyond `num_bytes` by then."""
        with waiting("the disk", f"checkpoint step_{self.newest}", self._deadline_s) as wait:
            wait.until(lambda: not thread.is_alive() or (not wait.remaining_s and self._num_bytes() > num_bytes))

    def _num_bytes(self) -> int:
        """The size of the newest checkpoint so far."""
        return folder_bytes(self.folder.path(self.newest))

    def _run(self, step: int, write: Callable[[Path], None], score: float | None) -> None:
        try:
            if self._is_lead:
                self._remove_copies()
            path = self.folder.begin(step) if self._is_lead else self.folder.path(step)
            write(path)
            failpoint("seal", step=step)
            if self._is_lead:
                self.folder.seal(step, score)
                self._on_written(step, str(path))
                self._prune(step)
        except Exception as error:  # noqa: BLE001 - the trainer's loop raises it
            self._on_failure(self.folder.path(step), error)

    def _remove_copies(self) -> None:
        """Remove the copies on the disk that the newest checkpoint in the journal replaces."""
        with suppress(OSError, SettingError):  # they cost room alone
            CopiesOnDisk(self.folder.root.parent).remove(range((self.folder.latest() or 0) + 1))

    def _prune(self, newest: int) -> None:
        """Write the scores that have come, and remove the checkpoints that are not kept."""
        self._has_scored = True
        for step in sorted(step for step in list(self._scores) if step <= newest):
            self.folder.set_score(step, self._scores[step])
            del self._scores[step]
        keep = self._settings.keep
        best = bool(self._settings.best)
        self.folder.prune(newest, keep, keep_best=best, unscored_after=self._evaluated)

    def _on_failure(self, path: Path, error: Exception) -> None:
        """Remove the incomplete checkpoint. If the disk is full, it is given up: the previous one is kept, and training continues."""
        is_full = isinstance(error, OSError) and is_unwritable(error)
        try:
            raise_if_unwritable(path)
        except OSError as found:
            is_full |= is_unwritable(found)
        if is_full:
            say(f"{describe_unwritable(path)}; this checkpoint is given up, and training continues")
        else:
            self._error = error
        # A checkpoint that is whole failed later: at the removal of others.
        if self._is_lead and self.newest not in self.folder.whole():
            shutil.rmtree(path, ignore_errors=True)


def _first_failure(error: CheckpointException) -> Exception:
    """The error of the first rank that failed; DCP wraps the errors of all ranks."""
    causes = [cause for cause, _ in error.failures.values() if isinstance(cause, Exception)]
    return causes[0] if causes else RuntimeError(str(error))
