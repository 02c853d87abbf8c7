"""The hub's process: owns the journal, watches the fleet, ends the run.

Consumes its mailbox; waits for letters only, at most `WATCH_S`; woken by anybody. A process is dead when a relay reports that its
connection ended, or, at the latest, when its heartbeat stands still or another incarnation has joined: its leases return, and its
rows are read elsewhere or generated again.
"""

import logging
import signal
import time
from pathlib import Path

from ...comm.clock import Clock
from ...comm.errors import HeadraceError, SettingError
from ...comm.fleet import Fleet, Member
from ...comm.messages import ConnectionLost, Failed, Interrupted, TrainingDone
from ...comm.recipe import Recipe
from ..dataset import PromptPool, open_rows
from ..journal import events as ev
from ..journal.journal import Journal, cut_after_checkpoint, replay
from ..journal.state import HubState, apply
from ..queue.admission import Admission
from ..queue.replicated_rows import storage_id_of
from ..queue.schedules import SCHEDULES
from ..queue.tasks import pipeline
from .hub import Hub
from .shutdown import RunEnd, Shutdown, write_summary

log = logging.getLogger(__name__)

WATCHED = ("rollout", "relay", "reference", "task")
WATCH_S = 0.2
ENDING_DEADLINE_S = 15.0  # below the 20 s after which a seat kills its child


def run(fleet: Fleet, recipe: Recipe) -> None:
    """The hub's process, from the first letter to the summary."""
    run_dir = Path(recipe.run.dir)
    mailbox = fleet.open_mailbox("hub")
    tasks = pipeline(recipe.queue, recipe.algorithm)
    state, journal = open_journal(run_dir, recipe)
    pool = PromptPool(open_rows(recipe.data), shuffle=recipe.data.shuffle, seed=recipe.run.seed)
    admission = Admission(recipe.batch, recipe.queue, recipe.run.steps, SCHEDULES[recipe.run.schedule])
    hub = Hub(
        mailbox, state, journal, pool, admission, recipe.queue, recipe.repack, Clock(recipe.emulated.speed).now, tasks
    )
    watch = HubLoop(hub, fleet)
    while (end := watch.step()) is None:
        pass
    write_summary(run_dir, Shutdown(hub, fleet, ENDING_DEADLINE_S).run(end))
    journal.close()
    mailbox.close()


class HubLoop:
    """One turn after the other: a letter, and now and then a look at the fleet."""

    def __init__(self, hub: Hub, fleet: Fleet) -> None:
        self.hub = hub
        self.fleet = fleet
        self._known: dict[str, Member] = {}
        self._lost: dict[str, int] = {}
        self._shown: set[str] = set()
        self._checked_at = 0.0

    def step(self) -> RunEnd | None:
        """Handle at most one letter; says how the run ends, or None while it goes on."""
        letter = self.hub.mailbox.receive(WATCH_S)
        is_last = letter is not None and isinstance(letter.message, TrainingDone | Failed | Interrupted)
        if (
            is_last or time.monotonic() - self._checked_at >= WATCH_S
        ):  # a short run is over before the first look is due
            self._check_fleet()
        if letter is None:
            return None
        match letter.message:
            case TrainingDone() as done:
                return RunEnd("finished", done=done, gone=letter.sender)
            case Failed(error=error, exit_code=exit_code):
                return RunEnd("failed", error, exit_code, gone=letter.sender)
            case Interrupted(signal=number):
                return RunEnd("interrupted", f"ended by {signal.Signals(number).name}", 128 + number)
            case ConnectionLost(member=name, incarnation=incarnation):
                self._on_connection_lost(name, incarnation)
                return None
        if not self.hub.handle(letter):
            log.warning("no rule for %s from %s", type(letter.message).__name__, letter.sender)
        return None

    def _check_fleet(self) -> None:
        self._checked_at = time.monotonic()
        living = {member.name: member for role in WATCHED for member in self.fleet.alive_members(role)}
        for name, known in list(self._known.items()):
            now = living.get(name)
            if now is None or now.incarnation != known.incarnation:
                if now is None or self._lost.get(name) != known.incarnation:
                    self._bury(known, f"incarnation {known.incarnation} is gone")
                del self._known[name]
        self._known |= living
        for member in living.values():
            if (chosen := member.info.get("generator", "")) not in self._shown | {""}:
                self._shown.add(chosen)
                print(f"generator: {chosen}", flush=True)

    def _on_connection_lost(self, name: str, incarnation: int) -> None:
        """Act on the first report about a process that is still in the fleet.

        `_check_fleet` does nothing when the next incarnation joins, since that may hold leases already. It acts again when the heartbeat
        stops: a report in error is possible, and such a process goes on working.
        """
        self._check_fleet()
        known = self._known.get(name)
        if known is not None and known.incarnation == incarnation and self._lost.get(name) != incarnation:
            self._lost[name] = incarnation
            self._bury(known, f"the connection of incarnation {incarnation} ended")

    def _bury(self, dead: Member, reason: str) -> None:
        if dead.role == "relay":
            self.hub.on_storage_lost(storage_id_of(dead), reason)
        self.hub.on_process_death(dead.name, reason)


def open_journal(run_dir: Path, recipe: Recipe) -> tuple[HubState, Journal]:
    """The journal of a run folder, new or continued from its newest checkpoint, with the state that it tells."""
    path = run_dir / "journal.jsonl"
    latest = run_dir / "checkpoints" / "latest"
    state = HubState()
    if path.exists() and recipe.run.resume == "auto" and latest.exists():
        cut_after_checkpoint(path, int(latest.read_text().removeprefix("step_")))
        state = replay(path)
    elif path.exists() and recipe.run.resume == "auto":
        path.replace(path.with_name(f"{path.name}.discarded-{int(time.time())}"))
    elif path.exists():
        raise SettingError(f"run.dir: {run_dir} holds a run already; set run.resume=auto to go on, or another run.dir")
    if state.samples_per_prompt not in (0, recipe.batch.samples_per_prompt):
        raise SettingError(f"batch.samples_per_prompt: the run in {run_dir} was begun with {state.samples_per_prompt}")
    journal = Journal(path)
    opened = ev.Opened(epoch=state.epoch + 1, samples_per_prompt=recipe.batch.samples_per_prompt)
    journal.append(opened)
    apply(opened, state)
    if not state.is_balanced:
        raise HeadraceError(f"the account of {path} does not add up")
    return state, journal
