"""Sessions of clients: who is there, and what each one trains and samples from. Belongs to the thread of the event loop, but for `is_alive`."""

import time
import uuid
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from ....rollout.serving.fields import RequestRefused
from ....rollout.serving.samplers import Target

SILENT_S = 35.0
"""Time without a sign of life after which a client counts as gone; the SDK gives one every 10 s."""
KEPT_SESSIONS = 1000
_TRAIN = ":train:"


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


class Sessions:
    """The newest sessions."""

    def __init__(self) -> None:
        self._all: OrderedDict[str, Session] = OrderedDict()

    def open(self, user_metadata: dict[str, Any] | None, display_name: str | None) -> Session:
        """Begin a session."""
        session = Session(uuid.uuid4().hex, user_metadata, display_name)
        self._all[session.session_id] = session
        while len(self._all) > KEPT_SESSIONS:
            self._all.popitem(last=False)
        return session

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
        return session

    def of_model(self, model_id: str) -> Session:
        """The session that trains a model. Raises `RequestRefused` for a model that is not known."""
        session = self._all.get(model_id.partition(_TRAIN)[0])
        if session is None or model_id not in session.model_ids:
            problem = (
                f"there is no model {model_id!r}: this server was started anew; continue from a state that it saved"
            )
            raise RequestRefused(problem, "model_id", status=404, code="unknown_model")
        return self.alive(session.session_id)

    def sampler(self, sampling_session_id: str) -> tuple[Target, str | None]:
        """What a sampling session samples from. Raises `RequestRefused`."""
        session = self._all.get(sampling_session_id.partition(":sample:")[0])
        if session is None or sampling_session_id not in session.samplers:
            problem = f"there is no sampling session {sampling_session_id!r} on this server"
            raise RequestRefused(problem, "sampling_session_id", status=404, code="unknown_sampling_session")
        self.alive(session.session_id)
        return session.samplers[sampling_session_id]

    def is_alive(self, model_id: str) -> bool:
        """Whether the client of a model may still use it; in any thread."""
        session = self._all.get(model_id.partition(_TRAIN)[0])
        return session is not None and not session.is_finished and time.monotonic() - session.seen < SILENT_S
