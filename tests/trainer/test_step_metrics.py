"""The metrics of a step describe its data, and separate engine mismatch from staleness."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from headrace.comm.messages import GroupId, TrainBatch
from headrace.comm.messages.queue import GroupRef
from headrace.comm.recipe import AlgorithmSettings, SamplingSettings
from headrace.relay.queue.batch import Batch
from headrace.trainer.actor_group import ActorGroup
from headrace.trainer.algorithms.objective import policy_loss
from headrace.trainer.algorithms.ratio_table import RatioTable
from headrace.trainer.batch import PADDING_TRAJECTORY, Trajectory, pack
from headrace.trainer.step_metrics import StepMetrics

VERSION = 5


def batch_of(version: int, response_ids: np.ndarray, truncated: int = 1) -> Batch:
    """A group of two rows; this rank trains the first."""
    group = GroupRef(GroupId(0, 0), [0, 1], [1, 1], [["relay-0#1"]] * 2, [version] * 2, [4, 4], [1.0, 0.0])
    first, _ = group.rows()
    return Batch(
        TrainBatch(step=VERSION, first=0, total=1, groups=[group], metrics={}),
        [[first]],
        {
            first.key: {
                "response_ids": response_ids,
                "loss_mask": np.ones(len(response_ids), np.uint8),
                "truncated": np.array([truncated], np.uint8),
            }
        },
    )


def stats_of(version: int, shift: float, num_tokens: int = 3, **settings: Any) -> StepMetrics:
    """One trajectory of `version` whose log-probs in training are `shift` above those of its rollout."""
    trajectory = Trajectory(
        prompt_ids=np.array([1], np.int32),
        response_ids=np.arange(num_tokens, dtype=np.int32),
        rollout_logprobs=-np.ones(num_tokens, np.float32),
        loss_mask=np.ones(num_tokens, np.uint8),
        version=version,
        advantages=np.ones(num_tokens, np.float32),
    )
    stats = StepMetrics()
    stats.add(batch_of(version, trajectory.response_ids))
    batch = pack([trajectory], VERSION, torch.device("cpu"))
    logprobs = batch.rollout_logprobs + shift
    entropy = torch.full_like(logprobs, 0.5)
    algorithm = AlgorithmSettings(clip_high=0.05, importance_sampling_cap=1.05, **settings)
    terms = policy_loss(logprobs, entropy, batch, algorithm, SamplingSettings())
    stats.add_batch(batch, logprobs, terms)
    return stats


def test_fresh_tokens_measure_the_mismatch_of_generator_and_trainer():
    metrics = stats_of(VERSION, shift=0.1).metrics(VERSION)
    assert metrics["mismatch/logprob_abs_diff"] == pytest.approx(0.1, rel=1e-5)
    assert metrics["mismatch/kl"] == pytest.approx(math.exp(0.1) - 1.1, rel=1e-3)
    assert metrics["mismatch/probs_diff_max"] == pytest.approx(math.exp(-0.9) - math.exp(-1.0), rel=1e-5)


def test_stale_tokens_count_as_staleness_and_not_as_mismatch():
    metrics = stats_of(VERSION - 2, shift=0.1).metrics(VERSION)
    assert "mismatch/kl" not in metrics
    assert metrics["staleness/mean"] == 2
    assert metrics["staleness/token_mean"] == 2
    assert metrics["staleness/hist"] == {"2": 2}
    assert metrics["kl/age/2"] == metrics["kl/depth/0-15"] == pytest.approx(math.exp(0.1) - 1.1, rel=1e-3)
    assert metrics["is/mean"] == pytest.approx(math.exp(0.1), rel=1e-5)


def test_means_are_per_token_and_per_trajectory():
    metrics = stats_of(VERSION, shift=0.0).metrics(VERSION)
    assert metrics["actor/entropy"] == pytest.approx(0.5)
    assert (metrics["reward/mean"], metrics["reward/std"]) == (0.5, 0.5)
    assert (metrics["response_length/mean"], metrics["response_length/clip_ratio"]) == (3, 1)
    assert metrics["is/ess"] == pytest.approx(1.0)
    assert metrics["group/zero_std_frac"] == 0


def test_a_response_that_ends_by_itself_at_the_longest_length_is_not_cut():
    stats = StepMetrics()
    for truncated in (0, 1, 0, 0):
        stats.add(batch_of(VERSION, np.arange(3), truncated))
    assert stats.metrics(VERSION)["response_length/clip_ratio"] == 0.25


def test_each_number_noted_on_responses_is_averaged_over_those_that_have_it():
    stats = StepMetrics()
    for notes in ({"metrics": {"format": 1.0, "acc": 0.5}}, {"metrics": {"format": 0.0}, "extra": {"x": 1}}, {}):
        batch = batch_of(VERSION, np.arange(3))
        batch.columns[batch.rows[0].key]["reward_info"] = np.frombuffer(json.dumps(notes).encode(), np.uint8)
        stats.add(batch)
    stats.reduce(ActorGroup(0, 1, torch.device("cpu"), deadline_s=1))
    metrics = stats.metrics(VERSION)
    assert (metrics["reward/format"], metrics["reward/acc"], metrics["reward/mean"]) == (0.5, 0.5, 0.5)


def test_clipped_tokens_are_counted():
    for shift, clipped in ((0.2, 1), (0.01, 0)):
        assert stats_of(VERSION, shift, proximal="rollout").metrics(VERSION)["actor/pg_clipfrac"] == clipped


def test_bounded_weights_of_fresh_and_of_stale_tokens_are_counted_apart():
    fresh, stale = (stats_of(version, shift=0.2).metrics(VERSION) for version in (VERSION, VERSION - 1))
    assert fresh["mismatch/limited_frac"] == 1 and "staleness/limited_frac" not in fresh
    assert stale["staleness/limited_frac"] == 1 and "mismatch/limited_frac" not in stale
    assert stats_of(VERSION - 1, shift=0.01).metrics(VERSION)["staleness/limited_frac"] == 0
    assert stale["staleness/kl"] == pytest.approx(math.exp(0.2) - 1.2, rel=1e-3)


def test_a_trajectory_without_weight_adds_nothing():
    stats = stats_of(VERSION, shift=0.1)
    before = stats.metrics(VERSION)
    batch = pack([PADDING_TRAJECTORY], VERSION, torch.device("cpu"))
    ones = torch.ones(1)
    terms = policy_loss(ones, ones, batch, AlgorithmSettings(), SamplingSettings())
    stats.add_batch(batch, ones, terms)
    assert stats.metrics(VERSION) == before


def test_one_rank_reduces_to_its_own_sums():
    stats = stats_of(VERSION, shift=0.1)
    before = stats.metrics(VERSION)
    stats.reduce(ActorGroup(0, 1, torch.device("cpu"), deadline_s=1))
    assert stats.metrics(VERSION) == before


def test_the_length_of_a_response_leaves_out_what_its_environment_inserted():
    batch = batch_of(VERSION, np.arange(5, dtype=np.int32))
    batch.columns[batch.rows[0].key]["loss_mask"] = np.array([1, 1, 0, 0, 1], np.uint8)
    stats = StepMetrics()
    stats.add(batch)
    metrics = stats.metrics(VERSION)
    assert (metrics["response_length/mean"], metrics["response_length/max"]) == (3.0, 3.0)


def test_the_ratio_of_the_tree_is_over_all_micro_batches_that_have_rows():
    ones = np.ones(4, np.uint8)
    row = Trajectory(np.arange(8), np.arange(4), -ones, ones, VERSION, advantages=ones)
    stats = stats_of(VERSION, 0.0)
    assert "actor/tree_ratio" not in stats.metrics(VERSION), "an emulated trainer computes none"
    for longest in (100, 0):
        stats.add_packed(pack([row] * 3, VERSION, torch.device("cpu"), longest_in_tree=longest), is_real=True)
    stats.add_packed(pack([PADDING_TRAJECTORY], VERSION, torch.device("cpu")), is_real=False)
    assert stats.metrics(VERSION)["actor/tree_ratio"] == 72 / (12 + 36)


def mixed_row(number: int) -> Trajectory:
    """Tokens of several versions, of which a third has no loss; row 2 has none with loss, row 3 no fresh one."""
    rng = np.random.default_rng(number)
    length = (30, 7, 5, 11)[number]
    ages = rng.integers(number == 3, 3, length)
    return Trajectory(
        prompt_ids=np.array([1], np.int32),
        response_ids=np.zeros(length, np.int32),
        rollout_logprobs=rng.normal(-2, 1, length).astype(np.float32),
        loss_mask=((rng.random(length) > 1 / 3) & (number != 2)).astype(np.uint8),
        version=0,
        versions=(VERSION - ages).astype(np.int32),
        advantages=rng.normal(size=length).astype(np.float32),
    )


def figures_by_formula(rows: list[Trajectory], ours: list[np.ndarray], entropy: list[np.ndarray]) -> dict[str, float]:
    """Each metric of the tokens with loss, in float64."""
    mask = np.concatenate([row.loss_mask for row in rows]) > 0
    ages = VERSION - np.concatenate([row.versions for row in rows if row.versions is not None])[mask]
    p, b, h = (np.concatenate(x).astype(np.float64)[mask] for x in (ours, [r.rollout_logprobs for r in rows], entropy))
    difference, is_fresh = p - b, ages == 0
    ratio, prob_diff = np.exp(difference), np.abs(np.exp(p) - np.exp(b))
    kl = ratio - 1 - difference
    return {
        "actor/entropy": h.mean(), "is/mean": ratio.mean(), "is/max": ratio.max(),
        "is/ess": ratio.sum() ** 2 / (len(ratio) * np.square(ratio).sum()), "staleness/token_mean": ages.mean(),
        "mismatch/probs_diff_mean": prob_diff[is_fresh].mean(), "mismatch/probs_diff_max": prob_diff[is_fresh].max(),
        "mismatch/logprob_abs_diff": np.abs(difference)[is_fresh].mean(), "mismatch/kl": kl[is_fresh].mean(),
        "staleness/kl": kl[~is_fresh].mean(),
    }  # fmt: skip


def test_each_figure_is_that_of_its_formula_over_the_tokens_with_loss_of_all_micro_batches():
    rows = [mixed_row(number) for number in range(4)]
    rng = np.random.default_rng(9)
    ours = [(row.rollout_logprobs + rng.normal(0, 0.3, len(row.loss_mask))).astype(np.float32) for row in rows]
    ours[2][:] = -math.inf  # without loss
    entropy = [rng.random(len(row.loss_mask)).astype(np.float32) for row in rows]
    stats = StepMetrics()
    stats.add(batch_of(VERSION, np.arange(3)))
    algorithm = AlgorithmSettings()
    for part in ([0], [1, 3], [2]):
        batch = pack([rows[number] for number in part], VERSION, torch.device("cpu"))
        logprobs, own = (torch.from_numpy(np.concatenate([x[number] for number in part])) for x in (ours, entropy))
        finite = logprobs.nan_to_num(neginf=-5.0)  # the loss of this part is 0, and would be NaN
        stats.add_batch(batch, logprobs, policy_loss(finite, own, batch, algorithm, SamplingSettings()))
    metrics = stats.metrics(VERSION)
    for name, value in figures_by_formula(rows, ours, entropy).items():
        assert metrics[name] == pytest.approx(value, rel=1e-5), name
    assert stats.metrics(VERSION) == metrics, "reading changes nothing"


def test_histograms_count_each_trajectory_and_each_token_once():
    stats = stats_of(VERSION - 2, 0.5, num_tokens=3)
    found = stats.histograms(VERSION)
    assert sum(found["reward"].counts) == 2 and (found["reward"].edges[0], found["reward"].edges[-1]) == (0.0, 1.0)
    assert found["staleness"].edges == [-0.5, 0.5, 1.5, 2.5] and found["staleness"].counts == [0, 0, 2]
    ratios = found["is/log_ratio"]
    (place,) = [place for place, count in enumerate(ratios.counts) if count]
    assert ratios.counts[place] == 3 and ratios.edges[place] < 0.5 <= ratios.edges[place + 1]
    assert "response_length" not in found, "the rows do not say where their prompts end"


def test_a_histogram_of_lengths_leaves_out_the_prompt():
    stats = StepMetrics()
    stats.rows = [GroupRef(GroupId(0, 0), [0], [1], [["u"]], [5], [9], [1.0], num_prompt_tokens=4).rows()[0]]
    found = stats.histograms(VERSION)["response_length"]
    assert sum(found.counts) == 1 and found.edges[0] < 5 < found.edges[-1]


def test_ratios_that_are_not_finite_are_counted_in_the_outer_intervals():
    table = RatioTable()
    table.add(torch.tensor([math.inf, -math.inf, math.nan, 0.0, 0.0]), torch.tensor([True, True, True, True, False]))
    totals = table.totals()
    assert sum(totals) == 4 and totals[0] == 1 and totals[-1] == 2 and totals[len(totals) // 2] == 1


@pytest.mark.parametrize("rewards", [(0.3, 0.1 + 0.2), (1.7e308, -1.7e308), (1e16, 1e16 + 2)])
def test_rewards_that_are_too_near_or_too_far_apart_for_the_intervals_are_in_one(rewards: tuple[float, float]):
    stats = stats_of(VERSION, shift=0.0)
    stats.rows[:] = [replace(row, reward=reward) for row, reward in zip(stats.rows, rewards, strict=True)]
    found = stats.histograms(VERSION)["reward"]
    assert found.counts == [2]
    low, high = found.edges
    assert math.isfinite(low) and math.isfinite(high) and low <= min(rewards) < max(rewards) <= high
