"""At the start of a run the console has one line for each thing that happens for the first time."""

import pytest

from headrace.comm.mailbox import Envelope
from headrace.comm.messages import GroupId, LoadReport, Message, RowDone, VersionReady, WeightsPulled
from headrace.relay.hub.start_lines import StartLines
from headrace.relay.journal.hub_state import HubState
from headrace.relay.journal.records import Row

ROW = GroupId(0, 0).row(0)


def load(tokens: int = 0, num_scoring: int = 0) -> LoadReport:
    return LoadReport(
        version=0, num_running=1, num_waiting=0, kv_util=0.0, tokens=tokens, busy_s=0.0, idle_s=0.0, pull_s=0.0,
        num_scoring=num_scoring,
    )  # fmt: skip


def done(reward: float | None, failure: str = "") -> RowDone:
    return RowDone(ROW, 1, 0, ["relay-0#1"], 7, reward, failure=failure)


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.strip().partition("  ")[2] for line in capsys.readouterr().out.splitlines()]


def look(lines: StartLines, state: HubState, *messages: tuple[str, Message]) -> None:
    for _ in range(2):  # each is told once
        for sender, message in messages:
            lines.look(Envelope(sender, message), state)


def test_each_phase_is_told_once_by_the_process_that_was_first(capsys: pytest.CaptureFixture[str]):
    lines = StartLines(["hub", "rollout-0"], is_told=False)
    state = HubState()
    lines.joined(["hub"])
    lines.joined(["hub", "rollout-0"])
    look(lines, state, ("relay-0/weights", VersionReady(0, "d")), ("rollout-0", WeightsPulled(0, "d")))
    state.held["rollout-0"] = {ROW: Row()}
    look(lines, state, ("rollout-1", WeightsPulled(0, "d")), ("rollout-0", load(tokens=5)))
    look(lines, state, ("rollout-0", load(tokens=9, num_scoring=1)), ("rollout-1", done(0.25)))
    state.in_training.append(GroupId(0, 0))
    look(lines, state, ("rollout-1", done(0.75)))
    assert lines_of(capsys) == [
        "all processes have joined; the policy is loading",
        "relay-0 has the weights of version 0, the first for the rollouts",
        "rollout-0 has taken version 0",
        "first prompts handed out, to rollout-0",
        "first tokens, by rollout-0",
        "first response, by rollout-0; its reward is being computed",
        "first reward, by rollout-1: 0.250 for 7 tokens",
        "first groups with the trainer: step 1 begins",
    ]


def test_what_happens_together_is_one_line_and_a_failed_response_is_no_reward(capsys: pytest.CaptureFixture[str]):
    lines = StartLines([], is_told=False)
    look(lines, HubState(), ("rollout-0", done(None, "it raised")), ("rollout-0", done(1.0)))
    assert lines_of(capsys) == ["first response and reward, by rollout-0: 1.000 for 7 tokens"]


def test_a_hub_that_is_started_again_repeats_nothing(capsys: pytest.CaptureFixture[str]):
    lines = StartLines(["hub"], is_told=True)
    lines.joined(["hub"])
    look(lines, HubState(), ("relay-0/weights", VersionReady(0, "d")), ("rollout-0", done(0.25)))
    assert not capsys.readouterr().out
