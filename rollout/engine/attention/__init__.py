"""Attention over the paged cache: of prompts' chunks (`prefill.py`), and of one new token per row on CPU and CUDA.

Each call writes the new keys and values into the cache before it attends to them. Start at `backends.py`, which chooses.
"""
