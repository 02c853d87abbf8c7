"""The host's part of a decode step in which a row ends and another one begins, beside that of a step without a change.

256 rows with captured graphs that do nothing, steps read one step late as on a GPU, a context of 32,768 tokens, and a policy of one small
layer. Each prompt is cached without work, so what is left is the host's: the scheduler, the rows, the copies of the inputs, and the
reading of 256 tokens. Copies on the device are counted too, which a CPU makes itself.
"""

import tempfile
import time
from typing import Any

from pytest import MonkeyPatch
from support.fake_cuda import CapturedGraph, use_graphs
from support.policies import tiny_policy

from headrace.rollout import Engine, SamplingParams
from headrace.rollout.engine.cuda_graphs import DecodeGraphs
from headrace.trainer.policy.model import load_policy

from .harness import Measurement, Options

_CONTEXT, _ROWS, _STEPS, _ROUNDS = 32_768, 256, 120, 3
_LENGTHS = {"500": 500, "8k": 8000}
"""Tokens of the prompts."""


def measure(name: str, options: Options) -> list[Measurement]:
    """Milliseconds of CPU time of a step with a change, and over a step without."""
    length = _LENGTHS[name.rpartition("-")[2]]
    with MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        engine = _engine(folder, patch)
        times = [[_step_ms(engine, length, changes=changes) for changes in (True, False)] for _ in range(_ROUNDS)]
    changing, steady = map(min, zip(*times, strict=True))
    return [Measurement(name, "a step without a change", changing, "ms CPU", changing / steady)]


def _engine(folder: str, patch: MonkeyPatch) -> Engine:
    changes: dict[str, Any] = {
        "max_position_embeddings": _CONTEXT,
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    policy = load_policy(tiny_policy(folder, **changes))
    engine = Engine(policy, max_running=_ROWS, kv_gb=_ROWS * _CONTEXT * 2 * 8 * 4 / 2e9, prefill_tokens=1 << 30)
    use_graphs(engine, patch)
    patch.setattr(DecodeGraphs, "_capture", lambda *key: CapturedGraph())
    patch.setattr(engine.runner, "prefill", lambda chunks: None)
    engine.pool.in_ranges = False
    engine._is_async = True
    return engine


def _step_ms(engine: Any, length: int, *, changes: bool) -> float:
    """The mean over steps; with changes a row ends and another one begins in each."""
    engine.recompute()
    first = 1 << 20
    for index in range(_ROWS + _STEPS if changes else _ROWS):
        limit = 9 + index if changes else 1 << 14
        params = SamplingParams(max_new_tokens=limit if index < _ROWS else 1 << 14, ignore_eos=True)
        engine.add_group([4 + index % 90] * (length if index < _ROWS else 1), params, [first + index])
    for _ in range(8):
        engine.step()
    assert engine.num_running >= _ROWS - 1
    started = time.process_time()
    for _ in range(_STEPS):
        engine.step()
    taken = time.process_time() - started
    assert engine.num_running >= _ROWS - 1
    for each in engine.unfinished():
        engine.cancel(each.trajectory_id)
    return 1e3 * taken / _STEPS
