"""The status of a run: `headrace status`, and the picture below the lines of `headrace run` on a terminal.

Invariant: both ask the hub for the same report and draw the same picture; no process of a run draws, and none waits for one that does.
Start reading at `query.py` (the report), then `picture.py` (what it looks like) and `live.py` (the launcher's terminal).
"""
