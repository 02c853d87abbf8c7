"""Reward functions, the user's and built-in ones, in separate processes, with a deadline for each call.

Invariant: a reward that hangs or crashes costs its own samples and never the run.
Start reading at `pool.py` (over `user_code`), then `worker.py` (the reward process) and `function.py` (the forms of functions).
"""
