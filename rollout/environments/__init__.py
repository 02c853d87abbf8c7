"""Environments and tools of the user, with which the policy talks over several turns, in processes of their own.

Invariant: an environment that hangs or crashes costs its own trajectory and never the run.
Start reading at `base.py`, then `worker.py` (the process) and `pool.py` (the rollout's side of it, over `user_code`).
"""
