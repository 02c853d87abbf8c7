"""The front of a run in memory: its rollouts answer HTTP requests beside all else that they do."""

import json
import math
import threading
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from support.served import Reply, Served
from support.system import TURNS, System

from headrace.comm.clock import REAL_TIME
from headrace.comm.errors import HeadraceError, SettingError
from headrace.relay.hub import repacking
from headrace.relay.journal.events import Received
from headrace.rollout import Engine, SamplingParams
from headrace.rollout.generators import builtin
from headrace.rollout.generators.base import GeneratorProfile
from headrace.rollout.generators.builtin import BuiltinGenerator
from headrace.rollout.serving import run_front
from headrace.rollout.serving.access import SERVE_FILE, serve_address
from headrace.rollout.serving.served_side import ServedSide
from headrace.rollout.serving.server import listen

PROMPT = [5, 6, 7, 8]
ENDLESS = 100_000
"""Steps of a run that the test ends."""
SAME_WEIGHTS = {"optimizer.lr": 0, "generator.exact": "true"}


class Fronted(System):
    """A run with a front, and clients of it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **{"rollout.serve": "0", "run.steps": ENDLESS} | settings)
        self.policy = folder / "llama"

    def serve(self, num_rollouts: int = 2) -> "Fronted":
        self.start_all(num_rollouts)
        self.front = self.start("front", run_front.run)
        return self

    def client(self) -> Served:
        """A client, once the front has told its address."""
        file = self.dir / SERVE_FILE
        self.until(file.exists)
        url = json.loads(file.read_text())["url"]
        return Served(int(url.rpartition(":")[2]), None, None, None)  # pyright: ignore[reportArgumentType]

    def ask_all(self, num: int, tokens: int = 40, client: Served | None = None) -> list[Reply]:
        """Requests at the same time; request `i` has the seed `i`."""
        client = client or self.client()
        replies: dict[int, Reply] = {}

        def ask(seed: int) -> None:
            replies[seed] = client.ask("/inference/v1/generate", body(seed, tokens))

        threads = [threading.Thread(target=ask, args=[seed], daemon=True) for seed in range(num)]
        for thread in threads:
            thread.start()
        self.until(lambda: not any(thread.is_alive() for thread in threads))
        return [replies[seed] for seed in range(num)]

    def assert_engines_tokens(self, replies: list[Reply], tokens: int = 40) -> None:
        engine = Engine(self.policy, exact=True)
        for seed, reply in enumerate(replies):
            assert reply.status == 200, reply.body
            (choice,) = reply.body["choices"]
            (done,) = engine.generate([PROMPT], SamplingParams(max_new_tokens=tokens, seed=seed, ignore_eos=True))
            assert choice["token_ids"] == done.token_ids and len(choice["weight_version"]) == tokens

    def end(self, num_steps: int = 1) -> dict[str, Any]:
        """The summary of the run, which is interrupted after so many steps; nothing is lost."""
        self.until(lambda: self.num_steps() >= num_steps)
        self.interrupt()
        summary = self.wait()
        assert summary["accounting"]["holds"] and summary["tokens"]["holds"], summary
        assert summary["tokens"]["served"] > 0
        return summary


def body(seed: int, tokens: int) -> dict[str, Any]:
    return {"token_ids": PROMPT, "sampling_params": {"max_tokens": tokens, "seed": seed, "ignore_eos": True}}


def test_a_rollout_answers_while_it_trains(tmp_path: Path):
    system = Fronted(tmp_path, **SAME_WEIGHTS).serve()
    replies = system.ask_all(12)
    system.assert_engines_tokens(replies)
    summary = system.end(20)
    assert summary["tokens"]["served"] == 12 * 40
    assert summary["versions_per_trajectory"].keys() == {"1"}
    received = [event for event in system.events() if isinstance(event, Received)]
    assert len(received) > 2 and not any(event.num_unfinished for event in received)
    assert not (system.dir / SERVE_FILE).exists()


def test_a_long_request_sees_the_versions_go_by(tmp_path: Path):
    system = Fronted(tmp_path, **{"optimizer.lr": 1e-3}).serve(1)
    client = system.client()
    (reply,) = system.ask_all(1, 240, client)
    versions = reply.body["choices"][0]["weight_version"]
    assert len(versions) == 240 and versions == sorted(versions) and len({*versions}) > 2
    card = client.ask("/v1/models").body["data"][0]
    assert card["weight_version"] >= versions[-1] and card["id"] == "run" and card["max_model_len"] == 256
    system.end()


@pytest.mark.parametrize("schedule", ["sync", "one_step", "stream", "partial"])
def test_each_schedule_trains_as_it_would_without_requests(tmp_path: Path, schedule: str):
    system = Fronted(tmp_path, **SAME_WEIGHTS, **{"run.schedule": schedule}).serve()
    system.assert_engines_tokens(system.ask_all(6, 100), 100)
    system.end(10)


def test_an_environment_and_evaluations_go_on_beside_requests(tmp_path: Path):
    (tmp_path / "easy.jsonl").write_text("".join(f'{{"prompt": "easy {i}"}}\n' for i in range(3)))
    settings = {
        **SAME_WEIGHTS, **TURNS, "environment.path": f"{tmp_path / 'environments.py'}:Counter", "reward.path": "",
        "eval.path": tmp_path / "easy.jsonl", "eval.every": 2,
    }  # fmt: skip
    system = Fronted(tmp_path, **settings).serve()
    system.assert_engines_tokens(system.ask_all(6, 100), 100)
    summary = system.end(6)
    assert not summary["failures"] and summary["evaluations"]


@pytest.mark.slow
def test_trajectories_move_between_rollouts_and_requests_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(BuiltinGenerator, "profile", GeneratorProfile(16, math.inf))
    monkeypatch.setattr(repacking, "SLOWDOWN", math.inf)
    settings = {
        **SAME_WEIGHTS, "roles.rollout": 3, "sampling.max_new_tokens": 60,
        "sampling.temperature": 1.2, "repack.period_s": 0.05, "queue.lead": 4,
    }  # fmt: skip
    system = Fronted(tmp_path, **settings).serve(3)
    client = system.client()
    for _ in range(3):
        system.assert_engines_tokens(system.ask_all(3, 100, client), 100)
    assert system.end()["moved"] > 0


def test_all_ranks_of_a_replica_draw_the_tokens_of_a_request(tmp_path: Path):
    system = Fronted(tmp_path, **{"optimizer.lr": 0, "roles.rollout": 2, "rollout.tp": 2})
    system.start("shard", builtin.run)
    system.serve(1)
    for reply in system.ask_all(6, 60):
        assert reply.status == 200 and len(reply.body["choices"][0]["token_ids"]) == 60
    assert system.end(3)["tokens"]["served"] == 6 * 60


@pytest.mark.slow
def test_a_rollout_that_counts_as_dead_loses_no_request(tmp_path: Path):
    system = Fronted(tmp_path, **SAME_WEIGHTS).serve(2)
    client = system.client()
    replies: list[Reply] = []
    asking = threading.Thread(target=lambda: replies.extend(system.ask_all(6, 230, client)), daemon=True)
    asking.start()
    system.until(lambda: system.num_steps() > 3)
    system.rollouts[0].crash()  # its thread goes on, as a process that was only frozen would
    system.until(lambda: not asking.is_alive())
    system.assert_engines_tokens(replies, 230)
    system.interrupt()


def test_without_a_rollout_a_request_waits_and_then_gets_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_front, "TIMEOUT_S", 0.3)
    system = Fronted(tmp_path)
    system.start("front", run_front.run)
    reply = system.client().ask("/inference/v1/generate", body(1, 4))
    assert reply.status == 503 and reply.body["error"]["code"] == "no_rollout"
    assert "within 0.3 s" in reply.body["error"]["message"]


def test_the_end_of_the_run_ends_open_requests_with_that_reason(tmp_path: Path):
    system = Fronted(tmp_path).serve(1)
    client = system.client()
    replies: list[Any] = []
    prompts = {"prompt": [PROMPT] * 100, "max_tokens": 250, "ignore_eos": True}
    asking = threading.Thread(target=lambda: replies.append(client.ask("/v1/completions", prompts)), daemon=True)
    asking.start()
    system.until(lambda: system.num_steps() > 5)
    system.interrupt()
    asking.join(60)
    (reply,) = replies
    assert reply.status == 503 and reply.body["error"]["code"] == "run_ended"
    assert "the run has ended (interrupted)" in reply.body["error"]["message"]


class Plain(BuiltinGenerator):
    """An engine that does not show the tokens of unfinished trajectories."""

    can_stream = False


def test_an_engine_that_cannot_serve_is_refused():
    generator = Plain.__new__(Plain)
    with pytest.raises(SettingError, match="rollout.serve: this rollout.engine cannot"):
        ServedSide(None, generator, 4, REAL_TIME).check()  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0", ("127.0.0.1", 0)),
        ("8000", ("127.0.0.1", 8000)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("[::1]:81", ("::1", 81)),
    ],
)
def test_an_address_is_a_port_or_a_host_and_a_port(text: str, found: tuple[str, int]):
    assert serve_address(text) == found


@pytest.mark.parametrize("text", ["here", "::1:80", "host:", "70000", "-1", "1.5"])
def test_a_wrong_address_names_the_setting(text: str):
    with pytest.raises(SettingError, match=f"rollout.serve={text}"):
        serve_address(text)


def test_a_front_that_is_started_again_keeps_its_port_if_it_can(tmp_path: Path):
    def port_of(number: int, before: int) -> int:
        opened = run_front._listen("127.0.0.1", number, before)  # pyright: ignore[reportPrivateUsage]
        with opened:
            return opened.getsockname()[1]

    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert port_of(0, port) not in (0, port), "it is taken: another free one"
        with pytest.raises(HeadraceError, match="rollout.serve") as error:
            port_of(port, port)
        assert not isinstance(error.value, SettingError), "a restart does not end the run"
        with pytest.raises(SettingError):
            port_of(port, 0)
    assert port_of(0, port) == port


def test_requests_do_not_change_what_a_run_trains(tmp_path: Path):
    """With `sync` a step's rows depend on the seed alone: two runs train the same ones, bit for bit."""
    digests: list[str] = []
    num_served = 0
    for name, num_clients in (("alone", 0), ("asked", 4)):
        (tmp_path / name).mkdir()
        settings = {"run.schedule": "sync", "generator.exact": "true", "optimizer.lr": 1e-3, "run.steps": 8}
        system = Fronted(tmp_path / name, **settings)
        system.start("front", run_front.run)
        client = system.client()

        def ask(seed: int, client: Served = client) -> None:
            with suppress(OSError, HTTPException):  # the front ends with the run
                while client.ask("/inference/v1/generate", body(seed, 40)).status == 200:
                    pass

        clients = [threading.Thread(target=ask, args=[seed], daemon=True) for seed in range(num_clients)]
        for thread in clients:
            thread.start()
        summary = system.start_all(1).wait()
        for thread in clients:
            thread.join(60)
        digests.append(summary["digest"])
        num_served = summary["tokens"].get("served", 0)
    assert num_served > 40 and digests[0] == digests[1]
