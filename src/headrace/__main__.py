"""`python -m headrace` is the command `headrace`."""

import sys

from .launch.command import main

if __name__ == "__main__":
    sys.exit(main())
