"""The picture of a run: what stands out, what is left out, and what fits on a terminal."""

import re

from headrace.comm.messages import MemberStatus, StatusReport, WaitStatus
from headrace.launch.status.picture import describe, lines, paint

QUEUE = {"step": 16, "in_training": 5, "ready": 3, "begun": 8, "window": 24}


def member(name: str, state: str = "", seconds: float = 0.0, **facts: float) -> MemberStatus:
    known = {"host": "here", "incarnation": 1, "leased": 0} | facts
    return MemberStatus(name, state=state, seconds=seconds, **known)  # pyright: ignore[reportArgumentType]


def report(*members: MemberStatus, waits: tuple[WaitStatus, ...] = (), **facts: object) -> StatusReport:
    known = {"num_steps": 100, "elapsed_s": 125.0, "queue": QUEUE} | facts
    return StatusReport(12, 12, [*members], {"leased": 9, "holds": True}, waits=[*waits], **known)  # pyright: ignore[reportArgumentType]


def texts(shown: StatusReport, most: int = 99) -> list[str]:
    return [line.text for line in lines(shown, most)]


def test_the_first_line_says_how_far_the_run_is_and_how_long_it_takes():
    assert texts(report())[0] == "12 of 100 steps   2:05 elapsed"
    later = texts(report(reward=0.398, step_s=1.92, left_s=185.0))[0]
    assert later == "12 of 100 steps   reward 0.398   1.9 s a step   2:05 elapsed   3 min left"


def test_each_process_has_a_line_with_its_state_its_version_and_its_speed():
    shown = texts(
        report(
            member("actor-0", "waits", 3.2, version=12),
            member("rollout-0", "generates", 99.0, version=11, tokens_per_s=1203.4, leased=41),
            member("rollout-1", "loads", 12.0, incarnation=2),
        )
    )
    assert shown[2] == "actor-0    waits 3 s   version 12"
    assert re.fullmatch(r"rollout-0  generates   version 11 +1,203 tok/s  41 trajectories", shown[3])
    assert shown[4].startswith("rollout-1  loads 12 s") and shown[4].endswith("started 2 times")


def test_the_hosts_are_shown_where_there_are_several():
    alone = report(member("actor-0", "trains"), member("rollout-0", "generates"))
    assert not [text for text in texts(alone) if "here" in text]
    several = report(member("actor-0", "trains"), MemberStatus("rollout-0", "there", 1, 0, "generates"))
    assert [text for text in texts(several) if "there" in text]


def test_who_waits_for_whom_stands_below_the_processes_and_a_long_wait_stands_out():
    waits = (WaitStatus("actor-0", "rollout-1", "groups", 12.0), WaitStatus("rollout-0", "actor-0", "room", 3.0))
    shown = [*lines(report(member("actor-0"), waits=waits))][-2:]
    assert [line.text for line in shown] == [
        "actor-0 waits for rollout-1: groups, 12 s", "rollout-0 waits for actor-0: room, 3 s",
    ]  # fmt: skip
    assert shown[0].style == "yellow" != shown[1].style
    assert not [text for text in texts(report(waits=waits, ending="interrupted")) if "waits" in text]


def test_of_many_rollouts_the_silent_ones_are_shown_and_the_others_are_summed_up():
    many = [member(f"rollout-{index}", "generates", tokens_per_s=10.0) for index in range(64)]
    many[50] = member("rollout-50", "silent", 7.0)
    shown = texts(report(member("actor-0", "trains"), *many), most=6)
    assert len(shown) == 2 + 6 + 1
    assert [text for text in shown if text.startswith("rollout-50") and "silent 7 s" in text]
    assert shown[-1] == "59 more: 59 generates; 590 tok/s"
    assert len(texts(report(*many))) == 2 + 64


def test_painted_lines_fit_the_terminal_and_plain_ones_have_no_control_characters():
    shown = report(
        member("actor-0", "waits"), waits=(WaitStatus("actor-0", "x" * 300, "groups", 60.0),), alarm="a" * 200
    )
    for width in (20, 79):
        painted = paint([*lines(shown)], width)
        bare = [re.sub("\x1b\\[[0-9;]*m", "", line) for line in painted]
        assert len(painted) == len([*lines(shown)]) and max(map(len, bare)) == width
    assert "".join(describe(shown)).isprintable()
    assert [*describe(shown)][-1] == "rows: leased 9, holds True"
    assert [line for line in describe(shown) if line.startswith("last alarm, aaa")]
