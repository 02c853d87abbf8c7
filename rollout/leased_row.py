"""A trajectory in a rollout, from its lease to its row: what it is leased as, what was generated, and how it was scored."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from ..comm.messages import DrawnTokens, RowDone, RowId, SampleScored
from ..relay.receipts import digests_used, note_digest
from .engine.sequence import Completion
from .environments.base import Episode

LARGEST = 3.4e38
"""Largest reward in size: a row stores it in 32 bits."""
MOST_TEXT = 1 << 15
"""Most characters of a response of an evaluation that the hub gets."""


@dataclass(slots=True)
class LeasedRow:
    """A trajectory that this rollout has the lease of. One that has failed may have no completion."""

    row_id: RowId
    attempt: int
    version: int
    """The version that drew its first token."""
    row: dict[str, Any]
    completion: Completion | None = None
    switches: list[tuple[int, int]] = field(default_factory=list)
    """(tokens of prompt and response so far, new version) at each change of the weights."""
    digests: dict[int, str] = field(default_factory=dict[int, str])
    """Of the weights of these versions, those of its tokens among them; a version without one is not known."""
    claim_id: int = 0
    """The unanswered claim of its lease (see rollout/migration); 0 if the lease is certain."""
    num_kept: int = 0
    """Tokens of the response that an earlier holder drew before it died."""
    episode: Episode | None = None
    """Its turns, if it has an environment."""
    starts: list[int] = field(default_factory=list)
    """Of a conversation with an agent: the first token of each branch but the first, in prompt and response together."""
    has_own_prompt: bool = False
    """A generator of the user's has made the prompt's tokens."""
    response: str | list[dict[str, Any]] = ""
    """For the reward functions: text, or the messages of several turns."""
    reward: float | None = None
    failure: str = ""
    broken_by: str = ""
    """What its environment did, where that is the failure: "error", or "late" for no answer in time."""
    info: dict[str, Any] = field(default_factory=dict)
    """`metrics`: numbers to average over a step, each function's reward among them; `extra`: other notes on the sample."""
    frames: list[str] = field(default_factory=list)
    """The lines of the user's code on the way to the error that is the failure."""
    tokens_then: DrawnTokens = field(default_factory=DrawnTokens)
    """Those of the rollout when the trajectory had ended."""

    @property
    def num_drawn(self) -> int:
        """Tokens of the finished response that the policy has drawn here."""
        if self.completion is None:
            return 0
        inserted = 0 if self.episode is None else self.episode.num_inserted(start=self.num_kept)
        return len(self.completion.token_ids) - self.num_kept - inserted

    @property
    def num_from_policy(self) -> int:
        """Tokens of the finished response that a policy has drawn, here or elsewhere."""
        inserted = 0 if self.episode is None else self.episode.num_inserted()
        return 0 if self.completion is None else len(self.completion.token_ids) - inserted

    @property
    def episode_reward(self) -> float:
        """The reward that its environment gave, 0 without one."""
        return 0.0 if self.episode is None else self.episode.reward

    @property
    def _shares_prompt(self) -> bool:
        """Whether its prompt is that of its group's data, as far as is known here: an environment may give each sample another one."""
        return not self.has_own_prompt and (self.episode is None or self.episode.prompt == self.row["prompt"])

    def token_versions(self) -> np.ndarray:
        """int32: the version that drew each token of the finished response."""
        done = self.completion
        return np.empty(0, np.int32) if done is None else self.first_versions(len(done.prompt_ids), len(done.token_ids))

    def drawn_by(self) -> set[int]:
        """The versions that drew a token of the finished response."""
        if self.completion is None:
            return set()
        num_prompt = len(self.completion.prompt_ids)
        end = len(self.completion.token_ids)
        versions = [self.version]
        starts = [0]
        for position, version in self.switches:
            versions.append(version)
            starts.append(position - num_prompt)
        spans = zip(versions, starts, [*starts[1:], end], strict=True)
        return {version for version, first, last in spans if first < min(last, end)}

    def first_versions(self, num_prompt: int, num_tokens: int) -> np.ndarray:
        """int32 [num_tokens]: the version that drew each of the first tokens of the response to a prompt of `num_prompt` tokens."""
        versions = np.full(num_tokens, self.version, np.int32)
        for position, version in self.switches:
            versions[position - num_prompt :] = version
        return versions

    def digests_of(self, versions: np.ndarray) -> np.ndarray:
        """uint8: the digests of the weights of these versions, as JSON: {"3": "0c..."}."""
        found = digests_used(self.digests, map(int, np.unique(versions)))
        return np.frombuffer(msgspec.json.encode(found), dtype=np.uint8)

    def keep(self, num_prompt: int, versions: Sequence[int], digests: Mapping[int, str] = MappingProxyType({})) -> None:
        """Continue another holder's response: `versions` drew its first tokens, and this row's version draws the next.

        digests: of the weights of these versions.
        """
        for version, digest in digests.items():
            note_digest(self.digests, version, digest)
        pairs = zip((None, *versions), (*versions, self.version), strict=True)
        starts = [(num_prompt + at, new) for at, (old, new) in enumerate(pairs) if old != new]
        self.version = starts[0][1]
        self.switches = starts[1:]
        self.num_kept = len(versions)

    def set_reward(self, reward: float | None) -> None:
        """Take its whole reward; the trajectory fails with one that no row stores."""
        is_usable = reward is None or abs(reward) <= LARGEST  # not so for NaN
        self.reward = reward if is_usable else None
        self.failure = self.failure or ("" if is_usable else f"the reward is {reward}")

    def report(self, storage_ids: list[str], receipt: str = "") -> RowDone | SampleScored:
        """The message to the hub about the row, which these units have, or about the sample of an evaluation.

        receipt: of its columns.
        """
        if self.row_id.is_evaluation:
            return self._sample_scored()
        done = self.completion
        versions = self.drawn_by()
        return RowDone(
            row=self.row_id,
            attempt=self.attempt,
            version=min(versions, default=self.version),
            storage_ids=storage_ids,
            num_tokens=len(done.prompt_ids) + len(done.token_ids) if done else 0,
            reward=self.reward,
            num_versions=len(versions) or 1,
            failure=self.failure,
            num_kept=self.num_kept,
            num_prompt_tokens=len(done.prompt_ids) if done and self._shares_prompt else 0,
            num_drawn=self.num_from_policy,
            drawn=self.tokens_then,
            broken_by=self.broken_by,
            receipt=receipt,
        )

    def columns(self) -> dict[str, np.ndarray]:
        """The row's columns; log-probs, versions and the loss mask have one entry per token of the response.

        `branch_starts`: `starts`, of a row that has any.
        """
        done = self.completion
        assert done is not None
        versions = self.token_versions()
        branches = {"branch_starts": np.array(self.starts, dtype=np.int32)} if self.starts else {}
        return {
            **branches,
            "prompt_ids": np.array(done.prompt_ids, dtype=np.int32),
            "response_ids": np.array(done.token_ids, dtype=np.int32),
            "rollout_logprobs": np.array(done.logprobs, dtype=np.float32),
            "versions": versions,
            "weight_digests": self.digests_of(versions),
            "loss_mask": self._loss_mask(len(done.token_ids)),
            "reward": np.array([self.reward], dtype=np.float32),
            "truncated": np.array([done.finish_reason == "length"], dtype=np.uint8),
            "reward_info": np.frombuffer(msgspec.json.encode(self._notes()), dtype=np.uint8),
        }

    def _notes(self) -> dict[str, Any]:
        """What the trainer's metrics have of the row beyond its tokens."""
        return self.info if self.episode is None else {**self.info, "turns": self.episode.figures()}

    def _sample_scored(self) -> SampleScored:
        done = self.completion
        text = self.response if isinstance(self.response, str) else json.dumps(self.response)
        return SampleScored(
            row=self.row_id,
            attempt=self.attempt,
            versions=sorted(self.drawn_by()) or [self.version],
            num_tokens=len(done.token_ids) if done else 0,
            is_truncated=done is not None and done.finish_reason == "length",
            reward=self.reward,
            failure=self.failure,
            text=text[:MOST_TEXT],
            num_drawn=self.num_from_policy,
            drawn=self.tokens_then,
        )

    def _loss_mask(self, num_tokens: int) -> np.ndarray:
        """1 for the tokens that the policy drew, 0 for those that its environment inserted."""
        if self.episode is None:
            return np.ones(num_tokens, np.uint8)
        return np.array(self.episode.loss_mask(num_tokens), dtype=np.uint8)
