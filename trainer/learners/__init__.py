"""What the trainer's loop drives: the built-in actor and the emulated one, behind one interface.

Invariant: the loop knows only the `Learner` interface; `trainer.engine` chooses the implementation.
Start reading at `base.py` (the interface), then `actor.py` (the gradient and the optimizer step).
"""
