"""The recipe that the store of a run has, for hosts without a copy of its file and for hosts that join it."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ...comm.errors import SettingError
from ...comm.recipe import Recipe
from ..config.load import parse_recipe
from .secret import verified_recipe

_FETCH_S = 300.0


def fetch_recipe(why: str, run_dir: Path, environment: Mapping[str, str] | None = None) -> Recipe:
    """The recipe that the run's store has, if the run's own supervisor signed it; `why` it is needed. Raises `SettingError`.

    environment: variables that count before this process's own, such as the store's address and the secret.
    """
    variables = {**os.environ, **(environment or {})}
    command = [sys.executable, "-m", "headrace.comm.store", "--fetch-recipe"]
    fetched = subprocess.run(command, capture_output=True, timeout=_FETCH_S, check=False, env=variables)
    if fetched.returncode:
        reason = fetched.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise SettingError(f"{why}, and the run's store gave no recipe: {reason}")
    return parse_recipe(verified_recipe(fetched.stdout, run_dir, variables))
