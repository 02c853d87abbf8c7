"""The members of one host of `bench.members`: a relay and rollouts, with identities and connections of their own.

    python -m bench.member_host STORE_ADDRESS HOST NUM_MEMBERS EXPIRY_S

Their messages to the hub are those of a run. A line on standard input starts the members; another one ends the connection of the
last one. One thread serves all connections by the store's protocol, since thousands of `StoreClient` with two threads each take more
than the cores that the store and the hub leave them; and it imports no more than it needs.
"""

import os
import random
import signal
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from select import select

from headrace.comm.frames import FrameReader, encode_message
from headrace.comm.links.handshake import authenticate
from headrace.comm.links.host import split_address
from headrace.comm.links.tcp import TcpLink
from headrace.comm.messages import (
    BusyReport,
    LeaseGrant,
    LeaseRequest,
    LoadReport,
    Message,
    RowDone,
    RowId,
    RowRef,
    RowsStreamed,
)
from headrace.comm.messages.base import storage_id_of
from headrace.comm.messages.codec import decode, encode
from headrace.comm.process_tree import end_with_parent
from headrace.comm.recipe import CommSettings
from headrace.comm.store.members import Member
from headrace.comm.store.protocol import (
    LINK_NAME,
    MAX_REQUEST_BYTES,
    PLAIN,
    PUSHES,
    Answer,
    Beat,
    Changed,
    Delivery,
    Join,
    OpenInbox,
    Post,
    Request,
    Watch,
)

SECRET = b"benchmark"
SAMPLES, GROUPS_HELD = 16, 2
"""Of each group, and groups that a rollout holds."""
_ROW_S, _LOAD_S, _STREAM_S, _BUSY_S, _REPEAT_S = 2.0, 2.5, 2.0, 1.0, 2.0
"""Seconds between two messages of a kind: a rollout on one GPU decodes 1,000 tokens/s (an emulated H800 1,350, by the 64 GPUs of
docs/develop/benchmarks.md), in rows of 2,000; it reports its load and first tokens by the settings' defaults, and repeats an open
request."""
_TURN_S = 0.5
_CONNECT_S = 60.0


def names_of(host: int, num_members: int) -> list[str]:
    """The members of a host."""
    first = host * (num_members - 1)
    return [f"relay-{host}", *(f"rollout-{index}" for index in range(first, first + num_members - 1))]


class _Played(ABC):
    """A member: its connection to the store, its inbox, and its messages to the hub, which are those of a run."""

    def __init__(self, address: str, name: str, settings: CommSettings) -> None:
        role, _, index = name.partition("-")
        self.name = name
        self.relays: list[Member] = []
        self._period_s = settings.heartbeat_s
        self._due: dict[str, float] = {}
        self._answers: dict[int, int | bytes | None] = {}
        self._reader = FrameReader(PUSHES, MAX_REQUEST_BYTES)
        link = TcpLink(socket.create_connection(split_address(address), _CONNECT_S))
        first = bytearray(1)
        link.receive(first, _CONNECT_S)
        assert first == PLAIN
        authenticate(link, LINK_NAME, 1, SECRET, _CONNECT_S, None)
        self.socket = link.release()
        self.socket.settimeout(_CONNECT_S)
        info = {"unit": "127.0.0.1:1", "segment": "played"} if role == "relay" else {}
        member = Member(name, role, int(index), 0, "host", os.getpid(), info)
        self.incarnation = self._ask(Join(1, member, settings.expiry_s))
        self._sequence = self._ask(OpenInbox(2, name)) << 32
        self._ask(Watch(3, "relay"))

    @abstractmethod
    def turn(self) -> None:
        """Send the messages that are due."""

    @abstractmethod
    def take(self, message: Message) -> None:
        """Take a message."""

    def beat(self) -> None:
        """Send a sign of life when it is due."""
        if self.is_due("beat", self._period_s):
            self._tell(Beat())

    def receive(self) -> None:
        """Take what the store has sent; waits for it. Ends the process if the store is gone."""
        data = self.socket.recv(1 << 18)
        if not data:
            sys.exit(f"{self.name}: the store closed the connection")
        for push in self._reader.feed(data):
            match push:
                case Answer(number=number, value=value):
                    self._answers[number] = value
                case Changed(members=members):
                    self.relays += [member for member in members if member.is_alive]
                case Delivery(body=body):
                    self.take(decode(body))
                case Beat():
                    pass

    def _ask(self, request: Join | OpenInbox | Watch) -> int:
        self._tell(request)
        while request.number not in self._answers:
            self.receive()
        return int(self._answers[request.number] or 0)

    def _tell(self, request: Request) -> None:
        self.socket.sendall(encode_message(request))

    def is_due(self, kind: str, period_s: float) -> bool:
        """Whether `period_s` have passed since this was last true for the kind; the first time is random."""
        now = time.monotonic()
        is_due = now >= self._due.setdefault(kind, now + random.random() * period_s)
        if is_due:
            self._due[kind] += period_s
        return is_due

    def send(self, message: Message) -> None:
        self._sequence += 1
        self._tell(Post("hub", self.name, self._sequence, encode(message)))


class _Relay(_Played):
    def turn(self) -> None:
        if self.is_due("busy", _BUSY_S):
            self.send(BusyReport(1.0, 1.0))

    def take(self, message: Message) -> None:
        pass


class _Rollout(_Played):
    """It finishes its rows one after the other, the oldest first, and stores them at one relay."""

    def __init__(self, address: str, name: str, settings: CommSettings) -> None:
        self._held: deque[tuple[RowId, int]] = deque()
        super().__init__(address, name, settings)
        relay = random.choice(self.relays)
        self._units = [storage_id_of(relay.name, relay.incarnation)]
        self._request = LeaseRequest(self.incarnation << 32, 0, 0)

    def take(self, message: Message) -> None:
        if isinstance(message, LeaseGrant) and message.request_id == self._request.request_id:
            self._held += [(each.group.row(s), each.attempt) for each in message.leases for s in each.samples]
            self._request = LeaseRequest(message.request_id + 1, 0, 0)

    def turn(self) -> None:
        groups = (GROUPS_HELD * SAMPLES - len(self._held)) // SAMPLES
        is_new = self._request.num_groups == 0
        if groups > 0 and (is_new or self.is_due("repeat", _REPEAT_S)):
            self._request = LeaseRequest(self._request.request_id, 0, groups if is_new else self._request.num_groups)
            self.send(self._request)
        if self._held and self.is_due("row", _ROW_S):
            row, attempt = self._held.popleft()
            self.send(RowDone(row, attempt, 0, self._units, 2000, random.random()))
        if self._held and self.is_due("stream", _STREAM_S):
            begun = list(self._held)[::2]
            rows = [RowRef(row, attempt, self._units, 0, 1000, is_partial=True) for row, attempt in begun]
            self.send(RowsStreamed(rows))
        if self.is_due("load", _LOAD_S):
            n = len(self._held)
            self.send(
                LoadReport(
                    version=0, num_running=n, num_waiting=0, kv_util=0.5, tokens=0, busy_s=1.0, idle_s=0.0, pull_s=0.0
                )
            )


def _serve_host(address: str, host: str, num_members: str, expiry_s: str) -> None:
    settings = CommSettings(expiry_s=float(expiry_s))
    names = names_of(int(host), int(num_members))
    print("ready", flush=True)
    sys.stdin.readline()
    relay = _Relay(address, names[0], settings)
    with ThreadPoolExecutor(len(names)) as pool:  # at once, as the processes of a host do
        played = [relay, *pool.map(lambda name: _Rollout(address, name, settings), names[1:])]
    print(f"joined {time.monotonic()}", flush=True)
    _play({member.socket: member for member in played})


def _play(played: dict[socket.socket, _Played]) -> None:
    """Serve all members; returns when standard input ends. Waits for the store and the clock."""
    while True:
        if select([sys.stdin], [], [], _TURN_S)[0]:
            if not os.read(sys.stdin.fileno(), 1):
                return
            last, _ = played.popitem()
            last.close()
        for ready in select([*played], [], [], 0)[
            0
        ]:  # at each turn: to wake for each message would cost more than the message
            played[ready].receive()
        for member in played.values():
            member.beat()
            member.turn()


if __name__ == "__main__":
    end_with_parent(signal.SIGKILL, os.getppid())
    os.nice(5)  # the hosts of a run do not take the CPU of the store's and hub's host
    _serve_host(*sys.argv[1:])
