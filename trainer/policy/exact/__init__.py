"""Exact mode: a forward pass whose bits do not depend on the other tokens of a batch, in training and in generation.

Invariant: of each operator that sums, one implementation per kind of device (`operators.py`) serves both sides, and the sum of a row
depends on that row alone. Start reading at `decoder.py`.
"""
