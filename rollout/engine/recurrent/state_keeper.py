"""Which states are kept for the prefix cache: those behind whole pages, where a later sequence may begin."""

from typing import TYPE_CHECKING

from ..sequence import Sequence, SequenceGroup

if TYPE_CHECKING:
    from ..page_pool import PagePool
    from ..prefix_cache import PrefixCache
    from .state_pool import StatePool


class StateKeeper:
    """Copies of states behind prompts, and behind the last full page of each running sequence, as far as places are to spare."""

    def __init__(self, pool: "PagePool", states: "StatePool", prefixes: "PrefixCache", max_running: int) -> None:
        self._pool = pool
        self._states = states
        self._prefixes = prefixes
        self._max_running = max_running
        self._saved: list[tuple[bytes, int]] = []
        """The digests and places of states that the prefill of this step copies."""

    def plan_saves(self, group: SequenceGroup, stop: int, num_running: int) -> list[tuple[int, int]]:
        """Numbers of tokens, and the places for the states behind them, of a prefill that goes on to `stop`.

        The state is kept behind the last full page of the prefix, and behind the pages that it has in common with another one.
        """
        size = self._pool.page_size
        ends = {group.prefix_length // size * size, group.num_known}
        saves: list[tuple[int, int]] = []
        for end in sorted(end for end in ends if group.num_cached < end <= stop):
            digest = self._prefixes.digest_at(group, group.tokens, end)
            if digest is not None and self._has_spare(num_running):
                saves.append((end, self._states.take(None)))
                self._saved.append((digest, saves[-1][1]))
        return saves

    def keep_saved(self) -> None:
        """Let the states be found that the prefill of this step has copied."""
        for digest, place in self._saved:
            self._states.keep(place, digest)
        self._saved = []

    def mark(self, sequence: Sequence, num_running: int) -> None:
        """Copy the state of a running sequence whose tokens fill whole pages."""
        if not self._has_spare(num_running) or not self._pool.max_kept:
            return
        sequence.mark = sequence.mark or self._states.take(None)
        sequence.num_marked = sequence.num_cached
        self._states.copy(sequence.states[sequence.num_cached % 2], sequence.mark)

    def keep_marked(self, sequence: Sequence, tokens: list[int]) -> None:
        """Let the marked state of a sequence that leaves be found, if it is that of these tokens."""
        if not sequence.mark or sequence.num_marked > len(tokens) or sequence.finish_reason == "error":
            return
        digest = self._prefixes.digest_at(sequence, tokens, sequence.num_marked)
        if digest is not None:
            self._states.keep(sequence.mark, digest)
            sequence.mark = 0

    def drop(self, sequence: Sequence) -> None:
        """Give back the places of a sequence that leaves."""
        self._states.give_back([*sequence.states, sequence.mark])
        sequence.states = [0, 0]
        sequence.mark = 0

    def _has_spare(self, num_running: int) -> bool:
        """Whether there are more places than the free rows and one group need."""
        return self._states.num_free > 2 * (self._max_running - num_running) + 1
