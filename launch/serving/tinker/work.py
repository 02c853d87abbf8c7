"""Work that the thread of the event loop orders and the main thread carries out, the training of each model in the order of its numbers.

A client numbers the requests to a model from 1 on. They may arrive in another order, since it sends parts of one call together.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

GAP_S = 600.0
"""Longest time for which a request waits for one with a lower number, before it fails."""
PLACE_S = 90.0
"""Longest time for which a new model waits until there is room for it: longer than a client that is gone counts as alive."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Work: `run` carries it out, `fail` ends it with a problem; in the main thread, one of them and once.

    drop: ends it with a problem as if it had never come, in any thread.
    """

    run: Callable[[], None]
    fail: Callable[[str], None]
    drop: Callable[[str], None] = lambda _: None
    since: float = field(default_factory=time.monotonic)


class Work:
    """Jobs that wait. `add` and `add_numbered` may be called in any thread, the rest in the main one."""

    def __init__(self, has_work: threading.Event) -> None:
        """has_work: set when there is something new."""
        self._has_work = has_work
        self._lock = threading.Lock()
        self._models: deque[tuple[str, Job]] = deque()
        self._numbered: dict[str, dict[int, Job]] = {}
        self._next: dict[str, int] = {}
        self._held: set[str] = set()

    def add_model(self, model_id: str, job: Job) -> None:
        """Queue a job that creates or continues a model, which waits for room."""
        with self._lock:
            self._models.append((model_id, job))
        self._has_work.set()

    def hold(self, model_id: str) -> None:
        """Let no numbered job of a model come up until `resume`."""
        with self._lock:
            self._held.add(model_id)

    def resume(self, model_id: str, number: int) -> list[Job]:
        """Let the jobs of a model come up, from this number on; returns those before it, which never do."""
        with self._lock:
            self._held.discard(model_id)
            self._next[model_id] = number
            jobs = self._numbered.get(model_id, {})
            late = [jobs.pop(each) for each in sorted(jobs) if each < number]
            now = time.monotonic()
            jobs.update({each: replace(job, since=now) for each, job in jobs.items()})
        self._has_work.set()
        return late

    def add_numbered(self, model_id: str, number: int, job: Job) -> bool:
        """Queue a job of a model; each number comes once. False for one that comes after later ones are done: it never comes up."""
        with self._lock:
            is_late = number < self._next.get(model_id, 1)
            if not is_late:
                self._numbered.setdefault(model_id, {})[number] = job
        self._has_work.set()
        return not is_late

    def next(self, has_room: Callable[[str], bool]) -> Job | None:
        """The next job to carry out, which is forgotten here; None if there is none yet. has_room: for a model that waits."""
        for waiting in [*self._models]:
            if has_room(waiting[0]):  # it may wait for a disk, so without the lock
                with self._lock:
                    self._models.remove(waiting)
                return waiting[1]
        with self._lock:
            for model_id, jobs in self._numbered.items():
                number = self._next.get(model_id, 1)
                if number in jobs and model_id not in self._held:
                    self._next[model_id] = number + 1
                    return jobs.pop(number)
        return None

    def overdue(self, has_room: Callable[[str], bool]) -> list[tuple[Job, str]]:
        """Jobs that have waited too long, for room or for one that has not come, with the reason; they are forgotten here.

        The missing one counts as come, so that later ones go on.
        """
        found: list[tuple[Job, str]] = []
        now = time.monotonic()
        for waiting in [*self._models]:
            model_id, job = waiting
            if now - job.since > PLACE_S and not has_room(model_id):
                with self._lock:
                    self._models.remove(waiting)
                problem = "no room for one more model (--models): another client trains one; it makes room when it ends"
                found.append((job, problem))
        with self._lock:
            for model_id, jobs in self._numbered.items():
                if model_id in self._held:
                    continue
                missing = self._next.get(model_id, 1)
                late = [number for number, job in jobs.items() if now - job.since > GAP_S]
                if late and missing not in jobs:
                    self._next[model_id] = max(late) + 1
                    problem = f"request {missing} of {model_id} did not come within {GAP_S:g} s"
                    found += [(jobs.pop(number), problem) for number in sorted(jobs) if number <= max(late)]
        return found
