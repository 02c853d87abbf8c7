"""A host that joins a running job: `join=RUN_FOLDER` or `join=HOST:PORT` adds its rollouts and relays, with the next free numbers.

The launcher finds the run and starts a torchrun of its own. So this host can come and go: its death costs its unfinished
trajectories alone, and its own mistakes end nothing else.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

from ...comm.environment import ADDRESS_FILE, JOINING, STORE
from ...comm.errors import SettingError, StoreGone
from ...comm.recipe import Recipe, RoleSettings
from ...comm.store.client import StoreClient
from ..config.load import read_recipe
from ..config.run_folder import make_run_folder
from ..placement import check_replicas, place_joining
from .agent import REFUSED, Hosts, Torchrun
from .child import print_message
from .fetched_recipe import fetch_recipe
from .secret import SECRET_FILE

_FIND_S = 60.0


def join_run(where: str, recipe_file: str | None, overrides: list[str]) -> int:
    """Join the run in a folder or at an address, with the `roles` of the recipe; returns the launcher's exit code.

    Everything else is as in the run's own recipe. Raises `SettingError`.
    """
    roles = read_recipe(recipe_file, overrides).roles
    if others := [word for word in overrides if word.partition("=")[0] not in ("roles.rollout", "roles.relay")]:
        raise SettingError(
            f"join: {others[0]} has no effect; all settings except roles.rollout and roles.relay come from the run's recipe"
        )
    run = find_run(where)
    recipe = _recipe_of(run)
    check_joining(recipe, where, roles)
    first_replica, first_relay = _take_places(run, recipe, roles)
    counts = [roles.rollout, roles.relay or 0, recipe.rollout.tp, first_replica, first_relay]
    make_run_folder(recipe.run.dir)
    places = place_joining(*counts)
    print_message(f"joins the run in {recipe.run.dir} with {', '.join(place.name for place in places)}")
    environment = run.environment | {JOINING: ",".join(map(str, counts))}
    torchrun = Torchrun(recipe, Hosts(nproc_per_node=(len(places),)), [f"join={where}"], environment)
    code = torchrun.run()
    if code == -REFUSED and not torchrun.received:
        return 2
    return 128 + torchrun.received if torchrun.received else abs(code)


def check_joining(recipe: Recipe, where: str, roles: RoleSettings) -> None:
    """The files of a run's recipe are on this host for its new ranks. Raises `SettingError`.

    Its relative paths begin at the present folder, which therefore has to be the one in which the run was started.
    """
    from ..config.checks.recipe import check_files

    run_dir = Path(recipe.run.dir)
    if Path(where).is_dir() and not run_dir.is_absolute() and run_dir.resolve() != Path(where).resolve():
        raise SettingError(
            f"join: the run's recipe names its files from the folder in which it was started, such as run.dir={run_dir}; join it"
            f" from that folder, not from {Path.cwd()}"
        )
    check_replicas(roles, recipe.rollout.tp)
    check_files("rollout", recipe)


@dataclass(frozen=True, slots=True)
class RunAddress:
    """Where the store of a running job is, and the job's secret."""

    store: str
    secret: str = field(repr=False)

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which a process finds the run. They go to child processes; the caller's own stay as they are."""
        return {STORE: self.store, "HEADRACE_SECRET": self.secret}


def find_run(where: str) -> RunAddress:
    """The run in a folder or at an address; a secret in the environment counts before the folder's. Raises `SettingError`."""
    folder = Path(where)
    secret = os.environ.get("HEADRACE_SECRET")
    if not folder.is_dir():
        if secret is None:
            raise SettingError(f"{where} is not the folder of a run; an address needs HEADRACE_SECRET too")
        return RunAddress(where, secret)
    try:
        store = (folder / ADDRESS_FILE).read_text().partition("\n")[0]
        return RunAddress(store, (folder / SECRET_FILE).read_text() if secret is None else secret)
    except OSError as error:
        raise SettingError(f"no run has started in {where}: {error.filename}: {error.strerror}") from error


def _recipe_of(run: RunAddress) -> Recipe:
    try:
        return fetch_recipe(run.store, run.secret.encode())
    except StoreGone as error:
        raise SettingError(f"join: no run answers at {run.store}: {error}") from error


def _take_places(run: RunAddress, recipe: Recipe, roles: RoleSettings) -> tuple[int, int]:
    """The numbers of this host's first replica and first relay. Raises `SettingError`."""
    try:
        store = StoreClient.connect(run.store, run.secret.encode(), _FIND_S)
    except StoreGone as error:
        raise SettingError(f"join: no run answers at {run.store}: {error}") from error
    counts = {"rollout": roles.rollout, "relay": roles.relay or 0}
    joined = {role: store.add(f"joined/{role}", count) - count for role, count in counts.items()}
    store.close()
    return (
        recipe.num_replicas + joined["rollout"] // recipe.rollout.tp,
        (recipe.roles.relay or 0) + joined["relay"],
    )
