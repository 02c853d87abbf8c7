"""Changes of a response's reward before its advantage: a penalty for overlong responses, a KL penalty."""

import numpy as np


def overlong_penalty(num_tokens: int, max_new_tokens: int, buffer: int, penalty: float) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, formula 13), times `penalty`, to subtract from the reward.

    0 up to max_new_tokens - buffer tokens, then it grows linearly to `penalty` at max_new_tokens. A buffer of 0 is off.
    """
    if buffer == 0:
        return 0.0
    return penalty * min(max(num_tokens - (max_new_tokens - buffer), 0) / buffer, 1.0)


def kl_to_go(kl: np.ndarray) -> np.ndarray:
    """The KL penalty of each token and of those after it: [R] -> [R] (REINFORCE++, arXiv 2501.03262)."""
    return np.cumsum(kl[::-1])[::-1]
