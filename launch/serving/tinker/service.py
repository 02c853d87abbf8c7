"""The requests of the API: those about sessions are answered at once, the others become jobs of the main thread.

All methods belong to the thread of the event loop; what they give to `Work` and `Samplers` runs in the main thread. A request of a
model that is wrong still takes its number, and its future fails: the client counts it, and later ones go on.
"""

import dataclasses
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import xxhash

from ....comm.errors import HeadraceError, SettingError
from ....rollout.serving.fields import Fields, RequestRefused
from ....rollout.serving.samplers import SampleJob, SampleResult, Samplers, Target
from .bodies import read_address, read_loss_request, sample_answer
from .futures import Future, Futures
from .models import Models
from .requests import (
    Json,
    read_adam,
    read_layers,
    read_metadata,
    read_sample,
    read_ttl,
    refuse_token,
    required,
    typed,
)
from .sessions import Session, Sessions
from .store import SAMPLERS, STATES, SavedPath, TrainingRun
from .work import Job, Work

log = logging.getLogger(__name__)

KEPT_SEQUENCES = 10_000
"""Responses whose weights are known by their ids: the newest."""
UNEMBED = "The LM head takes no adapter on this server: train_unembed has no effect."


@dataclasses.dataclass(frozen=True, slots=True)
class ServerFacts:
    """What clients are told of the model. is_full: all weights are trained, whatever adapter a client asks for."""

    name: str
    tokenizer: str
    context: int
    vocab_size: int
    is_full: bool
    most_samples: int
    """Responses that may wait or run."""


class TinkerService:
    """Answers requests that are parsed; raises `RequestRefused` for those that are wrong."""

    def __init__(self, facts: ServerFacts, sessions: Sessions, work: Work, models: Models, samplers: Samplers) -> None:
        self.facts = facts
        self.sessions = sessions
        self.futures = Futures()
        self._work = work
        self._models = models
        self._samplers = samplers
        self._versions: OrderedDict[str, list[int]] = OrderedDict()

    # ---------------------------------------------------------------------------------------------------------- sessions

    def create_session(self, body: Json) -> Json:
        """Begin a session; project and tags have no meaning here."""
        fields = typed(body, "create_session")
        for name in ("tags", "sdk_version", "project_id"):
            fields.any(name)
        metadata = fields.take("user_metadata", dict)
        session = self.sessions.open(metadata, fields.take("display_name", str))
        fields.finish()
        warning = {} if self.facts.is_full else {"warning_message": UNEMBED}
        return {"type": "create_session", "session_id": session.session_id, **warning}

    def heartbeat(self, body: Json) -> Json:
        """A sign of life."""
        fields = typed(body, "session_heartbeat")
        self.sessions.alive(required(fields, "session_id", str))
        return {"type": "session_heartbeat"}

    def finish(self, session_id: str) -> None:
        """End a session; its models make room for others."""
        self.sessions.find(session_id).is_finished = True

    # ------------------------------------------------------------------------------------------------------------ models

    def create_model(self, body: Json, raw: bytes) -> Json:
        """Begin to train the model's initial weights."""
        fields = typed(body, "create_model")
        session = self.sessions.alive(required(fields, "session_id", str))
        self._check_name(fields)
        layers = read_layers(fields)
        metadata = read_metadata(fields)
        model_id = self._new_model_id(fields, session)
        fields.finish()
        run = TrainingRun(
            model_id,
            self.facts.name,
            0 if self.facts.is_full else layers.rank,
            layers.train_attn,
            layers.train_mlp,
            secrets.randbits(31) if layers.seed is None else layers.seed,
            time.time(),
            metadata,
        )
        return self._create(session, model_id, raw, lambda: self._models.create(run))

    def get_info(self, body: Json) -> Json:
        """What a model is."""
        fields = typed(body, "get_info")
        model_id = required(fields, "model_id", str)
        self.sessions.of_model(model_id)
        try:
            run = self._models.run(model_id)
        except SettingError as error:
            raise RequestRefused(str(error), status=404, code="unknown_model") from error
        data = {"arch": "", "model_name": self.facts.name, "tokenizer_id": self.facts.tokenizer}
        about = {"is_lora": run.rank > 0, "lora_rank": run.rank or None, "model_name": self.facts.name}
        return {"type": "get_info", "model_data": data, "model_id": model_id, **about}

    def forward_backward(self, raw: bytes) -> Json:
        """Gradients of data, or the loss alone; the body is a protocol-buffer message."""
        try:
            model_id, seq_id = read_address(raw)
        except SettingError as error:
            raise RequestRefused(str(error), code="not_protobuf") from error

        def perform() -> bytes:
            try:
                request = read_loss_request(raw)
            except SettingError as error:
                self._models.fail_gradient(model_id, str(error))
                raise
            return self._models.loss(model_id, request)

        return self._numbered(model_id, seq_id, raw, perform)

    def optim_step(self, body: Json, raw: bytes) -> Json:
        """An update by the gradients since the last one."""

        def perform(fields: Fields, model_id: str) -> Json:
            params = read_adam(fields)
            fields.finish()
            return self._models.step(model_id, params)

        return self._of_model(body, raw, "optim_step", perform)

    # ----------------------------------------------------------------------------------------------------------- weights

    def save_weights(self, body: Json, raw: bytes) -> Json:
        """Save the state of a model's training."""

        def perform(fields: Fields, model_id: str) -> Json:
            path = SavedPath(model_id, STATES, required(fields, "path", str))
            overwrite = fields.take("overwrite", bool, False)
            ttl_s = read_ttl(fields)
            metadata = read_metadata(fields)
            fields.finish()
            return self._models.save_state(path, overwrite=overwrite, ttl_s=ttl_s, metadata=metadata)

        return self._of_model(body, raw, "save_weights", perform)

    def load_weights(self, body: Json, raw: bytes) -> Json:
        """Load a saved state into a model, or begin a new model with it."""
        if body.get("session_id") is not None:
            return self._create_from(body, raw)

        def perform(fields: Fields, model_id: str) -> Json:
            path = SavedPath.parse(required(fields, "path", str))
            with_optimizer = required(fields, "optimizer", bool)
            refuse_token(fields)
            fields.finish()
            return self._models.load(model_id, path, with_optimizer=with_optimizer)

        return self._of_model(body, raw, "load_weights", perform)

    def save_weights_for_sampler(self, body: Json, raw: bytes) -> Json:
        """Save weights to sample from: by a name, or for a sampling session of their own."""

        def perform(fields: Fields, model_id: str) -> Json:
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
            target = self._models.snapshot(model_id, is_inflight=kind == "inflight")
            session = self.sessions.of_model(model_id)
            sampler = self._add_sampler(session, seq_id, target, None)
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler}

        return self._of_model(body, raw, "save_weights_for_sampler", perform)

    def save_weights_external(self, body: Json, raw: bytes) -> Json:
        """Refused, but it takes its number."""

        def perform(fields: Fields, model_id: str) -> Json:
            del fields, model_id
            raise SettingError(
                "save_weights_external is not supported; save_weights_for_sampler writes safetensors here"
            )

        return self._of_model(body, raw, "save_weights_external", perform)

    # ---------------------------------------------------------------------------------------------------------- sampling

    def create_sampling_session(self, body: Json) -> Json:
        """Sample from saved weights, or from the initial ones."""
        fields = typed(body, "create_sampling_session")
        session = self.sessions.alive(required(fields, "session_id", str))
        seq_id = required(fields, "sampling_session_seq_id", int)
        path = fields.take("model_path", str)
        if path is None:
            self._check_name(fields)
        else:
            fields.any("base_model")  # known from the path
        fields.finish()
        try:
            target = self._samplers.initial if path is None else self._models.saved_target(SavedPath.parse(path))
        except SettingError as error:
            raise RequestRefused(str(error), status=404, code="unknown_path") from error
        sampler = self._add_sampler(session, seq_id, target, path)
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    def asample(self, body: Json, raw: bytes) -> Json:
        """Sample; the sequences have ids from now on."""
        asked = read_sample(body, self.facts.context, self.facts.vocab_size)
        target, _ = self.sessions.sampler(asked.sampling_session_id)
        request_id = f"{asked.sampling_session_id}:{asked.seq_id}"
        num = asked.params.n
        names = [f"{request_id}:{sample}" for sample in range(num)]
        if not self.futures.has(request_id) and self._samplers.num_samples + num > self.facts.most_samples:
            problem = f"this server takes {self.facts.most_samples} responses at a time; try again later"
            raise RequestRefused(problem, status=429, code="too_many_requests")
        future, is_new = self.futures.open(request_id, digest(raw), sample_sequence_ids=names)
        if is_new:
            seed = secrets.randbits(63) if asked.params.seed is None else asked.params.seed
            params = dataclasses.replace(asked.params, seed=seed)
            finish = self._finisher(future, names)
            job = SampleJob(target, asked.prompt, params, finish, asked.num_scored)
            future.cancel = lambda: self._cancel(future, job)
            self._samplers.submit(job)
        return future.first_answer

    def cancel(self, body: Json) -> None:
        """Stop to sample for a request."""
        fields = Fields(body)
        self.futures.find(required(fields, "request_id", str)).cancel()

    def versions(self, sequence_id: str) -> Json:
        """The numbers of the weights that drew the tokens of a sequence, one for each."""
        found = self._versions.get(sequence_id)
        if found is None:
            problem = f"the sequence {sequence_id!r} is not one of the last {KEPT_SEQUENCES} that ended here"
            raise RequestRefused(problem, status=404, code="unknown_sequence")
        return {"sequence_id": sequence_id, "weight_versions": found}

    # --------------------------------------------------------------------------------------------------------- internals

    def _check_name(self, fields: Fields) -> None:
        name = required(fields, "base_model", str)
        if name != self.facts.name:
            problem = f"there is no model {name!r} here; this server has {self.facts.name!r} (--name)"
            raise RequestRefused(problem, "base_model", status=404, code="model_not_found")

    def _new_model_id(self, fields: Fields, session: Session) -> str:
        return f"{session.session_id}:train:{required(fields, 'model_seq_id', int)}"

    def _create(self, session: Session, model_id: str, raw: bytes, perform: Callable[[], Any]) -> Json:
        future, is_new = self.futures.open(f"{model_id}:0", digest(raw), model_id=model_id)
        if is_new:
            session.model_ids.append(model_id)
            self._work.add_model(job_of(future, perform))
        return future.first_answer

    def _create_from(self, body: Json, raw: bytes) -> Json:
        fields = typed(body, "load_weights")
        session = self.sessions.alive(required(fields, "session_id", str))
        if fields.take("base_model", str, self.facts.name) != self.facts.name:
            raise fields.refusal("base_model", f"this server has {self.facts.name!r}")
        model_id = self._new_model_id(fields, session)
        text = required(fields, "path", str)
        with_optimizer = required(fields, "optimizer", bool)
        metadata = read_metadata(fields)
        fields.neutral({"optimizer_config": ({"type": "adamw"},)})
        refuse_token(fields)
        fields.finish()

        def perform() -> Json:
            path = SavedPath.parse(text)
            return self._models.create_from(model_id, path, with_optimizer=with_optimizer, metadata=metadata)

        return self._create(session, model_id, raw, perform)

    def _of_model(self, body: Json, raw: bytes, kind: str, perform: Callable[[Fields, str], Json]) -> Json:
        fields = typed(body, kind)
        model_id = required(fields, "model_id", str)
        seq_id = required(fields, "seq_id", int)
        return self._numbered(model_id, seq_id, raw, lambda: perform(fields, model_id))

    def _numbered(self, model_id: str, seq_id: int, raw: bytes, perform: Callable[[], Any]) -> Json:
        self.sessions.of_model(model_id)
        if seq_id < 1:
            raise RequestRefused(f"must be at least 1, not {seq_id}", "seq_id")
        future, is_new = self.futures.open(f"{model_id}:{seq_id}", digest(raw), model_id=model_id)
        if is_new:
            self._work.add_numbered(model_id, seq_id, job_of(future, perform))
        return future.first_answer

    def _add_sampler(self, session: Session, seq_id: int, target: Target, path: str | None) -> str:
        sampler = f"{session.session_id}:sample:{seq_id}"
        session.samplers[sampler] = (target, path)
        return sampler

    def _finisher(self, future: Future, names: list[str]) -> Callable[[SampleResult | Exception], None]:
        """What ends a job of samples, in the main thread."""

        def finish(result: SampleResult | Exception) -> None:
            if isinstance(result, Exception):
                future.fail(str(result), is_user=isinstance(result, SettingError))
                return
            for name, response in zip(names, result.responses, strict=True):
                self._versions[name] = response.versions
            while len(self._versions) > KEPT_SEQUENCES:
                self._versions.popitem(last=False)
            future.succeed(sample_answer(result))

        return finish

    def _cancel(self, future: Future, job: SampleJob) -> None:
        self._samplers.cancel(job)
        future.fail("the client has cancelled it", is_user=True)


def job_of(future: Future, perform: Callable[[], Any]) -> Job:
    """A job that finishes a future with what `perform` returns, or with its error."""

    def run() -> None:
        try:
            future.succeed(perform())
        except (HeadraceError, OSError) as error:
            future.fail(str(error), is_user=not isinstance(error, OSError))
        except Exception:
            log.exception("%s failed", future.request_id)
            future.fail("the server failed; its log says why", is_user=False)

    return Job(run, lambda problem: future.fail(problem, is_user=True))


def digest(raw: bytes) -> bytes:
    """Of a request's body."""
    return xxhash.xxh3_128_digest(raw)
