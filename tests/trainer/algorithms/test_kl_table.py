"""The KL divergence by age and by depth is the mean of its formula over the tokens of each range."""

import math
from collections import defaultdict

import numpy as np
import pytest
import torch

from headrace.trainer.algorithms.kl_table import NAMES, KLTable, kl_metrics
from headrace.trainer.batch import PADDING_TRAJECTORY, Trajectory, pack

VERSION = 30
AGES = {0: "0", 1: "1", 2: "2", 3: "3-4", 4: "3-4", 5: "5-8", 8: "5-8", 9: "9+", 30: "9+"}
DEPTHS = {0: "0-15", 15: "0-15", 16: "16-63", 63: "16-63", 64: "64-255", 255: "64-255", 256: "256-1023", 1023: "256-1023",
          1024: "1024-4095", 4095: "1024-4095", 4096: "4096+", 5000: "4096+"}  # fmt: skip
LENGTHS = (1, 5001, 70, 16, 3)


def trajectory_of(number: int, length: int) -> Trajectory:
    """Tokens of mixed ages, of which a third has no loss."""
    rng = np.random.default_rng(number)
    ages = rng.choice([*AGES], length)
    return Trajectory(
        prompt_ids=np.array([1], np.int32),
        response_ids=np.zeros(length, np.int32),
        rollout_logprobs=rng.normal(-2, 1, length).astype(np.float32),
        loss_mask=(rng.random(length) > 1 / 3).astype(np.uint8),
        version=0,
        versions=(VERSION - ages).astype(np.int32),
        advantages=np.ones(length, np.float32),
    )


TRAJECTORIES = [trajectory_of(number, length) for number, length in enumerate(LENGTHS)]
SHIFTS = [np.random.default_rng(50 + i).normal(0, 0.5, n).astype(np.float32) for i, n in enumerate(LENGTHS)]


def totals_of(numbers: list[int]) -> list[float]:
    """Of a micro-batch of some of the trajectories."""
    batch = pack([TRAJECTORIES[number] for number in numbers], VERSION, torch.device("cpu"))
    table = KLTable()
    table.add(batch, batch.rollout_logprobs + torch.from_numpy(np.concatenate([SHIFTS[n] for n in numbers])))
    return table.totals()


def depth_of(place: int) -> str:
    return DEPTHS[max(start for start in DEPTHS if start <= place)]


def formula() -> dict[str, float]:
    """Token by token in float64: p / b - 1 - log(p / b)."""
    found: dict[str, list[float]] = defaultdict(list)
    for row, shifts in zip(TRAJECTORIES, SHIFTS, strict=True):
        assert row.versions is not None
        for place, (mask, version, b, shift) in enumerate(
            zip(row.loss_mask, row.versions, row.rollout_logprobs, shifts, strict=True)
        ):
            if mask:
                log_ratio = float(np.float32(b + shift)) - float(b)
                kl = math.exp(log_ratio) - 1 - log_ratio
                found[f"kl/age/{AGES[VERSION - version]}"].append(kl)
                found[f"kl/depth/{depth_of(place)}"].append(kl)
    return {name: math.fsum(values) / len(values) for name, values in found.items()}


def test_each_range_has_the_mean_of_the_formula_over_its_tokens():
    expected = formula()
    assert {*expected} == {*NAMES}, "the rows have tokens of all ranges"
    found = kl_metrics(totals_of([*range(len(LENGTHS))]))
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.parametrize("place", DEPTHS)
def test_the_first_and_the_last_place_of_a_range_are_in_it(place: int):
    mask = np.zeros(5001, np.uint8)
    mask[place] = 1
    zeros = np.zeros(5001, np.float32)
    row = Trajectory(np.zeros(1, np.int32), np.zeros(5001, np.int32), zeros, mask, version=VERSION, advantages=zeros)
    batch = pack([TRAJECTORIES[0], row], VERSION, torch.device("cpu"))
    batch.mask[0] = 0
    table = KLTable()
    table.add(batch, batch.rollout_logprobs + 0.1)
    assert [*kl_metrics(table.totals())] == ["kl/age/0", f"kl/depth/{DEPTHS[place]}"]


def test_any_split_over_micro_batches_and_ranks_gives_the_same_means():
    whole = kl_metrics(totals_of([0, 1, 2, 3, 4]))
    parts = [totals_of([4, 0]), totals_of([1]), totals_of([3, 2])]
    assert kl_metrics([sum(values) for values in zip(*parts, strict=True)]) == pytest.approx(whole, rel=1e-12)


def test_tokens_without_loss_and_padding_change_nothing():
    table = KLTable()
    batch = pack([PADDING_TRAJECTORY], VERSION, torch.device("cpu"))
    table.add(batch, torch.tensor([math.nan]))
    assert kl_metrics(table.totals()) == kl_metrics(KLTable().totals()) == {}
