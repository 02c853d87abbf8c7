"""A whole run keeps samples of its steps: what `samples.jsonl` says is what was trained, each step once, whatever dies."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.system import Died, System, run_until_death
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from headrace.comm.fleet import Fleet
from headrace.comm.recipe import Recipe
from headrace.trainer import loop as trainer_loop
from headrace.trainer.policy.model import load_tokenizer
from headrace.trainer.step_log import StepReplay

SYNC: dict[str, object] = {
    "run.schedule": "sync",
    "generator.exact": True,
    "optimizer.lr": 1e-3,
    "run.save_rows": "all",
}


def lines_of(system: System) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (system.dir / "samples.jsonl").read_text().splitlines()]


def by_step(system: System) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in lines_of(system):
        found[line["step"]].append(line)
    return found


def check_step(system: System, step: int, lines: list[dict[str, Any]], tokenizer: Any) -> None:
    """Each line says what the saved rows of the step say, float32 for float32."""
    rows = {}
    for batch in StepReplay(system.dir, step).batches():
        rows |= {(str(row.row.group), row.row.sample): (row, batch.columns[row.key]) for row in batch.rows}
    for line in lines:
        row, columns = rows[line["group"], line["sample"]]
        tokens = line["tokens"]
        assert line["prompt"] == tokenizer.decode(columns["prompt_ids"].tolist())
        assert line["response"] == tokenizer.decode(columns["response_ids"].tolist()) == "".join(tokens["texts"])
        assert tokens["ids"] == columns["response_ids"].tolist()
        assert np.array_equal(np.array(tokens["generator"], np.float32), columns["rollout_logprobs"])
        assert np.float32(line["reward"]) == columns["reward"][0] == np.float32(line["rewards"]["reward"])
        assert line["metrics"] | line["rewards"] == json.loads(columns["reward_info"].tobytes())["metrics"]
        assert [*line["metrics"]] == ["length"]
        assert line["finish"] == ("cut" if columns["truncated"][0] else "ended")
        assert (line["versions"], line["staleness"]) == ([row.version], step - row.version)
        assert line["num_trained"] == line["num_tokens"] == len(tokens["trainer"])
        assert (line["num_turns"], line["num_calls"], line["turns"]) == (1, 0, [])
    rewards = np.array([line["reward"] for line in lines]).reshape(-1, 2)
    scaled = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)
    assert [line["advantage"] for line in lines] == pytest.approx(scaled.flatten().tolist(), abs=1e-3)


def test_a_run_keeps_whole_groups_of_each_step_as_they_were_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "noting.py").write_text(
        "def reward(completions, log_metric, **rest):\n"
        "    log_metric('length', sum(map(len, completions)) / len(completions))\n"
        "    return [text.count('a') / 8 + len(text) for text in completions]\n"
    )
    path = f"{tmp_path / 'noting.py'}:reward"
    settings: dict[str, object] = {"reward.path": path, "batch.prompts_per_step": 4, "run.samples": 2}
    system = System(tmp_path, **SYNC | settings).start_all()
    system.wait()
    tokenizer = load_tokenizer(tmp_path / "llama")
    found = by_step(system)
    assert [*found] == [1, 2, 3]
    for step, lines in found.items():
        groups = {line["group"] for line in lines}
        assert sorted((line["group"], line["sample"]) for line in lines) == [
            (g, s) for g in sorted(groups) for s in (0, 1)
        ]
        assert len(groups) == 2
        check_step(system, step - 1, lines, tokenizer)
    said = capsys.readouterr().out
    assert said.count("  sample ") == 2 and f"reward {max(line['reward'] for line in found[1][:2]):.3f}" in said
    board = EventAccumulator(str(system.dir / "tensorboard")).Reload()
    (event,) = board.Tensors("samples")
    assert event.step == 1 and b"response" in event.tensor_proto.string_val[0]


def test_metrics_of_a_step_can_be_computed_from_its_samples(tmp_path: Path):
    """All groups are kept here, so each sum over tokens is that of the step: the log-probs are those of the loss."""
    whole = {"run.samples": 2, "batch.prompts_per_step": 2, "run.schedule": "one_step", "generator.exact": False}
    system = System(tmp_path, **SYNC | whole).start_all()
    system.wait()
    metrics = [json.loads(line) for line in (system.dir / "metrics.jsonl").read_text().splitlines()]
    for number, lines in by_step(system).items():
        step = metrics[number - 1]
        ratios = np.array([ratio for line in lines for ratio in line["tokens"]["ratio"]])
        gaps = [
            np.subtract(*(np.array(line["tokens"][who], np.float32) for who in ("trainer", "generator")))
            for line in lines
        ]
        gap = np.concatenate(gaps)
        assert ratios == pytest.approx(np.exp(gap), rel=1e-6)
        assert step["is/mean"] == pytest.approx(ratios.mean(), rel=1e-5)
        assert step["is/max"] == pytest.approx(ratios.max(), rel=1e-5)
        assert step["reward/mean"] == pytest.approx(np.mean([line["reward"] for line in lines]), rel=1e-6)
        assert step["staleness/mean"] == np.mean([line["staleness"] for line in lines])
        fresh = [abs(each) for each, line in zip(gaps, lines, strict=True) if not line["staleness"]]
        if fresh:
            assert step["mismatch/logprob_abs_diff"] == pytest.approx(np.concatenate(fresh).mean(), rel=1e-5)
    assert {line["staleness"] for line in lines_of(system)} == {0, 1}


def dying_before_metrics(fleet: Fleet, recipe: Recipe) -> None:
    """A trainer that dies between the samples of a step and its metrics."""
    trainer = trainer_loop.Trainer(fleet, recipe)
    assert trainer.recorder is not None
    write = trainer.recorder.log.write

    def die(step: int, metrics: Any, histograms: Any = None) -> None:
        if step == 1:
            raise Died
        write(step, metrics, histograms)

    trainer.recorder.log.write = die  # type: ignore[method-assign]
    run_until_death(trainer, fleet)


def test_a_trainer_that_dies_leaves_each_step_once_with_the_samples_of_an_undisturbed_run(tmp_path: Path):
    systems = []
    for name, actor in (("whole", trainer_loop.run), ("dies", dying_before_metrics)):
        (tmp_path / name).mkdir()
        system = System(tmp_path / name, **SYNC).start_all(actor=actor)
        if name == "dies":
            system.until(lambda: not system.threads["actor-0"].is_alive())  # noqa: B023
            assert [*by_step(system)] == [1, 2] and len((system.dir / "metrics.jsonl").read_text().splitlines()) == 1
            with (system.dir / "samples.jsonl").open("a") as file:
                file.write('{"step":3,"prompt": "torn')
            system.start("actor", trainer_loop.run)
        system.wait()
        systems.append(system)
    assert lines_of(systems[0]) == lines_of(systems[1])
    assert [*by_step(systems[1])] == [1, 2, 3]


def test_a_resumed_run_continues_the_file(tmp_path: Path):
    System(tmp_path, **SYNC | {"run.steps": 2}).start_all().wait()
    system = System(tmp_path, **SYNC | {"run.steps": 3, "run.resume": "auto"}).start_all()
    system.wait()
    assert {step: len(lines) for step, lines in by_step(system).items()} == {1: 4, 2: 4, 3: 4}


def test_without_samples_there_is_no_file_and_no_line_on_the_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    system = System(tmp_path, **SYNC | {"run.samples": 0, "run.steps": 1}).start_all()
    system.wait()
    assert not (system.dir / "samples.jsonl").exists() and "  sample " not in capsys.readouterr().out
