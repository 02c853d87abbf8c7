"""Sessions of clients: who is there, and what each one trains and samples from. Belongs to the thread of the event loop, but for `is_alive`.

A session of an earlier server is *asleep* until its client gives a sign of life: its models are not in memory yet.
"""

import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ....rollout.serving.fields import RequestRefused
from ....rollout.serving.samplers import Target
from .kept import KeptScripts, KeptSession

SILENT_S = 35.0
"""Time without a sign of life after which a client counts as gone; the SDK gives one every 10 s."""
GIVEN_UP_S = 3600.0
"""Time without a sign of life after which a session is forgotten, also by a server that is started again."""
KEPT_SESSIONS = 1000
NOTED_S = 5.0
"""Least time between two signs of life that are noted on the disk."""
TRAIN = ":train:"
_SAMPLE = ":sample:"


@dataclass(slots=True)
class Session:
    """A client's session."""

    session_id: str
    user_metadata: dict[str, Any] | None
    display_name: str | None
    seen: float = field(default_factory=time.monotonic)
    is_finished: bool = False
    model_ids: list[str] = field(default_factory=list)
    samplers: dict[str, tuple[Target, str | None]] = field(default_factory=dict)
    """By the id of the sampling session: what it samples from, and its path, if it has one."""
    kept_samplers: dict[str, str | None] = field(default_factory=dict)
    """The paths of those that do not come from a model in training, None for the initial weights."""
    asleep: set[str] = field(default_factory=set)
    """Its models of an earlier server that are not continued yet."""
    problem: str = ""
    """Why one of these could not be continued."""
    is_awake: bool = True
    noted: float = 0.0
    """When its last sign of life was noted on the disk."""


class Sessions:
    """The newest sessions, in memory and on the disk."""

    def __init__(self, kept: KeptScripts) -> None:
        self._kept = kept
        self._all: OrderedDict[str, Session] = OrderedDict()
        self.wake: Callable[[Session], None] = lambda _: None
        """Continues the models of a session that was asleep."""
        self.ended: deque[Session] = deque()
        """Sessions whose models and files are to be removed, in the main thread."""

    def open(self, user_metadata: dict[str, Any] | None, display_name: str | None) -> Session:
        """Begin a session. Raises `OSError` where it cannot be kept."""
        session = Session(uuid.uuid4().hex, user_metadata, display_name)
        self.keep(session)
        self.add(session)
        return session

    def add(self, session: Session) -> None:
        """Take a session; the oldest ones make room for it."""
        self._all[session.session_id] = session
        while len(self._all) > KEPT_SESSIONS:
            self.finish(self._all.popitem(last=False)[1])

    def keep(self, session: Session) -> None:
        """Write a session, but for its models. Raises `OSError`."""
        given = (session.session_id, session.user_metadata, session.display_name, session.kept_samplers)
        self._kept.write_session(KeptSession(*given))

    def finish(self, session: Session) -> None:
        """End a session: its models make room for others."""
        if not session.is_finished:
            session.is_finished = True
            self._kept.end_session(session.session_id)
            self.ended.append(session)

    def finish_silent(self) -> None:
        """End the sessions whose clients were silent for so long that they do not come back."""
        before = time.monotonic() - GIVEN_UP_S
        for session in [each for each in self._all.values() if each.seen < before]:
            self.finish(session)

    def ids(self) -> list[str]:
        """All of them, the newest first."""
        return [*reversed(self._all)]

    def find(self, session_id: str) -> Session:
        """A session. Raises `RequestRefused` for one that is not known."""
        session = self._all.get(session_id)
        if session is None:
            problem = f"there is no session {session_id!r}: this server was started anew; begin a new one"
            raise RequestRefused(problem, "session_id", status=404, code="unknown_session")
        return session

    def alive(self, session_id: str) -> Session:
        """A session, with a sign of life. Raises `RequestRefused` for one that is finished, or not known."""
        session = self.find(session_id)
        if session.is_finished:
            problem = f"the session {session_id} is finished"
            raise RequestRefused(problem, "session_id", status=410, code="session_finished")
        session.seen = time.monotonic()
        if session.seen - session.noted > NOTED_S:
            session.noted = session.seen
            self._kept.note_life(session.session_id)
        if not session.is_awake:
            session.is_awake = True
            self.wake(session)
        return session

    def of_request(self, request_id: str) -> Session | None:
        """The session of a request's id, with a sign of life; None for one that is not known, or finished."""
        session = self._all.get(request_id.partition(":")[0])
        return None if session is None or session.is_finished else self.alive(session.session_id)

    def of_model(self, model_id: str) -> Session:
        """The session that trains a model. Raises `RequestRefused` for a model that is not known."""
        session = self._all.get(model_id.partition(TRAIN)[0])
        if session is None or model_id not in session.model_ids:
            problem = (
                f"there is no model {model_id!r}: this server was started anew; continue from a state that it saved"
            )
            raise RequestRefused(problem, "model_id", status=404, code="unknown_model")
        return self.alive(session.session_id)

    def sampler(self, sampling_session_id: str) -> tuple[Target, str | None]:
        """What a sampling session samples from. Raises `RequestRefused`."""
        session = self._all.get(sampling_session_id.partition(_SAMPLE)[0])
        if session is None or sampling_session_id not in session.samplers:
            problem = f"there is no sampling session {sampling_session_id!r} on this server"
            problem += f": {session.problem}" if session is not None and session.problem else ""
            raise RequestRefused(problem, "sampling_session_id", status=404, code="unknown_sampling_session")
        self.alive(session.session_id)
        return session.samplers[sampling_session_id]

    def waiting_for(self, sampling_session_id: str) -> Session | None:
        """The session of a sampling session that may be known once the session's models are continued; None for others."""
        session = self.of_request(sampling_session_id)
        if session is None or not session.asleep or sampling_session_id in session.samplers:
            return None
        return session

    def sampler_id(self, model_id: str, number: int | str) -> str:
        """The id of a sampling session of a model's or a session's client."""
        return f"{model_id.partition(TRAIN)[0]}{_SAMPLE}{number}"

    def add_sampler(self, sampler: str, target: Target, path: str | None = None) -> None:
        """Note what a sampling session samples from, in any thread; nothing if its session is gone."""
        session = self._all.get(sampler.partition(_SAMPLE)[0])
        if session is not None:
            session.samplers[sampler] = (target, path)

    def is_alive(self, model_id: str) -> bool:
        """Whether the client of a model may still use it; in any thread."""
        session = self._all.get(model_id.partition(TRAIN)[0])
        return session is not None and not session.is_finished and time.monotonic() - session.seen < SILENT_S
