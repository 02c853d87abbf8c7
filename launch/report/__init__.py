"""Reports: the summary and the timeline of a run, and the figures and plots of a comparison.

Invariant: a report reads the run folder only; it never talks to a running process.
Start reading at `summary.py`, then `figures.py`.
"""
