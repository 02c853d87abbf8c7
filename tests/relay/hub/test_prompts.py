"""A prompt that no rollout can use is dropped once, and passed over from then on."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hub_scene import Scene

from headrace.comm.messages import (
    DropRows,
    LeaseGrant,
    LeaseRequest,
    PromptRefused,
    QueueRestored,
    RowDone,
    RowRef,
)
from headrace.comm.messages.base import GroupId
from headrace.relay.dataset.order import MixedPrompts, PromptPool
from headrace.relay.dataset.rows import JsonLines
from headrace.relay.dataset.user_rows import UserRows
from headrace.relay.hub import prompts
from headrace.relay.hub.prompts import Curriculum
from headrace.relay.journal import events as ev
from headrace.relay.journal.files import read_events
from headrace.relay.journal.replay import replay


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path, lead=100)
    yield scene
    scene.close()


def give(scene: Scene, folder: Path, *rows: str) -> None:
    """Have the hub lease these rows in order."""
    path = folder / "other.jsonl"
    path.write_text("".join(f"{row}\n" for row in rows))
    scene.hub.prompts.pool = PromptPool(JsonLines(path), shuffle=False, seed=0)


def leased(scene: Scene, request: int, num_groups: int) -> list[GroupId]:
    return [lease.group for lease in scene.lease(request=request, num_groups=num_groups).leases]


def drops(scene: Scene) -> list[tuple[int, str]]:
    events = [event for _, event in read_events(scene.path)]
    return [(event.group.prompt, event.reason) for event in events if isinstance(event, ev.PromptDropped)]


GOOD = '{"prompt": "p"}'


def test_a_row_that_cannot_be_used_is_dropped_once_and_passed_over_in_every_epoch(
    scene: Scene, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    give(scene, tmp_path, GOOD, "not JSON", GOOD, '{"prompt": 3}', GOOD)
    groups = leased(scene, 1, 4) + leased(scene, 2, 4)
    assert [(group.epoch, group.prompt) for group in groups] == [(e, p) for e in range(3) for p in (0, 2, 4)][:8]
    (first, why), (second, _) = drops(scene)
    assert (first, second) == (1, 3) and "is not JSON" in why
    assert "dropped prompts: 1, the last one because row 2 is not JSON" in capsys.readouterr().out
    state = scene.hub.state
    assert state.cursor == 13 and state.account.leased == 16 and state.is_balanced
    assert replay(scene.path) == state


def test_a_lease_reads_its_row_once(scene: Scene, tmp_path: Path):
    read: list[int] = []

    class Counted(JsonLines):
        def __getitem__(self, index: int, /) -> bytes:
            read.append(index)
            return super().__getitem__(index)

    give(scene, tmp_path, GOOD, "not JSON", GOOD)
    scene.hub.prompts.pool = PromptPool(Counted(tmp_path / "other.jsonl"), shuffle=False, seed=0)
    assert [group.prompt for group in leased(scene, 1, 2)] == [0, 2] and read == [0, 1, 2]


def test_a_prompt_that_a_rollout_refuses_is_not_leased_again_and_its_rows_have_failed(scene: Scene, tmp_path: Path):
    give(scene, tmp_path, GOOD, GOOD)
    first, second = leased(scene, 1, 2)
    for attempt in (2, 1, 1):  # that of an earlier holder, and a repeated report
        scene.say("rollout-0", PromptRefused(first, attempt, "it is too long"))
    assert drops(scene) == [(0, "it is too long")]
    state = scene.hub.state
    assert list(state.groups) == [second] and state.account.failed == 2 and state.failures["it is too long"] == 2
    assert leased(scene, 2, 2) == [GroupId(1, 1), GroupId(2, 1)]
    assert state.is_balanced and replay(scene.path) == state


def test_a_refused_prompt_evicts_those_rows_of_its_group_that_are_ready(scene: Scene, tmp_path: Path):
    give(scene, tmp_path, GOOD, GOOD)
    lease, other = scene.lease(num_groups=2).leases
    scene.say("rollout-0", RowDone(lease.group.row(0), lease.attempt, 0, ["relay-0#1"], 5, 0.5))
    scene.say("rollout-0", PromptRefused(lease.group, lease.attempt, "it is too long"))
    state = scene.hub.state
    assert list(state.groups) == [other.group] and (state.account.failed, state.account.evicted) == (1, 1)
    assert [DropRows([lease.group.row(0).key(1)])] == [m for m in scene.heard("relay-0") if isinstance(m, DropRows)]
    assert state.is_balanced and replay(scene.path) == state


def test_a_group_that_comes_back_is_leased_again_only_if_its_row_can_still_be_used(scene: Scene, tmp_path: Path):
    give(scene, tmp_path, GOOD, GOOD, GOOD)
    first, second, _ = leased(scene, 1, 3)
    scene.hub.on_process_death("rollout-0", "dead")
    give(scene, tmp_path, "not JSON", GOOD, GOOD)
    lease = scene.lease("rollout-1").leases[0]
    assert lease.group == second and lease.attempt == 2 and first not in scene.hub.state.groups
    assert [prompt for prompt, _ in drops(scene)] == [0]
    assert scene.hub.state.is_balanced and replay(scene.path) == scene.hub.state


def test_a_resumed_run_tries_dropped_prompts_again_and_still_counts_them(scene: Scene, tmp_path: Path):
    give(scene, tmp_path, "not JSON", GOOD)
    assert leased(scene, 1, 1) == [GroupId(0, 1)]
    scene.hub.context.commit(ev.Opened(epoch=2, samples_per_prompt=2))
    give(scene, tmp_path, GOOD, GOOD)
    assert leased(scene, 2, 2) == [GroupId(0, 1), GroupId(1, 0)]
    assert list(scene.hub.state.dropped) == [0] and replay(scene.path) == scene.hub.state


def test_a_run_whose_prompts_are_all_dropped_ends_with_the_reason(scene: Scene, tmp_path: Path):
    give(scene, tmp_path, "1", "2")
    scene.say("rollout-0", LeaseRequest(1, 0, 1))
    assert not [message for message in scene.heard("rollout-0") if isinstance(message, LeaseGrant)]
    assert scene.hub.context.failure == (
        "data.path: no prompt is left that can be used; 2 are dropped, the last one because row 2 has no `prompt` column;"
        " it is not an object with columns; see data.prompt_column"
    )


def test_the_good_prompts_of_a_set_with_a_small_weight_are_found_among_dropped_ones(scene: Scene, tmp_path: Path):
    for name, rows in (("large", ["1"] * 9), ("small", [*["1"] * 8, GOOD])):
        (tmp_path / name).write_text("".join(f"{row}\n" for row in rows))
    pools = [PromptPool(JsonLines(tmp_path / name), shuffle=False, seed=0) for name in ("large", "small")]
    scene.hub.prompts.pool = MixedPrompts(pools, (17, 1), seed=0)
    assert leased(scene, 1, 1) == [GroupId(0, 17)] and not scene.hub.context.failure


def test_an_error_of_the_python_file_that_makes_the_rows_ends_the_run_with_its_line(scene: Scene, tmp_path: Path):
    text = "class Rows(list):\n    def __getitem__(self, index):\n        return {'prompt': {0: 'p'}[index]}\n"
    (tmp_path / "rows.py").write_text(f"{text}\n\nROWS = Rows([1, 2])\n")
    scene.hub.prompts.pool = PromptPool(UserRows(f"{tmp_path}/rows.py:ROWS"), shuffle=False, seed=0)
    assert leased(scene, 1, 1) == [GroupId(0, 0)]
    scene.say("rollout-0", LeaseRequest(2, 0, 1))
    assert re.fullmatch(
        r"data\.path: .*/rows\.py:ROWS: row 2: KeyError: 1 \(.*/rows\.py:3\)", scene.hub.context.failure
    )


def with_curriculum(scene: Scene, folder: Path, chance: Callable[[int, dict[str, Any]], float]) -> None:
    scene.hub.prompts.__init__(scene.hub.context, scene.hub.prompts.pool, Curriculum(chance, seed=1))
    give(scene, folder, *(json.dumps({"prompt": "p", "level": i}) for i in range(8)))


def test_a_curriculum_chooses_rows_by_the_steps_trained_so_far(scene: Scene, tmp_path: Path):
    with_curriculum(scene, tmp_path, lambda step, row: row["level"] < 2 + 4 * step)
    state = scene.hub.state
    assert [group.prompt for group in leased(scene, 1, 4)] == [0, 1, 0, 1] and state.cursor == 10
    state.step = 1
    assert [group.prompt for group in leased(scene, 2, 5)] == [2, 3, 4, 5, 0] and state.cursor == 17
    state.step = 0
    assert replay(scene.path) == state, "the journal has the position, whatever the function says later"


def test_a_chance_is_drawn_for_each_turn_of_a_row_and_is_the_same_when_it_is_asked_again(scene: Scene, tmp_path: Path):
    with_curriculum(scene, tmp_path, lambda step, row: 0.25)
    taken = leased(scene, 1, 64)
    assert 0.15 < len(taken) / scene.hub.state.cursor < 0.35
    assert all(map(scene.hub.prompts.is_offered, taken)) and len({group.prompt for group in taken}) > 4


def test_small_chances_on_few_rows_do_not_end_the_run(scene: Scene, tmp_path: Path):
    with_curriculum(scene, tmp_path, lambda step, row: 0.001 * (row["level"] == 5))
    assert [group.prompt for group in leased(scene, 1, 2)] == [5, 5]


def test_a_search_that_takes_too_long_ends_the_run(scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompts, "_LONGEST_SEARCH_S", 0.0)
    with_curriculum(scene, tmp_path, lambda step, row: 0.001)
    scene.say("rollout-0", LeaseRequest(1, 0, 1))
    assert "no prompt that can be used was found in 0 s" in scene.hub.context.failure


@pytest.mark.parametrize(
    ("chance", "reason"),
    [
        (lambda step, row: row["missing"], r"data\.curriculum: row 1: KeyError: 'missing'"),
        (lambda step, row: 2, r"row 1: ValueError: the probability of a row is 2; it must be from 0 to 1"),
        (lambda step, row: float("nan"), r"the probability of a row is nan"),
        (lambda step, row: False, r"no prompt is left that can be used and that data\.curriculum takes at step 0"),
    ],
)
def test_a_curriculum_that_fails_or_takes_nothing_ends_the_run(
    scene: Scene, tmp_path: Path, chance: Callable[[int, dict[str, Any]], float], reason: str
):
    with_curriculum(scene, tmp_path, chance)
    scene.say("rollout-0", LeaseRequest(1, 0, 1))
    assert re.search(reason, scene.hub.context.failure) and not scene.hub.state.groups


def test_a_saved_queue_takes_its_place_behind_a_dropped_prompt(scene: Scene, tmp_path: Path):
    give(scene, tmp_path, GOOD, "not JSON", GOOD, GOOD)
    saved = RowRef(GroupId(0, 2).row(0), 1, ["relay-0#1"], version=0, num_tokens=5, reward=0.5)
    scene.say("relay-0", QueueRestored(0, 4, [saved]))
    assert list(scene.hub.state.groups) == [GroupId(0, 0), GroupId(0, 2)] and scene.hub.state.cursor == 3
    assert leased(scene, 1, 3) == [GroupId(0, 0), GroupId(0, 2), GroupId(0, 3)]
    assert replay(scene.path) == scene.hub.state
