"""A plain agent: it claims samples of a run and answers them as a function says, in threads of its own."""

import http.client
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from support.served import Reply

PATIENCE_S = 60.0
ROOT = "/agents/v1/conversations"


@dataclass
class AgentClient:
    """Asks the routes of a front by plain HTTP."""

    port: int
    key: str = ""

    def ask(self, path: str, body: Any = None, method: str = "", **headers: str) -> Reply:
        """One request; `body` is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        given = {"Content-Type": "application/json"} if body is not None else {}
        given |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            raw = None if body is None else json.dumps(body)
            connection.request(method or ("GET" if body is None else "POST"), path, raw, given)
            answer = connection.getresponse()
            return Reply(answer.status, json.loads(answer.read()), {k.lower(): v for k, v in answer.headers.items()})
        finally:
            connection.close()

    def claim(self, **headers: str) -> Reply:
        """Claim a sample."""
        return self.ask(ROOT, method="POST", **headers)

    def call(self, conversation: Any, path: str, body: Any, **headers: str) -> Reply:
        """A call of the policy in a conversation."""
        return self.ask(f"{ROOT}/{conversation['id']}{path}", body, **headers)

    def end(self, conversation: Any, **outcome: Any) -> Reply:
        """End a conversation."""
        return self.ask(f"{ROOT}/{conversation['id']}/end", outcome)


@dataclass
class Agents:
    """Several agents at work, until the run ends or `stop`."""

    client: AgentClient
    play: Callable[[AgentClient, Any], dict[str, Any]]
    """Plays a claimed conversation; returns how it ends."""
    ended: list[Any] = field(default_factory=list)
    """The answers to the ends that were accepted."""
    problems: list[str] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)
    _is_over: threading.Event = field(default_factory=threading.Event)

    def start(self, number: int = 3) -> "Agents":
        """Begin."""
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(number)]
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        """Wait for the threads."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _work(self) -> None:
        while not self._is_over.is_set():
            try:
                claimed = self.client.claim()
                if claimed.status == 503:
                    continue
                if claimed.status != 200:
                    return
                if outcome := self.play(self.client, claimed.body):
                    answer = self.client.end(claimed.body, **outcome)
                    self.ended += [answer.body] if answer.status == 200 else []
            except (OSError, http.client.HTTPException):
                return  # the run has ended
            except Exception as error:  # noqa: BLE001 - the test shows it
                self.problems.append(repr(error))
                return
