"""`headrace quickstart [NAME] [KEY=VALUE ...]`: `headrace run` with the recipe `quickstart` unless the words name another."""

import sys
from collections.abc import Sequence

from . import run


def main(words: Sequence[str]) -> int:
    """Returns the exit code."""
    return run.main(words, "quickstart")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
