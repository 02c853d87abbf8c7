"""Which group a rollout is leased next. The choice changes nothing; `leases.py` acts on it."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ...comm.messages import LeaseRequest, RowRef
    from ..journal.hub_state import HubState
    from ..journal.records import Group
    from ..queue.admission import Admission
    from .partial_pool import PartialPool


class Choice(NamedTuple):
    """A group to lease, and the version that generates it."""

    version: int
    group: "Group | None"
    """One whose rows came back; None for the next one of the data."""
    partials: "Mapping[int, RowRef]"
    """The samples that continue at their first tokens; the others begin at the prompt."""
    starts_again: bool = False
    """Its first tokens are too old to be trained: they are given up."""


class LeaseChooser:
    """The rules of leasing: what came back goes first, each group on the version that began it."""

    def __init__(self, state: "HubState", admission: "Admission", partials: "PartialPool") -> None:
        self._state = state
        self._admission = admission
        self._partials = partials

    def choose(self, request: "LeaseRequest", version: int | None, *, may_be_new: bool) -> Choice | None:
        """The next group of a grant on `version`; None if no group can be leased now.

        version: None while the grant is empty, for a rollout that may go back to an older version than its own. It does, if a group
        waits for that one. On another version than the request's nothing new starts.
        """
        if version is None:
            found = min(self._returned(request), key=lambda choice: choice.version == request.version, default=None)
        else:
            found = next((choice for choice in self._returned(request) if choice.version == version), None)
        if found is not None or not may_be_new or version not in (None, request.version):
            return found
        return Choice(request.version, None, {}) if self._admission.may_lease(self._state, request.version) else None

    def _returned(self, request: "LeaseRequest") -> Iterator[Choice]:
        """The groups that came back and may be leased, in their order, each on the one version that it may continue on."""
        may_lease = self._admission.may_lease
        for group_id in self._state.unassigned:
            group = self._state.groups[group_id]
            partials = self._partials.wanted(group) if request.can_continue else {}
            begun = self._partials.version_of(partials)
            version = request.version if begun is None else begun
            oldest = min([version, *(partial.version for partial in partials.values())])
            if may_lease(self._state, oldest, group):
                yield Choice(version, group, partials)
            elif partials and may_lease(self._state, request.version, group):
                yield Choice(request.version, group, {}, starts_again=True)
