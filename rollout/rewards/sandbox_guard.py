"""A program without namespaces, on a host where bubblewrap is not installed or may not work: limits, a filter and a guardian alone."""

import json
import sys
from contextlib import suppress

from ...comm.process_tree import fork_guarded
from .sandbox_filter import filter_calls
from .sandbox_program import become_program


def main() -> None:
    """The arguments are the limits and the process that starts this one, at whose end the guardian kills the program."""
    limits = json.loads(sys.argv[1])
    parent = int(sys.argv[2])
    fork_guarded(parent)
    with suppress(OSError):  # no filter for this machine: the caller has told of the weakness
        filter_calls()
    become_program(limits)


if __name__ == "__main__":
    main()
