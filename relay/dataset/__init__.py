"""A user's data: rows as JSON objects, and the order in which groups take them.

Invariant: position and seed alone determine the next prompt, so the position is one integer of the journal. No set is held in memory.
Start reading at `opening.py`, which finds the kind of a data set; `order.py` has the positions.
"""
