"""A script of a client of the Tinker API that goes on whatever happens to the server, as the SDK does, and servers that may be killed."""

import http.client
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from . import forks
from .closing import at_end
from .polling import wait_for
from .tinker_client import PATIENCE_S, Client, sample_body

SERVER = """
import json
import sys
from pathlib import Path
from msgspec.structs import replace
from headrace.comm.recipe import CheckpointSettings, GeneratorSettings, ModelSettings, Recipe
from headrace.launch.serving.tinker.server import TinkerOptions, TinkerServer

model, folder, port, every, file, options = sys.argv[1:]
recipe = Recipe(model=ModelSettings(path=model, dtype="float32"), checkpoint=CheckpointSettings(every=int(every)))
recipe = replace(recipe, generator=GeneratorSettings(max_running=4))
server = TinkerServer(recipe, TinkerOptions(folder=Path(folder), port=int(port), **json.loads(options)))
server.start()
new = Path(file + ".new")
new.write_text(str(server.http.port))
new.rename(file)
server.run()
"""


class KilledServer:
    """A server in a process of its own, which may be killed and started again on its port."""

    def __init__(self, model: Path, folder: Path, every: int = 2, **options: Any) -> None:
        """every: updates between two checkpoints. options: those of `TinkerOptions`."""
        self.folder = folder
        self._options = json.dumps({"name": "tiny", **options})
        self._model = model
        self._every = every
        self._ready = folder.with_name(f"{folder.name}.port")
        self.port = 0
        self.start()
        at_end(self.kill)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._ready.unlink(missing_ok=True)
        given = (self._model, self.folder, self.port, self._every, self._ready, self._options)
        self.process = forks.start(SERVER, given)
        wait_for(self._ready.exists, self.process.is_alive, lambda: "no port", patience_s=PATIENCE_S)
        self.port = int(self._ready.read_text())

    def kill(self) -> None:
        """As `kill -9`."""
        if self.process.exitcode is None:
            assert self.process.pid is not None
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(PATIENCE_S)

    def restart(self) -> None:
        """Kill it and start it again."""
        self.kill()
        self.start()


class PatientClient(Client):
    """A client that asks again while the server cannot be reached."""

    def ask(self, path: str, body: Any = None, method: str = "", kind: str = "application/json") -> tuple[int, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                status, answer = super().ask(path, body, method, kind)
            except (OSError, http.client.HTTPException):
                status = 0
                answer = None
            if 0 < status < 500:
                return status, answer
            assert time.monotonic() < deadline, answer
            time.sleep(0.05)

    def result(self, first: Any) -> Any:
        """The result of a request; None for samples that are lost."""
        while True:
            status, answer = self.ask("retrieve_future", {"request_id": first["request_id"]})
            if status == 410:
                return None
            assert status == 200, answer
            if not isinstance(answer, dict) or answer.get("type") != "try_again":
                return answer

    def sample(self, sampler: str, number: int) -> bytes:
        """Samples by a seed, whatever becomes of the server."""
        for number_of_try in range(1000):
            body = sample_body(sampler, 1000 * number_of_try + number, params={"seed": number, "max_tokens": 6})
            found = self.result(self.get("asample", body))
            if found is not None:
                assert isinstance(found, bytes), found
                return found
        raise AssertionError("it was lost again and again")


def script(client: PatientClient, num_steps: int = 8) -> list[Any]:
    """Train and sample; returns all results, which depend on each other."""
    model = client.begin()
    number = 0
    found: list[Any] = []
    first = ""
    for step in range(num_steps):
        sampler = client.sampler(model, number + 1, step)
        first = first or sampler
        drawn = client.sample(sampler, step)
        weights = [1.0 + byte / 256 for byte in drawn[-2:]]
        losses = [client.loss(model, number + 2 + part, weight) for part, weight in enumerate(weights)]
        update = client.step(model, number + 4)
        found += [drawn, *(client.result(each) for each in losses), client.result(update)]
        assert all("error" not in each for each in found if isinstance(each, dict)), found
        number += 4
        if step == num_steps // 2:
            number += 1
            saved = client.get("save_weights", {"model_id": model, "seq_id": number, "path": "half"})
            found.append(client.result(saved)["path"].rpartition("/")[2])
        if step == num_steps - 2:
            number += 1
            path = f"tinker://{model}/weights/half"
            loaded = client.get("load_weights", {"model_id": model, "seq_id": number, "path": path, "optimizer": True})
            found.append(client.result(loaded)["type"])
    found.append(client.sample(first, num_steps))
    return found
