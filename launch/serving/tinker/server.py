"""The server: one engine and the models in training in the main thread, HTTP in another one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....comm.recipe import Recipe
from ....rollout.serving.local_server import QUEUED, open_engine
from ....rollout.serving.samplers import Samplers
from ....rollout.serving.server import HttpThread, listen
from .catalog import Catalog
from .models import Models, make_folder
from .routes import KeyAccess, make_tinker_app
from .service import ServerFacts, TinkerService
from .sessions import Sessions
from .store import SavedWeights
from .work import Work

_IDLE_S = 0.5


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


class TinkerServer:
    """Serves the model of `model.path`; `run` is the loop of its engine and of its training, in the thread that calls it."""

    def __init__(self, recipe: Recipe, options: TinkerOptions) -> None:
        """Raises `SettingError`."""
        access = KeyAccess(options.host, options.keys)
        make_folder(options.folder)
        opened = listen(options.host, options.port)
        try:
            self.engine = open_engine(recipe)
            self._samplers = Samplers(self.engine)
            self._work = Work(self._samplers.has_work)
            sessions = Sessions()
            store = SavedWeights(options.folder)
            store.remove_expired()
            self._models = Models(recipe, self._samplers, store, options.most_models, sessions.is_alive)
            policy = self.engine.policy
            facts = ServerFacts(
                options.name,
                recipe.model.path,
                policy.context,
                policy.vocab_size,
                options.is_full,
                (1 + QUEUED) * self.engine.scheduler.max_running,
            )
            service = TinkerService(facts, sessions, self._work, self._models, self._samplers)
            self.http = HttpThread(make_tinker_app(service, Catalog(store), access), opened)
        except BaseException:
            opened.close()
            raise

    def start(self) -> None:
        """Begin to answer; the work is done in `run` alone."""
        self.http.start()

    def run(self, is_ended: Callable[[], bool] = lambda: False) -> None:
        """Work for the requests until `is_ended`, or an exception such as `KeyboardInterrupt`."""
        while not is_ended():
            self.http.check()
            self._samplers.has_work.clear()  # before both look, so that what comes meanwhile ends the wait
            has_trained = self._train()
            has_sampled = self._samplers.turn()
            if not has_trained and not has_sampled:
                self._samplers.has_work.wait(_IDLE_S)

    def close(self) -> None:
        """End the connections."""
        self.http.close()

    def _train(self) -> bool:
        """Carry out one job, if there is one, and end those that have waited too long."""
        for job, problem in self._work.overdue():
            job.fail(problem)
        job = self._work.next(self._models.has_room)
        if job is not None:
            job.run()
        return job is not None
