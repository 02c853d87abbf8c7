"""The supervisor: one rank as torchrun started it. It starts its role's process as a child and watches it to its end.

A supervisor never imports torch and does no work of its own, so no fault of a role can end it. torchrun would end the
whole run for one dead rank; it does not see that a rollout died and was started again. The supervisor of rank 0 also
starts the run's store, and the supervisor of relay-0 also starts the hub.
"""

import os
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ...comm.environment import (
    GPU_PROCESSES,
    LACKS_MEMORY,
    RUN_ID,
    SECOND_FD,
    SEGMENT_FD,
    STORE,
    STREAMING_COPY_ENV,
    VISIBLE_DEVICES,
    environment_of_threads,
)
from ...comm.errors import MEMORY_FULL_EXIT, STORE_GONE_EXIT, STORE_LOST_EXIT, SettingError, StoreGone
from ...comm.links.host import listening_address
from ...comm.memfd import create_memory
from ...comm.process_tree import end_with_parent
from ...comm.recipe import Recipe
from ..config.gpus import Gpus
from ..config.hosts import JOINED_HOST, ranks_of_hosts
from ..config.run_folder import CONFIG_FILE, SUMMARY_FILE, FolderWatch, start_in
from ..cores import cores_of
from ..placement import (
    Placement,
    actors_partners,
    is_restartable,
    place_ranks,
    processes_on,
    staging_gpu,
    visible_devices,
)
from ..report.peak_memory import write_peaks
from .child import Child, ChildCommands, describe_exit, print_message
from .copies_lock import lock_to_write
from .exits import RESTART_WINDOW_S, ExitKind, classify_exit
from .memory_kill import MemoryKills
from .secret import read_secret
from .signals import block_signals, wait_for_signal
from .store_address import has_store_ended, read_address, start_id

SHUTDOWN_S = 20.0
"""Seconds that children have to end in order once the run fails or is interrupted; then they are killed."""
LEAVE_S = 5.0
"""Seconds from the run's summary until children that still run are ended."""
POLL_S = 0.5
"""Seconds between two checks for the summary."""
STORE_POLL_S = 0.02
"""Seconds between two checks for the address of the store that is starting."""
START_AGAIN_S = 0.5
"""Seconds until a process that the machine could not start is tried again; they double."""
LONGEST_PAUSE_S = 8.0
"""The longest of these pauses."""
FRONT = "front"
"""The process that answers HTTP requests. The run needs it for nothing else."""
LAUNCHER = "HEADRACE_LAUNCHER"
"""Set in the environment by the launcher, which prints the run's summary itself."""


_WITHOUT_FRONT = "the run goes on and answers no more HTTP requests"


@dataclass(slots=True)
class Supervisor:
    """The parent of one role's process, and on some ranks of the store or the hub."""

    recipe: Recipe
    placement: Placement
    world_size: int
    hosts_store: bool = False
    store_address: str = ""
    """Address of the run's store; the supervisor that starts the store reads it from the run folder."""
    store_interface: str = "127.0.0.1"
    has_other_hosts: bool = False
    keeps_others: bool = False
    """Whether an actor rank keeps the copies of one on another host."""
    device: str = ""
    """`CUDA_VISIBLE_DEVICES` of the child; empty hides every GPU."""
    gpu_processes: int = 1
    """The number of the run's processes on that GPU."""
    computing: Mapping[str, str] = field(default_factory=lambda: environment_of_threads(1))
    """Variables with the threads of the role's process, and of those that come after it; the other children have one."""
    commands: ChildCommands = field(default_factory=ChildCommands)
    shutdown_s: float = SHUTDOWN_S
    children: dict[str, Child] = field(default_factory=dict)
    restarts: dict[str, list[float]] = field(default_factory=dict)
    """When each child was started again."""
    exit_code: int = 0
    stopped_by: int = 0
    deadline: float | None = None
    is_late: bool = False
    has_lost_store: bool = False
    has_started: bool = False
    """Whether the processes of the roles have been started."""
    segments: dict[str, int] = field(default_factory=dict)
    """Memory that outlives the role's process, by the variable that passes it on."""
    lock: IO[bytes] | None = None
    """Has the next start of the run wait until this supervisor has written the copies in its memory."""
    last_code: int | None = None
    """Of the role's process that ended last."""
    start: str = field(init=False)
    due: dict[str, float] = field(default_factory=dict)
    """When to try again to start a child for which the machine had no room."""
    failed_starts: dict[str, list[float]] = field(default_factory=dict)
    """When each of them could not be started; empty once it has been."""
    kills: MemoryKills = field(default_factory=MemoryKills)
    lacks_memory: bool = False
    """Whether the kernel has killed the role's process for memory."""
    folder: FolderWatch = field(init=False)
    run_id: str = field(default_factory=lambda: secrets.token_hex(8))
    """Tells the hub, when it is started again, the journal of this start from that of an earlier one."""

    def __post_init__(self) -> None:
        self.folder = FolderWatch(Path(self.recipe.run.dir))
        self.start = start_in(Path(self.recipe.run.dir))

    def run(self) -> int:
        """Start the children and return the supervisor's exit code once all have ended. Raises `SettingError` if the store refuses to start.

        It waits for signals, at most until the deadline: SIGCHLD when a child has ended, others to pass on.
        """
        end_with_parent(signal.SIGTERM, os.getppid())
        block_signals()
        if self.hosts_store:
            self._start_worker("store")
        self._start_roles()
        while self.children or self.due:
            self.kills.look({name: child.pid for name, child in self.children.items()})
            if (received := wait_for_signal(self._patience_s())) not in (0, signal.SIGCHLD):
                self._pass_on(received)
            if not self._is_ending and (problem := self.folder.problem()):
                self._lose_folder(problem)
            for name, child in list(self.children.items()):
                if (code := child.poll()) is not None:
                    del self.children[name]
                    self._on_end(child, code)
            self._hold_to_deadline()
            if self._is_ending or self.is_over():
                self.due.clear()
                continue
            for name in [name for name, moment in self.due.items() if moment <= time.monotonic()]:
                del self.due[name]
                self._start_worker(name)
            self._start_roles()
        if self.placement.role == "actor":
            from .copies_writer import CopiesWriter

            copies = CopiesWriter(self.folder.path, self.placement, self.recipe.roles.actor, self.start)
            copies.write(self.segments, has_ended=self.last_code == 0)
        self._write_peaks()
        return self.exit_code

    def _write_peaks(self) -> None:
        """Record the peak memory of the children; a relay's weights and a trainer's copies are in the memory of its supervisor."""
        peaks = self.kills.peaks
        if self.placement.name in peaks:
            peaks[self.placement.name] += sum(512 * os.fstat(fd).st_blocks for fd in self.segments.values())
        if not self.folder.problem():
            write_peaks(Path(self.recipe.run.dir), self.placement.name, peaks)

    def _start_roles(self) -> None:
        """Start the processes of the roles, once, as soon as the store has an address."""
        if self.hosts_store and not self.store_address:
            self.store_address = read_address(Path(self.recipe.run.dir), start_id())
        if self.has_started or not self.store_address:
            return
        self.has_started = True
        role = self.placement.role
        if role == "relay" or (role == "actor" and is_restartable(role, self.recipe.run, self.recipe.trainer)):
            for variable in (SEGMENT_FD, SECOND_FD)[: 1 + self.keeps_others]:
                self.segments[variable] = create_memory(f"headrace-{self.placement.name}")
        if role == "actor" and self.segments:
            self.lock = lock_to_write(Path(self.recipe.run.dir))
        if self.placement.name == "relay-0":
            self._start_worker("hub")
            if self.recipe.rollout.serve:
                self._start_worker(FRONT)
        self._start_worker(self.placement.name)

    def _start_worker(self, name: str) -> None:
        """Start a role's process, or try again a moment later if the machine has no room for it now."""
        try:
            self.children[name] = self._child(name, self._worker_command(name))
        except OSError as error:
            self._on_failed_start(name, error)
        else:
            self.failed_starts.pop(name, None)

    def _on_failed_start(self, name: str, error: OSError) -> None:
        now = time.monotonic()
        failures = self.failed_starts.setdefault(name, [])
        failures.append(now)
        pause_s = min(LONGEST_PAUSE_S, START_AGAIN_S * 2 ** (len(failures) - 1))
        if now + pause_s - failures[0] <= RESTART_WINDOW_S:
            self.due[name] = now + pause_s
            print_message(f"{name} cannot be started now: {error}; it is tried again in {pause_s:g} s")
            return
        how = f"{name} could not be started for {now - failures[0]:.0f} s: {error}"
        if name == FRONT:
            print_message(f"{how}; {_WITHOUT_FRONT}")
            return
        print_message(f"{how}; the run ends")
        self._report_death(name, how)
        self.exit_code = 1
        self._set_deadline(self.shutdown_s)

    def _worker_command(self, name: str) -> list[str]:
        if name == "store":
            members = str(self.world_size + 1)
            recipe = str(Path(self.recipe.run.dir) / CONFIG_FILE)
            flags = [
                "--interface",
                self.store_interface,
                "--expect",
                members,
                "--recipe",
                recipe,
                "--start",
                start_id(),
            ]
            flags += ["--publish"] * self.has_other_hosts + ["--tls"] * self.recipe.comm.tls
            return [*self.commands.store, *flags]
        role, _, index = name.partition("-")
        return [*self.commands.worker, "--role", role, "--index", index or "0", "--run", self.recipe.run.dir]

    def _child(self, name: str, command: Sequence[str]) -> Child:
        environment = {VISIBLE_DEVICES: self.device if name == self.placement.name else ""}
        environment |= {GPU_PROCESSES: str(self.gpu_processes), RUN_ID: self.run_id}
        environment |= {STORE: self.store_address} if self.store_address else {}
        environment |= self.computing if name == self.placement.name else environment_of_threads(1)
        pass_fds = ()
        if name == self.placement.name:
            environment |= {key: value for key, value in STREAMING_COPY_ENV.items() if key not in os.environ}
            environment |= {variable: str(fd) for variable, fd in self.segments.items()}
            pass_fds = (*self.segments.values(),)
            if self.lacks_memory:
                environment[LACKS_MEMORY] = "1"
        elif name == "store":
            environment["HEADRACE_SECRET"] = read_secret(Path(self.recipe.run.dir)).decode()
        log = Path(self.recipe.run.dir) / "logs" / f"{name}.log"
        console = name in ("hub", "actor-0")
        return Child(name, command, environment=environment, log=log, console=console, pass_fds=pass_fds)

    def _on_end(self, child: Child, code: int) -> None:
        role = self.placement.role if child.name == self.placement.name else child.name
        child.note(describe_exit(child.name, code))
        if child.name == self.placement.name:
            self.last_code = code
        now = time.monotonic()
        can_restart = is_restartable(role, self.recipe.run, self.recipe.trainer)
        is_expected = can_restart or code in (STORE_GONE_EXIT, STORE_LOST_EXIT, -signal.SIGQUIT, -signal.SIGKILL)
        if self.is_over() and is_expected and code != 2:
            return  # the run does not need it any more
        state = {
            "is_restartable": can_restart,
            "is_ending": self._is_ending,
            "has_store_ended": code == STORE_LOST_EXIT and has_store_ended(self.store_address),
        }
        if child.name == "store" and code == 2 and not self.has_started:
            raise SettingError(child.last_line().removeprefix(": "))
        restarts = self.restarts.setdefault(child.name, [])
        kind = classify_exit(role, code, restarts, now, **state)
        if kind is ExitKind.RESTART:
            restarts.append(now)
            how, has_cause = self._describe(child, code)
            print_message(
                f"{how}; it is started again" if has_cause else f"{how} and is started again{child.log_tail(3)}"
            )
            self._start_worker(child.name)
        elif child.name == FRONT and code != 2 and kind is ExitKind.FAILED_UNREPORTED:
            print_message(f"{describe_exit(child.name, code)} again and again; {_WITHOUT_FRONT}{child.log_tail(3)}")
        elif kind is not ExitKind.DONE:
            self._fail(child, code, is_reported=kind is ExitKind.FAILED_REPORTED)

    def _describe(self, child: Child, code: int) -> tuple[str, bool]:
        """How a child ended, and whether that says why: its log says nothing about a kill by the kernel."""
        role = self.placement.role if child.name == self.placement.name else child.name
        cause = self.kills.explain(child.name, role) if code == -signal.SIGKILL else ""
        self.lacks_memory |= bool(cause) and child.name == self.placement.name
        if code == MEMORY_FULL_EXIT:
            cause = f"{child.name}{child.last_line()}"
        return cause or describe_exit(child.name, code), bool(cause)

    def _lose_folder(self, problem: str) -> None:
        """End the run at once: whatever a process wrote by the folder's path would be in no run's folder."""
        if LAUNCHER not in os.environ and os.environ.get("LOCAL_RANK", "0") == "0":
            print_message(f"error: {problem}")
        self.exit_code = 2
        for name, child in self.children.items():
            child.send(signal.SIGQUIT if name == "store" else signal.SIGKILL)
        self._set_deadline(LEAVE_S)

    @property
    def _is_ending(self) -> bool:
        return bool(self.stopped_by or self.exit_code)

    def _fail(self, child: Child, code: int, *, is_reported: bool) -> None:
        is_first = not self._is_ending
        self.has_lost_store |= code in (STORE_GONE_EXIT, STORE_LOST_EXIT)
        self.exit_code = self.exit_code or (2 if code == 2 else 1)
        self._set_deadline(self.shutdown_s)
        if not is_first:
            return
        has_joined = self.placement.host == JOINED_HOST
        if code == 2:
            if LAUNCHER not in os.environ or self.has_other_hosts:
                how = "cannot work here; this host leaves the run" if has_joined else "ended the run"
                print_message(f"{child.name} {how}{child.log_tail(1)}")
            return
        if self.has_lost_store:
            print_message(f"{child.name} has no connection to the run's store; the run ends on this host")
            return
        error, has_cause = self._describe(child, code)
        if restarts := self.restarts.get(child.name):
            error += f", after {len(restarts)} restarts{'' if has_cause else child.last_line()}"
        tail = "" if has_cause else child.log_tail()
        print_message(f"{error}; {'this host leaves the run' if has_joined else 'the run ends'}{tail}")
        if is_reported or child.name == "store" or has_joined:
            return
        self._report_death(child.name, error)

    def _report_death(self, name: str, error: str) -> None:
        """Tell the hub that a process is not started again, which ends the run."""
        from .failure_report import report_death  # with the client of the store, which few supervisors need

        try:
            report_death(name, self.recipe, self.store_address, read_secret(Path(self.recipe.run.dir)), error)
        except (OSError, StoreGone) as problem:
            print_message(f"the hub could not be informed: {problem}")

    def _pass_on(self, number: int) -> None:
        """Pass the first SIGINT or SIGTERM on to the roles; the store stays until they have left. SIGUSR1 goes to the hub."""
        if number == signal.SIGUSR1:
            if "hub" in self.children:
                self.children["hub"].send(number)
        elif not self.stopped_by:
            self.stopped_by = number
            # The trainer writes a checkpoint, of which hub and relays must hear. A rollout that has joined finishes its rows.
            needs_grace = self.placement.role in ("actor", "relay") or self.placement.host == JOINED_HOST
            grace_s = self.recipe.checkpoint.grace_s if needs_grace else 0.0
            self._set_deadline(self.shutdown_s + grace_s)
            for name, child in self.children.items():
                if name != "store":
                    child.send(number)
                elif not self.has_started:
                    child.send(signal.SIGQUIT)  # without an address no member could join

    def _set_deadline(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self.deadline = deadline if self.deadline is None else min(self.deadline, deadline)

    def is_over(self) -> bool:
        """Whether the hub has ended the run and written its summary."""
        return (Path(self.recipe.run.dir) / SUMMARY_FILE).exists()

    def _patience_s(self) -> float:
        """Seconds to sleep: until the deadline, and at most until the next look for the run's end.

        A process that joins while the run ends receives no `Stop`; it waits for others that have left.
        """
        if self.is_over():
            self._set_deadline(LEAVE_S)
        if not self.has_started and not self._is_ending:
            return STORE_POLL_S
        left = POLL_S if self.deadline is None else max(0.0, self.deadline - time.monotonic())
        return min(left, POLL_S)

    def _hold_to_deadline(self) -> None:
        if self.deadline is None or time.monotonic() < self.deadline or not self.children:
            return
        for name, child in self.children.items():
            if name == "store" and not self.is_late:
                child.send(signal.SIGQUIT)
                continue
            if not self.is_over():
                print_message(f"{name} did not end in time and is killed; its log is {child.log}")
                self.exit_code = self.exit_code or 1
            child.send(signal.SIGKILL)
        self.is_late = True
        self.deadline = time.monotonic() + self.shutdown_s


def supervise(recipe: Recipe, store_address: str, joining: Sequence[Placement] = ()) -> int:
    """Supervise the rank of torchrun's environment; returns its exit code. Raises `SettingError` before any start.

    store_address: of the run's store, which rank 0 starts; empty for that rank.
    joining: the placement of this host's ranks, where it joins a running job.

    A run under the launcher that ended in order, for whatever reason, returns 0: torchrun knows only success and failure
    and would print a traceback. The launcher reads from the summary how the run ended.
    """
    hosts = ranks_of_hosts()
    placements = joining or place_ranks(recipe.roles, hosts, recipe.rollout.tp)
    placement = placements[int(os.environ["RANK"])]
    gpus = Gpus.of_this_host().names
    if not gpus and os.environ.get("LOCAL_RANK") == "0":
        print_message("no GPU is visible here; all processes of this host run on the CPU")
    device = visible_devices(placement, gpus, staging_gpu(recipe.comm.link, placements, placement.host, gpus))
    supervisor = Supervisor(
        recipe, placement, sum(hosts), hosts_store=not store_address, store_address=store_address, device=device
    )
    supervisor.gpu_processes = processes_on(placements, placement, gpus)
    here = [place.role for place in placements if place.host == placement.host]
    cores = cores_of(recipe, here, has_gpus=bool(gpus))
    supervisor.computing = cores.environment(placement.role, has_all=len(here) == len(placements))
    supervisor.has_other_hosts = bool(joining) or len(hosts) > 1
    supervisor.keeps_others = placement.role == "actor" and bool(actors_partners(placement.index, placements))
    if supervisor.hosts_store:
        towards = os.environ["MASTER_ADDR"] if supervisor.has_other_hosts else ""
        supervisor.store_interface = listening_address(recipe.comm.interface, towards)
    exit_code = supervisor.run()
    # No summary tells the launcher of a host that has joined about a mistake.
    is_told = exit_code == 2 and not joining
    is_in_order = supervisor.stopped_by or is_told or supervisor.has_lost_store or supervisor.is_over()
    return 0 if LAUNCHER in os.environ and is_in_order else exit_code
