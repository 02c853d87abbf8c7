"""The log of a child: what happened stands in it with the time, and its last lines on the console are about an error."""

import re
import sys
from pathlib import Path

from support.polling import wait_for

from headrace.launch.processes.child import Child

PROGRAM = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
log = logging.getLogger("role")
log.info("rollout-0 joined as incarnation 1")
sys.stderr.write("Traceback (most recent call last):\\nValueError: no such prompt\\n")
log.info("rollout-0 leaves with exit code 1")
sys.exit(1)
"""


def end(child: Child) -> None:
    wait_for(lambda: child.poll() is not None, lambda: True, lambda: "it runs", patience_s=120.0)


def test_the_last_lines_of_a_log_pass_over_what_happens_in_every_run(tmp_path: Path):
    child = Child("rollout-0", [sys.executable, "-c", PROGRAM], log=tmp_path / "logs" / "rollout-0.log")
    end(child)
    child.note("rollout-0 ended with exit code 1")
    assert child.last_line() == ": ValueError: no such prompt"
    assert child.log_tail().endswith("log:\n    Traceback (most recent call last):\n    ValueError: no such prompt")
    lines = (tmp_path / "logs" / "rollout-0.log").read_text().splitlines()
    events = [line for line in lines if re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO ", line)]
    assert len(events) == 3 and events[-1].endswith(": rollout-0 ended with exit code 1")


def test_a_note_about_a_log_that_is_gone_is_lost(tmp_path: Path):
    child = Child("rollout-0", [sys.executable, "-c", ""], log=tmp_path / "logs" / "rollout-0.log")
    end(child)
    (tmp_path / "logs" / "rollout-0.log").unlink()
    (tmp_path / "logs").rmdir()
    child.note("it ended")
    assert not (tmp_path / "logs").exists()
