"""Continuous batching: groups are admitted in order of arrival; rows and KV pages are the limiting resources.

A step of the engine: `make_room` (every running sequence gets the page for its next token; the newest are preempted),
`next_chunks` (tokens of waiting prefixes to prefill), `fork_ready` (sequences with a cached prefix enter free rows).
State changes only; no tensors. Pages that change places or are copied are left to the pool (`PagePool.take_copies`).
"""

from collections import Counter, deque
from collections.abc import Iterator
from collections.abc import Sequence as Many
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from .prefix_cache import PrefixCache, digest
from .recurrent.state_keeper import StateKeeper
from .recurrent.state_pool import StatePool
from .sequence import Sequence, SequenceGroup

if TYPE_CHECKING:
    from ...trainer.policy.rope import RopeRows
    from .page_pool import PagePool

HOLES_CLOSED_ABOVE = 0.85
"""Pages are compacted when less than this share of their range is in use."""


class Chunk(NamedTuple):
    """Tokens [start, stop) of a group's prefix to prefill now."""

    group: SequenceGroup
    start: int
    stop: int
    saves: list[tuple[int, int]]
    """Numbers of tokens, in rising order, behind which the recurrent state is copied to a place."""


class Scheduler:
    """`waiting` groups (oldest first) become `running` sequences (in order of entry); `paused` ones wait for a `resume`.

    When pages run out, the newest paused sequence loses its pages, then the newest waiting prefix, then the newest running
    sequence. So the oldest always advances, provided that the pool holds one sequence of full context and one page more.
    """

    def __init__(
        self,
        pool: "PagePool",
        max_running: int,
        prefill_tokens: int,
        rope: "RopeRows | None" = None,
        states: StatePool | None = None,
    ) -> None:
        self.pool = pool
        self.states = states or StatePool()
        self.prefixes = PrefixCache(pool, self.states, rope)
        self._keeper = StateKeeper(pool, self.states, self.prefixes, max_running)
        self._rope = rope
        self.max_running = max_running
        self.prefill_tokens = prefill_tokens
        self.waiting: deque[SequenceGroup] = deque()
        self.running: list[Sequence] = []
        self.paused: list[Sequence] = []
        self._untouched: dict[bytes, SequenceGroup] = {}
        """Waiting groups that no step has reached yet, by the digest of their tokens."""
        self._refused: tuple[SequenceGroup, int] | None = None
        """The group that found too few pages in the last admission, and how many were to spare."""
        self.num_preempted = 0
        self.num_prefilled = 0
        """Tokens prefilled."""
        self.num_recomputed = 0
        """Tokens dropped from the cache and prefilled again."""
        self.recomputed: Counter[str] = Counter()
        """These by what dropped them."""

    def add(self, group: SequenceGroup) -> None:
        """Queue a group. Its sequences join a group of the same tokens that no step has reached yet.

        A sequence whose turn is over is paused, with the pages that its group has.
        """
        sequence = group.sequences[0]
        if sequence.is_turn_over:
            sequence.pages = group.pages
            sequence.states[group.num_cached % 2] = group.state
            sequence.num_cached = group.num_cached
            sequence.chain = group.chain
            self.paused.append(sequence)
            return
        group.digest = digest(group.tokens)
        twin = self._untouched.get(group.digest)
        if twin is not None and not group.pages:
            twin.sequences += group.sequences
            return
        self.waiting.append(group)
        if not group.pages:
            self._untouched[group.digest] = group

    def may_requeue(self) -> bool:
        """Whether running sequences may lose their rows in the next step: to others, or because their cache does not serve."""
        needed = sum(self._needs_page(s) for s in self.running) if self.pool.num_free < len(self.running) else 0
        return self.pool.num_free < needed or bool(self._outdated())

    def may_admit(self) -> bool:
        """Whether waiting sequences may enter rows in the next step."""
        return bool(self.waiting) and len(self.running) < self.max_running and not self._is_refused()

    def requeue_outdated(self) -> None:
        """Queue the running sequences again whose cache does not serve their next token."""
        for sequence in self._outdated():
            self.running.remove(sequence)
            self._requeue(sequence, "rope")

    def make_room(self) -> list[Sequence]:
        """Give every running sequence the page for its next token; returns the sequences preempted for it."""
        preempted: list[Sequence] = []
        size = self.pool.page_size
        for sequence in [s for s in self.running if len(s.pages) * size <= s.num_cached]:
            if sequence in preempted:
                continue
            while self._needs_page(sequence):
                if self.pool.num_free > 0:
                    sequence.pages.append(self.pool.take())
                    self._keeper.mark(sequence, len(self.running))
                elif not self._drop_something():
                    preempted.append(self._preempt())
                    if preempted[-1] is sequence:
                        break
        return preempted

    def next_chunks(self) -> list[Chunk]:
        """Chunks of the oldest waiting prefixes, in order, within the token budget, the free pages and the free rows."""
        chunks: list[Chunk] = []
        budget = self.prefill_tokens
        rows = self.max_running - len(self.running)
        self._refused = None
        for group in self.waiting:
            if rows <= 0 or budget <= 0:
                break
            rows -= len(group.sequences)
            self._untouched.pop(group.digest, None)
            if not group.pages:
                self.prefixes.find(group, len(self.running))
            missing = group.prefix_length - group.num_cached
            if missing == 0:
                continue
            stop = group.num_cached + min(missing, budget)
            while not self._take_pages(group, stop):
                if self._drop_something(keep=group, is_behind=True):
                    continue
                if self.running or chunks or not self._drop_something(keep=group):
                    self._refused = None if chunks else (group, self._num_spare())
                    return chunks
            saves = self._keeper.plan_saves(group, stop, len(self.running))
            chunks.append(Chunk(group, group.num_cached, stop, saves))
            budget -= stop - group.num_cached
            self.num_prefilled += stop - group.num_cached
            if (again := min(stop, group.num_dropped) - group.num_cached) > 0:
                self.num_recomputed += again
                self.recomputed[group.dropped_by] += again
            group.num_cached = stop
            self.prefixes.register(group, group.tokens, stop)
        return chunks

    def fork_ready(self) -> list[Sequence]:
        """Move sequences of cached groups into free rows, oldest first, as far as the pages suffice. The chunks are prefilled by now."""
        self._keeper.keep_saved()
        forks: list[Sequence] = []
        while self.waiting and len(self.running) < self.max_running:
            group = self.waiting[0]
            if group.num_cached < group.prefix_length:
                break
            while not self._can_fork(group):
                if self._drop_something(keep=group, is_behind=True):
                    continue
                if self.running or not self._drop_something(keep=group):
                    self._refused = group, self._num_spare()
                    return forks
            self._untouched.pop(group.digest, None)  # a prompt of one token needs no chunk
            forks.append(self._fork(group))
            self.running.append(forks[-1])
            if not group.sequences:
                self.waiting.popleft()
        return forks

    def finish(self, sequence: Sequence) -> None:
        """Remove a running sequence and free its pages; with `pause_at_stop` one that stops is paused instead."""
        self.running.remove(sequence)
        if sequence.is_turn_over:
            self.paused.append(sequence)
        else:
            self._release(sequence)

    def compact(self) -> bool:
        """Close the holes between the private pages in use, and between the shared ones. Returns whether a page has moved.

        Attention that reads the whole range of pages in use reads its holes too, so they cost time. A few are tolerated.
        """
        if not self.pool.in_ranges:
            return False
        has_moved = False
        places: dict[int, list[tuple[Sequence | SequenceGroup, int]]] = {}
        for holder in (*self.running, *self.paused, *self.waiting):
            for index, page in enumerate(holder.pages):
                places.setdefault(page, []).append((holder, index))
        for is_shared in (False, True):
            used = sorted((p for p in places if self.pool.is_shared[p] == is_shared), reverse=is_shared)
            if not used:
                continue
            width = self.pool.num_pages - used[-1] if is_shared else used[-1]
            if len(used) > HOLES_CLOSED_ABOVE * width:
                continue
            for page in reversed(used):
                target = self.pool.move(page, is_shared)
                if target == page:
                    break
                has_moved = True
                for holder, index in places[page]:
                    holder.pages[index] = target
        return has_moved

    def pause(self, trajectory_id: int) -> bool:
        """Take a running sequence out of its row; it keeps its pages until others need them. False if it is not running."""
        for sequence in self.running:
            if sequence.trajectory_id == trajectory_id:
                self.running.remove(sequence)
                self.paused.append(sequence)
                return True
        return False

    def resume(self, trajectory_id: int, token_ids: Many[int] = ()) -> bool:
        """Queue a paused sequence again, with tokens of its environment. False if they leave no room: it stays paused."""
        sequence = next(s for s in self.paused if s.trajectory_id == trajectory_id)
        if len(sequence.token_ids) + len(token_ids) >= sequence.limit:
            return False
        self.paused.remove(sequence)
        sequence.insert(token_ids)
        group = SequenceGroup([sequence], sequence.prompt_ids + sequence.token_ids)
        group.num_dropped = sequence.num_dropped
        group.dropped_by = sequence.dropped_by
        sequence.num_dropped = 0
        if self._must_recompute(sequence.num_cached, group.prefix_length):
            group.num_dropped = sequence.num_cached
            group.dropped_by = "rope"
            self._release(sequence)
        num_cached = min(sequence.num_cached, group.prefix_length)  # a step behind a stop has cached its token too
        group.state = sequence.states[num_cached % 2]
        sequence.states[num_cached % 2] = 0
        self._keeper.drop(sequence)
        group.pages = sequence.pages
        group.num_cached = num_cached
        group.chain = sequence.chain
        sequence.pages = []  # they are the group's now, which may lose them
        sequence.num_cached = 0
        sequence.chain = None
        self.waiting.append(group)
        return True

    def reserve(self, group: SequenceGroup, num_tokens: int) -> bool:
        """Take pages for the imported cache of a group, before it is added; False if it must be computed again."""
        return not self._must_recompute(num_tokens, group.prefix_length) and self._take_pages(group, num_tokens)

    def forget(self) -> None:
        """Free every page, before the weights change; running sequences queue again in their order, ahead of the waiting ones."""
        self.prefixes.forget()
        for sequence in self.paused:
            self._release_paused(sequence, "weights")
        for group in self.waiting:
            self._forget_prefix(group, "weights")
        while self.running:
            self._requeue(self.running.pop(), "weights")

    def find(self, trajectory_id: int) -> Sequence | None:
        """The sequence of a trajectory: running, paused or waiting."""
        return next((s for s in self.unfinished() if s.trajectory_id == trajectory_id), None)

    def unfinished(self) -> Iterator[Sequence]:
        """Every sequence: running, paused or waiting."""
        return chain(self.running, self.paused, (s for group in self.waiting for s in group.sequences))

    def cancel(self, trajectory_id: int) -> Sequence | None:
        """Remove a trajectory and free its pages; returns its sequence, if it was here."""
        for home in (self.running, self.paused):
            for sequence in home:
                if sequence.trajectory_id == trajectory_id:
                    home.remove(sequence)
                    self._release(sequence)
                    return sequence
        for group in self.waiting:
            for sequence in group.sequences:
                if sequence.trajectory_id == trajectory_id:
                    group.sequences.remove(sequence)
                    if not group.sequences:
                        self._untouched.pop(group.digest, None)
                        self._forget_prefix(group, "")
                        self.waiting.remove(group)
                    return sequence
        return None

    def check(self) -> None:
        """Assert that the reference count of every page is right."""
        waiting = set(map(id, self.waiting))
        assert all(id(group) in waiting for group in self._untouched.values()), "a group left unnoticed"
        self.pool.check([holder.pages for holder in (*self.running, *self.paused, *self.waiting)])
        sequences = [*self.running, *self.paused]
        places = [place for sequence in sequences for place in (*sequence.states, sequence.mark)]
        self.states.check([*places, *(group.state for group in self.waiting)])

    def _outdated(self) -> "list[Sequence]":
        """The running sequences whose cache does not serve their next token, the newest first."""
        if self._rope is None or self._rope.switch is None:
            return []
        return [s for s in reversed(self.running) if self._must_recompute(s.num_cached, s.num_cached)]

    def _must_recompute(self, num_cached: int, position: int) -> bool:
        return self._rope is not None and self._rope.must_recompute(num_cached, position)

    def _needs_page(self, sequence: Sequence) -> bool:
        """Whether the page of a running sequence's next token is missing."""
        return len(sequence.pages) * self.pool.page_size <= sequence.num_cached

    def _num_spare(self) -> int:
        """Free pages beyond the reserve of one per running row."""
        return self.pool.num_free - len(self.running)

    def _is_refused(self) -> bool:
        """Whether the pages did not suffice for the oldest waiting group, and no more are free since."""
        group, num_spare = self._refused or (None, 0)
        return group is self.waiting[0] and self._num_spare() <= num_spare

    def _take_pages(self, group: SequenceGroup, num_tokens: int) -> bool:
        """Grow a group's pages to hold `num_tokens`. One free page per running row stays in reserve."""
        missing = self.pool.pages_for(num_tokens) - len(group.pages)
        if missing > self._num_spare() or not (group.state or self.states.has_room(1)):
            return False
        group.state = group.state or self.states.take()
        num_shared = group.prefix_length // self.pool.page_size if len(group.sequences) > 1 else 0
        for _ in range(missing):
            group.pages.append(self.pool.take(is_shared=len(group.pages) < num_shared))
        return True

    def _can_fork(self, group: SequenceGroup) -> bool:
        is_last = len(group.sequences) == 1
        needs_page = not is_last or group.prefix_length % self.pool.page_size == 0
        has_states = self.states.has_room(1 if is_last and group.state else 2)
        return has_states and (not needs_page or self.pool.num_free > 0)

    def _fork(self, group: SequenceGroup) -> Sequence:
        sequence = group.sequences.pop(0)
        sequence.num_entries += 1
        sequence.num_cached = group.prefix_length
        sequence.chain = group.chain
        parity = group.prefix_length % 2
        if group.sequences or not group.state:
            sequence.states[parity] = self.states.take(group.state)
        else:
            sequence.states[parity] = group.state
            group.state = 0
        sequence.states[1 - parity] = self.states.take(None)
        num_full, rest = divmod(group.prefix_length, self.pool.page_size)
        if not group.sequences:
            sequence.pages = group.pages
            group.pages = []
            if len(sequence.pages) == num_full:
                sequence.pages.append(self.pool.take())
            return sequence
        full = group.pages[:num_full]
        self.pool.share(full)
        sequence.pages = [*full, self.pool.take()]
        if rest:
            self.pool.copy(group.pages[num_full], sequence.pages[-1])
        return sequence

    def _preempt(self) -> Sequence:
        """Move the newest running sequence to the head of the queue; its cache is computed again later."""
        sequence = self.running.pop()
        self._requeue(sequence, "full_cache")
        self.num_preempted += 1
        return sequence

    def _requeue(self, sequence: Sequence, reason: str) -> None:
        tokens = sequence.prompt_ids + sequence.token_ids
        num_dropped = sequence.num_cached
        self._release(sequence)
        self.waiting.appendleft(SequenceGroup([sequence], tokens, num_dropped=num_dropped, dropped_by=reason))

    def _drop_something(self, keep: SequenceGroup | None = None, is_behind: bool = False) -> bool:
        """Free the pages of the newest paused sequence, else of the newest waiting group other than `keep`, or behind it.
        Else resumed sequences in the queue would hold all pages, and few sequences would run."""
        for sequence in reversed(self.paused):
            if sequence.pages:
                self._release_paused(sequence, "full_cache")
                return True
        for group in reversed(self.waiting):
            if group is keep and is_behind:
                return False
            if group.pages and group is not keep:
                self._forget_prefix(group, "full_cache")
                return True
        return False

    def _release_paused(self, sequence: Sequence, reason: str) -> None:
        if sequence.num_cached:
            sequence.num_dropped = sequence.num_cached
            sequence.dropped_by = reason
        self._release(sequence)

    def _forget_prefix(self, group: SequenceGroup, reason: str) -> None:
        self.pool.give_back(group.pages)
        if group.num_cached >= group.num_dropped:
            group.num_dropped = group.num_cached
            group.dropped_by = reason
        self.states.give_back([group.state])
        group.pages = []
        group.state = 0
        group.num_cached = 0
        group.chain = None

    def _release(self, sequence: Sequence) -> None:
        tokens = sequence.prompt_ids + sequence.token_ids
        # A step whose token is not read yet may have cached one more.
        num_valid = min(sequence.num_cached, len(tokens))
        self._keeper.keep_marked(sequence, tokens[:num_valid])
        self.prefixes.register(sequence, tokens, num_valid)
        self.pool.give_back(sequence.pages)
        self._keeper.drop(sequence)
        sequence.pages = []
        sequence.num_cached = 0
        sequence.chain = None
