"""The process of a run's front: HTTP requests are answered by the rollouts. Its death costs the open requests and nothing else."""

import json
import logging
import socket
from contextlib import suppress
from pathlib import Path

import msgspec

from ...comm.errors import HeadraceError, SettingError
from ...comm.fleet import Fleet
from ...comm.mailbox import Mailbox
from ...comm.messages import LeaseGrant, Message
from ...comm.recipe import Recipe
from ...relay.checkpoints import write_durably
from ...relay.receipts import open_key
from ...trainer.policy.model import load_policy, load_tokenizer
from ..rewards.pool import open_rewards
from .access import SERVE_FILE, Access, api_keys, serve_address
from .agents.office import AgentOffice
from .agents.routes import agent_routes
from .agents.samples import AgentSamples
from .app import make_app
from .front import Front, ServedModel
from .local_server import QUEUED
from .run_desk import RunDesk
from .server import HttpThread, listen

log = logging.getLogger(__name__)

URL = "url"
"""The fact with which the front announces its address."""
TIMEOUT_S = 600.0
"""Longest time of one request."""
_TURN_S = 0.05
_AGENTS_TURN_S = 0.01
"""Of a front that leases samples for agents."""


class RunFront:
    """The front of a run. `run` is its loop; the desk works in it, and HTTP in a thread."""

    def __init__(self, fleet: Fleet, recipe: Recipe) -> None:
        """Raises `SettingError` for an address that cannot be used."""
        host, port = serve_address(recipe.rollout.serve)
        self._fleet = fleet
        self._file = Path(recipe.run.dir) / SERVE_FILE
        access = Access(host, api_keys(), "rollout.serve")
        opened = _listen(host, port, _port_before(self._file) if fleet.incarnation > 1 else 0)
        try:
            policy = load_policy(recipe.model.path, recipe.model.compute_type, weights=False)
            name = Path(recipe.run.dir).resolve().name
            tokenizer = load_tokenizer(recipe.model.path)
            model = ServedModel(name, policy.context, policy.vocab_size, tokenizer, recipe.data)
            self._mailbox = fleet.open_mailbox(fleet.name)
            self.desk = RunDesk(fleet, self._mailbox, (1 + QUEUED) * recipe.generator.num_slots)
            front = Front(model, self.desk, TIMEOUT_S, open_key(Path(recipe.run.dir)))
            self._agents = (
                _Agents(fleet, recipe, self._mailbox, front, access) if recipe.environment.is_served else None
            )
            if self._agents is not None:
                self.desk.others = self._agents.handle
            more = self._agents.routes if self._agents is not None else ()
            self.http = HttpThread(make_app(front, access, more), opened)
        except BaseException:
            opened.close()
            raise
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.http.port}"
        self._name = name

    def run(self) -> None:
        """Answer requests until the hub's `Stop`."""
        if self._agents is not None:
            self._agents.samples.start()
        self.http.start()
        write_durably(self._file, msgspec.json.encode({"url": self.url, "model": self._name}))
        self._fleet.announce(**{URL: self.url})
        log.info("serving %r at %s/v1", self._name, self.url)
        while not self.desk.ended:
            self.http.check()
            self.desk.turn(_TURN_S if self._agents is None else _AGENTS_TURN_S)
            if self._agents is not None:
                self._agents.samples.advance(self.desk.oldest_version)
        if self._agents is not None:
            self._agents.close(self.desk.ended)

    def close(self) -> None:
        """End the connections, once what is to be said has been sent, and remove the address."""
        if self.desk.ended:
            self._file.unlink(missing_ok=True)
        self.http.close()
        self._mailbox.close()


class _Agents:
    """The samples and conversations of agents, where the trajectories of the run are theirs."""

    def __init__(self, fleet: Fleet, recipe: Recipe, mailbox: Mailbox, front: Front, access: Access) -> None:
        rewards = open_rewards(recipe.reward, recipe.run.steps, recipe.rollout.engine)
        self.samples = AgentSamples(fleet, recipe, mailbox, rewards)
        self._office = AgentOffice(front, self.samples, recipe)
        self.routes = agent_routes(self._office, access)

    def handle(self, message: Message) -> None:
        """Take a message of the hub."""
        if isinstance(message, LeaseGrant):
            self.samples.handle(message)

    def close(self, how: str) -> None:
        """The run has ended in this way: no sample is given out any more, and what has ended is written."""
        self._office.ended = how
        self.samples.close(how)


def run(fleet: Fleet, recipe: Recipe) -> None:
    """The front's process."""
    front = RunFront(fleet, recipe)
    try:
        front.run()
    finally:
        front.close()


def _listen(host: str, port: int, port_before: int) -> socket.socket:
    """A socket; a front that is started again keeps its port if it can, and a port that is taken does not end the run."""
    if not port_before:
        return listen(host, port, "rollout.serve")
    try:
        return listen(host, port_before, "rollout.serve")
    except SettingError as error:
        if port:
            raise HeadraceError(str(error)) from error  # this process is started again, and tries again
        return listen(host, 0, "rollout.serve")


def _port_before(file: Path) -> int:
    """The port of the front before this one; 0 if that is not known."""
    with suppress(OSError, ValueError, KeyError, IndexError):
        return int(json.loads(file.read_text())["url"].rpartition(":")[2])
    return 0
