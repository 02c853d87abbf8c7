"""The recipe that the store of a run has, for hosts without a copy of its file and for the processes of roles."""

from ...comm.environment import RECIPE_KEY
from ...comm.errors import SettingError, StoreGone, WrongSecret
from ...comm.recipe import Recipe
from ...comm.store.client import StoreClient
from ..config.load import parse_recipe

_CONNECT_S = 120.0


def fetch_recipe(address: str, secret: bytes) -> Recipe:
    """The recipe of the run whose store is at `address`. Raises `StoreGone`, `SettingError` for a wrong secret.

    It names code that a process runs; only the run's own supervisor can have put it there, before the store had a client.
    """
    try:
        store = StoreClient.connect(address, secret, _CONNECT_S)
    except StoreGone as error:
        if isinstance(error.__cause__, WrongSecret):
            raise SettingError(
                f"run.dir: the secret on this host is not that of the run whose store is at {address}; share run.dir between the hosts,"
                " or set HEADRACE_SECRET to the same text on each of them"
            ) from error
        raise
    try:
        recipe = store.get(RECIPE_KEY)
    finally:
        store.close()
    if recipe is None:
        raise SettingError(f"the store at {address} has no recipe")
    return parse_recipe(recipe.decode())
