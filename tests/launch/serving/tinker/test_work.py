"""Jobs come up in the order of their numbers, each once, and none waits for ever."""

import random
import threading

import pytest

from headrace.launch.serving.tinker import work as module
from headrace.launch.serving.tinker.work import Job, Work


class Log:
    """Jobs that note what happened to them."""

    def __init__(self) -> None:
        self.run: list[object] = []
        self.failed: dict[object, str] = {}

    def job(self, name: object) -> Job:
        return Job(lambda: self.run.append(name), lambda problem: self.failed.update({name: problem}))


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def work() -> Work:
    return Work(threading.Event())


def carry_out(work: Work, *, has_room: bool = True) -> None:
    while (job := work.next(lambda _: has_room)) is not None:
        job.run()


def test_jobs_of_a_model_come_up_in_the_order_of_their_numbers(work: Work, log: Log):
    numbers = list(range(1, 30))
    random.Random(0).shuffle(numbers)
    for number in numbers:
        work.add_numbered("a", number, log.job(number))
        carry_out(work)
    assert log.run == sorted(numbers)


def test_a_missing_number_of_one_model_holds_up_no_other(work: Work, log: Log):
    work.add_numbered("a", 2, log.job("a2"))
    work.add_numbered("b", 1, log.job("b1"))
    carry_out(work)
    assert log.run == ["b1"]
    assert work.overdue(lambda _: False) == []


def test_a_number_that_does_not_come_is_given_up(work: Work, log: Log, monkeypatch: pytest.MonkeyPatch):
    for number in (1, 3, 5):
        work.add_numbered("a", number, log.job(number))
    carry_out(work)
    monkeypatch.setattr(module, "GAP_S", -1.0)
    for job, problem in work.overdue(lambda _: False):
        job.fail(problem)
    assert log.run == [1]
    assert {number: "request 2 of a did not come" in problem for number, problem in log.failed.items()} == {
        3: True,
        5: True,
    }
    assert not work.add_numbered("a", 2, log.job(2)), "it comes too late"
    work.add_numbered("a", 6, log.job(6))
    carry_out(work)
    assert log.run == [1, 6]


def test_a_job_that_is_due_is_not_given_up_however_long_the_main_thread_is_busy(
    work: Work, log: Log, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "GAP_S", -1.0)
    monkeypatch.setattr(module, "PLACE_S", -1.0)
    work.add_numbered("a", 1, log.job(1))
    work.add_model("b", log.job("new"))
    assert work.overdue(lambda _: True) == []


def test_a_new_model_waits_for_room_but_not_for_ever(work: Work, log: Log, monkeypatch: pytest.MonkeyPatch):
    work.add_model("b", log.job("new"))
    work.add_numbered("a", 1, log.job("a1"))
    carry_out(work, has_room=False)
    assert log.run == ["a1"] and work.overdue(lambda _: False) == []
    monkeypatch.setattr(module, "PLACE_S", -1.0)
    ((job, problem),) = work.overdue(lambda _: False)
    job.fail(problem)
    assert "--models" in log.failed["new"]
    work.add_model("c", log.job("newer"))
    carry_out(work)
    assert log.run == ["a1", "newer"]


def test_jobs_of_a_model_that_is_held_wait_and_those_before_its_number_never_come_up(work: Work, log: Log):
    work.hold("a")
    for number in (1, 2, 3):
        assert work.add_numbered("a", number, log.job(number))
    work.add_numbered("b", 1, log.job("b1"))
    carry_out(work)
    assert log.run == ["b1"]
    assert len(work.resume("a", 3)) == 2
    carry_out(work)
    assert log.run == ["b1", 3]


def test_a_model_that_has_room_does_not_wait_for_one_that_has_none(work: Work, log: Log):
    work.add_model("new", log.job("new"))
    work.add_model("old", log.job("old"))
    job = work.next(lambda model_id: model_id == "old")
    assert job is not None
    job.run()
    assert log.run == ["old"]
