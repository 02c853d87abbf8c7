"""One rule for the log-probs of rollouts: the policy's at the temperature of sampling, before filters and penalties."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.policies import random_prompts, tiny_policy
from support.system import System

from headrace.launch.config.load import read_recipe
from headrace.rollout import Engine, SamplingParams
from headrace.trainer.batch import Trajectory, pack
from headrace.trainer.logprobs import packed_logprobs
from headrace.trainer.policy.model import load_policy

TRANSFORMERS = f"{Path(__file__).resolve().parents[2]}/docs/use/transformers_generator.py:TransformersGenerator"
FILTERS = {"sampling.temperature": 0.7, "sampling.top_p": 0.7, "sampling.top_k": 20}


@pytest.mark.parametrize(
    "changes",
    [{"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.2}, {"repetition_penalty": 1.3}, {"temperature": 0, "top_k": 5}],
    ids=str,
)
def test_the_trainers_log_probs_are_the_rollouts_under_every_filter_and_penalty(
    tmp_path: Path, changes: dict[str, float]
):
    """At equal version the importance ratio is 1: no token is clipped, none is scaled."""
    recipe = read_recipe(None, [f"sampling.{name}={value}" for name, value in ({"temperature": 0.8} | changes).items()])
    llama = tiny_policy(tmp_path)
    s, policy = recipe.sampling, load_policy(llama)
    params = SamplingParams(
        max_new_tokens=25, temperature=s.temperature, top_p=s.top_p, top_k=s.top_k, min_p=s.min_p,
        repetition_penalty=s.repetition_penalty, ignore_eos=True,
    )  # fmt: skip
    done = Engine(llama).generate(random_prompts(8, longest=20), params)
    rows = [
        Trajectory(
            *(np.array(x) for x in (c.prompt_ids, c.token_ids, c.logprobs, np.ones(25))),
            version=0,
            advantages=np.zeros(25),
        )
        for c in done
    ]
    batch = pack(rows, 0, policy.device)
    with torch.no_grad():
        log_ratio = packed_logprobs(policy, batch, recipe)[0] - batch.rollout_logprobs
    assert log_ratio.abs().max() <= 2e-5
    assert float(log_ratio.exp().mean()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        ("builtin", FILTERS | {"sampling.min_p": 0.1, "sampling.repetition_penalty": 1.3}),
        ("builtin", {"sampling.temperature": 0, "sampling.repetition_penalty": 1.3}),
        (TRANSFORMERS, FILTERS),
    ],
)
def test_in_a_run_without_staleness_the_ratio_is_one(tmp_path: Path, engine: str, settings: dict[str, float]):
    system = System(tmp_path, **settings, **{"rollout.engine": engine, "run.schedule": "sync", "run.steps": 2})
    assert system.start_all(num_rollouts=1).wait()["status"] == "finished"
    for line in (system.dir / "metrics.jsonl").read_text().splitlines():
        step = json.loads(line)
        assert step["staleness/max"] == step["actor/pg_clipfrac"] == 0
        assert abs(step["is/mean"] - 1) < 1e-5 and step["is/max"] < 1.0001
        assert step["mismatch/logprob_abs_diff"] < 2e-5
