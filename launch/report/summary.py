"""The table that a run prints at its end, from `summary.json`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...comm.clock import duration
from ...comm.disk import say
from ..config.run_folder import SUMMARY_FILE, read_summary
from ..processes.child import print_message
from .leavings import tidy
from .peak_memory import memory_row, merge_peaks
from .planned import planned_text, with_prediction
from .token_text import tokens_text

MOST_FILES = 2
"""Most files of held-out prompts in the table, which fits on a screen with the last steps."""
_MIDWAY = {"starved": "the trainer starved", "age": "the old ones were too old"}
"""Why a rollout took new weights in the middle of its trajectories, as `HubState.midway` counts it."""
_PARTS = ("trained", "evicted", "filtered", "failed", "in_flight")


def print_summary(run_dir: Path, *, with_trace: bool = False) -> dict[str, Any] | None:
    """Print how the run in `run_dir` ended, and tidy its folder; returns its summary, None without one.

    with_trace: the run keeps the traces of its processes, and a timeline of them.
    """
    summary = read_summary(run_dir)
    if summary is not None:
        summary = with_prediction(run_dir, summary)
        show_summary(summary, run_dir)
        tidy(run_dir, summary, with_trace=with_trace)
    return summary


def show_summary(summary: Mapping[str, Any], run_dir: Path) -> None:
    """Print the summary as a table, after the error if the run failed."""
    if summary.get("status") == "failed":
        print_message(f"error: {summary.get('error') or 'the run failed'}")
    if "accounting" not in summary:
        return
    print_table(dict(summary_rows(summary, run_dir, memory_row(merge_peaks(run_dir)))))


def print_table(rows: Mapping[str, str]) -> None:
    """Print the name and text of each row."""
    width = 2 + max(map(len, rows))
    for name, text in rows.items():
        say(name.ljust(width) + text.replace("\n", "\n" + " " * width))


def summary_rows(summary: Mapping[str, Any], run_dir: Path, memory: str = "") -> list[tuple[str, str]]:
    """Name and text of each line of the table: first what was learnt and where the model is, then details.

    memory: the peak memory of the largest processes.
    """
    account = summary["accounting"]
    parts = " + ".join(f"{account[key]} {key.replace('_', ' ')}" for key in _PARTS if key in account)
    verdict = "holds" if account["holds"] else "DOES NOT HOLD"
    export = str(summary.get("export") or "")
    rows = {
        "reward": reward_text(summary) if "reward_first" in summary else "",
        **dict(evaluation_rows(summary.get("evaluations", []))),
        "last alarm": str(summary.get("alarm") or ""),
        "warnings": "\n".join(summary.get("warnings", ())),
        "best checkpoint": str(summary.get("best") or ""),
        "model": export,
        "use it": f'transformers.pipeline("text-generation", {json.dumps(export)})' if export else "",
        "time": f"{duration(summary.get('time_s', 0))}, {summary.get('tokens_per_s', 0):,.0f} tokens/s",
        "plan": planned_text(summary),
        "run": f"{summary.get('status')} after {summary.get('steps')} steps, in {run_dir}",
        "advice": str(summary.get("advice") or ""),
        "failed trajectories": "; ".join(f"{n} x {reason}" for reason, n in summary.get("failures", {}).items()),
        "accounting": f"{account['leased']} leased = {parts}: {verdict}",
        "tokens": tokens_text(summary),
        "staleness": _histogram(summary.get("staleness", {})),
        "versions per trajectory": _versions_text(summary),
        "peak memory": memory,
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
    """First, best and last avg@k of the first files, with the step of each; of one evaluation its value."""
    names = list(dict.fromkeys(name for result in results for name in result if "/avg@" in name))
    for name in names[:MOST_FILES]:
        found = [(result[name], int(result["eval/version"])) for result in results if name in result]
        best = max(found, key=lambda each: each[0])
        words = {"first": found[0], "best": best, "last": found[-1]}
        if best == found[-1]:
            words.pop("last")
        yield name, _at(best) if len(found) == 1 else " -> ".join(f"{word} {_at(at)}" for word, at in words.items())
    if others := names[MOST_FILES:]:
        yield "more held-out files", f"{len(others)}, in {SUMMARY_FILE}: {', '.join(others)}"


def _at(result: tuple[float, int]) -> str:
    value, step = result
    return f"{value:.3f} (step {step})"


def _versions_text(summary: Mapping[str, Any]) -> str:
    """How many versions generated a trajectory, and why rollouts took new ones in the middle."""
    midway = ", ".join(f"{count} x {_MIDWAY[reason]}" for reason, count in summary.get("midway", {}).items())
    text = _histogram(summary.get("versions_per_trajectory", {}))
    return f"{text} (new weights midway: {midway})" if midway else text


def _histogram(counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    return ", ".join(f"{key}: {100 * count / total:.1f} %" for key, count in counts.items()) if total else ""
