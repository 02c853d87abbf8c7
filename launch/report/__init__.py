"""Reports: the summary, the timeline and the peak memory of a run.

Invariant: a report reads the run folder only; it never talks to a running process.
Start reading at `summary.py`, then `timeline.py`.
"""
