"""The experience queue: which task may have which rows, in which order, and how a consumer fetches them.

Invariant: a task receives each row at most once, and training receives whole groups within the staleness bound.
Start reading at `admission.py` (capacity and staleness), then `tasks.py` and `stream.py` (the consumer).
"""
