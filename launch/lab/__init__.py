"""The lab: runs on emulated devices in virtual time, and the planner that splits a run's devices by them.

    headrace plan RECIPE.yaml|NAME [KEY=VALUE ...]

Invariant: no other folder imports the lab; a recipe that names an emulated engine loads it by its path.
Start reading at `command.py` and `plan.py`, then `virtual/` (whole runs in one process) and `emulated/` (the devices).
"""
