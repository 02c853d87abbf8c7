"""The check of exact mode on this machine, before the first request."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from ...comm.errors import SettingError

if TYPE_CHECKING:
    from ...trainer.policy.model import Policy
    from .sequence import Completion

NUM_NEW_TOKENS = 20
"""Tokens to generate from each prompt."""
LENGTHS = (1, 6, 63, 90)
"""Lengths of the prompts in tokens."""


def probes(policy: "Policy") -> list[list[int]]:
    """Prompts that fit the policy's context."""
    lengths = [n for n in LENGTHS if n + NUM_NEW_TOKENS <= policy.context]
    return [[(7 * index + 3 * i + 1) % policy.vocab_size for i in range(n)] for index, n in enumerate(lengths)]


@torch.no_grad()
def verify(policy: "Policy", completions: Iterable["Completion"]) -> None:
    """Compare log-probabilities with those of a packed forward; raises SettingError if any bit differs."""
    for completion in completions:
        tokens = torch.tensor(completion.prompt_ids + completion.token_ids, device=policy.device)
        hidden = policy.forward_packed(tokens[:-1], torch.tensor([0, len(tokens) - 1]))
        expected = policy.token_logprobs(hidden, tokens[1:])[0][len(completion.prompt_ids) - 1 :]
        expected = expected.cpu()
        found = torch.tensor(completion.logprobs)
        if not torch.equal(found, expected):
            difference = (found - expected).abs().max().item()
            raise SettingError(
                "generator.exact: the kernels of this machine do not give equal bits"
                f" (difference {difference:.1e}); set it to false"
            )
