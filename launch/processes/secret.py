"""The run's secret, with which connections are proved: `HEADRACE_SECRET`, or a file in a folder that its owner alone can enter."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from ...comm.errors import SettingError
from ..config.run_folder import make_run_folder

SECRET_FILE = "private/secret"
"""Its place in the run folder, of which others may read the rest."""


def create_secret(run_dir: Path) -> None:
    """Write a new secret for each start of a run: a process of an earlier start is refused then."""
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
            f"run.dir: the run's secret {run_dir / SECRET_FILE} is not on this host ({error.strerror}), and it is never sent over"
            " the network; share run.dir between the hosts, or set HEADRACE_SECRET to the same text on each of them"
        ) from error
