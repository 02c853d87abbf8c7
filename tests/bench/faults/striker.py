"""Strikes a run: one fault after the other, each with a verdict and the times of recovery.

A target whose role is in `placement.RESTARTABLE` costs the run nothing but time: it trains on. The death of any other process
ends the run with all of its processes, as the documentation says, and the run is resumed. A frozen process costs only time.
"""

import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from headrace.comm.errors import WaitTimeout
from headrace.comm.waits import waiting
from headrace.launch.placement import RESTARTABLE
from headrace.launch.processes.child import print_message
from headrace.launch.processes.exits import MAX_RESTARTS, RESTART_WINDOW_S

from .checks import problems_of_end, problems_of_journal, shared_memory_names
from .failpoints import Hit, held_at
from .growth import Growth
from .job import FaultyJob
from .journal_tail import is_back, named_times, recovery_times
from .memory_cgroup import memory_cgroup
from .processes import send
from .read_only import read_only

GOES_ON_S = 120.0
"""Seconds in which a run trains again after a fault; processes import torch meanwhile."""
_FAILPOINT_S = 60.0
_STARVED_S = 30.0
"""Until the kernel has killed a process that has no memory: it does at the next page that the process needs."""
FOLDERS = "folders of the run"
_KILLED_FOR_MEMORY = "was killed by the kernel for memory"
_STEPS_AFTER = 2
_BETWEEN_S = RESTART_WINDOW_S / (MAX_RESTARTS - 1)
"""Between two kills of one target: a supervisor takes a child that dies more often for a broken one."""

MOMENTS: Mapping[str, Callable[[Hit], bool] | None] = {
    "any": None,
    "idle": lambda hit: hit.point == "idle",
    "generating": lambda hit: hit.point == "generate",
    "pushing": lambda hit: hit.point == "push",
    "pulling": lambda hit: hit.point == "pull",
    "repacking": lambda hit: hit.point == "repack",
    "checkpointing": lambda hit: hit.point == "seal",
    "forwarding": lambda hit: hit.point == "receive",
}
"""The moments at which a fault may strike. `idle` is that of a rollout without work, `forwarding` that of a version on
its way to another relay, whose digest is still to come."""


@dataclass(frozen=True, slots=True)
class Fault:
    """SIGKILL of the targets at a moment, or SIGSTOP for `frozen_s` seconds if that is above 0.

    The target `FOLDERS` is frozen by a read-only mount over the folders in which the run makes files.
    """

    targets: tuple[str, ...]
    moment: str = "any"
    frozen_s: float = 0.0
    starves: bool = False
    """Whether the kernel kills the targets, in a cgroup without memory for them."""

    def __str__(self) -> str:
        what = f"freeze {self.frozen_s:g} s" if self.frozen_s else "starve" if self.starves else "kill"
        return f"{what} {' and '.join(self.targets)}, {self.moment}"

    @property
    def ends_the_run(self) -> bool:
        """Whether the run ends with this fault, as documented."""
        return not self.frozen_s and any(name.partition("-")[0] not in RESTARTABLE for name in self.targets)


@dataclass(slots=True)
class Strike:
    """A fault that struck: whether it was seen to, what did not hold, and the seconds of recovery."""

    fault: Fault
    has_struck: bool = True
    problems: list[str] = field(default_factory=list)
    recovery: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Striker:
    """Strikes one job and keeps all verdicts."""

    job: FaultyJob
    growth: Growth
    strikes: list[Strike] = field(default_factory=list)
    shared_memory: set[str] = field(default_factory=shared_memory_names)
    _killed_at: dict[str, float] = field(default_factory=dict)

    def strike(self, fault: Fault) -> Strike:
        """Let one fault strike the run, which is started first if it does not run; prints the verdict."""
        strike = Strike(fault)
        self.strikes.append(strike)
        try:
            self._make_ready(fault)
            self._strike(strike)
        except WaitTimeout as error:
            first_line = str(error).partition("\n")[0]
            strike.problems.append(f"{first_line}{self.job.console_tail()}")
            self.job.kill()
            self.job.wait_for_end()
        times = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in strike.recovery.items())
        verdict = "; ".join(strike.problems) or ("holds" if strike.has_struck else "did not come about")
        note = "; ends the run, as documented" if fault.ends_the_run else ""
        print_message(f"{fault}: {verdict}{note} ({times})")
        return strike

    def rest(self, seconds: float) -> None:
        """Leave the run alone for a while."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.growth.sample()
            time.sleep(min(left, 0.5))

    def _make_ready(self, fault: Fault) -> None:
        if not self.job.is_running():
            self.job.start()
        last = max(self._killed_at.get(name, 0.0) for name in fault.targets)
        self.rest(last + _BETWEEN_S - time.time())
        with waiting("the run", "all of its processes", GOES_ON_S) as wait:
            wait.until(self.job.is_complete, 0.2)

    def _strike(self, strike: Strike) -> None:
        fault, tail = strike.fault, self.job.tail
        tail.remember_units(tail.read())
        units = set(tail.units)
        moment = MOMENTS[fault.moment]
        if moment is None:
            since = self._hit(strike)
        else:
            with held_at(self.job.failpoints, moment, _FAILPOINT_S) as hit:
                if hit is None:
                    strike.has_struck = False
                    return
                since = self._hit(strike)
        if fault.frozen_s:
            since = self._thaw(fault, since)
        if fault.ends_the_run:
            self.job.wait_for_end()
            strike.problems += problems_of_end(self.job, self.shared_memory)
            self.job.start()
            return
        self._watch(strike, since, units)
        strike.problems += problems_of_journal(self.job.dir)

    def _hit(self, strike: Strike) -> float:
        """Signal the targets; returns when, on the wall clock."""
        fault = strike.fault
        if fault.targets == (FOLDERS,):
            with read_only(self.job.folders()):
                self.rest(fault.frozen_s)
            return time.time()
        pids = [pid for name in fault.targets for pid in self.job.pids(name)]
        since = time.time()
        if not fault.frozen_s:
            self._killed_at.update(dict.fromkeys(fault.targets, since))
        if fault.starves:
            self._starve(pids)
        elif not send(pids, signal.SIGSTOP if fault.frozen_s else signal.SIGKILL):
            raise WaitTimeout(f"{' and '.join(fault.targets)} is not there")
        return since

    def _starve(self, pids: Sequence[int]) -> None:
        """Let the kernel kill these processes for memory, and the run say so."""
        num_told = self.job.console().count(_KILLED_FOR_MEMORY)
        with memory_cgroup(1) as group, waiting("the kernel", "the end of a starved process", _STARVED_S) as wait:
            for pid in pids:
                (group / "cgroup.procs").write_text(str(pid))
            wait.until(lambda: not (group / "cgroup.procs").read_text().strip(), 0.05)
        with waiting("the run", "its line about a process that was killed for memory", _STARVED_S) as wait:
            wait.until(lambda: self.job.console().count(_KILLED_FOR_MEMORY) >= num_told + len(pids), 0.1)

    def _thaw(self, fault: Fault, since: float) -> float:
        """Wait for the end of a freeze and let the targets continue; returns when."""
        if fault.targets == (FOLDERS,):
            return since
        self.rest(since + fault.frozen_s - time.time())
        send([pid for name in fault.targets for pid in self.job.pids(name)], signal.SIGCONT)
        return time.time()

    def _watch(self, strike: Strike, since: float, units: set[str]) -> None:
        """Wait until the run trains again and the killed processes do what they did; notes the times of recovery."""
        job, fault, seen = self.job, strike.fault, list(self.job.tail.read())
        before = job.tail.steps

        def goes_on() -> bool:
            self.growth.sample()
            if not job.is_running():
                raise WaitTimeout("the run has ended")
            seen.extend(job.tail.read())
            found = [recovery_times(target, since, seen, units) for target in fault.targets]
            strike.recovery.update(
                {name: max(each.get(name, 0.0) for each in found) for each in found for name in each}
            )
            are_back = fault.frozen_s or all(map(is_back, fault.targets, found))
            return bool(are_back) and job.tail.steps >= before + _STEPS_AFTER

        with waiting("the run", f"its next steps after {fault}", GOES_ON_S) as wait:
            wait.until(goes_on, 0.1)
        job.tail.remember_units(seen)
        if not fault.frozen_s:
            strike.recovery = named_times(strike.recovery, job.cold_start_s)

    def finish(self) -> list[str]:
        """End the run in order; returns what does not hold then."""
        self.job.interrupt()
        problems = list(problems_of_end(self.job, self.shared_memory))
        summary = self.job.summary()
        if summary is None or summary["status"] != "interrupted":
            problems.append(f"the run did not end in order: {summary}{self.job.console_tail()}")
        for problem in problems:
            print_message(f"at the end: {problem}")
        return problems


@contextmanager
def open_striker(seed: int, num_relays: int) -> Iterator[Striker]:
    """A striker of a new run, whose processes and files are gone at the end; a run with problems keeps its folder."""
    home = Path(tempfile.mkdtemp(prefix="headrace-faults-"))
    job = FaultyJob(home, num_relays)
    striker = Striker(job, Growth(job.failpoints))
    try:
        job.make(seed)
        yield striker
    finally:
        job.kill()
        if any(strike.problems for strike in striker.strikes):
            print_message(f"the run is kept in {home}")
        else:
            shutil.rmtree(home, ignore_errors=True)
