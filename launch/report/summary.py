"""The table that a run prints at its end, from `summary.json`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config.run_folder import SUMMARY_FILE
from ..processes.child import print_message
from .peak_memory import memory_row, merge_peaks

_PARTS = ("trained", "evicted", "filtered", "failed", "in_flight")


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """The summary that the hub wrote when the run ended, None without one."""
    try:
        return json.loads((run_dir / SUMMARY_FILE).read_text())
    except (OSError, ValueError):
        return None


def print_summary(run_dir: Path) -> dict[str, Any] | None:
    """Print how the run in `run_dir` ended, and write its timeline; returns its summary, None without one."""
    from .timeline import MOST_BYTES, TRACE_FILE, Timeline

    summary = read_summary(run_dir)
    if summary is not None:
        show_summary(summary, run_dir)
        try:
            Timeline.read(run_dir, MOST_BYTES).write(run_dir / TRACE_FILE)
        except OSError as error:
            print_message(f"warning: {run_dir / TRACE_FILE} is not written: {error.strerror}")
    return summary


def show_summary(summary: Mapping[str, Any], run_dir: Path) -> None:
    """Print the summary as a table, after the error if the run failed."""
    if summary.get("status") == "failed":
        print_message(f"error: {summary.get('error') or 'the run failed'}")
    if "accounting" not in summary:
        return
    rows = [*summary_rows(summary), ("run folder", str(run_dir))]
    if memory := memory_row(merge_peaks(run_dir)):
        rows.insert(-1, ("peak memory", memory))
    width = 2 + max(len(name) for name, _ in rows)
    for name, value in rows:
        print(name.ljust(width) + value, flush=True)


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and text of each line of the table."""
    account = summary["accounting"]
    parts = " + ".join(f"{account[key]} {key.replace('_', ' ')}" for key in _PARTS if key in account)
    verdict = "holds" if account["holds"] else "DOES NOT HOLD"
    rows = {
        "run": f"{summary.get('status')} after {summary.get('steps')} steps",
        "reward": reward_text(summary) if "reward_first" in summary else "",
        **dict(evaluation_rows(summary.get("evaluations", []))),
        "tokens/s": f"{summary.get('tokens_per_s', 0):,.0f}",
        "staleness": _histogram(summary.get("staleness", {})),
        "versions per trajectory": _histogram(summary.get("versions_per_trajectory", {})),
        "accounting": f"{account['leased']} leased = {parts}: {verdict}",
        "failed trajectories": "; ".join(f"{n} x {reason}" for reason, n in summary.get("failures", {}).items()),
        "advice": str(summary.get("advice") or ""),
        "exported model": str(summary.get("export") or ""),
    }
    return [(name, text) for name, text in rows.items() if text]


def reward_text(summary: Mapping[str, Any]) -> str:
    """The mean rewards of the first and the last steps, as `trainer.loop` takes them: a tenth, at least 3, at most all."""
    first = summary["reward_first"]
    last = summary["reward_last"]
    steps = int(summary.get("steps") or 0)
    if steps < 6:
        return (
            f"{first:.3f} -> {last:.3f}  (first and last 3 steps)" if steps > 3 else f"{last:.3f}  (mean of the steps)"
        )
    which = "tenth" if steps >= 30 else "3 steps"
    return f"{first:.3f} -> {last:.3f}  (first and last {which})"


def evaluation_rows(results: Sequence[Mapping[str, float]]) -> Iterator[tuple[str, str]]:
    """First, best and last avg@k of each file, with their versions."""
    for name in dict.fromkeys(name for result in results for name in result if "/avg@" in name):
        found = [(result[name], int(result["eval/version"])) for result in results if name in result]
        best = max(found, key=lambda each: each[0])
        shown = (
            f"{word} {value:.3f} (version {version})"
            for word, (value, version) in (("first", found[0]), ("best", best), ("last", found[-1]))
        )
        yield name, ", ".join(shown)


def _histogram(counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    return ", ".join(f"{key}: {100 * count / total:.1f} %" for key, count in counts.items()) if total else "none"
