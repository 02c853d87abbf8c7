"""Encrypted connections, in front of a program on the path between two processes."""

import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.closing import hang_up

from headrace.comm.errors import PeerGone
from headrace.comm.links.tcp import TcpLink
from headrace.comm.links.tls import TlsIdentity
from headrace.comm.storage.client import StorageClient
from headrace.comm.storage.server import StorageServer

SECRET = b"a secret of the run"
TEXT = b"48 clips in April" * 4


class Eavesdropper:
    """Passes the bytes of one connection on in both directions and keeps them; with `tls` it is an end of both halves.

    `change` edits what the client receives.
    """

    def __init__(self, address, tls=None):
        self.heard = bytearray()
        self.change: Callable[[bytes], bytes] = bytes
        self.tls = tls
        host, _, port = address.rpartition(":")
        self.listener = socket.create_server((host, 0))
        self.address = f"{host}:{self.listener.getsockname()[1]}"
        self.inner = socket.create_connection((host, int(port)))
        self.threads = [threading.Thread(target=self.serve)]
        self.threads[0].start()

    def serve(self):
        self.outer = self.listener.accept()[0]
        if self.tls is not None:
            self.outer, self.inner = self.tls.wrap(self.outer, 0), self.tls.wrap(self.inner, 1)
            self.outer.do_handshake()
            self.inner.do_handshake()
        self.threads.append(threading.Thread(target=self.copy, args=(self.inner, self.outer)))
        self.threads[-1].start()
        self.copy(self.outer, self.inner)

    def copy(self, source, to):
        try:
            while data := source.recv(1 << 16):
                self.heard += data
                to.sendall(self.change(data) if to is self.outer else data)
        except OSError:
            pass
        for each in (source, to):
            hang_up(each)

    def close(self):
        self.listener.close()
        for each in (self.inner, self.outer):
            hang_up(each)
        for thread in self.threads:
            thread.join(60)


@pytest.mark.parametrize("encrypted", [True, False])
def test_a_row_cannot_be_read_on_its_way(encrypted):
    def identity():
        return TlsIdentity() if encrypted else None

    unit = StorageServer("127.0.0.1", SECRET, tls=identity()).start()
    path = Eavesdropper(unit.address)
    client = StorageClient(path.address, SECRET, through_memory=False, tls=identity())
    client.put("row", {"prompt": np.frombuffer(TEXT, np.uint8)})
    assert client.get("row")["prompt"].tobytes() == TEXT
    client.close()
    path.close()
    unit.close()
    assert (TEXT in path.heard) == (not encrypted)


def test_a_row_cannot_be_changed_on_its_way():
    unit = StorageServer("127.0.0.1", SECRET, tls=TlsIdentity()).start()
    path = Eavesdropper(unit.address)
    client = StorageClient(path.address, SECRET, through_memory=False, tls=TlsIdentity())
    client.put("row", {"prompt": np.frombuffer(TEXT, np.uint8)})
    path.change = lambda data: data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(PeerGone, match="(?i)bad record mac"):
        client.get("row")
    client.close()
    path.close()
    unit.close()


def test_a_program_on_the_path_cannot_be_an_end_of_both_halves():
    unit = StorageServer("127.0.0.1", SECRET, tls=TlsIdentity()).start()
    path = Eavesdropper(unit.address, TlsIdentity())
    with pytest.raises(PeerGone, match="does not know the run's secret|closed by the other end"):
        StorageClient(path.address, SECRET, through_memory=False, tls=TlsIdentity())
    path.close()
    unit.close()


def test_an_end_without_tls_gets_no_connection():
    unit = StorageServer("127.0.0.1", SECRET, tls=TlsIdentity()).start()
    with pytest.raises(PeerGone):
        StorageClient(unit.address, SECRET, deadline_s=5)
    unit.close()


@pytest.mark.parametrize("old_end", [0, 1])
def test_an_end_that_offers_no_tls_1_3_gets_no_connection(old_end):
    contexts = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old, identity, ends = contexts[old_end], TlsIdentity(), socket.socketpair()
    if old_end == 0:
        old = identity.listening
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
    theirs = old.wrap_socket(ends[0], server_side=old_end == 0, do_handshake_on_connect=False)
    ours = TlsIdentity().wrap(ends[1], 1 - old_end)
    with ThreadPoolExecutor(1) as pool:
        their_hand_shake = pool.submit(theirs.do_handshake)
        with pytest.raises(ssl.SSLError):
            ours.do_handshake()
        socket.socket.close(ours)
        assert isinstance(their_hand_shake.exception(60), OSError)
    socket.socket.close(theirs)


def test_a_closed_end_is_seen_without_reading():
    links = tcp_pair()
    server = threading.Thread(target=links[0].start_tls, args=(TlsIdentity(), 0, 60))
    server.start()
    links[1].start_tls(TlsIdentity(), 1, 60)
    server.join(60)
    assert not links[0].is_closed() and not links[1].is_closed()
    links[0].close()
    assert links[0].is_closed() and links[1].is_closed()
    links[1].close()


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connecting = socket.create_connection(listener.getsockname())
        return [TcpLink(listener.accept()[0]), TcpLink(connecting)]
