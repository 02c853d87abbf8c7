"""`python -m headrace.launch.lab plan ...` is `headrace plan ...`.

Its page of help has the settings of the lab.
"""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1 + (sys.argv[1:2] == ["plan"]) :]))
