"""Settings that exclude each other are refused, each pair by a row of one table."""

import ast
import inspect
import os
from pathlib import Path
from types import ModuleType

import pytest

from headrace.comm.errors import SettingError
from headrace.comm.recipe import RunSettings
from headrace.launch.config.checks import agents, algorithm, recipe
from headrace.launch.config.checks.recipe import check_run_folder, check_settings
from headrace.launch.config.load import read_recipe

EMULATED = "rollout.engine=emulated trainer.engine=emulated"
TASK = 'queue.tasks=[{"name":"a","function":"f.py:f","yields":["x"]}]'
AGENTS = "environment.path=serve rollout.serve=0"
EXCLUDED = [
    ("sampling.temperature=1e-9", "sampling.temperature: set 0"),
    ("run.dir=~/runs/t", "run.dir=~/runs/t: ~ is not replaced here; write the home folder"),
    ("sampling.stop=['']", "sampling.stop: an empty string"),
    ("sampling.stop=", "sampling.stop: an empty string"),
    ("rollout.tp=2 roles.rollout=2 generator.exact=true", "rollout.tp cannot be combined with generator.exact"),
    ("rollout.tp=2 roles.rollout=2 rollout.engine=own.py:Adapter", "rollout.tp: rollout.engine=own.py:Adapter has one rank"),
    ("generator.exact=true roles.actor=2", "generator.exact cannot be combined with several actor ranks"),
    ("roles.task=1", "roles.task=1 ranks for 0 queue.tasks"),
    (TASK, "roles.task=0 ranks for 1 queue.tasks"),
    ("batch.updates_per_version=99", "batch.updates_per_version: more than batch.prompts_per_step"),
    ("roles.reference=1", "roles.reference: nothing needs the initial policy"),
    (f"environment.tools=t.py:f {EMULATED}", "environment: rollout.engine=emulated cannot pause"),
    (AGENTS.removesuffix(" rollout.serve=0"), "environment.path=serve: agents use the run over HTTP, and rollout.serve is not set"),
    (f"{AGENTS} environment.tools=[t.py:f]", "environment.tools: with environment.path=serve the agents have the tools"),
    (f"{AGENTS} environment.workers=2", "environment.workers: with environment.path=serve no environment is hosted"),
    (f"{AGENTS} eval.path=e.jsonl", "eval.path: no agent claims the prompts of an evaluation"),
    (f"{AGENTS} algorithm.overlong_buffer=9", "algorithm.overlong_buffer: with environment.path=serve"),
    (f"{AGENTS} reward.batch=group", "reward.batch=group: with environment.path=serve"),
    ("run.schedule=sync queue.max_staleness=1", "queue.max_staleness: run.schedule=sync has its own bound"),
    ("run.schedule=one_step rollout.max_age=2", "rollout.max_age: run.schedule=one_step has its own rule"),
    ("run.schedule=sync queue.lead=15", "queue.lead: run.schedule=sync needs room for batch.prompts_per_step=16"),
    ("roles.actor=3 trainer.shard_ranks=2", "trainer.shard_ranks: roles.actor=3 is not a multiple of 2"),
    ("roles.actor=2 trainer.shard_ranks=4", "trainer.shard_ranks: roles.actor=2 is not a multiple of 4"),
    ("generator.exact=true trainer.activation_checkpointing=true", "trainer.activation_checkpointing cannot be combined with generator.exact"),
    ("generator.exact=true trainer.compile=true", "trainer.compile cannot be combined with generator.exact"),
    ("generator.exact=true trainer.offload=true", "trainer.offload cannot be combined with generator.exact"),
    ("rollout.engine=emulated", "rollout.engine and trainer.engine: emulate both"),
    ("trainer.engine=emulated", "rollout.engine and trainer.engine: emulate both"),
    (f"{EMULATED} batch.passes=2", "batch.passes: emulated devices"),
    (f"{EMULATED} lora.rank=2", "lora.rank: emulated devices"),
    (f"{EMULATED} roles.actor=2", "roles.actor: one process emulates"),
    (f"{EMULATED} lab.colocated=true", "lab.colocated: only run.schedule=sync"),
    ("lab.train_gpus=8", "lab: only emulated devices"),
    ("optimizer.min_lr_ratio=.1", "optimizer.min_lr_ratio: only with lr_schedule=cosine"),
    ("optimizer.lr_schedule=polynomial optimizer.lr=1e-7", "optimizer.lr: lr_schedule=polynomial ends at 1e-7"),
    ("optimizer.lr_schedule=linear optimizer.warmup_steps=100", "optimizer.warmup_steps: 100 of run.steps=100"),
    ("comm.link=nccl comm.tls=true", "comm.tls: NCCL does not encrypt"),
    ("algorithm.kl_in=reward", "algorithm.kl_in=reward has no effect while algorithm.kl_coef is 0"),
    ("algorithm.overlong_buffer=9 sampling.max_new_tokens=8", "algorithm.overlong_buffer=9 is longer"),
    ("queue.filter_zero_std=true batch.samples_per_prompt=1", "queue.filter_zero_std=true: with batch.samples_per_prompt=1"),
]  # fmt: skip


def refusal(words: str) -> SettingError:
    with pytest.raises(SettingError) as told:
        check_settings(read_recipe(None, words.split(" ")))
    return told.value


@pytest.mark.parametrize(("words", "message"), EXCLUDED)
def test_settings_that_exclude_each_other_are_refused_by_name(words: str, message: str):
    assert str(refusal(words)).startswith(message)
    assert "\n" not in str(refusal(words))


def raises(module: ModuleType) -> dict[str, range]:
    """The places of a module that refuse settings alone, by their words: of `checks`, those that `check_settings` reaches."""
    tree = ast.parse(inspect.getsource(module))
    nodes = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    names, found = ([*nodes] if module is not recipe else ["check_settings"]), dict[str, range]()
    for name in names:  # grows by the functions that are called
        for node in ast.walk(nodes[name]):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in nodes:
                names += [node.func.id] if node.func.id not in names else []
            if isinstance(node, ast.Raise):
                found[ast.unparse(node)] = range(node.lineno, (node.end_lineno or 0) + 1)
    return found


@pytest.mark.parametrize("module", [agents, algorithm, recipe])
def test_every_refusal_of_settings_has_a_row(module: ModuleType):
    reached: set[int] = set()
    for words, _ in EXCLUDED:
        trace = refusal(words).__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == module.__file__:
                reached.add(trace.tb_lineno)
            trace = trace.tb_next
    assert not [text for text, lines in raises(module).items() if not reached & {*lines}]


def test_a_run_folder_without_permission_to_write_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root has every permission
    with pytest.raises(SettingError, match=f"run.dir: no permission to write in {tmp_path}"):
        check_run_folder(RunSettings(dir=str(tmp_path)))
