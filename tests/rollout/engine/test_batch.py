"""The rows that decode together: after any changes they are those of a new batch."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.rollout.engine.batch import DecodeBatch
from headrace.rollout.engine.page_pool import PagePool
from headrace.rollout.engine.sampling import SamplingParams
from headrace.rollout.engine.sequence import Sequence

CONTEXT, PAGE, ROWS = 40, 4, 6
POLICY: Any = SimpleNamespace(vocab_size=50, device=torch.device("cpu"), context=CONTEXT)
KINDS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(top_k=3),
    SamplingParams(repetition_penalty=1.5),
]


class Rows:
    """Sequences that decode in a batch, with pages that are numbered in the order of their use."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.batch = DecodeBatch(pool, POLICY, ROWS)
        self.running: list[Sequence] = []
        self.next_page = 1
        self.next_id = 0
        self.table = torch.zeros(ROWS, CONTEXT // PAGE, dtype=torch.int32)
        """A copy of the table that only changes are sent to, as a captured graph has one."""

    def enter(self, sequence: Sequence) -> None:
        sequence.num_cached = sequence.num_tokens - 1
        sequence.pages = [self.page() for _ in range(sequence.num_cached // PAGE + 1)]
        sequence.num_entries += 1
        self.running.append(sequence)

    def page(self) -> int:
        self.next_page = self.next_page % (self.pool.num_pages - 1) + 1
        return self.next_page

    def new(self, length: int, kind: int) -> Sequence:
        self.next_id += 1
        prompt = [(7 * self.next_id + i) % 50 for i in range(length)]
        return Sequence(self.next_id, 1000 + self.next_id, prompt, KINDS[kind], CONTEXT, frozenset())

    def step(self, *, is_read: bool) -> None:
        """Each row draws a token; the last one is read at once or not before the rows have changed."""
        for sequence in self.running:
            if sequence.num_cached >= len(sequence.pages) * PAGE:
                sequence.pages.append(self.page())
        self.update()
        tokens = (self.batch.tokens + 1) % 50
        if self.batch.sampling.seen is not None:
            self.batch.sampling.seen.scatter_(1, tokens[:, None], True)
        for sequence in self.running:
            sequence.num_cached += 1
        self.batch.advance(tokens)
        drawn = [*zip(self.running, tokens.tolist(), strict=True)]
        if not is_read and len(self.running) > 1:  # a row ends before the step that drew its token is read
            self.running.pop(len(self.running) // 2)
            self.update(is_read=False)
        for sequence, token in drawn:
            sequence.token_ids.append(token)

    def update(self, *, is_read: bool = True) -> None:
        if self.batch.sequences == self.running and not self.is_new():
            self.batch.extend()
        else:
            self.batch.update(self.running)
            change = self.batch.change
            assert change is not None
            if change.kept is not None:
                self.table[: change.num_kept] = self.table[change.kept]
            self.table[change.num_kept : change.num_before] = 0
            self.table[change.num_kept : len(self.running), : change.table.shape[1]] = change.table
        for row, column, page in self.batch.grown:
            self.table[row, column] = page
        if is_read and self.running:
            self.compare()

    def is_new(self) -> bool:
        return self.batch._entries != [s.num_entries for s in self.running]

    def compare(self) -> None:
        fresh = DecodeBatch(self.pool, POLICY, ROWS)
        fresh.update(self.running)
        batch = self.batch
        for name in ("positions", "num_pages", "table"):
            assert np.array_equal(getattr(batch, name), getattr(fresh, name)), name
        assert torch.equal(self.table[: len(batch)].long(), torch.from_numpy(fresh.table))
        assert not self.table[len(batch) :].any()
        for name in ("tokens", "num_drawn"):
            assert torch.equal(getattr(batch, name), getattr(fresh, name)), name
        own = batch.sampling
        for name in ("keys", "is_greedy", "scale", "seen", "has_greedy", "has_random", "has_filter"):
            found = getattr(own, name)
            expected = getattr(fresh.sampling, name)
            if name == "seen" and expected is not None:  # a row without a penalty need not know its tokens
                has_penalty = torch.tensor([s.params.repetition_penalty != 1 for s in self.running])
                found = found[has_penalty]
                expected = expected[has_penalty]
            assert torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected, name
        assert (own.filters is None) == (fresh.sampling.filters is None)
        for found, expected in zip(own.filters or (), fresh.sampling.filters or (), strict=True):
            assert torch.equal(found, expected)


actions = st.lists(
    st.tuples(st.sampled_from(["enter", "leave", "again", "step", "late"]), st.integers(0, 11)), max_size=40
)


@settings(deadline=None, max_examples=200)
@given(actions, st.booleans())
def test_rows_that_change_are_those_of_a_new_batch(changes, in_ranges):
    rows = Rows(PagePool(90, PAGE, in_ranges=in_ranges))
    for kind, number in changes:
        running = rows.running
        match kind:
            case "enter" if len(running) < ROWS:
                rows.enter(rows.new(1 + number, number % len(KINDS)))
            case "leave" if running:
                running.pop(number % len(running))
            case "again" if running:  # it has lost its pages, and has others now
                rows.enter(running.pop(-1 if number % 2 else number % len(running)))
            case "step" | "late" if all(s.num_cached < CONTEXT - 1 for s in running):
                rows.step(is_read=kind == "step")
    rows.update()


def test_a_sequence_whose_newest_token_is_not_read_does_not_enter():
    rows = Rows(PagePool(90, PAGE))
    rows.enter(rows.new(3, 0))
    rows.running[0].num_cached += 1
    with pytest.raises(AssertionError, match="a sequence enters when all its tokens are read"):
        rows.batch.update(rows.running)
