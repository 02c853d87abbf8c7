"""The lines between a process of user code and its host: one JSON line for each question and each answer.

The user's code prints to the log, not into the answers. A process that it forks can neither read questions nor answer
them. The process ends with its standard input, and everything that it has started ends with it.
"""

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...comm.process_tree import fork_guarded
from ...relay.dataset.rows import MAX_NESTED, is_too_deep

_OURS = Path(__file__).parents[1]


class Channel:
    """The process's end. The program's arguments are its settings and the process that starts it."""

    def __init__(self, default: Callable[[Any], Any] | None = None) -> None:
        """default: makes JSON of other values in answers, as for `json.dumps`."""
        self.settings = json.loads(sys.argv[1])
        parent = int(sys.argv[2])
        fork_guarded(parent)
        self.questions = os.fdopen(os.dup(0), encoding="utf-8")
        # A text may have half of a surrogate pair, which no row and no message takes.
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace", buffering=1)
        self._default = default
        self._lock = threading.Lock()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        descriptors = self.questions.fileno(), self._answers.fileno()
        os.register_at_fork(after_in_child=lambda: [os.close(each) for each in descriptors])

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Tell the host why the user's files cannot be loaded."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - the host gets any error of the user's file
            self.write(0, {"error": explain(error)})
            raise SystemExit(1) from None

    def write(self, number: int, answer: dict[str, Any]) -> None:
        """Answer a question; number 0 tells of the process itself. From any thread."""
        try:
            if is_too_deep(answer):
                raise ValueError(f"more than {MAX_NESTED} nested lists or objects")
            line = json.dumps({"id": number, **answer}, default=self._default, ensure_ascii=False)
        except Exception as error:  # noqa: BLE001 - of a value of the user's, whose text is the user's code too
            line = json.dumps({"id": number, "error": explain(error)}, ensure_ascii=False)
        with self._lock:
            self._answers.write(line + "\n")


def add_folders(*paths: str) -> None:
    """Let the user's files, `FILE.py:NAME`, import modules of their own folders: only the user's code runs here."""
    sys.path[:0] = [str(Path(path.rpartition(":")[0]).resolve().parent) for path in reversed(paths)]


def explain(error: BaseException) -> str:
    """One line: the error and where in the user's code it was raised."""
    frames = _users_frames(error)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def frames_of(error: BaseException) -> list[str]:
    """The lines of the user's code on the way to an error, each with its place."""
    return [f"{Path(f.filename).name}:{f.lineno} in {f.name}: {f.line}" for f in _users_frames(error)]


def _users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [f for f in traceback.extract_tb(error.__traceback__) if _OURS not in Path(f.filename).parents]
