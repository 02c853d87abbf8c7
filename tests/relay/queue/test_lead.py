"""`queue.lead=auto` beside a queue that is always full: as many tokens a second, of a lower staleness; the hub is the real one."""

from pathlib import Path

import pytest
from support.virtual_run import Fleet, VirtualRun

from headrace.relay.journal.journal import replay

STEPS = 28


def emulated(rollouts: int, gpus: int, growth: float = 1.0, filtered: float = 0.0) -> Fleet:
    """Rollouts of four H800s and so many GPUs that train, as in docs/schedules.md; two of 16 samples, so times are 8 times."""
    return Fleet(
        per_step=128, samples=2, num_rollouts=rollouts, token_s=820e-6 * 8 / gpus, request_s=41e-6 * 8, max_running=64,
        growth=growth, filtered=filtered,
    )  # fmt: skip


SMALL = Fleet(
    per_step=16, samples=8, num_rollouts=2, token_s=1.25e-4, batch_s=0.02, publish_s=0.01, decode_s=0.0015,
    request_s=8e-6, max_running=64, median=12.0, tail=2.0, longest=32,
)  # fmt: skip
CASES = {
    "trainer-bound": (emulated(10, 24), 0.8),
    "balanced": (emulated(7, 36), 1.2),
    "rollout-bound": (emulated(5, 44), 0.9),
    "longer-midway": (emulated(9, 28, growth=1.6), 0.8),
    "filtered": (emulated(10, 24, filtered=0.4), 0.8),
    "small": (SMALL, 1.0),
}


@pytest.mark.parametrize("case", CASES)
def test_a_lead_that_follows_the_trainer_costs_no_throughput_and_lowers_staleness(tmp_path: Path, case: str):
    fleet, staleness = CASES[case]
    found: dict[str, tuple[float, float]] = {}
    for lead in ("auto", 2 * fleet.per_step):
        folder = tmp_path / str(lead)
        folder.mkdir()
        run = VirtualRun(folder, fleet, STEPS, lead=lead).run()
        found[str(lead)] = run.measured()
        assert replay(run.path) == run.hub.state, "the journal gives the same window"
    (speed, lag), (full_speed, full_lag) = found.values()
    assert speed >= 0.99 * full_speed
    assert lag <= min(staleness, full_lag + 0.1)
