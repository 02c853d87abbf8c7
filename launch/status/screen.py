"""A part of a terminal that is drawn again and again below the lines that scroll."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import TextIO

_SEQUENCE = re.compile("\x1b\\[[0-9;?]*[A-Za-z]")
_SIZE = os.terminal_size((80, 24))
_CLEAR = "\x1b[J"


def is_live(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether a stream is a terminal on which a picture may be drawn: it is that of this process's session, and nobody wants plain text."""
    if "CI" in environment or "NO_COLOR" in environment or environment.get("TERM", "dumb") in ("dumb", ""):
        return False
    try:
        descriptor = stream.fileno()
    except OSError:  # a stream of a notebook, or of a test
        return False
    return os.isatty(descriptor) and is_foreground(descriptor)


def is_foreground(descriptor: int) -> bool:
    """Whether this process may write to its terminal now: a shell has not put it into the background."""
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:  # a terminal without sessions, or that of another one
        return True


class Screen:
    """Draws on a terminal. The cursor stays visible, below the picture: whatever ends this process, the terminal needs no repair."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._widths: list[int] = []
        """Columns of each line of the picture that is there."""

    @property
    def size(self) -> os.terminal_size:
        """Columns and lines."""
        try:
            found = os.get_terminal_size(self._descriptor)
        except OSError:
            return _SIZE
        return found if found.columns and found.lines else _SIZE

    def draw(self, picture: Sequence[str], above: bytes = b"") -> None:
        """Replace the picture, and print whole lines above it, in one write.

        picture: lines that fit in the width, with the control sequences of their colours. An empty one leaves nothing.
        """
        before = self._erasing()
        self._widths = [len(_SEQUENCE.sub("", line)) for line in picture]
        text = "".join(f"{line}\n" for line in picture)
        self._write(before.encode() + above + text.encode())

    def forget(self) -> None:
        """The terminal has shown other things since, such as a shell: the next picture is drawn below them."""
        self._widths = []

    def _erasing(self) -> str:
        """Moves to the first line of the picture, and clears from there; a terminal that became narrower has broken its lines."""
        columns = self.size.columns
        height = sum(max(1, -(-width // columns)) for width in self._widths)
        return f"\r\x1b[{height}A{_CLEAR}" if height else ""

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]
