"""Agents of ours: programs that use a running job over HTTP, as any agent may (docs/use/agents.md).

Invariant: they know nothing of the run but its address; whatever goes wrong in an agent is a failed trajectory with its reason.
Start reading at `command.py`.
"""
