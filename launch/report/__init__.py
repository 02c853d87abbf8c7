"""Reports: the summary, the timeline and the peak memory of a run; its replay; the card, an evaluation and the
upload of a trained model.

Invariant: a report reads the folder of a run or of a model; it never talks to a running process.
Start reading at `summary.py`, then `timeline.py` and `evaluation.py`.
"""
