"""The hub's decisions as events, and the state that is their fold.

Invariant: an event is in the file before it takes effect, and applying it asserts that it is legal, so replay verifies.
Start reading at `state.py`, then `events.py`; only `journal.py`, with `opening.py` on top of it, does I/O.
"""
