"""The batch scripts of launch/slurm, run by a Slurm of this machine."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.job import DEADLINE_S, Job
from support.policies import tiny_policy
from support.polling import wait_for
from support.slurm import ClusterRefused, SlurmCluster, free_ports, obstacle

from headrace.launch.audit import main as audit
from headrace.launch.status import command as ctl

pytestmark = [
    pytest.mark.skipif(bool(obstacle()), reason=obstacle()),
    pytest.mark.xdist_group("slurm"),
]

SCRIPTS = Path(__file__).parents[2] / "launch" / "slurm"
ON_A_LAPTOP = ("--cpus-per-task=1", "--gpus-per-node=0", "--time=60")


class SlurmJob(Job):
    """A job of a cluster that runs a recipe by one of the scripts."""

    def __init__(self, cluster: SlurmCluster, folder: Path, **settings: object) -> None:
        super().__init__(folder, **settings)
        tiny_policy(folder, "llama")
        (folder / "recipe.yaml").write_text("{}\n")
        self.cluster = cluster
        self.number = ""

    def submit(self, script: str, *options: str, **environment: str) -> "SlurmJob":
        settings = " ".join(f"{key}={value}" for key, value in self.settings.items() if key != "run.dir")
        own = {"PYTHON": sys.executable, "RECIPE": str(self.folder / "recipe.yaml"), "RUN_DIR": str(self.dir)}
        words = [*ON_A_LAPTOP, f"--output={self.folder / 'job.log'}", *options]
        self.number = self.cluster.submit(SCRIPTS / script, *words, SETTINGS=settings, **own, **environment)
        return self

    def until(self, condition: Callable[[], bool], interval_s: float = 0.2) -> None:
        """Wait while the job is queued or runs; fails when it has ended."""
        wait_for(condition, self.is_running, self.told, patience_s=DEADLINE_S, interval_s=interval_s)

    def is_running(self) -> bool:
        return self.state() in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")

    def told(self) -> str:
        return f"the job is {self.state()}\n{self.output()}"

    def state(self) -> str:
        return self.cluster.state_of(self.number)

    def wait_for_state(self, state: str) -> None:
        self.until(lambda: self.state() == state)

    def wait_for_second_run(self) -> None:
        """Wait until a job that was queued again is complete. Slurm would hold it back for two minutes, from its last word on it."""

        def has_ended() -> bool:
            if (state := self.state()) == "PENDING":
                self.cluster.run("scontrol", "update", f"JobId={self.number}", "StartTime=now")
            return state == "COMPLETED"

        self.until(has_ended)

    def wait_for_last_process(self) -> None:
        """Wait until no process of the cluster's jobs is left."""
        wait_for(self.has_no_process, lambda: True, self.told, patience_s=DEADLINE_S)

    def output(self) -> str:
        log = self.folder / "job.log"
        return (log.read_text() if log.exists() else "no job.log\n") + self.logs()

    def journal(self) -> str:
        path = self.dir / "journal.jsonl"
        return path.read_text() if path.exists() else ""

    def has_no_process(self) -> bool:
        return not self.cluster.processes()


def job_network() -> dict[str, str]:
    """The nodes' names do not resolve here."""
    return {"FIRST_NODE": "127.0.0.1", "PORT": str(free_ports(1)[0])}


@pytest.fixture
def cluster():
    try:
        made = SlurmCluster(num_nodes=3)
    except ClusterRefused as error:
        pytest.skip(str(error))
    yield made
    made.close()


def test_a_run_on_one_node_ends_with_its_jobs_success(cluster, tmp_path):
    job = SlurmJob(cluster, tmp_path).submit("single_node.sbatch")
    job.wait_for_state("COMPLETED")
    assert job.summary()["status"] == "finished"
    assert audit([str(job.dir)]) == 0
    job.wait_for_last_process()


@pytest.mark.slow
def test_a_job_writes_a_checkpoint_on_sigusr1_and_leaves_another_and_no_process_when_it_is_cancelled(cluster, tmp_path):
    job = SlurmJob(cluster, tmp_path, **{"run.steps": 5000}).submit("single_node.sbatch")
    job.until(lambda: len(job.metrics()) > 2)
    latest = job.dir / "checkpoints" / "latest"
    cluster.run("scancel", "--signal=USR1", job.number)
    job.until(latest.exists)
    first = latest.read_text()
    job.until(lambda: len(job.metrics()) > int(first.removeprefix("step_")) + 2)
    cluster.run("scancel", job.number)
    job.wait_for_last_process()
    job.wait_for_state("CANCELLED")
    assert job.summary()["status"] == "interrupted"
    assert latest.read_text() not in ("", first)


@pytest.mark.slow
def test_a_job_whose_time_is_up_is_queued_again_and_resumes(cluster, tmp_path):
    job = SlurmJob(cluster, tmp_path, **{"run.steps": 60}).submit("single_node.sbatch")
    job.until(lambda: len(job.metrics()) > 2)
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)  # what --signal=B:USR1 does before the time limit
    job.wait_for_state("PENDING")
    steps = len(job.metrics())
    job.wait_for_second_run()
    assert job.summary()["status"] == "finished" and len(job.metrics()) == 60
    assert 2 < steps < 60 and f"step {steps}" in job.output()
    assert audit([str(job.dir)]) == 0


@pytest.mark.slow
def test_a_preempted_job_resumes_when_the_node_is_free_again(cluster, tmp_path):
    job = SlurmJob(cluster, tmp_path, **{"run.steps": 60}).submit("single_node.sbatch")
    job.until(lambda: len(job.metrics()) > 2)
    words = ("--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=true")
    other = cluster.run("sbatch", "--parsable", *words)
    job.until(lambda: cluster.state_of(other) == "COMPLETED")
    job.wait_for_state("PENDING")
    assert job.summary()["status"] == "interrupted" and len(job.metrics()) < 60
    job.wait_for_second_run()
    assert job.summary()["status"] == "finished" and len(job.metrics()) == 60
    assert audit([str(job.dir)]) == 0


@pytest.mark.slow
def test_three_nodes_train_together_and_the_login_node_shows_all_of_them(cluster, tmp_path, capsys):
    settings = {"roles.rollout": 5, "run.steps": 60}
    job = SlurmJob(cluster, tmp_path, **settings).submit("multi_node.sbatch", "--nodes=3", **job_network())
    job.until(lambda: len(job.metrics()) > 2)
    assert ctl.status([str(job.dir)]) == 0
    shown = capsys.readouterr().out
    assert all(role in shown for role in ("actor-0", *(f"rollout-{number}" for number in range(5)))), shown
    job.wait_for_state("COMPLETED")
    assert job.summary()["status"] == "finished"
    assert ctl.status([str(job.dir)]) == 0 and "finished" in capsys.readouterr().out
    assert audit([str(job.dir)]) == 0


@pytest.mark.slow
def test_a_node_without_a_gpu_is_the_relay_of_a_heterogeneous_job(cluster, tmp_path):
    job = SlurmJob(cluster, tmp_path, **{"roles.relay": 1, "roles.rollout": 3})
    job.submit("gpu_and_cpu.sbatch", GPU_RANKS="2", **job_network())
    job.wait_for_state("COMPLETED")
    assert job.summary()["status"] == "finished", job.output()
    assert "(on host" not in job.output() and audit([str(job.dir)]) == 0


@pytest.mark.slow
def test_a_node_that_is_killed_does_not_stop_the_run(cluster, tmp_path):
    settings = {"roles.rollout": 5, "run.steps": 60}
    job = SlurmJob(cluster, tmp_path, **settings).submit("multi_node.sbatch", "--nodes=3", **job_network())
    job.until(lambda: len(job.metrics()) > 2)
    cluster.kill_node("n3")
    job.until(lambda: not job.is_running())
    assert job.summary()["status"] == "finished" and len(job.metrics()) == 60, job.output()
    assert audit([str(job.dir)]) == 0


@pytest.mark.slow
def test_jobs_of_an_array_join_the_trainers_job_and_end_with_it(cluster, tmp_path):
    job = SlurmJob(cluster, tmp_path, **{"run.steps": 100_000})
    options = f"{' '.join(ON_A_LAPTOP)} --output={tmp_path}/joins-%a.log"
    job.submit("elastic.sbatch", JOINING_JOBS="2", JOINING_OPTIONS=options, JOINING_ROLES="roles.rollout=1")
    job.until(lambda: all(f'"holder":"rollout-{number}"' in job.journal() for number in (2, 3)))
    assert ctl.main([str(job.dir), "stop"]) == 0
    job.wait_for_last_process()
    assert job.summary()["status"] == "interrupted"
    assert audit([str(job.dir)]) == 0
    assert not cluster.run("squeue", "--noheader", "--states=RUNNING")
