"""The audit of a run: replays its journal, checks every line against the rules of `relay.journal.state`, and gives the account."""

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from ...relay.journal.events import Event, Leased, PromptDropped, Returned, RowFailed
from ...relay.journal.files import JournalError, check_order
from ...relay.journal.hub_state import HubState, account_dict
from ...relay.journal.records import EvaluationLog
from ...relay.journal.replay import pieces_of, replay, verify
from ..config.run_folder import JOURNAL_FILE

_MAX_REASONS = 10
_DETAILED = frozenset((Leased, RowFailed, PromptDropped, Returned))
"""The events of which more is counted than their number."""


class AuditReport:
    """Counts of a journal's events, of leases by holder, and of reasons for failed and returned trajectories."""

    def __init__(self) -> None:
        self.counts: Counter[type[Event]] = Counter()
        self.leased_to: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()

    def note(self, events: Sequence[Event]) -> None:
        self.counts.update(map(type, events))
        for event in [event for event in events if type(event) in _DETAILED]:
            match event:
                case Leased(holder=holder, samples=samples):
                    self.leased_to[holder] += len(samples)
                case RowFailed(reason=reason):
                    self.reasons[f"failed: {reason}"] += 1
                case PromptDropped(reason=reason):
                    self.reasons[f"dropped: {reason}"] += 1
                case Returned(reason=reason):
                    self.reasons[f"returned: {reason}"] += 1
                case _:
                    pass

    def add(self, other: "AuditReport") -> None:
        """Count the events of another one, which come next in the journal, too."""
        self.counts += other.counts
        self.leased_to += other.leased_to
        self.reasons += other.reasons

    def lines(self) -> Iterator[str]:
        counts = {kind.__name__: count for kind, count in self.counts.items()}
        yield f"events {dict(sorted(counts.items()))}"
        yield f"trajectories leased, repeated leases included, to {dict(sorted(self.leased_to.items()))}"
        for reason, count in self.reasons.most_common(_MAX_REASONS):
            yield f"{count} x {reason}"


def _evaluations(log: EvaluationLog) -> Iterator[str]:
    """One line for each evaluation that is complete, and the account of all samples."""
    for result in log.results:
        named = (f"{name.removeprefix('eval/')} {value:g}" for name, value in result.items() if name != "eval/version")
        yield f"evaluation of version {result['eval/version']:g}: {', '.join(named)}"
    if log.begun is not None:
        yield f"evaluated samples {log.account}"


def _verify_piece(journal: Path, start: int, end: int | None) -> tuple[HubState | None, AuditReport]:
    """The state at the end of a journal, if the piece is the last one, and the counts of the piece."""
    report = AuditReport()
    state = verify(journal, start, end, report.note)
    return (state if end is None else None), report


def _verify(journal: Path, num_processes: int) -> tuple[HubState, AuditReport]:
    """The state at the end of a journal, and the counts of its events; each process verifies a piece at a time.

    The processes are forks: that of a command has one thread. The error of the oldest piece that does not verify is raised, as by one process.
    """
    pieces = pieces_of(journal)
    report = AuditReport()
    if min(num_processes, len(pieces)) < 2:
        return replay(journal, report.note), report
    try:
        with ProcessPoolExecutor(min(num_processes, len(pieces)), get_context("fork")) as pool:
            results = [*pool.map(partial(_verify_piece, journal), *zip(*pieces, strict=True))]
    except BrokenProcessPool as error:
        raise JournalError(f"{journal}: a process that verified it was killed; try again with --processes 1") from error
    for _, counted in results:
        report.add(counted)
    state, _ = results[-1]
    assert state is not None
    check_order(journal)
    return state, report


def audit_lines(run: Path, num_processes: int = 1) -> Iterator[str]:
    """The account of a run, as lines. Raises `JournalError` for a journal that does not verify."""
    state, report = _verify(run / JOURNAL_FILE, num_processes)
    account = " ".join(f"{name}={value}" for name, value in account_dict(state).items())
    yield f"{run}: {state.step} steps, version {state.version}, {state.ended or 'not ended'}: {account}"
    if state.tokens.ended or state.tokens.restored:
        ends = ("restored", "trained", "evaluated", "filtered", "failed", "evicted", "lost", "ready")
        tokens = " ".join(f"{name}={getattr(state.tokens, name)}" for name in ends)
        yield f"  tokens since the last start: ended={state.tokens.ended} {tokens} holds={state.tokens.is_balanced}"
    yield f"  staleness {dict(sorted(state.staleness.items()))}"
    midway = f", new weights midway {dict(sorted(state.midway.items()))}" if state.midway else ""
    yield f"  versions per trajectory {dict(sorted(state.versions_per_trajectory.items()))}{midway}"
    yield from (f"  {text}" for text in [*_evaluations(state.evaluations), *report.lines()])
