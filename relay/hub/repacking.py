"""Repacking: plans moves from the rollouts' reports, and decides which rollout has a moved trajectory.

A move takes place between two rollouts; the hub only orders it. A rollout that has the trajectories then *claims* them: the
destination when they have arrived, the source when the move has failed. The first claim of a row's present attempt wins and
gives the row its next attempt, so that the other claim, and any later message about the older attempt, is void. This holds
however often a message is repeated and whichever process dies: a move has no state that could be lost.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ...comm.messages import LoadReport, RowId
from ...comm.messages.migration import ClaimResult, ClaimRows, MigrateOrder, MigrateResult, RowsReassigned
from ...comm.recipe import RepackSettings
from ..journal import events as ev
from ..journal.records import Row, RowStatus
from ..repack import Report, plan_moves
from .context import Handler, HubContext
from .telemetry import FleetStats

SLOWDOWN = 2.0
"""How much cached tokens may slow decode steps after a move: 2 means three times a step with an empty cache (docs/develop/benchmarks.md)."""
MOVE_TIMEOUT_S = 30.0
"""A move without a result after this time no longer keeps its rollouts out of the next plan."""


@dataclass(slots=True)
class _LastLoad:
    """The load of a rollout at the last plan, on its present version."""

    version: int
    kv_before: int = 0
    """Tokens, with those that it has received since."""


class _OpenMove(NamedTuple):
    rollouts: tuple[str, str]  # source and destination
    ordered_at: float


class Repacking(Handler):
    """Reports, open moves, and claims."""

    def __init__(
        self, context: HubContext, settings: RepackSettings, fleet_stats: FleetStats, clock: Callable[[], float]
    ) -> None:
        super().__init__(context)
        self.settings = settings
        self.fleet_stats = fleet_stats
        self.is_due = False
        """A new version is out: plan at once."""
        self.refusals: Counter[str] = Counter()
        self.routes = {ClaimRows: self._on_claim, MigrateResult: self._on_migrate_result}
        self._clock = clock
        self._planned_at = clock()
        self._reports: dict[str, LoadReport] = {}
        self._last_loads: dict[str, _LastLoad] = {}
        self._open_moves: dict[int, _OpenMove] = {}
        # The orders of each process of the hub have ids of their own: a result may be that of an earlier order.
        self._last_request_id = self.state.hub_restarts << 32

    def observe(self, sender: str, load: LoadReport) -> None:
        """Record a report. Reports of a rollout with an open move are out of date for a plan, and are dropped."""
        last = self._last_loads.get(sender)
        if last is None or last.version != load.version:
            self._last_loads[sender] = _LastLoad(load.version)
        if load.batch_bound and not any(sender in move.rollouts for move in self._open_moves.values()):
            self._reports[sender] = load

    def advance(self) -> None:
        now = self._clock()
        is_due = self.is_due or now - self._planned_at >= self.settings.period_s
        if is_due and self.settings.is_enabled and self.context.is_leasing:
            self.is_due = False
            self._planned_at = now
            self._open_moves = {n: m for n, m in self._open_moves.items() if now - m.ordered_at < MOVE_TIMEOUT_S}
            self._plan(now)

    def on_process_death(self, process: str, reason: str) -> None:
        """Drop the moves of a dead process; `Leases` takes back its rows."""
        self._reports.pop(process, None)
        self._last_loads.pop(process, None)
        self._open_moves = {n: move for n, move in self._open_moves.items() if process not in move.rollouts}

    def _plan(self, now: float) -> None:
        reports = {name: self._report(name, load) for name, load in self._reports.items()}
        for name, report in reports.items():
            self._last_loads[name].kv_before = report.kv_used
        for move in plan_moves(reports.values(), SLOWDOWN):
            # The load that the destination is about to receive must not look like a cache that fills up.
            self._last_loads[move.destination].kv_before += reports[move.source].kv_used
            self._last_request_id += 1
            rollouts = (move.source, move.destination)
            self._open_moves[self._last_request_id] = _OpenMove(rollouts, now)
            for name in rollouts:
                self._reports.pop(name, None)
            self.context.mailbox.send(move.source, MigrateOrder(self._last_request_id, move.version, move.destination))

    def _report(self, name: str, load: LoadReport) -> Report:
        last = self._last_loads[name]
        return Report(
            rollout=name, version=load.version, kv_used=load.kv_used, kv_before=last.kv_before, kv_max=load.kv_max,
            kv_fixed=load.kv_fixed, num_requests=load.num_running + load.num_waiting, num_waiting=load.num_waiting,
            batch_bound=load.batch_bound,
        )  # fmt: skip

    def _on_migrate_result(self, sender: str, result: MigrateResult) -> None:
        move = self._open_moves.pop(result.request_id, None)
        if result.refusal:
            self.refusals[result.refusal] += 1
            self.fleet_stats.count(f"repack/refused/{result.refusal}")
        elif move is not None:
            self.fleet_stats.count("repack/count")
            self.fleet_stats.count("repack/seconds", self._clock() - move.ordered_at)
            self.fleet_stats.count("repack/bytes", result.num_bytes)

    def _on_claim(self, sender: str, claim: ClaimRows) -> None:
        claimed: dict[str, dict[RowId, int]] = {}
        for row_id, attempt in zip(claim.rows, claim.attempts, strict=True):
            row = self._leased(row_id)
            if row is not None and row.attempt == attempt:
                claimed.setdefault(row.holder, {})[row_id] = attempt
        for source, rows in claimed.items():
            groups = [self.state.group(row_id.group) for row_id in rows]
            attempts = [group.next_attempt for group in groups if group is not None]
            whose = {"source": source, "holder": sender, "request_id": claim.request_id}
            self.context.commit(ev.Moved(rows=list(rows), attempts=attempts, **whose))
            if source != sender:
                self.fleet_stats.count("repack/trajectories", len(rows))
                self.context.mailbox.send(source, RowsReassigned(list(rows), list(rows.values())))
        held = {row_id: row.attempt for row_id in claim.rows if (row := self._leased(row_id)) and row.holder == sender}
        self.context.mailbox.send(sender, ClaimResult(claim.request_id, [held.get(row_id, 0) for row_id in claim.rows]))

    def _leased(self, row_id: RowId) -> Row | None:
        row = self.state.row(row_id)
        return row if row is not None and row.status is RowStatus.LEASED else None
