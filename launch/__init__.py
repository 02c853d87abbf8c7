"""The command line: recipes, placement, supervisors, reports and the lab.

Invariant: a mistake in the settings ends with one message that names the setting and exit code 2.
Start reading at `command.py`, `run.py` and `start.py`, then `processes/supervisor.py` and `config/load.py`.
"""

import sys

if sys.platform != "linux":  # here, since the modules of this package cannot even be imported elsewhere
    sys.exit(f"Headrace needs Linux: this is {sys.platform}")
