"""The lab: runs on emulated devices, in virtual time, to compare schedules and to plan the split of devices.

    python -m headrace.launch.lab compare|plan RECIPE.yaml [KEY=VALUE ...]

Invariant: no other folder imports the lab; a recipe that names an emulated engine loads it by its path.
Start reading at `compare.py` and `plan.py`, then `virtual/` (whole runs in one process) and `emulated/` (the devices).
"""
