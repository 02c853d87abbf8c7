"""One run in virtual time: builds the processes of a recipe in this one, and trains its steps."""

from contextlib import redirect_stdout
from pathlib import Path

from msgspec.structs import replace

from ....comm.fleet import Member
from ....comm.messages import TrainingDone, VersionReady
from ....comm.recipe import Recipe
from ....relay.hub.loop import open_hub
from ..emulated.learner import EmulatedLearner
from ..settings import lab_of
from .network import VirtualFleet, VirtualMailboxes
from .rollouts import VirtualRollout, VirtualTransfers, VirtualVersions
from .training import VirtualPublisher, VirtualStream
from .world import World, WorldClock

CONSOLE_FILE = "console.log"


class VirtualRun:
    """A recipe of emulated devices as one process; its files in `run.dir` are those of a real run."""

    def __init__(self, recipe: Recipe) -> None:
        from ....trainer.loop import Trainer  # a role's loop is imported where its process begins

        self.recipe = recipe = replace(recipe, run=replace(recipe.run, save_rows="none", resume="never"))
        self.world = World()
        self._clock = WorldClock(self.world)
        self._mailboxes = VirtualMailboxes(self.world)
        self._everyone: dict[str, Member] = {}
        self._versions = VirtualVersions()
        self._relay = self._mailboxes.open("relay-0/weights")
        self.hub = open_hub(self._fleet("hub"), _with_ranks(recipe), self._clock)
        self._mailboxes.wake["hub"] = self._handle
        self.rollouts = self._open_rollouts()
        fleet = self._fleet("actor")
        stream = VirtualStream(self.world, fleet.open_mailbox(fleet.name), recipe)
        self._mailboxes.wake[fleet.name] = stream.on_message
        learner = EmulatedLearner(fleet, recipe, self._clock, VirtualPublisher(self._show))
        self.trainer = Trainer(fleet, recipe, learner=learner, stream=stream, clock=self._clock)

    def run(self) -> None:
        """Train to the last step. `CONSOLE_FILE` has the lines that a real run prints."""
        path = Path(self.recipe.run.dir) / CONSOLE_FILE
        with path.open("w", encoding="utf-8") as console, redirect_stdout(console):
            self.trainer.run()
            for rollout in self.rollouts:
                rollout.loop.close()
        self.hub.context.journal.close()

    def _fleet(self, role: str, index: int = 0) -> VirtualFleet:
        return VirtualFleet(role, index, self._everyone, self._mailboxes, self.recipe.comm)

    def _open_rollouts(self) -> list[VirtualRollout]:
        rollouts: list[VirtualRollout] = []
        parcels = {}
        for index in range(self.recipe.roles.rollout):
            fleet = self._fleet("rollout", index)
            transfers = VirtualTransfers(fleet.name, parcels)
            rollout = VirtualRollout(self.world, fleet, self.recipe, self._versions, transfers)
            self._mailboxes.wake[fleet.name] = rollout.wake
            self._mailboxes.clocks[fleet.name] = rollout.clock
            rollouts.append(rollout)
        return rollouts

    def _handle(self) -> None:
        """The hub handles what has arrived. Reports of the run's end have no handler here: the caller ends the run."""
        while (envelope := self.hub.mailbox.receive(0.0)) is not None:
            if not isinstance(envelope.message, TrainingDone):
                assert self.hub.handle(envelope), f"the hub has no route for {envelope.message}"
            assert not self.hub.context.failure, self.hub.context.failure

    def _show(self, version: int) -> None:
        """A version is on the first relay: the hub hears of it, and the rollouts see it."""
        self._versions.version = version
        self._relay.send("hub", VersionReady(version, ""))
        for rollout in self.rollouts:
            rollout.wake()


def _with_ranks(recipe: Recipe) -> Recipe:
    """The recipe for the hub, which counts a micro-batch for each rank: one process trains for all ranks here."""
    micro_tokens = recipe.optimizer.micro_batch * lab_of(recipe.lab).trainer_ranks
    return replace(recipe, optimizer=replace(recipe.optimizer, micro_tokens=micro_tokens))
