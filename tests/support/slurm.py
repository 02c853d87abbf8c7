"""A Slurm cluster on one machine: slurmctld, munged, and a slurmd for each node. Needs root and Debian's slurm packages.

All nodes are this machine, so they share its addresses, processes and files. Everything ends with `close`.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

PATIENCE_S = 120.0
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "scancel", "squeue")

_CONF = """
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmdLogFile={folder}/slurmd_%n.log
SlurmdSpoolDir={folder}/spool_%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


@cache
def obstacle() -> str:
    """Why no cluster can be made on this machine; empty if one can."""
    if os.geteuid() != 0:
        return "a Slurm cluster needs root"
    path = f"{os.environ['PATH']}:/usr/sbin"
    if missing := [program for program in PROGRAMS if shutil.which(program, path=path) is None]:
        return f"a Slurm cluster needs {', '.join(missing)}: bash tests/install_packages.sh"
    return ""


class ClusterRefused(Exception):
    """Slurm is installed, but its daemons do not run on this machine."""


class SlurmCluster:
    """Nodes n1 to n`num_nodes`, each with four cores; partition `high` preempts jobs in `low`, the default."""

    def __init__(self, num_nodes: int) -> None:
        self._folder = folder = Path(mkdtemp(prefix="slurm-", dir="/tmp"))  # short, for the socket's path
        self._stack = ExitStack()
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        ports = free_ports(num_nodes + 1)
        host = socket.gethostname()
        nodes = "\n".join(
            f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[number]} CPUs=4 RealMemory=4000"
            for number in range(1, num_nodes + 1)
        )
        conf = folder / "slurm.conf"
        conf.write_text(_CONF.format(name=folder.name, host=host, ports=ports, folder=folder, nodes=nodes))
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        folder.chmod(0o755)
        self._environment = os.environ | {"SLURM_CONF": str(conf), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
        munge = [f"--{name}={folder / file}" for name, file in _MUNGE_FILES.items()]
        with ExitStack() as stack:
            self._stack = stack
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            self._start("munged", ["munged", "--foreground", "--force", *munge])
            self._start("slurmctld", ["slurmctld", "-D", "-f", str(conf)])
            for number in range(1, num_nodes + 1):
                self._start(f"n{number}", ["slurmd", "-D", "-f", str(conf), "-N", f"n{number}"])
            self._wait_for_nodes(num_nodes)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Cancel all jobs and end the daemons; closing twice is allowed."""
        if self._daemons:
            with suppress(subprocess.CalledProcessError):
                self.run("scancel", "--state=RUNNING", "--full")
                self.run("scancel", "--state=PENDING")
                _until(lambda: not self.run("squeue", "--noheader"), "the end of the jobs")
        self._daemons.clear()
        self._stack.close()

    def run(self, *words: str, **environment: str) -> str:
        """The output of one of Slurm's commands."""
        done = subprocess.run(
            words, env=self._environment | environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, script: Path, *options: str, **environment: str) -> str:
        """Submit a script; returns the number of its job."""
        return self.run("sbatch", "--parsable", *options, str(script), **environment)

    def state_of(self, job: str) -> str:
        """The state of a job, such as RUNNING or COMPLETED."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return next(word.removeprefix("JobState=") for word in words if word.startswith("JobState="))

    def kill_node(self, name: str) -> None:
        """SIGKILL to the node's daemon and everything that it runs."""
        for pid in _processes_of(name, self._folder):
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        self._daemons[name].kill()
        self._daemons[name].wait(PATIENCE_S)

    def processes(self) -> list[int]:
        """Ids of the processes of all jobs."""
        return [pid for name in self._daemons if name.startswith("n") for pid in _processes_of(name, self._folder)]

    def _wait_for_nodes(self, num_nodes: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (
            self._try("sinfo", "--noheader", "--Node", "--partition=low", "--format=%T").split() != ["idle"] * num_nodes
        ):
            ended = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = "".join(path.read_text()[-500:] for path in sorted(self._folder.glob("*.out")))
                raise ClusterRefused(f"Slurm does not run here: {ended or 'its nodes'} did not start: {logs}")
            time.sleep(0.2)

    def _try(self, *words: str) -> str:
        environment = self._environment
        return subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        ).stdout

    def _start(self, name: str, command: Sequence[str]) -> None:
        with (self._folder / f"{name}.out").open("w") as output:
            daemon = subprocess.Popen(command, env=self._environment, stdout=output, stderr=subprocess.STDOUT)
        self._daemons[name] = daemon
        self._stack.callback(_end, daemon)


_MUNGE_FILES = {
    "key-file": "munge.key",
    "socket": "munge.sock",
    "pid-file": "munge.pid",
    "log-file": "munge.log",
    "seed-file": "munge.seed",
}


def _end(daemon: "subprocess.Popen[bytes]") -> None:
    daemon.terminate()
    try:
        daemon.wait(PATIENCE_S / 4)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait(PATIENCE_S)


def _processes_of(node: str, folder: Path) -> list[int]:
    """Processes that a node of this cluster runs: they inherit its name and the cluster's configuration."""
    marks = (f"SLURMD_NODENAME={node}".encode(), f"SLURM_CONF={folder / 'slurm.conf'}".encode())
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if all(mark in words for mark in marks):
                found.append(int(path.parent.name))
    return found


def free_ports(count: int) -> list[int]:
    """Free ports of this machine."""
    with ExitStack() as stack:
        found = [stack.enter_context(closing(socket.create_server(("127.0.0.1", 0)))) for _ in range(count)]
        return [each.getsockname()[1] for each in found]


def _until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: nothing after {PATIENCE_S:g} s"
        time.sleep(0.2)
