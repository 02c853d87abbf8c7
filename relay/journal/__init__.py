"""The hub's decisions as events, and the state that they fold to.

Invariant: an event is on disk before it takes effect, and applying it asserts that it is legal: replay verifies.
Start reading at `state.py`, then `events.py`; `journal.py` is the only file that does I/O.
"""
