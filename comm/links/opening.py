"""Opens links: raw bytes in both directions between two processes, a deadline on every operation.

The other end receives the bytes in the pieces in which they were sent. A link that fails raises `LinkBroken` and is closed; to
continue, both ends open another and agree on the byte to continue from. Back ends:

    tcp     plain sockets, which report a dead neighbour at once
    nccl    a process group of two ranks on two different GPUs, through buckets on each
    staged  its counterpart on CPU: Gloo, through buckets in host memory

Both ends prove that they know the run's secret before the link is returned.
"""

import socket
from typing import TYPE_CHECKING

from ..errors import LinkBroken, SettingError, StoreGone, WaitTimeout
from ..recipe import CommSettings
from ..waits import Wait, waiting
from .base import Link
from .handshake import authenticate
from .host import listen, split_address
from .tcp import TcpLink
from .tls import TlsIdentity

if TYPE_CHECKING:
    from ..store.client import StoreClient
    from .staged import StagedLink

_NCCL_START_S = 120.0
"""Seconds that NCCL may take to connect two GPUs; it is seldom more than one."""


def open_link(
    backend: str,
    store: "StoreClient",
    name: str,
    end: int,
    deadline_s: float,
    *,
    secret: bytes = b"",
    tls: TlsIdentity | None = None,
    interface: str = "127.0.0.1",
) -> Link:
    """Open end 0 or 1 of the link `name`; returns once both ends are open and each has proved to know `secret`.

    The ends find each other on `store`; a name serves one link. Raises `LinkBroken` if the other end does not come within
    `deadline_s`.
    """
    assert end in (0, 1), end
    if backend not in ("tcp", "nccl", "staged"):
        raise SettingError(f"comm.link: {backend!r} is not a back end of a link between processes; use tcp or nccl")
    if backend == "nccl":
        import torch  # only links over a process group need it

        if not torch.cuda.is_available():
            raise SettingError("comm.link: nccl needs a GPU at both ends, and this one has none")
    try:
        with waiting(f"end {1 - end} of link {name}", f"{backend} connection", deadline_s) as wait:
            if backend == "tcp":
                return _open_socket(store, name, end, wait, secret, tls, interface)
            control_link = _open_socket(store, f"{name}/control", end, wait, secret, tls, interface)
            try:
                return _open_staged(backend, store, name, end, deadline_s, interface, control_link)
            except BaseException:
                control_link.close()
                raise
    except (StoreGone, WaitTimeout, OSError) as error:
        raise LinkBroken(f"link {name}: {error}") from error


def _open_staged(
    backend: str, store: "StoreClient", name: str, end: int, deadline_s: float, interface: str, control_link: TcpLink
) -> "StagedLink":
    import torch

    from .process_group import open_pair
    from .staged import StagedLink

    is_nccl = backend == "nccl"
    group = open_pair("nccl" if is_nccl else "gloo", store, name, end, deadline_s, interface)
    link = StagedLink(backend, group, end, torch.device("cuda" if is_nccl else "cpu"), control_link)
    link.connect(max(deadline_s, _NCCL_START_S) if is_nccl else deadline_s)
    return link


def remote_backend(settings: CommSettings) -> str:
    """The back end of links between hosts under these settings."""
    return "nccl" if settings.link == "nccl" else "tcp"


def _open_socket(
    store: "StoreClient", name: str, end: int, wait: Wait, secret: bytes, tls: TlsIdentity | None, interface: str
) -> TcpLink:
    """End 0 listens and puts its address into the store; end 1 connects."""
    key = f"link/{name}"
    if end == 0:
        listener, address = listen(interface, backlog=8)
        with listener:
            store.set(key, address.encode())
            try:
                return _accept(listener, name, wait, secret, tls)
            finally:
                store.delete(key)
    address = store.wait_for(key, _remaining_s(wait))
    link = TcpLink(socket.create_connection(split_address(address.decode()), _remaining_s(wait)))
    authenticate(link, name, 1, secret, _remaining_s(wait), tls)
    return link


def _accept(listener: socket.socket, name: str, wait: Wait, secret: bytes, tls: TlsIdentity | None) -> TcpLink:
    """The first connection that proves that it knows the secret; others are closed."""
    while True:
        listener.settimeout(_remaining_s(wait))
        try:
            link = TcpLink(listener.accept()[0])
        except TimeoutError as error:
            raise LinkBroken(f"link {name}: the other end did not connect within {wait.deadline_s:.0f} s") from error
        try:
            authenticate(link, name, 0, secret, _remaining_s(wait), tls)
            return link
        except LinkBroken:
            link.close()


def _remaining_s(wait: Wait) -> float:
    return max(wait.remaining_s, 1e-3)  # a socket takes 0 for no timeout at all
