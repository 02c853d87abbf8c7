"""A trajectory in the engine, and its result."""

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from .sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished trajectory, or one whose turn has ended. `token_ids` include the stop token; `logprobs` are one per token.

    A log-probability is that of the policy at the temperature of sampling, before filters and penalties.
    """

    trajectory_id: int
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    """`stop`, `length`, or `error`: the policy's logits are not finite, and the tokens are those before."""
    text: str = ""
    """The last turn as text, without special tokens, up to a stop string; empty if the policy has no tokenizer."""


class SequenceProgress(NamedTuple):
    """An unfinished trajectory in a generator, with its tokens of prompt and response so far; of these, those of the response."""

    trajectory_id: int
    num_tokens: int
    num_response: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class SequenceState:
    """An unfinished trajectory, as another engine with the same weights can continue it.

    The lists may be the generator's own, and grow with its next step.
    """

    trajectory_id: int
    key: int
    """Random stream of its sampling."""
    params: SamplingParams
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    cache: Tensor | None = None
    """Keys and values of every token but the newest, [layers, 2, tokens, kv_heads, head_dim]; None: compute them again."""
    turn_start: int = 0
    """The first token of the present turn in `token_ids`."""
    is_turn_over: bool = False
    """Whether it is paused until a `resume`."""
    states: Tensor | None = None
    """Beside a cache, the state of recurrent layers behind its tokens, uint8 [num_bytes]; None without layers of that kind."""


class Chain(NamedTuple):
    """The first pages of a sequence in the prefix cache, computed by one version of the weights."""

    version: int
    num_pages: int
    digest: bytes
    """Digest of the last page; without pages, of the kind of rotary embedding."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One trajectory in the engine. Its KV cache holds `num_cached` tokens in `pages`; the newest token is never in it."""

    trajectory_id: int
    key: int
    """Random stream of its sampling."""
    prompt_ids: list[int]
    params: SamplingParams
    limit: int
    """Most new tokens: the smaller of max_new_tokens and the rest of the context."""
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...] = ()
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=lambda: [0, 0])
    """The places of its recurrent state behind an even number of tokens and behind an odd one; 0: none."""
    mark: int = 0
    """The place of a copy of its state behind `num_marked` tokens, which fill whole pages; 0: none."""
    num_marked: int = 0
    chain: Chain | None = None
    num_cached: int = 0
    num_entries: int = 0
    """How often it has entered a row."""
    num_dropped: int = 0
    """Tokens that were cached before a paused sequence lost its pages, by `dropped_by`."""
    dropped_by: str = ""
    turn_start: int = 0
    """The first token of the present turn in `token_ids`."""
    finish_reason: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def is_turn_over(self) -> bool:
        """Whether it has stopped, and its environment decides how it goes on."""
        return self.params.pause_at_stop and self.finish_reason == "stop"

    def append(self, token: int, logprob: float) -> bool:
        """Take a sampled token; sets `finish_reason` when it ends the trajectory, and returns whether it does. One of probability NaN
        is not taken."""
        if math.isnan(logprob):
            self.finish_reason = "error"
            return True
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if token in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.limit:
            self.finish_reason = "length"
        else:
            return False
        return True

    def insert(self, token_ids: Many[int]) -> None:
        """Append tokens that were not sampled, with 0 as their log-probability; the next turn begins if one is over."""
        self.token_ids.extend(token_ids)
        self.logprobs.extend([0.0] * len(token_ids))
        if self.is_turn_over:
            self.turn_start = len(self.token_ids)
            self.finish_reason = ""

    def completion(self, text: str) -> Completion:
        return Completion(self.trajectory_id, self.prompt_ids, self.token_ids, self.logprobs, self.finish_reason, text)

    def restore(self, state: SequenceState) -> None:
        """Restore the state of another engine's sequence."""
        self.key = state.key
        self.token_ids = list(state.token_ids)
        self.logprobs = list(state.logprobs)
        self.turn_start = state.turn_start
        self.finish_reason = "stop" if state.is_turn_over else ""

    def export_state(self, cache: Tensor | None = None, states: Tensor | None = None) -> SequenceState:
        tokens = (self.prompt_ids, self.token_ids, self.logprobs)
        place = (self.turn_start, self.is_turn_over)
        return SequenceState(self.trajectory_id, self.key, self.params, *tokens, cache, *place, states)


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """Waiting sequences with the same tokens: their common prefix is prefilled once, then each sequence forks from it.

    The prefix is every token but the last, which the first decode step of each sequence processes. While the group waits,
    it owns `pages`, which hold the first `num_cached` tokens.
    """

    sequences: list[Sequence]
    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    state: int = 0
    """The place of the recurrent state behind these tokens; 0: none."""
    num_known: int = 0
    """Tokens whose pages were found, though no state behind them was."""
    chain: Chain | None = None
    num_cached: int = 0
    num_dropped: int = 0
    """Tokens whose keys and values were computed before, and dropped."""
    dropped_by: str = ""
    """What dropped them."""
    digest: bytes = b""
    """Digest of all tokens, while no step has reached the group."""

    @property
    def prefix_length(self) -> int:
        """Tokens that must be in the cache before a sequence may fork."""
        return len(self.tokens) - 1
