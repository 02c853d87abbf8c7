"""The scheduler without a model: order, sharing, preemption, pauses."""

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


def step(scheduler) -> list[Sequence]:
    """One step of the engine without a model; returns the finished sequences."""
    scheduler.make_room()
    chunks = scheduler.next_chunks()
    assert sum(c.stop - c.start for c in chunks) <= scheduler.prefill_tokens
    scheduler.fork_ready()
    scheduler.compact()
    scheduler.check()
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


def drain(scheduler) -> list[int]:
    finished = []
    for _ in range(2_000):
        finished += [s.trajectory_id for s in step(scheduler)]
        if not scheduler.running and not scheduler.waiting:
            return finished
    raise AssertionError("the scheduler is stuck")


def test_groups_run_in_order_of_arrival():
    scheduler = Scheduler(PagePool(100, PAGE), 2, 100)
    for index in range(4):
        scheduler.add(group(10 * index, 1, 5, 3))
    assert drain(scheduler) == [0, 10, 20, 30]


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
    assert drain(scheduler) == [0, 1, 2]
    assert scheduler.num_recomputed >= scheduler.num_preempted > 0


def test_a_paused_sequence_continues_after_the_tokens_of_its_environment():
    scheduler = Scheduler(PagePool(9, PAGE), 3, 100)
    scheduler.add(group(7, 1, 5, 12))
    step(scheduler)
    sequence = scheduler.running[0]
    assert scheduler.pause(7) and not scheduler.running and not scheduler.pause(7)
    scheduler.resume(7, [3, 3, 3])
    assert drain(scheduler) == [7]
    assert sequence.token_ids == [1, 3, 3, 3, *[1] * 8] and len(sequence.logprobs) == 12


arrivals = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 5), st.integers(1, 23), st.integers(1, 23)), max_size=12
)
disturbances = st.lists(st.tuples(st.sampled_from(["cancel", "pause", "resume"]), st.integers(0, 11)), max_size=30)


@settings(deadline=None, max_examples=300)
@given(arrivals, disturbances, st.integers(8, 40), st.integers(1, 6), st.integers(1, 40))
def test_every_trajectory_finishes_once_despite_cancels_pauses_and_scarce_pages(
    arrivals, disturbances, num_pages, max_running, prefill_tokens
):
    scheduler = Scheduler(PagePool(num_pages, PAGE), max_running, prefill_tokens)
    expected: set[int] = set()
    finished: list[int] = []
    actions = iter(disturbances)
    for index, (pause_before, num_samples, prompt_length, limit) in enumerate(arrivals):
        for _ in range(pause_before):
            finished += [s.trajectory_id for s in step(scheduler)]
        scheduler.add(group(10 * index, num_samples, prompt_length, limit))
        expected.update(range(10 * index, 10 * index + num_samples))
        disturb(scheduler, next(actions, None), expected)
    for action in actions:
        finished += [s.trajectory_id for s in step(scheduler)]
        disturb(scheduler, action, expected)
    for sequence in list(scheduler.paused):
        scheduler.resume(sequence.trajectory_id)
    finished += drain(scheduler)
    assert sorted(finished) == sorted(expected)
    assert scheduler.pool.num_free == num_pages - 1


def disturb(scheduler, action, expected):
    match action:
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
