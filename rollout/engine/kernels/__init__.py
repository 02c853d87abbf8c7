"""Triton kernels of sampling on CUDA: `draw.py` for plain rows, `filters.py` for rows with filters and repetition penalties.

A program reads one row, or one block of it, in an order that does not depend on the number of rows: a lone row has the bits
that it has among others. Only `sampling` imports them, when a GPU is there: start with `draw.py`.
"""
