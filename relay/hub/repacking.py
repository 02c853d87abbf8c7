"""The hub's office for repacking: it plans moves from the rollouts' reports, and says whose a moved trajectory is.

A move takes place between two rollouts; the hub only orders it. Whoever has the trajectories then *claims* them: the
destination when they have arrived, the source when the move came to nothing. The first claim of a row's present attempt wins
and gives the row its next attempt, so that the other claim, and whatever else is said of the older attempt, is void. This
holds however often a letter is repeated and whoever dies in between; there is no state of a move that could be lost.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ...comm.messages import LoadReport, RowId
from ...comm.messages.migration import ClaimResult, ClaimRows, MigrateOrder, MigrateResult, RowsReassigned
from ...comm.recipe import RepackSettings
from ..journal import events as ev
from ..journal.state import Row, RowStatus
from ..repack import Report, plan_moves
from .context import HubContext, Routes
from .telemetry import FleetStats

MOVE_TIMEOUT_S = 30.0
"""An order that nobody has answered for so long no longer keeps its rollouts out of the next plan."""


class _OpenMove(NamedTuple):
    source: str
    destination: str
    given_at: float


class Repacking:
    """Reports, open orders, and claims."""

    def __init__(
        self,
        context: HubContext,
        settings: RepackSettings,
        fleet_stats: FleetStats,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.context = context
        self.settings = settings
        self.fleet_stats = fleet_stats
        self.is_open = settings.enabled
        self.is_due = False
        """A new version is out: plan at once."""
        self.refusals: Counter[str] = Counter()
        self.routes: Routes = {ClaimRows: self._on_claim, MigrateResult: self._on_ended}
        self._clock = clock
        self._planned_at = clock()
        self._reports: dict[str, LoadReport] = {}
        self._before: dict[str, tuple[int, int]] = {}
        self._open_moves: dict[int, _OpenMove] = {}
        self._last_request_id = 0

    def observe(self, sender: str, load: LoadReport) -> None:
        """Take in a report. What a rollout said before its last move has ended is out of date, and is not kept."""
        if load.batch_bound and not any(sender in (o.source, o.destination) for o in self._open_moves.values()):
            self._reports[sender] = load

    def advance(self) -> None:
        """Plan, when it is time."""
        now = self._clock()
        if self.is_open and (self.is_due or now - self._planned_at >= self.settings.period_s):
            self.is_due, self._planned_at = False, now
            self._open_moves = {
                n: order for n, order in self._open_moves.items() if now - order.given_at < MOVE_TIMEOUT_S
            }
            self._plan(now)

    def on_process_death(self, process: str, reason: str) -> None:
        """Its orders are void; its rows are the leases' affair."""
        self._reports.pop(process, None)
        self._before.pop(process, None)
        self._open_moves = {n: o for n, o in self._open_moves.items() if process not in (o.source, o.destination)}

    def _plan(self, now: float) -> None:
        reports = {name: self._report(name, load) for name, load in self._reports.items()}
        self._before |= {name: (report.version, report.kv_used) for name, report in reports.items()}
        for move in plan_moves(reports.values()):
            # The load that it is about to have is no reason to think that it fills up.
            version, kv_used = self._before[move.destination]
            self._before[move.destination] = (version, kv_used + reports[move.source].kv_used)
            self._last_request_id += 1
            self._open_moves[self._last_request_id] = _OpenMove(move.source, move.destination, now)
            for name in (move.source, move.destination):
                self._reports.pop(name, None)
            self.context.mailbox.send(move.source, MigrateOrder(self._last_request_id, move.version, move.destination))

    def _report(self, name: str, load: LoadReport) -> Report:
        version, kv_before = self._before.get(name, (load.version, 0))
        return Report(
            rollout=name,
            version=load.version,
            kv_used=load.kv_used,
            kv_before=kv_before if version == load.version else 0,
            kv_max=load.kv_max,
            num_requests=load.num_running + load.num_waiting,
            num_waiting=load.num_waiting,
            batch_bound=load.batch_bound,
        )

    def _on_ended(self, sender: str, ended: MigrateResult) -> None:
        order = self._open_moves.pop(ended.request_id, None)
        if ended.refusal:
            self.refusals[ended.refusal] += 1
            self.fleet_stats.count(f"repack/refused/{ended.refusal}")
        elif order is not None:
            self.fleet_stats.count("repack/count")
            self.fleet_stats.count("repack/seconds", self._clock() - order.given_at)
            self.fleet_stats.count("repack/bytes", ended.num_bytes)

    def _on_claim(self, sender: str, claim: ClaimRows) -> None:
        claimed = dict(zip(claim.rows, claim.attempts, strict=True))
        for source, rows in self._by_holder(claimed):
            attempts = [self.context.state.group_of(row_id).next_attempt for row_id in rows]
            self.context.commit(ev.Moved(rows=rows, attempts=attempts, source=source, holder=sender))
            if source != sender:
                self.fleet_stats.count("repack/trajectories", len(rows))
                self.context.mailbox.send(source, RowsReassigned(rows, [claimed[row_id] for row_id in rows]))
        self.context.mailbox.send(
            sender, ClaimResult(claim.request_id, [self._attempt_of(row, sender) for row in claim.rows])
        )

    def _by_holder(self, claimed: dict[RowId, int]) -> Iterator[tuple[str, list[RowId]]]:
        """Of the rows claimed, those whose present attempt it is, by who holds them."""
        holders: dict[str, list[RowId]] = {}
        for row_id, attempt in claimed.items():
            row = self._leased(row_id)
            if row is not None and row.attempt == attempt:
                holders.setdefault(row.holder, []).append(row_id)
        yield from holders.items()

    def _attempt_of(self, row_id: RowId, holder: str) -> int:
        """The attempt under which `holder` has the row; 0 if it has not."""
        row = self._leased(row_id)
        return row.attempt if row is not None and row.holder == holder else 0

    def _leased(self, row_id: RowId) -> Row | None:
        row = self.context.state.row(row_id)
        return row if row is not None and row.status is RowStatus.LEASED else None
