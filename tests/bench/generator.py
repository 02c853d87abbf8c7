"""This engine compared with transformers' two generators.

The weights are random. Prompts and response lengths are drawn once per scenario (log-normal lengths, sigma 0.9, at most 256).
Every engine must produce exactly the requested tokens, with log-probabilities. No round finds pages of the one before. Tokens per second count the process's CPU
time on one thread, or on a GPU the wall time; engines take turns and their best round counts. The kernel floor is the time
of the linear and attention kernels of one decode step alone.
"""

import math
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from headrace.launch.processes.child import print_message
from headrace.rollout.engine.engine import Engine
from headrace.rollout.engine.sampling import SamplingParams
from headrace.trainer.policy.decoder import Head, LeanDecoder
from headrace.trainer.policy.exact.pages import attend_pages

from .harness import Measurement, Options, best_seconds
from .policies import build

_ROUNDS = 2
_FLOOR_SLOTS, _FLOOR_CONTEXT = 32, 192
"""Rows, and cached tokens of each, when a step is compared with the kernel floor."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """The requests that every engine serves."""

    name: str
    size: str
    dtype: str
    num_prompts: int
    num_samples: int
    prompt_lengths: tuple[int, int]
    peers: tuple[str, ...] = ("transformers.generate_batch", "transformers.generate")
    device: str = "cpu"
    slots: int = 32
    as_list: bool = False
    """This engine gets every sample as a prompt of its own."""

    def groups(self) -> list[tuple[list[int], list[int]]]:
        """Each prompt with the response lengths of its samples."""
        rng = random.Random(0)
        prompts = [
            [rng.randrange(10, 4000) for _ in range(rng.randint(*self.prompt_lengths))] for _ in range(self.num_prompts)
        ]
        return [
            (prompt, [max(1, min(256, int(math.exp(rng.gauss(math.log(45), 0.9))))) for _ in range(self.num_samples)])
            for prompt in prompts
        ]

    def requests(self) -> list[tuple[list[int], int]]:
        return [(prompt, length) for prompt, lengths in self.groups() for length in lengths]

    def served_by(self, engine: str) -> list[tuple[list[int], int]]:
        """The requests that an engine serves: all, but on a GPU one batch by `generate`, which would take minutes."""
        is_part = engine == "transformers.generate" and self.device == "cuda"
        return self.requests()[: self.slots if is_part else None]


SCENARIOS = (
    Scenario("5m-fp32", "5m", "float32", 32, 4, (8, 64)),
    Scenario("5m-bf16", "5m", "bfloat16", 32, 4, (8, 64)),
    Scenario("5m-fp32-groups", "5m", "float32", 8, 8, (128, 256)),
    Scenario(
        "5m-fp32-list", "5m", "float32", 8, 8, (128, 256), ("add_group", "transformers.generate_batch"), as_list=True
    ),
    Scenario("100m-bf16", "100m", "bfloat16", 12, 4, (8, 64), ("transformers.generate_batch",)),
    Scenario("0.5b-bf16-gpu", "0.5b", "bfloat16", 128, 8, (64, 512), device="cuda", slots=256),
    Scenario("1.5b-bf16-gpu", "1.5b", "bfloat16", 128, 8, (64, 512), device="cuda", slots=256),
)


def by_engine(path: Path, scenario: Scenario) -> Callable[[], None]:
    """A run of this engine."""
    engine = Engine(path, scenario.dtype, max_running=scenario.slots, device=scenario.device)
    groups = scenario.groups()

    def run() -> None:
        engine.recompute()  # so that no round finds pages of the one before
        requested: dict[int, int] = {}
        for prompt, lengths in groups:
            ids = range(len(requested), len(requested) + len(lengths))
            requested.update(zip(ids, lengths, strict=True))
            engine.add_group(prompt, [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in lengths], ids)
        done = {}
        while not engine.idle:
            done |= {c.trajectory_id: len(c.logprobs) for c in engine.step()}
        assert done == requested, "the engine returned other lengths than requested"

    return run


def by_list(path: Path, scenario: Scenario) -> Callable[[], None]:
    """A run of this engine with each sample as a prompt of its own, all in one list."""
    engine = Engine(path, scenario.dtype, max_running=scenario.slots, device=scenario.device)
    requested = scenario.requests()
    params = [SamplingParams(max_new_tokens=length, ignore_eos=True) for _, length in requested]

    def run() -> None:
        engine.recompute()
        done = engine.generate([prompt for prompt, _ in requested], params)
        assert [len(c.logprobs) for c in done] == [length for _, length in requested]

    return run


def by_generate(path: Path, scenario: Scenario) -> Callable[[], None]:
    """A run of transformers' `generate` on padded batches; on a GPU without log-probabilities, whose scores would fill it."""
    model, requested = _reference(path, scenario), scenario.served_by("transformers.generate")
    has_logprobs = scenario.device == "cpu"

    def run() -> None:
        for start in range(0, len(requested), scenario.slots):
            batch = requested[start : start + scenario.slots]
            longest, most = max(len(p) for p, _ in batch), max(n for _, n in batch)
            tokens = torch.tensor([[0] * (longest - len(p)) + p for p, _ in batch])
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, _ in batch])
            out = model.generate(
                tokens.to(scenario.device), attention_mask=mask.to(scenario.device), max_new_tokens=most, do_sample=True, top_k=0, pad_token_id=0,
                return_dict_in_generate=True, output_scores=has_logprobs,
            )  # fmt: skip
            assert out.sequences.shape == (len(batch), longest + most)
            if has_logprobs:
                logprobs = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
                assert logprobs.shape == (len(batch), most)

    return run


def by_generate_batch(path: Path, scenario: Scenario) -> Callable[[], None]:
    """A run of transformers' continuous batching."""
    model, requested = _reference(path, scenario), scenario.requests()
    known = signature(ContinuousBatchingConfig).parameters
    wanted: dict[str, Any] = {"max_requests_per_batch": scenario.slots, "return_logprobs": True}
    if scenario.device == "cpu":
        # By default its dense mask is far larger than this workload needs, and it is three times slower.
        wanted |= {"num_blocks": 64, "max_batch_tokens": 512}
    else:
        wanted |= {"max_memory_percent": 0.3}  # the other engines are on the same GPU
    batching = ContinuousBatchingConfig(**{k: v for k, v in wanted.items() if k in known})
    generation = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=256, pad_token_id=0, eos_token_id=-1)

    def run() -> None:
        done: dict[str, int] = {}
        with model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=batching, block=True
        ) as manager:
            for index, (prompt, n) in enumerate(requested):
                manager.add_request(prompt, request_id=str(index), max_new_tokens=n)
            while len(done) < len(requested):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    done[result.request_id] = len(result.logprobs)
        lengths = {str(index): n for index, (_, n) in enumerate(requested)}
        assert done == lengths, "generate_batch returned other lengths than requested"

    return run


def _reference(path: Path, scenario: Scenario) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, scenario.dtype))
    return model.to(scenario.device).eval()


def _clock(device: str) -> float:
    """Seconds of this process's CPU time, or of wall time once the GPU's work is done."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


@torch.inference_mode()
def floor(path: Path, dtype: str, steps: int = 24) -> tuple[float, float]:
    """CPU milliseconds of one decode step at _FLOOR_SLOTS rows of _FLOOR_CONTEXT cached tokens, and of its kernels alone."""
    engine = Engine(path, dtype, max_running=_FLOOR_SLOTS, device="cpu", prefill_tokens=_FLOOR_SLOTS * _FLOOR_CONTEXT)
    for index in range(_FLOOR_SLOTS):
        engine.add_group([index + 5] * (_FLOOR_CONTEXT - steps // 2), SamplingParams(ignore_eos=True), [index])
    engine.step()
    return _lower_quartile_ms(engine.step, steps), _lower_quartile_ms(_kernels(engine), steps)


def _lower_quartile_ms(work: Callable[[], object], repeats: int) -> float:
    times = [best_seconds(work, repeats=1, clock=time.process_time)[0] for _ in range(repeats)]
    return 1e3 * sorted(times)[repeats // 4]


def _kernels(engine: Engine) -> Callable[[], None]:
    """The linear layers, the head and the attention of one step over the engine's present pages."""
    policy, decoder, head = engine.policy, LeanDecoder(engine.policy), Head(engine.policy)
    hidden = torch.randn(_FLOOR_SLOTS, policy.config.hidden_size).to(policy.dtype)
    wide = torch.randn(_FLOOR_SLOTS, policy.config.intermediate_size).to(policy.dtype)
    mixed = torch.randn(_FLOOR_SLOTS, policy.num_heads * policy.head_dim).to(policy.dtype)
    num_pages = max(page for s in engine.scheduler.running for page in s.pages) + 1
    shape = (num_pages, policy.num_kv_heads, policy.num_heads // policy.num_kv_heads, policy.head_dim)
    query, bias = torch.randn(shape).to(policy.dtype), torch.zeros(num_pages, 1, 1, engine.pool.page_size)
    bias, logits = bias.to(policy.dtype), torch.empty(_FLOOR_SLOTS, policy.vocab_size)

    def run() -> None:
        for index, layer in enumerate(decoder.layers):
            layer.qkv(hidden)
            attend_pages(query, engine.cache.keys[index][:num_pages], engine.cache.values[index][:num_pages], bias, 0.1)
            layer.out(mixed)
            layer.gate_up(hidden)
            layer.down(wide)
        head(hidden, out=logits)

    return run


def second_turn(name: str, options: Options) -> list[Measurement]:
    """Seconds of the second turns of conversations, one after the other, with the prefix cache and without.

    A conversation has a prompt of 512 tokens, a response of 64, a question of 32 and an answer of one token.
    """
    torch.set_num_threads(1)

    def by_cache(path: Path, prefix_cache: bool) -> Callable[[], float]:
        engine = Engine(path, max_running=8, device="cpu", prefix_cache=prefix_cache)

        def run() -> float:
            engine.recompute()
            prompts = [[10 + (index * 131 + i * 7) % 3000 for i in range(512)] for index in range(8)]
            first = engine.generate(prompts, SamplingParams(max_new_tokens=64, ignore_eos=True))
            chats = [c.prompt_ids + c.token_ids + [20 + index] * 32 for index, c in enumerate(first)]
            started = time.process_time()
            for chat in chats:
                engine.generate([chat], SamplingParams(max_new_tokens=1, ignore_eos=True))
            return time.process_time() - started

        return run

    with tempfile.TemporaryDirectory() as folder:
        path = build("5m", Path(folder))
        runs = [by_cache(path, prefix_cache) for prefix_cache in (True, False)]
        found, plain = (median(times) for times in zip(*([run() for run in runs] for _ in range(5)), strict=True))
    return [Measurement(name, "no-prefix-cache", 1e3 * found, "ms", plain / found)]


def measure(name: str, options: Options) -> list[Measurement]:
    """The engine's tokens per second over each peer's, and on CPU the time of a step over that of its kernels."""
    scenario = next(scenario for scenario in SCENARIOS if scenario.name == name)
    if scenario.device == "cuda" and not torch.cuda.is_available():
        print_message(f"{scenario.name} is left out: it needs a GPU")
        return []
    torch.set_num_threads(1)
    ours = by_list if scenario.as_list else by_engine
    makers = {
        "add_group": by_engine,
        "transformers.generate_batch": by_generate_batch,
        "transformers.generate": by_generate,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = build(scenario.size, Path(folder))
        runs = {"ours": ours(path, scenario)} | {peer: makers[peer](path, scenario) for peer in scenario.peers}
        best = best_seconds(*runs.values(), repeats=_ROUNDS, clock=partial(_clock, scenario.device))
        tokens = [sum(length for _, length in scenario.served_by(engine)) for engine in runs]
        found = {name: count / seconds for name, count, seconds in zip(runs, tokens, best, strict=True)}
        rate = found.pop("ours")
        rows = [Measurement(scenario.name, peer, rate, "tokens/s", rate / other) for peer, other in found.items()]
        if scenario.device == "cpu" and not scenario.name.endswith(("groups", "list")):
            step, kernels = floor(path, scenario.dtype)
            rows.append(Measurement(scenario.name, "kernel-floor", step, "ms/step", step / kernels))
    return rows
