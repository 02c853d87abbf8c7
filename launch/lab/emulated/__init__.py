"""Emulated devices: `rollout.engine=emulated` and `trainer.engine=emulated`, in real processes or in virtual time.

Invariant: tokens are counted and time passes; nothing is computed.
Start reading at `device.py` (a device that decodes), then `generator.py` and `learner.py` (the engines).
"""
