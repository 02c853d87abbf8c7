"""The process that runs a user's reward function: one JSON line in, one JSON line out.

`pool.py` starts it on the user's file; it imports neither torch nor other heavy modules. Output that the function prints goes to
the log, not into the answers. The process ends with its standard input, and everything that it has started ends with it. A
process that the function forks can neither read questions nor answer them.
"""

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from ...comm.plugins import load_object
from ...comm.process_tree import fork_guarded


class WrongLength(Exception):
    """The function returned another number of rewards than it got completions."""


def call(function: Callable[..., Any], batch: dict[str, Any]) -> list[float | None]:
    """The rewards of a batch: `prompts`, `completions`, `completion_ids`, and `columns` (one list per column).

    The function has TRL's signature, a batch call with keywords, or verl's, a call per sample
    (data_source, solution_str, ground_truth, extra_info); it may be async. Raises `WrongLength` and the function's errors.
    """
    if "solution_str" in inspect.signature(function).parameters:
        return [_number(_result(function(**_verl_arguments(batch, i)))) for i in range(len(batch["prompts"]))]
    inputs = {name: batch[name] for name in ("prompts", "completions", "completion_ids")}
    rewards = list(_result(function(**inputs, **batch["columns"])))
    if len(rewards) != len(batch["prompts"]):
        raise WrongLength(f"returned {len(rewards)} rewards for {len(batch['prompts'])} completions")
    return [_number(reward) for reward in rewards]


def _verl_arguments(batch: dict[str, Any], index: int) -> dict[str, Any]:
    columns = {name: values[index] for name, values in batch["columns"].items()}
    completion = batch["completions"][index]
    return {
        "data_source": columns.get("data_source"),
        "solution_str": completion if isinstance(completion, str) else completion[-1]["content"],
        "ground_truth": _ground_truth(columns),
        "extra_info": columns.get("extra_info", columns),
    }


def _ground_truth(columns: dict[str, Any]) -> Any:
    """From the column `ground_truth`, from `reward_model.ground_truth` as in verl's data sets, or from `answer`."""
    nested = columns.get("reward_model")
    for place in (columns, nested if isinstance(nested, dict) else {}):
        if "ground_truth" in place:
            return place["ground_truth"]
    if "answer" not in columns:
        raise KeyError("the data has no column ground_truth, reward_model.ground_truth or answer")
    return columns["answer"]


def _result(value: Any) -> Any:
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _number(reward: Any) -> float | None:
    if isinstance(reward, dict):
        reward = reward["score"]
    return None if reward is None else float(reward)


def explain(error: BaseException, trace: TracebackType | None) -> str:
    """One line: the error and where in the user's code it was raised."""
    frames = traceback.extract_tb(trace)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def main() -> None:
    """Answer each line of standard input until it ends. The arguments are the function and the process that starts this one."""
    path, parent = sys.argv[1], int(sys.argv[2])
    fork_guarded(parent)
    questions, answers = (
        os.fdopen(os.dup(0), encoding="utf-8"),
        os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1),
    )
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    os.register_at_fork(after_in_child=lambda: _close(questions.fileno(), answers.fileno()))
    try:
        sys.path.insert(0, str(Path(path.rpartition(":")[0]).resolve().parent))  # only the user's code runs here
        function = load_object("reward.path", path)
        answers.write(json.dumps({"id": 0}) + "\n")
    except BaseException as error:  # noqa: BLE001 - the pool gets any error of the user's file
        answers.write(json.dumps({"id": 0, "error": explain(error, error.__traceback__)}) + "\n")
        return
    for line in questions:
        batch = json.loads(line)
        try:
            answer: dict[str, Any] = {"rewards": call(function, batch)}
        except WrongLength as error:
            answer = {"error": str(error), "is_misuse": True}
        except Exception as error:  # noqa: BLE001 - the pool gets any error of the user's function
            answer = {"error": explain(error, error.__traceback__)}
        answers.write(json.dumps({"id": batch["id"], **answer}) + "\n")


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


if __name__ == "__main__":
    main()
