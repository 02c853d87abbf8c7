"""Estimates of KL(policy | reference) from each token that the policy drew: `algorithm.kl_estimator`.

J. Schulman, "Approximating KL divergence", 2020. All are of log-probs [R] -> [R], with r = p_ref / p.
"""

from collections.abc import Callable

from torch import Tensor

from .losses import log_ratio


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """-log r: unbiased, of either sign. As a term of the loss its gradient is 0 on average; it belongs into the reward."""
    return log_ratio(logprobs, ref_logprobs)


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log r)^2 / 2: never negative and biased; its gradient on the policy's own tokens is that of the KL divergence."""
    return log_ratio(logprobs, ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """r - 1 - log r: never negative and unbiased (also DeepSeekMath, arXiv 2402.03300, formula 4)."""
    log_r = log_ratio(ref_logprobs, logprobs)
    return log_r.exp() - 1 - log_r


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
