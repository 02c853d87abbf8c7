"""From the turns of a conversation to the row of its sample: the branches one after the other, with one reward.

A row has one prompt and one response. The prompts of the second branch and of those behind it stand in the response, without loss;
`LeasedRow.starts` says where each begins. The trainer computes each branch as a sequence of its own (`trainer/batch.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ....relay.receipts import note_digest
from ...engine.sequence import Completion
from ...environments.base import Episode, Messages
from ...leased_row import LeasedRow
from ..conversations import essence
from .conversation import AgentConversation, Branch

Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True)
class AgentEpisode(Episode):
    """The transcript of a conversation with an agent."""

    num_turns: int = 0

    def figures(self) -> dict[str, Any]:
        """The turns for the metrics of a step; the time of the agent before each turn but the first is that of an environment."""
        return {"turns": self.num_turns, "seconds": self.seconds, "calls": None}


def completed(
    held: LeasedRow, conversation: AgentConversation, seconds: Sequence[float], reward: float, decode: Decode
) -> Completion:
    """Give a row its tokens, versions and transcript; returns its completion. The conversation has a turn.

    reward: the agent's; reward functions may add theirs. seconds: the agent's time between its calls. decode: text of tokens.
    """
    first, *others = conversation.branches
    response_ids = list(first.response_ids)
    logprobs = list(first.logprobs)
    versions = list(first.versions)
    inserted = list(first.inserted)
    starts: list[int] = []
    for branch in others:
        shift = len(response_ids) + len(branch.prompt_ids)
        starts.append(len(first.prompt_ids) + len(response_ids))
        inserted += [
            (len(response_ids), len(branch.prompt_ids)),
            *((start + shift, count) for start, count in branch.inserted),
        ]
        response_ids += [*branch.prompt_ids, *branch.response_ids]
        logprobs += [*[0.0] * len(branch.prompt_ids), *branch.logprobs]
        versions += [*[versions[-1]] * len(branch.prompt_ids), *branch.versions]
    held.starts = starts
    held.has_own_prompt = True
    held.version = versions[0]
    held.digests = {}
    for turn in (turn for branch in conversation.branches for turn in branch.turns):
        for version in {*turn.versions}:
            note_digest(held.digests, version, turn.digests.get(version, ""))
    changes = enumerate(pairwise(versions), start=len(first.prompt_ids) + 1)
    held.switches = [(position, new) for position, (old, new) in changes if new != old]
    held.episode = _episode(conversation, inserted, seconds, reward, decode)
    last = conversation.newest
    text = held.episode.completions[-1]
    reason = "length" if last.is_truncated else "stop"
    return Completion(held.row_id.number, list(first.prompt_ids), response_ids, logprobs, reason, text)


def _episode(
    conversation: AgentConversation,
    inserted: list[tuple[int, int]],
    seconds: Sequence[float],
    reward: float,
    decode: Decode,
) -> AgentEpisode:
    """The transcript of the branch with the newest turn, and what was inserted in all branches."""
    branch = conversation.newest
    messages = _messages(branch)
    observations = _texts(branch, decode) if messages is None else messages
    return AgentEpisode(
        prompt=decode(branch.prompt_ids) if messages is None else [],
        completions=[turn.text for turn in branch.turns],
        observations=list(observations),
        inserted=inserted,
        reward=reward,
        seconds=[round(each, 6) for each in seconds],
        num_turns=conversation.num_turns,
    )


def _messages(branch: Branch) -> list[Messages] | None:
    """What the agent said between the turns of a chat; None for another kind of calls."""
    if not all(turn.messages for turn in branch.turns):
        return None
    found: list[Messages] = []
    for before, after in pairwise(branch.turns):
        known = len(before.messages)
        if [*map(essence, after.messages[:known])] != [*map(essence, before.messages)]:
            return None
        found.append(list(after.messages[known:-1]))
    return found


def _texts(branch: Branch, decode: Decode) -> list[str]:
    return [decode(branch.response_ids[start : start + count]) for start, count in branch.inserted]
