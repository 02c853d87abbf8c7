"""An evaluation without a run: one engine answers held-out prompts in this process, and the reward processes score the answers.

Episodes, rewards and metrics are those of a rollout. In place of leases from a hub, every sample is this process's own, and in place
of rows for a trainer there are scores.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from ..comm.errors import UnusablePrompt
from ..comm.messages import GroupId, RowId, SampleScored
from ..comm.recipe import Recipe
from ..relay.dataset.rows import row_problem
from ..relay.journal.evaluation_metrics import evaluation_metrics
from ..relay.journal.evaluations import score_of
from ..relay.journal.events import Evaluated, EvaluationBegun
from ..relay.queue.evaluation_prompts import EvaluationPrompts
from ..trainer.policy.model import default_device, load_policy, load_tokenizer
from .engine.chat_template import prompt_tokens
from .engine.engine import Engine
from .engine.memory import available_memory, sequences_that_fit
from .environments.schemas import tool_schemas
from .environments.tokens import observation_tokens
from .generation import Generation
from .generators.builtin import engine_settings
from .leased_row import LeasedRow
from .rewards.pool import Rewards
from .scoring import Scoring

if TYPE_CHECKING:
    from .engine.sequence import Completion
    from .environments.base import Episode, Messages

MOST_RUNNING = 256
"""Most samples that are decoded together; more hardly make a device faster."""
POLL_S = 0.005
"""Seconds between two looks at the rewards and environments while nothing decodes."""


class LocalGenerator(Engine):
    """An engine that holds the weights of `model.path`, with what an evaluation and its episodes need besides.

    max_running: samples that are decoded together; None for as many with the `longest` of the prompts as the memory holds, at
    most `most`.
    """

    def __init__(self, recipe: Recipe, longest: Any, most: int, max_running: int | None) -> None:
        self._tokenizer = load_tokenizer(recipe.model.path)
        self._data = recipe.data
        self._tools = tool_schemas(recipe.environment)
        policy = load_policy(recipe.model.path, recipe.model.compute_type, default_device())
        self.context = policy.context
        if max_running is None:
            num_tokens = min(self._length(recipe, longest), policy.context)
            memory = available_memory(policy.device, recipe.generator.gpu_share)
            max_running = min(sequences_that_fit(policy, num_tokens, memory), most, MOST_RUNNING)
        self.max_running = max_running
        super().__init__(policy, max_running=max_running, tokenizer=self._tokenizer, **engine_settings(recipe))

    def prompt_ids(self, row: dict[str, Any]) -> list[int]:
        """Token ids of the prompt of a row of data."""
        return prompt_tokens(row, self._tokenizer, self._data, self._tools)

    def observation_ids(self, episode: "Episode", observation: "str | Messages") -> list[int]:
        """Token ids that follow the newest turn of an episode."""
        return observation_tokens(episode, observation, self._tokenizer, self._data, self._tools)

    def _length(self, recipe: Recipe, longest: Any) -> int:
        """Most tokens of a sample: all of the context where an environment adds to it."""
        if recipe.environment.is_set:
            return self.context
        try:
            return len(self.prompt_ids({"prompt": longest})) + recipe.sampling.max_new_tokens
        except UnusablePrompt:
            return self.context


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """A sample that has its score, or none by `event.failure`: the name of its file, and the number of its row there."""

    name: str
    row: int
    event: Evaluated
    text: str
    """The response; of several turns in a chat, the messages as JSON."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Rewards of the single functions, and what they have logged."""


class _ScoredSamples:
    """Takes finished samples in place of the rollout's writer of rows."""

    backlog = 0

    def __init__(self, prompts: EvaluationPrompts) -> None:
        self.new: list[ScoredSample] = []
        self._prompts = prompts

    def submit(self, row: LeasedRow) -> None:
        """Turn the report that a hub would get into a score."""
        scored = row.report([])
        assert isinstance(scored, SampleScored), "every sample is one of an evaluation"
        place = self._prompts.place(scored.row.group)
        self.new.append(ScoredSample(*place, score_of(scored), scored.text, row.info.get("metrics", {})))


class LocalEvaluation:
    """The samples of an evaluation, on the weights of a generator that were trained for `version` steps.

    Iterate over `turns`, then ask for `metrics`; call `close` in any case.
    """

    def __init__(
        self, recipe: Recipe, prompts: EvaluationPrompts, generator: LocalGenerator, rewards: Rewards, version: int
    ) -> None:
        self.held: dict[int, LeasedRow] = {}
        """Samples under way, by `RowId.number`."""
        self._begun = EvaluationBegun(
            number=0, version=version, due=version, num_prompts=prompts.num_prompts, samples=recipe.eval.samples,
            threshold=recipe.eval.threshold,
        )  # fmt: skip
        self._prompts = prompts
        self._wanted = iter(range(sum(prompts.num_prompts.values())))
        self._generator = generator
        self._scored = _ScoredSamples(prompts)
        self._scoring = Scoring(rewards, recipe.reward, self, self._scored)
        self._generation = Generation(generator, self._scoring, recipe, self, lambda: version, drops_long=True)
        self._scores: dict[RowId, Evaluated] = {}
        self.num_samples = self._begun.samples * sum(prompts.num_prompts.values())
        functions = recipe.reward.functions
        self._shown_before = set(functions) if len(functions) == 1 else set[str]()
        """The function whose rewards are those of the samples."""
        self._metrics: dict[str, list[float]] = {}

    def turns(self) -> Iterator[list[ScoredSample]]:
        """Do the work until every sample has ended: the samples that each turn has ended, often none. Raises `SettingError` if a reward or an environment never works."""
        self._generation.start()
        while len(self._scores) < self.num_samples:
            self._begin_prompts()
            self._generation.advance()
            self._generate()
            self._scoring.advance()
            yield self._take_scored()

    @property
    def num_decoding(self) -> int:
        """Samples that the engine works on."""
        return self._generator.num_running + self._generator.num_waiting

    @property
    def num_elsewhere(self) -> int:
        """Samples that wait for an answer of a reward or an environment."""
        return len(self.held) - self.num_decoding

    def metrics(self) -> dict[str, float]:
        """`eval/NAME/...` as in a run, and the means of what the functions give and log; all samples have ended."""
        logged = {name: sum(values) / len(values) for name, values in sorted(self._metrics.items())}
        return evaluation_metrics(self._begun, self._scores) | logged

    def close(self) -> None:
        """End the processes of rewards and environments."""
        self._generation.close()

    def _take_scored(self) -> list[ScoredSample]:
        found = self._scored.new
        self._scored.new = []
        for sample in found:
            self._scores[sample.event.row] = sample.event
            for name in sample.metrics.keys() - self._shown_before:
                self._metrics.setdefault(f"eval/{sample.name}/reward/{name}", []).append(sample.metrics[name])
        return found

    def _begin_prompts(self) -> None:
        """Begin prompts while the engine, the environments and the rewards have room for more."""
        busy = self.num_decoding + self._generation.num_starting + self._scoring.backlog
        room = self._generator.max_running - busy
        while room > 0 and (index := next(self._wanted, None)) is not None:
            self._begin(GroupId(0, index, is_evaluation=True))
            room -= self._begun.samples

    def _begin(self, group: GroupId) -> None:
        content = bytes(self._prompts.row(group))
        problem = row_problem(content)
        data = {} if problem else msgspec.json.decode(content)
        rows = [LeasedRow(group.row(sample), 1, self._begun.version, data) for sample in range(self._begun.samples)]
        self.held |= {held.row_id.number: held for held in rows}
        problem = f"its row {problem}" if problem else self._generation.begin(rows)
        if problem:
            self._generation.fail(rows, problem)

    def _generate(self) -> None:
        """A step of the engine; a moment of rest where nothing decodes."""
        engine = self._generator
        completions: list[Completion] = [] if engine.idle else engine.step()
        if not (completions or engine.num_running):
            time.sleep(POLL_S)
        self._generation.end(completions)
