"""Versions of the weights, from the trainer's tensors through the relays to a rollout's buffer.

Invariant: a version is readable only when its bytes match the published digest, and no reader waits for a writer.
Start reading at `publisher.py` (trainer), `server.py` (relay), `reader.py` (rollout); `slots.py` holds the memory.
"""
