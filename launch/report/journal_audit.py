"""The audit of a run: replays its journal, checks every line against the rules of `relay.journal.state`, and gives the account."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from ...relay.journal.events import Event, Leased, PromptDropped, Returned, RowFailed
from ...relay.journal.hub_state import account_dict
from ...relay.journal.records import EvaluationLog
from ...relay.journal.replay import replay
from ..config.run_folder import JOURNAL_FILE

_MAX_REASONS = 10


class AuditReport:
    """Counts of a journal's events, of leases by holder, and of reasons for failed and returned trajectories."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.leased_to: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()

    def note(self, event: Event) -> None:
        self.counts[type(event).__name__] += 1
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

    def lines(self) -> Iterator[str]:
        yield f"events {dict(sorted(self.counts.items()))}"
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


def audit_lines(run: Path) -> Iterator[str]:
    """The account of a run, as lines. Raises `JournalError` for a journal that does not verify."""
    report = AuditReport()
    state = replay(run / JOURNAL_FILE, report.note)
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
