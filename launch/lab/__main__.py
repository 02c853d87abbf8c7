"""The planner: `python -m headrace.launch.lab plan RECIPE.yaml [KEY=VALUE ...]`; `plan --help` lists its options.

The settings `lab.*` describe the emulated devices of a recipe with `rollout.engine=emulated` and `trainer.engine=emulated`:
"""

import signal
import sys
from collections.abc import Sequence

from . import plan
from .settings import help_lines


def main(words: Sequence[str]) -> int:
    """Plan, or print the settings; returns the exit code, 2 for other words."""
    if words and words[0] == "plan":
        return plan.main(words[1:])
    if list(words) == ["--help"]:
        print("\n".join([__doc__ or "", *help_lines()]))
        return 0
    print("error: the command of the lab is plan; see --help", file=sys.stderr)
    return 2


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends the present run like Ctrl-C
    sys.exit(main(sys.argv[1:]))
