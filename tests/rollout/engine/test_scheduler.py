"""The scheduler without a model: order, sharing, preemption, pauses, and what each page holds."""

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.rollout.engine.page_pool import PagePool
from headrace.rollout.engine.sampling import SamplingParams
from headrace.rollout.engine.scheduler import Scheduler
from headrace.rollout.engine.sequence import Sequence, SequenceGroup

CONTEXT, PAGE = 24, 4


def group(first_id, num_samples, prompt_length, limit):
    prompt = list(range(prompt_length))
    limit = min(limit, CONTEXT - prompt_length)
    return SequenceGroup(
        [Sequence(first_id + i, 0, prompt, SamplingParams(), limit, frozenset()) for i in range(num_samples)], prompt
    )


class Slots:
    """The tokens, up to its own, and the version of the weights that each slot of the cache was computed from."""

    def __init__(self):
        self.version = 0
        self._held = {}

    def copy(self, pool):
        for source, target in pool.take_copies():
            for offset in range(PAGE):
                self._held[target, offset] = self._held.get((source, offset))

    def write(self, pages, tokens, start, stop):
        for position in range(start, stop):
            self._held[pages[position // PAGE], position % PAGE] = (self.version, tokens[: position + 1])

    def check(self, pages, tokens, stop):
        for position in range(stop):
            held = self._held[pages[position // PAGE], position % PAGE]
            assert held == (self.version, tokens[: position + 1]), "a slot has the keys of other tokens or weights"


def step(scheduler, slots=None) -> list[Sequence]:
    """One step of the engine without a model; returns the finished sequences."""
    slots = slots or Slots()
    scheduler.make_room()
    chunks = scheduler.next_chunks()
    assert sum(c.stop - c.start for c in chunks) <= scheduler.prefill_tokens
    slots.copy(scheduler.pool)
    for group, start, stop, _ in chunks:
        slots.write(group.pages, group.tokens, start, stop)
    for group, _, stop, _ in chunks:
        slots.check(group.pages, group.tokens, stop)
    scheduler.fork_ready()
    scheduler.compact()
    slots.copy(scheduler.pool)
    scheduler.check()
    for sequence in scheduler.running:
        tokens = sequence.prompt_ids + sequence.token_ids
        slots.check(sequence.pages, tokens, sequence.num_cached)
        slots.write(sequence.pages, tokens, sequence.num_cached, sequence.num_cached + 1)
    assert len(scheduler.running) <= scheduler.max_running
    finished = []
    for sequence in scheduler.running:
        assert len(sequence.pages) * PAGE > sequence.num_cached, "no page for the token that is decoded now"
        assert sequence.num_cached == sequence.num_tokens - 1
        sequence.num_cached += 1
        sequence.append(1, -0.5)
        if sequence.finish_reason:
            finished.append(sequence)
    for sequence in finished:
        scheduler.finish(sequence)
    scheduler.check()
    return finished


def drain(scheduler, slots) -> list[int]:
    finished = []
    for _ in range(2_000):
        finished += [s.trajectory_id for s in step(scheduler, slots)]
        if not scheduler.running and not scheduler.waiting:
            return finished
    raise AssertionError("the scheduler is stuck")


def test_groups_run_in_order_of_arrival():
    scheduler = Scheduler(PagePool(100, PAGE), 2, 100)
    for index in range(4):
        scheduler.add(group(10 * index, 1, 5, 3))
    assert drain(scheduler, Slots()) == [0, 10, 20, 30]


def test_samples_of_a_prompt_that_are_added_one_by_one_are_one_group():
    scheduler = Scheduler(PagePool(100, PAGE), 8, 100)
    for index, length in enumerate((11, 7, 11, 7, 11)):
        scheduler.add(group(index, 1, length, 3))
    assert scheduler.cancel(2) and scheduler.cancel(1) and scheduler.cancel(3)
    scheduler.add(group(9, 1, 7, 3))
    assert [len(g.sequences) for g in scheduler.waiting] == [2, 1]
    assert [(c.start, c.stop) for c in scheduler.next_chunks()] == [(0, 10), (0, 6)]
    scheduler.add(group(5, 1, 11, 3))
    assert [len(g.sequences) for g in scheduler.waiting] == [2, 1, 1], "the first group is on its way"


def test_a_prompt_of_one_token_that_a_step_has_reached_is_joined_by_no_other():
    slots, scheduler = Slots(), Scheduler(PagePool(100, PAGE), 2, 1)
    scheduler.add(group(0, 1, 2, 1))
    scheduler.add(group(1, 1, 1, 1))
    finished = step(scheduler, slots)
    scheduler.add(group(2, 1, 1, 1))
    assert sorted([*drain(scheduler, slots), *(s.trajectory_id for s in finished)]) == [0, 1, 2]


def test_prompts_that_are_admitted_together_prefill_their_common_pages_once():
    scheduler = Scheduler(PagePool(100, PAGE, max_kept=100), 8, 100)
    for index, length in enumerate((11, 9, 23)):
        scheduler.add(group(index, 1, length, 3))
    assert [(c.start, c.stop) for c in scheduler.next_chunks()] == [(0, 10), (8, 22)]
    assert scheduler.prefixes.num_found == 16 and scheduler.num_prefilled == 24


def test_a_second_turn_prefills_its_new_tokens_alone():
    slots, scheduler = Slots(), Scheduler(PagePool(100, PAGE, max_kept=100), 8, 100)
    scheduler.add(group(0, 1, 9, 6))
    first = None
    while first is None:
        first = next(iter(step(scheduler, slots)), None)
    tokens = first.prompt_ids + first.token_ids
    assert len(tokens) == 15 and scheduler.num_prefilled == 8
    tokens = [*tokens, 7, 7, 7, 7, 7]
    second = Sequence(1, 0, tokens, SamplingParams(), 3, frozenset())
    scheduler.add(SequenceGroup([second], tokens))
    step(scheduler, slots)
    assert scheduler.num_prefilled == 8 + 19 - 12, "three pages of the first turn are found"


def test_a_cache_without_kept_pages_finds_nothing():
    scheduler = Scheduler(PagePool(100, PAGE), 8, 100)
    for index in range(3):
        scheduler.add(group(index, 1, 11 + index, 3))
        drain(scheduler, Slots())
    assert scheduler.prefixes.num_found == 0 and scheduler.num_prefilled == 10 + 11 + 12


def test_a_prefix_is_prefilled_once_and_its_full_pages_are_shared():
    scheduler = Scheduler(PagePool(100, PAGE), 4, 100)
    scheduler.add(group(0, 4, 11, 5))
    chunks = scheduler.next_chunks()
    assert [(c.start, c.stop) for c in chunks] == [(0, 10)]
    forks = scheduler.fork_ready()
    pages = [sequence.pages for sequence in forks]
    assert scheduler.pool.take_copies() == [(pages[3][2], own[2]) for own in pages[:3]]
    assert len({tuple(p[:2]) for p in pages}) == 1 and len({p[2] for p in pages}) == 4
    assert scheduler.pool.num_owners[pages[0][0]] == 4


def test_the_newest_is_preempted_when_pages_run_out():
    scheduler = Scheduler(PagePool(9, PAGE), 3, 100)
    for index in range(3):
        scheduler.add(group(index, 1, 5, 19))
    assert drain(scheduler, Slots()) == [0, 1, 2]
    assert scheduler.num_recomputed >= scheduler.num_preempted > 0


def test_a_prompt_that_was_refused_once_gets_its_second_chunk_while_no_row_ends():
    slots, scheduler = Slots(), Scheduler(PagePool(7, PAGE), 3, 8)
    for first_id, prompt_length, limit in ((0, 5, 19), (1, 3, 2)):
        scheduler.add(group(first_id, 1, prompt_length, limit))
    step(scheduler, slots)
    scheduler.add(group(2, 1, 13, 9))
    assert step(scheduler, slots) and not scheduler.waiting[0].pages, (
        "the row that ends frees pages for the first chunk"
    )
    step(scheduler, slots)
    assert scheduler.waiting[0].num_cached == 8
    assert scheduler.may_admit(), "a page for the rest is free"


def test_a_paused_sequence_continues_after_the_tokens_of_its_environment():
    scheduler = Scheduler(PagePool(9, PAGE), 3, 100)
    scheduler.add(group(7, 1, 5, 12))
    slots = Slots()
    step(scheduler, slots)
    sequence = scheduler.running[0]
    assert scheduler.pause(7) and not scheduler.running and not scheduler.pause(7)
    scheduler.resume(7, [3, 3, 3])
    assert drain(scheduler, slots) == [7]
    assert sequence.token_ids == [1, 3, 3, 3, *[1] * 8] and len(sequence.logprobs) == 12


def test_a_resumed_sequence_has_no_pages_that_new_weights_have_freed():
    scheduler = Scheduler(PagePool(9, PAGE), 3, 100)
    scheduler.add(group(7, 1, 5, 12))
    step(scheduler, Slots())
    scheduler.pause(7)
    scheduler.resume(7, [3])
    scheduler.forget()
    sequence = scheduler.find(7)
    assert sequence is not None and (sequence.pages, sequence.num_cached) == ([], 0)


arrivals = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 5), st.integers(1, 23), st.integers(1, 23)), max_size=12
)
disturbances = st.lists(
    st.tuples(st.sampled_from(["cancel", "pause", "resume", "weights"]), st.integers(0, 11)), max_size=30
)


@settings(deadline=None, max_examples=300)
@given(
    arrivals, disturbances, st.integers(8, 40), st.integers(1, 6), st.integers(1, 40), st.integers(0, 40), st.booleans()
)
def test_every_trajectory_finishes_once_despite_cancels_pauses_and_scarce_pages(
    arrivals, disturbances, num_pages, max_running, prefill_tokens, max_kept, in_ranges
):
    """The prompts begin alike, so that their pages are found again; weights change now and then."""
    scheduler = Scheduler(PagePool(num_pages, PAGE, max_kept, in_ranges), max_running, prefill_tokens)
    slots = Slots()
    expected: set[int] = set()
    finished: list[int] = []
    actions = iter(disturbances)
    for index, (pause_before, num_samples, prompt_length, limit) in enumerate(arrivals):
        for _ in range(pause_before):
            finished += [s.trajectory_id for s in step(scheduler, slots)]
        scheduler.add(group(10 * index, num_samples, prompt_length, limit))
        expected.update(range(10 * index, 10 * index + num_samples))
        disturb(scheduler, slots, next(actions, None), expected)
    for action in actions:
        finished += [s.trajectory_id for s in step(scheduler, slots)]
        disturb(scheduler, slots, action, expected)
    for sequence in list(scheduler.paused):
        scheduler.resume(sequence.trajectory_id)
    finished += drain(scheduler, slots)
    assert sorted(finished) == sorted(expected)
    assert scheduler.pool.num_free == num_pages - 1


def disturb(scheduler, slots, action, expected):
    match action:
        case ("weights", _):
            slots.version += 1
            scheduler.forget()
        case ("cancel", which) if expected:
            victim = sorted(expected)[which % len(expected)]
            if scheduler.cancel(victim):
                expected.remove(victim)
        case ("pause", which) if scheduler.running:
            scheduler.pause(scheduler.running[which % len(scheduler.running)].trajectory_id)
        case ("resume", which) if scheduler.paused:
            sequence = scheduler.paused[which % len(scheduler.paused)]
            room = min(CONTEXT - 1 - sequence.num_tokens, sequence.limit - 1 - len(sequence.token_ids))
            scheduler.resume(sequence.trajectory_id, [2] * max(0, min(which, room)))
