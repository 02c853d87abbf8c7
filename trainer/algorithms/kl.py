"""Estimates of KL(policy | reference) from the tokens that the policy drew: `algorithm.kl_estimator`.

J. Schulman, "Approximating KL divergence", 2020.
"""

from torch import Tensor


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """r - 1 - log r with r = p_ref / p, [R]: never negative and unbiased (also DeepSeekMath, arXiv 2402.03300, formula 4)."""
    log_ratio = ref_logprobs - logprobs
    return log_ratio.exp() - 1 - log_ratio
