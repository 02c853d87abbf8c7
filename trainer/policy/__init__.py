"""The one definition of the policy, for training and for generation: model, attention, exact mode.

Invariant: generator and trainer run the same modules on the same weights; nothing here imports the rest of the trainer.
Start reading at `model.py` (loading), then `decoder.py` (generation) and `attention.py` (training).
"""
