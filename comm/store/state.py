"""The state of the store, and what each request changes in it. It does no I/O: callers pass the time and send `outgoing`."""

from collections import Counter, defaultdict
from dataclasses import dataclass

import msgspec

from .inbox import StoredInbox
from .members import Member
from .protocol import (
    AddTo,
    Announce,
    Answer,
    Beat,
    Changed,
    CloseInbox,
    Confirm,
    DeleteValue,
    GetValue,
    Join,
    Leave,
    OpenInbox,
    Post,
    Push,
    Question,
    Request,
    SetValue,
    Sync,
    Watch,
)

ALL_ROLES = ""


@dataclass(slots=True)
class _Presence:
    """A member, its client (None once its connection has ended), and the time of its last request."""

    member: Member
    client: int | None
    expiry_s: float
    heard_at: float


class StoreState:
    """Members, inboxes and values. Clients are numbered; a number is never used again."""

    def __init__(self) -> None:
        self.outgoing: dict[int, list[Push]] = defaultdict(list)
        """Messages for each client; the caller sends and removes them."""
        self.values: dict[str, bytes] = {}
        self._counters: Counter[str] = Counter()
        self._waiting: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """For each key, the clients and request numbers that wait for its value."""
        self._inboxes: dict[str, StoredInbox] = {}
        self._readers: dict[str, int] = {}
        self._present: dict[str, _Presence] = {}
        self._names: dict[int, str] = {}
        """The name of each client's member."""
        self._heard: dict[int, _Presence] = {}
        self._incarnations: Counter[str] = Counter()
        self._watchers: dict[str, set[int]] = defaultdict(set)
        self._changed: set[str] = set()
        self._looked_at = 0.0

    @property
    def num_joined(self) -> int:
        """Number of distinct members that have ever joined."""
        return len(self._incarnations)

    @property
    def has_changes(self) -> bool:
        """Whether `tell_changes` has something to tell."""
        return bool(self._changed)

    def num_present(self, silence_s: float) -> int:
        """Number of members that have not left and were heard within `silence_s` before the last `look`. Any thread may call it."""
        looked_at = self._looked_at
        return sum(looked_at - each.heard_at < silence_s for each in list(self._present.values()))

    def hear(self, client: int, now: float) -> None:
        """Something of this client has arrived, if only a part of a request: its member lives."""
        if (heard := self._heard.get(client)) is not None:
            heard.heard_at = now
            if not heard.member.is_alive:
                self._set_alive(heard, is_alive=True)

    def handle(self, client: int, request: Request, now: float) -> None:
        """Carry out a request."""
        self.hear(client, now)
        match request:
            case Beat():
                self.outgoing[client].append(request)
            case Post(to=to, sender=sender, sequence=sequence, body=body):
                delivery = self._inbox(to).add(sender, sequence, body)
                if delivery is not None:
                    self.outgoing[self._readers[to]].append(delivery)
            case Confirm(name=name, place=place):
                if self._readers.get(name) == client:
                    self._inbox(name).confirm(place)
            case Announce(info=info):
                self._announce(client, info)
            case _:
                self._answer(client, request, now)

    def on_closed(self, client: int) -> None:
        """The connection of a client has ended: its member is dead, unless it has left."""
        self.outgoing.pop(client, None)
        for watchers in self._watchers.values():
            watchers.discard(client)
        for waiting in self._waiting.values():
            waiting[:] = [request for request in waiting if request[0] != client]
        for name in [name for name, reader in self._readers.items() if reader == client]:
            self._close_inbox(client, name, is_last=False)
        self._heard.pop(client, None)
        name = self._names.pop(client, None)
        presence = self._present.get(name) if name is not None else None
        if presence is not None and presence.client == client:
            presence.client = None
            self._set_alive(presence, is_alive=False)

    def look(self, now: float, pause_s: float = 0.0) -> None:
        """Declare silent members dead. `pause_s`: seconds for which the store itself was stopped; they do not count as silence."""
        for presence in self._heard.values():
            presence.heard_at = min(now, presence.heard_at + pause_s)
            if presence.member.is_alive and now - presence.heard_at >= presence.expiry_s:
                self._set_alive(presence, is_alive=False)
        self._looked_at = now

    def tell_changes(self) -> None:
        """Send the watchers the members that have changed since the last call."""
        by_role: dict[str, list[str]] = defaultdict(list)
        for name in sorted(self._changed):
            by_role[_role_of(name)].append(name)
        self._changed.clear()
        for role, names in by_role.items():
            members = [self._present[name].member for name in names if name in self._present]
            changed = Changed(members, [name for name in names if name not in self._present])
            for client in self._watchers[role] | self._watchers[ALL_ROLES]:
                self.outgoing[client].append(changed)

    def _answer(self, client: int, request: Question, now: float) -> None:
        """Carry out a request and answer it."""
        value: int | bytes | None = None
        match request:
            case Join(member=member, expiry_s=expiry_s):
                value = self._join(client, member, expiry_s, now)
            case Leave():
                self._leave(client)
            case Watch(role=role):
                self._watchers[role].add(client)
                found = [each.member for each in self._present.values() if role in (ALL_ROLES, each.member.role)]
                self.outgoing[client].append(Changed(found, []))
            case OpenInbox(name=name, confirms=confirms):
                inbox = self._inbox(name)
                waiting = inbox.open(confirms=confirms)
                self._readers[name] = client
                self.outgoing[client] += [Answer(request.number, inbox.num_opened), *waiting]
                return
            case CloseInbox(name=name, is_last=is_last):
                self._close_inbox(client, name, is_last=is_last)
            case GetValue(key=key, waits=True) if key not in self.values:
                self._waiting[key].append((client, request.number))
                return
            case _:
                value = self._value(request)
        self.outgoing[client].append(Answer(request.number, value))

    def _value(self, request: Question) -> int | bytes | None:
        """Carry out a request about values; returns its answer."""
        match request:
            case SetValue(key=key, value=value):
                self._set_value(key, value)
            case GetValue(key=key):
                return self.values.get(key)
            case DeleteValue(key=key):
                self.values.pop(key, None)
            case AddTo(key=key, amount=amount):
                self._counters[key] += amount
                return self._counters[key]
            case Sync():
                pass
            case _:
                raise AssertionError(f"no rule for {request}")
        return None

    def _join(self, client: int, member: Member, expiry_s: float, now: float) -> int:
        self._incarnations[member.name] += 1
        incarnation = self._incarnations[member.name]
        before = self._present.get(member.name)
        if before is not None and before.client is not None:
            self._heard.pop(before.client, None)
        member = msgspec.structs.replace(member, incarnation=incarnation, is_alive=True)
        presence = _Presence(member, client, expiry_s, now)
        self._present[member.name] = presence
        self._names[client] = member.name
        self._heard[client] = presence
        self._changed.add(member.name)
        return incarnation

    def _announce(self, client: int, info: dict[str, str]) -> None:
        if (presence := self._heard.get(client)) is not None:
            presence.member = msgspec.structs.replace(presence.member, info=info)
            self._changed.add(presence.member.name)

    def _leave(self, client: int) -> None:
        presence = self._heard.pop(client, None)
        if presence is not None:
            del self._present[presence.member.name]
            self._changed.add(presence.member.name)

    def _set_alive(self, presence: _Presence, *, is_alive: bool) -> None:
        presence.member = msgspec.structs.replace(presence.member, is_alive=is_alive)
        self._changed.add(presence.member.name)

    def _set_value(self, key: str, value: bytes) -> None:
        self.values[key] = value
        for client, number in self._waiting.pop(key, ()):
            self.outgoing[client].append(Answer(number, value))

    def _inbox(self, name: str) -> StoredInbox:
        if name not in self._inboxes:
            self._inboxes[name] = StoredInbox(name)
        return self._inboxes[name]

    def _close_inbox(self, client: int, name: str, *, is_last: bool) -> None:
        """Close an inbox, unless the reader's next process has already opened it."""
        reader = self._readers.get(name)
        if reader == client:
            del self._readers[name]
        if reader in (None, client):
            self._inbox(name).close(is_last=is_last)


def _role_of(name: str) -> str:
    return name.partition("-")[0]
