"""Tidies the folder of a finished run: the results stay, and the files that continue or check it; traces and empty logs go.

The folder of a run that failed or was interrupted stays as it is, since its files may show the reason.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...comm.errors import DiskFull
from ..config.run_folder import METRICS_FILE, remove_empty
from ..processes.child import print_message
from .timeline import MOST_BYTES, TRACE_FILE, TRACES, Timeline

_PROCESS = re.compile(r"hub|store|(actor|relay|rollout|shard|reference|task)-\d+")
"""The names of a run's processes."""
_MOST_DRAWN = 1 << 25
"""Bytes of traces from which on they are not drawn: that would keep the end of the run waiting for seconds."""
_TAIL_BYTES = 1 << 16
"""Of the last lines of `metrics.jsonl`, each of some thousand bytes."""
_GIVEN_UP = "journal.jsonl.discarded-"
"""The end of a journal that a resumed run cut off, by its number."""


def tidy(run_dir: Path, summary: Mapping[str, Any], *, with_trace: bool) -> None:
    """Write the timeline of a run, or if it has finished and `with_trace` is not set, remove what only a timeline needs.

    The next start of the run writes new logs and traces.
    """
    is_finished = summary.get("status") == "finished" and not summary.get("exit_code")
    try:
        if with_trace or not is_finished:
            Timeline.read(run_dir, MOST_BYTES).write(run_dir / TRACE_FILE)
        _show_in_tensorboard(run_dir)
        if is_finished:
            _remove_needless(run_dir, with_trace=with_trace)
    except (OSError, DiskFull, ValueError, KeyError) as error:  # a full disk, or a damaged trace
        print_message(f"warning: {run_dir} is not tidied: {getattr(error, 'strerror', None) or error}")


def _show_in_tensorboard(run_dir: Path) -> None:
    """Add the timeline to the run's TensorBoard as an image, at the last step that has a line of metrics."""
    step = _last_step(run_dir / METRICS_FILE)
    num_bytes = sum(path.stat().st_size for path in (run_dir / TRACES).glob("*.jsonl"))
    if step is None or not (run_dir / "tensorboard").is_dir() or num_bytes > _MOST_DRAWN:
        return
    from ...trainer.record.trackers.board import FOLDER, Board  # a run without TensorBoard does not import it
    from .timeline_picture import draw

    picture = draw(Timeline.read(run_dir, MOST_BYTES))
    if picture is not None:
        board = Board(run_dir / FOLDER, step + 1, deadline_s=0.0)  # it replaces nothing
        board.image(step, "timeline", picture.png, picture.size)
        board.end(None)


def _last_step(metrics: Path) -> int | None:
    """The step of the last whole line, counted from 1; None without one."""
    if not metrics.exists():
        return None
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - _TAIL_BYTES))
        lines = [line for line in file.read().splitlines(keepends=True) if line.endswith(b"}\n")]
    try:
        return int(json.loads(lines[-1])["step"]) + 1
    except (IndexError, KeyError, ValueError):
        return None


def _of_processes(folder: Path, ending: str) -> Iterator[Path]:
    """The files that processes of a run have written; a user may have others in a folder of this name."""
    return (path for path in folder.glob(f"*.{ending}") if _PROCESS.fullmatch(path.stem))


def _remove_needless(run_dir: Path, *, with_trace: bool) -> None:
    if not with_trace:
        for trace in _of_processes(run_dir / TRACES, "jsonl"):
            trace.unlink()
        (run_dir / TRACE_FILE).unlink(missing_ok=True)
    for log in _of_processes(run_dir / "logs", "log"):
        if not log.stat().st_size:
            log.unlink()
    remove_empty(run_dir / TRACES)
    remove_empty(run_dir / "logs")
    for rest in run_dir.glob(f"{_GIVEN_UP}*"):
        # With other files of its number it is of steps that were given up, or of a run before this one.
        if len([*run_dir.glob(f"*.discarded-{rest.name.removeprefix(_GIVEN_UP)}")]) == 1:
            rest.unlink()
