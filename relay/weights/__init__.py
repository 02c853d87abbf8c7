"""Versions of the weights, from the trainer's tensors through the relays to a rollout's buffer.

Invariant: a version is readable only when its bytes match the published digest; each piece of memory has one writer, for whom no
reader waits. Start reading at `publisher.py` (trainer), `chain.py` and `transfer.py` (the way), `server.py` (relay), `reader.py`
(rollout); `slots.py` holds the memory.
"""
