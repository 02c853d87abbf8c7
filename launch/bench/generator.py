"""`python -m headrace.launch.bench.generator [--json FILE] [--workload NAME ...]`: this engine beside transformers' two.

Random weights; prompts and response lengths are drawn once per workload (lengths log-normal, sigma 0.9, cut at 256), and
every contender must produce exactly the tokens asked for, with log-probabilities. On the CPU one thread and tokens per second
of the process's CPU time, on a GPU of the wall; best of the rounds, contenders in turn. The kernel floor is the time of the bare linear and attention
kernels of one decode step.
"""

import argparse
import json
import math
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from ...rollout.engine import Engine
from ...rollout.sampler import SamplingParams
from ...trainer.attention_exact import attend_pages
from ...trainer.decoder import Head, LeanDecoder

SLOTS = 32
FLOOR_CONTEXT = 192
"""Cached tokens per row when a step is compared with the kernel floor."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What every contender is asked for."""

    name: str
    size: str
    dtype: str
    num_prompts: int
    num_samples: int
    prompt_lengths: tuple[int, int]
    peers: tuple[str, ...] = ("transformers.generate_batch", "transformers.generate")
    device: str = "cpu"
    slots: int = 32

    def draw(self) -> tuple[list[list[int]], list[list[int]]]:
        """Prompts, and for each the response lengths of its samples."""
        rng = random.Random(0)
        prompts = [
            [rng.randrange(10, 4000) for _ in range(rng.randint(*self.prompt_lengths))] for _ in range(self.num_prompts)
        ]
        lengths = [
            [max(1, min(256, int(math.exp(rng.gauss(math.log(45), 0.9))))) for _ in range(self.num_samples)]
            for _ in prompts
        ]
        return prompts, lengths


WORKLOADS = (
    Workload("5m-fp32", "5m", "float32", 32, 4, (8, 64)),
    Workload("5m-bf16", "5m", "bfloat16", 32, 4, (8, 64)),
    Workload("5m-fp32-groups", "5m", "float32", 8, 8, (128, 256)),
    Workload("100m-bf16", "100m", "bfloat16", 12, 4, (8, 64), ("transformers.generate_batch",)),
    Workload("0.5b-bf16-gpu", "0.5b", "bfloat16", 128, 8, (64, 512), device="cuda", slots=256),
    Workload("1.5b-bf16-gpu", "1.5b", "bfloat16", 128, 8, (64, 512), device="cuda", slots=256),
)
"""Those for a GPU run where there is one."""

_SIZES: dict[str, dict[str, Any]] = {
    "5m": {"hidden_size": 256, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"intermediate_size": 768, "vocab_size": 4096},
    "100m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4}
    | {"intermediate_size": 2048, "vocab_size": 32000},
    "0.5b": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
    | {"intermediate_size": 4864, "vocab_size": 151936},
    "1.5b": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2}
    | {"intermediate_size": 8960, "vocab_size": 151936},
}


class Row(NamedTuple):
    """One line of the table. `value` is the peer's, `ours` this engine's; `ratio` is ours over the peer's."""

    workload: str
    peer: str
    value: float
    unit: str
    ratio: float
    ours: float


def build(size: str, folder: Path) -> Path:
    """Save a policy of random weights; returns its path."""
    torch.manual_seed(0)
    config = Qwen2Config(
        **_SIZES[size], max_position_embeddings=2048, tie_word_embeddings=True, eos_token_id=None, bos_token_id=None
    )
    path = folder / size
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def by_engine(path: Path, workload: Workload) -> Callable[[], int]:
    """A run of this engine that returns the tokens it made."""
    engine = Engine(path, workload.dtype, max_running=workload.slots, device=workload.device)
    prompts, lengths = workload.draw()

    def run() -> int:
        asked: dict[int, int] = {}
        for prompt, group in zip(prompts, lengths, strict=True):
            ids = range(len(asked), len(asked) + len(group))
            asked.update(zip(ids, group, strict=True))
            engine.add_group(prompt, [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in group], ids)
        done = {}
        while not engine.idle:
            done |= {c.trajectory_id: len(c.logprobs) for c in engine.step()}
        assert done == asked, "the engine made other lengths than asked"
        return sum(done.values())

    return run


def by_generate(path: Path, workload: Workload) -> Callable[[], int]:
    """A run of transformers' `generate` on padded batches."""
    model = _reference(path, workload)
    prompts, lengths = workload.draw()
    asked = [(prompt, n) for prompt, group in zip(prompts, lengths, strict=True) for n in group]

    def run() -> int:
        for start in range(0, len(asked), workload.slots):
            batch = asked[start : start + workload.slots]
            longest, most = max(len(p) for p, _ in batch), max(n for _, n in batch)
            tokens = torch.tensor([[0] * (longest - len(p)) + p for p, _ in batch])
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, _ in batch])
            out = model.generate(
                tokens.to(workload.device), attention_mask=mask.to(workload.device), max_new_tokens=most, do_sample=True, top_k=0, pad_token_id=0,
                return_dict_in_generate=True, output_scores=True,
            )  # fmt: skip
            logprobs = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
            assert logprobs.shape == (len(batch), most)
        return sum(n for _, n in asked)

    return run


def by_generate_batch(path: Path, workload: Workload) -> Callable[[], int]:
    """A run of transformers' continuous batching."""
    model = _reference(path, workload)
    prompts, lengths = workload.draw()
    asked = [(prompt, n) for prompt, group in zip(prompts, lengths, strict=True) for n in group]
    known = signature(ContinuousBatchingConfig).parameters
    wanted: dict[str, Any] = {"max_requests_per_batch": workload.slots, "return_logprobs": True}
    if workload.device == "cpu":
        # Left alone it sizes its dense mask for far more than this workload needs, and is three times slower.
        wanted |= {"num_blocks": 64, "max_batch_tokens": 512}
    batching = ContinuousBatchingConfig(**{k: v for k, v in wanted.items() if k in known})
    generation = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=256, pad_token_id=0, eos_token_id=-1)

    def run() -> int:
        done: dict[str, int] = {}
        with model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=batching, block=True
        ) as manager:
            for index, (prompt, n) in enumerate(asked):
                manager.add_request(prompt, request_id=str(index), max_new_tokens=n)
            while len(done) < len(asked):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    done[result.request_id] = len(result.logprobs)
        assert done == {str(i): n for i, (_, n) in enumerate(asked)}, "generate_batch made other lengths than asked"
        return sum(done.values())

    return run


def _reference(path: Path, workload: Workload) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, workload.dtype))
    return model.to(workload.device).eval()


def _clock(device: str) -> float:
    """Seconds: of this process's CPU time, or on a GPU of the wall once its work is done."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def rates(runs: dict[str, Callable[[], int]], rounds: int, device: str) -> dict[str, float]:
    """Tokens per second of each contender, the best of the rounds."""
    best = dict.fromkeys(runs, 0.0)
    for _ in range(rounds):
        for name, run in runs.items():
            start = _clock(device)
            tokens = run()
            best[name] = max(best[name], tokens / (_clock(device) - start))
    return best


@torch.inference_mode()
def floor(path: Path, dtype: str, steps: int = 24) -> tuple[float, float]:
    """CPU milliseconds of one decode step at SLOTS rows of FLOOR_CONTEXT cached tokens, and of its bare kernels."""
    engine = Engine(path, dtype, max_running=SLOTS, device="cpu", prefill_tokens=SLOTS * FLOOR_CONTEXT)
    for index in range(SLOTS):
        engine.add_group([index + 5] * (FLOOR_CONTEXT - steps // 2), SamplingParams(ignore_eos=True), [index])
    engine.step()
    times = []
    for _ in range(steps):
        start = time.process_time()
        engine.step()
        times.append(time.process_time() - start)
    kernels = _kernels(engine)
    floors = []
    for _ in range(steps):
        start = time.process_time()
        kernels()
        floors.append(time.process_time() - start)
    return 1e3 * sorted(times)[steps // 4], 1e3 * sorted(floors)[steps // 4]


def _kernels(engine: Engine) -> Callable[[], None]:
    """The linear layers, the head and the attention of one step over the engine's present pages."""
    policy, decoder, head = engine.policy, LeanDecoder(engine.policy), Head(engine.policy)
    hidden = torch.randn(SLOTS, policy.config.hidden_size).to(policy.dtype)
    wide = torch.randn(SLOTS, policy.config.intermediate_size).to(policy.dtype)
    mixed = torch.randn(SLOTS, policy.num_heads * policy.head_dim).to(policy.dtype)
    num_pages = max(page for s in engine.scheduler.running for page in s.pages) + 1
    shape = (num_pages, policy.num_kv_heads, policy.num_heads // policy.num_kv_heads, policy.head_dim)
    query, bias = torch.randn(shape).to(policy.dtype), torch.zeros(num_pages, 1, 1, engine.pool.page_size)
    bias, logits = bias.to(policy.dtype), torch.empty(SLOTS, policy.vocab_size)

    def run() -> None:
        for index, layer in enumerate(decoder.layers):
            layer.qkv(hidden)
            attend_pages(query, engine.cache.keys[index][:num_pages], engine.cache.values[index][:num_pages], bias, 0.1)
            layer.out(mixed)
            layer.gate_up(hidden)
            layer.down(wide)
        head(hidden, out=logits)

    return run


def measure(workload: Workload, folder: Path, rounds: int) -> list[Row]:
    """The rows of one workload; the policy is built on its first use."""
    path = folder / workload.size
    path = path if path.exists() else build(workload.size, folder)
    makers = {"transformers.generate_batch": by_generate_batch, "transformers.generate": by_generate}
    runs = {"ours": by_engine(path, workload)} | {peer: makers[peer](path, workload) for peer in workload.peers}
    found = rates(runs, rounds, workload.device)
    ours = found.pop("ours")
    rows = [Row(workload.name, peer, rate, "tokens/s", ours / rate, ours) for peer, rate in found.items()]
    if workload.device == "cpu" and not workload.name.endswith("groups"):
        step, kernels = floor(path, workload.dtype)
        rows.append(Row(workload.name, "kernel-floor", kernels, "ms/step", step / kernels, step))
    return rows


def main() -> None:
    """Run the workloads and print the table."""
    parser = argparse.ArgumentParser(prog="headrace.launch.bench.generator", description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--workload", nargs="*", choices=[w.name for w in WORKLOADS], help="only these")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of every contender")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    print(f"{'workload':<16}{'peer':<30}{'peer':>10}{'ours':>10}{'ratio':>8}  unit")
    with tempfile.TemporaryDirectory() as folder:
        for workload in WORKLOADS:
            is_wanted = not options.workload or workload.name in options.workload
            if not is_wanted or (workload.device == "cuda" and not torch.cuda.is_available()):
                continue
            for row in measure(workload, Path(folder), options.rounds):
                print(
                    f"{row.workload:<16}{row.peer:<30}{row.value:>10.2f}{row.ours:>10.2f}{row.ratio:>8.2f}  {row.unit}"
                )
                rows.append(row)
    if options.json is not None:
        options.json.write_text(json.dumps([row._asdict() for row in rows], indent=1))


if __name__ == "__main__":
    main()
