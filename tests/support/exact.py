"""Log-probabilities of generator and trainer, for tests of exact mode."""

import torch

from headrace.trainer.policy.exact import decoder


def run(engine, prompts, params, num_samples=1):
    """Completions of groups; ids are prompt * 100 + sample."""
    for index, prompt in enumerate(prompts):
        engine.add_group(prompt, params, [100 * index + sample for sample in range(num_samples)])
    completions = []
    while not engine.idle:
        completions += engine.step()
    engine.check()
    return completions


def packed_logprobs(policy, completions, temperature=1.0):
    """Log-probabilities of all responses by one packed forward of the trainer's."""
    sequences = [c.prompt_ids + c.token_ids for c in completions]
    lengths = torch.tensor([0, *(len(s) - 1 for s in sequences)])
    inputs = torch.tensor([t for s in sequences for t in s[:-1]], device=policy.device)
    targets = torch.tensor([t for s in sequences for t in s[1:]], device=policy.device)
    logprobs, _ = policy.token_logprobs(policy.forward_packed(inputs, lengths.cumsum(0)), targets, temperature)
    parts = logprobs.detach().cpu().split(lengths[1:].tolist())
    return torch.cat([part[len(c.prompt_ids) - 1 :] for part, c in zip(parts, completions, strict=True)])


def use_kernels(monkeypatch):
    """Let exact mode on a CPU take the operators of a GPU, whose kernels Triton's interpreter runs."""
    chosen = decoder.operators_of(torch.device("cuda"))
    monkeypatch.setattr(decoder, "operators_of", lambda device: chosen)
