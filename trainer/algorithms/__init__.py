"""The algorithms of the trainer, as pure functions of tensors: losses, their aggregation, advantages, KL terms, shaped rewards.

Invariant: nothing here reads a message, a file of the run or a clock; every formula has its source in its docstring.
Start reading at `objective.py` (the loss of a micro-batch), then `losses.py` and `advantages.py`; docs/use/algorithms.md has the tables.
"""
