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
from ...comm.messages.migration import Claim, Claimed, MoveEnded, MoveOrder, ParcelOffered, ParcelRefused, RowsGone
from ...comm.recipe import RepackSettings
from ...comm.trace import Trace
from ...relay.repack import Report, can_fit
from ..generators.base import Generator
from ..leases import Held, Leases
from .calibration import Speeds, TransferCosts, measure
from .codec import Traveller, pack, unpack
from .transport import Consignment, Fetching

_log = logging.getLogger(__name__)

REPEAT_S = 2.0
PATIENCE_S = 20.0
"""Seconds after which an offer that nobody has answered is taken back."""


@dataclass(slots=True)
class Outgoing:
    """A parcel on its way: its trajectories that nobody else has claimed yet."""

    order: int
    version: int
    to: Member
    travellers: dict[RowId, Traveller]
    consignment: Consignment
    with_cache: bool
    took_out_s: float
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
        leases: Leases,
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
        self.speeds: Speeds | None = None
        """None: it neither gives nor takes."""
        self.outgoing: dict[int, Outgoing] = {}
        self._fetching: dict[tuple[str, int], tuple[ParcelOffered, Fetching]] = {}
        self._claims: dict[int, tuple[Claim, float]] = {}
        self._costs = TransferCosts(settings.transfer)
        # Numbers start anew with each incarnation: an answer to an earlier one may still lie in the inbox.
        self._number = fleet.incarnation << 32
        self._porter = ThreadPoolExecutor(1, thread_name_prefix=f"{fleet.name} porter")

    def begin(self) -> None:
        """Measure the generator, which is idle and has weights; without this, every order and offer is refused."""
        bound = self.settings.batch_bound
        if not self.settings.enabled or not self.generator.can_migrate:
            return
        if bound is not None and self.settings.transfer != "auto":
            self.speeds = Speeds(bound, math.inf)  # nothing that is left to be measured would be asked for
            return
        self.speeds = measure(self.generator, self.max_batch)
        _log.info("%s: %s", self.fleet.name, self.speeds)

    @property
    def batch_bound(self) -> int:
        """Trajectories beyond which a decode step takes notably longer; 0 for a rollout that takes no part."""
        if self.speeds is None:
            return 0
        return min(self.settings.batch_bound or self.speeds.batch_bound, self.max_batch)

    @property
    def kv_used(self) -> int:
        """Tokens of all unfinished trajectories, each with its own prompt: what they take up elsewhere."""
        return sum(live.num_tokens for live in self.generator.live())

    @property
    def is_under_way(self) -> bool:
        """A parcel goes or comes: the weights must stay what they are."""
        return bool(self.outgoing or self._fetching)

    def held(self) -> list[Held]:
        """Trajectories on their way out that are still this rollout's."""
        return [t.held for outgoing in self.outgoing.values() for t in outgoing.travellers.values()]

    def handle(self, sender: str, message: Message) -> None:
        """Act on a letter of the hub or of another rollout; others are none of its business."""
        match message:
            case MoveOrder():
                self._on_order(message)
            case ParcelOffered():
                self._on_offer(sender, message)
            case ParcelRefused(parcel=number, reason=reason):
                self._take_back(number, reason)
            case Claimed():
                self._on_claimed(message)
            case RowsGone(rows=rows, attempts=attempts):
                self._on_gone(dict(zip(rows, attempts, strict=True)))
            case _:
                pass

    def turn(self) -> None:
        """Take in what has arrived, repeat what was not answered, take back what nobody wants."""
        now = time.monotonic()
        for (sender, number), (offer, fetching) in list(self._fetching.items()):
            if fetching.done:
                del self._fetching[sender, number]
                self._take_in(sender, offer, fetching)
        for question, (claim, asked_at) in list(self._claims.items()):
            if now - asked_at > REPEAT_S:
                self._claims[question] = (claim, now)
                self.mailbox.send("hub", claim)
        for number, outgoing in list(self.outgoing.items()):
            if self._destination(outgoing.to.name, outgoing.to.incarnation) is None:
                self._take_back(number, "gone")
            elif now - outgoing.sent_at > PATIENCE_S:
                self._take_back(number, "silent")

    def close(self) -> None:
        """Let go of what is under way; the hub counts it by `held`."""
        for outgoing in self.outgoing.values():
            outgoing.consignment.close()
        self._porter.shutdown()
        self._fetching.clear()

    # --------------------------------------------------------------------------------------------------- as the source

    def _on_order(self, order: MoveOrder) -> None:
        """Give everything away, or tell the hub why not."""
        to, refusal = self._destination(order.to), ""
        if self.speeds is None:
            refusal = "unable"
        elif order.version != self.generator.weights.version:
            refusal = "version"
        elif to is None:
            refusal = "gone"
        elif not self._give(order, to, self.generator.kv_token_bytes, self.speeds.prefill_s):
            refusal = "nothing left"
        if refusal:
            self.mailbox.send("hub", MoveEnded(order.order, refusal=refusal))

    def _give(self, order: MoveOrder, to: Member, token_bytes: int, prefill_s: float) -> bool:
        """Take out whatever is certain to be this rollout's, and offer it; False if there is nothing."""
        started, began = time.monotonic(), self.trace.now()
        movable = [x.trajectory_id for x in self.generator.live() if not self.leases.held[x.trajectory_id].question]
        with_cache = self._costs.is_worth(to.host == self.fleet.me.host, token_bytes, prefill_s)
        parcels = self.generator.take_out(movable, with_cache)
        if not parcels:
            return False
        travellers = [Traveller(self.leases.held.pop(parcel.trajectory_id), parcel) for parcel in parcels]
        pieces, took_out_s = pack(travellers), time.monotonic() - started
        self._number += 1
        consignment = Consignment(self.fleet, to, self._number, pieces)
        by_row = {traveller.held.row_id: traveller for traveller in travellers}
        self.outgoing[self._number] = Outgoing(
            order.order, order.version, to, by_row, consignment, with_cache, took_out_s, began
        )
        num_tokens = sum(len(parcel.prompt_ids) + len(parcel.token_ids) for parcel in parcels)
        where = (consignment.num_bytes, consignment.path, consignment.link)
        self.mailbox.send(to.name, ParcelOffered(self._number, order.version, len(parcels), num_tokens, *where))
        return True

    def _take_back(self, number: int, reason: str) -> None:
        """Go on with what nobody else has claimed so far, and claim it: the destination may have been about to."""
        outgoing = self.outgoing.pop(number, None)
        if outgoing is None:
            return
        assert outgoing.version == self.generator.weights.version, "the weights were changed under a parcel"
        self._go_on(t for t in outgoing.travellers.values() if t.held.row_id.number not in self.leases.held)
        self._end(outgoing, reason)

    def _on_gone(self, rows: dict[RowId, int]) -> None:
        """These rows, as these attempts, are somebody else's now."""
        for number, outgoing in list(self.outgoing.items()):
            for row_id, attempt in rows.items():
                traveller = outgoing.travellers.get(row_id)
                if traveller is not None and traveller.held.attempt == attempt:
                    del outgoing.travellers[row_id]
                    outgoing.num_gone += 1
            if not outgoing.travellers:
                del self.outgoing[number]
                self._end(outgoing, "")
        for row_id, attempt in rows.items():
            held = self.leases.held.get(row_id.number)
            if held is not None and held.attempt == attempt:
                self._drop(held)

    def _end(self, outgoing: Outgoing, reason: str) -> None:
        """Close a move and tell the hub how it went."""
        consignment = outgoing.consignment
        if outgoing.with_cache and consignment.seconds is not None:
            seconds = outgoing.took_out_s + consignment.seconds
            self._costs.learn(bool(consignment.path), consignment.num_bytes, seconds)
        consignment.close()
        self.trace.beside("move", outgoing.began, to=outgoing.to.name, rows=outgoing.num_gone, refusal=reason)
        if outgoing.num_gone:
            self.mailbox.send("hub", MoveEnded(outgoing.order, outgoing.num_gone, consignment.num_bytes))
        else:
            self.mailbox.send("hub", MoveEnded(outgoing.order, refusal=reason))

    # ---------------------------------------------------------------------------------------------- as the destination

    def _on_offer(self, sender: str, offer: ParcelOffered) -> None:
        if reason := self._reason_against(offer):
            self.mailbox.send(sender, ParcelRefused(offer.parcel, reason))
        elif (sender, offer.parcel) not in self._fetching:
            self._fetching[sender, offer.parcel] = (offer, Fetching(self.fleet, self._porter, offer))

    def _reason_against(self, offer: ParcelOffered) -> str:
        """Why an offer cannot be taken; nothing if it can. Looked at when it comes and again when its bytes are there."""
        generator = self.generator
        if self.speeds is None:
            return "unable"
        if offer.version != generator.weights.version:
            return "version"
        num_requests = generator.num_running + generator.num_waiting
        load = Report(
            self.fleet.name, offer.version, self.kv_used, 0, generator.kv_capacity, num_requests,
            generator.num_waiting, self.batch_bound,
        )  # fmt: skip
        return "" if can_fit(load, offer.num_tokens, offer.num_rows) else "full"

    def _take_in(self, sender: str, offer: ParcelOffered, fetching: Fetching) -> None:
        reason = self._reason_against(offer)
        travellers: list[Traveller] = []
        try:
            travellers = unpack(fetching.result())
        except HeadraceError as error:
            _log.warning("%s: a parcel of %s: %s", self.fleet.name, sender, str(error).partition("\n")[0])
            reason = reason or "broken"
        if any(t.held.row_id.number in self.leases.held for t in travellers):
            reason = reason or "held already"
        if reason:
            self.mailbox.send(sender, ParcelRefused(offer.parcel, reason))
        else:
            self._go_on(travellers)

    # ------------------------------------------------------------------------------------------------------------ both

    def _go_on(self, travellers: Iterable[Traveller]) -> None:
        """Generate on, and claim the leases of the hub."""
        rows: list[RowId] = []
        attempts: list[int] = []
        self._number += 1
        for held, parcel in travellers:
            self.generator.put_in([parcel])
            self.leases.held[parcel.trajectory_id] = held
            held.question = self._number
            rows.append(held.row_id)
            attempts.append(held.attempt)
        if rows:
            claim = Claim(self._number, rows, attempts)
            self._claims[self._number] = (claim, time.monotonic())
            self.mailbox.send("hub", claim)

    def _on_claimed(self, answer: Claimed) -> None:
        if answer.question not in self._claims:
            return  # the same answer again
        claim, _ = self._claims.pop(answer.question)
        for row_id, attempt in zip(claim.rows, answer.attempts, strict=True):
            held = self.leases.held.get(row_id.number)
            if held is None or held.question != answer.question:
                continue  # leased to this rollout meanwhile, or gone
            held.question = 0
            if attempt:
                held.attempt = attempt
            else:
                self._drop(held)

    def _drop(self, held: Held) -> None:
        """Forget a trajectory that is somebody else's."""
        del self.leases.held[held.row_id.number]
        if held.completion is None:
            self.generator.take_out([held.row_id.number])

    def _destination(self, name: str, incarnation: int | None = None) -> Member | None:
        """The living rollout of this name, if it is still that incarnation."""
        for member in self.fleet.living("rollout"):
            if member.name == name and incarnation in (None, member.incarnation):
                return member
        return None
