"""Replay: steps of a finished run are trained again, from its initial weights or a checkpoint, and other losses are compared with its own.

Invariant: the weights advance as the run's did; the gradients of variants are computed beside the run's and never applied.
Start reading at `replay.py`, then `counterfactual.py`.
"""
