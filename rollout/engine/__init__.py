"""The generator: continuous batching over a paged KV cache. Usable alone: `from headrace.rollout import Engine`.

Invariant: a trajectory depends on its seed, its id and the weights, never on what it is batched with.
Start reading at `engine.py`, then `scheduler.py`, `page_pool.py` and `prefix_cache.py`; `attention/` has the kernels.
"""
