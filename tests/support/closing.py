"""What a test has started ends with it, however the test ends: `tests/conftest.py` closes it all after every test."""

from collections.abc import Callable
from contextlib import ExitStack

_started = ExitStack()


def at_end(close: Callable[[], object]) -> None:
    """Call `close` after the test, the last one first. Whatever the test closes itself must allow a second close.

    A store that this process hosts must live until its members have left: hand over a function that holds it.
    """
    _started.callback(close)


def close_all() -> None:
    """Close everything, even where one of the closes fails; raises the last failure."""
    _started.close()
