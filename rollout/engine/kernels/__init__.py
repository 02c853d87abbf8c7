"""Triton kernels of sampling on CUDA: `draw.py` for plain batches, `filters.py` for batches with a filter or a
repetition penalty.

A program reads one row, or one block of it, in an order that does not depend on the number of rows: a lone row has the bits
that it has among others. Only `sampling` imports the two, where a GPU is; `seen_tokens.py`, their input, needs no Triton. Start with
`draw.py`.
"""
