"""Second copies of the training state on other hosts: what one supervisor has is enough for all ranks."""

import threading
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from support.actors import on_two_ranks
from support.closing import at_end
from support.policies import tiny_policy

from headrace.comm.shared_memory import Segment
from headrace.relay.weights.partners import Partners
from headrace.relay.weights.slots import StoredVersion
from headrace.trainer.learners.second_copies import SecondCopies

TWO_HOSTS = """
import os
from pathlib import Path
from types import SimpleNamespace
from headrace.comm.environment import SECOND_FD, SEGMENT_FD
from headrace.comm.host_memory import HeldMemory
from headrace.comm.memfd import create_memory
from headrace.comm.shared_memory import Segment
from headrace.launch.config.run_folder import start_in
from headrace.launch.placement import Placement
from headrace.launch.processes.copies_writer import CopiesWriter
from headrace.relay.weights.copies_on_disk import CopiesOnDisk
from headrace.relay.weights.slots import VersionSlots
from headrace.trainer.learners.copy_thread import Pace
from headrace.trainer.learners.state_copies import StateCopies
from headrace.trainer.learners.state_layout import StateLayout


class EachStep(Pace):
    steps = 1


run_dir = Path(args[1])
members = [SimpleNamespace(index=rank, host=f"host {rank}") for rank in range(2)]
fleet = SimpleNamespace(members=lambda role: members, me=members[group.rank])


def copies_of(actor):
    memories = {name: create_memory("copies") for name in (SEGMENT_FD, SECOND_FD)}
    os.environ.update({name: str(fd) for name, fd in memories.items()})
    actor.copies = StateCopies.of_supervisor(fleet, actor.state, group, run_dir)
    actor.copies.pace = EachStep(1)
    return memories


def settle(copies):
    copies.finish()
    if copies._second is not None:
        copies._second._thread.join(60)


def copied_step(actor, step):
    train(actor, [batch_of(step, group=group)])
    actor.copies.after_step()


undisturbed, dying, successor = (actor_of(recipe_of(args[0]), group) for _ in range(3))
memories = copies_of(dying)
"""

THREE_STEPS = """
for step in range(3):
    train(undisturbed, [batch_of(step, group=group)])
    copied_step(dying, step)
    settle(dying.copies)
assert dying.copies._second._slots.newest() == 3
assert dying.copies._second._slots.find(1) is None, "a rank may still prepare its memory for the first copy"
"""

ONE_HOST_IS_LOST = """
placement = Placement("actor", group.rank, group.rank, 0)
if group.rank == 1:  # the supervisor of the host that lives
    CopiesWriter(run_dir, placement, 2, start_in(run_dir)).write(memories, has_ended=False)
group.all_reduce_max([0.0])
assert [CopiesOnDisk(run_dir).newest(0, most, 2)[0] for most in (2, 3)] == [2, 3]
copies_of(successor)
assert successor.copies.newest(9) == 3 and successor.copies.source == "the copy in the run folder"
successor.copies.restore(3)
norms = [train(each, [batch_of(3, group=group)])["actor/grad_norm"] for each in (undisturbed, successor)]
assert norms[0] == norms[1], norms
for ours, theirs in zip(successor.policy.parameters(), undisturbed.policy.parameters(), strict=True):
    assert torch.equal(ours.to_local(), theirs.to_local())
"""

ANOTHER_HISTORY = """
own, second = (VersionSlots(Segment.inherited(name)) for name in (SEGMENT_FD, SECOND_FD))
assert [[stored.version for stored in each.complete_versions()] for each in (own, second)] == [[2, 3]] * 2
successor.copies = StateCopies.of_supervisor(fleet, successor.state, group, run_dir)
successor.copies.restore(successor.copies.newest(2))
assert [[stored.version for stored in each.complete_versions()] for each in (own, second)] == [[2]] * 2
successor.copies.forget()
assert not own.complete_versions() and not second.complete_versions()
"""

NO_ROOM = """
from headrace.trainer.learners import state_copies
second = VersionSlots(Segment.inherited(SECOND_FD))
held = second.segment.held_bytes
successor.copies = StateCopies.of_supervisor(fleet, successor.state, group, run_dir)
successor.copies.restore(successor.copies.newest(9))
successor.copies.pace = EachStep(1)
state_copies.memory_bytes = lambda: 0
# There is room for the own copies alone, and then for none.
successor.copies._second._slots.segment.free()
state_copies.held_by = lambda _: HeldMemory(1000, 10, 1000)
state_copies.free_bytes = lambda: 10_000
copied_step(successor, 3)
assert successor.copies._second is None and second.segment.held_bytes < 20_000 < held
successor.copies.finish()
assert successor.copies.newest(9) == 4, "the own ones have their memory"
"""

A_FAILURE = """
second = dying.copies._second
second._deadline_s = 0.2
if group.rank == 1:
    second._exchange = lambda *_: 1 / 0
copied_step(dying, 3)
settle(dying.copies)
assert second.is_off and dying.copies.newest(9) == 4
copied_step(dying, 4)
dying.copies.finish()
assert dying.copies._second is None and dying.copies.newest(9) == 5
"""

SLOW_TO_PREPARE = """
import threading
may_prepare = threading.Event()
second = dying.copies._second
second._deadline_s = 0.2
prepare = second._slots.prepare
second._slots.prepare = lambda *args: (group.rank == 0 or may_prepare.wait(60)) and prepare(*args)
for step in range(3):
    copied_step(dying, step)
    dying.copies.finish()
assert second._slots.newest() is None and dying.copies.newest(9) == 3
may_prepare.set()
settle(dying.copies)
own = float(StateLayout(dying.state.state_dict()).num_bytes)
sizes = group.all_reduce_max([own * (group.rank == 0), own * (group.rank == 1)])
assert not second.is_off and second.num_bytes == sizes[1 - group.rank]
second._deadline_s = 60
copied_step(dying, 3)
settle(dying.copies)
assert not second.is_off and second._slots.newest() == 4
"""

SLOW_TO_SEND = """
import threading
may_send = threading.Event()
copied_step(dying, 0)
settle(dying.copies)
second = dying.copies._second
swap = second._swap
second._swap = lambda *args: (group.rank == 0 or may_send.wait(60)) and swap(*args)
costs = []
dying.copies.pace.add_copy = lambda cpu_s, stall_s: costs.append(cpu_s)
copied_step(dying, 1)
for step in (2, 3):
    copied_step(dying, step)
assert second.is_sending and second._slots.newest() is None, "neither updates nor steps wait for it"
assert dying.copies._slots.newest() == 2, "the slots are kept that other hosts have, or will have"
threading.Timer(0.5, may_send.set).start()
held, kept = dying.copies.hold({})
assert second._slots.newest() in (2, 4), "a checkpoint waits for it, and its own copy may be there already"
settle(dying.copies)
dying.copies.release(kept)
copied_step(dying, 4)
settle(dying.copies)
assert [stored.version for stored in second._slots.complete_versions()] == [4, 5]
assert costs[1] > 0.5, "the exchange of the copy before costs time, too"
may_send.clear()
copied_step(dying, 5)
dying.copies.finish()
assert second.is_sending
dying.copies.close()
assert second.is_at_work, "the end does not wait for it"
group.all_reduce_max([0.0])
may_send.set()
second._thread.join(60)
"""

LONG_TO_SEND = """
import threading
from headrace.trainer.learners import second_copies
copied_step(dying, 0)
settle(dying.copies)
second_copies._EXCHANGE_S = 0.2
may_send = threading.Event()
second = dying.copies._second
swap = second._swap
second._swap = lambda *args: (group.rank == 0 or may_send.wait(60)) and swap(*args)
copied_step(dying, 1)
if group.rank == 0:
    settle(dying.copies)
group.all_reduce_max([0.0])
may_send.set()
settle(dying.copies)
assert second.is_off and not second.sent
copied_step(dying, 2)
dying.copies.finish()
assert dying.copies._second is None and dying.copies.newest(9) == 3
"""


def test_the_supervisors_of_one_host_have_the_copies_of_all_ranks(tmp_path: Path):
    (tmp_path / "config.yaml").touch()
    on_two_ranks(tmp_path, TWO_HOSTS + THREE_STEPS + ONE_HOST_IS_LOST, policy_in(tmp_path), tmp_path)


def test_the_second_copies_of_a_history_that_is_trained_again_are_given_up(tmp_path: Path):
    on_two_ranks(tmp_path, TWO_HOSTS + THREE_STEPS + ANOTHER_HISTORY, policy_in(tmp_path), tmp_path)


def test_where_there_is_room_for_the_own_copies_alone_the_second_ones_are_given_back(tmp_path: Path):
    on_two_ranks(tmp_path, TWO_HOSTS + THREE_STEPS + NO_ROOM, policy_in(tmp_path), tmp_path)


def test_a_partner_that_sends_nothing_ends_the_exchange_and_not_the_training(tmp_path: Path):
    on_two_ranks(tmp_path, TWO_HOSTS + THREE_STEPS + A_FAILURE, policy_in(tmp_path), tmp_path)


def test_a_rank_that_prepares_its_memory_for_long_delays_neither_training_nor_an_exchange(tmp_path: Path):
    on_two_ranks(tmp_path, TWO_HOSTS + SLOW_TO_PREPARE, policy_in(tmp_path), tmp_path)


def test_training_does_not_wait_for_an_exchange(tmp_path: Path):
    on_two_ranks(tmp_path, TWO_HOSTS + SLOW_TO_SEND, policy_in(tmp_path), tmp_path)


def test_an_exchange_whose_pieces_arrive_but_take_too_long_together_is_the_last(tmp_path: Path):
    on_two_ranks(tmp_path, TWO_HOSTS + LONG_TO_SEND, policy_in(tmp_path), tmp_path)


def test_a_machine_without_room_for_another_thread_ends_the_exchanges_and_not_the_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    segment = Segment.create_anonymous("copies")
    at_end(segment.close)
    second = SecondCopies(segment, Partners(0, 0), cast(Any, None), 60)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    second.begin(StoredVersion(3, "0", 1, 2), np.zeros(1, np.uint8))
    assert second.is_off and not second.sent and not second.is_at_work
    assert "sent to other hosts: RuntimeError: can't start new thread" in capsys.readouterr().out


def policy_in(folder: Path) -> Path:
    return tiny_policy(folder, "llama", hidden_size=128, intermediate_size=256)
