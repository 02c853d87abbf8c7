"""CUDA graphs and streams for engines on a CPU: the replay of a graph runs the captured step again."""

from contextlib import nullcontext
from types import SimpleNamespace

import torch

from headrace.rollout import Engine
from headrace.rollout.engine import cuda_graphs
from headrace.rollout.engine.attention.cuda import TableAttention
from headrace.rollout.engine.cuda_graphs import DecodeGraphs
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
    """The calls of `torch.cuda` that captures make; `captures` has the options of each."""

    Stream = current_stream = staticmethod(lambda: SimpleNamespace(wait_stream=lambda other: None))
    CUDAGraph = CapturedGraph
    stream = staticmethod(lambda stream: nullcontext())
    graph_pool_handle = staticmethod(lambda: "pool")

    def __init__(self):
        self.captures = []

    def graph(self, graph, **options):
        self.captures.append(options)
        return nullcontext()


def use_graphs(engine: Engine, monkeypatch) -> tuple[DecodeGraphs, FakeCuda]:
    """Let an engine on the CPU decode as on a GPU, by graphs over a table of pages."""
    cuda = FakeCuda()
    monkeypatch.setattr(cuda_graphs, "torch", SimpleNamespace(**vars(torch) | {"cuda": cuda}))
    capture = DecodeGraphs._capture

    def capture_step(self, size, width):
        capture(self, size, width)
        self._graphs[size, width].work = lambda: self._step(size, width)

    monkeypatch.setattr(DecodeGraphs, "_capture", capture_step)
    runner, pool = engine.runner, engine.pool
    runner.attention = TorchTableAttention(engine.cache)
    max_pages = -(-engine.policy.context // pool.page_size)
    space = (runner._logits, runner._scratch)
    graphs = runner._graphs = DecodeGraphs(
        runner._forward_newest, runner.head, runner.attention, space, max_pages, engine.scheduler.max_running
    )
    return graphs, cuda
