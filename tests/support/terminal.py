"""A command on a pseudo-terminal, and what a person sees there: the lines that the control sequences leave."""

import fcntl
import os
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self

_TOKEN = re.compile(rb"\x1b\[([0-9;?]*)([A-Za-z])|\x1b.|[\r\n]|[^\x1b\r\n]+", re.DOTALL)
_READ_S = 0.1


class Shown:
    """The lines of an endless terminal, after what was written to it. It knows the sequences that the product may write, and no others."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.lines = [""]
        self.styles: dict[int, str] = {}
        """The control sequence before the last text of a line, by its number; lines in the terminal's own colours have none."""
        self.row = 0
        self.column = 0
        self._style = ""
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Carry out output. Raises AssertionError for a sequence that the product has no reason to write."""
        data = self._rest + data
        tail = data.rfind(b"\x1b")
        self._rest = b""
        if tail >= 0 and not re.search(rb"[A-Za-z]", data[tail:]):
            data, self._rest = data[:tail], data[tail:]
        for found in _TOKEN.finditer(data):
            token = found.group()
            if token == b"\r":
                self.column = 0
            elif token == b"\n":
                self._down()
            elif found.group(2):
                self._control(found.group(2).decode(), found.group(1).decode())
            else:
                assert not token.startswith(b"\x1b"), token
                self._text(token.decode(errors="replace"))

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines)

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append("")

    def _control(self, kind: str, number: str) -> None:
        if kind == "A":
            self.row = max(0, self.row - int(number or 1))
        elif kind == "J":
            assert number in ("", "0"), number
            self.lines[self.row] = self.lines[self.row][: self.column]
            del self.lines[self.row + 1 :]
            self.styles = {row: style for row, style in self.styles.items() if row < self.row}
        else:
            assert kind == "m", f"sequence {number}{kind}"
            self._style = f"\x1b[{number}m" if number.strip("0;") else ""

    def _text(self, text: str) -> None:
        for character in text:
            if self.column == self.columns:
                self.column = 0
                self._down()
            if self._style:
                self.styles[self.row] = self._style
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
            self.column += 1


class Terminal:
    """A command whose terminal is a pseudo-terminal, with a session of its own; it is killed on exit."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], columns: int = 120, lines: int = 40
    ) -> None:
        self.shown = Shown(columns)
        self.raw = b""
        self.descriptor, slave = os.openpty()
        """The test's end of the terminal."""
        self.resize(columns, lines)

        def take_terminal() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        kept = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR")}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, preexec_fn=take_terminal,  # noqa: PLW1509 - this process has one thread
            env={**kept, "TERM": "xterm-256color", **environment},
        )  # fmt: skip
        os.close(slave)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(30)
        os.close(self.descriptor)

    def resize(self, columns: int, lines: int) -> None:
        """Give the terminal another size."""
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        """Press keys: `b"\\x03"` is Ctrl-C."""
        os.write(self.descriptor, keys)

    def until(self, is_there: Callable[[str], object], timeout_s: float) -> str:
        """Read until the text of the terminal satisfies a condition, or all its writers have ended; returns the text."""
        deadline = time.monotonic() + timeout_s
        while not is_there(self.shown.text):
            assert time.monotonic() < deadline, self.shown.text
            if not self._read():
                assert is_there(self.shown.text), self.shown.text
                break
        return self.shown.text

    def end(self, timeout_s: float) -> tuple[int, str]:
        """Read to the end; returns the exit code and the text that stays."""
        deadline = time.monotonic() + timeout_s
        while self._read():
            assert time.monotonic() < deadline, self.shown.text
        return self.process.wait(max(0.1, deadline - time.monotonic())), self.shown.text

    def _read(self) -> bool:
        """Take what comes within a moment; False once nobody writes any more."""
        if not select.select([self.descriptor], [], [], _READ_S)[0]:
            return True
        try:
            data = os.read(self.descriptor, 1 << 16)
        except OSError:  # the last writer has closed it
            return False
        self.raw += data
        self.shown.feed(data)
        return bool(data)
