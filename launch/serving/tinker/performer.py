"""Carries out the requests to models, in the main thread: each is kept on the disk, and so is its result before the client gets it.

A server that was started again carries out the requests since the newest checkpoint once more. Those that have a result already are
repeated for their effect on the model alone: a gradient, an update, the weights of a sampler. What they saved is on the disk.
"""

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from ....comm.disk import say
from ....comm.errors import HeadraceError, SettingError
from ....comm.trace import failpoint
from ....rollout.serving.fields import Fields
from .bodies import read_loss_request
from .futures import Future, encoded, encoded_error
from .kept import SAVE_FOR_SAMPLER, KeptRequest, KeptResult, KeptScripts
from .requests import read_adam, read_metadata, read_new_model, read_ttl, refuse_token, required, typed
from .store import SAMPLERS, STATES, SavedPath, TrainingRun
from .work import Job, Work

if TYPE_CHECKING:
    from .models import Models
    from .sessions import Sessions

log = logging.getLogger(__name__)

MOST_TRIES = 2
"""How often a request is begun by servers that were started again: one that ends each server is given up then."""
FORWARD_BACKWARD = "forward_backward"
OPTIM_STEP = "optim_step"
LOAD = "load_weights"
TOO_LATE = "this request comes too late: those with higher numbers are done"
_REPEATABLE = (FORWARD_BACKWARD, OPTIM_STEP)
"""Requests whose result could be computed again from the checkpoint before them."""


class Performer:
    """The requests of all models."""

    def __init__(self, name: str, is_full: bool, models: "Models", sessions: "Sessions", kept: KeptScripts) -> None:
        """name: the model's, for clients. is_full: all weights are trained, whatever adapter a client asks for."""
        self._name = name
        self._is_full = is_full
        self._models = models
        self._sessions = sessions
        self._kept = kept
        self._methods: Mapping[str, Callable[[str, int, Fields], Any]] = {
            "create_model": self._create,
            OPTIM_STEP: self._step,
            "save_weights": self._save_state,
            LOAD: self._load,
            SAVE_FOR_SAMPLER: self._save_sampler,
            "save_weights_external": self._save_external,
        }

    def job(self, model_id: str, number: int, request: KeptRequest, future: Future | None) -> Job:
        """The job of a request; without a future its result is found on the disk."""

        def fail(problem: str) -> None:
            result = _failure(request, problem, is_user=True, is_performed=False)
            self._spoil(model_id, request, problem)
            self._end(model_id, number, request, result, future)

        def run() -> None:
            self._end(model_id, number, request, self._perform(model_id, number, request), future)

        def drop(problem: str) -> None:
            self._kept.remove_request(model_id, number)
            if future is not None:
                future.fail(problem, is_user=True)

        return Job(run, fail, drop)

    def recovery(self, model_id: str, opened: Mapping[int, Future], work: Work, finish: Callable[[str], None]) -> Job:
        """The job that continues a model of an earlier server. opened: the requests without a result.

        finish: called at the end, with the problem if the model cannot be continued.
        """

        def run() -> None:
            try:
                self._continue(model_id, opened, work)
            except (HeadraceError, OSError) as error:
                fail(str(error))
            except Exception:
                log.exception("%s could not be continued", model_id)
                fail(f"{model_id} could not be continued; the server's log says why")
            else:
                self._models.awake(model_id)
                finish("")

        def fail(problem: str) -> None:
            say(problem)
            self._models.lose(model_id, problem)
            for future in opened.values():
                future.fail(problem, is_user=True)
            requests, results = self._kept.numbers(model_id)
            for job in work.resume(model_id, max(requests | results, default=0) + 1):
                job.drop(problem)
            finish(problem)

        return Job(run, fail)

    # ---------------------------------------------------------------------------------------------------------- recovery

    def _continue(self, model_id: str, opened: Mapping[int, Future], work: Work) -> None:
        since = time.monotonic()
        requests, results = self._kept.numbers(model_id)
        start = self._models.restore(model_id)
        if start:
            for sampler, target in self._models.samplers_of(model_id).items():
                self._sessions.add_sampler(sampler, target)
        last = max(results, default=0)
        self._check_whole(model_id, start, last, requests)
        again = sorted(number for number in requests if start <= number <= last or number == start == 0)
        for number in again:
            self._repeat(model_id, number, opened.get(number))
        for job in work.resume(model_id, max(last + 1, start, 1)):
            job.drop(TOO_LATE)
        for number in sorted(opened.keys() - {*again}):
            request = self._kept.request(model_id, number)
            job = self._tried(model_id, number, request, opened[number])
            if not work.add_numbered(model_id, number, job):
                job.drop(TOO_LATE)
        took_s = time.monotonic() - since
        say(f"{model_id} goes on: {len(again)} of its requests were carried out again, in {took_s:.1f} s")

    def _check_whole(self, model_id: str, start: int, last: int, requests: set[int]) -> None:
        """Raise `SettingError` if a request is missing that was carried out since the checkpoint, which has number `start`."""
        is_given_up = False
        for number in range(last, start - 1, -1):
            if number in requests:
                result = self._kept.result(model_id, number)
                is_given_up = result is not None and not result.is_performed
            elif not is_given_up:
                problem = f"request {number} of {model_id} is not on the disk any more, so the model is lost"
                raise SettingError(f"{problem}; continue from a state that it saved")

    def _repeat(self, model_id: str, number: int, future: Future | None) -> None:
        """Carry out a request once more; future: of one whose result is lost."""
        request = self._kept.request(model_id, number)
        result = self._kept.result(model_id, number)
        if result is None:  # it was not written to its end, or it is damaged
            self._tried(model_id, number, request, future).run()
            return
        if result.problem or not result.is_performed:
            self._spoil(model_id, request, result.problem)
            if request.kind != OPTIM_STEP or not result.is_performed:
                return
        if request.kind == FORWARD_BACKWARD:
            needs_result = read_loss_request(request.raw).needs_gradient
        else:
            needs_result = request.kind not in ("save_weights", "save_weights_external") and not _has_path(request)
        if not needs_result:
            return
        found = self._perform(model_id, number, request)
        if found.problem and not result.problem:
            raise SettingError(f"request {number} of {model_id} cannot be repeated: {found.problem}")
        if found.body != result.body:
            log.warning("request %d of %s has another result than before", number, model_id)
        if request.kind == LOAD and not found.problem and (problem := self._keep_loaded(model_id, number)):
            raise SettingError(problem)

    def _tried(self, model_id: str, number: int, request: KeptRequest, future: Future | None) -> Job:
        """The job of a request that may have ended the server before."""
        job = self.job(model_id, number, request, future)

        def run() -> None:
            if self._kept.count_try(model_id, number) > MOST_TRIES:
                job.fail(f"the server has ended {MOST_TRIES + 1} times while it carried out this request")
            else:
                job.run()

        return Job(run, job.fail, job.drop)

    # ------------------------------------------------------------------------------------------------------- one request

    def _perform(self, model_id: str, number: int, request: KeptRequest) -> KeptResult:
        """Carry out a request."""
        try:
            if request.kind == FORWARD_BACKWARD:
                value: Any = self._loss(model_id, request.raw)
            else:
                fields = typed(msgspec.json.decode(request.raw), request.kind)
                value = self._methods[request.kind](model_id, number, fields)
            return KeptResult(request.digest, *encoded(value))
        except (HeadraceError, OSError) as error:
            return _failure(request, str(error), is_user=not isinstance(error, OSError))
        except Exception:
            log.exception("request %d of %s failed", number, model_id)
            return _failure(request, "the server failed; its log says why", is_user=False)

    def _end(self, model_id: str, number: int, request: KeptRequest, result: KeptResult, future: Future | None) -> None:
        """Keep a result, and give it to the client."""
        failpoint("request done", number=number)
        if self._kept.folder(model_id).exists():  # else the client has ended its session meanwhile
            is_synced = request.kind not in _REPEATABLE
            self._kept.write_result(model_id, number, result, is_synced=is_synced)
            if request.kind == LOAD and not result.problem and (problem := self._keep_loaded(model_id, number)):
                result = _failure(request, problem, is_user=False)
                self._kept.write_result(model_id, number, result, is_synced=is_synced)
        if future is not None:
            future.finish(result.media_type, result.body)
        self._models.offer_checkpoint(model_id, number + 1)

    def _keep_loaded(self, model_id: str, number: int) -> str:
        """Write the state that a request has loaded, since what it has read may be another one later; returns the problem, or ""."""
        try:
            self._models.write_checkpoint(model_id, number + 1)
        except OSError as error:
            self._models.lose(model_id, str(error))
            return str(error)
        return ""

    def _spoil(self, model_id: str, request: KeptRequest, problem: str) -> None:
        """A request has failed: if it is one of a gradient, the update after it fails too."""
        if request.kind == FORWARD_BACKWARD:
            with suppress(SettingError):
                if not read_loss_request(request.raw).needs_gradient:
                    return
            self._models.fail_gradient(model_id, problem)

    def _loss(self, model_id: str, raw: bytes) -> bytes:
        try:
            request = read_loss_request(raw)
        except SettingError as error:
            self._models.fail_gradient(model_id, str(error))
            raise
        return self._models.loss(model_id, request)

    def _create(self, model_id: str, number: int, fields: Fields) -> Any:
        del number
        new = read_new_model(fields)
        run = TrainingRun(
            model_id,
            self._name,
            0 if self._is_full else new.layers.rank,
            new.layers.train_attn,
            new.layers.train_mlp,
            secrets.randbits(31) if new.layers.seed is None else new.layers.seed,
            time.time(),
            new.metadata,
        )
        return self._models.create(run)

    def _step(self, model_id: str, number: int, fields: Fields) -> Any:
        _skip_address(fields)
        params = read_adam(fields)
        fields.finish()
        return self._models.step(model_id, params)

    def _save_state(self, model_id: str, number: int, fields: Fields) -> Any:
        _skip_address(fields)
        path = SavedPath(model_id, STATES, required(fields, "path", str))
        overwrite = fields.take("overwrite", bool, False)
        ttl_s = read_ttl(fields)
        metadata = read_metadata(fields)
        fields.finish()
        return self._models.save_state(path, number, overwrite=overwrite, ttl_s=ttl_s, metadata=metadata)

    def _load(self, model_id: str, number: int, fields: Fields) -> Any:
        """Load a saved state into a model, or begin a new model with it."""
        path = SavedPath.parse(required(fields, "path", str))
        with_optimizer = required(fields, "optimizer", bool)
        refuse_token(fields)
        if number == 0:
            metadata = read_metadata(fields)  # the rest was read when the request came
            return self._models.create_from(model_id, path, with_optimizer=with_optimizer, metadata=metadata)
        _skip_address(fields)
        fields.finish()
        return self._models.load(model_id, path, with_optimizer=with_optimizer)

    def _save_sampler(self, model_id: str, number: int, fields: Fields) -> Any:
        """Save weights to sample from: by a name, or for a sampling session of their own."""
        _skip_address(fields)
        name = fields.take("path", str)
        seq_id = fields.take("sampling_session_seq_id", int)
        kind = fields.take("kind", str, "snapshot")
        ttl_s = read_ttl(fields)
        metadata = read_metadata(fields)
        fields.finish()
        if name is not None:
            return self._models.save_sampler(SavedPath(model_id, SAMPLERS, name), ttl_s=ttl_s, metadata=metadata)
        if kind not in ("snapshot", "inflight"):
            raise fields.refusal("kind", f"must be snapshot or inflight, not {kind}")
        if seq_id is None:
            raise fields.refusal("sampling_session_seq_id", "is missing, and so is path")
        sampler = self._sessions.sampler_id(model_id, seq_id)
        self._sessions.add_sampler(sampler, self._models.snapshot(model_id, sampler, is_inflight=kind == "inflight"))
        return {"type": "save_weights_for_sampler", "sampling_session_id": sampler}

    def _save_external(self, model_id: str, number: int, fields: Fields) -> Any:
        """Refused, but it takes its number."""
        raise SettingError("save_weights_external is not supported; save_weights_for_sampler writes safetensors here")


def _failure(request: KeptRequest, problem: str, *, is_user: bool, is_performed: bool = True) -> KeptResult:
    error = encoded_error(problem, is_user=is_user)
    return KeptResult(request.digest, *error, problem, is_performed)


def _has_path(request: KeptRequest) -> bool:
    """Whether a request saves weights for samplers by a name."""
    return request.kind == SAVE_FOR_SAMPLER and msgspec.json.decode(request.raw).get("path") is not None


def _skip_address(fields: Fields) -> None:
    """Pass over what was read when the request came."""
    for name in ("model_id", "seq_id"):
        fields.any(name)
