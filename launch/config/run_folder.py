"""The folder of a run."""

from pathlib import Path

from ...comm.errors import SettingError


def make_run_folder(run_dir: str | Path) -> Path:
    """Make a run folder that its owner alone can read: it holds prompts, answers and the secret. One that exists stays as it is.

    Raises `SettingError`.
    """
    folder = Path(run_dir)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"run.dir: cannot create {folder}: {error.strerror}") from error
    return folder
