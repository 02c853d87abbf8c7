"""The order of the hub's messages and its journal: a message tells only decisions that the journal has already."""

from pathlib import Path

from headrace.comm.mailbox import Mailbox
from headrace.comm.messages import DropRows, LeaseGrant, Message, RestartPoint, RowBatch, RowId, Stop, TrainBatch
from headrace.comm.messages.base import is_partial, process_of
from headrace.comm.messages.migration import RowsReassigned
from headrace.relay.journal.hub_state import HubState
from headrace.relay.journal.records import RowStatus
from headrace.relay.journal.replay import replay


def keep_order(mailbox: Mailbox, journal: Path) -> Mailbox:
    """The hub's mailbox, which fails when a message tells of a decision that a replay of the journal does not know."""
    send = mailbox.send

    def checked(to: str, message: Message) -> None:
        told = told_too_early(replay(journal), to, message)
        assert not told, f"{type(message).__name__} to {to} tells of {told} before the journal has it"
        send(to, message)

    mailbox.send = checked
    return mailbox


def told_too_early(state: HubState, to: str, message: Message) -> list[str]:
    """The decisions in a message that `state` does not have. If the hub died now, the next one would not know them."""
    match message:
        case DropRows(keys=keys):
            return [key for key in keys if not is_partial(key) and _is_stored(state, to, key)]
        case LeaseGrant(leases=leases):
            rows = [(lease.group.row(sample), lease.attempt) for lease in leases for sample in lease.samples]
            return [row_id.key(attempt) for row_id, attempt in rows if not _is_leased(state, to, row_id, attempt)]
        case RowsReassigned(rows=rows, attempts=attempts):
            told = zip(rows, attempts, strict=True)
            return [row_id.key(attempt) for row_id, attempt in told if _is_leased(state, to, row_id, attempt)]
        case TrainBatch(groups=groups):
            return [str(ref.group) for ref in groups if ref.group not in state.in_training]
        case RowBatch(task=task, batch_id=number):
            is_known = task in state.tasks and number in state.tasks[task].open_batches
            return [] if is_known else [f"{task} {number}"]
        case RestartPoint(incarnation=incarnation, step=step):
            known = (state.trainer_incarnation, state.step)
            return [] if known == (incarnation, step) else [f"step {step} of incarnation {incarnation}"]
        case Stop(reason="drained"):
            return [] if to in state.drained else ["its end"]
        case _:
            return []


def _is_stored(state: HubState, relay: str, key: str) -> bool:
    row_id, attempt = RowId.of_key(key)
    row = state.row(row_id)
    if row is None or (row.status, row.attempt) != (RowStatus.READY, attempt):
        return False
    return relay in map(process_of, row.storage_ids)


def _is_leased(state: HubState, holder: str, row_id: RowId, attempt: int) -> bool:
    row = state.row(row_id)
    return row is not None and (row.status, row.holder, row.attempt) == (RowStatus.LEASED, holder, attempt)
