"""The versions of a run and the digests of their weights, as its journal has them."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from ...relay.journal.events import Published as PublishedEvent
from ...relay.journal.files import read_events

Published = Mapping[int, set[str]]
"""Of each version the digests under which the journal has it; more than one where it was trained again, with other numbers."""


def published_in(journal: Path) -> Published:
    """Raises `JournalError` at a line that is not an event."""
    found: dict[int, set[str]] = defaultdict(set)
    for _, event in read_events(journal, kinds=(PublishedEvent,)):
        assert isinstance(event, PublishedEvent)
        found[event.version].add(event.digest)
    return found


def digests_problem(versions: Iterable[int], digests: Mapping[str, str], published: Published) -> str:
    """Why these versions, with the digests of their weights, are not those of the journal; empty if they are."""
    for version in sorted({*versions}):
        digest = digests.get(str(version))
        known = published.get(version)
        if known is None:
            return f"the run has published no version {version}"
        if not digest:
            return f"it has no digest of version {version}"
        if digest not in known:
            return f"version {version} has the digest {' or '.join(sorted(known))} in the journal, not {digest}"
    return ""
