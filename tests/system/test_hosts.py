"""Runs on several hosts: namespaces of one machine, a launcher on each, one torchrun under each."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.closing import at_end
from support.cluster import Cluster, interrupt, obstacle, wait_for_exits
from support.emulated_run import FAST
from support.job import DEADLINE_S, LONG_TAILS, RATIO_OF_As
from support.policies import tiny_policy
from support.polling import wait_for

from headrace.launch.audit import main as audit
from headrace.launch.config.load import read_recipe
from headrace.launch.recipes.parts import RECIPE as QUICKSTART
from headrace.launch.recipes.parts import missing_parts
from headrace.relay.journal.events import Checkpointed, Moved, Opened, Published, Received
from headrace.relay.journal.files import read_events
from headrace.relay.weights.copies_on_disk import CopiesOnDisk

pytestmark = [pytest.mark.skipif(bool(obstacle()), reason=obstacle()), pytest.mark.xdist_group("hosts")]

END_S = 30.0
"""The longest time between the ends of two hosts."""


class HostsJob:
    """A run with a launcher on each host of a cluster; the hosts share the folder."""

    def __init__(self, folder: Path, num_hosts: int, bits_per_s: int | None = None, **settings: object) -> None:
        self.folder = folder
        self.dir = Path(str(settings.get("run__dir", folder / "run")))
        (folder / "rewards.py").write_text(RATIO_OF_As)
        prompts = [json.dumps({"prompt": f"say {number}"}) + "\n" for number in range(40)]
        (folder / "prompts.jsonl").write_text("".join(prompts))
        (folder / "recipe.yaml").write_text("{}\n")
        if not (folder / "llama").exists():
            tiny_policy(folder, "llama")
        usual: dict[str, object] = {
            "run__dir": self.dir,
            "run__steps": 4,
            "model__path": folder / "llama",
            "model__dtype": "float32",
            "data__path": folder / "prompts.jsonl",
            "reward__path": f"{folder / 'rewards.py'}:reward",
            "batch__prompts_per_step": 4,
            "batch__samples_per_prompt": 4,
            "sampling__max_new_tokens": 12,
            "optimizer__lr": 1e-3,
        }
        self.words = [f"{key.replace('__', '.')}={value}" for key, value in (usual | settings).items()]
        self.cluster = Cluster(num_hosts, folder, bits_per_s)
        at_end(self.cluster.close)
        self.launchers: list[subprocess.Popen[str]] = []

    @property
    def hosts(self):
        return self.cluster.hosts

    def start(self, ranks: str = "", **environment: str) -> "HostsJob":
        """Start the launchers, the last host's first: the order does not matter. `ranks` is --nproc-per-node."""
        command = [sys.executable, "-m", "headrace.launch.run", str(self.folder / "recipe.yaml"), *self.words]
        address = self.hosts[0].address
        for rank, host in reversed(list(enumerate(self.hosts))):
            words = ["--nnodes", str(len(self.hosts)), "--node-rank", str(rank), "--master-addr", address]
            words += ["--nproc-per-node", ranks] if ranks else []
            self.launchers.insert(0, host.start([*command, *words], self.folder / f"out{rank}", **environment))
        return self

    def end(self) -> list[int | None]:
        """Exit codes of the hosts; once the first host has ended, the others have `END_S`."""
        wait_for_exits(self.launchers[:1], DEADLINE_S)
        return wait_for_exits(self.launchers, END_S)

    def output(self, rank: int) -> str:
        return (self.folder / f"out{rank}").read_text()

    def logs(self) -> str:
        outputs = "".join(f"\n--- {host.name}\n{self.output(rank)[-3000:]}" for rank, host in enumerate(self.hosts))
        return outputs + "".join(f"\n--- {log.name}\n{log.read_text()[-2000:]}" for log in self.dir.glob("logs/*.log"))

    def wait_for_step(self, step: int) -> None:
        """Wait until a step has been trained."""
        self.until(lambda: len(self.metrics()) > step)

    def wait_for_event(self, number: int) -> None:
        """Wait until the journal has so many events."""
        journal = self.dir / "journal.jsonl"
        self.until(lambda: journal.read_bytes().count(b"\n") >= number, interval_s=0.001)

    def until(self, condition: Callable[[], bool], interval_s: float = 0.05) -> None:
        """Wait while the first host's launcher runs; fails when it ends."""
        first = self.launchers[0]
        wait_for(condition, lambda: first.poll() is None, self.logs, patience_s=DEADLINE_S, interval_s=interval_s)

    def metrics(self) -> list[dict[str, Any]]:
        path = self.dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def summary(self) -> dict[str, Any]:
        return json.loads((self.dir / "summary.json").read_text())

    def assert_account(self, num_trained: int) -> None:
        """The account is whole, in the summary and in a replay of the journal."""
        account = self.summary()["accounting"]
        assert account["holds"] is True and account["trained"] == num_trained, self.logs()
        assert audit([str(self.dir)]) == 0


def checkpoint_of(job: HostsJob) -> int:
    """The step of the first checkpoint that the journal has since it was opened last."""
    events = [event for _, event in read_events(job.dir / "journal.jsonl")]
    last = max(number for number, event in enumerate(events) if isinstance(event, Opened))
    return next(event.step for event in events[last:] if isinstance(event, Checkpointed))


@pytest.fixture
def hosts_job(tmp_path: Path) -> Callable[..., HostsJob]:
    return lambda num_hosts, **settings: HostsJob(tmp_path, num_hosts, **settings)


@pytest.mark.slow
def test_hosts_with_actors_train_together_end_together_and_are_replayed_bit_for_bit(hosts_job):
    settings = {"run__save_rows": "all", "checkpoint__every": 2, "comm__tls": True}
    job = hosts_job(2, roles__actor=3, roles__rollout=2, **settings).start(ranks="3,4")
    assert job.end() == [0, 0], job.logs()
    job.assert_account(4 * 16)
    assert job.summary()["hosts"] == {
        "host0": ["actor-0", "actor-1", "hub", "relay-0"],
        "host1": ["actor-2", "relay-1", "rollout-0", "rollout-1"],
    }
    assert "accounting" in job.output(0) and "accounting" not in job.output(1)
    assert not [host.processes() for host in job.hosts if host.processes()]
    digests: dict[int, set[str]] = {}
    for _, event in read_events(job.dir / "journal.jsonl"):
        if isinstance(event, Published | Received):
            digests.setdefault(event.version, set()).add(event.digest)
    assert len(digests) >= 2 and all(len(found) == 1 for found in digests.values())
    command = [sys.executable, "-m", "headrace", "replay", str(job.dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0 and "4 steps replayed, 0 of them differ" in done.stdout, done.stderr


def test_wrong_counts_are_one_line_on_each_host_under_torchrun(hosts_job):
    job = hosts_job(2, roles__rollout=4)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "3"]
    for rank, host in enumerate(job.hosts):
        place = ["--node-rank", str(rank), "--master-addr", job.hosts[0].address]
        program = ["-m", "headrace.launch.run", str(job.folder / "recipe.yaml"), *job.words]
        job.launchers.append(host.start([*torchrun, *place, *program], job.folder / f"out{rank}"))
    assert job.end() == [-signal.SIGUSR2, -signal.SIGUSR2], job.logs()
    for rank, host in enumerate(job.hosts):
        [line] = [line for line in job.output(rank).splitlines() if "[c10d]" not in line]  # torch's own warning
        assert line.startswith("headrace: error: roles.actor + ") and line.endswith(f"(on host {host.name})")
        assert "torchrun started 6 ranks" in line


@pytest.mark.slow
def test_a_relay_on_a_host_without_files_gets_the_recipe_and_the_summary_from_the_run(hosts_job):
    """The second host has one rank, and neither the recipe nor the run folder; both have the secret in their environment."""
    job = hosts_job(2, run__dir="/tmp/private/run", roles__relay=1, roles__rollout=2)
    recipe = job.folder / "recipe.yaml"
    job.hosts[0].path("/tmp/recipe.yaml").write_text("run: {steps: 3}\n")
    recipe.unlink()
    recipe.symlink_to("/tmp/recipe.yaml")
    job.words.remove("run.steps=4")
    job.words.append("--nproc-per-node=3,1")
    job.start(HEADRACE_SECRET="a text that both hosts know")
    assert job.end() == [0, 0], job.logs()
    first, second = (json.loads(host.path("/tmp/private/run/summary.json").read_text()) for host in job.hosts)
    assert first == second and first["steps"] == 3 and first["accounting"]["holds"] is True
    assert first["hosts"] == {"host0": ["actor-0", "rollout-0", "rollout-1"], "host1": ["hub", "relay-0"]}
    logs = [sorted(path.name for path in host.path("/tmp/private/run/logs").iterdir()) for host in job.hosts]
    assert "rollout-0.log" in logs[0] and "relay-0.log" in logs[1] and not set(logs[0]) & set(logs[1])


def test_a_host_without_the_secret_ends_the_run_with_a_message_on_each_host(hosts_job):
    job = hosts_job(2, run__dir="/tmp/private/run", roles__rollout=1, roles__relay=2).start()
    assert job.end() == [1, 2], job.logs()  # 2: the mistake is of that host
    for rank in (0, 1):
        assert "run.dir: the run's secret /tmp/private/run/private/secret is not on this host" in job.output(rank)
        assert "HEADRACE_SECRET" in job.output(rank) and "(on host host1)" in job.output(rank)
        assert "Traceback" not in job.output(rank)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        pytest.param("model.path", "/tmp/policy", "model.path: /tmp/policy does not exist (on host host1)", marks=pytest.mark.slow),
        pytest.param("reward.path", "/tmp/rewards.py:reward", "reward.path: cannot read /tmp/rewards.py: No such file or directory (on host host1)", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_host_that_lacks_a_file_ends_the_run_with_the_setting_and_its_name(hosts_job, setting, value, message):
    job = hosts_job(2, roles__rollout=1, roles__relay=2)
    at_first = job.hosts[0].path("/tmp")
    (at_first / "policy").symlink_to(job.folder / "llama")
    (at_first / "rewards.py").symlink_to(job.folder / "rewards.py")
    job.words.append(f"{setting}={value}")
    job.start()
    assert job.end() == [2, 2], job.logs()
    assert job.summary()["error"] == message and message in job.output(0)
    assert message.partition(" (on")[0] in job.output(1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_host_that_is_killed_whole_at_any_moment_costs_its_unfinished_trajectories_alone(hosts_job, seed: int):
    job = hosts_job(3, roles__relay=3, roles__rollout=2, run__steps=30).start()
    job.wait_for_step(0)
    job.wait_for_event(Random(seed).randrange(100, 400))
    job.hosts[2].kill()
    assert job.end()[:2] == [0, 0], job.logs()
    job.assert_account(30 * 16)
    assert job.summary()["hosts"]["host2"] == ["relay-2", "rollout-1"]


@pytest.mark.slow
def test_forty_processes_go_on_when_a_third_of_their_hosts_is_killed(hosts_job):
    """Emulated engines, so that this machine has room for as many processes."""
    settings = {key.replace(".", "__"): value for key, value in FAST.items()} | {"run__steps": 20}
    job = hosts_job(10, **settings | {"roles__relay": 10, "roles__rollout": 29}).start(ranks="4")
    job.wait_for_step(4)
    for host in job.hosts[7:]:
        host.kill()
    assert job.end()[:7] == [0] * 7, job.logs()
    job.assert_account(20 * 16)
    assert len(job.summary()["hosts"]) == 10 and len(job.metrics()) == 20


@pytest.mark.slow
def test_the_death_of_the_host_with_trainer_hub_store_and_relay_ends_the_run_and_the_same_command_resumes_it(hosts_job):
    settings = {"roles__relay": 2, "roles__rollout": 1, "checkpoint__every": 2, "run__resume": "auto"}
    job = hosts_job(2, run__steps=10_000, **settings).start()
    job.wait_for_step(5)
    job.hosts[0].kill()
    assert job.end()[1] not in (None, 0), job.logs()
    trained = len(job.metrics())
    again = hosts_job(2, run__steps=trained + 4, **settings).start()
    assert again.end() == [0, 0], again.logs()
    again.assert_account((trained + 4) * 16)
    assert {"actor-0", "hub", "relay-0"} <= set(again.summary()["hosts"]["host0"])
    assert f"run.resume=auto: the run continues after step {checkpoint_of(again)}" in again.output(0)


@pytest.mark.slow
def test_a_run_that_lost_a_host_with_an_actor_continues_from_the_copies_on_the_other_one(hosts_job):
    settings = {"roles__actor": 2, "roles__relay": 2, "roles__rollout": 1, "checkpoint__every": 0}
    settings |= {"run__schedule": "sync", "run__resume": "auto", "comm__deadline_s": 30}
    job = hosts_job(2, run__steps=10_000, **settings).start(ranks="2,3")
    job.wait_for_step(8)
    job.hosts[1].kill()
    assert job.end()[0] not in (None, 0), job.logs()
    assert not (job.dir / "checkpoints/latest").exists()
    trained = len(job.metrics())
    assert CopiesOnDisk(job.dir).newest(0, trained, 2)[0], job.logs()
    again = hosts_job(2, run__steps=trained + 2, **settings).start(ranks="2,3")
    assert again.end() == [0, 0], again.logs()
    again.assert_account((trained + 2) * 16)
    assert "from the copy of the training state in" in again.output(0)
    assert not CopiesOnDisk(job.dir).root.exists()


@pytest.mark.slow
def test_a_sharded_rollout_and_a_reference_work_on_a_host_without_a_relay(hosts_job):
    job = hosts_job(2, roles__relay=1, roles__rollout=4, rollout__tp=2, roles__reference=1, algorithm__kl_coef=0.01)
    assert job.start(ranks="2,5").end() == [0, 0], job.logs()
    job.assert_account(4 * 16)
    others = ["reference-0", "rollout-0", "rollout-1", "shard-0", "shard-1"]
    assert job.summary()["hosts"] == {"host0": ["actor-0", "hub", "relay-0"], "host1": others}
    assert job.metrics()[-1]["actor/kl_loss"] > 0
    received = {event.version for _, event in read_events(job.dir / "journal.jsonl") if isinstance(event, Received)}
    assert len(received) >= 2, "the rollouts get versions over a link"


@pytest.mark.slow
def test_trajectories_move_with_their_pages_to_another_host(hosts_job):
    job = hosts_job(2, run__steps=100_000, **LONG_TAILS).start()
    here, there = {"rollout-0"}, {"rollout-1", "rollout-2"}

    def has_crossed() -> bool:
        moves = [event for _, event in read_events(job.dir / "journal.jsonl") if isinstance(event, Moved)]
        return any({move.source, move.holder} & here and {move.source, move.holder} & there for move in moves)

    job.wait_for_step(0)
    job.until(has_crossed, interval_s=0.2)
    interrupt(job.launchers[0])
    assert job.end() == [130, 130], job.logs()
    assert job.summary()["accounting"]["holds"] is True and audit([str(job.dir)]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [2, 60])
def test_a_host_that_is_cut_off_for_a_while_comes_back(hosts_job, seconds: int):
    """The end of the run is far away; the rollout of the host is in the journal again after the cut."""
    job = hosts_job(2, roles__relay=2, roles__rollout=1, roles__actor=1, run__steps=100_000, run__save_rows="none")
    job.start().wait_for_step(2)
    cut_at = len(job.metrics())
    job.hosts[1].cut()
    time.sleep(seconds)  # the length of the cut is the thing under test
    job.hosts[1].mend()
    job.wait_for_step(cut_at + 20)
    interrupt(job.launchers[0])
    assert job.end() == [130, 130], job.logs()
    account = job.summary()["accounting"]
    assert account["holds"] is True and audit([str(job.dir)]) == 0


@pytest.mark.slow
def test_three_hosts_train_the_quickstart_to_its_reward(hosts_job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    parts = missing_parts(read_recipe(QUICKSTART))
    job = hosts_job(3)
    (job.folder / "recipe.yaml").write_text(QUICKSTART.read_text())
    job.words = [*parts, f"run.dir={job.dir}", "roles.relay=3"]
    job.start()
    assert job.end() == [0, 0, 0], job.logs()
    summary = job.summary()
    job.assert_account(summary["steps"] * 16 * 8)
    assert summary["reward_last"] >= summary["reward_first"] + 0.3
    assert sorted(summary["hosts"]) == ["host0", "host1", "host2"]
