"""The answers of an environment, and the transcript of a trajectory in one.

An environment is a class of the user's, one object for each trajectory; every method may be `async`:

    reset(**row) -> None | str | messages    begins; the answer follows the prompt
    step(completion) -> StepResult                 answers a turn of the policy
    state() -> JSON, restore(state)          optional: moves it to another process, where else its steps are repeated
    close()                                  optional; called once, also after a call that failed

A class without `step` has tools instead (TRL's `environment_factory`): its public methods but `reset` (see `tools.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

Messages = list[dict[str, Any]]


class StepResult(NamedTuple):
    """The answer to a turn. A plain tuple will do, as in Gymnasium: (observation, reward, done)."""

    observation: str | Messages = ""
    """The policy reads this next: text, or chat messages where the prompt is chat messages. Unused with `done`."""
    reward: float = 0.0
    """The turn's reward; the trajectory's reward is the sum over its turns."""
    done: bool = False
    """The trajectory ends."""

    def check(self, *, is_chat: bool) -> None:
        """Raise for a step that cannot continue a trajectory."""
        if not math.isfinite(self.reward):
            raise ValueError(f"a step's reward is {self.reward}")
        if self.done:
            return
        if not isinstance(self.observation, str) and not (is_chat and _is_messages(self.observation)):
            kind = type(self.observation).__name__
            raise TypeError(f"a step's observation is a {kind}, which does not fit the prompt")
        if not self.observation:
            raise ValueError("a step has neither an observation nor `done`")


class ToolUse(NamedTuple):
    """A call of a tool by the policy."""

    name: str
    """That of the tool, or `UNKNOWN`: what the policy calls is never a name."""
    has_failed: bool
    seconds: float


UNKNOWN = "unknown"
"""Stands for all tools that there are not."""


@dataclass(slots=True)
class Episode:
    """A trajectory's transcript: it travels with the trajectory, and an environment can be built again from it.

    `prompt` is text or chat messages, with what `reset` has added. Turn i of the policy is `completions[i]`,
    `observations[i]` follows it, as tokens [start, start + count) of the response: `inserted[i]`.
    """

    prompt: str | Messages
    completions: list[str] = field(default_factory=list)
    observations: list[str | Messages] = field(default_factory=list)
    inserted: list[tuple[int, int]] = field(default_factory=list)
    reward: float = 0.0
    """Sum over the turns answered so far."""
    state: Any = None
    """The environment's `state()` after the last answer."""
    num_tokens: int = 0
    """Tokens of the response at the end of the newest turn."""
    last_token: int = -1
    """The newest turn's last token."""
    seconds: list[float] = field(default_factory=list)
    """For which the environment worked on each answer."""
    calls: list[ToolUse] | None = None
    """The calls of tools; None if the environment is not made of tools."""

    @property
    def is_waiting(self) -> bool:
        """Whether the environment has to answer a turn."""
        return len(self.completions) > len(self.observations)

    @property
    def turn_start(self) -> int:
        """The first token of the present turn, or of the newest one, in the response."""
        start, count = self.inserted[-1] if self.inserted else (0, 0)
        return start + count

    def end_turn(self, completion: str, token_ids: Sequence[int]) -> None:
        """Record a turn; `token_ids` are those of the whole response."""
        self.completions.append(completion)
        self.num_tokens = len(token_ids)
        self.last_token = token_ids[-1] if token_ids else -1

    def insert(self, observation: str | Messages, count: int) -> None:
        """Record the observation after the newest turn, which became `count` tokens of the response."""
        self.observations.append(observation)
        self.inserted.append((self.num_tokens, count))

    def note(self, seconds: float, calls: Sequence[ToolUse] | None) -> None:
        """Record what an answer cost."""
        self.seconds.append(round(seconds, 6))
        if calls is not None:
            self.calls = [*(self.calls or ()), *calls]

    def figures(self) -> dict[str, Any]:
        """The turns for the metrics of a step, as `trainer/turn_metrics.py` reads them."""
        return {"turns": len(self.completions), "seconds": self.seconds, "calls": self.calls}

    def num_inserted(self, start: int = 0) -> int:
        """Tokens of observations, from token `start` of the response on."""
        return sum(count for first, count in self.inserted if first >= start)

    def loss_mask(self, num_tokens: int) -> list[int]:
        """For each token of the response 1 if the policy drew it, 0 if the environment inserted it."""
        mask = [1] * num_tokens
        for start, count in self.inserted:
            mask[start : start + count] = [0] * count
        return mask

    def messages(self) -> Messages:
        """The turns and observations after the prompt, for a chat prompt."""
        found: Messages = []
        for index, completion in enumerate(self.completions):
            found.append({"role": "assistant", "content": completion})
            if index < len(self.observations):
                found += as_messages(self.observations[index])
        return found

    def response(self) -> str | Messages:
        """The whole response as a reward function gets it: text, or messages for a chat prompt."""
        if not isinstance(self.prompt, str):
            return self.messages()
        pieces: list[str] = []
        for index, completion in enumerate(self.completions):
            pieces += [completion, *(str(each) for each in self.observations[index : index + 1])]
        return "".join(pieces)


def as_messages(observation: str | Messages) -> Messages:
    """An observation of a chat: text is a message of the user."""
    return [{"role": "user", "content": observation}] if isinstance(observation, str) else observation


def with_observation(prompt: str | Messages, observation: str | Messages | None) -> str | Messages:
    """A prompt with what `reset` returned: text follows the prompt's text, or its last message's; messages follow its messages."""
    if not observation:
        return prompt
    if isinstance(prompt, str):
        if not isinstance(observation, str):
            raise TypeError(f"`reset` returned a {type(observation).__name__} for a prompt that is text")
        return prompt + observation
    if isinstance(observation, str):
        last = {**prompt[-1], "content": f"{prompt[-1]['content']}{observation}"}
        return [*prompt[:-1], last]
    if not _is_messages(observation):
        raise TypeError(f"`reset` returned a {type(observation).__name__}, neither text nor messages")
    return [*prompt, *observation]


def _is_messages(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in cast(list[object], value))
