"""Talks to the hub of a running job: its status, and orders."""

import os
import sys
from collections.abc import Iterator

from ...comm.errors import SettingError, StoreGone
from ...comm.mailbox import Mailbox, StoreMailboxes
from ...comm.messages import DrainRequested, MemberStatus, Message, StatusReport, StatusRequested
from ...comm.store.client import StoreClient
from .child import print_message
from .joining import find_run

_ANSWER_S = 30.0


def talk(where: str, order: Message | None) -> int:
    """Ask the hub of the run in a folder or at an address for its status, and print it or send the order; returns the exit code.

    Raises `SettingError` for a mistake, and `StoreGone` if no run answers.
    """
    run = find_run(where)
    try:
        store = StoreClient.connect(run.store, run.secret.encode(), _ANSWER_S)
    except StoreGone as error:
        raise StoreGone(f"no run answers there: {error}") from error
    mailboxes = StoreMailboxes(store)
    inbox = mailboxes.open(f"ctl-{os.getpid()}")
    try:
        status = _ask(inbox)
        if status is None:
            print_message(f"error: the hub has not answered within {_ANSWER_S:g} s")
            return 1
        if order is None:
            sys.stdout.write("".join(f"{line}\n" for line in describe(status)))
            return 0
        if isinstance(order, DrainRequested) and order.member not in {member.name for member in _rollouts(status)}:
            names = ", ".join(member.name for member in _rollouts(status))
            raise SettingError(f"drain {order.member}: no such rollout; there are {names}")
        inbox.send("hub", order)
        return 0
    finally:
        inbox.close()
        mailboxes.close()
        store.close()


def _ask(inbox: Mailbox) -> StatusReport | None:
    inbox.send("hub", StatusRequested(inbox.name))
    envelope = inbox.receive(_ANSWER_S)
    return envelope.message if envelope is not None and isinstance(envelope.message, StatusReport) else None


def _rollouts(status: StatusReport) -> list[MemberStatus]:
    return [member for member in status.members if member.name.startswith("rollout-")]


def describe(status: StatusReport) -> Iterator[str]:
    """The status of a run, as lines."""
    yield f"{status.step} steps trained, version {status.version} published"
    account = ", ".join(f"{name} {value}" for name, value in status.account.items())
    yield f"rows: {account}"
    if status.alarm:
        yield f"last alarm, {status.alarm}"
    for member in status.members:
        restarts = f", started {member.incarnation} times" if member.incarnation > 1 else ""
        leased = f", {member.leased} rows leased" if member.leased else ""
        yield f"{member.name:14} on {member.host}{leased}{restarts}"
