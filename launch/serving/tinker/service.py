"""The requests of the API: those about sessions are answered at once, the others become jobs of the main thread.

All methods belong to the thread of the event loop; what they give to `Work` and `Samplers` runs in the main thread. A request of a
model that is wrong still takes its number, and its future fails: the client counts it, and later ones go on.
"""

import asyncio
import dataclasses
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import xxhash

from ....comm.errors import SettingError
from ....comm.trace import failpoint
from ....rollout.serving.fields import Fields, RequestRefused
from ....rollout.serving.samplers import SampleJob, SampleResult, Samplers, Target
from .bodies import read_address, sample_answer
from .futures import Future, Futures
from .kept import KeptRequest, KeptResult, KeptScripts
from .performer import FORWARD_BACKWARD, LOAD, TOO_LATE, Performer
from .requests import (
    Json,
    SampleRequest,
    read_metadata,
    read_new_model,
    read_sample,
    refuse_token,
    required,
    typed,
)
from .sessions import GIVEN_UP_S, TRAIN, Session, Sessions
from .store import SavedPath
from .work import Work

if TYPE_CHECKING:
    from .models import Models

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

    def __init__(
        self,
        facts: ServerFacts,
        sessions: Sessions,
        work: Work,
        models: "Models",
        samplers: Samplers,
        performer: Performer,
        kept: KeptScripts,
    ) -> None:
        self.facts = facts
        self.sessions = sessions
        self.futures = Futures(self._recall)
        self._work = work
        self._models = models
        self._samplers = samplers
        self._performer = performer
        self._kept = kept
        self._versions: OrderedDict[str, list[int]] = OrderedDict()
        self._being_kept: dict[str, asyncio.Task[None]] = {}
        """Requests that are being written to the disk."""
        self._parked: dict[str, list[Callable[[], None]]] = {}
        """Samples that wait for the models of their sessions to be continued."""
        sessions.wake = self._wake

    def restore(self, since: float) -> None:
        """Take the sessions of an earlier server. since: when this one was begun, in seconds since 1970.

        Their models are continued when their clients give a sign of life.
        """
        for kept, last in self._kept.sessions():
            silent_s = max(0.0, since - last)
            if silent_s > GIVEN_UP_S:
                self._kept.remove_session(kept.session_id)
                continue
            session = Session(kept.session_id, kept.user_metadata, kept.display_name, time.monotonic() - silent_s)
            session.is_awake = False
            session.model_ids = self._kept.models(kept.session_id)
            session.asleep = {*session.model_ids}
            session.kept_samplers = dict(kept.samplers)
            for sampler, path in kept.samplers.items():
                with suppress(SettingError):  # its weights are removed
                    session.samplers[sampler] = (self._target(path), path)
            self.sessions.add(session)
            for model_id in session.asleep:
                requests, results = self._kept.numbers(model_id)
                if 0 in results or 0 not in requests:  # else it has not been created yet
                    self._models.sleep(model_id)

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
        self.sessions.finish(self.sessions.find(session_id))

    # ------------------------------------------------------------------------------------------------------------ models

    async def create_model(self, body: Json, raw: bytes) -> Json:
        """Begin to train the model's initial weights."""
        new = read_new_model(typed(body, "create_model"))
        session = self.sessions.alive(new.session_id)
        self._check_name(new.base_model)
        return await self._create(session, new.number, KeptRequest("create_model", raw))

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

    async def forward_backward(self, raw: bytes) -> Json:
        """Gradients of data, or the loss alone; the body is a protocol-buffer message."""
        try:
            model_id, seq_id = read_address(raw)
        except SettingError as error:
            raise RequestRefused(str(error), code="not_protobuf") from error
        return await self._numbered(model_id, seq_id, KeptRequest(FORWARD_BACKWARD, raw))

    async def of_model(self, kind: str, body: Json, raw: bytes) -> Json:
        """A request to a model that has come by the route `kind`: an update, or one that saves or loads weights."""
        if kind == LOAD and body.get("session_id") is not None:
            return await self._create_from(body, raw)
        fields = typed(body, kind)
        model_id = required(fields, "model_id", str)
        seq_id = required(fields, "seq_id", int)
        return await self._numbered(model_id, seq_id, KeptRequest(kind, raw))

    # ---------------------------------------------------------------------------------------------------------- sampling

    def create_sampling_session(self, body: Json) -> Json:
        """Sample from saved weights, or from the initial ones."""
        fields = typed(body, "create_sampling_session")
        session = self.sessions.alive(required(fields, "session_id", str))
        seq_id = required(fields, "sampling_session_seq_id", int)
        path = fields.take("model_path", str)
        if path is None:
            self._check_name(required(fields, "base_model", str))
        else:
            fields.any("base_model")  # known from the path
        fields.finish()
        try:
            target = self._target(path)
        except SettingError as error:
            raise RequestRefused(str(error), status=404, code="unknown_path") from error
        sampler = self.sessions.sampler_id(session.session_id, seq_id)
        session.kept_samplers[sampler] = path
        self.sessions.add_sampler(sampler, target, path)
        self.sessions.keep(session)
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    def asample(self, body: Json, raw: bytes) -> Json:
        """Sample; the sequences have ids from now on."""
        asked = read_sample(body, self.facts.context, self.facts.vocab_size)
        waiting = self.sessions.waiting_for(asked.sampling_session_id)
        if waiting is None:
            self.sessions.sampler(asked.sampling_session_id)
        request_id = f"{asked.sampling_session_id}:{asked.seq_id}"
        num = asked.params.n
        names = [f"{request_id}:{sample}" for sample in range(num)]
        if not self.futures.has(request_id) and self._samplers.num_samples + num > self.facts.most_samples:
            problem = f"this server takes {self.facts.most_samples} responses at a time; try again later"
            raise RequestRefused(problem, status=429, code="too_many_requests")
        future, is_new = self.futures.open(request_id, xxhash.xxh3_128_digest(raw), sample_sequence_ids=names)
        if is_new and waiting is None:
            self._sample(asked, future, names)
        elif is_new and waiting is not None:
            self._parked.setdefault(waiting.session_id, []).append(lambda: self._sample(asked, future, names))
        return future.first_answer

    def future(self, request_id: str) -> Future:
        """The request of an id, with a sign of life of its client. Raises `RequestRefused`.

        Of samples that an earlier server was asked for, or whose result is forgotten, the status says that the client may ask anew.
        """
        session = self.sessions.of_request(request_id)
        try:
            return self.futures.find(request_id)
        except RequestRefused as error:
            if session is None or not request_id.startswith(self.sessions.sampler_id(session.session_id, "")):
                raise
            raise RequestRefused(str(error), status=410, code="lost_samples") from error

    def fetched(self, request_id: str) -> None:
        """A client has got a result."""
        if (address := self._address(request_id)) is not None:
            self._kept.note_fetched(*address)

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

    def _check_name(self, name: str) -> None:
        if name != self.facts.name:
            problem = f"there is no model {name!r} here; this server has {self.facts.name!r} (--name)"
            raise RequestRefused(problem, "base_model", status=404, code="model_not_found")

    def _target(self, path: str | None) -> Target:
        """What a sampling session samples from: saved weights, or without a path the initial ones. Raises `SettingError`."""
        return self._samplers.initial if path is None else self._models.saved_target(SavedPath.parse(path))

    async def _create(self, session: Session, number: int, request: KeptRequest) -> Json:
        model_id = f"{session.session_id}{TRAIN}{number}"
        future, is_new = self.futures.open(f"{model_id}:0", request.digest, model_id=model_id)
        if is_new and model_id not in session.model_ids:
            session.model_ids.append(model_id)
        if await self._keep(model_id, 0, request, future, is_new=is_new):
            self._work.add_model(model_id, self._performer.job(model_id, 0, request, future))
        return future.first_answer

    async def _create_from(self, body: Json, raw: bytes) -> Json:
        fields = typed(body, LOAD)
        session = self.sessions.alive(required(fields, "session_id", str))
        if fields.take("base_model", str, self.facts.name) != self.facts.name:
            raise fields.refusal("base_model", f"this server has {self.facts.name!r}")
        number = required(fields, "model_seq_id", int)
        for name, kind in (("path", str), ("optimizer", bool)):
            required(fields, name, kind)
        read_metadata(fields)
        fields.neutral({"optimizer_config": ({"type": "adamw"},)})
        refuse_token(fields)
        fields.finish()
        return await self._create(session, number, KeptRequest(LOAD, raw))

    async def _numbered(self, model_id: str, seq_id: int, request: KeptRequest) -> Json:
        self.sessions.of_model(model_id)
        if seq_id < 1:
            raise RequestRefused(f"must be at least 1, not {seq_id}", "seq_id")
        future, is_new = self.futures.open(f"{model_id}:{seq_id}", request.digest, model_id=model_id)
        if await self._keep(model_id, seq_id, request, future, is_new=is_new):
            job = self._performer.job(model_id, seq_id, request, future)
            if not self._work.add_numbered(model_id, seq_id, job):
                job.drop(TOO_LATE)
        return future.first_answer

    async def _keep(self, model_id: str, number: int, request: KeptRequest, future: Future, *, is_new: bool) -> bool:
        """Have a request on the disk before its client hears that it has come; returns whether this call has seen to that.

        Raises `RequestRefused` where it cannot be written: the client sends it again.
        """
        key = future.request_id
        if is_new:
            writing = asyncio.to_thread(self._kept.write_request, model_id, number, request)
            self._being_kept[key] = asyncio.create_task(writing)
        task = self._being_kept.get(key)
        if task is None:
            return False
        try:
            await asyncio.shield(task)  # the client may leave, and the request is taken all the same
        except OSError as error:
            self.futures.forget(key)
            problem = f"the request cannot be kept: {error.strerror or error}"
            raise RequestRefused(problem, status=503, code="not_kept") from error
        finally:
            if is_new:
                self._being_kept.pop(key, None)
        failpoint("request kept", number=number)
        return is_new

    def _recall(self, request_id: str) -> KeptResult | None:
        """The result on the disk of a request to a model."""
        address = self._address(request_id)
        return None if address is None else self._kept.result(*address)

    def _address(self, request_id: str) -> tuple[str, int] | None:
        """The model and the number of a request, whose client is alive; None for other ids."""
        model_id, _, number = request_id.rpartition(":")
        session = self.sessions.of_request(request_id)
        if session is None or model_id not in session.model_ids or not number.isdecimal():
            return None
        return model_id, int(number)

    def _wake(self, session: Session) -> None:
        """Continue the models of a session of an earlier server."""
        loop = asyncio.get_running_loop()
        for model_id in [*session.asleep]:
            self._work.hold(model_id)
            requests, results = self._kept.numbers(model_id)
            opened: dict[int, Future] = {}
            for number in sorted(requests - results):
                with suppress(SettingError, OSError):  # the job that continues the model says why
                    own = self._kept.request(model_id, number).digest
                    opened[number] = self.futures.open(f"{model_id}:{number}", own, model_id=model_id)[0]
            on_continued = partial(self._on_continued, session, model_id)
            finish = partial(_call_soon, loop, on_continued)
            self._work.add_model(model_id, self._performer.recovery(model_id, opened, self._work, finish))

    def _on_continued(self, session: Session, model_id: str, problem: str) -> None:
        """A model of a session can be used again, or is lost by a problem."""
        session.asleep.discard(model_id)
        session.problem = problem or session.problem
        if not session.asleep:
            for begin in self._parked.pop(session.session_id, []):
                begin()

    def _sample(self, asked: SampleRequest, future: Future, names: list[str]) -> None:
        """Begin to sample."""
        try:
            target, _ = self.sessions.sampler(asked.sampling_session_id)
        except RequestRefused as error:
            future.fail(str(error), is_user=True)
            return
        seed = secrets.randbits(63) if asked.params.seed is None else asked.params.seed
        params = dataclasses.replace(asked.params, seed=seed)
        job = SampleJob(target, asked.prompt, params, self._finisher(future, names), asked.num_scored)
        future.cancel = lambda: self._cancel(future, job)
        self._samplers.submit(job)

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


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[str], None], problem: str) -> None:
    """Have the thread of an event loop call something."""
    loop.call_soon_threadsafe(call, problem)
