"""`headrace numerics`: compares the log-probabilities of generator and trainer on a model and this device."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..comm.environment import VISIBLE_DEVICES, sleeping_threads
from .command_line import CommandParser, exit_code

_SHORT = {
    "--dtype": "model.dtype",
    "--data": "data.path",
    "--engine": "rollout.engine",
    "--max-new-tokens": "sampling.max_new_tokens",
}
"""Options that are short for a setting."""
_PAGE = """\
Compares the log-probabilities that generator and trainer give to the same tokens, on a model and this device.

usage: headrace numerics MODEL [KEY=VALUE ...] [OPTIONS]

The generator answers prompts. Then the trainer and a plain forward pass of transformers score the same tokens. MODEL is a run folder
(its newest checkpoint), a checkpoint, a model in Hugging Face format, a name on the Hub, or a recipe (the model that its run begins
with). KEY=VALUE are settings of a run, such as generator.exact=true:

    headrace numerics MODEL
    headrace numerics MODEL generator.exact=true
    headrace numerics MODEL --dtype float32 --data questions.jsonl
    headrace numerics MODEL --engine my_generator.py:MyGenerator

  --data FILE           prompts, short for data.path; the first 32. By default those of the run or recipe, else built-in questions
  --engine FILE:CLASS   a generator's adapter, short for rollout.engine
  --dtype TYPE          float32 or bfloat16, short for model.dtype; by default that of a run on this device
  --max-new-tokens N    longest response, short for sampling.max_new_tokens; by default that of the run or recipe, else 128
  --samples N           responses to each prompt, by default 2
  --device cpu          compute on the CPU, though there is a GPU

Exit codes: 0 if the difference is healthy, 1 if not, 2 for a mistake, and 130 after Ctrl-C or SIGTERM.
"""


def main(words: Sequence[str]) -> int:
    """Compare the engines of the model that the words name; returns the exit code."""
    parser = CommandParser("numerics", page=lambda: _PAGE)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--device", choices=("cpu",))
    for option, setting in _SHORT.items():
        parser.add_argument(option, dest=setting)
    return exit_code(lambda: _compare(parser.parse_intermixed_args(words)))


def _compare(given: argparse.Namespace) -> int:
    from .processes.signals import interrupted_by_sigterm

    chosen = {setting: getattr(given, setting) for setting in _SHORT.values()}
    words = [*given.words, *(f"{setting}={value}" for setting, value in chosen.items() if value is not None)]
    with sleeping_threads(), interrupted_by_sigterm(), _device(given.device):
        from .report.numerics import NumericsRequest, compare_engines

        return compare_engines(NumericsRequest.of(words, given.samples))


@contextmanager
def _device(name: str | None) -> Iterator[None]:
    """Hide the GPUs for `cpu`. Torch looks for them at its first use of one."""
    before = os.environ.get(VISIBLE_DEVICES)
    if name == "cpu":
        os.environ[VISIBLE_DEVICES] = ""
    try:
        yield
    finally:
        if name == "cpu":
            os.environ.pop(VISIBLE_DEVICES)
            if before is not None:
                os.environ[VISIBLE_DEVICES] = before


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
