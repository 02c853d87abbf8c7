"""CUDA graphs and streams for engines on a CPU: the replay of a graph runs the captured step again."""

import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from pytest import MonkeyPatch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.rollout import Engine
from headrace.rollout.engine import cuda_graphs, sampling
from headrace.rollout.engine.attention.cuda import TableAttention
from headrace.rollout.engine.cuda_graphs import DecodeGraphs
from headrace.rollout.engine.sampling import SamplingBatch
from headrace.trainer.policy.attention import masked_attention


class TorchTableAttention(TableAttention):
    """Attention over the pages of the table by its formula."""

    def attend(self, query, keys, values, rule):
        keys, values = (x[self.table.long()].transpose(1, 2).flatten(2, 3) for x in (keys, values))
        age = self.lengths[:, None] - 1 - torch.arange(keys.shape[2])
        sees = (age >= 0) & (age < (rule.window or 1 << 30))
        return masked_attention(query[:, :, None], keys, values, sees[:, None, None], rule)[:, :, 0]


class CapturedGraph:
    """A graph whose capture keeps the step and whose replay runs it."""

    def __init__(self):
        self.work = lambda: None

    def replay(self):
        self.work()


class FakeCuda:
    """The calls of `torch.cuda` that captures make; `captures` has the options of each. As on a GPU, captured work does not run."""

    Stream = current_stream = staticmethod(lambda: SimpleNamespace(wait_stream=lambda other: None))
    CUDAGraph = CapturedGraph
    stream = staticmethod(lambda stream: nullcontext())
    graph_pool_handle = staticmethod(lambda: "pool")

    def __init__(self):
        self.captures = []
        self.is_capturing = False

    @contextmanager
    def graph(self, graph, **options):
        self.captures.append(options)
        self.is_capturing = True
        yield
        self.is_capturing = False


def fake_captures(monkeypatch) -> FakeCuda:
    """Let graphs be captured without a GPU."""
    cuda = FakeCuda()
    monkeypatch.setattr(cuda_graphs, "torch", SimpleNamespace(**vars(torch) | {"cuda": cuda}))
    capture, step = DecodeGraphs._capture, DecodeGraphs._step

    def capture_step(self, *key):
        graph: Any = capture(self, *key)
        graph.work = lambda: self._step(*key)
        return graph

    def run_step(self, *key):
        if not cuda.is_capturing:
            step(self, *key)

    monkeypatch.setattr(DecodeGraphs, "_capture", capture_step)
    monkeypatch.setattr(DecodeGraphs, "_step", run_step)
    return cuda


def use_graphs(engine: Engine, monkeypatch) -> tuple[DecodeGraphs, FakeCuda]:
    """Let an engine on the CPU decode as on a GPU, by graphs over a table of pages."""
    cuda = fake_captures(monkeypatch)
    runner, pool = engine.runner, engine.pool
    runner.attention = TorchTableAttention(engine.cache)
    max_pages = -(-engine.policy.context // pool.page_size)
    graphs = runner._graphs = DecodeGraphs(
        runner._forward_newest, runner.head, runner.attention, runner._logits, max_pages, engine.scheduler.max_running
    )
    return graphs, cuda


class LaunchCount(TorchDispatchMode):
    """Counts the operators that are kernels on a GPU: all but views and empty tensors. `one` makes one launch of a function."""

    def __init__(self):
        super().__init__()
        self.names = []
        self._is_inside = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        if not (self._is_inside or func.is_view or name.startswith("empty") or name in ("detach", "_unsafe_view")):
            self.names.append(name)
        return func(*args, **kwargs or {})

    def one(self, function, *names):
        """The function, counted as launches of these names, by default of one of its own."""

        def launch(*args, **kwargs):
            was_inside, self._is_inside = self._is_inside, True
            try:
                return function(*args, **kwargs)
            finally:
                self._is_inside = was_inside
                if not was_inside:
                    self.names += names or (function.__name__,)

        return launch


def silu_mul(gate_up):
    """`kernels.gate` by its formula."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def store_heads(qkv, rule, cache, table, lengths):
    """`kernels.heads` by its formula."""
    (keys, values), positions = cache, (lengths - 1).long()
    page_size, kv_heads = keys.shape[2], keys.shape[1]
    columns = (positions // page_size).clamp(max=table.shape[1] - 1)
    pages, offsets = table.gather(1, columns[:, None])[:, 0].long(), positions % page_size
    query, key, value = qkv.split([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    query, key = (
        rotated(x if norm is None else F.rms_norm(x, norm.shape, norm, rule.eps), rule)
        for x, norm in ((query, rule.query_norm), (key, rule.key_norm))
    )
    keys[pages, :, offsets], values[pages, :, offsets] = key, value
    return query.contiguous()


def rotated(heads, rule):
    """Heads [T, heads, d] of which the first dimensions are rotated."""
    size = rule.cos.shape[-1]
    x, rest = heads[..., :size], heads[..., size:]
    x = x * rule.cos + x.roll(size // 2, -1) * rule.sin
    return torch.cat((x, rest), -1)


def draw(logits, scale, is_greedy, keys, positions):
    """`triton_draw` by its formula, which is that of the operators."""
    rows = SamplingBatch(keys, scale, is_greedy)
    with MonkeyPatch.context() as patch:
        patch.setattr(sampling, "has_kernels", lambda device: False)
        return sampling.sample(logits.clone(), rows, positions)


def use_kernels(engine: Engine, monkeypatch) -> LaunchCount:
    """Let an engine that `use_graphs` has changed run the kernels of a GPU by their formulas; counts what it launches."""
    count = LaunchCount()
    kernels = "headrace.trainer.policy.kernels"
    monkeypatch.setitem(sys.modules, f"{kernels}.gate", SimpleNamespace(silu_mul=count.one(silu_mul)))
    monkeypatch.setitem(sys.modules, f"{kernels}.heads", SimpleNamespace(store_heads=count.one(store_heads)))
    monkeypatch.setattr(torch.nn.functional, "rms_norm", count.one(F.rms_norm, "rms_norm"))  # one kernel on a GPU
    sampler = SimpleNamespace(draw=count.one(draw, "sums", "draw"))
    monkeypatch.setitem(sys.modules, "headrace.rollout.engine.triton_draw", sampler)
    monkeypatch.setattr(sampling, "has_kernels", lambda device: True)
    attention = engine.runner.attention
    assert isinstance(attention, TableAttention)
    monkeypatch.setattr(attention, "attend", count.one(attention.attend, "split", "merge"))
    monkeypatch.setattr(engine.runner.forward, "_has_kernels", True)
    return count
