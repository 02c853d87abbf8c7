"""The command `headrace`: finds the command that its first word names, and imports that one alone."""

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace import __version__

from ..comm.errors import SettingError
from .command_line import CommandParser, exit_code, nearest


class Command(NamedTuple):
    """A command: its function below `headrace.launch`, which gets the words and returns the exit code, and its line of help."""

    module: str
    """`MODULE`, whose `main` it is, or `MODULE:FUNCTION`."""
    summary: str


COMMANDS = {
    "run": Command("run", "trains with a recipe: headrace run RECIPE.yaml|NAME [KEY=VALUE ...]"),
    "quickstart": Command("run:quickstart", "trains a small policy on this machine: headrace quickstart [NAME]"),
    "eval": Command("evaluate", "evaluates a checkpoint or a model on held-out prompts: headrace eval RUN|MODEL"),
    "numerics": Command(
        "numerics", "compares the log-probs of generator and trainer on a model: headrace numerics MODEL"
    ),
    "serve": Command("serving.serve", "answers OpenAI's HTTP API with a model: headrace serve RUN|MODEL"),
    "agent": Command(
        "agents.command", "plays tasks of verifiers against a running job: headrace agent verifiers:TASKSET RUN"
    ),
    "tinker": Command(
        "serving.tinker.command", "answers the Tinker API with a model that clients train: headrace tinker MODEL"
    ),
    "status": Command(
        "status.command:status", "prints how far a run is and who waits for whom: headrace status RUN [--watch]"
    ),
    "view": Command("report.viewer.command", "shows samples and metrics of a run on a local page: headrace view RUN"),
    "ctl": Command("status.command", "gives a running job an order: headrace ctl RUN drain ROLLOUT, or stop"),
    "audit": Command("audit", "checks the journal of runs and counts their trajectories: headrace audit RUN..."),
    "replay": Command("report.replay", "trains steps of a run again, and compares other losses: headrace replay RUN"),
    "push": Command("push", "uploads a trained model to the Hugging Face Hub: headrace push RUN USER/MODEL"),
    "plan": Command("lab.command", "finds the fastest split of the devices: headrace plan RECIPE.yaml|NAME"),
}


def main(words: Sequence[str] | None = None) -> int:
    """Carry out the command line, by default that of this process; returns the exit code."""
    given = list(sys.argv[1:] if words is None else words)
    if given and given[0] in COMMANDS:
        return _main_of(given[0])(given[1:])
    return exit_code(lambda: _answer(given))


def _main_of(name: str) -> Callable[[Sequence[str]], int]:
    module, _, function = COMMANDS[name].module.partition(":")
    return getattr(importlib.import_module(f"headrace.launch.{module}"), function or "main")


def _answer(words: Sequence[str]) -> None:
    """Print the version or the list of commands, which is the answer to no words too. Raises `SettingError` for any other word."""
    parser = CommandParser("", "Asynchronous reinforcement learning for language models.", _page)
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    if not words:
        parser.print_help()
    elif words[0].startswith("-"):
        parser.parse_args(words)
    else:
        raise SettingError(f"no command {words[0]!r}; {nearest(words[0], list(COMMANDS))}; --help lists them")


def _page() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        (
            "usage: headrace COMMAND ...\n       headrace --version\n",
            *lines,
            "\n`headrace COMMAND --help` describes a command.\n",
        )
    )
