"""`headrace eval`: evaluates a model on held-out prompts, without a run."""

import argparse
import sys
from collections.abc import Sequence

from ..comm.environment import sleeping_threads
from .command_line import CommandParser, exit_code

_PAGE = """\
Evaluates a model on held-out prompts, without a run.

usage: headrace eval MODEL [KEY=VALUE ...] [--out FILE]

MODEL is a run folder (its newest checkpoint), a checkpoint, a model in Hugging Face format, a name on the Hub, or a recipe (the
model that its run begins with). A run's model is evaluated with the run's own settings. KEY=VALUE overrides them, or gives
those of a model without a run:

    headrace eval runs/mine
    headrace eval runs/mine eval.samples=8 eval.temperature=1
    headrace eval MODEL eval.path=FILE.jsonl reward.path=gsm8k

  --out FILE  the file for the responses, by default CHECKPOINT.evaluation.jsonl beside the checkpoint's folder; an existing
              file is never overwritten

Exit codes: 0, 2 for a mistake, 130 after Ctrl-C or SIGTERM, and 1 if no response has a score.
"""


def main(words: Sequence[str]) -> int:
    """Evaluate what the words name; returns the exit code."""
    parser = CommandParser("eval", page=lambda: _PAGE)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--out")
    return exit_code(lambda: _evaluate(parser.parse_intermixed_args(words)))


def _evaluate(given: argparse.Namespace) -> int:
    from .processes.signals import interrupted_by_sigterm

    with sleeping_threads(), interrupted_by_sigterm():
        from .report.evaluation import EvalRequest, evaluate

        return evaluate(EvalRequest.of(given.words, given.out))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
