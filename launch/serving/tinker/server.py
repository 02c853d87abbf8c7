"""The server: one engine and the models in training in the main thread, HTTP in another one."""

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....comm.recipe import Recipe
from ....rollout.serving.local_server import QUEUED, open_engine
from ....rollout.serving.samplers import Samplers
from ....rollout.serving.server import HttpThread, listen
from .catalog import Catalog
from .checkpoints import ModelCheckpoints
from .kept import KeptScripts
from .models import Models
from .performer import Performer
from .routes import KeyAccess, make_tinker_app
from .service import ServerFacts, TinkerService
from .sessions import Sessions
from .store import SavedWeights, make_folder
from .work import Work

_IDLE_S = 0.5
_LOOK_S = 60.0
"""Seconds between two looks for sessions whose clients do not come back."""


@dataclass(frozen=True, slots=True)
class TinkerOptions:
    """The options of the command."""

    name: str
    """The model's name in requests."""
    folder: Path
    """Where saved weights are."""
    host: str = "127.0.0.1"
    port: int = 0
    keys: Sequence[str] = ()
    is_full: bool = False
    """Train all weights, whatever adapter a client asks for."""
    most_models: int = 1
    """Models in training at a time."""
    opened: socket.socket | None = None
    """The socket to answer on, which outlives this process; else one is opened."""


class TinkerServer:
    """Serves the model of `model.path`; `run` is the loop of its engine and of its training, in the thread that calls it."""

    def __init__(self, recipe: Recipe, options: TinkerOptions) -> None:
        """Raises `SettingError`."""
        since = time.time()
        access = KeyAccess(options.host, options.keys)
        make_folder(options.folder)
        self._kept = KeptScripts(options.folder)
        opened = options.opened or listen(options.host, options.port)
        try:
            self.engine = open_engine(recipe)
            self._samplers = Samplers(self.engine)
            self._work = Work(self._samplers.has_work)
            self._sessions = Sessions(self._kept)
            store = SavedWeights(options.folder)
            store.remove_expired()
            self._checkpoints = ModelCheckpoints(self._kept, recipe.checkpoint.every)
            is_alive = self._sessions.is_alive
            self._models = Models(recipe, self._samplers, store, self._checkpoints, options.most_models, is_alive)
            performer = Performer(options.name, options.is_full, self._models, self._sessions, self._kept)
            policy = self.engine.policy
            facts = ServerFacts(
                options.name,
                recipe.model.path,
                policy.context,
                policy.vocab_size,
                options.is_full,
                (1 + QUEUED) * self.engine.scheduler.max_running,
            )
            service = TinkerService(
                facts, self._sessions, self._work, self._models, self._samplers, performer, self._kept
            )
            service.restore(since)
            self.http = HttpThread(make_tinker_app(service, Catalog(store), access), opened)
            self._look_again = time.monotonic() + _LOOK_S
        except BaseException:
            opened.close()
            self._kept.close()
            raise

    def start(self) -> None:
        """Begin to answer; the work is done in `run` alone."""
        self.http.start()

    def run(self, is_ended: Callable[[], bool] = lambda: False) -> None:
        """Work for the requests until `is_ended`, or an exception such as `KeyboardInterrupt`."""
        while not is_ended():
            self.http.check()
            self._tidy()
            self._samplers.has_work.clear()  # before both look, so that what comes meanwhile ends the wait
            has_trained = self._train()
            has_sampled = self._samplers.turn()
            if not has_trained and not has_sampled:
                self._samplers.has_work.wait(_IDLE_S)

    def close(self) -> None:
        """End the connections, and let another server continue."""
        self.http.close()
        self._tidy()
        self._checkpoints.close()
        self._kept.close()

    def _tidy(self) -> None:
        """Remove what sessions leave that have ended."""
        if time.monotonic() > self._look_again:
            self._look_again = time.monotonic() + _LOOK_S
            self._sessions.finish_silent()
        while self._sessions.ended:
            session = self._sessions.ended.popleft()
            for model_id in session.model_ids:
                self._models.drop(model_id)
            self._kept.remove_session(session.session_id)

    def _train(self) -> bool:
        """Carry out one job, if there is one, and end those that have waited too long."""
        for job, problem in self._work.overdue(self._models.has_room):
            job.fail(problem)
        job = self._work.next(self._models.has_room)
        if job is not None:
            job.run()
        return job is not None
