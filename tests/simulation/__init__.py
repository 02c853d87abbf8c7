"""Whole runs in virtual time under faults: the loops of a run's processes as coroutines that take turns.

They stand on `launch/lab/virtual`, with processes that can die, a network that loses, repeats and delays, and storage units with bytes.
Invariant: a run depends on its recipe and its plan of faults alone.
Start reading at `simulation.py`, then `cluster.py`, then `checks.py`.
"""
