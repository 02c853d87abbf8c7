"""Answers over HTTP beside `Engine.generate`: the CPU time of a token, with many clients at a time, which are another process.

`headrace serve` is this process. A run is one of its own, whose trajectories are those of agents that never come: so its rollout only
answers. All draw the same tokens: the requests have prompts of token ids and seeds. Idle processes of a run take CPU time, too; it is
measured before and after the requests, and left out.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from support.job import process_of

from headrace.comm.disk import say
from headrace.launch.config.load import read_recipe
from headrace.launch.processes.child import print_message
from headrace.rollout import SamplingParams
from headrace.rollout.serving.access import SERVE_FILE
from headrace.rollout.serving.local_server import LocalServer, ServeOptions

from .harness import ENVIRONMENT, PATIENCE_S, Measurement, Options
from .serving_clients import prompt_of

_IDLE_S = 3.0
_END_S = 60.0
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Spent:
    """CPU seconds of the processes that answer, and of the engine's thread among them."""

    all_s: float
    engine_s: float


def serving(name: str, options: Options) -> list[Measurement]:
    """Microseconds of CPU for a token of whole answers and of streams, and their ratio to `Engine.generate`."""
    if options.policy is None:
        print_message(f"{name} is left out: name a model by --policy")
        return []
    torch.set_num_threads(1)
    recipe = read_recipe(None, [f"model.path={options.policy}", "model.dtype=float32"])
    server = LocalServer(recipe, 0, ServeOptions("policy"))
    server.start()
    try:
        generated = _measured(server, lambda: _generate(server, options))
        found = {
            "serving": _measured(server, lambda: _serve(server, options, streams=False)),
            "serving-stream": _measured(server, lambda: _serve(server, options, streams=True)),
        }
    finally:
        server.close()
    with _run(options.policy, options) as run:
        found |= {"serving-run": run.answer(streams=False), "serving-run-stream": run.answer(streams=True)}
    scale = 1e6 / (options.clients * options.tokens)
    return [
        Measurement(row, "Engine.generate", seconds * scale, "us/token", seconds / generated.engine_s)
        for way, spent in found.items()
        for row, seconds in ((way, spent.all_s), (f"{way}-engine", spent.engine_s))
    ]


# ------------------------------------------------------------------------------------------------------- `headrace serve`


def _measured(server: LocalServer, work: Callable[[], object]) -> Spent:
    """What a work of the server costs, without pages that an earlier one has computed."""
    server.engine.recompute()
    started = time.process_time(), time.thread_time()
    work()
    return Spent(time.process_time() - started[0], time.thread_time() - started[1])


def _generate(server: LocalServer, options: Options) -> None:
    clients = range(options.clients)
    params = [SamplingParams(options.tokens, seed=client, ignore_eos=True) for client in clients]
    server.engine.generate([prompt_of(client) for client in clients], params)


def _serve(server: LocalServer, options: Options, *, streams: bool) -> None:
    clients = _clients(server.http.port, options, streams=streams)
    end = time.monotonic() + PATIENCE_S
    server.run(lambda: clients.poll() is not None or time.monotonic() > end)
    _check(clients)


def _clients(port: int, options: Options, *, streams: bool) -> subprocess.Popen[bytes]:
    words = [str(port), json.dumps(streams), str(options.clients), str(options.tokens)]
    words = [sys.executable, "-m", "bench.serving_clients", *words]
    return subprocess.Popen(words, env=ENVIRONMENT)


def _check(clients: subprocess.Popen[bytes]) -> None:
    if clients.poll() != 0:
        clients.kill()
        clients.wait()
        raise RuntimeError("the clients failed")


# ------------------------------------------------------------------------------------------------------------------- runs


@dataclass(frozen=True, slots=True)
class _Run:
    """The processes of a run that answer."""

    options: Options
    port: int
    front: int
    rollout: int

    def answer(self, *, streams: bool) -> Spent:
        """What the clients' requests cost, beyond what the processes take while nobody asks."""
        first = self._idle()
        before = self._spent()
        started = time.monotonic()
        clients = _clients(self.port, self.options, streams=streams)
        clients.wait(PATIENCE_S)
        seconds = time.monotonic() - started
        after = self._spent()
        _check(clients)
        last = self._idle()
        all_s, engine_s = (
            end - begin - seconds * (idle + again) / 2
            for begin, end, idle, again in zip(before, after, first, last, strict=True)
        )
        return Spent(all_s, engine_s)

    def _idle(self) -> tuple[float, float]:
        """CPU seconds in a second without requests."""
        before = self._spent()
        started = time.monotonic()
        time.sleep(_IDLE_S)
        seconds = time.monotonic() - started
        after = self._spent()
        return (after[0] - before[0]) / seconds, (after[1] - before[1]) / seconds

    def _spent(self) -> tuple[float, float]:
        """CPU seconds so far: of both processes, and of the rollout's main thread, which has the engine."""
        both = sum(_cpu_s(Path(f"/proc/{pid}/stat")) for pid in (self.front, self.rollout))
        return both, _cpu_s(Path(f"/proc/{self.rollout}/task/{self.rollout}/stat"))


@contextmanager
def _run(policy: str, options: Options) -> Iterator[_Run]:
    """A run that only answers, until the body ends."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        data = Path(folder) / "prompts.jsonl"
        data.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(64)))
        settings = {
            "run.dir": run_dir, "run.steps": 1, "model.path": policy, "model.dtype": "float32", "data.path": data,
            "reward.path": "", "environment.path": "serve", "rollout.serve": 0, "roles.rollout": 1,
            "generator.max_running": options.clients, "sampling.max_new_tokens": options.tokens,
        }  # fmt: skip
        words = [f"{name}={value}" for name, value in settings.items()]
        environment = {**os.environ, **ENVIRONMENT}
        console = Path(folder) / "console"
        with console.open("w") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "headrace", "run", *words], stdout=stream, stderr=stream, env=environment
            )
        try:
            end = time.monotonic() + PATIENCE_S
            while not (run_dir / SERVE_FILE).exists():
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the run did not start: {console.read_text()}")
                time.sleep(0.1)
            port = int(json.loads((run_dir / SERVE_FILE).read_text())["url"].rpartition(":")[2])
            run = _Run(options, port, process_of(run_dir, "front-0"), process_of(run_dir, "rollout-0"))
            _check_after(_clients(port, options, streams=False))  # what happens once
            yield run
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                say("the run did not end in time, and is killed")
                process.kill()
                process.wait()


def _check_after(clients: subprocess.Popen[bytes]) -> None:
    clients.wait(PATIENCE_S)
    _check(clients)


def _cpu_s(stat: Path) -> float:
    """CPU seconds of a process or thread with its system calls."""
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S
