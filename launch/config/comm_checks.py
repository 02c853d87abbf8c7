"""Checks of the ways between processes: `comm.*` against the roles and engines of a recipe."""

from ...comm.errors import SettingError
from ...comm.recipe import Recipe


def check_comm(recipe: Recipe) -> None:
    """The links can carry what the recipe asks of them. Raises `SettingError`."""
    comm = recipe.comm
    if comm.expiry_s < 2 * comm.heartbeat_s:
        raise SettingError(
            f"comm.expiry_s={comm.expiry_s:g} must be at least twice comm.heartbeat_s={comm.heartbeat_s:g}, or processes that are"
            " alive would count as dead"
        )
    if comm.tls:
        _check_tls(recipe)


def _check_tls(recipe: Recipe) -> None:
    if recipe.comm.link == "nccl":
        raise SettingError("comm.tls: NCCL does not encrypt; set comm.link=tcp, or comm.tls=false")
    from ...comm.links.tls import TlsIdentity

    TlsIdentity()
