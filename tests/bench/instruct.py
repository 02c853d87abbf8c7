"""A chat model that the user names by `--policy`: responses of natural length.

Prompts are questions in the model's own chat template; a response ends where the model ends it, after 128 tokens at most. Each
generator draws its own responses, and tokens per second count its own tokens by the CPU time of one thread.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from headrace.launch.processes.child import print_message
from headrace.launch.report.numerics import questions
from headrace.rollout import Engine, SamplingParams

from .harness import Measurement, Options

_ROUNDS, _SAMPLES, _SLOTS, _MOST = 2, 2, 32, 128

Generate = Callable[[], int]
"""Answers all prompts; returns the number of tokens drawn."""


def _prompts(path: str) -> list[list[int]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    chats = [[{"role": "user", "content": text}] for text in questions()]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]


def natural(name: str, options: Options) -> list[Measurement]:
    """Tokens per second on 32 prompts with 2 samples each, and the ratio to transformers' two generators. The name ends with the type."""
    if options.policy is None:
        print_message(f"{name} is left out: name a chat model by --policy")
        return []
    torch.set_num_threads(1)
    path, dtype = options.policy, {"bf16": "bfloat16", "fp32": "float32"}[name.rpartition("-")[2]]
    prompts = _prompts(path)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    engines: dict[str, Generate] = {
        "ours": _by_engine(Engine(path, dtype, _SLOTS, device="cpu"), prompts),
        "transformers.generate": partial(_by_generate, model, prompts),
        "transformers.generate_batch": partial(_by_batching, model, prompts),
    }
    rates = dict.fromkeys(engines, 0.0)
    for _ in range(_ROUNDS):
        for engine, generate in engines.items():
            started = time.process_time()
            num_tokens = generate()
            rates[engine] = max(rates[engine], num_tokens / (time.process_time() - started))
    ours = rates.pop("ours")
    return [Measurement(name, engine, ours, "tokens/s", ours / rate) for engine, rate in rates.items()]


def _by_engine(engine: Engine, prompts: list[list[int]]) -> Generate:
    def generate() -> int:
        engine.recompute()  # so that no round finds pages of the one before
        return sum(len(c.token_ids) for c in engine.generate(prompts, SamplingParams(_MOST, n=_SAMPLES)))

    return generate


def _by_generate(model: Any, prompts: list[list[int]]) -> int:
    """Prompts of like lengths in one batch, without padding of prompts that could be avoided."""
    end, num_tokens = model.generation_config.eos_token_id, 0
    sorted_prompts = sorted((prompt for prompt in prompts for _ in range(_SAMPLES)), key=len)
    for start in range(0, len(sorted_prompts), _SLOTS):
        batch = sorted_prompts[start : start + _SLOTS]
        longest = max(map(len, batch))
        tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch])
        out = model.generate(
            tokens, attention_mask=mask, max_new_tokens=_MOST, do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
            pad_token_id=end, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        drawn = out.sequences[:, longest:]
        assert model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True).shape == drawn.shape
        ended = (drawn == end).int().cumsum(1) - (drawn == end).int()
        num_tokens += int((ended == 0).sum())
    return num_tokens


def _by_batching(model: Any, prompts: list[list[int]]) -> int:
    """Transformers' continuous batching, with a smaller cache than by default: its dense mask is three times slower there."""
    batching = ContinuousBatchingConfig(
        max_requests_per_batch=_SLOTS, return_logprobs=True, num_blocks=64, max_batch_tokens=512
    )
    settings = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "max_new_tokens": _MOST}
    end = model.generation_config.eos_token_id
    generation = GenerationConfig(**settings, pad_token_id=end, eos_token_id=end)
    num_tokens, num_left = 0, len(prompts) * _SAMPLES
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching, block=True
    ) as manager:
        for index in range(num_left):
            manager.add_request(prompts[index // _SAMPLES], request_id=str(index), max_new_tokens=_MOST)
        while num_left:
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                num_tokens += len(result.logprobs)
                num_left -= 1
    return num_tokens
