"""What the status of a run looks like: lines of text, and the same with colours for a terminal."""

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...comm.clock import clock_text, duration, estimate
from ...comm.messages import MemberStatus, StatusReport, WaitStatus

Cells = tuple[str, ...]
MOST_MEMBERS = 12
"""Most processes that the live picture shows one by one."""
_MOST_WAITS = 4
_LONG_S = 10.0
"""Seconds after which a wait stands out."""
_ALARMING = ("silent", "gone", "starts")
_AT_WORK = ("trains", "generates", "at tools", "serves", "decides", "works")
"""States whose time says nothing."""


class Line(NamedTuple):
    """A line of the picture and its style, in the words of `rich`."""

    text: str
    style: str = ""


def lines(report: StatusReport, most_members: int = 1 << 30) -> Iterator[Line]:
    """The picture, from the top: how far the run is, the queue, the processes, who waits for whom."""
    yield Line(_head(report), "bold")
    if report.queue:
        yield Line(_queue(report), "")
    yield from _members(report.members, most_members)
    if not report.ending:
        waits = report.waits[:_MOST_WAITS]
        yield from (Line(_wait(wait), "yellow" if wait.seconds >= _LONG_S else "dim") for wait in waits)
        if more := len(report.waits) - len(waits):
            yield Line(f"{more} more wait", "dim")
    if report.alarm:
        yield Line(f"last alarm, {report.alarm}", "yellow")


def describe(report: StatusReport) -> Iterator[str]:
    """The status as plain lines, with the account of the rows."""
    yield from (line.text for line in lines(report))
    yield f"rows: {', '.join(f'{name} {value}' for name, value in report.account.items())}"


def paint(shown: Sequence[Line], width: int) -> list[str]:
    """Lines with the control sequences of their styles, each cut to one line of a terminal of so many columns."""
    from rich.console import Console  # not for a command whose output is no terminal
    from rich.text import Text

    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=max(width, 1), legacy_windows=False)
    for line in shown:
        console.print(Text(line.text, style=line.style), highlight=False, no_wrap=True, overflow="ellipsis")
    return file.getvalue().splitlines()


def starting(seconds: float) -> list[Line]:
    """The picture before the hub answers for the first time."""
    return [Line(f"{clock_text(seconds)}  the processes are starting", "bold")]


def unanswered(seconds: float) -> Line:
    """The line for a hub that does not answer."""
    return Line(f"the hub has not answered for {duration(seconds)}; it may be being started again", "yellow")


def _head(report: StatusReport) -> str:
    parts = [f"{report.step} of {report.num_steps} steps"]
    if report.ending:
        parts.append(f"ending ({report.ending}): the processes finish")
    if report.reward is not None:
        parts.append(f"reward {report.reward:.3f}")
    if report.step_s:
        parts.append(f"{report.step_s:.2g} s a step" if report.step_s < 10 else f"{report.step_s:.0f} s a step")
    parts.append(f"{clock_text(report.elapsed_s)} elapsed")
    if report.left_s and not report.ending:
        parts.append(f"{estimate(report.left_s)} left")
    return "   ".join(parts)


def _queue(report: StatusReport) -> str:
    q = report.queue
    text = (
        f"groups: {q['in_training']} of {q['step']} of this step with the trainer, {q['ready']} ready, {q['begun']} begun"
        f"   window {q['window']}"
    )
    return f"{text}   evaluation: {report.evaluation} samples to go" if report.evaluation else text


def _members(members: Sequence[MemberStatus], most: int) -> Iterator[Line]:
    """A line for each process, in columns; of too many rollouts, those that stand out and the sum of the others."""
    shown = [*members]
    others: list[MemberStatus] = []
    if len(shown) > most:
        first = [m for m in shown if not m.name.startswith("rollout-") or m.state in _ALARMING][:most]
        rest = [m for m in shown if m not in first]
        kept = max(0, most - len(first))
        shown = [*first, *rest[:kept]]
        others = rest[kept:]
    has_hosts = len({member.host for member in members if member.host}) > 1
    rows = [_row(member, has_hosts=has_hosts) for member in shown]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for member, row in zip(shown, rows, strict=True):
        cells = [cell.ljust(size) for cell, size in zip(row, widths, strict=True) if size]
        text = "  ".join(cells).rstrip()
        yield Line(text, _style(member))
    if others:
        states = ", ".join(f"{number} {state}" for state, number in Counter(m.state for m in others).most_common())
        rate = sum(member.tokens_per_s or 0.0 for member in others)
        yield Line(f"{len(others)} more: {states}; {rate:,.0f} tok/s", "dim")


def _row(member: MemberStatus, *, has_hosts: bool) -> Cells:
    rate = "" if member.tokens_per_s is None or member.state == "silent" else f"{member.tokens_per_s:,.0f} tok/s"
    return (
        member.name,
        member.host if has_hosts else "",
        f"{member.state} {duration(member.seconds)}"
        if member.seconds >= 1 and member.state not in _AT_WORK
        else member.state,
        f"version {member.version}" if member.version >= 0 else "",
        rate.rjust(12) if rate else "",
        f"{member.leased} trajectories" if member.leased else "",
        f"started {member.incarnation} times" if member.incarnation > 1 else "",
    )


def _style(member: MemberStatus) -> str:
    if member.state in ("silent", "gone"):
        return "red"
    return "dim" if member.state in ("waits", "starts", "serves", "decides") else ""


def _wait(wait: WaitStatus) -> str:
    return f"{wait.who} waits for {wait.whom}: {wait.what}, {duration(wait.seconds)}"
