"""One rank, as torchrun started it: it checks the recipe and its counts, then supervises its role to the end.

The first rank makes the run folder ready. Another host needs no copy of the recipe: the run's store has it.
"""

import math
import os
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import IO

from ...comm.clock import begin
from ...comm.disk import tell
from ...comm.environment import JOINING
from ...comm.errors import SettingError
from ...comm.process_tree import end_with_parent
from ...comm.recipe import Recipe
from ..config.device_defaults import with_device_defaults, with_slots
from ..config.dry_run import DryRun, check_host
from ..config.gpus import Gpus
from ..config.hosts import ranks_of_hosts
from ..config.load import read_recipe, save_recipe
from ..config.run_checkpoints import start_lines
from ..config.run_folder import SUMMARY_FILE, lock_run_folder, make_run_folder
from ..placement import place_joining, place_ranks, with_relays
from ..report.peak_memory import write_planned
from ..report.summary import print_summary
from ..resume import finished_after, prepare_folder
from .agent import has_other_hosts, refuse_start
from .child import print_message
from .copies_lock import wait_for_writers
from .fetched_recipe import fetch_recipe
from .secret import create_secret, read_secret
from .store_address import FIND_S, find_store
from .supervisor import LAUNCHER, supervise


def run_rank(
    recipe_file: str | None, overrides: Sequence[str], dry_run: DryRun | None, *, with_trace: bool = False
) -> int:
    """Run the rank of torchrun's environment, or print the plan of `dry_run`; returns the exit code.

    with_trace: as for `print_summary`.
    """
    end_with_parent(signal.SIGTERM, os.getppid())
    begin(is_new=False)
    is_known = False
    try:
        if JOINING in os.environ:
            places = place_joining(*map(int, os.environ[JOINING].split(",")))
            address = find_store(Path())
            return supervise(fetch_recipe(address, read_secret(Path())), address, places)
        recipe = _read(recipe_file, overrides)
        hosts = ranks_of_hosts()
        is_known = True  # the counts are the same on every host
        recipe = with_relays(recipe, len(hosts))
        place_ranks(recipe.roles, hosts, recipe.rollout.tp)
        is_first = os.environ["RANK"] == "0"
        if dry_run is not None:
            is_known = is_first
            if is_first:
                for warning in replace(dry_run, hosts=hosts).of(recipe):
                    print_message(f"warning: {warning}")
            return 0
        if (step := finished_after(recipe.run)) is not None:
            if is_first:
                tell_finished(step)
            return 0
        does_launch = is_first and (LAUNCHER not in os.environ or has_other_hosts())
        with prepare(recipe, hosts) if does_launch else nullcontext():
            is_known = is_first
            _prepare_host(Path(recipe.run.dir), is_first=is_first)
            exit_code = supervise(recipe, "" if is_first else _find_store(Path(recipe.run.dir)))
    except SettingError as error:
        return refuse_start(error, is_known=is_known)
    if does_launch and LAUNCHER not in os.environ:
        print_summary(Path(recipe.run.dir), with_trace=with_trace)
    return exit_code


def prepare(recipe: Recipe, hosts: Sequence[int] = ()) -> IO[bytes]:
    """Check the recipe and make the run folder ready for the processes of the run. `hosts` are the ranks on each, by default on one.
    Raises `SettingError`.

    Returns the folder's lock. Whoever starts a run holds it until the run has ended.
    """
    from ..config.checks.evaluation import checkpoint_lines
    from ..config.checks.recipe import check_recipe, check_run_folder

    tell("checking the settings, the model and the data")
    gpus = Gpus.of_this_host()
    recipe = with_device_defaults(recipe, gpus)
    warnings = check_recipe(recipe).warnings
    recipe = with_slots(recipe, gpus, hosts)
    on_host, planned = check_host(recipe, hosts)
    run_dir = Path(recipe.run.dir)
    lock = lock_run_folder(make_run_folder(run_dir))
    try:
        check_run_folder(recipe.run)  # a run may have begun, and ended, since the first look
        if recipe.run.resume == "auto":
            # The other ranks wait for the store already.
            wait_for_writers(run_dir, recipe.comm.deadline_s, FIND_S / 2 if hosts else math.inf)
        for warning in (*warnings, *on_host):
            print_message(f"warning: {warning}")
        for line in (*start_lines(recipe), *checkpoint_lines(recipe), *prepare_folder(recipe)):
            print_message(line)
        if recipe.lora.rank and recipe.lora.path:
            from ...trainer.policy.adapter_files import keep_start

            keep_start(recipe.run.dir, recipe.lora)
        save_recipe(recipe)
        create_secret(run_dir)
        (run_dir / SUMMARY_FILE).unlink(missing_ok=True)
        write_planned(run_dir, planned)
    except BaseException:
        lock.close()
        raise
    return lock


def tell_finished(step: int) -> None:
    """Print that there is nothing to do."""
    print_message(f"run.resume=auto: finished after step {step}; raise run.steps to continue")


def _read(recipe_file: str | None, overrides: Sequence[str]) -> Recipe:
    """The recipe in the file. On a host other than the first, the run's recipe if the file does not exist there."""
    if recipe_file is None or os.environ.get("GROUP_RANK", "0") == "0" or Path(recipe_file).exists():
        return read_recipe(recipe_file, overrides)
    run_dir = Path(read_recipe(None, overrides).run.dir)
    return fetch_recipe(find_store(run_dir), read_secret(run_dir))


def _find_store(run_dir: Path) -> str:
    """The address of the run's store; raises `SettingError` on a host whose secret is not that of the run."""
    address = find_store(run_dir)
    if os.environ.get("GROUP_RANK", "0") != "0":
        fetch_recipe(address, read_secret(run_dir))
    return address


def _prepare_host(run_dir: Path, *, is_first: bool) -> None:
    """Make the run folder on this host; without a shared file system it has the logs of this host."""
    make_run_folder(run_dir)
    if not is_first and os.environ.get("LOCAL_RANK") == "0":
        try:
            (run_dir / SUMMARY_FILE).unlink(missing_ok=True)  # of an earlier run
        except OSError as error:
            raise SettingError(f"run.dir: cannot write in {run_dir}: {error.strerror}") from error
