"""A run whose processes are killed trains the rows of a run of the same seed that nothing disturbs."""

import os
import signal
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support.job import Job, MakeJob, assert_account_adds_up, child_of

NUM_STEPS = 16
VICTIMS = {2: "rollout-0", 5: "hub-0", 8: "relay-0", 11: "actor-0", 13: "rollout-1"}
"""The processes that are killed, each after so many steps."""
_COMPARED = ("prompt_ids", "response_ids", "versions", "rollout_logprobs", "reward")


class TrainedRow(NamedTuple):
    """The bytes of a row that decide what is learned from it."""

    columns: tuple[tuple[str, bytes], ...]


def trained_rows(run: Job, step: int) -> dict[str, TrainedRow]:
    """The rows of a step by their names, whichever attempt generated them."""
    columns: dict[str, dict[str, bytes]] = {}
    with safe_open(run.dir / f"rows/step_{step}.safetensors", framework="numpy") as file:
        for tensor in file.keys():  # noqa: SIM118 - not a mapping
            key, _, name = tensor.partition("/")
            if name in _COMPARED:
                columns.setdefault(key, {})[name] = np.ascontiguousarray(file.get_tensor(tensor)).tobytes()
    rows = {key.partition("@")[0]: TrainedRow(tuple(sorted(found.items()))) for key, found in columns.items()}
    assert len(rows) == len(columns), f"a row is twice in step {step}"
    return rows


def exact_run(job: MakeJob, folder: Path) -> Job:
    settings = {"run__schedule": "sync", "generator__exact": True, "run__save_rows": "all", "checkpoint__every": 6}
    run = job(run__dir=folder, run__steps=NUM_STEPS, sampling__max_new_tokens=24, **settings)
    run.dir = folder
    return run


@pytest.mark.slow
def test_a_run_whose_processes_are_killed_trains_the_rows_of_an_unbroken_one(job: MakeJob, tmp_path: Path):
    """Also a measurement: with `-s` it prints a line for each process."""
    unbroken, broken = exact_run(job, tmp_path / "unbroken"), exact_run(job, tmp_path / "broken")
    unbroken.run()
    broken.start()
    for num_steps, victim in VICTIMS.items():
        broken.wait_for_step(num_steps - 1)
        os.kill(child_of(broken, victim), signal.SIGKILL)
    code, output = broken.end()
    assert code == 0, output + broken.logs()
    names = set[str]()
    differing = dict.fromkeys(range(NUM_STEPS), 0)
    for step in range(NUM_STEPS):
        expected, found = trained_rows(unbroken, step), trained_rows(broken, step)
        differing[step] = len(expected.items() ^ found.items())
        assert not names & found.keys(), "no row is trained twice"
        names |= found.keys()
    account, summary = assert_account_adds_up(broken), broken.summary()
    weights, exact = (load_file(Path(run.summary()["export"]) / "model.safetensors") for run in (broken, unbroken))
    is_same = all(torch.equal(weights[name], exact[name]) for name in exact)
    for num_steps, victim in VICTIMS.items():
        name = victim.removesuffix("-0") if victim == "hub-0" else victim
        assert f"{name} was ended by SIGKILL and is started again" in output
        print(f"{name} killed after step {num_steps}")
    print(f"{len(names)} rows in {NUM_STEPS} steps, {sum(differing.values())} differ; weights the same: {is_same}")
    print(f"trainer restarts {summary['trainer_restarts']}, regenerated {summary['regenerated']}, {account}")
    assert not any(differing.values()), differing
    assert len(names) == account["trained"] == NUM_STEPS * 16
    assert is_same
