"""The parser of all commands, and the exit code for an error."""

import argparse
import difflib
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from ..comm.errors import HeadraceError, SettingError

_UNKNOWN = "unrecognized arguments: "
"""The beginning of argparse's message about an option that does not exist."""


class HelpPrinted(Exception):
    """The page that was asked for is printed, and nothing is left to do."""


class CommandParser(argparse.ArgumentParser):
    """A parser whose mistakes are `SettingError`, and which ends no process."""

    def __init__(self, command: str, description: str = "", page: Callable[[], str] | None = None) -> None:
        """command: its words after `headrace`. page: makes the page of `--help`, in place of argparse's own."""
        super().__init__(
            f"headrace {command}".strip(),
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._page = page

    def format_help(self) -> str:
        return super().format_help() if self._page is None else self._page()

    def error(self, message: str) -> NoReturn:
        """Raise the mistake; of an option that does not exist it names the nearest one."""
        word = message.removeprefix(_UNKNOWN).split(" ")[0].partition("=")[0]
        if message.startswith(_UNKNOWN):
            near = difflib.get_close_matches(word, self._option_string_actions, n=1, cutoff=0.75)
            kind = "unknown option" if word.startswith("-") else "one word too many:"
            message = f"{kind} {word}" + (f", the nearest is {near[0]}" if near else "")
        raise SettingError(f"{message}; --help lists the options")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Called after a page was printed."""
        with suppress(OSError):  # `exit_code` tells it
            sys.stdout.flush()
        raise HelpPrinted


def nearest(word: str, names: list[str]) -> str:
    """The end of a message about a name that does not exist: the nearest ones, or all."""
    near = difflib.get_close_matches(word, names, n=2)
    return f"the nearest is {' or '.join(near)}" if near else f"there are {', '.join(names)}"


def exit_code(command: Callable[[], int | None]) -> int:
    """Carry out a command: its exit code, 2 for a user's mistake, 1 for another error of the project, 130 after
    Ctrl-C, each with one line.

    A reader that has closed the pipe, such as `head`, ends the command with 141, as it ends other programs.
    """
    try:
        code = _code_of(command)
    except BrokenPipeError:
        flush_or_drop()
        return 141
    except HeadraceError as error:
        _tell(str(error))
        return 2 if isinstance(error, SettingError) else 1
    except OSError as error:
        from ..comm.disk import REMEDY, describe_unwritable, is_unwritable

        if not is_unwritable(error):
            raise
        if error.filename is None:
            _tell(f"{error.strerror}: the output or a file of run.dir cannot be written")
        else:
            _tell(f"{describe_unwritable(Path(error.filename))}; {REMEDY}, or set another run.dir")
        return 2
    except KeyboardInterrupt:
        return 130
    lost = flush_or_drop()
    if isinstance(lost, BrokenPipeError):
        return 141
    if lost is not None:
        _tell(f"the output cannot be written: {lost.strerror}")
    return code if lost is None else code or 1


def flush_or_drop() -> OSError | None:
    """Flush the output. If that fails, no output has an effect any more; returns the reason.

    A run calls it at its end, so that its exit code says how it ended and not whether its output was read.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it at its end
        return error
    return None


def _code_of(command: Callable[[], int | None]) -> int:
    with suppress(HelpPrinted):
        return command() or 0
    return 0


def _tell(text: str) -> None:
    from .processes.child import print_message  # with modules that a page of help does not need

    print_message(f"error: {text}")
