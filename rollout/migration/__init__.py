"""Moving unfinished trajectories between rollouts, for repack.

Invariant: the hub's first accepted claim decides who continues a trajectory; there is no other state of a move.
Start reading at `migration.py`, then `transport.py` (bytes) and `calibration.py` (whether to send the cache).
"""
