"""Tells the hub that a process fails the run: the process itself, or its supervisor once it is dead. Imports no torch."""

from pathlib import Path

from ...comm.errors import HeadraceError
from ...comm.mailbox import Mailbox, StoreMailboxes
from ...comm.messages import Failed, Stop
from ...comm.recipe import Recipe
from ...comm.store.client import StoreClient
from ...comm.store.members import member_name
from ..placement import place_ranks

_CONNECT_S = 10.0


def report_failure(mailbox: Mailbox, recipe: Recipe, role: str, error: str, exit_code: int) -> None:
    """Report to the hub that the run fails. If it is the hub itself that fails, write the summary and stop all roles."""
    if role != "hub":
        mailbox.send("hub", Failed(error, exit_code))
        return
    from ...relay.hub.shutdown import write_summary

    try:
        write_summary(Path(recipe.run.dir), {"status": "failed", "error": error, "exit_code": exit_code})
    except (OSError, HeadraceError) as lost:
        print(f"{error}; summary.json is not written: {lost}", flush=True)
    for place in place_ranks(recipe.roles, tp=recipe.rollout.tp):
        if place.role != "shard":  # a shard ends with its rollout
            mailbox.send(place.name, Stop("failed"))
    if recipe.rollout.serve:
        mailbox.send(member_name("front", 0), Stop("failed"))


def report_death(name: str, recipe: Recipe, address: str, secret: bytes, error: str) -> None:
    """Report in the name of a process that is dead and is not started again. Raises `StoreGone`."""
    store = StoreClient.connect(address, secret, _CONNECT_S)
    mailboxes = StoreMailboxes(store)
    report_failure(mailboxes.open(name), recipe, name.partition("-")[0], error, exit_code=1)
    mailboxes.close()
    store.close()
