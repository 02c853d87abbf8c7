"""Asks the hub of a running job: its status, and orders."""

import fcntl
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...comm.clock import duration
from ...comm.environment import ADDRESS_FILE
from ...comm.errors import HeadraceError, SettingError, StoreGone
from ...comm.mailbox import Mailbox, StoreMailboxes
from ...comm.messages import DrainRequested, MemberStatus, Message, StatusReport, StatusRequested
from ...comm.store.client import StoreClient
from ..config.run_folder import CONFIG_FILE, LOCK_FILE, read_summary
from ..processes.child import print_message
from ..processes.joining import RunAddress, find_run

ANSWER_S = 30.0
_CONNECT_S = 30.0


class HubQuery:
    """A connection to the hub of a run, from `open` to `close`."""

    def __init__(self, store: StoreClient, mailboxes: StoreMailboxes, inbox: Mailbox) -> None:
        self._store = store
        self._mailboxes = mailboxes
        self._inbox = inbox
        self._is_asking = False

    @staticmethod
    def open(run: RunAddress, deadline_s: float = _CONNECT_S) -> "HubQuery":
        """Connect to the store of a run. Raises `StoreGone` if none answers."""
        store = StoreClient.connect(run.store, run.secret.encode(), deadline_s)
        mailboxes = StoreMailboxes(store)
        try:
            inbox = mailboxes.open(f"ctl-{os.getpid()}-{time.monotonic_ns()}")
        except HeadraceError:
            store.close()
            raise
        return HubQuery(store, mailboxes, inbox)

    def ask(self, patience_s: float) -> StatusReport | None:
        """The status; None if the hub does not answer within `patience_s`, such as one that is being started again. Raises `StoreGone`.

        A request without an answer is not repeated: it stays in the store, and the next hub answers it.
        """
        if not self._is_asking:
            self._inbox.send("hub", StatusRequested(self._inbox.name))
            self._is_asking = True
        envelope = self._inbox.receive(patience_s)
        if envelope is None or not isinstance(envelope.message, StatusReport):
            return None
        self._is_asking = False
        return envelope.message

    def send(self, order: Message) -> None:
        """Send an order. Raises `StoreGone`."""
        self._inbox.send("hub", order)

    def close(self) -> None:
        """Close the connection; what was sent is still delivered."""
        self._inbox.close()
        self._mailboxes.close()
        self._store.close()


def order(where: str, message: Message) -> int:
    """Give the run in a folder or at an address an order; returns the exit code.

    Raises `SettingError` for a mistake, and `StoreGone` if no run answers.
    """
    query = open_query(where)
    try:
        status = query.ask(ANSWER_S)
        if status is None:
            print_message(f"error: the hub has not answered within {ANSWER_S:g} s; it may be being started again")
            return 1
        if isinstance(message, DrainRequested) and message.member not in {member.name for member in _rollouts(status)}:
            names = ", ".join(member.name for member in _rollouts(status))
            raise SettingError(f"drain {message.member}: no such rollout; there are {names}")
        query.send(message)
        return 0
    finally:
        query.close()


def open_query(where: str) -> HubQuery:
    """Connect to the run in a folder or at an address. Raises `SettingError`, and `StoreGone` if no run answers."""
    folder = Path(where)
    if not folder.exists() and not re.search(r":\d+$", where):
        raise SettingError(
            f"there is no folder {where}; the folder of a run that starts is made once its settings have been checked"
        )
    if folder.is_dir() and not (folder / CONFIG_FILE).exists():
        raise SettingError(f"{where} is not the folder of a run: it has no {CONFIG_FILE}")
    if (folder / CONFIG_FILE).exists() and not (folder / ADDRESS_FILE).exists():
        raise StoreGone(absence(folder))
    run = find_run(where)
    try:
        return HubQuery.open(run)
    except StoreGone as error:
        if folder.is_dir():
            raise StoreGone(absence(folder)) from error
        raise StoreGone(f"no run answers at {where}: {error}") from error


def absence(run_dir: Path) -> str:
    """Why the run in a folder, which has no summary, does not answer."""
    if _is_locked(run_dir):
        return f"the run in {run_dir} is starting: its processes are not there yet"
    return (
        f"the run in {run_dir} has ended without a summary, or has not begun: nothing answers there. If its launcher or its host died,"
        " run.resume=auto continues it"
    )


def ended_text(summary: Mapping[str, Any], run_dir: Path) -> str:
    """How a run has ended, from its summary, as one line."""
    how = f"{summary.get('status')} after {summary.get('steps')} steps"
    reward = (
        f", reward {summary['reward_first']:.3f} -> {summary['reward_last']:.3f}" if "reward_last" in summary else ""
    )
    took = f", in {duration(summary['time_s'])}" if "time_s" in summary else ""
    error = f": {summary['error']}" if summary.get("error") else ""
    model = f"; its model is {summary['export']}" if summary.get("export") else ""
    return f"the run in {run_dir} has ended: {how}{reward}{took}{error}{model}"


def ended(where: str) -> str:
    """How the run in a folder has ended; empty for one that has not, and for an address."""
    summary = read_summary(Path(where)) if Path(where).is_dir() else None
    return "" if summary is None else ended_text(summary, Path(where))


def is_starting(where: str) -> bool:
    """Whether a launcher prepares or runs the run in a folder, which does not answer yet."""
    return _is_locked(Path(where))


def try_to_open(where: str, deadline_s: float) -> HubQuery | None:
    """A connection to the run in a folder, or None while it cannot be had: it starts, or has ended."""
    try:
        return HubQuery.open(find_run(where), deadline_s)
    except (HeadraceError, OSError):
        return None


def _is_locked(run_dir: Path) -> bool:
    """Whether a launcher has the run folder."""
    try:
        with (run_dir / LOCK_FILE).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def _rollouts(status: StatusReport) -> list[MemberStatus]:
    return [member for member in status.members if member.name.startswith("rollout-") and member.incarnation]
