"""The metrics of turns, environments and tools are those of the step's trajectories, on all ranks together."""

import msgspec
import pytest

from headrace.rollout.environments.base import UNKNOWN, Episode, ToolUse
from headrace.trainer.turn_metrics import MOST_NAMES, TurnMetrics


def noted(num_turns: int, calls: list[ToolUse] | None, seconds: float = 0.5) -> dict[str, object]:
    """What the row of a trajectory carries, as the trainer reads it."""
    episode = Episode("p")
    for turn in range(num_turns):
        episode.end_turn("c", [1] * (turn + 1))
        episode.note(seconds, calls if turn == 0 else None if calls is None else [])
    return msgspec.json.decode(msgspec.json.encode(episode.figures()))


def test_calls_failures_turns_and_seconds_of_a_step():
    stats = TurnMetrics()
    stats.add(noted(3, [ToolUse("calc", False, 0.1), ToolUse("calc", True, 0.3), ToolUse(UNKNOWN, True, 0.0)]), 12)
    stats.add(noted(1, []), 0)
    found = stats.metrics()
    assert (found["turns/mean"], found["turns/max"], found["turns/observation_tokens"]) == (2, 3, 6)
    assert (found["tools/calls_mean"], found["tools/called_frac"]) == (1.5, 0.5)
    assert found["tools/failed_frac"] == pytest.approx(2 / 3)
    assert (found["tools/calc/calls"], found["tools/calc/failed"]) == (2, 1)
    assert (found["tools/unknown/calls"], found["tools/unknown/failed"]) == (1, 1)
    assert found["environment/seconds_mean"] == 0.5 and found["tools/seconds_mean"] == pytest.approx(0.4 / 3)
    assert 0.1 < found["tools/seconds_p95"] <= 0.3


def test_a_policy_that_never_calls_its_tools_is_seen_and_a_run_without_tools_has_none():
    with_tools, without, bare = TurnMetrics(), TurnMetrics(), TurnMetrics()
    with_tools.add(noted(1, []), 0)
    without.add(noted(2, None), 4)
    assert with_tools.metrics()["tools/called_frac"] == 0
    assert not [name for name in without.metrics() if name.startswith("tools/")] and without.metrics()["turns/max"] == 2
    assert bare.metrics() == {}


def test_the_number_of_names_is_bounded():
    stats = TurnMetrics()
    calls = [
        ToolUse(f"tool{index:02}", index % 2 == 0, 0.0) for index in range(MOST_NAMES + 8) for _ in range(index + 1)
    ]
    stats.add(noted(1, calls), 0)
    found = stats.metrics()
    assert sum(name.endswith("/calls") for name in found) == MOST_NAMES + 1
    assert found["tools/others/calls"] == sum(range(1, 9)) and found["tools/others/failed"] == 1 + 3 + 5 + 7
    assert sum(value for name, value in found.items() if name.endswith("/calls")) == len(calls)


class Ranks:
    """A group of ranks, of which this one gets the parts of the others."""

    def __init__(self, *others: TurnMetrics) -> None:
        self.size = 1 + len(others)
        self._others = others

    def gather(self, data: bytes) -> list[bytes]:
        parts: list[bytes] = []
        for other in self._others:
            other.reduce(_Sender(parts))  # pyright: ignore[reportArgumentType]
        return [data, *parts]


class _Sender:
    size = 2

    def __init__(self, parts: list[bytes]) -> None:
        self._parts = parts

    def gather(self, data: bytes) -> list[bytes]:
        self._parts.append(data)
        return []


def test_the_metrics_of_two_ranks_are_those_of_all_their_trajectories():
    parts = [
        (noted(3, [ToolUse("calc", False, 0.1), ToolUse("calc", True, 0.3)]), 12),
        (noted(1, [ToolUse("search", False, 0.2)]), 5),
        (noted(2, []), 0),
    ]
    whole, first, second, idle = (TurnMetrics() for _ in range(4))
    for trajectory in parts:
        whole.add(*trajectory)
    first.add(*parts[0])
    for trajectory in parts[1:]:
        second.add(*trajectory)
    first.reduce(Ranks(second, idle))  # pyright: ignore[reportArgumentType]
    assert first.metrics() == pytest.approx(whole.metrics()) and first.metrics()["tools/search/failed"] == 0
    assert second.metrics() == {}, "rank 0 records them"
