"""`headrace serve` beside its engine: the CPU time of a token, with 64 clients at a time. The clients are another process.

Both draw the same tokens: the requests have prompts of token ids and seeds.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from headrace.launch.config.load import read_recipe
from headrace.launch.processes.child import print_message
from headrace.rollout import SamplingParams
from headrace.rollout.serving.local_server import LocalServer, ServeOptions

from .harness import ENVIRONMENT, PATIENCE_S, Measurement, Options
from .serving_clients import CLIENTS, TOKENS, prompt_of


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
        by_engine = _cpu_s(server, lambda: _generate(server))
        ways = {"serving": False, "serving-stream": True}
        found = {row: _cpu_s(server, lambda streams=streams: _serve(server, streams)) for row, streams in ways.items()}
    finally:
        server.close()
    scale = 1e6 / (CLIENTS * TOKENS)
    return [
        Measurement(row, "Engine.generate", spent * scale, "us/token", spent / by_engine)
        for row, spent in found.items()
    ]


def _cpu_s(server: LocalServer, work: Callable[[], object]) -> float:
    """CPU seconds of this process, without pages that an earlier round has computed."""
    server.engine.recompute()
    started = time.process_time()
    work()
    return time.process_time() - started


def _generate(server: LocalServer) -> None:
    params = [SamplingParams(TOKENS, seed=client, ignore_eos=True) for client in range(CLIENTS)]
    server.engine.generate([prompt_of(client) for client in range(CLIENTS)], params)


def _serve(server: LocalServer, streams: bool) -> None:
    words = [sys.executable, "-m", "bench.serving_clients", str(server.http.port), json.dumps(streams)]
    clients = subprocess.Popen(words, env=ENVIRONMENT)
    end = time.monotonic() + PATIENCE_S
    server.run(lambda: clients.poll() is not None or time.monotonic() > end)
    if clients.poll() != 0:
        clients.kill()
        raise RuntimeError("the clients failed")
