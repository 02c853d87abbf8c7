"""`headrace push`: uploads a trained model to the Hugging Face Hub, with its model card."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .command_line import CommandParser, exit_code

if TYPE_CHECKING:
    from .report.upload import Hub

_ABOUT = """\
Uploads a trained model to the Hugging Face Hub, with its model card. The token is the one of `hf auth login`, or in HF_TOKEN.
"""
_EXIT_CODES = (
    "Exit codes: 0, 2 for a mistake or a refusal of the Hub, 130 after Ctrl-C, and 1 if the Hub cannot be reached."
)


def main(words: Sequence[str], hub: "Hub | None" = None) -> int:
    """Upload what the words name, to the real Hub if no other is given; returns the exit code."""
    parser = CommandParser("push", _ABOUT)
    parser.epilog = _EXIT_CODES
    parser.add_argument(
        "model", metavar="MODEL", help="a run folder (its newest checkpoint), a checkpoint, or a folder"
    )
    parser.add_argument("name", metavar="NAME", help="USER/MODEL on the Hub, or MODEL for the user of the token")
    parser.add_argument("--private", action="store_true", help="make the repository private")
    parser.add_argument("--adapter", action="store_true", help="upload the adapter (LoRA), not the merged model")
    parser.add_argument("--update", action="store_true", help="add a commit to a repository that exists")
    return exit_code(lambda: _push(parser.parse_intermixed_args(words), hub))


def _push(given: argparse.Namespace, hub: "Hub | None") -> None:
    from .report.upload import PushRequest, push, real_hub

    request = PushRequest.of(given.model, given.name, is_adapter=given.adapter)
    push(request, hub or real_hub(), is_private=given.private, is_update=given.update)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
