"""A whole run in virtual time under faults: the real loops of hub, trainer, rollouts and relays, as threads of one world.

    FaultyRun(folder, recipe, plan).run()

The loops, the experience queue, leases, repack, the partial pool, evaluations, checkpoints, saved rows, the journal and the shutdown are
those of a real run. Counterparts carry messages, rows and weights (`cluster.py`); devices are emulated. Invariant: a run depends on
its recipe and its plan alone.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from headrace.comm import threads
from headrace.comm.errors import HeadraceError
from headrace.comm.fleet import Member, member_name
from headrace.comm.messages import Interrupted
from headrace.comm.messages.base import role_of
from headrace.comm.messages.migration import TransferOffered
from headrace.comm.recipe import Recipe
from headrace.launch.lab.emulated.generator import EmulatedGenerator
from headrace.launch.lab.emulated.rewards import EmulatedRewards
from headrace.launch.lab.virtual.rollouts import Parcel, VirtualTransfers
from headrace.launch.lab.virtual.world import World, WorldClock
from headrace.launch.resume import prepare_folder
from headrace.relay.hub.loop import run as run_hub
from headrace.relay.loop import serve_rows
from headrace.rollout.migration.codec import MovedRow

from .checks import Checks
from .cluster import Cluster, ClusterFleet, WeightsReader
from .processes import Killed, VirtualProcess, VirtualThread
from .threads import VirtualThreads

if TYPE_CHECKING:
    from headrace.relay.hub.hub import Hub

RESTART_S = 0.5
"""Until a process that died runs again, at the least."""
LIVENESS_S = 60.0
"""Within so many seconds after the last fault, and after each step, a step is trained."""
SHUTDOWN_S = 20.0
"""Until supervisors kill what is left of a run that has ended."""
SECOND_S = 0.2
"""Between two deaths that belong together."""
RUN_AGAIN_S = 1.0
"""Until a run that was cut off is resumed."""


class SimulatedClock(WorldClock):
    """The world's time; the wall clock may be set by the user of the host."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.wall_error = 0.0

    def wall(self) -> float:
        return super().wall() + self.wall_error


class MortalTransfers(VirtualTransfers):
    """Transfers that end with their source's process."""

    def __init__(self, process: VirtualProcess, parcels: dict[tuple[str, int], Parcel]) -> None:
        super().__init__(process.name, parcels)
        self._process = process

    def send(self, to: Member, request_id: int, rows: Sequence[MovedRow]) -> Parcel:
        parcel = super().send(to, request_id, rows)
        parcel.source_is_gone = lambda: self._process.is_dead
        return parcel

    def receive(self, sender: str, offer: TransferOffered) -> Parcel:
        parcel = self.parcels.pop((sender, offer.request_id), None)
        if parcel is None or parcel.source_is_gone():
            return Parcel([], error=f"{sender} is gone")
        return Parcel(parcel.content)


class Happening(Protocol):
    """A fault: `apply` lets it happen, and says whether there was anything that it could happen to."""

    @property
    def at(self) -> float: ...

    @property
    def seconds(self) -> float: ...

    def apply(self, run: "FaultyRun") -> bool: ...


class FaultyRun:
    """A run, and as many more as resume it, until its last step is trained."""

    def __init__(
        self, folder: Path, recipe: Recipe, plan: Sequence["Happening"] = (), unit_rows: int = 1 << 20
    ) -> None:
        """unit_rows: of each storage unit, the most that it has room for."""
        self.folder = folder
        self.recipe = replace(recipe, run=replace(recipe.run, dir=str(folder)))
        self.plan = plan
        self.world = World()
        self.clock = SimulatedClock(self.world)
        self.hub: Hub | None = None
        self.checks = Checks(self)
        self.num_starts = 0
        self.applied: Counter[str] = Counter()
        """Faults by kind and role that have really happened."""
        self.is_over = False
        self.drained: set[str] = set()
        """Rollouts that were asked to leave the present start of the run."""
        self.watched: tuple[str, str] | None = None
        """A role whose next death is followed by that of the processes of another one."""
        self._unit_rows = unit_rows
        self._parcels: dict[tuple[str, int], Parcel] = {}
        self._moved_at = 0.0
        """When a step was trained last, or a fault ended."""
        self._step = -1
        self._num_rollouts = recipe.roles.rollout
        self._status = ""

    def run(self) -> None:
        """Train to the last step. Raises `AssertionError` where an invariant does not hold or nothing moves."""
        for fault in self.plan:
            self.world.at(fault.at, partial(self._apply, fault))
        with ExitStack() as stack:
            stack.enter_context(threads.replaced_by(VirtualThreads(self.world)))
            console = stack.enter_context((self.folder / "console.log").open("w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(console))
            stack.callback(self._end_all)
            stack.enter_context(self.checks.errors)
            self.start_run()
            self.world.run_until(self._is_finished)
            self.checks.at_end()

    @property
    def is_running(self) -> bool:
        """Whether a run is under way that has not begun to end."""
        return not self.is_over and not self._status

    # ------------------------------------------------------------------------------------------------- the processes

    def start_run(self) -> None:
        """Start the processes of a run, or of one that resumes it."""
        if self.num_starts:
            self.recipe = replace(self.recipe, run=replace(self.recipe.run, resume="auto"))
        prepare_folder(self.recipe)
        self.num_starts += 1
        self.cluster = Cluster(self.world, f"run {self.num_starts}", self.recipe.comm, self._unit_rows)
        self.cluster.mailboxes.on_last = partial(self.kill, is_noticed=True, down_s=RESTART_S)
        self._parcels.clear()
        self.drained.clear()
        self._status = ""
        roles = self.recipe.roles
        counts = {"hub": 1, "relay": roles.relay or 1, "actor": 1, "rollout": self._num_rollouts}
        for role, count in (counts | {"reference": roles.reference}).items():
            for index in range(count):
                self.start(role, index)

    def start(self, role: str, index: int) -> None:
        """Start the next life of a process."""
        fleet = self.cluster.join(role, index)
        main: Callable[[ClusterFleet], None] = {
            "hub": self._hub, "relay": self._relay, "actor": self._actor, "rollout": self._rollout,
            "reference": self._reference,
        }[role]  # fmt: skip
        VirtualThread(self.world, fleet.process, partial(self._live, main, fleet), "main").start()

    def kill(self, name: str, *, is_noticed: bool, down_s: float) -> None:
        """Kill the present life of a process, and start the next one after a while."""
        process, cluster = self.cluster.lives[name], self.cluster
        if process.is_dead:
            return
        cluster.kill(name, is_noticed=is_noticed)
        self._kill_second(role_of(name))
        if name == "hub":
            self._close_files("journal.jsonl")  # the kernel frees the lock of a dead process
            self.hub = None
        role, _, index = name.partition("-")
        self.world.at(self.world.now + down_s, lambda: self._start_again(cluster, role, int(index or 0)))

    def _kill_second(self, role: str) -> None:
        """The second of two deaths follows the first."""
        if self.watched is None or role != self.watched[0]:
            return
        (_, second), self.watched = self.watched, None
        for other in [name for name in self.cluster.lives if role_of(name) == second]:
            self.world.at(self.world.now + SECOND_S, lambda name=other: self._kill_if_there(name))

    def _kill_if_there(self, name: str) -> None:
        if self.is_running and name in self.cluster.lives:
            self.kill(name, is_noticed=True, down_s=RESTART_S)

    def cut_off(self) -> None:
        """Everything dies at once; the run is resumed after a while."""
        self.hub = None
        self._end_lives()
        self._close_files("")
        self._status = "cut off"
        self.world.at(self.world.now + RUN_AGAIN_S, self.start_run)

    def add_rollout(self) -> None:
        """A rollout joins the run."""
        self._num_rollouts += 1
        self.start("rollout", self._num_rollouts - 1)

    def interrupt(self) -> None:
        """The user ends the run in order; it is resumed after a while."""
        self.cluster.mailboxes.open("launcher").send("hub", Interrupted(15))

    def _start_again(self, cluster: Cluster, role: str, index: int) -> None:
        name = member_name(role, index)
        is_wanted = cluster is self.cluster and cluster.lives[name].is_dead and not self._status
        if is_wanted and (name in cluster.members or role == "hub"):
            self.start(role, index)

    def _live(self, main: Callable[[ClusterFleet], None], fleet: ClusterFleet) -> None:
        try:
            main(fleet)
        except HeadraceError as error:  # the process ends by it, and its supervisor starts the next one
            self.applied[f"{fleet.name}: {type(error).__name__}"] += 1
            assert fleet.me.role != "hub", f"the hub ended by {type(error).__name__}: {error}"
            self.kill(fleet.name, is_noticed=True, down_s=RESTART_S)
            raise Killed from error
        fleet.leave()

    def _hub(self, fleet: ClusterFleet) -> None:
        run_hub(fleet, self.recipe, self.clock, on_open=self._on_hub)
        self.hub, self._status = None, self.checks.status
        if self._status != "finished":
            self.world.at(self.world.now + RUN_AGAIN_S, self._resume)
        else:
            self.world.at(self.world.now + SHUTDOWN_S, self._end_lives)

    def _on_hub(self, hub: "Hub") -> None:
        self.hub = hub
        self.checks.observe(hub)

    def _relay(self, fleet: ClusterFleet) -> None:
        mailbox = fleet.open_mailbox(fleet.name)
        self.cluster.weights.add_relay(fleet.process)
        unit = fleet.host_rows()
        fleet.announce(unit=unit.address)
        serve_rows(fleet, Path(self.recipe.run.dir), mailbox, unit)
        mailbox.close()

    def _actor(self, fleet: ClusterFleet) -> None:
        from headrace.relay.queue.stream import RunStopped
        from headrace.trainer.loop import Trainer  # a role's loop is imported where its process begins

        from .lineage import LineageLearner

        cluster = self.cluster

        def publish(version: int, digest: str) -> None:
            self.checks.digests[version] = digest
            cluster.weights.publish(version, digest)

        learner = LineageLearner(fleet, self.recipe, self.clock, publish, self.checks.rows_of_steps.__setitem__)
        with suppress(RunStopped):
            Trainer(fleet, self.recipe, learner=learner, clock=self.clock).run()

    def _rollout(self, fleet: ClusterFleet) -> None:
        from headrace.rollout.loop import Rollout  # a role's loop is imported where its process begins

        generator = EmulatedGenerator(fleet, self.recipe, self.clock, WeightsReader(self.cluster.weights))
        generator.can_stream = True
        transfers = MortalTransfers(fleet.process, self._parcels)
        rollout = Rollout(fleet, self.recipe, generator, EmulatedRewards(), clock=self.clock, transfers=transfers)
        self.checks.rollouts[fleet.process] = rollout
        rollout.run()

    def _reference(self, fleet: ClusterFleet) -> None:
        from headrace.trainer.reference_loop import run  # a role's loop is imported where its process begins

        from .lineage import reference_columns

        run(fleet, self.recipe, partial(reference_columns, self.clock))

    # ------------------------------------------------------------------------------------------------------ the whole

    def _apply(self, fault: "Happening") -> None:
        if not self.is_over and fault.apply(self):
            self._moved_at = max(self._moved_at, self.world.now + fault.seconds)

    def _resume(self) -> None:
        """Start the run again."""
        self._end_lives()
        self._close_files("")
        self.start_run()

    def _end_lives(self) -> None:
        """Kill the processes that were frozen at the end of the run, or began after it, as supervisors do."""
        for process in list(self.cluster.lives.values()):
            if not process.is_dead:
                process.kill()

    def _is_finished(self) -> bool:
        step = self.hub.state.step if self.hub is not None else self._step
        if step != self._step:
            self._step, self._moved_at = step, max(self._moved_at, self.world.now)
        quiet_s = self.world.now - self._moved_at
        assert quiet_s <= LIVENESS_S, (
            f"no step is trained for {quiet_s:.0f} s after step {self._step}: {self._threads()}"
        )
        self.is_over = self._status == "finished" and all(p.is_dead for p in self.cluster.lives.values())
        return self.is_over

    def _threads(self) -> str:
        return ", ".join(thread.name for thread in self._alive())

    def _alive(self) -> list[VirtualThread]:
        return [thread for thread in self.world.threads if isinstance(thread, VirtualThread)]

    def _end_all(self) -> None:
        for process in {thread.process for thread in self._alive()}:
            process.kill()
        self._close_files("")

    def _close_files(self, name: str) -> None:
        """Close this process's files of the run folder, or the one of this name, as the kernel does for a process that died.

        Each descriptor stays open, on nothing: its owner closes it later, when the number may not have another owner yet.
        """
        kept = (str(self.folder / "console.log"), *self.recipe.data.paths, *self.recipe.eval.paths)
        nothing = os.open(os.devnull, os.O_RDWR)
        for entry in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                path = os.readlink(f"/proc/self/fd/{entry}")
                if path.startswith(f"{self.folder}/") and path.endswith(name) and path not in kept:
                    os.dup2(nothing, int(entry), inheritable=False)
        os.close(nothing)
