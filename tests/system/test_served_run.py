"""A run whose rollouts answer HTTP requests while they train: clients of the `openai` package, and deaths on the way."""

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
from support.closing import at_end
from support.job import Job, MakeJob, assert_account_adds_up, child_of

from headrace.rollout import Engine, SamplingParams
from headrace.rollout.serving.server import listen

NUM_CLIENTS = 8
TOKENS = 120
PROMPT = "abcdefgh"
SAME_WEIGHTS: dict[str, Any] = {"optimizer__lr": 0, "generator__exact": "true"}
"""Every version has the weights of the policy that the run begins with."""


def url_of(run: Job) -> str:
    """The address of the run's front, once it answers."""
    file = run.dir / "serve.json"
    run.until(file.exists)
    url = json.loads(file.read_text())["url"]
    run.until(lambda: is_there(url))
    return url


def is_there(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return answer.status == 200
    except OSError:
        return False


def client_of(url: str) -> openai.OpenAI:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    at_end(client.close)
    return client


class Client(threading.Thread):
    """Asks for a few streams, one after the other."""

    def __init__(self, url: str, number: int, num_requests: int) -> None:
        super().__init__(name=f"client {number}", daemon=True)
        self.seeds = [100 * number + index for index in range(num_requests)]
        self.tokens: dict[int, list[int]] = {}
        self.versions: dict[int, list[int]] = {}
        self.error: Exception | None = None
        self.began = threading.Event()
        self._client = client_of(url)

    def run(self) -> None:
        try:
            for seed in self.seeds:
                self._ask(seed)
        except Exception as error:  # noqa: BLE001 - the test raises it
            self.error = error

    def _ask(self, seed: int) -> None:
        stream = self._client.completions.create(
            model="run", prompt=PROMPT, max_tokens=TOKENS, seed=seed, stream=True,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )  # fmt: skip
        self.tokens[seed], self.versions[seed] = [], []
        for chunk in stream:
            choice: Any = chunk.choices[0]
            self.tokens[seed] += choice.token_ids
            self.versions[seed] += choice.weight_version
            self.began.set()


def ask_all(url: str, num_requests: int, meanwhile: Callable[[], None] = lambda: None) -> list[Client]:
    """Let all clients ask; `meanwhile` is called once each of them has tokens."""
    clients = [Client(url, number, num_requests) for number in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        assert client.began.wait(120), client.error
    meanwhile()
    for client in clients:
        client.join(240)
        assert not client.is_alive() and client.error is None, client.error
    return clients


def assert_engines_tokens(policy: Path, clients: list[Client]) -> None:
    engine = Engine(policy, exact=True)
    seeds = [seed for client in clients for seed in client.seeds]
    prompt = [engine.text.encode(PROMPT)] * len(seeds)
    params = [SamplingParams(max_new_tokens=TOKENS, seed=seed, ignore_eos=True) for seed in seeds]
    expected = dict(zip(seeds, engine.generate(prompt, params), strict=True))
    for client in clients:
        for seed in client.seeds:
            assert client.tokens[seed] == expected[seed].token_ids, f"{client.name}, seed {seed}"
            assert client.versions[seed] == sorted(client.versions[seed]) and len(client.versions[seed]) == TOKENS


def test_clients_get_the_engines_tokens_while_the_run_trains_and_a_rollout_is_killed(job: MakeJob, tmp_path: Path):
    run = job(rollout__serve=0, run__steps=100000, **SAME_WEIGHTS)
    run.start()
    url = url_of(run)
    run.wait_for_step(1)

    def kill() -> None:
        os.kill(child_of(run, "rollout-0"), signal.SIGKILL)

    clients = ask_all(url, 3, kill)
    assert_engines_tokens(tmp_path / "llama", clients)
    versions = {version for client in clients for each in client.versions.values() for version in each}
    assert len(versions) > 1, "the weights changed meanwhile"
    step = len(run.metrics())
    run.wait_for_step(step + 2)
    (model,) = client_of(url).models.list().data
    assert model.id == "run" and (model.model_extra or {})["weight_version"] >= max(versions)
    run.signal(signal.SIGINT)
    code, output = run.end()
    assert code == 130 and f"the rollouts answer requests at {url}/v1" in output, output
    assert_account_adds_up(run)
    summary = run.summary()
    assert summary["tokens"]["holds"]
    assert summary["tokens"]["served"] > 2 * NUM_CLIENTS * TOKENS, "but for what the dead one had not reported"
    assert any(line.get("tokens/served") for line in run.metrics())
    assert not (run.dir / "serve.json").exists()


def test_the_run_goes_on_without_its_front_which_comes_back_at_its_port(job: MakeJob, tmp_path: Path):
    run = job(rollout__serve=0, run__steps=100000, **SAME_WEIGHTS)
    run.start()
    url = url_of(run)
    run.wait_for_step(1)
    pid = child_of(run, "front-0")
    open_one = Client(url, 1, 1)
    open_one.start()
    assert open_one.began.wait(120)
    os.kill(pid, signal.SIGKILL)
    open_one.join(60)
    assert open_one.error is not None, "its connection ended"
    run.until(lambda: "front was ended by SIGKILL" in run.console.read_text())
    run.wait_for_step(len(run.metrics()) + 1)
    assert url_of(run) == url
    assert_engines_tokens(tmp_path / "llama", ask_all(url, 1))
    last = Client(url, 3, 200)
    last.start()
    assert last.began.wait(120)
    run.signal(signal.SIGINT)
    code, output = run.end()
    assert code == 130, output
    last.join(60)
    assert isinstance(last.error, openai.APIError) and "the run has ended (interrupted)" in str(last.error)
    assert_account_adds_up(run)
    assert run.summary()["tokens"]["holds"]


def test_a_port_that_is_taken_ends_the_start_with_the_setting(job: MakeJob):
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        code, output = job(rollout__serve=port).start().end()
    assert code == 2 and f"rollout.serve=127.0.0.1:{port}: Address already in use; port 0 takes a free one" in output, (
        output
    )


def test_an_address_beyond_this_machine_needs_a_key(job: MakeJob):
    run = job(rollout__serve="0.0.0.0:0")
    code, output = run.start().end()
    assert code == 2 and "rollout.serve: 0.0.0.0" in output and "HEADRACE_API_KEY" in output
