"""The program. Without torchrun's environment it is the launcher of a host: it checks the recipe, starts torchrun and prints
how the run ended. Under torchrun it is the supervisor of one rank.

    python -m headrace.launch.run RECIPE.yaml [KEY=VALUE ...] [--dry-run [--settings] | --help]
    python -m headrace.launch.run RECIPE.yaml [KEY=VALUE ...] --nnodes 2 --node-rank 0 --master-addr ADDRESS
    python -m headrace.launch.run [RECIPE.yaml] join=RUN_FOLDER|HOST:PORT [roles.rollout=N] [roles.relay=N]

The second form runs on each host of a run on several; --nproc-per-node and --master-port are as in torchrun, but that
--nproc-per-node 4,4,1 gives each host a number of its own. The third adds the rollouts and relays of a host to a running job.
"""

import os
import socket
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..comm.disk import REMEDY, describe_unwritable, is_unwritable
from ..comm.environment import sleeping_threads
from ..comm.errors import SettingError, StoreGone
from ..comm.recipe import Recipe
from .config.dry_run import DryRun
from .config.gpus import Gpus
from .config.load import read_recipe
from .placement import place_ranks, with_relays
from .processes.agent import REFUSED, Hosts, Torchrun, refuse_start
from .processes.child import print_message
from .processes.joining import join_run
from .processes.rank import prepare, run_rank, tell_finished
from .processes.signals import block_signals
from .report.summary import print_summary, read_summary
from .resume import finished_after

_FLAGS = ("--dry-run", "--settings")
_HOST_OPTIONS = ("nnodes", "node-rank", "nproc-per-node", "master-addr", "master-port")


@dataclass(frozen=True, slots=True)
class Arguments:
    """The words of a command line."""

    recipe: str | None
    overrides: Sequence[str]
    is_dry_run: bool
    with_settings: bool
    hosts: Hosts
    join: str = ""
    """The folder or address of the run that this host joins."""

    @classmethod
    def parse(cls, words: Sequence[str]) -> "Arguments":
        """Sort the words; raises `SettingError` for an option that does not exist."""
        options: dict[str, str] = {}
        flags = set[str]()
        others = list[str]()
        join = ""
        rest = iter(words)
        for word in rest:
            name, equals, value = word.partition("=")
            option = name.removeprefix("--").replace("_", "-")
            if word in _FLAGS:
                flags.add(word)
            elif word.startswith("--") and option in _HOST_OPTIONS:
                options[option] = value if equals else next(rest, "")
            elif word.startswith("-"):
                known = ", ".join(f"--{option}" for option in _HOST_OPTIONS)
                raise SettingError(
                    f"unknown option {word}; the options are --dry-run, --settings, --gpus=, --help, {known}"
                )
            elif name == "join":
                join = value
            else:
                others.append(word)
        if flags == {"--settings"}:
            raise SettingError("--settings: only with --dry-run; of a run, config.yaml has all settings")
        recipe = others[0] if others and "=" not in others[0] else None
        return cls(
            recipe,
            others[1:] if recipe else others,
            "--dry-run" in flags,
            "--settings" in flags,
            Hosts.of(options),
            join,
        )


def main(words: Sequence[str], unmade: Collection[str] = ()) -> int:
    """Returns the exit code: 2 for a user's mistake, which is one message, 130 after Ctrl-C.

    `unmade` are settings whose files the caller makes before a start, but not for a dry run.
    """
    is_rank = "LOCAL_WORLD_SIZE" in os.environ  # torchrun's own; clusters set RANK and WORLD_SIZE of a pod too
    if is_rank:
        block_signals()
    is_asked = "--help" in words or "-h" in words
    if is_asked or not words:
        return _help(is_rank=is_rank, is_asked=is_asked)
    try:
        return _run(words, unmade, is_rank=is_rank)
    except OSError as error:
        if not is_unwritable(error):
            raise
        print_message(f"error: {describe_unwritable(Path(error.filename or '.'))}; {REMEDY}, or set another run.dir")
        return 2
    except (SettingError, StoreGone) as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print_message(f"error: {error}")
        return 2 if isinstance(error, SettingError) else 1
    except KeyboardInterrupt:
        return 0 if is_rank else 130  # a rank whose processes end in order after a signal returns 0 too


def _run(words: Sequence[str], unmade: Collection[str], *, is_rank: bool) -> int:
    """Do what the words ask for: a rank's part, a join, a dry run, a replay or a run. Raises `SettingError` for a user's mistake."""
    gpus, words = Gpus.taken_from(words)
    arguments = Arguments.parse(words)
    if gpus is not None and not arguments.is_dry_run:
        raise SettingError("--gpus: only with --dry-run; a run uses the GPUs in CUDA_VISIBLE_DEVICES")
    dry_run = DryRun((), gpus, unmade, arguments.with_settings) if arguments.is_dry_run else None
    if is_rank:
        return run_rank(arguments.recipe, arguments.overrides, dry_run)
    if arguments.join:
        if arguments.is_dry_run or arguments.hosts != Hosts():
            raise SettingError("join: the other options are not for a host that joins a run; leave them out")
        return join_run(arguments.join, arguments.recipe, list(arguments.overrides))
    recipe = _read_here(arguments)
    if dry_run is not None:
        hosts = arguments.hosts
        ranks = hosts.ranks(recipe.roles) if hosts.nnodes > 1 else ()
        for warning in replace(dry_run, hosts=ranks).of(with_relays(recipe, hosts.nnodes)):
            print_message(f"warning: {warning}")
        return 0
    if recipe.run.mode == "replay":
        with sleeping_threads():
            from ..trainer.replay_run import replay_steps

            return 1 if replay_steps(recipe) else 0
    return _launch(recipe, arguments)


def _help(*, is_rank: bool, is_asked: bool) -> int:
    """Print the help page, of several ranks in the first one; torchrun without a recipe is a mistake."""
    from .config.help import usage

    if not is_rank or os.environ["RANK"] == "0":
        sys.stdout.write(usage())
        sys.stdout.flush()
    if is_rank and not is_asked:
        return refuse_start(SettingError("no recipe; name its file after headrace.launch.run"), is_known=True)
    return 0


def _read_here(arguments: Arguments) -> Recipe:
    """The recipe, or what the launcher itself has to know of it on a later host without the file: the run folder."""
    file = arguments.recipe
    hosts = arguments.hosts
    if file is None or hosts.node_rank == 0 or Path(file).exists():
        return read_recipe(file, arguments.overrides)
    if not hosts.nproc_per_node or not any(word.startswith("run.dir=") for word in arguments.overrides):
        raise SettingError(
            f"no recipe file {file!r} on host {socket.gethostname()}; it gets the first host's with --nproc-per-node and"
            " run.dir=FOLDER on its command line"
        )
    return read_recipe(None, arguments.overrides)


def _launch(recipe: Recipe, arguments: Arguments) -> int:
    """Start torchrun for this host. With several hosts the first rank prepares the run, since its host may be another."""
    hosts = arguments.hosts
    if (step := finished_after(recipe.run)) is not None:
        tell_finished(step)
        return 0
    if hosts.nnodes > 1:
        if arguments.recipe is None or Path(arguments.recipe).exists():
            place_ranks(recipe.roles, hosts.ranks(recipe.roles), recipe.rollout.tp)
        torchrun = Torchrun(recipe, hosts, [*filter(None, [arguments.recipe]), *arguments.overrides])
        code = torchrun.run()
    else:
        with prepare(with_relays(recipe, 1)):
            torchrun = Torchrun(recipe, hosts)
            code = torchrun.run()
    return _end_of_run(Path(recipe.run.dir), torchrun, code, is_first=hosts.node_rank == 0)


def _end_of_run(run_dir: Path, torchrun: Torchrun, code: int, *, is_first: bool) -> int:
    """The exit code of the run on this host, whose torchrun ended with `code`; the first host prints how it ended."""
    if code == -REFUSED:
        return 2
    if torchrun.lost_folder:
        print_message(f"error: {torchrun.lost_folder}")
        return 2
    summary = print_summary(run_dir) if is_first else read_summary(run_dir)
    if torchrun.received:
        return 128 + torchrun.received
    if summary is None:
        print_message(f"error: the run ended without a summary; see {run_dir}/logs")
        return 1
    return int(summary.get("exit_code", code)) or (1 if code else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
