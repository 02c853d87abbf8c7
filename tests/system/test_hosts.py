"""Runs on several hosts: namespaces of one machine, a launcher on each, one torchrun under each."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.closing import at_end
from support.cluster import Cluster, obstacle, wait_for_exits
from support.job import DEADLINE_S, RATIO_OF_As
from support.policies import tiny_policy

from headrace.launch.audit import main as audit
from headrace.relay.journal.events import Published, Received
from headrace.relay.journal.journal import read_events

pytestmark = [pytest.mark.skipif(bool(obstacle()), reason=obstacle()), pytest.mark.xdist_group("hosts")]

END_S = 5.0
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

    def start(self, **environment: str) -> "HostsJob":
        """Start the launchers, the last host's first: the order does not matter."""
        command = [sys.executable, "-m", "headrace.launch.run", str(self.folder / "recipe.yaml"), *self.words]
        address = self.hosts[0].address
        for rank, host in reversed(list(enumerate(self.hosts))):
            words = ["--nnodes", str(len(self.hosts)), "--node-rank", str(rank), "--master-addr", address]
            self.launchers.insert(0, host.start([*command, *words], self.folder / f"out{rank}", **environment))
        return self

    def end(self) -> list[int | None]:
        """Exit codes of the hosts; once the first has ended, the others have `END_S`."""
        deadline = time.monotonic() + DEADLINE_S
        while all(launcher.poll() is None for launcher in self.launchers):
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)
        return wait_for_exits(self.launchers, END_S)

    def output(self, rank: int) -> str:
        return (self.folder / f"out{rank}").read_text()

    def logs(self) -> str:
        outputs = "".join(f"\n--- {host.name}\n{self.output(rank)[-3000:]}" for rank, host in enumerate(self.hosts))
        return outputs + "".join(f"\n--- {log.name}\n{log.read_text()[-2000:]}" for log in self.dir.glob("logs/*.log"))

    def wait_for_step(self, step: int) -> None:
        """Wait until a step has been trained."""
        deadline = time.monotonic() + DEADLINE_S
        while len(self.metrics()) <= step:
            ended = [launcher.poll() for launcher in self.launchers[:1]]
            assert ended == [None] and time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

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


@pytest.fixture
def hosts_job(tmp_path: Path) -> Callable[..., HostsJob]:
    return lambda num_hosts, **settings: HostsJob(tmp_path, num_hosts, **settings)


def test_two_hosts_train_together_and_end_together(hosts_job):
    job = hosts_job(2, roles__rollout=3).start()
    assert job.end() == [0, 0], job.logs()
    job.assert_account(4 * 16)
    assert job.summary()["hosts"] == {
        "host0": ["actor-0", "hub", "relay-0", "rollout-0"],
        "host1": ["relay-1", "rollout-1", "rollout-2"],
    }
    assert "accounting" in job.output(0) and "accounting" not in job.output(1)
    assert not [host.processes() for host in job.hosts if host.processes()]
    digests: dict[int, set[str]] = {}
    for _, event in read_events(job.dir / "journal.jsonl"):
        if isinstance(event, Published | Received):
            digests.setdefault(event.version, set()).add(event.digest)
    assert len(digests) >= 2 and all(len(found) == 1 for found in digests.values())
