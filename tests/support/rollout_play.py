"""A hub, a storage unit and rollouts with real engines in one process; the test steps them, and rollouts die when it says."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from support.closing import at_end
from support.in_memory import MemoryFleet, MemoryNetwork

from headrace.comm.mailbox import Envelope
from headrace.comm.messages import RowId, VersionReady
from headrace.comm.messages.migration import MigrateOrder, MigrateResult
from headrace.comm.messages.weights import WeightsPulled
from headrace.comm.recipe import Recipe
from headrace.launch.config.load import read_recipe
from headrace.relay.dataset.order import PromptPool
from headrace.relay.dataset.rows import JsonLines
from headrace.relay.hub.hub import Hub
from headrace.relay.journal import events as ev
from headrace.relay.journal.files import read_events
from headrace.relay.journal.journal import Journal
from headrace.relay.journal.replay import replay
from headrace.relay.journal.state import HubState, RowStatus
from headrace.relay.queue.admission import Admission
from headrace.relay.queue.evaluation_prompts import EvaluationPrompts
from headrace.relay.weights.slots import VersionNotAvailable
from headrace.rollout import Engine, SamplingParams
from headrace.rollout.engine.chat_template import text_tokens
from headrace.rollout.environments.base import Episode, Messages
from headrace.rollout.generators.base import GeneratorProfile, Weights
from headrace.rollout.leased_row import LeasedRow
from headrace.rollout.loop import Rollout
from headrace.rollout.migration.migration import MoveDeadlines

PARAMS = SamplingParams(max_new_tokens=40, ignore_eos=True)
SAMPLES, STREAM_TOKENS = 3, 8
SETTINGS = (
    f"batch.samples_per_prompt={SAMPLES}",
    "batch.prompts_per_step=8",
    "queue.lead=8",
    "roles.rollout=3",
    f"rollout.stream_tokens={STREAM_TOKENS}",
    "repack.period_s=1e6",
)
PATIENT = MoveDeadlines(link_s=20.0)
FAST_LINK = MoveDeadlines(link_s=2.0)
"""For tests of refusal: a thread waits `link_s` for a destination that refuses."""


@dataclass
class Loaded:
    """Versions of the same weights: `version` is loaded, `latest` the newest one; those before `oldest` are gone."""

    version: int = 0
    latest: int = 0
    oldest: int = 0

    def newest(self) -> int:
        return max(self.version, self.latest)


class EngineGenerator(Engine):
    """The engine as a rollout's generator, on weights that never change; every response has 40 tokens."""

    can_migrate = True
    can_stream = True
    profile = None
    num_prefilled = num_found = 0

    def __init__(self, path: Path, **settings: float) -> None:
        super().__init__(path, exact=True, **settings)  # pyright: ignore[reportArgumentType]
        self.loaded = Loaded()
        self.weights: Weights = self.loaded
        self.context = self.policy.context
        self.kv_capacity = self.pool.num_pages * self.pool.page_size
        self.kv_token_bytes = self.cache.num_bytes // self.kv_capacity
        self.kv_load = 0

    def prompt_ids(self, row: dict[str, str]) -> list[int]:
        return [5 + int(row["prompt"][1:])] * 20

    def take_weights(self, deadline_s: float, version: int | None = None) -> WeightsPulled:
        wanted = self.weights.newest() if version is None else version
        if wanted < self.loaded.oldest:
            raise VersionNotAvailable(f"version {wanted} is gone")
        self.weights.version = wanted
        return WeightsPulled(wanted, "digest")

    def observation_ids(self, episode: Episode, observation: str | Messages) -> list[int]:
        return text_tokens(str(observation), self.text.tokenizer)

    def close(self) -> None:
        pass


class TokenSums:
    """Rewards each trajectory with the sum of its tokens, a fingerprint of it."""

    def __init__(self) -> None:
        self.done: list[LeasedRow] = []
        self.backlog = 0

    def submit(self, *rows: LeasedRow) -> None:
        for row in rows:
            assert row.completion is not None
            row.reward = float(sum(row.completion.token_ids))
        self.done += rows

    def finished(self) -> list[LeasedRow]:
        done, self.done = self.done, []
        return done

    def close(self) -> None:
        pass


class ManualRollout(Rollout):
    """A rollout that the test steps. It requests leases only when the test raises `max_running`."""

    generator: EngineGenerator

    def __init__(
        self, fleet: MemoryFleet, recipe: Recipe, policy: Path, deadlines: MoveDeadlines, prefill_s: float
    ) -> None:
        self.rewards = TokenSums()
        super().__init__(fleet, recipe, EngineGenerator(policy), self.rewards, deadlines)
        self.fleet = fleet
        self.max_running = 0
        self._generation.params = self._generation.evaluation_params = replace(
            PARAMS, pause_at_stop=recipe.environment.is_set, stop=recipe.sampling.stop
        )
        self.migration.profile = GeneratorProfile(16, prefill_s)
        self.loses: set[type] = set()

    @property
    def name(self) -> str:
        return self.fleet.name

    def handle(self, envelope: Envelope) -> None:
        if type(envelope.message) in self.loses:
            self.loses.remove(type(envelope.message))
        else:
            super().handle(envelope)


class Play:
    """A hub, a storage unit and up to three rollouts; the test steps the hub and the rollouts.

    prefill_s: the seconds of a prefilled token that the rollouts have measured; with `inf` pages move, with 0 they never do.
    """

    def __init__(
        self,
        folder: Path,
        policy: Path,
        hosts: tuple[str, ...] = ("here",) * 3,
        prefill_s: float = math.inf,
        deadlines: MoveDeadlines = PATIENT,
        settings: tuple[str, ...] = (),
        evaluation: EvaluationPrompts | None = None,
    ) -> None:
        folder.mkdir()
        data = folder / "data.jsonl"
        data.write_text("".join(f'{{"prompt": "p{i}"}}\n' for i in range(9)))
        self.network = MemoryNetwork()
        recipe = read_recipe(None, [f"run.dir={folder}", *SETTINGS, *settings])
        pool = PromptPool(JsonLines(data), shuffle=False, seed=0)
        admission = Admission(recipe.batch, recipe.queue, num_steps=10)
        journal, self.path = Journal(folder / "journal.jsonl"), folder / "journal.jsonl"
        self.hub = Hub(
            self.network.mailboxes.open("hub"), HubState(), journal, pool, admission, recipe.queue, recipe.repack,
            evaluation=evaluation,
        )  # fmt: skip
        self.hub.context.commit(ev.Opened(epoch=1, samples_per_prompt=SAMPLES))
        self.hub.handle(Envelope("relay-0/weights", VersionReady(0, "digest")))
        relay = MemoryFleet.join_network(self.network, "relay")
        self.unit = relay.host_rows()
        relay.announce(unit=self.unit.address)
        fleets = [MemoryFleet.join_network(self.network, "rollout", i, host=host) for i, host in enumerate(hosts)]
        self.rollouts = [ManualRollout(fleet, recipe, policy, deadlines, prefill_s) for fleet in fleets]
        self.alive = list(self.rollouts)
        self.ended: list[MigrateResult] = []
        self.orders = 0
        at_end(self.close)
        for rollout in self.rollouts:
            rollout.start()

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            while (envelope := self.hub.mailbox.receive(0)) is not None:
                if isinstance(envelope.message, MigrateResult):
                    self.ended.append(envelope.message)
                assert self.hub.handle(envelope)
            for rollout in self.alive:
                rollout.step()

    def lease(self, rollout: ManualRollout, num_groups: int = 1) -> None:
        rollout.max_running = SAMPLES * num_groups
        self.until(lambda: rollout.generator.num_running > 0)
        rollout.max_running = 0

    def order(self, source: ManualRollout, target: ManualRollout, version: int = 0) -> None:
        self.orders += 1
        source.migration.handle("hub", MigrateOrder(self.orders, version, target.name))

    def until_hub(self, condition: Callable[[], bool]) -> None:
        """Let the hub read its messages until a condition is true, while the rollouts stand still."""
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline, "the condition never came true"
            if (envelope := self.hub.mailbox.receive(0.01)) is not None:
                assert self.hub.handle(envelope)

    def kill(self, rollout: ManualRollout) -> None:
        self.alive.remove(rollout)
        rollout.fleet.crash()
        self.hub.on_process_death(rollout.name, "dead")

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline, "the condition never came true"
            self.step()

    def close(self) -> None:
        """Close everything; a second call does nothing."""
        while self.rollouts:
            self.rollouts.pop().close()
        self.unit.close()
        self.hub.context.journal.close()

    def finish(self) -> dict[RowId, float]:
        """Every row's reward; each row must have ended exactly once."""
        state = self.hub.state
        ready = [RowStatus.READY, RowStatus.FAILED]
        self.until(lambda: all(row.status in ready for group in state.groups.values() for row in group.rows))
        self.until(lambda: not any(rollout.migration.is_under_way or rollout.leases.held for rollout in self.alive))
        ends = [event.row for _, event in read_events(self.path) if isinstance(event, ev.RowReady)]
        assert len(ends) == len(set(ends)) == state.in_flight and state.is_balanced
        assert replay(self.path) == state
        for rollout in self.alive:
            rollout.generator.check()
            assert rollout.generator.idle
        return {g.id.row(s): r.reward for g in state.groups.values() for s, r in enumerate(g.rows)}
