"""torchrun, the agent of a host, seen from both sides: the launcher starts one for its host and waits for it, and each rank is a child of one.

torchrun knows only success and failure, and prints a long traceback for a failure. So the launcher reads the run's end from
the summary, and a rank that refuses to start ends torchrun by a signal, after its one line.
"""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...comm.environment import JOINING, NUM_THREADS
from ...comm.errors import SettingError
from ...comm.process_tree import children_of, kill_tree
from ...comm.recipe import Recipe, RoleSettings
from ..config.hosts import RANKS_OF_HOSTS
from ..config.run_folder import CONFIG_FILE, FolderWatch, make_run_folder, remove_empty
from ..placement import count_ranks
from .child import Child, print_message
from .signals import WATCHED, blocked_signals, wait_for_signal
from .supervisor import LAUNCHER, SHUTDOWN_S

PATIENCE_S = 2 * SHUTDOWN_S
"""Seconds from an interrupt until torchrun gets SIGQUIT, and from there until it is killed."""
_END = signal.SIGQUIT
"""Ends torchrun, which passes it on to its ranks; these end too, and their processes with them."""
REFUSED = signal.SIGUSR2
"""Ends torchrun when a rank refuses to start: a signal that torchrun leaves alone, so it prints nothing."""
_KILL_S = 10.0
"""Seconds that killed processes have to end: the kernel takes apart memory and devices."""
_BARRIER_S = 2.0
"""Seconds that torchrun may wait for the torchruns of other hosts once its ranks have ended."""
_POLL_S = 0.5
"""Seconds between two checks of torchrun."""
_REFUSAL_S = 5.0
_TELL_S = 120.0


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a run and the place of this one among them, in torchrun's own words."""

    nnodes: int = 1
    node_rank: int = 0
    nproc_per_node: tuple[int, ...] = ()
    """Ranks on each host: one number for all, or one for each; without any the roles are divided equally."""
    master_addr: str = ""
    master_port: int = 29500

    @classmethod
    def of(cls, options: Mapping[str, str]) -> "Hosts":
        """The hosts that torchrun's options describe, without their dashes. Raises `SettingError`."""
        values: dict[str, int | str | tuple[int, ...]] = {}
        for option, text in options.items():
            name = option.replace("-", "_")
            words = text.split(",") if name == "nproc_per_node" else [text]
            if name != "master_addr" and not all(word.isdigit() for word in words):
                raise SettingError(f"--{option}={text} is not a number")
            if name == "nproc_per_node":
                values[name] = tuple(map(int, words))
            else:
                values[name] = text if name == "master_addr" else int(text)
        hosts = cls(**values)  # pyright: ignore[reportArgumentType]
        if hosts.master_addr and "nnodes" not in options:  # each host would train alone
            raise SettingError(f"--master-addr={hosts.master_addr} needs --nnodes, the number of hosts")
        if hosts.nnodes > 1 and not hosts.master_addr:
            raise SettingError(f"--nnodes={hosts.nnodes} needs --master-addr, the address of the first host")
        if len(hosts.nproc_per_node) > 1 and len(hosts.nproc_per_node) != hosts.nnodes:
            raise SettingError(
                f"--nproc-per-node={options['nproc-per-node']} lists {len(hosts.nproc_per_node)} hosts, not --nnodes={hosts.nnodes}"
            )
        if hosts.node_rank >= hosts.nnodes:
            raise SettingError(f"--node-rank={hosts.node_rank} must be below --nnodes={hosts.nnodes}")
        return hosts

    def ranks(self, roles: RoleSettings) -> list[int]:
        """Ranks on each host. Raises `SettingError` if the roles do not fill the hosts."""
        if len(self.nproc_per_node) > 1:
            return list(self.nproc_per_node)
        wanted = count_ranks(roles, self.nnodes)
        if self.nproc_per_node or wanted % self.nnodes == 0:
            return [*(self.nproc_per_node or [wanted // self.nnodes])] * self.nnodes
        raise SettingError(
            f"roles: their sum is {wanted} ranks, which {self.nnodes} hosts (--nnodes) cannot share equally; change roles, or"
            " give each host its own number, such as --nproc-per-node 4,4,1"
        )

    def check_port(self) -> None:
        """Raise `SettingError` if the port of the first host, which this one is, is taken: torchrun would print a traceback."""
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        with socket.socket(family) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind(("", self.master_port))
                server.listen()
            except OSError as error:
                raise SettingError(
                    f"--master-port={self.master_port}: {error.strerror} on this host; give all hosts another port"
                ) from None

    def torchrun_options(self, roles: RoleSettings) -> list[str]:
        """The options of torchrun on this host."""
        ranks = ["--nproc-per-node", str(self.ranks(roles)[self.node_rank])]
        if self.nnodes == 1:
            return ["--standalone", *ranks]
        place = ["--nnodes", str(self.nnodes), "--node-rank", str(self.node_rank)]
        return [*place, *ranks, "--master-addr", self.master_addr, "--master-port", str(self.master_port)]


class Torchrun:
    """torchrun as a child of the launcher. Signals go to the supervisors, its children."""

    def __init__(
        self,
        recipe: Recipe,
        hosts: Hosts,
        words: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`words` are the command line of the ranks; without any they read the recipe that the launcher has saved.

        environment: variables for the ranks, beside those of this process.
        """
        self._environment = dict(environment or {})
        self._run_dir = Path(recipe.run.dir)
        self._grace_s = SHUTDOWN_S + recipe.checkpoint.grace_s
        self._hosts = hosts
        self._logs = self._run_dir / "logs" / f"torchrun-{hosts.node_rank}"  # empty files, which it would leave in /tmp
        options = [
            *hosts.torchrun_options(recipe.roles),
            "--log-dir",
            str(self._logs),
            "--signals-to-handle",
            _END.name,
        ]
        words = words or [str(self._run_dir / CONFIG_FILE)]
        self._command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "headrace.launch.run", *words]
        self._deadline = float("inf")
        self._kills = iter((_END, signal.SIGKILL))
        self._has_ranks = False
        self._idle_since: float | None = None
        self.received = 0
        """The signal that interrupted the run; 0 without one."""
        self.lost_folder = ""
        """The message about the run folder, if it is not in its place at the end."""

    def run(self, on_start: Callable[[], None] = lambda: None) -> int:
        """Start torchrun, call `on_start`, and wait for its end; returns its exit code, minus the signal if one ended it.

        It waits for signals, at most until the deadline: SIGCHLD when torchrun has ended, others to pass on.
        """
        with blocked_signals():
            return self._run(on_start)

    def _run(self, on_start: Callable[[], None]) -> int:
        environment = {
            NUM_THREADS: os.environ.get(
                NUM_THREADS, "1"
            ),  # without it torchrun prints a warning; `launch.cores` decides
            **self._environment,
            LAUNCHER: str(os.getpid()),
        }
        if len(self._hosts.nproc_per_node) > 1:
            environment[RANKS_OF_HOSTS] = ",".join(map(str, self._hosts.nproc_per_node))
        if self._hosts.nnodes > 1:
            # At its end it would log a traceback for each torchrun that ended before it.
            environment["LOGLEVEL"] = os.environ.get("LOGLEVEL", "CRITICAL")
        is_new = not self._run_dir.exists()
        folder = FolderWatch(make_run_folder(self._run_dir))
        # A cluster's scheduler sends SIGTERM to all processes of a job, and torchrun would kill its ranks after 30 s.
        torchrun = Child("torchrun", self._command, environment=environment, ignores_sigterm=True)
        on_start()
        while (code := torchrun.poll()) is None:
            if (received := wait_for_signal(self._sleep_s())) not in (0, signal.SIGCHLD):
                self._interrupt(torchrun, received)
            if time.monotonic() >= self._deadline:
                self._deadline = time.monotonic() + PATIENCE_S
                if (number := next(self._kills, signal.SIGKILL)) != signal.SIGKILL:
                    torchrun.send(number)
                elif left := kill_tree(torchrun.pid, _KILL_S):
                    print_message(
                        f"processes still there after SIGKILL, blocked in the kernel: {', '.join(map(str, left))}"
                    )
            if self._is_left_behind(torchrun):
                torchrun.send(signal.SIGKILL)
        self.lost_folder = folder.problem()
        shutil.rmtree(self._logs, ignore_errors=True)
        remove_empty_cache()
        if code == -REFUSED and is_new:
            remove_empty(self._logs.parent, self._run_dir)
        return 0 if self._idle_since is not None and code == -signal.SIGKILL else code

    def _sleep_s(self) -> float:
        return min(_POLL_S, max(0.0, self._deadline - time.monotonic()))

    def _is_left_behind(self, torchrun: Child) -> bool:
        """Whether the ranks of this host ended some time ago. torchrun waits minutes for a host that is gone."""
        if self._hosts.nnodes == 1:
            return False
        if children_of(torchrun.pid):
            self._has_ranks = True
            self._idle_since = None
        elif self._has_ranks and self._idle_since is None:
            self._idle_since = time.monotonic()
        return self._idle_since is not None and time.monotonic() - self._idle_since > _BARRIER_S

    def _interrupt(self, torchrun: Child, number: int) -> None:
        """Pass the first signal to the supervisors, which end the run in order; torchrun would print a traceback.

        SIGUSR1 ends nothing: the run writes a checkpoint.
        """
        supervisors = children_of(torchrun.pid)
        if number == signal.SIGUSR1:
            print_message("SIGUSR1: the run writes a checkpoint after the next step and continues")
            send_signal(supervisors, number)
            return
        if self.received:
            print_message("interrupted again: the run is killed")
            self._kills = iter(())
            self._deadline = time.monotonic()
            return
        self.received = number
        self._deadline = time.monotonic() + PATIENCE_S - SHUTDOWN_S + self._grace_s
        end = (
            "this host finishes its rows and leaves"
            if JOINING in self._environment
            else "the run writes a checkpoint and ends in order"
        )
        print_message(f"{signal.Signals(number).name}: {end}, within {self._grace_s:g} s (a second signal kills it)")
        send_signal(supervisors, number)
        if not supervisors:
            torchrun.send(REFUSED)  # nothing has begun, and torchrun would print a traceback for the others


def remove_empty_cache() -> None:
    """Remove the folder that torch makes when transformers is imported, if nothing was compiled into it."""
    with suppress(OSError, KeyError):  # it has content, or the user has no name
        (Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}").rmdir()


def send_signal(pids: Sequence[int], number: int) -> None:
    """Send a signal to processes, of which some may have ended meanwhile."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def has_other_hosts() -> bool:
    """Whether torchrun has ranks on other hosts too."""
    return int(os.environ["WORLD_SIZE"]) > int(os.environ["LOCAL_WORLD_SIZE"])


def refuse_start(error: SettingError, *, is_known: bool) -> int:
    """Print why this rank does not start, once on each host, and end its torchrun; returns the rank's exit code.

    is_known: whether the other hosts' ranks see the same mistake themselves or depend on this rank. Otherwise the reason is written to
    torchrun's store, which ends the run on the other hosts.
    """
    is_speaker = os.environ.get("LOCAL_RANK", os.environ["RANK"]) == "0"
    parent = os.getppid()
    if is_speaker:
        where = f" (on host {socket.gethostname()})" if has_other_hosts() else ""
        print_message(f"error: {error}{where}")
    if not _is_torchrun(parent):
        return 2
    if is_speaker and not is_known and has_other_hosts():
        text = f"{error} (on host {socket.gethostname()})"
        command = [sys.executable, "-m", "headrace.comm.store.rendezvous", "refuse", text]
        subprocess.run(command, timeout=_TELL_S, check=False)
    if is_speaker:
        os.kill(parent, REFUSED)
    # The others leave the line to the first rank, and end with torchrun.
    signal.sigtimedwait(WATCHED - {signal.SIGCHLD}, _REFUSAL_S)
    return 2


def _is_torchrun(pid: int) -> bool:
    """Whether a process is a torchrun, and not one whose command only mentions it, such as a shell."""
    try:
        program, *words = os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
    except OSError:
        return False
    if not Path(program).name.startswith("python"):
        return Path(program).name == "torchrun"
    rest = iter(words)
    for word in rest:
        if word == "-m":
            return next(rest, "") in ("torch.distributed.run", "torch.distributed.launch")
        if not word.startswith("-"):
            return Path(word).name == "torchrun" or word.endswith("/torch/distributed/run.py")
        if word in ("-X", "-W"):
            next(rest, "")
        elif word == "-c":
            return False
    return False
