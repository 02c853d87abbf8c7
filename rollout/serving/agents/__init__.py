"""Agents: programs that claim samples of a running job, talk to its policy over HTTP, and end with a reward.

Invariants: what the policy drew is trained once, in its exact context; an agent that fails, hangs or leaves makes a failed trajectory.
Start reading at `conversation.py` (turns become branches), then `office.py` (who talks, and for how long) and `routes.py`.
"""
