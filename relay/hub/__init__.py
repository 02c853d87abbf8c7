"""The hub: the one process that decides. It leases prompts, hands out rows, plans moves and ends the run.

Invariant: every change of state is an event in the journal first, and the first claim of an attempt wins.
Start reading at `hub.py`; each handler (`leases.py`, `results.py`, `dispatch.py`, `repacking.py`) owns its messages.
"""
