"""States of sequences beside the pages of the KV cache, for policies with recurrent layers.

Invariant: a place holds the state behind a known number of tokens of one sequence, and nothing writes it while it is needed.
Start reading at `state_pool.py` (which places are in use), then `state_cache.py` (their tensors) and `steps.py` (prefill, decode).
"""
