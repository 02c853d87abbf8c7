"""What a rollout is answerable for: the leases it asks for, and the trajectories it holds until they are handed over."""

import math
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..comm.mailbox import Mailbox
from ..comm.messages import Lease, LeaseGrant, LeaseRequest, LeaseReturn, RowId
from .engine.sequence import Completion
from .pacing import RolloutPacing

REPEAT_S = 2.0


@dataclass(slots=True)
class LeasedRow:
    """A trajectory that this rollout is answerable for, until its parcel is handed over."""

    row_id: RowId
    attempt: int
    version: int
    """The version that it was begun with."""
    row: dict[str, Any]
    completion: Completion | None = None
    switches: list[tuple[int, int]] = field(default_factory=list)
    """(tokens of prompt and response, version): where the weights changed under it."""
    claim_id: int = 0
    """The claim whose answer will say whether the lease is this rollout's; 0: it is."""

    def token_versions(self) -> list[int]:
        """The version that drew each token of the response."""
        done = self.completion
        if done is None:
            return []
        versions = [self.version] * len(done.token_ids)
        for num_tokens, version in self.switches:
            first = num_tokens - len(done.prompt_ids)
            versions[first:] = [version] * (len(versions) - first)
        return versions


class HeldLeases:
    """Asks for groups, one question at a time, and keeps what is held."""

    def __init__(self, mailbox: Mailbox, incarnation: int, samples_per_prompt: int, pacing: RolloutPacing) -> None:
        self.held: dict[int, LeasedRow] = {}
        self._mailbox = mailbox
        self._samples_per_prompt = samples_per_prompt
        self._pacing = pacing
        self._taken = 0
        # Numbers start anew with each incarnation: an answer to an earlier one may still lie in the inbox.
        self._request_id = LeaseRequest(incarnation << 32, -1, 0)
        self._answered = self._request_id.request_id
        self._is_asking = False
        self._asked_at = 0.0

    def begin_version(self) -> None:
        """The rollout runs on other weights: an open question is void, the quota is new."""
        self._is_asking, self._taken = False, 0

    def drained(self) -> None:
        """Nothing is held any more: the quota is new."""
        self._taken = 0

    def ask(self, version: int, room: int) -> None:
        """Ask for the groups that fill `room` trajectories, as far as the quota lasts; an open question is repeated."""
        if self._is_asking:
            if time.monotonic() - self._asked_at > REPEAT_S:
                self._send()
            return
        groups = math.ceil(room / self._samples_per_prompt)
        if self._pacing.share is not None:
            groups = min(groups, self._pacing.share - self._taken)
        if groups > 0:
            self._request_id = LeaseRequest(self._request_id.request_id + 1, version, groups)
            self._is_asking = True
            self._send()

    def take(self, grant: LeaseGrant, version: int) -> list[tuple[Lease, list[LeasedRow]]]:
        """The groups of a grant with the trajectories to start; none of a grant that was for other weights."""
        if grant.request_id <= self._answered:
            return []  # the same answer again, to a question asked twice
        self._answered = grant.request_id
        self._is_asking = self._is_asking and grant.request_id != self._request_id.request_id
        if grant.version != version and not self._pacing.updates_mid_trajectory:
            self._mailbox.send("hub", LeaseReturn([x.group for x in grant.leases], [x.attempt for x in grant.leases]))
            return []
        self._taken += len(grant.leases)
        return [(lease, self._hold(lease, version)) for lease in grant.leases]

    def _hold(self, lease: Lease, version: int) -> list[LeasedRow]:
        row = msgspec.json.decode(lease.row)
        fresh: list[LeasedRow] = []
        for sample in lease.samples:
            row_id = lease.group.row(sample)
            held = self.held.get(row_id.number)
            if held is not None and (held.version == version or self._pacing.updates_mid_trajectory):
                # Given up for dead, this rollout got its own row back: it goes on with it.
                held.attempt, held.claim_id = lease.attempt, 0
            else:
                fresh.append(LeasedRow(row_id, lease.attempt, version, row))
        self.held |= {held.row_id.number: held for held in fresh}
        return fresh

    def _send(self) -> None:
        self._asked_at = time.monotonic()
        self._mailbox.send("hub", self._request_id)
