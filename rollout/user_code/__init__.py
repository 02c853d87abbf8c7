"""The host of user code: a process of its own for rewards, environments and tools, with JSON lines in and out.

Invariant: user code that hangs, crashes or writes where it should not costs its own calls and never the run.
Start reading at `host.py` (the rollout's side), then `channel.py` (the process's).
"""
