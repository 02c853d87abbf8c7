"""Links: one interface for bytes between two processes, over TCP, NCCL through staging buffers, or memory.

Invariant: both ends authenticate before the first byte, and every operation has a deadline.
Start reading at `base.py` (the interface) and `frames.py` (the form of what is sent), then `handshake.py` (how two ends know each other)
and `opening.py` (which backend connects which pair).
"""
