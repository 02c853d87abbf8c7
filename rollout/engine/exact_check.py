"""Exact mode proves itself on this machine before the first request."""

from typing import TYPE_CHECKING

import torch

from ...comm.errors import SettingError
from .sampling import SamplingParams

if TYPE_CHECKING:
    from .engine import Engine

NUM_NEW_TOKENS = 20


def check_exact(engine: "Engine") -> None:
    """Generate from prompts of a few lengths and compare with a packed forward; SettingError if any bit differs."""
    policy = engine.policy
    lengths = [n for n in (1, 6, 63, 90) if n + NUM_NEW_TOKENS <= policy.context]
    for index, length in enumerate(lengths):
        prompt = [(7 * index + 3 * i + 1) % policy.vocab_size for i in range(length)]
        engine.add_group(prompt, SamplingParams(max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True), [~index])
    worst = 0.0
    while not engine.idle:
        for completion in engine.step():
            tokens = torch.tensor(completion.prompt_ids + completion.token_ids)
            with torch.no_grad():
                hidden = policy.forward_packed(tokens[:-1], torch.tensor([0, len(tokens) - 1]))
                expected = policy.token_logprobs(hidden, tokens[1:])[0][len(completion.prompt_ids) - 1 :]
            found = torch.tensor(completion.logprobs)
            if not torch.equal(found, expected):
                worst = max(worst, (found - expected).abs().max().item())
                raise SettingError(
                    f"generator.exact: this machine's kernels do not give equal bits (difference {worst:.1e}); set it to false"
                )
