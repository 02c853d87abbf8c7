"""Faults: real runs whose processes are killed and frozen, and crowds on the ports.

A fault strikes at a failpoint (`comm/trace.py`) or at a random moment. Afterwards the run either goes on, or ends with all of
its processes and can be resumed; its journal verifies, and no row is trained twice. Start reading at `workloads.py`.
"""
