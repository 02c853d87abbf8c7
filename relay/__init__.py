"""The relay tier: weight versions and experience rows in CPU memory, and the hub that decides.

Invariant: the hub decides and carries no bulk data; relays carry bulk data and decide nothing.
Start reading at `hub/hub.py`, then `journal/state.py` (the hub's state) and `weights/version_store.py`.
"""
