"""`rollout.serve`: the address can be used, and the packages of the front are there."""

from importlib.util import find_spec

from ....comm.errors import SettingError
from ....comm.recipe import Recipe
from ....rollout.serving.access import Access, api_keys, serve_address

PACKAGES = ("starlette", "uvicorn")
"""What the front needs besides the product's own packages."""


def check_serve(recipe: Recipe) -> None:
    """Refuse a front that could not start. A rollout whose engine cannot serve refuses itself. Raises `SettingError`."""
    text = recipe.rollout.serve
    if not text:
        return
    host, _ = serve_address(text)
    Access(host, api_keys(), "rollout.serve")
    check_packages("rollout.serve")
    if recipe.is_emulated:
        raise SettingError("rollout.serve: emulated devices have no tokens to answer with; leave it empty")


def check_packages(what: str) -> None:
    """Refuse to serve without the packages of the extra. Raises `SettingError`."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise SettingError(f"{what} needs {' and '.join(missing)}: pip install 'headrace[serve]'")
