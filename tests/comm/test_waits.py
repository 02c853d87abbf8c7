"""Named waits: their errors, their sums, and threads that do not end."""

import logging
import re
import threading

import pytest

from headrace.comm.errors import WaitTimeout
from headrace.comm.waits import join_thread, set_identity, waited_seconds, waiting


@pytest.fixture(autouse=True)
def as_rollout_3():
    set_identity("rollout 3")
    yield
    set_identity("a test")


def test_a_wait_past_its_deadline_names_both_sides_and_shows_the_stacks():
    with pytest.raises(WaitTimeout) as raised, waiting("relay 1", "version 42", deadline_s=0.01) as wait:
        wait.until(lambda: None)
    assert re.match(r"rollout 3 waits for relay 1, version 42, \d+ s\n", str(raised.value))
    assert "test_a_wait_past_its_deadline" in str(raised.value)


def test_a_wait_returns_the_result_once_it_is_ready():
    answers = iter([None, 0, "here"])
    with waiting("hub", "an answer", deadline_s=5) as wait:
        assert wait.until(lambda: next(answers)) == "here"


def test_a_wait_timeout_is_a_timeout_error():
    with pytest.raises(TimeoutError), waiting("hub", "nothing", deadline_s=0.0) as wait:
        wait.check()


def test_a_wait_names_both_sides_and_its_age():
    with waiting("relay 0", "version 1", deadline_s=5) as wait:
        assert re.fullmatch(r"rollout 3 waits for relay 0, version 1, \d+ s", str(wait))


def test_waited_seconds_add_up_for_each_side_waited_for():
    before = waited_seconds().get("relay 9", 0.0)
    event = threading.Event()
    for _ in range(2):
        with waiting("relay 9", "nothing", deadline_s=5):
            event.wait(0.02)
    assert waited_seconds()["relay 9"] - before >= 0.04
    with waiting("relay 9", "more", deadline_s=1000) as wait:
        event.wait(0.01)
        assert waited_seconds()["relay 9"] - before >= 0.05
        assert 0 < wait.remaining_s < 1000


def test_a_thread_that_does_not_end_is_named_in_the_log(caplog):
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait, args=(60,), name="stubborn", daemon=True)
    thread.start()
    with caplog.at_level(logging.ERROR):
        join_thread(thread, 0.01)
    assert "stubborn" in caplog.text
    is_over.set()
    caplog.clear()
    join_thread(thread, 60)
    assert not caplog.text and not thread.is_alive()
