"""The decode curve: what it finds from steps of a known curve."""

import math
import random

import pytest

from headrace.launch.lab.emulated.device import EmulatedDevice
from headrace.launch.lab.settings import lab_of
from headrace.rollout.decode_curve import MIN_STEPS, DecodeCurve
from headrace.rollout.load_report import LoadTotals

TRUTH = (4e-3, 2e-5, 3e-8)


def curve(*terms: float, noise: float = 0.0, per_trajectory_tokens: tuple[int, int] = (100, 5000)) -> DecodeCurve:
    """The curve found from steps of random loads that take these seconds, with relative noise."""
    draw, found = random.Random(0), DecodeCurve()
    for _ in range(400):
        num = draw.randint(1, 128)
        load = num * draw.randint(*per_trajectory_tokens)
        seconds = terms[0] + terms[1] * num + terms[2] * load
        found.add(num, load, seconds * (1 + noise * draw.uniform(-1, 1)))
    return found


def test_steps_of_a_straight_curve_give_it_back():
    found = curve(*TRUTH)
    assert found.terms() == pytest.approx(TRUTH, rel=1e-6)
    assert found.fixed_tokens == pytest.approx((TRUTH[0] + 64.5 * TRUTH[1]) / TRUTH[2], rel=0.03), "of the mean batch"
    assert curve(*TRUTH, noise=0.2).terms()[0] == pytest.approx(TRUTH[0], rel=0.1)


def test_no_term_is_negative_and_the_curve_still_fits():
    fixed, per_trajectory, per_token = curve(1e-3, 1e-4, 0.0, noise=0.3).terms()
    assert min(fixed, per_trajectory, per_token) >= 0
    assert fixed + per_trajectory * 64 + per_token * 64 * 2500 == pytest.approx(1e-3 + 64e-4, rel=0.1)


def test_loads_that_cannot_be_told_apart_give_a_curve_that_fits_them():
    fixed, per_trajectory, per_token = curve(*TRUTH, per_trajectory_tokens=(300, 300)).terms()
    assert fixed + per_trajectory * 10 + per_token * 3000 == pytest.approx(4e-3 + 2e-4 + 9e-5, rel=1e-3)


def test_where_cached_tokens_cost_no_time_any_number_of_them_is_free():
    assert (curve(1e-3, 1e-4, 0.0).fixed_tokens or math.inf) > 1e6
    assert curve(0.0, 1e-4, 1e-7).fixed_tokens == pytest.approx(64_500, rel=0.03), "it is known, and not without bound"


def test_a_batch_that_does_not_vary_tells_the_tokens_that_cost_as_much_as_the_rest_of_its_step():
    found = DecodeCurve()
    for number in range(400):
        found.add(32, 32 * (500 + number), TRUTH[0] + TRUTH[1] * 32 + TRUTH[2] * 32 * (500 + number))
    assert found.fixed_tokens == pytest.approx((TRUTH[0] + 32 * TRUTH[1]) / TRUTH[2], rel=1e-3)


def test_steps_of_large_batches_do_not_change_the_bound_of_a_repack():
    """An emulated device's steps grow with the batch above 240 trajectories alone; none of the bound is below that."""
    settings = lab_of({"profile": "papers"})
    device, totals, draw = EmulatedDevice(settings, max_running=512), LoadTotals(), random.Random(0)
    truth = (settings.step_ms + settings.weights_ms) * 1e6 / settings.kv_ns
    for _ in range(2000):
        num = draw.choice([512, draw.randint(1, 512)])
        load = min(num * draw.randint(400, 2000), settings.kv_tokens)
        totals.decoded(num, load, device.steps_s(num, load, 1), batch_bound=128)
    assert totals.small_curve.fixed_tokens == pytest.approx(truth, rel=0.1)
    full = LoadTotals()
    for num in range(300, 500):
        full.decoded(num, num * 1000, device.steps_s(num, num * 1000, 1), batch_bound=128)
    assert full.small_curve.fixed_tokens is None, "large batches alone tell nothing"


def test_a_few_steps_are_not_enough():
    few = DecodeCurve()
    for _ in range(MIN_STEPS - 1 + 9):
        few.add(1, 100, 0.01)
    assert few.terms() == (0, 0, 0) and few.fixed_tokens is None


@pytest.mark.parametrize("slow", [0, 1, 9, 300])
def test_one_step_of_seconds_changes_nothing(slow: int):
    draw, found = random.Random(0), DecodeCurve()
    for number in range(400):
        num = draw.randint(1, 128)
        load = num * draw.randint(100, 5000)
        stopped = 5.0 if number == slow else 0.0
        found.add(num, load, TRUTH[0] + TRUTH[1] * num + TRUTH[2] * load + stopped)
    assert found.terms() == pytest.approx(TRUTH, rel=1e-6)


def test_a_batch_that_grows_to_far_slower_steps_is_taken_in():
    found = DecodeCurve()
    for number in range(400):
        num = 1 if number < 100 else 64
        found.add(num, 1000 + number, 1e-4 + 5e-4 * num)
    fixed, per_trajectory, per_token = found.terms()
    assert fixed + per_trajectory * 64 + per_token * 1400 == pytest.approx(1e-4 + 5e-4 * 64, rel=1e-2)
