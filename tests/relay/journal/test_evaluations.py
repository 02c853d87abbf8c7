"""Evaluations in the fold: metrics that equal a hand calculation, each sample ends once, and an untouched one may move."""

from itertools import combinations
from pathlib import Path

import pytest

from headrace.comm.messages import GroupId, RowId
from headrace.relay.journal import events as ev
from headrace.relay.journal.cutting import cut_after
from headrace.relay.journal.evaluation_metrics import evaluation_metrics, pass_at_k, pass_sizes
from headrace.relay.journal.files import read_events
from headrace.relay.journal.journal import Journal
from headrace.relay.journal.replay import replay
from headrace.relay.journal.state import HubState, apply


def begun(
    number: int = 0, version: int = 0, samples: int = 2, threshold: float = 1.0, **num_prompts: int
) -> ev.EvaluationBegun:
    prompts = num_prompts or {"a": 2}
    return ev.EvaluationBegun(
        number=number, version=version, due=version, num_prompts=prompts, samples=samples, threshold=threshold
    )


def sample(index: int, number: int = 0, sample: int = 0) -> RowId:
    return GroupId(number, index, is_evaluation=True).row(sample)


def folded(*events: ev.Event) -> HubState:
    state = HubState()
    for event in (ev.Opened(epoch=1, samples_per_prompt=2), *events):
        apply(event, state)
        assert state.is_balanced
    return state


def leased(index: int, attempt: int = 1) -> ev.Leased:
    group = GroupId(0, index, is_evaluation=True)
    return ev.Leased(group=group, samples=[0, 1], attempt=attempt, version=0, holder="rollout-0")


def test_pass_at_k_is_the_share_of_draws_of_k_samples_with_a_right_one():
    for num_samples in range(1, 7):
        for num_right in range(num_samples + 1):
            for k in range(1, num_samples + 1):
                draws = list(combinations(range(num_samples), k))
                passed = sum(min(draw) < num_right for draw in draws)  # the first `num_right` samples are right
                assert pass_at_k(num_samples, num_right, k) == pytest.approx(passed / len(draws), abs=1e-12)


@pytest.mark.parametrize(("samples", "sizes"), [(1, [1]), (2, [1, 2]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])])
def test_pass_at_k_is_given_for_powers_of_two_and_all_samples(samples: int, sizes: list[int]):
    assert pass_sizes(samples) == sizes


def test_the_metrics_of_each_file_equal_a_hand_calculation():
    rewards = {0: [1.0, 0.5, 0.0, 2.0], 1: [0.0, 0.0, 0.0, 0.0], 2: [1.0, 1.0, None, 0.25]}
    scores = {
        sample(index, sample=number): ev.Evaluated(
            row=sample(index, sample=number),
            reward=reward or 0.0,
            num_tokens=10 * index + number,
            is_truncated=number == 3,
            failure="" if reward is not None else "the reward failed",
        )
        for index, each in rewards.items()
        for number, reward in enumerate(each)
    }
    metrics = evaluation_metrics(begun(version=7, samples=4, easy=2, hard=1), scores)
    assert metrics == pytest.approx(
        {
            "eval/version": 7,
            "eval/easy/avg@4": (0.875 + 0) / 2,
            "eval/easy/pass@1": (2 / 4 + 0) / 2,
            "eval/easy/pass@2": (1 - 1 / 6 + 0)
            / 2,  # of 6 pairs of the first prompt's samples one has none of the 2 right
            "eval/easy/pass@4": (1 + 0) / 2,
            "eval/easy/response_length/mean": (0 + 1 + 2 + 3 + 10 + 11 + 12 + 13) / 8,
            "eval/easy/response_length/clip_ratio": 2 / 8,
            "eval/easy/missing": 0,
            "eval/hard/avg@4": 2.25 / 3,
            "eval/hard/pass@1": 2 / 3,
            "eval/hard/pass@2": 1,  # three samples with two right: each pair has one
            "eval/hard/response_length/mean": (20 + 21 + 23) / 3,
            "eval/hard/response_length/clip_ratio": 1 / 3,
            "eval/hard/missing": 1,
        }
    )


def test_a_sample_succeeds_with_the_least_reward_of_a_success():
    scores = {
        sample(0, sample=number): ev.Evaluated(row=sample(0, sample=number), reward=reward)
        for number, reward in enumerate((0.5, 0.25))
    }
    rates = {t: evaluation_metrics(begun(threshold=t, a=1), scores)["eval/a/pass@1"] for t in (0.25, 0.5, 0.75)}
    assert rates == {0.25: 1.0, 0.5: 0.5, 0.75: 0.0}


def test_samples_of_an_evaluation_are_not_in_the_account_of_the_rows_of_training():
    ends = [ev.Evaluated(row=sample(i, sample=s), reward=1.0) for i in range(2) for s in range(2)]
    state = folded(begun(), leased(0), leased(1), *ends)
    assert (state.account.leased, state.in_flight, state.num_queued) == (0, 0, 0)
    assert state.evaluations.account == {"asked": 4, "evaluated": 4, "failed": 0, "open": 0, "holds": True}
    assert [result["eval/a/avg@2"] for result in state.evaluations.results] == [1.0]


def test_a_sample_ends_once():
    end = ev.Evaluated(row=sample(0), reward=1.0)
    with pytest.raises(AssertionError, match="READY"):
        folded(begun(), leased(0), end, end)


def test_an_evaluation_makes_room_for_another_one_only_while_no_rollout_has_begun_it():
    assert folded(begun(), begun(1, version=1)).evaluations.asked == 4
    with pytest.raises(AssertionError, match="is under way"):
        folded(begun(), leased(0), begun(1, version=1))


def test_a_resumed_run_opens_the_samples_again_that_were_being_generated():
    state = folded(
        begun(), leased(0), ev.Evaluated(row=sample(0), reward=1.0), ev.Opened(epoch=2, samples_per_prompt=2)
    )
    assert (state.evaluations.num_leased, state.evaluations.open) == (0, 3)
    assert [len(group.rows) for group in state.evaluations.wanted()] == [2, 2]


def test_groups_of_an_evaluation_are_not_measured_for_the_window():
    state = folded(begun(), leased(0), *[ev.Evaluated(row=sample(0, sample=s), t=2.0) for s in range(2)])
    assert not state.window.began and not state.window.ended


def test_a_journal_that_is_cut_at_a_checkpoint_keeps_the_scores_of_its_version(tmp_path: Path):
    journal, path = Journal(tmp_path / "journal.jsonl"), tmp_path / "journal.jsonl"
    scored = [ev.Evaluated(row=sample(i, 1, s), reward=1.0) for i in range(2) for s in range(2)]
    tail = [begun(1, version=1), *scored[:3], ev.Checkpointed(step=1, path="step_1"), scored[3]]
    later = [ev.Trained(step=1), begun(2, version=2), ev.Evaluated(row=sample(0, 2), reward=0.0)]
    zeroth = [begun(), *(ev.Evaluated(row=sample(i, 0, s)) for i in range(2) for s in range(2))]
    for event in (ev.Opened(epoch=1, samples_per_prompt=2), *zeroth, ev.Trained(step=0), *tail, *later):
        journal.append(event)
    journal.close()
    cut_after(path, 1, 1, tmp_path / "rest")
    opened, *kept = [event for _, event in read_events(path)][-len(scored) - 2 :]
    assert isinstance(opened, ev.Opened) and kept == [begun(1, version=1), *scored]
    state = replay(path)
    apply(ev.Opened(epoch=3, samples_per_prompt=2), state)
    assert [result["eval/version"] for result in state.evaluations.results] == [0, 1]
    assert state.evaluations.num_begun == 2 and state.is_balanced
