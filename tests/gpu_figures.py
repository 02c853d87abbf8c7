"""The figures of `tests/gpu.sh`, a part for each word: lines that begin with "=", and the table as JSON.

Without a GPU the parts run a small policy on the CPU: that shows only that they work.
"""

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.generator import SCENARIOS, by_engine, by_generate, by_generate_batch
from bench.policies import build
from support.exact import packed_logprobs as trainer_logprobs

from headrace.comm.recipe import Recipe
from headrace.comm.shared_memory import host_buffer
from headrace.launch.config.load import read_recipe
from headrace.launch.recipes.parts import RECIPE as QUICKSTART
from headrace.launch.recipes.parts import missing_parts
from headrace.rollout import Engine, SamplingParams
from headrace.trainer.batch import Trajectory, pack
from headrace.trainer.logprobs import packed_logprobs
from headrace.trainer.policy.model import Policy, load_policy

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
SIZES = ("0.5b", "1.5b") if HAS_GPU else ("5m",)
ROWS = (32, 128, 256) if HAS_GPU else (4,)
CONTEXT = 300 if HAS_GPU else 40
FILTERS: dict[str, Any] = {"top_k": 50, "top_p": 0.95, "repetition_penalty": 1.1}
PACKAGES = ("torch", "transformers", "triton", "numpy", "safetensors", "flash-attn")


def show(name: str, **figures: object) -> None:
    """Print one line of figures."""
    print(
        f"={name:<24}",
        *(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in figures.items()),
        flush=True,
    )


def seconds(work: Callable[[], object], repeats: int, warm_up: int = 2, in_a_row: int = 1) -> float:
    """The median time of `work`, with the GPU's part of it; the GPU is waited for after `in_a_row` calls."""
    times: list[float] = []
    for _ in range(warm_up + repeats):
        started = time.perf_counter()
        for _ in range(in_a_row):
            work()
        if HAS_GPU:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - started) / in_a_row)
    return statistics.median(times[warm_up:])


def environment(folder: Path) -> None:
    """Versions and devices."""
    for name in PACKAGES:
        try:
            show(name, version=version(name))
        except PackageNotFoundError:
            show(name, version="none")
    gpu = torch.cuda.get_device_properties(0) if HAS_GPU else None
    show("machine", python=platform.python_version(), cuda=torch.version.cuda, gpu=gpu.name if gpu else "none")


def exact(folder: Path) -> None:
    """Exact mode: log-probabilities of the generator in which a bit differs from the trainer's, and the time of a decode step."""
    path = policy_of(SIZES[0], folder)
    engine = Engine(path, DTYPE, max_running=13, exact=True, device=str(DEVICE), prefill_tokens=250)
    lengths = (1, 63, 200, 520) if HAS_GPU else (1, 63)
    prompts = [[10 + (7 * i) % 90 for i in range(length)] for length in lengths]
    completions = engine.generate(prompts, SamplingParams(max_new_tokens=40, temperature=0.8, n=4, ignore_eos=True))
    policy = load_policy(path, "float32", DEVICE)
    policy.make_exact(DTYPE)
    with torch.no_grad():
        expected = trainer_logprobs(policy, completions, 0.8)
    found = torch.tensor([x for c in completions for x in c.logprobs])
    num_different = int((found != expected).sum())
    show("exact mode", tokens=len(found), different=num_different, largest=float((found - expected).abs().max()))
    del engine, policy
    times = [seconds(decoding(path, ROWS[0], is_exact=is_exact).step, 4, in_a_row=16) for is_exact in (False, True)]
    show(f"exact step x{ROWS[0]}", ms=times[1] * 1e3, over_plain=times[1] / times[0])
    assert num_different == 0, "generator and trainer differ in exact mode"


def policy_of(size: str, scratch: Path) -> Path:
    """A policy of random weights; all parts share one, since the CPU takes long to draw and save 1.5 billion numbers."""
    made = Path(os.environ.get("POLICIES", scratch)) / size
    if not made.is_dir():
        unfinished = made.parent / f"unfinished-{os.getpid()}"
        build(size, unfinished).replace(made)
        unfinished.rmdir()
    return made


def policies(folder: Path) -> None:
    """The policies of all parts, the quickstart's included."""
    missing_parts(read_recipe(QUICKSTART, []))
    for size in SIZES:
        policy_of(size, folder)


def fill(engine: Engine, num_rows: int, **filters: Any) -> None:
    """Let rows decode in which nothing changes for 100 steps."""
    params = SamplingParams(max_new_tokens=200, ignore_eos=True, **filters)
    engine.add_group([5] * CONTEXT, params, range(num_rows))
    for _ in range(8):
        engine.step()
    assert engine.num_running == num_rows


def refill(engine: Engine, num_rows: int, **filters: Any) -> None:
    """Replace all rows by others."""
    for row in range(num_rows):
        engine.cancel(row)
    fill(engine, num_rows, **filters)


def decoding(path: Path, num_rows: int, *, is_exact: bool = False) -> Engine:
    """An engine whose rows are filled."""
    engine = Engine(path, DTYPE, max_running=num_rows, device=str(DEVICE), prefill_tokens=8192, exact=is_exact)
    fill(engine, num_rows)
    return engine


def decode(folder: Path) -> None:
    """A decode step over the time to read its weights and cache once, at the speed of a copy on the device."""
    source = torch.empty((1 << 30) if HAS_GPU else (1 << 24), dtype=torch.uint8, device=DEVICE)
    into = torch.empty_like(source)
    byte_s = seconds(lambda: into.copy_(source), 10) / (2 * source.numel())
    for size in SIZES:
        path = policy_of(size, folder)
        for num_rows in ROWS:
            engine = decoding(path, num_rows)
            policy = engine.policy
            cached = 2 * policy.num_layers * policy.num_kv_heads * policy.head_dim * DTYPE.itemsize * CONTEXT * num_rows
            num_bytes = cached + sum(w.numel() * w.element_size() for w in policy.weights().values())
            step_s = seconds(engine.step, 4, warm_up=1, in_a_row=16)
            show(
                f"decode {size} x{num_rows}",
                ms=step_s * 1e3,
                over_bytes=step_s / (num_bytes * byte_s),
                tokens_s=num_rows / step_s,
            )
            refill(engine, num_rows, **FILTERS)
            show(f"decode {size} x{num_rows} filtered", ms=seconds(engine.step, 4, warm_up=1, in_a_row=16) * 1e3)
            del engine, policy


def prefill(folder: Path) -> None:
    """Prefill of 16 prompts of 512 tokens, all new, over the speed of a large matrix product."""
    flops = product_flops()
    for size in SIZES:
        path = policy_of(size, folder)
        engine = Engine(path, DTYPE, max_running=16, device=str(DEVICE), prefill_tokens=8192, prefix_cache=False)
        length = 512 if HAS_GPU else 40

        def step(engine: Engine = engine, length: int = length) -> None:
            for row in range(16):
                engine.add_group([6 + row] * length, SamplingParams(max_new_tokens=1), [row])
            while not engine.idle:
                engine.step()

        step_s = seconds(step, 5)
        used = 2 * sum(w.numel() for w in engine.policy.weights().values()) * 16 * length / step_s
        show(f"prefill {size}", tokens_s=16 * length / step_s, tflops=used / 1e12, of_product=used / flops)
        del engine, step


def product_flops() -> float:
    """Operations a second of a large matrix product."""
    side = 8192 if HAS_GPU else 256
    matrix = torch.randn(side, side, device=DEVICE, dtype=DTYPE)
    return 2 * side**3 / seconds(lambda: matrix @ matrix, 10)


def generator(folder: Path) -> None:
    """1,024 responses by this engine and by transformers' continuous batching, 256 of them by its `generate`; the faster of two rounds."""
    scenario = next(each for each in SCENARIOS if each.name == "0.5b-bf16-gpu")
    path = policy_of(scenario.size, folder)
    engines = {
        "ours": by_engine,
        "transformers.generate_batch": by_generate_batch,
        "transformers.generate": by_generate,
    }
    for name, maker in engines.items():
        run = maker(path, scenario)
        num_tokens = sum(length for _, length in scenario.served_by(name))
        show(
            f"generator {name.removeprefix('transformers.')}",
            tokens_s=num_tokens / min(seconds(run, 1, 0) for _ in range(2)),
        )
        del run


def training(path: Path, checkpointed: bool, *, is_compiled: bool = False) -> tuple[Policy, Callable[[], None], int]:
    """The policy, a forward and backward pass of one micro-batch, and its tokens."""
    policy = load_policy(path, "float32", DEVICE)
    if is_compiled:
        policy.compile_layers()
    if checkpointed:
        policy.checkpoint_activations()
    words = ["model.dtype=bfloat16"] if HAS_GPU else []
    recipe: Recipe = read_recipe(None, words)
    length, count = (1024, 8) if HAS_GPU else (64, 2)
    tokens = np.arange(length, dtype=np.int32) % 1000 + 10
    ones = np.ones(length // 2, np.float32)
    row = Trajectory(tokens[: length // 2], tokens[length // 2 :], ones, ones.astype(np.uint8), 0, ones)
    batch = pack([row] * count, 0, DEVICE)

    def step() -> None:
        packed_logprobs(policy, batch, recipe)[0].mean().backward()
        policy.model.zero_grad(set_to_none=True)

    return policy, step, length * count


def train(folder: Path) -> None:
    """Forward and backward passes: tokens/s, the share of the speed of a large matrix product, peak memory."""
    flops = product_flops()
    show("matrix product", tflops=flops / 1e12)
    for size in SIZES:
        path = policy_of(size, folder)
        for kind in ("", " checkpointed", " compiled"):
            policy, step, num_tokens = training(path, kind == " checkpointed", is_compiled=kind == " compiled")
            if HAS_GPU:
                torch.cuda.reset_peak_memory_stats()
            step_s = seconds(step, 5)
            used = 6 * sum(p.numel() for p in policy.model.parameters()) * num_tokens / step_s
            peak = torch.cuda.max_memory_allocated() / 1e9 if HAS_GPU else 0.0
            show(
                f"train {size}{kind}",
                tokens_s=num_tokens / step_s,
                tflops=used / 1e12,
                of_product=used / flops,
                peak_gb=peak,
            )
            del policy, step


def copies(folder: Path) -> None:
    """Copies between the device and host memory of the project over those of torch's pinned memory."""
    num_bytes = (1 << 30) if HAS_GPU else (1 << 22)
    device = torch.zeros(num_bytes, dtype=torch.uint8, device=DEVICE)
    host = {
        "ours": torch.from_numpy(host_buffer(num_bytes)),
        "torch": torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=HAS_GPU),
    }
    for way in ("push", "pull"):
        speeds: dict[str, float] = {}
        for name, memory in host.items():
            into, source = (memory, device) if way == "push" else (device, memory)
            speeds[name] = (
                num_bytes / seconds(lambda into=into, source=source: into.copy_(source, non_blocking=True), 10) / 1e9
            )
        show(way, gb_s=speeds["ours"], of_pinned=speeds["ours"] / speeds["torch"])


def profile(folder: Path) -> None:
    """20 decode steps, plain and filtered, and 3 training steps: the GPU's busy share, its longest kernels and its longest gaps."""
    path = policy_of(SIZES[0], folder)
    engine = decoding(path, ROWS[-1])
    _profile("decode", engine.step, 20)
    refill(engine, ROWS[-1], **FILTERS)
    _profile("filtered", engine.step, 20)
    del engine
    _profile("train", training(path, checkpointed=False)[1], 3)


def _profile(name: str, work: Callable[[], object], count: int) -> None:
    work()
    activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if HAS_GPU else [])]
    with torch.profiler.profile(activities=activities) as found:
        seconds(work, 1, warm_up=0, in_a_row=count)
    events: list[Any] = list(found.events() or [])
    if HAS_GPU:
        events = [event for event in events if event.device_type.name == "CUDA"]
    events.sort(key=lambda event: event.time_range.start)
    gaps: list[tuple[float, str, str]] = []
    kernels: defaultdict[str, float] = defaultdict(float)
    launches: Counter[str] = Counter()
    busy, end, last = 0.0, events[0].time_range.start, ""
    for event in events:
        gaps.append((event.time_range.start - end, last, event.name))
        own = max(0.0, event.time_range.end - max(end, event.time_range.start))
        busy += own
        kernels[event.name] += own
        launches[event.name] += 1
        if event.time_range.end > end:
            end, last = event.time_range.end, event.name
    total = max(end - events[0].time_range.start, 1e-9)
    show(f"{name} profile", events=len(events) // count, ms=total / count / 1e3, busy=busy / total)
    for kernel, taken in sorted(kernels.items(), key=lambda item: -item[1])[:10]:
        show("  kernel", us=taken / count, launches=launches[kernel] / count, of=kernel[:90])
    for gap, before, after in sorted(gaps, reverse=True)[:4]:
        show("  gap", us=float(gap), after=before[:50], before=after[:50])


def table() -> None:
    """The parts on standard input, with their figures and the generator's bench, as JSON."""
    logs = Path(os.environ["LOGS"])
    parts: list[dict[str, object]] = []
    for line in sys.stdin:
        name, result, taken = line.rstrip("\n").split("\t")
        text = (logs / f"{name}.log").read_text(errors="replace")
        figures = [line[1:] for line in text.splitlines() if line.startswith("=") and not line.startswith("==")]
        parts.append({"part": name, "result": result, "seconds": int(taken), "figures": figures})
    json.dump(parts, sys.stdout, indent=1)


if __name__ == "__main__":
    part = sys.argv[1]
    if part == "json":
        table()
    else:
        works = (environment, policies, exact, generator, decode, prefill, train, copies, profile)
        with tempfile.TemporaryDirectory() as scratch:
            next(work for work in works if work.__name__ == part)(Path(scratch))
