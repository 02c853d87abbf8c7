"""The commands of the lab.

    python -m headrace.launch.lab compare|plan RECIPE.yaml [KEY=VALUE ...]

`compare --help` and `plan --help` list the options of each.
"""

import signal
import sys
from collections.abc import Sequence

from . import compare, plan

_COMMANDS = {"compare": compare.main, "plan": plan.main}


def main(words: Sequence[str]) -> int:
    """Carry out the command that the first word names; returns its exit code, 2 without a known one."""
    if words and words[0] in _COMMANDS:
        return _COMMANDS[words[0]](words[1:])
    asks = list(words) == ["--help"]
    print((__doc__ or "").strip(), file=sys.stdout if asks else sys.stderr)
    return 0 if asks else 2


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends the present run like Ctrl-C
    sys.exit(main(sys.argv[1:]))
