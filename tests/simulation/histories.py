"""Histories of simulated runs: settings and a plan of faults, drawn by Hypothesis or from a seed."""

import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Protocol, TypeVar

import msgspec
from support.emulated_run import EMULATED

from headrace.launch.config.load import read_recipe

from .faults import EVENTS, MESSAGES, TARGETS, Kind, PlannedFault
from .simulation import FaultyRun

T = TypeVar("T")
BASE: dict[str, object] = EMULATED | {
    "lab.median_tokens": 60, "sampling.max_new_tokens": 200, "generator.max_running": 8,
    "run.save_rows": "recovery", "comm.expiry_s": 3, "comm.deadline_s": 60, "repack.period_s": 1,
    "lab.batch_bound": 8,
}  # fmt: skip
SECONDS = (0.5, 1.0, 2.0, 5.0, 8.0)
STEP_S = 0.8
"""About the time of a step, in seconds of the run."""
HISTORIES = Path(__file__).parents[1] / "assets" / "histories"
"""Histories that showed a mistake once, as JSON."""
SHORT_RUNS = (10, 15, 20)
"""Steps that a history may have if that is enough to break it."""
TINY_UNIT = 60
"""Rows of a storage unit that is sometimes full."""


class Chooser(Protocol):
    """Makes the choices of a history."""

    def pick(self, options: Sequence[T]) -> T: ...

    def number(self, most: int) -> int: ...


class SeededChooser:
    """Choices that follow from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def pick(self, options: Sequence[T]) -> T:
        return self._random.choice(options)

    def number(self, most: int) -> int:
        return self._random.randint(0, most)


class History(msgspec.Struct, frozen=True):
    """Settings beside `BASE`, and the faults. `eval` says whether there is a file of held-out prompts."""

    settings: dict[str, Any]
    plan: list[PlannedFault]
    unit_rows: int = 1 << 20
    has_evaluations: bool = False


def history(choose: Chooser, steps: int, num_faults: int) -> History:
    """A history of so many steps and faults."""
    end = 100 * max(1, int(steps * STEP_S))
    settings, has_evaluations = settings_of(choose), choose.pick((False, False, True))
    kinds: dict[Kind, list[str]] = {
        kind: [role for role in roles if role != "reference" or "roles.reference" in settings]
        for kind, roles in TARGETS.items()
    }
    plan = [fault(choose, end, kinds) for _ in range(num_faults)]
    if has_evaluations:
        settings |= {"eval.every": choose.pick((2, 5)), "eval.samples": choose.pick((1, 2))}
    unit_rows = choose.pick((1 << 20, 1 << 20, 1 << 20, TINY_UNIT))
    return History({"run.steps": steps} | settings, plan, unit_rows, has_evaluations)


def fault(choose: Chooser, end: int, kinds: Mapping[Kind, Sequence[str]]) -> PlannedFault:
    """A fault within the first `end` hundredths of a second; `kinds` has the roles that each kind can happen to."""
    kind: Kind = choose.pick(list(kinds))
    role, before = choose.pick(kinds[kind]), ""
    if kind == "kill at message":
        before = choose.pick(MESSAGES[role])
    if kind == "kill at event":
        before = choose.pick(EVENTS)
    return PlannedFault(
        at=choose.number(end) / 100, kind=kind, role=role, number=choose.number(3), seconds=choose.pick(SECONDS),
        count=choose.number(1 if before else 8), before=before, is_noticed=choose.pick((True, False)),
    )  # fmt: skip


def settings_of(choose: Chooser) -> dict[str, Any]:
    schedule = choose.pick(("headrace", "headrace", "headrace", "partial", "sync", "one_step"))
    settings: dict[str, Any] = {
        "run.schedule": schedule, "roles.rollout": choose.pick((2, 1, 3)), "roles.relay": choose.pick((2, 1, 3)),
        "batch.prompts_per_step": choose.pick((2, 1, 3)), "batch.samples_per_prompt": choose.pick((2, 1, 3)),
        "checkpoint.every": choose.pick((7, 3, 0)), "rollout.stream_tokens": choose.pick((16, 4, 0)),
        "repack.period_s": choose.pick((1, 1, 0)), "queue.lead": choose.pick(("auto", "auto", 4)),
    }  # fmt: skip
    if settings["batch.samples_per_prompt"] > 1:
        settings["queue.filter_zero_std"] = choose.pick(("false", "false", "true"))
    if references := choose.pick((0, 0, 0, 0, 0, 2)):
        settings |= {"roles.reference": references, "algorithm.kl_coef": 0.1}
    if schedule == "headrace":
        settings["queue.max_staleness"] = choose.pick(("null", 1, 2, 4))
        settings["rollout.max_age"] = choose.pick(("null", "null", 2, "never"))
    return settings


def run(history: History) -> FaultyRun:
    """Run a history in a folder of its own, which is removed; raises what is wrong."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="headrace-simulation-", dir=memory if memory.is_dir() else None))
    try:
        simulation = _simulation(history, folder)
        simulation.run()
        return simulation
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _simulation(history: History, folder: Path) -> FaultyRun:
    settings = BASE | history.settings | {"run.dir": folder, "data.path": folder / "prompts.jsonl"}
    (folder / "prompts.jsonl").write_text('{"prompt": "p"}\n' * 64)
    if history.has_evaluations:
        (folder / "eval.jsonl").write_text('{"prompt": "p"}\n' * 5)
        settings["eval.path"] = folder / "eval.jsonl"
    recipe = read_recipe(None, [f"{key}={value}" for key, value in settings.items()])
    return FaultyRun(folder, recipe, history.plan, history.unit_rows)


def problem(history: History) -> str:
    """The promise that a history breaks; empty if it breaks none."""
    try:
        run(history)
    except Exception as error:  # noqa: BLE001 - any error is a broken promise
        return f"{type(error).__name__}: {error}"
    return ""


def shrunk(history: History) -> History:
    """A history with as few faults and steps as are needed, of those that it has."""
    number = 0
    while number < len(history.plan):
        shorter = msgspec.structs.replace(history, plan=history.plan[:number] + history.plan[number + 1 :])
        if problem(shorter):
            history = shorter
        else:
            number += 1
    for steps in [steps for steps in SHORT_RUNS if steps < history.settings["run.steps"]]:
        shorter = msgspec.structs.replace(history, settings=history.settings | {"run.steps": steps})
        if problem(shorter):
            return shorter
    return history


def counts(simulations: Sequence[FaultyRun]) -> Counter[str]:
    """Faults that happened, by kind and role."""
    return sum((simulation.applied for simulation in simulations), Counter[str]())
