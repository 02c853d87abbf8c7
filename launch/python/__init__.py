"""Headrace from Python: runs that a script or a notebook starts, watches and opens.

Invariants: a run is the same as that of the command line, in processes of its own; what the caller's functions use is written beside the
run, so that `headrace run RUN/inputs/recipe.yaml` repeats it. Start reading at `api.py`.
"""
