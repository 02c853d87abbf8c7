"""A whole run as a user starts it: a command line, a run folder, an exit code."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import forks
from support.policies import tiny_policy
from support.polling import wait_for

from headrace.comm.process_tree import children_of
from headrace.relay.journal.hub_state import account_dict
from headrace.relay.journal.replay import replay

DEADLINE_S = 400

LONG_TAILS: dict[str, Any] = {
    "roles__rollout": 3,
    "sampling__max_new_tokens": 60,
    "sampling__temperature": 1.2,
    "repack__period_s": 0.05,
    "queue__lead": 4,
}
"""Settings with which trajectories move often."""

RATIO_OF_As = """
def reward(prompts, completions, completion_ids, **columns):
    return [(c.count("a") + c.count("e")) / max(len(c), 1) for c in completions]
"""


class Job:
    """One run through the launcher, in a folder of its own."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.folder = folder
        self.dir = folder / "run"
        self.console = folder / "console"
        (folder / "rewards.py").write_text(RATIO_OF_As)
        data = folder / "prompts.jsonl"
        data.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(40)))
        self.settings: dict[str, object] = {
            "run.dir": self.dir,
            "run.steps": 4,
            "model.path": folder / "llama",
            "model.dtype": "float32",  # some machines would choose bfloat16
            "data.path": data,
            "reward.path": f"{folder / 'rewards.py'}:reward",
            "batch.prompts_per_step": 4,
            "batch.samples_per_prompt": 4,
            "sampling.max_new_tokens": 12,
            "optimizer.lr": 1e-3,
            "roles.rollout": 2,
        } | settings
        self.recipe: dict[str, Any] = {}
        self.forks = False
        """Whether its processes are forks of one that has imported torch."""
        self.process: forks.Command | subprocess.Popen[bytes] | None = None

    def start(self, **settings: object) -> "Job":
        self.settings |= settings
        recipe = self.folder / "recipe.yaml"
        recipe.write_text(json.dumps(self.recipe))  # JSON is YAML
        words = [f"{key}={value}" for key, value in self.settings.items()]
        return self._begin(["-m", "headrace.launch.run", str(recipe), *words])

    def quickstart(self, *words: str) -> "Job":
        """Start `headrace quickstart` in the present folder, with its own recipe."""
        return self._begin(["-m", "headrace", "quickstart", *words, f"run.dir={self.dir}"])

    def replay(self, *words: str) -> tuple[int, str]:
        """Exit code of `headrace replay`, and everything printed."""
        return self._begin(["-m", "headrace.launch.report.replay", str(self.dir), *words]).end()

    def replayed(self, *words: str) -> str:
        """The output of a replay, which must find all numbers equal."""
        code, output = self.replay(*words)
        assert code == 0, output
        return output

    def _begin(self, command: Sequence[str]) -> "Job":
        if self.forks:
            self.process = forks.Command(command, self.console)
            return self
        with self.console.open("w") as stream:  # a pipe that no one reads would stop a long run
            self.process = subprocess.Popen([sys.executable, *command], stdout=stream, stderr=subprocess.STDOUT)
        return self

    def end(self) -> tuple[int, str]:
        """Exit code and everything printed."""
        assert self.process is not None
        code = self.process.wait(DEADLINE_S)
        return code, self.console.read_text()

    def run(self, **settings: object) -> str:
        code, output = self.start(**settings).end()
        assert code == 0, output + self.logs()
        return output

    def logs(self) -> str:
        return "".join(f"\n--- {log.name}\n{log.read_text()[-3000:]}" for log in self.dir.glob("logs/*.log"))

    def summary(self) -> dict[str, Any]:
        return json.loads((self.dir / "summary.json").read_text())

    def metrics(self) -> list[dict[str, Any]]:
        path = self.dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait_for_step(self, step: int) -> None:
        self.until(lambda: len(self.metrics()) > step)

    def until(self, condition: Callable[[], bool], interval_s: float = 0.05) -> None:
        """Wait while the run goes on; fails when it ends."""
        wait_for(condition, self.is_running, self.told, patience_s=DEADLINE_S, interval_s=interval_s)

    def is_running(self) -> bool:
        assert self.process is not None
        return self.process.poll() is None

    def told(self) -> str:
        """Everything that the run has printed and logged."""
        return self.console.read_text() + self.logs()


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest):
    """Makes runs, each in its own folder. A slow test starts new processes; the others fork them."""
    tiny_policy(tmp_path, "llama")
    is_slow = request.node.get_closest_marker("slow") is not None
    jobs: list[Job] = []

    def make(**settings: object) -> Job:
        jobs.append(Job(tmp_path, **{key.replace("__", "."): value for key, value in settings.items()}))
        jobs[-1].forks = not is_slow
        return jobs[-1]

    yield make
    for each in jobs:
        if each.process is not None and each.process.poll() is None:
            each.process.kill()
            each.process.wait(DEADLINE_S)


MakeJob = Callable[..., Job]


def assert_account_adds_up(job: Job) -> dict[str, Any]:
    """The identity holds in the summary and in a replay of the journal, and both are equal."""
    account = job.summary()["accounting"]
    ends = ("trained", "evicted", "filtered", "failed", "in_flight")
    assert account["holds"] is True, job.logs()
    assert account["leased"] == sum(account[name] for name in ends)
    assert account_dict(replay(job.dir / "journal.jsonl")) == account
    return account


def descendants_of(pid: int) -> list[int]:
    """Process ids of everything that a process has started, and of what those have."""
    return [each for child in children_of(pid) for each in (child, *descendants_of(child))]


def child_of(run: Job, name: str) -> int:
    """Process id of a role's process."""
    return process_of(run.dir, name)


def process_of(run_dir: Path, name: str) -> int:
    """Process id of a role's process of the run in a folder, found by its command line."""
    role, _, index = name.partition("-")
    wanted = f"--role\0{role}\0--index\0{index}\0--run\0{run_dir}".encode()
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if wanted in cmdline.read_bytes():
                return int(cmdline.parent.name)
        except OSError:
            continue
    raise AssertionError(f"no process of {name}")
