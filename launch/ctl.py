"""Looks at a running job and gives it orders.

    python -m headrace.launch.ctl RUN_FOLDER|HOST:PORT status
    python -m headrace.launch.ctl RUN_FOLDER|HOST:PORT drain ROLLOUT     it finishes its trajectories and leaves
    python -m headrace.launch.ctl RUN_FOLDER|HOST:PORT stop              as Ctrl-C: a checkpoint, then the end in order

An address needs the run's secret in HEADRACE_SECRET.
"""

import os
import signal
import sys
from collections.abc import Iterator, Sequence

from ..comm.errors import SettingError, StoreGone
from ..comm.mailbox import Mailbox, StoreMailboxes
from ..comm.messages import DrainRequested, Interrupted, MemberStatus, Message, StatusReport, StatusRequested
from ..comm.store.client import StoreClient
from .processes.child import print_message
from .processes.joining import RunAddress, find_run

_ANSWER_S = 30.0


def main(words: Sequence[str]) -> int:
    """Returns the exit code: 2 for a mistake, 1 if the run does not answer."""
    if {"--help", "-h"} & {*words}:
        sys.stdout.write(__doc__ or "")
        return 0
    match words:
        case [where, "status"]:
            order = None
        case [where, "drain", rollout]:
            order = DrainRequested(rollout)
        case [where, "stop"]:
            order = Interrupted(signal.SIGTERM)
        case _:
            sys.stderr.write(__doc__ or "")
            return 2
    try:
        return _talk(find_run(where), order)
    except SettingError as error:
        print_message(f"error: {error}")
        return 2
    except StoreGone as error:
        print_message(f"error: no run answers there: {error}")
        return 1


def _talk(run: RunAddress, order: Message | None) -> int:
    """Ask the hub for the run's status, and print it or send the order; returns the exit code."""
    store = StoreClient.connect(run.store, run.secret.encode(), _ANSWER_S)
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
    yield f"step {status.step} in training, version {status.version} published"
    account = ", ".join(f"{name} {value}" for name, value in status.account.items())
    yield f"rows: {account}"
    for member in status.members:
        restarts = f", started {member.incarnation} times" if member.incarnation > 1 else ""
        leased = f", {member.leased} rows leased" if member.leased else ""
        yield f"{member.name:14} on {member.host}{leased}{restarts}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
