"""A run on emulated devices in virtual time: one process, no sleeps, one heap of events.

The hub, admission, schedules, leases, repack, claims, pacing, the rollout's and the trainer's loop and the emulated devices are
those of a real run; mailboxes, storage units and the weights' way have counterparts here that carry no bytes.
Invariant: a run depends on its recipe alone.
Start reading at `run.py`, then `world.py`.
"""
