"""The picture of a timeline has a lane for each process, in the colours of its states."""

import io

from PIL import Image

from headrace.launch.report.timeline import Span, Timeline
from headrace.launch.report.timeline_picture import MOST_LANES, WIDTH, draw


def test_each_state_has_its_share_of_a_lane():
    timeline = Timeline()
    timeline.spans["actor-0"] = [Span("train", 0.0, 25.0, {}), Span("wait", 25.0, 100.0, {})]
    timeline.spans["rollout-0"] = [Span("wait", 50.0, 100.0, {})]
    picture = draw(timeline)
    assert picture is not None
    image = Image.open(io.BytesIO(picture.png))
    assert image.size == picture.size
    left = image.width - WIDTH
    first = [image.getpixel((left + x, 8)) for x in range(WIDTH)]
    second = [image.getpixel((left + x, 24)) for x in range(WIDTH)]
    train, wait = first[0], first[-1]
    assert train != wait and first == [train] * (WIDTH // 4) + [wait] * (WIDTH * 3 // 4)
    assert second == [(255, 255, 255)] * (WIDTH // 2) + [wait] * (WIDTH // 2)


def test_where_states_share_a_pixel_the_longest_is_drawn():
    timeline = Timeline()
    spans = [Span("long" if number % 2 else "short", at, end, {}) for number, at, end in quarters(5000)]
    timeline.spans["rollout-0"] = spans
    picture = draw(timeline)
    assert picture is not None
    image = Image.open(io.BytesIO(picture.png))
    colours = [image.getpixel((image.width - WIDTH + x, 8)) for x in range(WIDTH)]
    assert len(set(colours)) == 1


def quarters(num: int) -> list[tuple[int, float, float]]:
    """States in turns, of .25 and .75 seconds."""
    ends = [(number, number // 2 + (0.25 if number % 2 else 0.0)) for number in range(num)]
    return [(number, at, at + (0.75 if number % 2 else 0.25)) for number, at in ends]


def test_a_picture_is_bounded_and_there_is_none_of_nothing():
    timeline = Timeline()
    assert draw(timeline) is None
    for number in range(2 * MOST_LANES):
        timeline.spans[f"rollout-{number}"] = [Span(f"state {number}", 0.0, 0.0, {})]
    picture = draw(timeline)
    assert picture is not None and picture.size[1] < 1200 and len(picture.png) < 100_000
