"""Rewards run in processes of their own: no fault of the user's function ends the run."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.polling import wait_for

from headrace.comm.errors import SettingError
from headrace.comm.messages import GroupId
from headrace.comm.recipe import RewardSettings
from headrace.rollout.engine.sequence import Completion
from headrace.rollout.leased_row import LeasedRow
from headrace.rollout.rewards.pool import MAX_BATCH, RewardPool


@pytest.fixture
def pool(tmp_path: Path):
    """Makes a pool for a function's source; closes it at the end."""
    pools: list[RewardPool] = []

    def make(source: str, name: str = "reward", timeout_s: float = 120.0, **settings: Any) -> RewardPool:
        file = tmp_path / "rewards.py"
        file.write_text(source)
        path = settings.pop("path", f"{file}:{name}")
        pools.append(RewardPool(RewardSettings(path=path, timeout_s=timeout_s, **settings)).start())
        return pools[-1]

    yield make
    for each in pools:
        each.close()


def ends(pid: int) -> bool:
    """Whether a process ends within a minute."""
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not Path(f"/proc/{pid}").exists()


def sample(number: int, row: dict, response: str = "text") -> LeasedRow:
    """A finished sample of prompt `number` of the data."""
    done = Completion(number, [0], [1, 2], [0.0, 0.0], "stop", text=response)
    return LeasedRow(GroupId(0, number).row(0), 1, 0, row, done, response=response)


def score(pool: RewardPool, *rows: dict, completions: list[str] | None = None) -> list[LeasedRow]:
    for number, row in enumerate(rows):
        completion = completions[number] if completions else "text"
        pool.submit(sample(number, {"prompt": "p", **row}, completion))
    done: list[LeasedRow] = []
    deadline = time.monotonic() + 240
    while len(done) < len(rows) and time.monotonic() < deadline:
        done += pool.finished()
        time.sleep(0.005)
    return sorted(done, key=lambda item: item.row_id.number)


TRL = "def reward(prompts, completions, completion_ids, answer, **columns):\n"
MakePool = Callable[..., RewardPool]


def test_a_reward_inherits_neither_the_runs_secret_nor_its_store(pool: MakePool, monkeypatch: pytest.MonkeyPatch):
    for name in ("HEADRACE_SECRET", "HEADRACE_STORE", "HEADRACE_OTHER"):
        monkeypatch.setenv(name, "x")
    names = ["HEADRACE_OTHER", "HEADRACE_SECRET", "HEADRACE_STORE"]
    source = (
        f"import os\ndef reward(solution_str):\n    return float([name in os.environ for name in {names}] == [1, 0, 0])"
    )
    assert score(pool(source), {})[0].reward == 1.0


def test_trl_functions_get_the_columns_of_the_data(pool: MakePool):
    source = TRL + "    return [float(a == c) for a, c in zip(answer, completions)]\n"
    done = score(pool(source), {"answer": "x"}, {"answer": "y"}, completions=["x", "x"])
    assert [item.reward for item in done] == [1.0, 0.0]


def test_verl_functions_are_called_per_sample(pool: MakePool):
    source = "def reward(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str) + ground_truth\n"
    done = score(pool(source), {"ground_truth": 10}, completions=["abc"])
    assert done[0].reward == 13.0


@pytest.mark.parametrize(
    "row", [{"ground_truth": 10}, {"answer": 10}, {"reward_model": {"style": "rule", "ground_truth": 10}, "answer": 3}]
)
def test_verl_functions_get_the_ground_truth_of_verls_data_sets(pool: MakePool, row: dict):
    source = "def reward(data_source, solution_str, ground_truth, extra_info=None):\n    return ground_truth\n"
    assert score(pool(source), {"data_source": "d", **row})[0].reward == 10.0


def test_data_without_a_ground_truth_fails_a_verl_function(pool: MakePool):
    source = "def reward(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.0\n"
    assert "reward_model.ground_truth" in score(pool(source), {"data_source": "d"})[0].failure


def test_async_functions_are_awaited(pool: MakePool):
    source = "async def reward(prompts, completions, completion_ids, **columns):\n    return [2.5 for _ in prompts]\n"
    assert score(pool(source), {})[0].reward == 2.5


def test_printed_output_does_not_reach_the_answers(pool: MakePool):
    source = TRL + "    print('{\"rewards\": [9]}')\n    return [1.0 for _ in prompts]\n"
    assert score(pool(source), {"answer": 1})[0].reward == 1.0


STRAY = (
    "7",
    "[1]",
    "text",
    "[" * 5000,
    '{"id": "x"}',
    '{"rewards": [1]}',
    '{"id": 2}',
    '{"id": 2, "error": 7}',
    '{"id": 2, "rewards": 7, "info": [{}]}',
    '{"id": 2, "rewards": [1], "info": [{"metrics": 7}]}',
    '{"id": 2, "error": "an answer with both", "rewards": 7}',
)


@pytest.mark.parametrize("stray", STRAY)
def test_output_on_the_descriptor_of_the_answers_costs_one_reward(pool: MakePool, stray: str):
    """The user's code shares its process with that descriptor."""
    source = (
        "import os, stat\n"
        "def reward(solution_str, answer):\n"
        "    for number in range(3, 20):\n"
        "        try:\n"
        "            if answer and stat.S_ISFIFO(os.fstat(number).st_mode): os.write(number, (answer + chr(10)).encode())\n"
        "        except OSError: pass\n"
        "    return 1.0\n"
    )
    running = pool(source)
    assert score(running, {"answer": ""})[0].reward == 1.0
    assert score(running, {"answer": stray})[0].failure
    assert score(running, {"answer": ""})[0].reward == 1.0


def test_a_sample_that_no_question_can_hold_costs_one_reward(pool: MakePool):
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    rewards = pool(TRL + "    return [1.0 for _ in answer]\n")
    assert score(rewards, {"answer": 1})[0].reward == 1.0
    held, nested, plain = score(rewards, {"answer": 1}, {"answer": deep}, {"answer": 2})
    assert held.reward == plain.reward == 1.0 and "cannot be encoded as JSON" in nested.failure


def test_a_file_that_cannot_be_loaded_is_a_mistake_in_the_settings_at_once(pool: MakePool):
    with pytest.raises(SettingError, match=r"reward\.path: .* cannot be loaded: ZeroDivisionError.*rewards\.py:1"):
        score(pool("1 / 0\n"), {"answer": 1})


def test_a_file_that_cannot_be_loaded_again_costs_one_reward(pool: MakePool, tmp_path: Path):
    source = "import os\n" + TRL + "    return [1.0 if a else os._exit(3) for a in answer]\n"
    rewards = pool(source)
    assert score(rewards, {"answer": 1})[0].reward == 1.0
    assert score(rewards, {"answer": 0})[0].failure
    (tmp_path / "rewards.py").write_text("1 / 0\n")
    assert "ZeroDivisionError" in score(rewards, {"answer": 1})[0].failure
    (tmp_path / "rewards.py").write_text(source)
    assert score(rewards, {"answer": 1})[0].reward == 1.0


@pytest.mark.parametrize("note", ["deep(900)", "Bad()", "[float('nan')]"])
def test_a_note_that_is_no_json_costs_at_most_one_reward(pool: MakePool, note: str):
    source = (
        "def deep(n): return [deep(n - 1)] if n else []\n"
        "class Bad:\n    def __str__(self): raise OSError('no text')\n"
        f"def reward(solution_str, answer): return 1.0, {{'found': {note} if answer else 0}}\n"
    )
    running = pool(source)
    noted, plain = score(running, {"answer": 1}, {"answer": 0})
    assert plain.reward == 1.0 and (noted.reward == 1.0 or "rewards.py" in noted.failure or "Error" in noted.failure)


def test_a_process_that_cannot_be_started_at_one_moment_costs_one_reward(pool: MakePool, monkeypatch):
    source = "import os\ndef reward(solution_str, answer):\n    return 1.0 if answer else os._exit(3)\n"
    running = pool(source)
    assert score(running, {"answer": 1})[0].reward == 1.0
    assert score(running, {"answer": 0})[0].failure
    start, failures = subprocess.Popen, [1]

    def starts_later(*words: Any, **settings: Any) -> subprocess.Popen:
        if failures.pop() if failures else 0:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return start(*words, **settings)

    monkeypatch.setattr(subprocess, "Popen", starts_later)
    assert "cannot be started now" in score(running, {"answer": 1})[0].failure
    assert score(running, {"answer": 1})[0].reward == 1.0


def test_one_bad_trajectory_costs_only_itself(pool: MakePool):
    source = TRL + "    return [1.0 / a for a in answer]\n"
    done = score(pool(source), {"answer": 2}, {"answer": 0}, {"answer": 4})
    assert [item.reward for item in done] == [0.5, None, 0.25]
    assert "ZeroDivisionError" in done[1].failure
    assert "rewards.py:2" in done[1].failure


def test_half_of_a_surrogate_pair_in_a_note_or_an_error_becomes_a_question_mark(pool: MakePool):
    """Neither a row nor a message to the hub takes one."""
    source = (
        "def reward(solution_str, answer):\n    assert answer, 'no \\ud83d'\n    return 1.0, {'found': '\\ud83dé'}\n"
    )
    found, failed = score(pool(source), {"answer": 1}, {"answer": 0})
    assert found.info["extra"] == {"reward/found": "?é"} and "no ?" in failed.failure


def test_a_reward_of_none_is_a_failure(pool: MakePool):
    done = score(pool(TRL + "    return [a for a in answer]\n"), {"answer": None}, {"answer": 1})
    assert [item.reward for item in done] == [None, 1.0]
    assert "None" in done[0].failure


def test_none_for_the_first_trajectories_is_no_broken_function(pool: MakePool):
    rewards = pool(TRL + "    return [None if a is None else float(a) for a in answer]\n")
    done = [score(rewards, {"answer": answer})[0] for answer in (*[None] * 8, "1")]
    assert [item.reward for item in done] == [None] * 8 + [1.0]


def test_none_for_all_of_the_first_samples_is_a_function_without_a_return(pool: MakePool):
    rewards = pool(TRL + "    [float(a) for a in answer]\n    return [None for _ in answer]\n")
    score(rewards, *[{"answer": 1}] * 63)
    with pytest.raises(SettingError, match=r"returned None for all of the first 64 samples; is a `return` missing\?"):
        score(rewards, {"answer": 1})


def test_none_in_place_of_a_list_is_named(pool: MakePool):
    done = score(pool(TRL + "    [float(a) for a in answer]\n"), {"answer": 1})
    assert "reward returned None instead of a list of rewards; is a `return` missing?" in done[0].failure


def test_samples_of_few_prompts_without_a_reward_are_no_broken_function(pool: MakePool):
    rewards = pool(TRL + "    return [None if a is None else float(a) for a in answer]\n")
    prompts = [{"prompt": "p", "answer": None} for _ in range(3)]
    for number in range(99):
        rewards.submit(sample(number, prompts[number % 3]))
    deadline, done = time.monotonic() + 60, 0
    while done < 99 and time.monotonic() < deadline:
        done += len(rewards.finished())
    assert score(rewards, {"answer": 1})[0].reward == 1.0


def test_none_after_the_first_reward_never_counts_as_a_broken_function(pool: MakePool):
    rewards = pool(TRL + "    return [None if a is None else float(a) for a in answer]\n")
    done = score(rewards, {"answer": 1}, *[{"answer": None}] * 200)
    assert [item.reward for item in done] == [1.0] + [None] * 200


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e300"])
def test_a_reward_that_is_no_finite_number_of_32_bits_is_a_failure_with_its_value(pool: MakePool, value: str):
    done = score(pool(TRL + "    return [float(a) for a in answer]\n"), {"answer": 1}, {"answer": value})
    assert [item.reward for item in done] == [1.0, None]
    assert done[1].failure == f"the reward function returned {float(value)}"


def test_a_hung_call_ends_at_its_deadline_and_the_next_one_works(pool: MakePool):
    source = (
        "import time\n" + TRL + "    time.sleep(60 if answer[0] == 'hang' else 0)\n    return [1.0 for _ in prompts]\n"
    )
    rewards = pool(source, timeout_s=4.0)
    assert score(rewards, {"answer": "go"})[0].reward == 1.0
    assert "reward.timeout_s" in score(rewards, {"answer": "hang"})[0].failure
    assert score(rewards, {"answer": "go"})[0].reward == 1.0


def test_a_process_that_the_function_leaves_behind_does_not_hold_up_the_end(pool: MakePool):
    orphan = "    if os.fork() == 0:\n        os.closerange(0, 3)\n        time.sleep(8)\n        os._exit(0)\n"
    source = "import os, time\n" + TRL + orphan + "    return [1.0 for _ in prompts]\n"
    rewards = pool(source, timeout_s=3.0)
    assert score(rewards, {"answer": "go"})[0].reward == 1.0
    rewards.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reward-")]


def test_everything_that_a_hung_call_has_started_ends_with_it(pool: MakePool, tmp_path: Path):
    start = "    child = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
    note = f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n    child.wait()\n"
    rewards = pool("import subprocess\n" + TRL + start + note, timeout_s=4.0)
    assert "reward.timeout_s" in score(rewards, {"answer": 1})[0].failure
    assert ends(int((tmp_path / "pid").read_text()))


def test_a_forked_child_that_holds_the_pipes_does_not_hold_up_the_next_call(pool: MakePool):
    fork = "    if answer[0] == 'fork':\n        os.fork() or time.sleep(1000)\n        time.sleep(1000)\n"
    rewards = pool("import os, time\n" + TRL + fork + "    return [1.0 for _ in prompts]\n", timeout_s=4.0)
    for _ in range(2):
        assert "reward.timeout_s" in score(rewards, {"answer": "fork"})[0].failure
        assert score(rewards, {"answer": "go"})[0].reward == 1.0


def test_a_forked_child_cannot_answer_for_its_parent(pool: MakePool):
    fork = "    if os.fork() == 0:\n        return [77.0 for _ in prompts]\n    os.wait()\n"
    rewards = pool("import os\n" + TRL + fork + "    return [1.0 for _ in prompts]\n")
    assert [score(rewards, {"answer": "x"})[0].reward for _ in range(4)] == [1.0] * 4


def test_a_stopped_process_does_not_hold_up_a_large_question(pool: MakePool, tmp_path: Path):
    note = f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
    stop = "    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGSTOP))\n"
    stop += "    answer[0] == 'stop' and signal.setitimer(signal.ITIMER_REAL, 0.01)\n"
    source = "import os, signal\n" + TRL + note + stop + "    return [1.0 for _ in prompts]\n"
    rewards = pool(source, timeout_s=3.0)
    assert score(rewards, {"answer": "stop"})[0].reward == 1.0
    stat = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    is_stopped = lambda: stat.read_text().rpartition(")")[2].split()[0] == "T"
    wait_for(is_stopped, stat.exists, lambda: "", patience_s=60, interval_s=0.01)
    assert "reward.timeout_s" in score(rewards, {"answer": "x" * 1_000_000})[0].failure
    assert score(rewards, {"answer": "go"})[0].reward == 1.0


OWNER = """
import sys, time
from headrace.comm.recipe import RewardSettings
from headrace.rollout.rewards.pool import RewardPool
from headrace.comm.messages import GroupId
from headrace.rollout.leased_row import LeasedRow
rewards = RewardPool(RewardSettings(path=sys.argv[1] + ":reward")).start()
rewards.submit(LeasedRow(GroupId(0, 0).row(0), 1, 0, {"prompt": "p", "answer": 1}, response="text"))
time.sleep(1000)
"""


def test_a_killed_rollout_takes_its_reward_processes_with_it(tmp_path: Path):
    file, pids = tmp_path / "rewards.py", tmp_path / "pids"
    note = f"    child = subprocess.Popen(['sleep', '1000'])\n    open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}} \\n')\n"
    file.write_text("import os, subprocess, time\n" + TRL + note + "    time.sleep(1000)\n")
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(file)])
    try:
        deadline = time.monotonic() + 120
        while not (pids.exists() and "\n" in pids.read_text()) and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait(60)
    assert all(ends(int(pid)) for pid in pids.read_text().split())


def test_a_crashing_process_costs_one_reward(pool: MakePool):
    source = "import os\n" + TRL + "    answer[0] == 'die' and os._exit(7)\n    return [1.0 for _ in prompts]\n"
    rewards = pool(source)
    assert score(rewards, {"answer": "go"})[0].reward == 1.0
    assert "ended" in score(rewards, {"answer": "die"})[0].failure
    assert score(rewards, {"answer": "go"})[0].reward == 1.0


def test_a_function_that_fails_from_the_start_is_a_mistake_in_the_settings(pool: MakePool):
    rewards = pool(TRL + "    raise RuntimeError('no such verifier')\n")
    with pytest.raises(SettingError, match=r"reward\.path.*no such verifier"):
        for _ in range(5):
            score(rewards, {"answer": 1})


@pytest.mark.parametrize("rewards", ["[1.0]", "[1.0] * (len(prompts) + 1)", "[]"])
def test_a_wrong_number_of_rewards_ends_the_run_at_once(pool: MakePool, rewards: str):
    """One for three completions is not one for each."""
    broken = pool(TRL + f"    return [1.0] * len(prompts) if answer[0] == 'right' else {rewards}\n")
    assert score(broken, {"answer": "right"})[0].reward == 1.0
    with pytest.raises(SettingError, match=r"reward\.path.*returned [0-4] rewards for [123] completions"):
        score(broken, *[{"answer": "wrong"}] * 3)


def test_chat_prompts_get_chat_completions(pool: MakePool):
    source = (
        "def reward(prompts, completions, completion_ids):\n    return [len(c[0]['content']) for c in completions]\n"
    )
    row = {"prompt": [{"role": "user", "content": "hi"}]}
    assert score(pool(source), row, completions=["four"])[0].reward == 4.0


def test_the_reward_is_the_weighted_sum_of_functions_and_each_part_is_noted(pool: MakePool, tmp_path: Path):
    source = (
        "def first(answer):\n    return [a for a in answer]\ndef second(solution_str):\n    return len(solution_str)\n"
    )
    names = [f"{tmp_path / 'rewards.py'}:first", f"{tmp_path / 'rewards.py'}:second", "gsm8k"]
    rewards = pool(source, path=tuple(names), weights=(2.0, 0.5, 10.0))
    done = score(rewards, {"answer": 3}, {"answer": 4}, completions=["it is 3", "five"])
    assert [item.reward for item in done] == [2 * 3 + 0.5 * 7 + 10, 2 * 4 + 0.5 * 4]
    assert done[0].info == {"metrics": {"first": 3.0, "second": 7.0, "gsm8k": 1.0}}


ALL_TOGETHER = """
import asyncio
running = 0
async def reward({argument}):
    global running
    running += 1
    while running < 64:
        await asyncio.sleep(0.002)
    return {result}
"""


@pytest.mark.parametrize(("argument", "result"), [("completions", "[1.0] * len(completions)"), ("solution_str", "1.0")])
def test_async_rewards_that_arrive_one_by_one_run_together_in_one_process(pool: MakePool, argument: str, result: str):
    """Each waits for the 64th, so none would end if one had to end before another began."""
    rewards = pool(ALL_TOGETHER.format(argument=argument, result=result), timeout_s=60.0)
    assert [item.reward for item in score(rewards, *[{}] * 64)] == [1.0] * 64


def test_an_async_reward_that_ends_the_process_costs_only_itself(pool: MakePool):
    die = "    await asyncio.sleep(0.3 if answer[0] == 'die' else 1)\n    answer[0] == 'die' and os._exit(3)\n"
    source = "import asyncio, os\nasync def reward(answer):\n" + die + "    return [1.0]\n"
    done = score(pool(source), *[{"answer": answer} for answer in ("go", "die", "go", "go")])
    assert [item.reward for item in done] == [1.0, None, 1.0, 1.0]
    assert done[1].failure == "the reward process ended with 3"


def test_an_async_reward_that_hangs_costs_only_itself_and_no_other_is_asked_again(pool: MakePool, tmp_path: Path):
    note = f"    open({str(tmp_path / 'calls')!r}, 'a').write('x')\n"
    source = (
        "import asyncio\nasync def reward(answer):\n" + note + "    await asyncio.sleep(answer[0])\n    return [1.0]\n"
    )
    rewards = pool(source, timeout_s=3.0)
    assert score(rewards, {"answer": 0})[0].reward == 1.0
    hung, *others = score(rewards, {"answer": 1000}, *[{"answer": 0.5}] * 7)
    assert "reward.timeout_s=3" in hung.failure and [item.reward for item in others] == [1.0] * 7
    assert score(rewards, {"answer": 0})[0].reward == 1.0
    assert (tmp_path / "calls").read_text() == "x" * 10


def test_an_async_reward_that_blocks_the_others_costs_only_itself(pool: MakePool):
    source = "import time\nasync def reward(answer):\n    time.sleep(answer[0])\n    return [1.0]\n"
    rewards = pool(source, timeout_s=2.0)
    assert score(rewards, {"answer": 0})[0].reward == 1.0
    done = score(rewards, *[{"answer": answer} for answer in (0, 1000, 0, 0)])
    assert [item.reward for item in done] == [1.0, None, 1.0, 1.0] and "reward.timeout_s=2" in done[1].failure


def test_a_large_answer_and_a_large_question_pass_each_other(pool: MakePool):
    source = """
import threading, time
from concurrent.futures import Future

add = Future.add_done_callback

def add_late(future, function):  # so the thread that reads the questions writes the answer
    if threading.current_thread() is threading.main_thread():
        time.sleep(0.2)
    add(future, function)

Future.add_done_callback = add_late

async def reward(log_extra, completions):
    log_extra("echo", completions)
    return [1.0 for _ in completions]
"""
    done = score(pool(source, timeout_s=20), {}, {}, {}, completions=["x" * 200_000] * 3)
    assert [item.reward for item in done] == [1.0] * 3


def test_async_and_other_functions_add_up(pool: MakePool, tmp_path: Path):
    source = "async def one(answer):\n    return [1.0 for _ in answer]\ndef two(answer):\n    return [None, 2.0][:len(answer)]\n"
    rewards = pool(source, path=tuple(f"{tmp_path / 'rewards.py'}:{name}" for name in ("two", "one")))
    rewards.submit(*(sample(number, {"prompt": "p", "answer": 0}) for number in range(2)))
    done: list[LeasedRow] = []
    deadline = time.monotonic() + 120
    while len(done) < 2 and time.monotonic() < deadline:
        done += rewards.finished()
        time.sleep(0.005)
    assert [item.reward for item in sorted(done, key=lambda item: item.row_id.number)] == [1.0, 3.0]


def test_samples_that_are_submitted_together_come_in_one_call_even_after_a_failure(pool: MakePool):
    source = (
        TRL
        + "    if 'bad' in answer:\n        raise ValueError('bad')\n    return [float(len(answer))] * len(answer)\n"
    )
    rewards = pool(source, batch="group")
    groups = [["x", "bad", "x"], ["y", "y", "y"], ["z", "z", "z"]]
    for number, group in enumerate(groups):
        rewards.submit(*(sample(number, {"prompt": "p", "answer": answer}, "") for answer in group))
    done: list[LeasedRow] = []
    deadline = time.monotonic() + 120
    while len(done) < 9 and time.monotonic() < deadline:
        done += rewards.finished()
        time.sleep(0.005)
    by_group = {number: {item.reward for item in done if item.row_id.group.prompt == number} for number in range(3)}
    assert by_group[0] == {None} and all(reward and reward % 3 == 0 for n in (1, 2) for reward in by_group[n])


def test_samples_beyond_the_next_call_are_a_backlog(pool: MakePool, tmp_path: Path):
    source = f"""import time
from pathlib import Path

def reward(prompts, **columns):
    while not Path({str(tmp_path)!r}, "go").exists():
        time.sleep(0.01)
    return [1.0] * len(prompts)
"""
    slow = pool(source)
    rows = [sample(number, {"prompt": "p"}) for number in range(MAX_BATCH + 5)]
    for request in rows:
        slow.submit(request)
    wait_for(lambda: slow.backlog == 4, lambda: True, lambda: f"{slow.backlog} wait", patience_s=60)
    (tmp_path / "go").touch()
    done: list[LeasedRow] = []
    wait_for(
        lambda: done.extend(slow.finished()) or len(done) == len(rows), lambda: True, lambda: "hangs", patience_s=60
    )
    assert slow.backlog == 0


def test_a_worker_takes_a_call_while_another_one_is_busy(pool: Callable[..., RewardPool], tmp_path: Path):
    source = f"""import os, time
from pathlib import Path

def reward(prompts, completions, name, **columns):
    Path({str(tmp_path)!r}, name[0]).touch()
    while not Path({str(tmp_path)!r}, "second").exists():
        time.sleep(0.01)
    return [float(os.getpid())] * len(prompts)
"""
    both = pool(source, workers=2)
    done: list[LeasedRow] = []
    for number, name in enumerate(("first", "second")):
        both.submit(sample(number, {"prompt": "p", "name": name}))
        wait_for((tmp_path / name).exists, lambda: True, lambda: "no call began", patience_s=60)
    wait_for(
        lambda: done.extend(both.finished()) or len(done) == 2, lambda: True, lambda: "a call hangs", patience_s=60
    )
    assert len({request.reward for request in done}) == 2, "each call was made in a process of its own"
