"""Plots of compared runs: bars of the figures, their scaling, and a Gantt chart of a run's timeline."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.comm.errors import SettingError

if TYPE_CHECKING:
    from headrace.launch.report.timeline import Timeline

    from .results import Result
    from .scaling import Curves

_COLOURS = {
    "generate": "#4c9f70", "train": "#3b6ea5", "pull": "#e07b39", "publish": "#e07b39", "idle": "#dddddd", "wait": "#dddddd",
    "move": "#b03a48",
}  # fmt: skip


def draw_comparison(results: Mapping[str, "Result"], path: Path) -> None:
    """Plot the figures of all runs: throughput, idle shares, KV use, staleness, trajectory latency, weight waiting.

    A star marks a run of too few steps.
    """
    names = [name if result.more.is_settled else f"{name} *" for name, result in results.items()]
    each = [result.figures for result in results.values()]
    more = [result.more for result in results.values()]
    lags = sorted({lag for f in each for lag in f.staleness}, key=int)
    figure, axes = pyplot().subplots(2, 3, figsize=(15, 7), layout="constrained")
    panels: dict[str, dict[str, list[float]]] = {
        "tokens/s": {
            "measured part": [f.tokens_per_s for f in each],
            "whole run": [m.whole_tokens_per_s for m in more],
        },
        "idle share": {"trainer": [f.idle_actor for f in each], "rollouts": [f.idle_rollout for f in each]},
        "KV cache in use": {"": [m.kv_util for m in more]},
        "staleness, share of trajectories": {lag: [f.staleness.get(lag, 0.0) for f in each] for lag in lags},
        "trajectory latency, s": {"mean": [f.latency_s for f in each], "max": [m.longest_s for m in more]},
        "weight waiting, s per rollout and step": {"": [m.weight_wait_s for m in more]},
    }
    for axis, (title, series) in zip(axes.flat, panels.items(), strict=True):
        width = 0.8 / len(series)
        for number, (label, values) in enumerate(series.items()):
            places = [place + width * number for place in range(len(names))]
            axis.bar(places, values, width, label=label)
        axis.set_title(title)
        axis.set_xticks([place + 0.4 - width / 2 for place in range(len(names))], names, rotation=30, ha="right")
        if len(series) > 1:
            axis.legend(fontsize="small")
    if any(not m.is_settled for m in more):
        figure.supxlabel("*: too few steps for its staleness", fontsize="small")
    save(figure, path)


def draw_scaling(curves: "Curves", path: Path) -> None:
    """Plot tokens/s over the number of devices, both logarithmic; perfect scaling is parallel to the dotted line."""
    figure, axis = pyplot().subplots(figsize=(7, 5), layout="constrained")
    for name, curve in curves.items():
        axis.plot(list(curve), list(curve.values()), marker="o", label=name)
    sizes = list(next(iter(curves.values())))
    lowest = min(curve[sizes[0]] for curve in curves.values())
    axis.plot(sizes, [lowest * num / sizes[0] for num in sizes], ":", color="#999999", label="perfect scaling")
    axis.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="tokens/s")
    axis.set_xticks(sizes, sizes, minor=False)
    axis.minorticks_off()
    ticks = import_module("matplotlib.ticker")
    axis.yaxis.set_major_locator(ticks.LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(ticks.FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    save(figure, path)


def draw_gantt(timeline: "Timeline", title: str, path: Path) -> None:
    """Plot the states of all processes over time, one line per process, with the weight versions of the rollouts."""
    names = [name for name, spans in timeline.spans.items() if spans]
    zero = min(spans[0].start for spans in timeline.spans.values() if spans)
    figure, axis = pyplot().subplots(figsize=(16, 0.35 * len(names) + 1.5), layout="constrained")
    for line, name in enumerate(names):
        spans = timeline.spans[name]
        axis.broken_barh(
            [(span.start - zero, span.end - span.start) for span in spans],
            (line - 0.4, 0.8),
            facecolors=[_COLOURS.get(span.state, "#999999") for span in spans],
        )
        for span in spans:
            if span.state == "generate" and span.end - span.start > 20:
                axis.text(span.start - zero, line, str(span.facts.get("version", "")), fontsize=6, va="center")
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel("seconds (emulated, where devices are)")
    axis.set_title(title, loc="left")
    patch = import_module("matplotlib.patches").Patch
    seen = {span.state for name in names for span in timeline.spans[name]}
    states: dict[str, list[str]] = {}
    for state in (state for state in _COLOURS if state in seen):
        states.setdefault(_COLOURS[state], []).append(state)
    shown = [patch(color=colour, label=", ".join(words)) for colour, words in states.items()]
    axis.legend(handles=shown, ncols=len(shown), loc="lower right", bbox_to_anchor=(1, 1), fontsize="small")
    save(figure, path)


def pyplot() -> Any:
    """matplotlib's `pyplot`, drawing into files; raises `SettingError` where it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise SettingError("plots need the package matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    return import_module("matplotlib.pyplot")


def save(figure: Any, path: Path) -> None:
    """Write a figure; an SVG of the same figure has the same bytes each time."""
    with pyplot().rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot().close(figure)
