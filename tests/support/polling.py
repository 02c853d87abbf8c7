"""Waiting for a condition that a process brings about."""

import time
from collections.abc import Callable


def wait_for(
    condition: Callable[[], object],
    is_running: Callable[[], bool],
    told: Callable[[], str],
    *,
    patience_s: float,
    interval_s: float = 0.05,
) -> None:
    """Wait until `condition`. Fails with what was `told` past the patience, and at once when nothing runs that could bring it about."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if not is_running():
            assert condition(), f"the process has ended, and the condition is not true: {told()}"  # it was its last act
            return
        assert time.monotonic() < deadline, f"the condition is not true after {patience_s:g} s: {told()}"
        time.sleep(interval_s)
