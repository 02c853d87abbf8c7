"""The terminal of a run, on a pseudo-terminal: its lines scroll above the picture, and nothing of the picture stays."""

import os
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from support.terminal import Terminal

PATIENCE_S = 120.0
PROGRAM = '''
import os, signal, subprocess, sys
from pathlib import Path
import headrace.launch.status.live as live

class Stub(live.Reports):
    """Shows two lines that count the pictures; no hub is asked."""
    drawn = 0

    def start(self): pass
    def close(self): pass
    def picture(self, size):
        self.drawn += 1
        return ["-" * 10, f"\\x1b[1mpicture {self.drawn}\\x1b[0m"]

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
live.Reports = Stub
live.REFRESH_S = 0.02
child = """
import os, sys
for number in range(200):
    print("line", number, flush=True)
    print("warning", number, file=sys.stderr, flush=True)
with open(sys.argv[1]) as go:
    go.read()
print("last line")
sys.stdout.write("without an end")
"""
with live.live_terminal(Path(sys.argv[2]), is_first=True) as terminal:
    started = subprocess.Popen([sys.executable, "-c", child, sys.argv[1]])
    if terminal is not None:
        terminal.start()
    try:
        started.wait()
    except KeyboardInterrupt:
        started.kill()
        print("interrupted")
print("the end")
'''
WRITTEN = [text for number in range(200) for text in (f"line {number}", f"warning {number}")]


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    os.mkfifo(tmp_path / "go")
    return [sys.executable, "-c", PROGRAM, str(tmp_path / "go"), str(tmp_path)]


def go(tmp_path: Path) -> None:
    (tmp_path / "go").write_text("go")


def words(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


def test_lines_scroll_above_the_picture_which_leaves_nothing(command: list[str], tmp_path: Path):
    with Terminal(command, {}) as terminal:
        text = terminal.until(lambda text: "warning 199\n" in text and "picture" in text, PATIENCE_S)
        assert words(text)[-2] == "-" * 10 and text.count("picture") == 1
        assert sorted(words(text)[:-2]) == sorted(WRITTEN), "each line is there once, and whole"
        drawn = words(text)[-1]
        terminal.until(lambda text: words(text)[-1] not in (drawn, "-" * 10) and "picture" in text, PATIENCE_S)
        go(tmp_path)
        code, text = terminal.end(PATIENCE_S)
    assert code == 0 and words(text)[-3:] == ["last line", "without an end", "the end"]
    assert "picture" not in text and "-" * 10 not in text
    assert sorted(words(text)[:-3]) == sorted(WRITTEN)


def test_the_terminal_needs_no_repair_however_the_launcher_ends(command: list[str]):
    with Terminal(command, {}) as terminal:
        before = termios.tcgetattr(terminal.descriptor)
        terminal.until(lambda text: "picture" in text, PATIENCE_S)
        os.kill(terminal.process.pid, signal.SIGKILL)
        terminal.process.wait(PATIENCE_S)
        assert termios.tcgetattr(terminal.descriptor) == before
        assert b"\x1b[?" not in terminal.raw, "the cursor was never hidden, nor any mode changed"


def test_ctrl_c_leaves_the_lines_alone(command: list[str]):
    with Terminal(command, {}) as terminal:
        terminal.until(lambda text: "warning 199\n" in text and "picture" in text, PATIENCE_S)
        os.kill(terminal.process.pid, signal.SIGINT)
        code, text = terminal.end(PATIENCE_S)
    assert code == 0 and words(text)[-2:] == ["interrupted", "the end"] and "picture" not in text


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"CI": "true"}])
def test_a_terminal_that_is_to_stay_plain_gets_no_control_characters(
    command: list[str], tmp_path: Path, environment: dict[str, str]
):
    with Terminal(command, environment) as terminal:
        terminal.until(lambda text: "warning 199\n" in text, PATIENCE_S)
        go(tmp_path)
        terminal.end(PATIENCE_S)
        assert b"\x1b" not in terminal.raw and b"picture" not in terminal.raw


def test_through_a_pipe_the_lines_are_plain(command: list[str], tmp_path: Path):
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        go(tmp_path)
        output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0 and "\x1b" not in output and "picture" not in output
    assert sorted(words(output)[:-2]) == sorted(WRITTEN)


STOPPED = """
import logging, os, sys, time
from pathlib import Path
import headrace.launch.status.live as live

class Stub(live.Reports):
    def start(self): pass
    def close(self): pass
    def picture(self, size): return ["picture"]

live.Reports = Stub
live.REFRESH_S = 0.05
folder = Path(sys.argv[1])
"""
UNREAD = """
logging.disable()  # it would wait for the terminal
live._JOIN_S = 0.05
with live.live_terminal(folder, is_first=True) as terminal:
    terminal.start()
    os.write(1, b"a line of the run\\n" * 20000)
others = [(folder / str(number)).open("wb") for number in range(8)]
(folder / "closed").write_text("closed")
terminal._thread.join()
"""
BACKGROUND = """
looks = []
live.is_foreground = lambda descriptor: looks.append(time.monotonic())
with live.live_terminal(folder, is_first=True) as terminal:
    terminal.start()
    deadline = time.monotonic() + 60
    while len(looks) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
print(f"5 turns took at least 0.2 s: {looks[5] - looks[0] >= 0.2}")
"""
CONTINUED = """
import signal
with live.live_terminal(folder, is_first=True) as terminal:
    terminal.start()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCONT])  # another thread gets it
    (folder / "go").read_text()
"""
ENDLESS = """
with live.live_terminal(folder, is_first=True) as terminal:
    terminal.start()
    os.write(1, b"\\r10 %" * 20000)
    input()
"""


def test_a_terminal_that_is_stopped_gets_the_rest_later_and_no_other_file_does(tmp_path: Path):
    os.mkfifo(tmp_path / "closed")
    with Terminal([sys.executable, "-c", STOPPED + UNREAD, str(tmp_path)], {}) as terminal:
        assert (tmp_path / "closed").read_text() == "closed"
        code, text = terminal.end(PATIENCE_S)
    assert code == 0 and text.count("a line of the run") == 20000
    assert not any((tmp_path / str(number)).read_bytes() for number in range(8)), "written to another file"


def test_a_launcher_in_the_background_looks_at_its_terminal_once_a_moment(tmp_path: Path):
    with Terminal([sys.executable, "-c", STOPPED + BACKGROUND, str(tmp_path)], {}) as terminal:
        code, text = terminal.end(PATIENCE_S)
    assert code == 0 and "5 turns took at least 0.2 s: True" in text and "picture" not in text


def test_a_line_without_an_end_is_shown_before_it_has_grown_large(tmp_path: Path):
    with Terminal([sys.executable, "-c", STOPPED + ENDLESS, str(tmp_path)], {}) as terminal:
        terminal.until(lambda text: "10 %" in text, PATIENCE_S)
        terminal.type(b"\n")
        assert terminal.end(PATIENCE_S)[0] == 0


def test_a_launcher_that_is_continued_draws_below_what_the_shell_has_written_since(tmp_path: Path):
    os.mkfifo(tmp_path / "go")
    with Terminal([sys.executable, "-c", STOPPED + CONTINUED, str(tmp_path)], {}) as terminal:
        terminal.until(lambda text: "picture" in text, PATIENCE_S)
        os.kill(terminal.process.pid, signal.SIGCONT)
        terminal.until(lambda text: text.count("picture") == 2, PATIENCE_S)
        go(tmp_path)
        code, text = terminal.end(PATIENCE_S)
    assert code == 0 and text.count("picture") == 1, "the one before stays, as the shell's lines do"
