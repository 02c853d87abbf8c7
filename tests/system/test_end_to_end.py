"""The whole program, as a user starts it: small runs of a tiny policy in real processes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.job import DEADLINE_S, MakeJob, assert_account_adds_up, child_of, descendants_of
from support.policies import STORIES
from transformers import AutoModelForCausalLM

from headrace.launch.processes.secret import SECRET_FILE
from headrace.relay.journal.events import Published, Received
from headrace.relay.journal.files import read_events
from headrace.trainer.policy.model import load_policy

METRICS = (
    "step", "time_s", "reward/mean", "reward/std", "reward/min", "reward/max", "response_length/mean",
    "response_length/max", "response_length/clip_ratio", "group/zero_std_frac", "actor/entropy", "actor/pg_loss",
    "actor/pg_clipfrac", "actor/ppo_kl", "actor/kl_loss", "actor/grad_norm", "actor/lr", "is/mean", "is/max",
    "is/clip_frac", "is/ess", "staleness/mean", "staleness/max", "staleness/hist", "timing_s/step", "idle/actor",
    "perf/throughput", "weights/push_s", "weights/bytes",
)  # fmt: skip


def assert_others_can_read_all_but_the_secret(run_dir: Path) -> None:
    """As the umask says, which is read by setting it."""
    os.umask(umask := os.umask(0))
    entries = [path for path in (run_dir, *run_dir.rglob("*")) if run_dir / "private" not in (path, *path.parents)]
    modes = {str(path): path.stat().st_mode & 0o666 for path in entries}
    assert {name: oct(mode) for name, mode in modes.items() if mode & 0o044 != 0o044 & ~umask} == {}
    assert (run_dir / "private").stat().st_mode & 0o777 == 0o700
    assert list((run_dir / "private").iterdir()) == [run_dir / SECRET_FILE]


def test_a_run_trains_and_its_folder_holds_account_metrics_and_export(job: MakeJob):
    run = job()
    output = run.run()
    summary = run.summary()
    assert summary["status"] == "finished" and summary["steps"] == 4
    account = assert_account_adds_up(run)
    assert account["trained"] == 4 * 16 and account["in_flight"] == 0
    assert sum(summary["versions_per_trajectory"].values()) == 64
    assert sum(summary["staleness"].values()) == 64
    assert summary["tokens_per_s"] > 0
    metrics = run.metrics()
    assert [m["step"] for m in metrics] == [0, 1, 2, 3]
    assert not [name for name in METRICS if name not in metrics[-1]]
    assert len(re.findall(r"^ +\d+:\d\d  step \d", output, re.MULTILINE)) == 4
    assert list((run.dir / "tensorboard").iterdir()) and (run.dir / "config.yaml").exists()
    assert_others_can_read_all_but_the_secret(run.dir)
    files = {path: path.read_bytes() for path in run.dir.rglob("*") if path.is_file()}
    for _ in range(2):
        output = run.run(**{"run.resume": "auto"})
        assert output.splitlines() == ["headrace: run.resume=auto: finished after step 4; raise run.steps to continue"]
    assert {path: path.read_bytes() for path in run.dir.rglob("*") if path.is_file()} == files
    exported = AutoModelForCausalLM.from_pretrained(summary["export"])
    assert "with Headrace, from llama, for 4 steps" in (Path(summary["export"]) / "README.md").read_text()
    trained = load_policy(summary["export"])
    tokens = torch.arange(4, 60)
    with torch.no_grad():
        hidden = trained.forward_packed(tokens, torch.tensor([0, 56], dtype=torch.int32))
        assert (exported(tokens[None]).logits[0] - trained.logits(hidden)).abs().max() < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize(("child", "num_relays"), [("rollout-1", 1), ("relay-1", 2)])
def test_a_rollout_or_one_of_two_relays_that_is_killed_loses_no_trajectory(job: MakeJob, child: str, num_relays: int):
    run = job(run__steps=40, roles__relay=num_relays).start()
    run.wait_for_step(1)
    os.kill(child_of(run, child), signal.SIGKILL)
    code, output = run.end()
    assert code == 0, output + run.logs()
    assert f"{child} was ended by SIGKILL and is started again" in output
    account = assert_account_adds_up(run)
    assert account["trained"] == 40 * 16 and account["failed"] == 0


@pytest.mark.slow
def test_a_reference_rank_beside_a_users_task_is_restarted_when_it_dies(job: MakeJob):
    run = job(run__steps=40, roles__reference=1, roles__task=1, algorithm__kl_coef=0.01)
    (run.folder / "tasks.py").write_text(
        "def count(columns):\n    return {'length': [ids[:1] * 0 + len(ids) for ids in columns['response_ids']]}\n"
    )
    task = {
        "name": "count",
        "function": f"{run.folder}/tasks.py:count",
        "needs": ["response_ids"],
        "yields": ["length"],
    }
    run.recipe = {"queue": {"tasks": [task]}}
    run.start().wait_for_step(1)
    os.kill(child_of(run, "reference-0"), signal.SIGKILL)
    code, output = run.end()
    assert code == 0, output + run.logs()
    assert "reference-0 was ended by SIGKILL and is started again" in output
    assert assert_account_adds_up(run)["trained"] == 40 * 16
    assert run.metrics()[-1]["actor/kl_loss"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("frozen_s", [0.0, 4.0])
def test_the_only_relay_starts_again_with_its_weights_and_its_rows_are_generated_again(job: MakeJob, frozen_s: float):
    run = job(run__steps=40, comm__expiry_s=2.0).start()
    run.wait_for_step(1)
    relay = child_of(run, "relay-0")
    if frozen_s:  # longer than `comm.expiry_s`: it counts as dead, and is there again
        os.kill(relay, signal.SIGSTOP)
        time.sleep(frozen_s)
        os.kill(relay, signal.SIGCONT)
    else:
        os.kill(relay, signal.SIGKILL)
    code, output = run.end()
    assert code == 0, output + run.logs()
    assert "relay-0" in output and "is started again" in output
    account = assert_account_adds_up(run)
    assert account["trained"] == 40 * 16 and account["failed"] == 0


def test_an_interrupted_run_is_resumed_from_its_newest_whole_checkpoint(job: MakeJob):
    """SIGUSR1 writes a checkpoint and the run continues, Ctrl-C writes one and ends it; then that one is damaged.

    The steps between the two are trained again from their rows.
    """
    run = job(run__steps=1000).start()
    run.wait_for_step(1)
    run.signal(signal.SIGUSR1)
    run.until(lambda: (run.dir / "checkpoints" / "latest").exists())
    earlier = int((run.dir / "checkpoints" / "latest").read_text().removeprefix("step_"))
    run.wait_for_step(len(run.metrics()) + 2)
    run.signal(signal.SIGINT)
    code, output = run.end()
    assert code == 130 and "Traceback" not in output, output
    summary = run.summary()
    newest = summary["steps"]
    assert summary["status"] == "interrupted" and newest > earlier
    assert_account_adds_up(run)
    AutoModelForCausalLM.from_pretrained(summary["export"])
    assert (run.dir / "checkpoints" / "latest").read_text() == f"step_{newest}"
    damaged = max((run.dir / f"checkpoints/step_{newest}/dcp").glob("*.distcp"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    before = (run.dir / "metrics.jsonl").read_bytes()
    code, output = run.start(**{"run.steps": newest + 2}).end()
    assert code == 2 and "run.resume" in output
    output = run.run(**{"run.resume": "auto"})
    assert f"step_{newest} has" in output and "it is skipped" in output and f"continues after step {newest}" in output
    assert f"training {newest - earlier} steps again from rows/, after the checkpoint of step {earlier}" in output
    assert (run.dir / "metrics.jsonl").read_bytes().startswith(before)
    assert [m["step"] for m in run.metrics()] == list(range(newest + 2))
    assert assert_account_adds_up(run)["trained"] == (newest + 2) * 16
    assert run.summary()["export"].endswith(f"step_{newest + 2}/hf")
    seconds = [m["time_s"] for m in run.metrics()]
    assert seconds == sorted(seconds), "the clock of the metrics goes on"


@pytest.mark.slow
def test_a_scheduler_may_send_sigterm_to_every_process_of_a_run_that_is_queued_again(job: MakeJob):
    run = job(run__steps=1000, checkpoint__every=2).start()
    run.wait_for_step(2)
    assert run.process is not None
    for pid in [run.process.pid, *descendants_of(run.process.pid)]:
        os.kill(pid, signal.SIGTERM)
    code, output = run.end()
    assert code == 128 + signal.SIGTERM and "Traceback" not in output, output + run.logs()
    steps = run.summary()["steps"]
    assert (run.dir / "checkpoints" / "latest").read_text() == f"step_{steps}"
    assert_account_adds_up(run)
    assert (run.dir / f"queue/step_{steps}/manifest.json").exists()
    output = run.run(**{"run.resume": "auto", "run.steps": steps + 1})
    assert f"continues after step {steps}" in output
    assert [m["step"] for m in run.metrics()] == list(range(steps + 1))


@pytest.mark.slow
@pytest.mark.parametrize("link", ["auto", "tcp"])
def test_an_asynchronous_run_gives_all_the_same_weights_and_is_replayed_bit_for_bit(job: MakeJob, link: str):
    run = job(run__steps=8, roles__relay=2, comm__link=link)
    run.run()
    assert_account_adds_up(run)
    assert max(m["staleness/max"] for m in run.metrics()) > 0
    digests: dict[int, set[str]] = {}
    for _, event in read_events(run.dir / "journal.jsonl"):
        if isinstance(event, Published | Received):
            digests.setdefault(event.version, set()).add(event.digest)
    assert len(digests) >= 2 and all(len(found) == 1 for found in digests.values())
    assert "8 steps replayed, 0 of them differ" in run.replayed()
    torn = (run.dir / "metrics.jsonl").read_text().replace('"actor/grad_norm": ', '"actor/grad_norm": 1', 1)
    (run.dir / "metrics.jsonl").write_text(torn)
    code, output = run.replay()
    assert code == 1 and "1 of them differ" in output


@pytest.mark.slow
def test_several_actor_ranks_train_like_one_and_are_replayed_with_as_many(job: MakeJob):
    """With the same data on policy, the first steps are equal up to the order of additions."""
    exact = {"queue__max_staleness": 0, "checkpoint__every": 2, "run__save_rows": "all"}
    alone, sharded = job(**exact, run__dir="alone"), job(**exact, run__dir="sharded", roles__actor=2)
    for run in (alone, sharded):
        run.dir = run.folder / str(run.settings["run.dir"])
        run.run(**{"run.dir": run.dir})
        assert_account_adds_up(run)
    first, second = alone.metrics(), sharded.metrics()
    for name in ("reward/mean", "response_length/mean", "actor/entropy", "actor/grad_norm"):
        assert first[0][name] == pytest.approx(second[0][name], rel=1e-4), name
    models = [AutoModelForCausalLM.from_pretrained(run.dir / "checkpoints/step_2/hf") for run in (alone, sharded)]
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert (one - other).abs().max() < 1e-3
    assert "4 steps replayed, 0 of them differ" in sharded.replayed()
    config = sharded.dir / "config.yaml"
    config.write_text(config.read_text().replace("actor: 2", "actor: 1"))
    code, output = sharded.replay()
    assert code == 2 and "roles.actor=1: step 1 was trained by 2 actor ranks" in output


@pytest.mark.slow
def test_several_actor_ranks_continue_from_their_checkpoint(job: MakeJob):
    run = job(run__save_rows="all", checkpoint__every=2, roles__actor=2)
    run.run()
    run.run(**{"run.resume": "auto", "run.steps": 6})
    assert [m["step"] for m in run.metrics()] == [0, 1, 2, 3, 4, 5]
    assert assert_account_adds_up(run)["trained"] == 6 * 16
    assert "6 steps replayed, 0 of them differ" in run.replayed()


def test_a_reward_function_that_raises_is_reported_by_its_setting(job: MakeJob):
    run = job()
    (run.folder / "rewards.py").write_text("def reward(prompts, **rest):\n    raise KeyError('answer')\n")
    code, output = run.start().end()
    assert code == 2
    assert "reward.path" in output and "KeyError" in output and "rewards.py:2" in output
    assert "Traceback" not in output
    assert_account_adds_up(run)


def test_torchrun_runs_the_same_program(job: MakeJob):
    run = job()
    words = [f"{key}={value}" for key, value in run.settings.items()]
    (run.folder / "recipe.yaml").write_text("{}\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [*torchrun, "-m", "headrace.launch.run", str(run.folder / "recipe.yaml"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr + run.logs()
    assert_account_adds_up(run)


@pytest.mark.slow
def test_a_real_checkpoint_learns_a_users_reward(job: MakeJob):
    run = job()
    (run.folder / "rewards.py").write_text(
        "def reward(prompts, completions, completion_ids, **columns):\n"
        "    return [-abs(len(ids) - 20) / 40 for ids in completion_ids]\n"
    )
    data = run.folder / "prompts.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": f"{name} went to"}) + "\n" for name in ("Tom", "Lily", "Sam", "Anna"))
    )
    run.run(
        **{
            "model.path": STORIES,
            "run.steps": 60,
            "batch.prompts_per_step": 8,
            "batch.samples_per_prompt": 8,
            "sampling.max_new_tokens": 64,
            "optimizer.lr": 5e-4,
        }
    )
    rewards = [m["reward/mean"] for m in run.metrics()]
    assert sum(rewards[-6:]) / 6 > sum(rewards[:6]) / 6 + 0.2
    assert_account_adds_up(run)
