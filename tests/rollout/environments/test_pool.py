"""Environments run in processes of their own: hundreds wait in one, and a fault costs its own trajectory."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.comm.errors import SettingError
from headrace.comm.recipe import EnvironmentSettings
from headrace.rollout.environments.base import Episode
from headrace.rollout.environments.pool import EnvironmentCall, EnvironmentPool

ENVIRONMENT = """
import asyncio, contextlib, os, stat, time

class Counter:
    async def reset(self, prompt, **row):
        self.turns = []
        return " go"

    async def step(self, completion):
        self.turns.append(completion)
        if completion == "wait":
            await asyncio.sleep(0.3)
        if completion == "hang":
            await asyncio.sleep(1000)
        if completion == "block":
            time.sleep(1000)
        if completion == "process":
            return str(os.getpid()), 0.0, True
        if completion == "die":
            os._exit(3)
        if completion == "environment":
            return " ".join(name for name in os.environ if name.startswith("HEADRACE_")), 0.0, True
        if completion == "fork" and os.fork() == 0:
            return "from the child", 9.0, True
        if completion == "raise":
            raise ValueError("no such turn: \\ud83d")
        if completion.startswith("stray "):
            for number in range(3, 20):
                with contextlib.suppress(OSError):
                    if stat.S_ISFIFO(os.fstat(number).st_mode):
                        os.write(number, completion.removeprefix("stray ").encode() + b"\\n")
        return "+".join(self.turns), 0.5, completion == "end"

class Threaded(Counter):
    def reset(self, prompt, **row):
        self.turns = []
        return " go"

    def step(self, completion):
        self.turns.append(completion)
        time.sleep(1000 if completion == "hang" else 0)
        return "+".join(self.turns), 0.5, False

class Kept(Counter):
    async def state(self):
        return {"turns": self.turns}

    async def restore(self, state):
        self.turns = state["turns"]

class Deep(Kept):
    async def state(self):
        deep = []
        for _ in range(900 if "deep" in self.turns else 0):
            deep = [deep]
        return deep

class Numbered(Counter):
    async def reset(self, prompt, **row):
        return row.get("observation")

class Random(Counter):
    async def step(self, completion):
        return str(time.monotonic()), 0.0, False
"""
LOGGED = """
import asyncio, threading
from pathlib import Path

class Logged:
    number = 0

    def __init__(self):
        Logged.number += 1
        self.name = f"{Path(__file__).stem} {Logged.number}"
        self.log("made")

    def log(self, event):
        with Path(__file__).with_suffix(".log").open("a") as file:
            file.write(f"{event} {self.name}\\n")

    async def reset(self, prompt, fails=False, **row):
        if fails:
            raise ValueError("no such room")

    async def step(self, completion):
        if completion == "hang":
            await asyncio.sleep(1000)
        if completion == "wait":
            await asyncio.sleep(0.2)
        if completion == "raise":
            raise ValueError("no such turn")
        return completion, 0.0, False

    async def close(self):
        self.log("closed")
        if self.name.endswith(" 1"):
            raise ValueError("it does not close")
"""
MakePool = Callable[..., EnvironmentPool]


@pytest.fixture
def pool(tmp_path: Path):
    """Makes a pool for a class of `ENVIRONMENT`; closes it at the end."""
    file = tmp_path / "environments.py"
    file.write_text(ENVIRONMENT)
    pools: list[EnvironmentPool] = []

    def make(name: str = "Counter", timeout_s: float = 60.0, workers: int = 1) -> EnvironmentPool:
        settings = EnvironmentSettings(path=f"{file}:{name}", timeout_s=timeout_s, workers=workers)
        pools.append(EnvironmentPool(settings).start())
        return pools[-1]

    yield make
    for each in pools:
        each.close()


def ask(pool: EnvironmentPool, *turns: list[str], **episode: object) -> list[EnvironmentCall]:
    """The answers to trajectories with these turns, in their order."""
    for number, completions in enumerate(turns):
        observations = ["+".join(completions[: i + 1]) for i in range(len(completions) - 1)]
        transcript = {"prompt": "p go", "completions": completions, "observations": observations} | episode
        pool.submit(EnvironmentCall(number, number, {"prompt": "p"}, Episode(**transcript)))  # pyright: ignore[reportArgumentType]
    done: list[EnvironmentCall] = []
    deadline = time.monotonic() + 240
    while len(done) < max(1, len(turns)) and time.monotonic() < deadline:
        done += pool.finished()
        time.sleep(0.002)
    return sorted(done, key=lambda call: call.number)


def test_an_environment_answers_its_reset_and_its_turns(pool: MakePool):
    counter = pool()
    assert ask(counter, [])[0].step == (" go", 0.0, False)
    assert ask(counter, ["a"])[0].step == ("a", 0.5, False)
    assert ask(counter, ["a", "end"])[0].step == ("a+end", 0.5, True)


def test_an_environment_inherits_neither_the_runs_secret_nor_its_store(pool: MakePool, monkeypatch: pytest.MonkeyPatch):
    for name in ("HEADRACE_SECRET", "HEADRACE_STORE", "HEADRACE_OTHER"):
        monkeypatch.setenv(name, "x")
    found = ask(pool(), ["environment"])[0].step
    names = set(str(found[0]).split()) if found is not None else set[str]()
    assert "HEADRACE_OTHER" in names and not names & {"HEADRACE_SECRET", "HEADRACE_STORE"}


def test_hundreds_of_environments_wait_at_the_same_time_in_one_process(pool: MakePool):
    counter = pool()
    ask(counter, *[[]] * 300)
    started = time.monotonic()
    done = ask(counter, *[["wait"]] * 300)
    assert all(call.step.observation == "wait" for call in done)
    assert time.monotonic() - started < 0.5 * 300 * 0.3, "they waited one after the other"


@pytest.mark.parametrize("workers", [1, 2])
def test_the_environments_are_shared_by_the_workers(pool: MakePool, workers: int):
    done = ask(pool(workers=workers), *[["process"]] * 6)
    assert len({str(call.step.observation) for call in done}) == workers


@pytest.mark.parametrize("kind", ["Counter", "Threaded"])
def test_a_call_that_hangs_costs_its_trajectory_alone(pool: MakePool, kind: str):
    counter = pool(kind, timeout_s=2.0)
    hung, *others = ask(counter, ["hang"], *[["a"]] * 9)
    assert "environment.timeout_s=2" in hung.failure
    assert [call.step.observation for call in others] == ["a"] * 9 and not any(call.failure for call in others)


def test_a_call_that_blocks_the_event_loop_costs_its_trajectory_alone(pool: MakePool):
    blocked, *others = ask(pool(timeout_s=2.0), ["a", "block"], *[["a", "wait"]] * 9)
    assert "blocks the other environments" in blocked.failure
    assert [call.step.observation for call in others] == ["a+wait"] * 9


def test_a_call_that_kills_the_process_costs_its_trajectory_alone(pool: MakePool):
    killer, raiser, *others = ask(pool(), ["a", "die"], ["raise"], *[["a", "wait"]] * 9)
    assert "process ended" in killer.failure and "ValueError: no such turn: ?" in raiser.failure
    assert [call.step.observation for call in others] == ["a+wait"] * 9


@pytest.mark.parametrize(
    "stray",
    [
        "7",
        '{"id": "x"}',
        '{"id": 2}',
        '{"id": 2, "error": 7}',
        '{"id": 2, "observation": 7, "reward": 0, "done": false, "state": null}',
        '{"id": 2, "observation": "x", "reward": [], "done": false, "state": null}',
    ],
)
def test_output_on_the_descriptor_of_the_answers_costs_one_trajectory(pool: MakePool, stray: str):
    counter = pool()
    assert ask(counter, ["a"])[0].step.observation == "a"
    assert ask(counter, [f"stray {stray}"])[0].failure
    assert ask(counter, ["a"])[0].step.observation == "a"


def test_a_forked_child_cannot_answer_for_its_environment(pool: MakePool):
    counter = pool()
    assert [ask(counter, ["fork"])[0].step.observation for _ in range(4)] == ["fork"] * 4


def test_a_state_that_is_nested_too_deeply_costs_its_trajectory(pool: MakePool):
    nested, plain = ask(pool("Deep"), ["deep"], ["a"])
    assert "nested lists or objects" in nested.failure and not plain.failure


@pytest.mark.parametrize("observation", [7, [{"role": "user", "content": "a message"}]])
def test_a_reset_that_does_not_fit_the_prompt_costs_its_trajectory(pool: MakePool, observation: object):
    numbered = pool("Numbered")
    assert not ask(numbered, [])[0].failure
    numbered.submit(EnvironmentCall(1, 1, {"prompt": "p", "observation": observation}, Episode("p")))
    assert "for a prompt that is text" in ask(numbered)[0].failure


def test_an_environment_is_built_again_from_its_transcript(pool: MakePool):
    assert ask(pool(), ["a", "b", "c"])[0].step.observation == "a+b+c"


def test_an_environment_with_a_state_is_restored_and_its_steps_are_not_repeated(pool: MakePool):
    (call,) = ask(pool("Kept"), ["a", "b"], state={"turns": ["from elsewhere"]})
    assert call.step.observation == "from elsewhere+b" and call.state == {"turns": ["from elsewhere", "b"]}


def test_an_environment_that_answers_otherwise_the_second_time_fails_its_trajectory(pool: MakePool):
    random, other = ask(pool("Random"), ["a", "b"], ["a"])
    assert "give it `state` and `restore`" in random.failure and not other.failure


def test_every_environment_that_was_made_is_closed_once(tmp_path: Path):
    (tmp_path / "logged.py").write_text(LOGGED)
    pool = EnvironmentPool(EnvironmentSettings(path=f"{tmp_path / 'logged.py'}:Logged", timeout_s=2.0)).start()

    def ask_one(number: int, *turns: str, fails: bool = False) -> None:
        row = {"prompt": "p", "fails": fails}
        episode = Episode("p", completions=list(turns), observations=list(turns[:-1]))
        pool.submit(EnvironmentCall(number, number, row, episode))

    def answered(count: int) -> dict[int, str]:
        """The failures of so many calls, by trajectory."""
        done: list[EnvironmentCall] = []
        deadline = time.monotonic() + 60
        while len(done) < count and time.monotonic() < deadline:
            done += pool.finished()
            time.sleep(0.002)
        assert len(done) == count
        return {call.number: call.failure for call in done}

    for number in range(8):
        ask_one(number)
    assert not any(answered(8).values())
    ask_one(1, "raise")
    ask_one(2, "hang")
    ask_one(3, "wait")
    pool.drop(3)  # it goes during its call
    ask_one(4, "a", "b")  # it comes back at a later turn than it went at
    ask_one(5)  # it comes back at its prompt
    ask_one(6, "wait")
    pool.drop(6)
    ask_one(6, "c")  # it comes back during its call
    ask_one(8, fails=True)
    ask_one(9, "other", "raise")
    failures = answered(9)
    assert {number for number, failure in failures.items() if failure} == {1, 2, 8, 9}
    pool.drop(7)
    pool.close()
    events = [line.split(" ", 1) for line in (tmp_path / "logged.log").read_text().splitlines()]
    made, closed = ([name for event, name in events if event == wanted] for wanted in ("made", "closed"))
    assert len(made) == 8 + 5 and sorted(closed) == sorted(made)


def test_an_environment_that_always_fails_is_a_mistake_in_the_settings(pool: MakePool):
    with pytest.raises(SettingError, match=r"environment\.path: .* fails on every trajectory: .*no such turn"):
        ask(pool(), ["raise"], ["raise"], ["raise"])


def test_a_file_that_cannot_be_loaded_is_a_mistake_in_the_settings(pool: MakePool):
    with pytest.raises(SettingError, match=r"environment\.path: .* cannot be loaded: .*has no Missing"):
        ask(pool("Missing"), [])
