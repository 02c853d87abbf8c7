"""`headrace plan`: its words and its page of help."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..command_line import CommandParser, exit_code


class PlanParser(CommandParser):
    """The parser of `headrace plan`, whose page has the settings of the lab too."""

    def format_help(self) -> str:
        from .settings import help_lines

        own = super().format_help()
        about = "The settings `lab.*` describe the emulated devices of a recipe with `rollout.engine=emulated` and `trainer.engine=emulated`:"
        return "\n".join((own, about, "", *help_lines(), ""))


def main(words: Sequence[str]) -> int:
    """Returns the exit code: 2 for a user's mistake, 130 after Ctrl-C or SIGTERM."""
    return exit_code(lambda: _plan(_parser().parse_intermixed_args(words)))


def _parser() -> PlanParser:
    parser = PlanParser("plan", "Simulates splits of a run's devices in virtual time, and proposes the fastest.")
    parser.add_argument("recipe", help="a recipe: its file or its name")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of the recipe")
    parser.add_argument("--from", dest="run", type=Path, metavar="RUN", help="folder of a finished run to measure")
    parser.add_argument("--gpus", type=int, metavar="N", help="number of GPUs to plan for (default: the recipe's)")
    parser.add_argument("--steps", type=int, metavar="N", help="steps of a simulated run (default: at most 24)")
    parser.add_argument("--runs", type=int, default=24, metavar="N", help="most simulated runs (24)")
    return parser


def _plan(arguments: argparse.Namespace) -> None:
    from ..processes.signals import interrupted_by_sigterm
    from .plan import plan

    with interrupted_by_sigterm():
        plan(arguments)
