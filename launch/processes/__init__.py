"""Supervisors and the processes they start: one supervisor for each rank that torchrun starts.

Invariant: a supervisor imports no torch, outlives its process, and leaves no orphan.
Start reading at `supervisor.py`, then `role_process.py` (the process of a role).
"""
