"""What `headrace run` does on a host: a dry run, joining a run, or starting torchrun and printing how the run ended."""

import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..comm.clock import begin
from ..comm.disk import tell
from ..comm.errors import SettingError
from ..comm.recipe import Recipe
from ..rollout.generators.vllm_engine.package import check_vllm
from .command_line import flush_or_drop
from .config.arguments import Arguments
from .config.checks.trackers import check_trackers
from .config.dry_run import DryRun
from .config.gpus import Gpus
from .config.load import read_recipe
from .config.run_folder import read_summary
from .placement import count_ranks, place_ranks, with_relays
from .processes.agent import REFUSED, Hosts, Torchrun
from .processes.child import print_message
from .processes.joining import join_run
from .processes.rank import prepare, run_rank, tell_finished
from .recipes import parts
from .recipes.names import find_recipe, recipes, summary_of
from .report.model_card import write_cards
from .report.summary import print_summary
from .resume import finished_after
from .status.live import live_terminal

_NO_RUN = "--try: it starts no run; leave out torchrun and the options of a run"


def list_recipes() -> int:
    """Print the names of the recipes that come with the project, each with what it does; returns the exit code."""
    width = max(map(len, recipes()))
    sys.stdout.writelines(f"{name:{width}}  {summary_of(path)}\n" for name, path in recipes().items())
    return 0


def start_rank(arguments: Arguments) -> int:
    """The part of one rank of torchrun's; returns its exit code. Raises `SettingError`."""
    file = None if arguments.recipe is None else find_recipe(arguments.recipe)
    if arguments.num_tried is not None:
        raise SettingError(_NO_RUN)
    return run_rank(file, arguments.overrides, _dry_run(arguments), with_trace=arguments.with_trace)


def start(arguments: Arguments) -> int:
    """Do what the words ask for; returns the exit code. Raises `SettingError` for a user's mistake."""
    hosts = Hosts.of(arguments.hosts)
    file = None if arguments.recipe is None else find_recipe(arguments.recipe)
    if arguments.join:
        return _join(arguments, file)
    if arguments.num_tried is not None:
        return _try(arguments, file)
    dry_run = _dry_run(arguments)
    recipe = _read_here(file, arguments.overrides, hosts)
    if (step := finished_after(recipe.run)) is not None and dry_run is None:
        tell_finished(step)
        return 0
    if dry_run is None:
        _say_what_starts(file, recipe)
        if hosts.nnodes == 1:
            check_vllm(recipe)  # before a policy is made, which takes minutes
            check_trackers(recipe.run)
    made = parts.add(file, recipe, () if arguments.is_dry_run else parts.MADE)
    overrides = [*arguments.overrides, *made.settings]
    recipe = _read_here(file, overrides, hosts)
    if dry_run is not None:
        ranks = hosts.ranks(recipe.roles) if arguments.hosts else ()
        for warning in replace(dry_run, hosts=ranks, unmade=made.unmade).of(with_relays(recipe, hosts.nnodes)):
            print_message(f"warning: {warning}")
        return 0
    code = _launch(recipe, hosts, file, overrides, with_trace=arguments.with_trace)
    if code == 0:
        parts.show_result(file, recipe)
    return code


def _join(arguments: Arguments, file: str | None) -> int:
    """Join a running job with this host; returns the exit code."""
    is_tried = arguments.num_tried is not None
    if arguments.is_dry_run or arguments.hosts or is_tried or arguments.with_trace:
        raise SettingError("join: the other options are not for a host that joins a run; leave them out")
    return join_run(arguments.join, file, list(arguments.overrides))


def _try(arguments: Arguments, file: str | None) -> int:
    """Try prompts, rewards and tools of the recipe; returns the exit code."""
    if arguments.is_dry_run or arguments.hosts:
        raise SettingError(_NO_RUN)
    from .config.trial import Trial  # it loads what no process of a run needs

    trial = Trial.of(arguments.num_tried or "", arguments.response)
    recipe = read_recipe(file, arguments.overrides)
    made = parts.add(file, recipe, ["data.path"])
    # To train or fetch a policy takes minutes. Without one the prompt is shown as in the data.
    without = "model.path=" if "model.path" in made.unmade else "?"
    settings = [word for word in made.settings if not word.startswith(without)]
    return trial.run(read_recipe(file, [*arguments.overrides, *settings]))


def _say_what_starts(file: str | None, recipe: Recipe) -> None:
    """The first line of a run, printed before anything takes time."""
    with_recipe = f" with {file}" if file else ""
    begin()
    tell(
        f"training {recipe.model.path or 'a policy'}{with_recipe}: {recipe.run.steps} steps; run folder {recipe.run.dir}"
    )


def _dry_run(arguments: Arguments) -> DryRun | None:
    if not arguments.is_dry_run:
        return None
    gpus = None if arguments.gpus is None else Gpus.parse(arguments.gpus)
    return DryRun(gpus=gpus, with_settings=arguments.with_settings)


def _read_here(file: str | None, overrides: Sequence[str], hosts: Hosts) -> Recipe:
    """The recipe, or what the launcher itself has to know of it on a later host without the file: the run folder."""
    if file is None or hosts.node_rank == 0 or Path(file).exists():
        return read_recipe(file, overrides)
    if not hosts.nproc_per_node or not any(word.startswith("run.dir=") for word in overrides):
        raise SettingError(
            f"no recipe file {file!r} on host {socket.gethostname()}; it gets the first host's with --nproc-per-node and"
            " run.dir=FOLDER on its command line"
        )
    return read_recipe(None, overrides)


def _launch(recipe: Recipe, hosts: Hosts, file: str | None, overrides: Sequence[str], *, with_trace: bool) -> int:
    """Start torchrun for this host. With several hosts the first rank prepares the run, since its host may be another."""
    if file is None or Path(file).exists():
        place_ranks(recipe.roles, hosts.ranks(recipe.roles), recipe.rollout.tp)
    if hosts.nnodes > 1:
        if hosts.node_rank == 0:
            hosts.check_port()
        torchrun = Torchrun(recipe, hosts, [*filter(None, [file]), *overrides])
        code = _run_shown(torchrun, recipe, hosts)
    else:
        with prepare(with_relays(recipe, 1)):
            torchrun = Torchrun(recipe, hosts)
            code = _run_shown(torchrun, recipe, hosts)
    return _end_of_run(Path(recipe.run.dir), torchrun, code, is_first=hosts.node_rank == 0, with_trace=with_trace)


def _run_shown(torchrun: Torchrun, recipe: Recipe, hosts: Hosts) -> int:
    """Run torchrun to its end, with the status of the run below its lines where they go to a terminal; returns its exit code."""
    tell(
        f"starting {count_ranks(recipe.roles, hosts.nnodes)} ranks; the logs of all processes are in {recipe.run.dir}/logs"
    )
    with live_terminal(Path(recipe.run.dir), is_first=hosts.node_rank == 0) as terminal:
        return torchrun.run() if terminal is None else torchrun.run(terminal.start)


def _end_of_run(run_dir: Path, torchrun: Torchrun, code: int, *, is_first: bool, with_trace: bool) -> int:
    """The exit code of the run on this host, whose torchrun ended with `code`; the first host prints how it ended."""
    if code == -REFUSED and not torchrun.received:
        return 2
    if torchrun.lost_folder:
        print_message(f"error: {torchrun.lost_folder}")
        return 2
    summary = print_summary(run_dir, with_trace=with_trace) if is_first else read_summary(run_dir)
    if is_first and summary is not None:
        write_cards(summary)
    flush_or_drop()
    if torchrun.received:
        return 128 + torchrun.received
    if summary is None:
        print_message(f"error: the run ended without a summary; see {run_dir}/logs")
        return 1
    return int(summary.get("exit_code", code)) or (1 if code else 0)
