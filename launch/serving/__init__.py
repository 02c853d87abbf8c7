"""Servers of one process without a run: OpenAI's API on a model, and the Tinker API on a model that clients train.

Invariant: a server ends with Ctrl-C or SIGTERM and leaves nothing behind but what a client asked it to keep, and what scripts need that go on
with the next one. Start reading at `served_model.py` (what the commands share), then `serve.py`, `restarted.py` and `tinker/command.py`.
"""
