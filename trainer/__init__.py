"""The trainer (role `actor`): it fetches batches from the queue, accumulates gradients, updates the weights and publishes versions.

Invariant: a step depends on its rows and the random state alone, so a recorded run replays bit for bit.
Start reading at `loop.py`, then `learners/actor.py`, `batch.py` and `algorithms/`.
"""
