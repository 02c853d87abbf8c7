"""Moving unfinished trajectories between rollouts on one version: the orders of the hub carried out.

The source takes the trajectories out between two steps, offers them to the destination and keeps them until the hub says
that they are somebody else's. The destination goes on with them at once and *claims* them of the hub; until the answer it
ships none. If the destination refuses, dies or says nothing, the source puts them back and claims them itself. Which claim
counts is the hub's word (`relay.repacking`), so each row ends exactly once whoever dies, and whatever is said twice.
"""

import logging
import math
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

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
from ...comm.recipe import RepackSettings
from ...comm.trace import Trace
from ...relay.repack import Report, can_fit
from ..generators.base import Generator
from ..leases import HeldLeases, LeasedRow
from .calibration import GeneratorProfile, TransferCostModel, calibrate
from .codec import MovedRow, decode_rows, encode_rows
from .transport import IncomingTransfer, OutgoingTransfer

_log = logging.getLogger(__name__)

REPEAT_S = 2.0
PATIENCE_S = 20.0
"""Seconds after which an offer that nobody has answered is taken back."""


@dataclass(slots=True)
class PendingMove:
    """A parcel on its way: its trajectories that nobody else has claimed yet."""

    request_id: int
    version: int
    to: Member
    rows: dict[RowId, MovedRow]
    transfer: OutgoingTransfer
    with_cache: bool
    export_s: float
    """What taking them out and packing them took."""
    began: float
    """By the trace's clock."""
    sent_at: float = field(default_factory=time.monotonic)
    num_gone: int = 0


class Migration:
    """One rollout's part in repacking; called by its loop between two steps of the generator."""

    def __init__(
        self,
        fleet: Fleet,
        mailbox: Mailbox,
        generator: Generator,
        leases: HeldLeases,
        settings: RepackSettings,
        max_batch: int,
        trace: Trace,
    ) -> None:
        self.fleet = fleet
        self.mailbox = mailbox
        self.generator = generator
        self.leases = leases
        self.settings = settings
        self.max_batch = max_batch
        self.trace = trace
        self.profile: GeneratorProfile | None = None
        """None: it neither gives nor takes."""
        self.pending: dict[int, PendingMove] = {}
        self._incoming: dict[tuple[str, int], tuple[TransferOffered, IncomingTransfer]] = {}
        self._claims: dict[int, tuple[ClaimRows, float]] = {}
        self._costs = TransferCostModel(settings.transfer)
        # Numbers start anew with each incarnation: an answer to an earlier one may still lie in the inbox.
        self._last_request_id = fleet.incarnation << 32
        self._io_pool = ThreadPoolExecutor(1, thread_name_prefix=f"{fleet.name} porter")

    def begin(self) -> None:
        """Measure the generator, which is idle and has weights; without this, every order and offer is refused."""
        bound = self.settings.batch_bound
        if not self.settings.enabled or not self.generator.can_migrate:
            return
        if bound is not None and self.settings.transfer != "auto":
            self.profile = GeneratorProfile(bound, math.inf)  # nothing that is left to be measured would be asked for
            return
        self.profile = calibrate(self.generator, self.max_batch)
        _log.info("%s: %s", self.fleet.name, self.profile)

    @property
    def batch_bound(self) -> int:
        """Trajectories beyond which a decode step takes notably longer; 0 for a rollout that takes no part."""
        if self.profile is None:
            return 0
        return min(self.settings.batch_bound or self.profile.batch_bound, self.max_batch)

    @property
    def kv_used(self) -> int:
        """Tokens of all unfinished trajectories, each with its own prompt: what they take up elsewhere."""
        return sum(live.num_tokens for live in self.generator.unfinished())

    @property
    def is_under_way(self) -> bool:
        """A parcel goes or comes: the weights must stay what they are."""
        return bool(self.pending or self._incoming)

    def held(self) -> list[LeasedRow]:
        """Trajectories on their way out that are still this rollout's."""
        return [t.held for outgoing in self.pending.values() for t in outgoing.rows.values()]

    def handle(self, sender: str, message: Message) -> None:
        """Act on a letter of the hub or of another rollout; others are none of its business."""
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
        """Take in what has arrived, repeat what was not answered, take back what nobody wants."""
        now = time.monotonic()
        for (sender, number), (offer, fetching) in list(self._incoming.items()):
            if fetching.done:
                del self._incoming[sender, number]
                self._import(sender, offer, fetching)
        for question, (claim, asked_at) in list(self._claims.items()):
            if now - asked_at > REPEAT_S:
                self._claims[question] = (claim, now)
                self.mailbox.send("hub", claim)
        for number, outgoing in list(self.pending.items()):
            if self._destination(outgoing.to.name, outgoing.to.incarnation) is None:
                self._take_back(number, "gone")
            elif now - outgoing.sent_at > PATIENCE_S:
                self._take_back(number, "silent")

    def close(self) -> None:
        """Let go of what is under way; the hub counts it by `held`."""
        for outgoing in self.pending.values():
            outgoing.transfer.close()
        self._io_pool.shutdown()
        self._incoming.clear()

    # --------------------------------------------------------------------------------------------------- as the source

    def _on_migrate(self, order: MigrateOrder) -> None:
        """Give everything away, or tell the hub why not."""
        to, refusal = self._destination(order.to), ""
        if self.profile is None:
            refusal = "unable"
        elif order.version != self.generator.weights.version:
            refusal = "version"
        elif to is None:
            refusal = "gone"
        elif not self._export(order, to, self.generator.kv_token_bytes, self.profile.prefill_s):
            refusal = "nothing left"
        if refusal:
            self.mailbox.send("hub", MigrateResult(order.request_id, refusal=refusal))

    def _export(self, order: MigrateOrder, to: Member, token_bytes: int, prefill_s: float) -> bool:
        """Take out whatever is certain to be this rollout's, and offer it; False if there is nothing."""
        started, began = time.monotonic(), self.trace.now()
        movable = [
            x.trajectory_id for x in self.generator.unfinished() if not self.leases.held[x.trajectory_id].claim_id
        ]
        with_cache = self._costs.should_send_cache(to.host == self.fleet.me.host, token_bytes, prefill_s)
        parcels = self.generator.export_sequences(movable, with_cache)
        if not parcels:
            return False
        travellers = [MovedRow(self.leases.held.pop(parcel.trajectory_id), parcel) for parcel in parcels]
        pieces, took_out_s = encode_rows(travellers), time.monotonic() - started
        self._last_request_id += 1
        consignment = OutgoingTransfer(self.fleet, to, self._last_request_id, pieces)
        by_row = {traveller.held.row_id: traveller for traveller in travellers}
        self.pending[self._last_request_id] = PendingMove(
            order.request_id, order.version, to, by_row, consignment, with_cache, took_out_s, began
        )
        num_tokens = sum(len(parcel.prompt_ids) + len(parcel.token_ids) for parcel in parcels)
        where = (consignment.num_bytes, consignment.path, consignment.link)
        self.mailbox.send(
            to.name, TransferOffered(self._last_request_id, order.version, len(parcels), num_tokens, *where)
        )
        return True

    def _take_back(self, request_id: int, reason: str) -> None:
        """Go on with what nobody else has claimed so far, and claim it: the destination may have been about to."""
        outgoing = self.pending.pop(request_id, None)
        if outgoing is None:
            return
        assert outgoing.version == self.generator.weights.version, "the weights were changed under a parcel"
        self._resume(t for t in outgoing.rows.values() if t.held.row_id.number not in self.leases.held)
        self._end(outgoing, reason)

    def _on_reassigned(self, rows: dict[RowId, int]) -> None:
        """These rows, as these attempts, are somebody else's now."""
        for number, outgoing in list(self.pending.items()):
            for row_id, attempt in rows.items():
                traveller = outgoing.rows.get(row_id)
                if traveller is not None and traveller.held.attempt == attempt:
                    del outgoing.rows[row_id]
                    outgoing.num_gone += 1
            if not outgoing.rows:
                del self.pending[number]
                self._end(outgoing, "")
        for row_id, attempt in rows.items():
            held = self.leases.held.get(row_id.number)
            if held is not None and held.attempt == attempt:
                self._drop(held)

    def _end(self, move: PendingMove, reason: str) -> None:
        """Close a move and tell the hub how it went."""
        consignment = move.transfer
        if move.with_cache and consignment.seconds is not None:
            seconds = move.export_s + consignment.seconds
            self._costs.record(bool(consignment.path), consignment.num_bytes, seconds)
        consignment.close()
        self.trace.span("move", move.began, to=move.to.name, rows=move.num_gone, refusal=reason)
        if move.num_gone:
            self.mailbox.send("hub", MigrateResult(move.request_id, move.num_gone, consignment.num_bytes))
        else:
            self.mailbox.send("hub", MigrateResult(move.request_id, refusal=reason))

    # ---------------------------------------------------------------------------------------------- as the destination

    def _on_offer(self, sender: str, offer: TransferOffered) -> None:
        if reason := self._reason_against(offer):
            self.mailbox.send(sender, TransferRefused(offer.request_id, reason))
        elif (sender, offer.request_id) not in self._incoming:
            self._incoming[sender, offer.request_id] = (offer, IncomingTransfer(self.fleet, self._io_pool, offer))

    def _reason_against(self, offer: TransferOffered) -> str:
        """Why an offer cannot be taken; nothing if it can. Looked at when it comes and again when its bytes are there."""
        generator = self.generator
        if self.profile is None:
            return "unable"
        if offer.version != generator.weights.version:
            return "version"
        num_requests = generator.num_running + generator.num_waiting
        load = Report(
            self.fleet.name, offer.version, self.kv_used, 0, generator.kv_capacity, num_requests,
            generator.num_waiting, self.batch_bound,
        )  # fmt: skip
        return "" if can_fit(load, offer.num_tokens, offer.num_rows) else "full"

    def _import(self, sender: str, offer: TransferOffered, incoming: IncomingTransfer) -> None:
        reason = self._reason_against(offer)
        travellers: list[MovedRow] = []
        try:
            travellers = decode_rows(incoming.result())
        except HeadraceError as error:
            _log.warning("%s: a parcel of %s: %s", self.fleet.name, sender, str(error).partition("\n")[0])
            reason = reason or "broken"
        if any(t.held.row_id.number in self.leases.held for t in travellers):
            reason = reason or "held already"
        if reason:
            self.mailbox.send(sender, TransferRefused(offer.request_id, reason))
        else:
            self._resume(travellers)

    # ------------------------------------------------------------------------------------------------------------ both

    def _resume(self, moved_rows: Iterable[MovedRow]) -> None:
        """Generate on, and claim the leases of the hub."""
        rows: list[RowId] = []
        attempts: list[int] = []
        self._last_request_id += 1
        for held, parcel in moved_rows:
            self.generator.import_sequences([parcel])
            self.leases.held[parcel.trajectory_id] = held
            held.claim_id = self._last_request_id
            rows.append(held.row_id)
            attempts.append(held.attempt)
        if rows:
            claim = ClaimRows(self._last_request_id, rows, attempts)
            self._claims[self._last_request_id] = (claim, time.monotonic())
            self.mailbox.send("hub", claim)

    def _on_claimed(self, answer: ClaimResult) -> None:
        if answer.request_id not in self._claims:
            return  # the same answer again
        claim, _ = self._claims.pop(answer.request_id)
        for row_id, attempt in zip(claim.rows, answer.attempts, strict=True):
            held = self.leases.held.get(row_id.number)
            if held is None or held.claim_id != answer.request_id:
                continue  # leased to this rollout meanwhile, or gone
            held.claim_id = 0
            if attempt:
                held.attempt = attempt
            else:
                self._drop(held)

    def _drop(self, held: LeasedRow) -> None:
        """Forget a trajectory that is somebody else's."""
        del self.leases.held[held.row_id.number]
        if held.completion is None:
            self.generator.export_sequences([held.row_id.number])

    def _destination(self, name: str, incarnation: int | None = None) -> Member | None:
        """The living rollout of this name, if it is still that incarnation."""
        for member in self.fleet.alive_members("rollout"):
            if member.name == name and incarnation in (None, member.incarnation):
                return member
        return None
