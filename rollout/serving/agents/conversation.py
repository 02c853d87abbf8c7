"""The turns of one conversation, linked by their tokens into branches, each of which is a sequence to train on.

A turn whose prompt begins with all tokens of a branch, exactly, continues it: what its prompt has beyond them was inserted by the agent.
A turn that continues no branch begins one. So each drawn token is in one branch, behind exactly the tokens that the policy had read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Turn:
    """One response of the policy. token_ids, logprobs and versions have one entry for each drawn token, at least one in all."""

    prompt_ids: Sequence[int]
    """All tokens that the policy had read."""
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    """That of the weights which drew each token."""
    finish_reason: str = "stop"
    text: str = ""
    messages: Sequence[dict[str, Any]] = ()
    """Of a chat: those of the request, and the answer."""
    digests: Mapping[int, str] = field(default_factory=dict[int, str])
    """Of the weights of its versions."""

    def __post_init__(self) -> None:
        if not self.prompt_ids or not self.token_ids:
            raise ValueError("a turn has a prompt and a response, each of at least one token")
        if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
            counts = f"{len(self.token_ids)} tokens, {len(self.logprobs)} log-probs, {len(self.versions)} versions"
            raise ValueError(f"a turn has one of each for every token, not {counts}")


@dataclass(slots=True)
class Branch:
    """Turns one after the other. The lists have an entry for each token of the response, which begins with the first drawn one.

    An inserted token has the log-probability 0, and the version of the token before it.
    """

    prompt_ids: list[int]
    turns: list[Turn] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    inserted: list[tuple[int, int]] = field(default_factory=list)
    """(first token of the response, number) of what the agent put before each turn but the first."""

    @property
    def loss_mask(self) -> list[int]:
        """For each token of the response 1 if the policy drew it, 0 if the agent inserted it."""
        mask = [1] * len(self.response_ids)
        for start, count in self.inserted:
            mask[start : start + count] = [0] * count
        return mask

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def is_truncated(self) -> bool:
        """Whether its last response was cut at its longest length."""
        return self.turns[-1].finish_reason == "length"

    def is_continued_by(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt begins with all its tokens."""
        middle = len(self.prompt_ids)
        if len(prompt_ids) < self.num_tokens or list(prompt_ids[:middle]) != self.prompt_ids:
            return False
        return list(prompt_ids[middle : self.num_tokens]) == self.response_ids

    def append(self, turn: Turn) -> None:
        """Add a turn that continues it."""
        inserted = list(turn.prompt_ids[self.num_tokens :])
        if self.turns:
            self.inserted.append((len(self.response_ids), len(inserted)))
        self.response_ids += [*inserted, *turn.token_ids]
        self.logprobs += [*[0.0] * len(inserted), *turn.logprobs]
        self.versions += [*[(self.versions or turn.versions)[-1]] * len(inserted), *turn.versions]
        self.turns.append(turn)


class AgentConversation:
    """The turns of one conversation, added in the order in which their answers were given."""

    def __init__(self) -> None:
        self.branches: list[Branch] = []
        """In the order of their first turns."""
        self.num_turns = 0
        self.num_drawn = 0
        """Tokens that the policy drew."""
        self._calls: set[str] = set()
        self._newest: Branch | None = None

    @property
    def newest(self) -> Branch:
        """The branch of the turn that was added last; there is one."""
        assert self._newest is not None
        return self._newest

    def add(self, turn: Turn, call: str = "") -> None:
        """Add a turn. One with the name of a call that was added before is the same turn again, and changes nothing."""
        if call and call in self._calls:
            return
        self._calls.add(call)
        branch = self._continued(turn.prompt_ids)
        if branch is None:
            branch = Branch(list(turn.prompt_ids))
            self.branches.append(branch)
        branch.append(turn)
        self._newest = branch
        self.num_turns += 1
        self.num_drawn += len(turn.token_ids)

    def num_left(self, prompt_ids: Sequence[int], longest: int) -> int:
        """Tokens that may be drawn after a prompt, so that no branch gets a response of more than `longest` tokens; below 1 if none."""
        branch = self._continued(prompt_ids)
        return longest if branch is None else longest - (len(prompt_ids) - len(branch.prompt_ids))

    def num_after(self, prompt_ids: Sequence[int]) -> int:
        """Tokens of all branches together once a prompt is added, without its response."""
        branch = self._continued(prompt_ids)
        known = 0 if branch is None else branch.num_tokens
        return sum(each.num_tokens for each in self.branches) + len(prompt_ids) - known

    def _continued(self, prompt_ids: Sequence[int]) -> Branch | None:
        """The longest branch that a prompt continues."""
        found = [branch for branch in self.branches if branch.is_continued_by(prompt_ids)]
        return max(found, key=lambda branch: branch.num_tokens, default=None)
