"""The run's secret, with which messages are signed and connections proved: `HEADRACE_SECRET`, or a file in a folder that its owner alone can enter.

A recipe from the store counts only if it is signed with the secret: it names code that a process runs.
"""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from ...comm.environment import RECIPE_KEY
from ...comm.errors import MessageRefused, SettingError
from ...comm.signing import verify_entry
from ..config.run_folder import make_run_folder

SECRET_FILE = "private/secret"
"""Its place in the run folder, of which others may read the rest."""


def create_secret(run_dir: Path) -> None:
    """Write a new secret for each start of a run: messages, entries and recipes of an earlier start are refused then."""
    if "HEADRACE_SECRET" in os.environ:
        return
    path = make_run_folder(run_dir) / SECRET_FILE
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(secrets.token_hex(32))


def read_secret(run_dir: Path, environment: Mapping[str, str] = os.environ) -> bytes:
    """The secret of the run in `run_dir`. Raises `SettingError` on a host that has none."""
    try:
        return (environment.get("HEADRACE_SECRET") or (run_dir / SECRET_FILE).read_text()).encode()
    except OSError as error:
        raise SettingError(
            f"run.dir: the run's secret {run_dir / SECRET_FILE} is not here ({error.strerror}), and it never goes over the"
            " network; share run.dir between the hosts, or set HEADRACE_SECRET to the same text on each of them"
        ) from error


def verified_recipe(signed: bytes, run_dir: Path, environment: Mapping[str, str] = os.environ) -> str:
    """The recipe that the store has, as YAML, if the run's own supervisor signed it. Raises `SettingError`."""
    try:
        return verify_entry(read_secret(run_dir, environment), RECIPE_KEY, signed).decode()
    except MessageRefused as refusal:
        raise SettingError(
            f"run.dir: the recipe in the run's store is not signed with the secret of {run_dir} ({refusal}): another run's"
            " secret is there, or a stranger wrote the recipe"
        ) from refusal
