"""The packages of `run.report_to` are there."""

from importlib.util import find_spec

from ....comm.errors import SettingError
from ....comm.recipe import RunSettings

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow-skinny"}
"""What pip installs for each."""


def check_trackers(settings: RunSettings) -> None:
    """Refuse a tracker whose package this host does not have. Nothing is imported. Raises `SettingError`."""
    for name in settings.report_to:
        found = find_spec(name)
        # wandb and mlflow make folders of their own names, which Python would take for packages without files.
        if found is None or found.origin is None:
            raise SettingError(
                f"run.report_to={name}: the package {name} is not installed; pip install {_PACKAGES[name]}, or leave {name} out"
            )
