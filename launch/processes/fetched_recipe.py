"""The recipe that the store of a run has, for hosts without a copy of its file and for hosts that join it."""

import subprocess
import sys
from pathlib import Path

from ...comm.errors import SettingError
from ...comm.recipe import Recipe
from ..config.load import parse_recipe
from .secret import verified_recipe

_FETCH_S = 300.0


def fetch_recipe(why: str, run_dir: Path) -> Recipe:
    """The recipe that the run's store has, if the run's own supervisor signed it; `why` it is needed. Raises `SettingError`."""
    command = [sys.executable, "-m", "headrace.comm.store", "--fetch-recipe"]
    fetched = subprocess.run(command, capture_output=True, timeout=_FETCH_S, check=False)
    if fetched.returncode:
        reason = fetched.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise SettingError(f"{why}, and the run's store gave no recipe: {reason}")
    return parse_recipe(verified_recipe(fetched.stdout, run_dir))
