"""The bench's end of failpoints: it waits until a process of the run is at a place, and holds that process there."""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class Hit:
    """A process is at a failpoint: the point's name, the process, and the facts that it told."""

    point: str
    pid: int
    facts: dict[str, object]


@contextmanager
def held_at(address: Path, is_wanted: Callable[[Hit], bool], deadline_s: float) -> Iterator[Hit | None]:
    """Yield the first wanted hit, whose process waits until the block ends; None if none comes within `deadline_s`.

    Other processes pass their failpoints meanwhile, most of them without a wait: nothing listens once there is a hit.
    """
    until = time.monotonic() + deadline_s
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(address))
        stack.callback(address.unlink)
        listener.listen(64)
        while (left := until - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                break
            with connection:
                hit = _read(connection)
                if hit is not None and is_wanted(hit):
                    stack.close()
                    yield hit
                    return
        stack.close()
        yield None


def _read(connection: socket.socket) -> Hit | None:
    """The hit that a process announces; None if it ended meanwhile."""
    connection.settimeout(_ANSWER_S)
    try:
        with connection.makefile("rb") as stream:
            facts = json.loads(stream.readline())
    except (OSError, ValueError):
        return None
    return Hit(facts.pop("point"), facts.pop("pid"), facts)
