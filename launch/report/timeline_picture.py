"""The timeline of a run as a picture: a lane for each process, with the colours of its states."""

import io
from collections.abc import Iterator
from typing import NamedTuple

from PIL import Image, ImageDraw

from .timeline import Timeline

WIDTH = 1200
"""Pixels of the time axis."""
MOST_LANES = 64
"""Processes that have a lane; the first by name."""
_LANE = 16
_NAMES = 90
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#000000")
"""Paul Tol's bright colours, which people with colour blindness can tell apart, and black for all further states."""


class Picture(NamedTuple):
    """A PNG file and its size in pixels."""

    png: bytes
    size: tuple[int, int]


def draw(timeline: Timeline) -> Picture | None:
    """The whole run, however long it is, in one picture of `WIDTH`; None without a state of any process.

    Where several states share a pixel, the one that took most of its time is drawn.
    """
    lanes = [name for name, spans in timeline.spans.items() if spans][:MOST_LANES]
    if not lanes:
        return None
    start = min(span.start for name in lanes for span in timeline.spans[name])
    end = max(span.end for name in lanes for span in timeline.spans[name])
    scale = WIDTH / max(end - start, 1e-9)
    states = list(dict.fromkeys(span.state for name in lanes for span in timeline.spans[name]))
    colours = {state: _COLOURS[min(number, len(_COLOURS) - 1)] for number, state in enumerate(states)}
    size = (_NAMES + WIDTH, _LANE * (len(lanes) + 2))
    image = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(image)
    for lane, name in enumerate(lanes):
        pen.text((2, lane * _LANE + 2), name, fill="black")
        for pixel, state in _pixels(timeline, name, start, scale):
            x = _NAMES + pixel
            pen.line([(x, lane * _LANE + 2), (x, lane * _LANE + _LANE - 3)], fill=colours[state])
    y = len(lanes) * _LANE
    pen.text((2, y + 2), f"{end - start:.0f} s", fill="black")
    x = float(_NAMES)
    for state, colour in colours.items():
        pen.rectangle([(x, y + 4), (x + 8, y + 12)], fill=colour)
        pen.text((x + 12, y + 2), state, fill="black")
        x += 24 + pen.textlength(state)
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return Picture(file.getvalue(), size)


def _pixels(timeline: Timeline, name: str, start: float, scale: float) -> Iterator[tuple[int, str]]:
    """The state of each pixel of a lane that has one."""
    shares: dict[int, dict[str, float]] = {}
    for span in timeline.spans[name]:
        first = (span.start - start) * scale
        last = (span.end - start) * scale
        for pixel in range(max(int(first), 0), min(int(last) + 1, WIDTH)):
            share = min(last, pixel + 1) - max(first, pixel)
            states = shares.setdefault(pixel, {})
            states[span.state] = states.get(span.state, 0.0) + share
    for pixel, states in shares.items():
        yield pixel, max(states, key=lambda state: states[state])
