"""The run's secret, the key of the seals of messages and handshakes: `HEADRACE_SECRET`, or a file of the run folder."""

import os
import secrets
from pathlib import Path

from ...comm.errors import SettingError
from ..config.run_folder import make_run_folder

SECRET_FILE = "secret"


def create_secret(run_dir: Path) -> None:
    """Write a new secret for a run that has none."""
    if "HEADRACE_SECRET" in os.environ or (run_dir / SECRET_FILE).exists():
        return
    with open(
        os.open(make_run_folder(run_dir) / SECRET_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w"
    ) as stream:
        stream.write(secrets.token_hex(32))


def read_secret(run_dir: Path) -> bytes:
    """The secret of the run in `run_dir`. Raises `SettingError` on a host that has none."""
    try:
        return (os.environ.get("HEADRACE_SECRET") or (run_dir / SECRET_FILE).read_text()).encode()
    except OSError as error:
        raise SettingError(
            f"run.dir: the run's secret {run_dir / SECRET_FILE} is not here ({error.strerror}), and it never goes over the"
            " network; share run.dir between the hosts, or set HEADRACE_SECRET to the same text on each of them"
        ) from error
