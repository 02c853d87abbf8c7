"""Compiled layers compute what the modules compute, for micro-batches of any number of tokens."""

import pytest
from support import forks
from support.actors import TESTS
from support.policies import tiny_policy

# In a process of its own, for the compiler leaves threads.
SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from dataclasses import replace
import warnings
from support.actors import *
from torch._dynamo.utils import counters
from headrace.launch.processes.role_process import end_process
warnings.simplefilter("ignore")

def with_one_prompt(batch):
    for columns in batch.columns.values():
        columns["prompt_ids"] = np.arange(20, 40).astype(np.int32)
    return replace(batch, micro_batches=[batch.rows], has_trees=True)

def gradient(path, is_compiled):
    actor = actor_of(recipe_of(path, batch__prompts_per_step=5, trainer__compile=is_compiled))
    for batch in (batch_of(0, num_groups=4, total=5), with_one_prompt(batch_of(0, first=4, total=5))):
        actor.accumulate(batch, StepMetrics())
    return torch.cat([each.flatten() for each in actor.updater.take() if each is not None])

def num_graphs(path):
    torch._dynamo.reset()
    counters.clear()
    expected, found = gradient(path, False), gradient(path, True)
    assert (found - expected).norm() < 1e-5 * expected.norm()
    return counters["stats"]["unique_graphs"]

few, many = map(num_graphs, sys.argv[2:4])
assert 0 < few == many, f"{few} of 2 layers, {many} of 12: beyond a limit the compiler leaves layers as they are"
end_process(0)
"""


@pytest.mark.slow
def test_a_step_of_compiled_layers_is_that_of_the_modules(tmp_path):
    paths = [tiny_policy(tmp_path / str(num), "llama", num_hidden_layers=num) for num in (2, 12)]
    process = forks.start(SCRIPT, [TESTS, *paths])
    process.join(600)
    assert process.exitcode == 0
