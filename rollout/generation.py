"""Trajectories from their prompts to their rewards: the same for the leases of a rollout and for an evaluation without a hub."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from msgspec.structs import asdict

from ..comm.errors import SettingError, UnusablePrompt
from ..comm.messages import GroupId
from ..comm.recipe import Recipe
from .engine.sampling import SamplingParams
from .engine.sequence import Completion
from .episodes import Episodes
from .generators.base import PromptGenerator
from .leased_row import LeasedRow
from .leases import RowHolder
from .scoring import Scoring
from .user_code.host import PATIENCE


class Generation:
    """Begins trajectories, takes turns with their environments, and has them scored; called by a loop that steps the generator."""

    def __init__(
        self,
        generator: PromptGenerator,
        scoring: Scoring,
        recipe: Recipe,
        leases: RowHolder,
        version: Callable[[], int],
        *,
        drops_long: bool,
    ) -> None:
        """version: that of the generator's weights. drops_long: a prompt that fills the context does not end the run."""
        self.params = SamplingParams(**asdict(recipe.sampling), pause_at_stop=recipe.environment.is_set)
        self.evaluation_params = replace(self.params, temperature=recipe.eval.temperature)
        self.episodes = Episodes(generator, leases, recipe.environment) if recipe.environment.is_set else None
        """None if trajectories have one turn."""
        self.num_drawn = 0
        """Tokens that the policy has drawn here for the trajectories that have ended."""
        self._generator = generator
        self._scoring = scoring
        self._leases = leases
        self._version = version
        self._drops_long = drops_long
        self._refusals_left: float = PATIENCE
        """Prompts of environments that the template may refuse before it has accepted one; any number from then on."""

    @property
    def num_starting(self) -> int:
        """Trajectories that the generator does not hold yet, since their environments are reset."""
        return 0 if self.episodes is None else self.episodes.num_starting

    def start(self) -> None:
        """Start the threads of the environments."""
        if self.episodes is not None:
            self.episodes.start()

    def close(self) -> None:
        """End the processes of the rewards and the environments."""
        self._scoring.close()
        if self.episodes is not None:
            self.episodes.close()

    def params_of(self, group: GroupId) -> SamplingParams:
        """How the samples of a group are drawn."""
        return self.evaluation_params if group.is_evaluation else self.params

    def begin(self, rows: list[LeasedRow]) -> str:
        """Begin samples of one prompt, or the reset of their environments. Returns why the prompt cannot be used; "" if it can."""
        if self.episodes is None:
            return self._generate(rows, rows[0].row)
        self.episodes.reset(rows)
        return ""

    def fail(self, rows: Sequence[LeasedRow], problem: str) -> None:
        """End trajectories that have not begun."""
        for held in rows:
            self._scoring.fail(held, problem)

    def advance(self) -> bool:
        """Begin and end what the environments have answered; returns whether turns have begun."""
        if self.episodes is None:
            return False
        num_begun = self.episodes.num_begun
        started, ended = self.episodes.advance()
        for rows in started:
            assert rows[0].episode is not None
            for held in rows:  # a version may have come out during the reset
                held.version = self._version()
            if problem := self._generate(rows, {**rows[0].row, "prompt": rows[0].episode.prompt}):
                self.fail(rows, problem)
        for held, completion, failure in ended:
            if completion is None:
                self._scoring.fail(held, failure)
            else:
                self._score(held, completion, failure)
        return self.episodes.num_begun > num_begun

    def end(self, completions: Iterable[Completion]) -> None:
        """Take what a step of the generator has finished: turns go to their environments, trajectories to the rewards."""
        for completion in completions:
            held = self._leases.held.get(completion.trajectory_id)
            if self.episodes is not None and self.episodes.end_turn(held, completion):
                continue
            if held is None:
                continue  # another rollout got the lease before it finished
            failure = "the policy's logits are not finite" if completion.finish_reason == "error" else ""
            self._score(held, completion, failure)

    def _score(self, held: LeasedRow, completion: Completion, failure: str) -> None:
        self._scoring.score(held, completion, failure)
        self.num_drawn += held.num_drawn

    def _generate(self, rows: list[LeasedRow], data: dict[str, Any]) -> str:
        """Generate a sample for each of `rows` from the prompt of a row of the data set; returns why it cannot be used."""
        group = rows[0].row_id.group
        try:
            tokens = self._generator.prompt_ids(data)
        except UnusablePrompt as error:
            self._refusals_left -= self.episodes is not None
            if not self._refusals_left:
                raise  # the fault is the template's: these prompts are not dropped, so the run would not end
            return str(error)
        self._refusals_left = math.inf
        context = self._generator.context
        # An evaluation counts equal problems, and has a line for each prompt: there the text does not tell prompts apart.
        if not tokens:
            return "the prompt has no tokens" if group.is_evaluation else f"prompt {group.prompt} has no tokens"
        if len(tokens) >= context:
            limit = f"the context of the policy is {context}"
            problem = f"prompt {group.prompt} has {len(tokens)} tokens, {limit}"
            if not self._drops_long:
                raise SettingError(f"data.too_long: {problem}; set data.too_long=drop to leave such prompts out")
            return f"the prompt has too many tokens, {limit}" if group.is_evaluation else problem
        self._generator.add_group(tokens, self.params_of(group), [held.row_id.number for held in rows])
        return ""
