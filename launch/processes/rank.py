"""One rank, as torchrun started it: it checks the recipe and its counts, then supervises its role to the end.

The first rank makes the run folder ready. Another host needs no copy of the recipe: the run's store has it.
"""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from ...comm.environment import JOINING
from ...comm.errors import SettingError
from ...comm.process_tree import end_with_parent
from ...comm.recipe import Recipe
from ...relay.checkpoints import CheckpointFolder
from ...relay.hub.exits import clear_exits
from ..config.dry_run import print_plan
from ..config.load import read_recipe, save_recipe
from ..config.run_folder import make_run_folder
from ..hosts import ranks_of_hosts
from ..placement import place_joining, place_ranks, with_relays
from ..report.summary import print_summary
from ..resume import choose_checkpoint
from .agent import has_other_hosts, refuse_start
from .child import print_message
from .fetched_recipe import fetch_recipe
from .secret import create_secret
from .supervisor import LAUNCHER, SUMMARY_FILE, supervise


def run_rank(recipe_file: str | None, overrides: Sequence[str], *, is_dry_run: bool) -> int:
    """Run the rank of torchrun's environment; returns its exit code."""
    end_with_parent(signal.SIGTERM, os.getppid())
    is_known = False
    try:
        if JOINING in os.environ:
            places = place_joining(*map(int, os.environ[JOINING].split(",")))
            return supervise(fetch_recipe("the host joins a run", Path()), places)
        recipe = _read(recipe_file, overrides)
        if recipe.run.mode == "replay":
            raise SettingError("run.mode=replay: start it without torchrun; it starts as many ranks as the run had")
        hosts = ranks_of_hosts()
        is_known = True  # the counts are the same on every host
        recipe = with_relays(recipe, len(hosts))
        place_ranks(recipe.roles, hosts, recipe.rollout.tp)
        is_first = os.environ["RANK"] == "0"
        if is_dry_run:
            if is_first:
                print_plan(recipe, hosts)
            return 0
        does_launch = is_first and (LAUNCHER not in os.environ or has_other_hosts())
        if does_launch:
            prepare(recipe)
        is_known = is_first
        _prepare_host(Path(recipe.run.dir), is_first=is_first)
        exit_code = supervise(recipe)
    except SettingError as error:
        return refuse_start(error, is_known=is_known)
    if does_launch and LAUNCHER not in os.environ:
        print_summary(Path(recipe.run.dir))
    return exit_code


def prepare(recipe: Recipe) -> None:
    """Check the recipe and make the run folder ready for the processes of the run. Raises `SettingError`."""
    from ..config.checks import check_recipe

    for warning in check_recipe(recipe):
        print_message(f"warning: {warning}")
    if recipe.lora.rank and recipe.lora.path:
        from ...trainer.policy.adapter_files import keep_start

        keep_start(recipe)
    run_dir = Path(recipe.run.dir)
    save_recipe(recipe)
    create_secret(run_dir)
    (run_dir / SUMMARY_FILE).unlink(missing_ok=True)
    clear_exits(run_dir)
    if recipe.run.resume == "auto":
        step, lines = choose_checkpoint(run_dir)
        for line in lines:
            print_message(line)
        if step is not None:
            CheckpointFolder(run_dir).set_latest(step)


def _read(recipe_file: str | None, overrides: Sequence[str]) -> Recipe:
    """The recipe in the file; on another host than the first one, the run's own where there is no such file."""
    if recipe_file is None or os.environ.get("GROUP_RANK", "0") == "0" or Path(recipe_file).exists():
        return read_recipe(recipe_file, overrides)
    return fetch_recipe(f"no recipe file {recipe_file!r}", Path(read_recipe(None, overrides).run.dir))


def _prepare_host(run_dir: Path, *, is_first: bool) -> None:
    """Make the run folder on this host; without a shared file system it has the logs of this host."""
    make_run_folder(run_dir)
    if not is_first and os.environ.get("LOCAL_RANK") == "0":
        try:
            (run_dir / SUMMARY_FILE).unlink(missing_ok=True)  # of an earlier run
            clear_exits(run_dir)
        except OSError as error:
            raise SettingError(f"run.dir: cannot write in {run_dir}: {error.strerror}") from error
