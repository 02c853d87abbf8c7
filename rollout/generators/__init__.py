"""Generators for the rollout's loop: the built-in engine, emulated devices and your own, behind one interface.

Invariant: the loop knows only the `Generator` interface; `rollout.engine` selects the implementation.
Start reading at `base.py` (the interface), then `builtin.py`.
"""
