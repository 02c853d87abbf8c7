"""Reward functions, the user's and ready ones, in processes of their own, each call with a deadline.

Invariant: a reward that hangs or crashes costs its own samples and never the run.
Start reading at `pool.py` (over `user_code`), then `worker.py` (the reward process) and `function.py` (the forms of functions).
"""
