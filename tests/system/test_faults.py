"""A real run, struck at failpoints as the bench of faults does."""

import pytest
from bench.faults.striker import Fault, open_striker
from bench.faults.workloads import summarize

SURVIVED = (
    Fault(("rollout-0",), "pulling"),
    Fault(("relay-0",), "pushing"),
    Fault(("actor-0",), "generating"),
    Fault(("rollout-1",), frozen_s=1.0),
)


@pytest.mark.slow
def test_a_run_survives_faults_at_its_failpoints_and_one_that_ends_it_is_resumed():
    with open_striker(seed=1, num_relays=1) as striker:
        for fault in (*SURVIVED, Fault(("host of rollout-0",))):
            strike = striker.strike(fault)
            assert strike.has_struck and not strike.problems, strike
        *_, struck, broken = summarize("test", striker)
    assert (struck.value, broken.value, broken.holds) == (5, 0, True)
