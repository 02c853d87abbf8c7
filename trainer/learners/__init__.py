"""The engines of the trainer: the built-in actor and the emulated one, behind one interface.

Invariant: the loop uses only the `Learner` interface; `trainer.engine` chooses the implementation.
Start reading at `base.py` (the interface), then `actor.py` (gradients and updates).
"""
