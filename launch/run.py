"""`headrace run`. Without torchrun's environment it is the launcher of a host: it checks the recipe, starts torchrun and prints
how the run ended. Under torchrun it is the supervisor of one rank.

    headrace run RECIPE.yaml|NAME [KEY=VALUE ...] [--dry-run [--settings] | --help]
    headrace run RECIPE.yaml|NAME [KEY=VALUE ...] --try[=N] [--response TEXT]
    headrace run RECIPE.yaml|NAME [KEY=VALUE ...] --nnodes 2 --node-rank 0 --master-addr ADDRESS
    headrace run [RECIPE.yaml] join=RUN_FOLDER|HOST:PORT [roles.rollout=N] [roles.relay=N]

The second form tries prompts, rewards and tools. The third runs on each host of a run on several; --nproc-per-node and
--master-port are as in torchrun, and --nproc-per-node 4,4,1 gives each host a number of its own. The fourth adds the rollouts
and relays of a host to a running job.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from ..comm.errors import SettingError, StoreGone
from .command_line import HelpPrinted, exit_code
from .config.arguments import Arguments


def main(words: Sequence[str], recipe: str | None = None) -> int:
    """Returns the exit code: 2 for a user's mistake, which is one message, 130 after Ctrl-C.

    recipe: the name of the recipe if the words have none.
    """
    if "LOCAL_WORLD_SIZE" in os.environ:  # torchrun's own; clusters set RANK and WORLD_SIZE of a pod too
        return exit_code(lambda: _rank(words))
    return exit_code(lambda: _host(words or ([] if recipe else ["--help"]), recipe))


def quickstart(words: Sequence[str]) -> int:
    """`headrace quickstart`: as `main`, with the recipe `quickstart` unless the words name another."""
    return main(words, "quickstart")


def _host(words: Sequence[str], recipe: str | None) -> int:
    arguments = Arguments.parse(words)
    from .start import list_recipes, start  # with modules that a page of help does not need

    if arguments.is_list:
        return list_recipes()
    return start(replace(arguments, recipe=arguments.recipe or recipe))


def _rank(words: Sequence[str]) -> int:
    """The part of one rank. A mistake ends torchrun after one line; a rank whose processes end in order after a signal returns 0."""
    from .processes.agent import refuse_start
    from .processes.child import print_message
    from .processes.signals import block_signals
    from .start import start_rank

    block_signals()
    try:
        if not words:
            _print_help()
            return refuse_start(SettingError("no recipe; name its file after headrace.launch.run"), is_known=True)
        return start_rank(Arguments.parse(words))
    except SettingError as error:
        return refuse_start(error, is_known=False)
    except StoreGone as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print_message(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 0


def _print_help() -> None:
    """Print the page, of several ranks in the first one."""
    if os.environ["RANK"] == "0":
        try:
            Arguments.parse(["--help"])
        except HelpPrinted:
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
