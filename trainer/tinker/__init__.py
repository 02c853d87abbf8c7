"""Training that a client drives: gradients of the data and the losses that it sends, and updates when it says so.

Invariants: losses are sums over tokens, and the gradient is that of all data since the last update. Nothing here knows HTTP or a run.
Start reading at `trained_model.py`, then `losses.py`.
"""
