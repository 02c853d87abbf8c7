"""Trajectories of several turns: the rollout's loop, the generator and the environments take turns on them.

A turn that ends leaves its trajectory paused in the generator. Its environment answers while others decode; then the answer's tokens
are appended and the next turn begins. Every held trajectory whose turn is over is with its environment: one that arrives
from another rollout, or from a dead one, needs no rule of its own. Tokens are never computed from text a second time.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..comm.errors import SettingError, UnusablePrompt
from ..comm.recipe import EnvironmentSettings
from .engine.sequence import Completion
from .environments.base import Episode, with_observation
from .environments.pool import EnvironmentCall, EnvironmentPool
from .generators.base import PausingGenerator
from .leased_row import LeasedRow
from .leases import RowHolder
from .user_code.host import PATIENCE


class EndedEpisode(NamedTuple):
    """A trajectory that its environment has ended, or that failed."""

    held: LeasedRow
    completion: Completion | None
    failure: str = ""


@dataclass(slots=True)
class _Start:
    """Leased rows of one prompt whose environments are reset."""

    rows: list[LeasedRow]
    num_open: int


class Episodes:
    """One rollout's episodes; called by its loop between two steps of the generator."""

    def __init__(self, generator: object, leases: RowHolder, settings: EnvironmentSettings) -> None:
        if not isinstance(generator, PausingGenerator):
            raise SettingError("environment: this rollout.engine cannot pause trajectories; see docs/use/engines.md")
        self._generator: Any = generator
        self._leases = leases
        self._pool = EnvironmentPool(settings)
        self._max_turns = settings.max_turns
        self._calls: dict[int, EnvironmentCall] = {}
        """Open calls, by trajectory."""
        self._starts: dict[int, _Start] = {}
        """The rows of each trajectory whose environment is being reset."""
        self._known: set[int] = set()
        """Trajectories that have an environment in the pool."""
        self._num_refused = 0
        """Observations that the template refused."""
        self.num_begun = 0
        """Turns so far that began after an observation."""

    @property
    def num_starting(self) -> int:
        """Trajectories that the generator does not hold yet, since their environments are reset."""
        return len(self._starts)

    def start(self) -> None:
        """Start the threads of the environments."""
        self._pool.start()

    def reset(self, rows: list[LeasedRow]) -> None:
        """Reset the environments of rows of one prompt; `advance` returns those that can begin."""
        start = _Start([], len(rows))
        for held in rows:
            self._starts[held.row_id.number] = start
            self._call(held, Episode(held.row["prompt"]))

    def end_turn(self, held: LeasedRow | None, completion: Completion) -> bool:
        """Take a turn from the generator; False if it ends the trajectory. One that is not held any more is dropped."""
        is_paused = completion.finish_reason == "stop"
        if held is None:
            if is_paused:
                self._generator.export_sequences([completion.trajectory_id])
            return True
        assert held.episode is not None
        held.episode.end_turn(completion.text, completion.token_ids)
        return is_paused

    def advance(self) -> tuple[list[list[LeasedRow]], list[EndedEpisode]]:
        """Handle the environments' answers, and ask those whose turn it is.

        Returns rows that can begin, by their equal prompts, and trajectories that have ended.
        """
        begun: list[list[LeasedRow]] = []
        ended: list[EndedEpisode] = []
        for call in self._pool.finished():
            if self._calls.get(call.number) is not call:
                continue
            del self._calls[call.number]
            if self._leases.held.get(call.number) is not call.key:
                continue  # it went, and came back as another object
            if not call.episode.completions:
                begun += self._on_reset(call, ended)
            elif (end := self._on_step(call.key, call)) is not None:
                ended.append(end)
        for number in self._known - self._leases.held.keys():
            self._forget(number)
        for held in self._leases.held.values():
            if held.episode is None or held.completion is not None or held.row_id.number in self._calls:
                continue
            if held.episode.is_waiting:
                self._call(held, held.episode)
        return begun, ended

    def close(self) -> None:
        self._pool.close()

    def _call(self, held: LeasedRow, episode: Episode) -> None:
        number = held.row_id.number
        self._known.add(number)
        self._calls[number] = EnvironmentCall(number, held, held.row, episode)
        self._pool.submit(self._calls[number])

    def _forget(self, number: int) -> None:
        self._known.remove(number)
        self._calls.pop(number, None)
        if (start := self._starts.pop(number, None)) is not None:
            start.num_open -= 1
        self._pool.drop(number)

    def _on_reset(self, call: EnvironmentCall, ended: list[EndedEpisode]) -> Iterable[list[LeasedRow]]:
        """The rows of the prompt, once all of them are reset."""
        held = call.key
        start = self._starts.pop(call.number)
        start.num_open -= 1
        if call.failure:
            held.broken_by = "late" if call.is_late else "error"
            ended.append(EndedEpisode(held, None, call.failure))
        else:
            prompt = with_observation(held.row["prompt"], call.step.observation)
            held.episode = Episode(prompt, state=call.state, calls=call.calls)
            start.rows.append(held)
        if start.num_open:
            return []
        by_prompt: dict[str, list[LeasedRow]] = {}
        for row in start.rows:
            assert row.episode is not None
            by_prompt.setdefault(str(row.episode.prompt), []).append(row)
        return by_prompt.values()

    def _on_step(self, held: LeasedRow, call: EnvironmentCall) -> EndedEpisode | None:
        """Begin the next turn, or end the trajectory after its last one."""
        episode = call.episode
        if call.failure:
            held.broken_by = "late" if call.is_late else "error"
            return EndedEpisode(held, self._end(held, "stop"), call.failure)
        episode.state = call.state
        episode.note(call.seconds, call.calls)
        episode.reward += call.step.reward
        if call.step.done or len(episode.completions) >= self._max_turns:
            return EndedEpisode(held, self._end(held, "stop"))
        try:
            tokens = self._generator.observation_ids(episode, call.step.observation)
        except UnusablePrompt as error:
            self._num_refused += 1
            if self._num_refused >= PATIENCE and not self.num_begun:
                raise  # it refuses every observation
            return EndedEpisode(held, self._end(held, "stop"), str(error))
        if not self._generator.resume(call.number, tokens):
            return EndedEpisode(held, self._end(held, "length"))
        episode.insert(call.step.observation, len(tokens))
        self.num_begun += 1
        return None

    def _end(self, held: LeasedRow, reason: str) -> Completion:
        """Take a paused trajectory out of the generator: it is complete."""
        assert held.episode is not None
        (state,) = self._generator.export_sequences([held.row_id.number])
        tokens = state.prompt_ids, state.token_ids, state.logprobs
        held.completion = Completion(held.row_id.number, *tokens, reason, held.episode.completions[-1])
        return held.completion
