"""Moves unfinished trajectories between rollouts on one version, as the hub orders.

The source exports the trajectories between two steps of its generator, offers them to the destination and keeps them until the
hub reports that another rollout has the leases. The destination continues them at once and *claims* their leases of the hub;
until the answer it writes none of them. If the destination refuses, dies or does not answer, the source takes them back and
claims them itself. The hub decides which claim counts (`relay/hub/repacking.py`), so each row ends exactly once, even if a
process dies or a message is repeated.
"""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...comm.errors import HeadraceError
from ...comm.fleet import Fleet, Member
from ...comm.mailbox import Mailbox
from ...comm.messages import Message, RowId
from ...comm.messages.migration import (
    ClaimResult,
    ClaimRows,
    MigrateOrder,
    MigrateResult,
    RowsReassigned,
    TransferOffered,
    TransferRefused,
)
from ...comm.recipe import Recipe
from ...comm.trace import Trace, failpoint
from ..generators.base import GeneratorProfile
from ..leased_row import LeasedRow
from ..leases import HeldLeases
from .calibration import TransferCostModel, calibrate
from .codec import MovedRow
from .transport import Incoming, Outgoing, Transfers, TransfersOfBytes

if TYPE_CHECKING:
    from ..generators.base import Generator

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MoveDeadlines:
    """Seconds until a claim is repeated, until an unanswered offer is taken back, and until a stalled link is given up."""

    repeat_s: float = 2.0
    offer_s: float = 20.0
    link_s: float = 5.0


@dataclass(slots=True)
class PendingMove:
    """An offer to another rollout; `rows` are the trajectories that no other rollout has claimed yet."""

    order: MigrateOrder
    to: Member
    rows: dict[RowId, MovedRow]
    transfer: Outgoing
    with_cache: bool
    export_s: float
    """Time to export them."""
    began: float
    """Start of the move on the trace's clock."""
    sent_at: float
    num_gone: int = 0


class Migration:
    """One rollout's part in repacking; called by its loop between two steps of the generator."""

    def __init__(
        self,
        fleet: Fleet,
        mailbox: Mailbox,
        generator: "Generator",
        leases: HeldLeases,
        recipe: Recipe,
        trace: Trace,
        deadlines: MoveDeadlines | None = None,
        transfers: Transfers | None = None,
    ) -> None:
        self._fleet = fleet
        self._mailbox = mailbox
        self._generator = generator
        self._leases = leases
        self._is_enabled = recipe.repack.is_enabled and generator.can_migrate
        self._keeps_groups = recipe.reward.batch == "group"
        self._max_batch = recipe.generator.num_slots
        self._trace = trace
        self._seconds = trace.clock.now
        self._deadlines = deadlines or MoveDeadlines()
        self.profile: GeneratorProfile | None = None
        """None until `begin`: every order and offer is refused."""
        self.pending: dict[int, PendingMove] = {}
        self._incoming: dict[tuple[str, int], tuple[TransferOffered, Incoming]] = {}
        self._claims: dict[int, tuple[ClaimRows, float]] = {}
        self._costs = TransferCostModel()
        # The ids of each incarnation are new: an answer to an earlier one may still be in the inbox.
        self._last_request_id = fleet.incarnation << 32
        self._transfers = transfers or TransfersOfBytes(fleet, self._deadlines.link_s)

    def begin(self) -> None:
        """Measure the generator, which is idle and has weights, and take part from now on, if the settings and it allow it."""
        if not self._is_enabled:
            return
        self.profile = self._generator.profile or calibrate(self._generator, self._max_batch, self._trace.clock)
        _log.info("%s: %s", self._fleet.name, self.profile)

    @property
    def batch_bound(self) -> int:
        """Trajectories beyond which a decode step takes notably longer; 0 without a profile."""
        return 0 if self.profile is None else min(self.profile.batch_bound, self._max_batch)

    @property
    def kv_used(self) -> int:
        """Tokens of all unfinished trajectories, each with its own prompt: the room that they need on another rollout."""
        return sum(live.num_tokens for live in self._generator.unfinished())

    @property
    def is_under_way(self) -> bool:
        """A transfer is open in either direction, so the weights must not change."""
        return bool(self.pending or self._incoming)

    def held(self) -> list[LeasedRow]:
        """Trajectories offered to other rollouts that this one still has the leases of."""
        return [t.held for t in self.moving()]

    def moving(self) -> list[MovedRow]:
        """These with their states."""
        return [t for move in self.pending.values() for t in move.rows.values()]

    def handle(self, sender: str, message: Message) -> None:
        match message:
            case MigrateOrder():
                self._on_migrate(message)
            case TransferOffered():
                self._on_offer(sender, message)
            case TransferRefused(request_id=number, reason=reason):
                self._take_back(number, reason)
            case ClaimResult():
                self._on_claimed(message)
            case RowsReassigned(rows=rows, attempts=attempts):
                self._on_reassigned(dict(zip(rows, attempts, strict=True)))
            case _:
                pass

    def advance(self) -> None:
        """Import what has arrived, repeat unanswered claims, take back offers that were not accepted."""
        now = self._seconds()
        for (sender, number), (offer, incoming) in list(self._incoming.items()):
            if incoming.done:
                del self._incoming[sender, number]
                self._import(sender, offer, incoming)
        for request_id, (claim, asked_at) in list(self._claims.items()):
            if now - asked_at > self._deadlines.repeat_s:
                self._claims[request_id] = (claim, now)
                self._mailbox.send("hub", claim)
        for number, move in list(self.pending.items()):
            if self._destination(move.to.name, move.to.incarnation) is None:
                self._take_back(number, "gone")
            elif now - move.sent_at > self._deadlines.offer_s:
                self._take_back(number, "silent")

    def close(self) -> None:
        """Drop open transfers; the caller has reported their rows by `held`."""
        for move in self.pending.values():
            move.transfer.close()
        self._transfers.close()
        self._incoming.clear()

    # --------------------------------------------------------------------------------------------------- as the source

    def _on_migrate(self, order: MigrateOrder) -> None:
        to = self._destination(order.to)
        refusal = ""
        if self.profile is None:
            refusal = "unable"
        elif order.version != self._generator.weights.version:
            refusal = "version"
        elif to is None:
            refusal = "gone"
        elif not self._export(order, to, self._generator.kv_token_bytes, self.profile.prefill_s):
            refusal = "nothing left"
        if refusal:
            self._mailbox.send("hub", MigrateResult(order.request_id, refusal=refusal))

    def _export(self, order: MigrateOrder, to: Member, token_bytes: int, prefill_s: float) -> bool:
        """Export all trajectories whose lease is certain and offer them; returns whether there were any.

        With `reward.batch=group` a group with a finished sample stays, since that one waits for the others.
        """
        started = self._seconds()
        began = self._trace.now()
        staying = {x.row_id.group for x in self._leases.held.values() if x.completion} if self._keeps_groups else ()
        unfinished = (x.trajectory_id for x in self._generator.unfinished())
        live = [(number, self._leases.held[number]) for number in unfinished if number in self._leases.held]
        movable = [number for number, held in live if not (held.claim_id or held.row_id.group in staying)]
        with_cache = self._costs.should_send_cache(to.host == self._fleet.me.host, token_bytes, prefill_s)
        states = self._generator.export_sequences(movable, with_cache)
        if not states:
            return False
        rows = [MovedRow(self._leases.held.pop(state.trajectory_id), state) for state in states]
        export_s = self._seconds() - started
        self._last_request_id += 1
        transfer = self._transfers.send(to, self._last_request_id, rows)
        by_id = {row.held.row_id: row for row in rows}
        sent_at = self._seconds()
        self.pending[self._last_request_id] = PendingMove(
            order, to, by_id, transfer, with_cache, export_s, began, sent_at
        )
        offer = TransferOffered(
            request_id=self._last_request_id,
            version=order.version,
            num_rows=len(states),
            num_tokens=sum(len(state.prompt_ids) + len(state.token_ids) for state in states),
            num_bytes=transfer.num_bytes,
            path=transfer.path,
            link=transfer.link,
        )
        self._mailbox.send(to.name, offer)
        failpoint("repack", rows=len(states))
        return True

    def _take_back(self, request_id: int, reason: str) -> None:
        """Resume the unclaimed trajectories of an offer, and claim them: the destination may claim them as well."""
        move = self.pending.pop(request_id, None)
        if move is None:
            return
        assert move.order.version == self._generator.weights.version, "the weights changed during a move"
        self._resume([t for t in move.rows.values() if t.held.row_id.number not in self._leases.held])
        self._end(move, reason)

    def _on_reassigned(self, rows: dict[RowId, int]) -> None:
        """Other rollouts have the leases of these attempts of rows now."""
        for number, move in list(self.pending.items()):
            for row_id, attempt in rows.items():
                row = move.rows.get(row_id)
                if row is not None and row.held.attempt == attempt:
                    del move.rows[row_id]
                    move.num_gone += 1
            if not move.rows:
                del self.pending[number]
                self._end(move, "")
        for row_id, attempt in rows.items():
            held = self._leases.held.get(row_id.number)
            if held is not None and held.attempt == attempt:
                self._drop(held)

    def _end(self, move: PendingMove, reason: str) -> None:
        transfer = move.transfer
        if move.with_cache and transfer.seconds is not None:
            self._costs.record(bool(transfer.path), transfer.num_bytes, move.export_s + transfer.seconds)
        transfer.close()
        self._trace.span("move", move.began, to=move.to.name, rows=move.num_gone, refusal=reason)
        moved = (move.num_gone, transfer.num_bytes, "") if move.num_gone else (0, 0, reason)
        self._mailbox.send("hub", MigrateResult(move.order.request_id, *moved))

    # ---------------------------------------------------------------------------------------------- as the destination

    def _on_offer(self, sender: str, offer: TransferOffered) -> None:
        if reason := self._reason_against(offer):
            self._mailbox.send(sender, TransferRefused(offer.request_id, reason))
        elif (sender, offer.request_id) not in self._incoming:
            self._incoming[sender, offer.request_id] = (offer, self._transfers.receive(sender, offer))

    def _reason_against(self, offer: TransferOffered) -> str:
        """Why an offer is refused, or "". Checked when the offer arrives and again when its bytes have arrived."""
        generator = self._generator
        if self.profile is None:
            return "unable"
        if offer.version != generator.weights.version:
            return "version"
        num_requests = generator.num_running + generator.num_waiting + offer.num_rows
        has_room = self.kv_used + offer.num_tokens <= generator.kv_capacity and num_requests <= self.batch_bound
        return "" if has_room else "full"

    def _import(self, sender: str, offer: TransferOffered, incoming: Incoming) -> None:
        reason = self._reason_against(offer)
        rows: list[MovedRow] = []
        try:
            rows = incoming.rows()
        except HeadraceError as error:
            _log.warning("%s: refused the transfer of %s: %s", self._fleet.name, sender, str(error).partition("\n")[0])
            reason = reason or "broken"
        if any(t.held.row_id.number in self._leases.held for t in rows):
            reason = reason or "held already"
        if reason:
            self._mailbox.send(sender, TransferRefused(offer.request_id, reason))
        else:
            self._resume(rows)

    # ------------------------------------------------------------------------------------------------------------ both

    def _resume(self, rows: list[MovedRow]) -> None:
        """Continue trajectories, and claim their leases of the hub."""
        if not rows:
            return
        self._last_request_id += 1
        for held, state in rows:
            self._generator.import_sequences([state])
            self._leases.held[state.trajectory_id] = held
            held.claim_id = self._last_request_id
        claim = ClaimRows(self._last_request_id, [t.held.row_id for t in rows], [t.held.attempt for t in rows])
        self._claims[self._last_request_id] = (claim, self._seconds())
        self._mailbox.send("hub", claim)

    def _on_claimed(self, answer: ClaimResult) -> None:
        if answer.request_id not in self._claims:
            return  # a second answer to a repeated claim
        claim, _ = self._claims.pop(answer.request_id)
        for row_id, attempt in zip(claim.rows, answer.attempts, strict=True):
            held = self._leases.held.get(row_id.number)
            if held is None or held.claim_id != answer.request_id:
                continue  # leased to this rollout meanwhile, or no longer held
            held.claim_id = 0
            if attempt:
                held.attempt = attempt
            else:
                self._drop(held)

    def _drop(self, held: LeasedRow) -> None:
        """Drop a trajectory whose lease another rollout has."""
        del self._leases.held[held.row_id.number]
        if held.completion is None:
            self._generator.export_sequences([held.row_id.number])

    def _destination(self, name: str, incarnation: int | None = None) -> Member | None:
        """The living rollout of this name and, if given, incarnation."""
        found = (member for member in self._fleet.alive_members("rollout") if member.name == name)
        return next((member for member in found if incarnation in (None, member.incarnation)), None)
