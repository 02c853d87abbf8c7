"""The loss and the advantages follow their formulas."""

import torch
from support.packed import packed

from headrace.comm.recipe import AlgorithmSettings
from headrace.trainer.algorithms.advantages import group_advantages
from headrace.trainer.algorithms.objective import policy_loss


def terms(
    logprobs: list[float], old: list[float], advantages: list[float], mask: list[float] | None = None, **settings
):
    batch = packed([[x] for x in old], advantages, masks=[[x] for x in mask] if mask else None)
    return policy_loss(torch.tensor(logprobs), torch.ones(len(logprobs)), batch, AlgorithmSettings(**settings))


def test_advantages_are_centred_and_scaled_within_the_group():
    advantages = group_advantages(torch.tensor([1.0, 0.0, 1.0, 0.0]), scale_by_std=True, eps=0.0)
    assert advantages.tolist() == [1.0, -1.0, 1.0, -1.0]


def test_dr_grpo_leaves_the_scale_alone():
    assert group_advantages(torch.tensor([3.0, 1.0]), scale_by_std=False).tolist() == [1.0, -1.0]


def test_a_group_of_equal_rewards_has_no_advantage():
    for reward in (1.0, 0.1, -0.3):
        assert group_advantages(torch.full((7,), reward), scale_by_std=True).abs().max() == 0


def test_at_ratio_one_the_loss_is_minus_the_advantage():
    assert terms([-1.0, -2.0], [-1.0, -2.0], [0.5, 2.0]).loss.item() == -2.5


def test_a_good_token_has_no_gradient_beyond_the_upper_clip():
    inside, outside = (torch.tensor([x], requires_grad=True) for x in (0.1, 0.4))
    for logprob in (inside, outside):
        policy_loss(logprob, torch.ones(1), packed([[0.0]], [1.0]), AlgorithmSettings()).loss.backward()
    assert inside.grad is not None and inside.grad.item() < 0
    assert outside.grad is not None and outside.grad.item() == 0


def test_clip_higher_moves_only_the_upper_bound():
    assert terms([0.25], [0.0], [1.0]).clipped == 1
    assert terms([0.25], [0.0], [1.0], clip_high=0.3).clipped == 0
    assert terms([-0.3], [0.0], [-1.0], clip_high=0.3).clipped == 1


def test_masked_tokens_add_nothing_to_the_loss():
    full = terms([-1.0, -9.0], [-1.0, -3.0], [1.0, 1.0], mask=[1.0, 0.0])
    alone = terms([-1.0], [-1.0], [1.0])
    for name, value in full._asdict().items():
        assert torch.equal(value, alone._asdict()[name]), name


def test_the_entropy_bonus_lowers_the_loss():
    assert terms([-1.0], [-1.0], [1.0], entropy_coef=0.1).loss < terms([-1.0], [-1.0], [1.0]).loss
