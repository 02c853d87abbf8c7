"""One replica of the generator on several ranks.

Invariant: every rank replays the calls of rank 0 in order, so all schedulers make the same choices.
Start reading at `replica.py` (how the ranks meet), then `lockstep.py` (how calls are replayed).
"""
