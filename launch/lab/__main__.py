"""The commands of the lab.

    python -m headrace.launch.lab compare|plan RECIPE.yaml [KEY=VALUE ...]

`compare --help` and `plan --help` list the options of each. The settings `lab.*` describe the emulated devices of a recipe with
`rollout.engine=emulated` and `trainer.engine=emulated`; `--help` lists them.
"""

import signal
import sys
from collections.abc import Sequence

from . import compare, plan
from .settings import help_lines

_COMMANDS = {"compare": compare.main, "plan": plan.main}


def main(words: Sequence[str]) -> int:
    """Carry out the command that the first word names; returns its exit code, 2 without a known one."""
    if words and words[0] in _COMMANDS:
        return _COMMANDS[words[0]](words[1:])
    if list(words) == ["--help"]:
        print("\n".join([__doc__ or "", *help_lines()]))
        return 0
    print(f"error: the commands of the lab are {' and '.join(_COMMANDS)}; see --help", file=sys.stderr)
    return 2


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends the present run like Ctrl-C
    sys.exit(main(sys.argv[1:]))
