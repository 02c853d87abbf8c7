"""Evaluations in a whole run, in memory: under every schedule each is on one version, and a resumed run repeats none."""

import json
from collections import defaultdict
from pathlib import Path

import pytest
from support.system import System

from headrace.relay.checkpoints import CheckpointFolder
from headrace.relay.journal.events import Evaluated, EvaluationBegun, Leased
from headrace.relay.journal.replay import replay
from headrace.trainer.replay.replay import replay_steps

REWARD = "def reward(prompts, completions, completion_ids, **rest):\n    return [float(sum(ids) % 2) for ids in completion_ids]\n"


def evaluated_system(folder: Path, **settings: object) -> System:
    """Two files of prompts, evaluated every second version."""
    for name, num_prompts in (("easy", 3), ("hard", 5)):
        rows = "".join(f'{{"prompt": "{name} {i}"}}\n' for i in range(num_prompts))
        (folder / f"{name}.jsonl").write_text(rows)
    words = {
        "eval.path": f"[{folder / 'easy.jsonl'}, {folder / 'hard.jsonl'}]",
        "eval.every": 2,
        "eval.samples": 4,
        "eval.temperature": 1.0,
        "run.steps": 5,
    } | settings
    system = System(folder, **words)
    (folder / "rewards.py").write_text(REWARD)
    return system


def check_evaluations(system: System) -> dict[int, dict[str, float]]:
    """The metrics by version: each sample was leased on its evaluation's version alone, and scored once."""
    versions: dict[int, int] = {}
    ended: dict[int, list[object]] = defaultdict(list)
    for event in system.events():
        match event:
            case EvaluationBegun():
                versions[event.number] = event.version
            case Leased() if event.group.is_evaluation:
                assert event.version == versions[event.group.epoch]
            case Evaluated():
                assert not event.failure
                ended[event.row.epoch].append(event.row)
            case _:
                pass
    assert all(len(rows) == len(set(rows)) == 32 for rows in ended.values())
    results = replay(system.dir / "journal.jsonl").evaluations.results
    by_version = {int(result["eval/version"]): result for result in results}
    assert list(by_version) == sorted(by_version) and by_version.keys() == {versions[number] for number in ended}
    return by_version


@pytest.mark.parametrize(
    ("schedule", "max_age"),
    [("sync", None), ("one_step", None), ("stream", None), ("partial", None), ("headrace", None), ("headrace", 1)],
)
def test_each_evaluation_is_of_one_version_under_every_schedule(tmp_path: Path, schedule: str, max_age: int | None):
    own = {} if max_age is None else {"rollout.max_age": max_age}
    system = evaluated_system(tmp_path, **{"run.schedule": schedule}, **own)
    summary = system.start_all().wait()
    assert summary["accounting"]["holds"] and summary["accounting"]["leased"] == summary["accounting"]["trained"] == 20
    results = check_evaluations(system)
    assert {0, 5} <= results.keys(), "before the first step and after the last"
    assert summary["evaluations"] == [*results.values()] and summary["evaluated"]["holds"]
    lines = [json.loads(line) for line in (system.dir / "metrics.jsonl").read_text().splitlines()]
    logged = [{name: line[name] for name in line if name.startswith("eval/")} for line in lines]
    assert all(found == results[int(found["eval/version"])] for found in logged if found)
    assert logged[-1]["eval/version"] == 5


def test_a_greedy_evaluation_of_the_same_version_has_the_same_scores(tmp_path: Path):
    greedy = {"eval.samples": 1, "eval.temperature": 0, "optimizer.lr": 0, "run.steps": 2}
    system = evaluated_system(tmp_path, **greedy)
    system.start_all().wait()
    first, *_, last = replay(system.dir / "journal.jsonl").evaluations.results
    assert (first["eval/version"], last["eval/version"]) == (0, 2)
    assert {**first, "eval/version": 2} == last, "the weights are the same"


def test_a_resumed_run_repeats_no_evaluation_and_a_run_with_evaluations_is_replayed(tmp_path: Path):
    settings = {"checkpoint.every": 2, "run.steps": 4, "run.schedule": "sync", "generator.exact": True}
    system = evaluated_system(tmp_path, **settings)
    system.start_all().wait()
    before = check_evaluations(system)
    assert {0, 4} <= before.keys() <= {0, 2, 4}, "one that becomes due while another runs may be left out"
    assert replay_steps(system.recipe) == 0
    (tmp_path / "again").mkdir()
    resumed = evaluated_system(tmp_path / "again", **{**settings, "run.resume": "auto", "run.steps": 6})
    system.dir.rename(resumed.dir)
    resumed.start_all().wait()
    after = check_evaluations(resumed)
    assert after.keys() == before.keys() | {6}
    assert {version: after[version] for version in before} == before
    begun = [event.version for event in resumed.events() if isinstance(event, EvaluationBegun)]
    assert begun == sorted(after)


@pytest.mark.parametrize("every", [2, "null"])
def test_the_best_checkpoint_by_an_evaluation_is_kept(tmp_path: Path, every: object):
    settings = {"checkpoint.every": every, "checkpoint.keep": 1, "checkpoint.best": "eval/hard/avg@4", "run.steps": 8}
    system = evaluated_system(tmp_path, **settings, **{"optimizer.lr": 0.05, "repack.period_s": 0})
    system.start_all().wait()
    folder = CheckpointFolder(system.dir)
    scores = {version: result["eval/hard/avg@4"] for version, result in check_evaluations(system).items() if version}
    best = max(scores, key=lambda version: (scores[version], version))
    assert (folder.root / "best").read_text() == f"step_{best}"
    kept = {step: manifest.score for step, manifest in folder.whole().items()}
    assert {best, 8} <= kept.keys() <= {best, 6, 8}, "`latest` may still name step_6 when the others are removed"
    assert kept == {step: scores.get(step) for step in kept}


def test_a_run_says_at_its_end_that_no_version_beat_the_model_before_training(tmp_path: Path):
    same = {"eval.samples": 1, "eval.temperature": 0, "optimizer.lr": 0, "run.steps": 2}
    system = evaluated_system(tmp_path, **same, **{"checkpoint.best": "eval/hard/avg@1"})
    summary = system.start_all().wait()
    assert summary["best"].startswith("no checkpoint beat the model before training: eval/hard/avg@1 was")
