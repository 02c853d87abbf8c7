"""This host: its identity, its addresses, and the one address on which this process listens (`comm.interface`).

Two processes are on one host if they can open each other's memory: it goes through /proc, which shows the processes of one
PID namespace of one running kernel. So that pair is the identity. Host names are not enough: two containers may have the same name.
"""

import ctypes
import os
import socket
from collections.abc import Sequence
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import NamedTuple

from ..errors import SettingError

_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses of no host (RFC 5737, RFC 3849): the route to one of them is the default route."""


class _LocalAddress(NamedTuple):
    """An address of this host, and the network interface that has it."""

    interface: str
    address: str


def host_id() -> str:
    """The identity of this host: the running kernel and the PID namespace of this process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[IPv6]:port"; raises `ValueError`."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """ "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(interface: str, port: int = 0, backlog: int = 1024) -> tuple[socket.socket, str]:
    """A socket that listens on one address, and its "host:port"; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in interface else socket.AF_INET
    listener = socket.create_server((interface, port), family=family, backlog=backlog)
    return listener, join_address(interface, listener.getsockname()[1])


def is_loopback(address: str) -> bool:
    """Whether an IP address can be reached only from this host; a name other than `localhost` counts as reachable."""
    return _is_address(address) and (address == "localhost" or ip_address(address).is_loopback)


def listening_address(setting: str, towards: str = "") -> str:
    """The address of this host that `comm.interface` selects. Raises `SettingError` with the name of the host.

    setting: the name of an interface, an address, a network such as 10.0.0.0/8, or `auto`: the address of the route to the
    host `towards`, loopback if that is empty.
    """
    if setting == "auto":
        return _route_to(towards) if towards else "127.0.0.1"
    if _is_address(setting) and is_loopback(setting):
        return setting
    here = _local_addresses()
    found = [each for each in here if _matches(setting, each)]
    if not found:
        have = ", ".join(f"{each.interface} {each.address}" for each in here)
        raise SettingError(
            f"comm.interface={setting} does not name an interface, address or network of host {socket.gethostname()}, which has {have}"
        )
    return found[0].address


def own_address(interface: str, store_address: str) -> str:
    """The address on which a member listens: the one of this host that `comm.interface` selects. Raises `SettingError`."""
    store_host, _ = split_address(store_address)
    address = listening_address(interface, towards=store_host)
    if is_loopback(address) and not is_loopback(store_host):
        raise SettingError(
            f"comm.interface={interface}: other hosts cannot reach {address} of host {socket.gethostname()}, and the run's"
            f" store is at {store_host}; use auto, or the name of an interface or a network that all hosts share"
        )
    return address


def bind_process_groups(address: str) -> None:
    """Make torch's process groups use the interface with this address, unless the user's environment names another."""
    interface = _interface_of(address)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if interface and not is_loopback(address):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def _interface_of(address: str) -> str:
    """The network interface that has an address of this host; empty if none has it."""
    return next((each.interface for each in _local_addresses() if each.address == address), "")


def _matches(setting: str, local: _LocalAddress) -> bool:
    if setting == local.interface:
        return True
    try:
        return ip_address(local.address) in ip_network(setting, strict=False)  # an address is a network of one
    except ValueError:
        return False


def _route_to(host: str) -> str:
    """The source address of packets to a host. If that is loopback although a name was asked for, the default route's.

    Debian gives a host's own name the address 127.0.1.1, which other hosts cannot use.
    """
    source = _source_address(host)
    if source and (not is_loopback(source) or _is_address(host)):
        return source
    candidates = [*filter(None, map(_source_address, _ELSEWHERE)), *(each.address for each in _local_addresses())]
    outward = [address for address in candidates if not is_loopback(address)]
    if not outward:
        raise SettingError(f"comm.interface=auto: host {socket.gethostname()} has no address that other hosts reach")
    return outward[0]


def _source_address(host: str) -> str:
    """The source address of packets to a host; empty without a route. Nothing is sent."""
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                return probe.getsockname()[0]
    except OSError:
        pass
    return ""


def _is_address(host: str) -> bool:
    """Whether this is an address and not a name; `localhost` is as good as one."""
    if host == "localhost":
        return True
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


class _SocketAddress(ctypes.Structure):
    _fields_ = (("family", ctypes.c_ushort), ("port", ctypes.c_ushort), ("body", ctypes.c_ubyte * 24))


class _InterfaceAddress(ctypes.Structure):
    """`struct ifaddrs` of getifaddrs(3), as far as it is read."""


_InterfaceAddress._fields_ = (
    ("next", ctypes.POINTER(_InterfaceAddress)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SocketAddress)),
)


def _local_addresses() -> Sequence[_LocalAddress]:
    """The addresses of this host, IPv4 first, without those of IPv6 that hold for one wire only."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_InterfaceAddress)()
    if libc.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), "getifaddrs")
    found: list[_LocalAddress] = []
    entry = first
    while entry:
        interface = entry.contents
        entry = entry.contents.next
        address = _ip_text(interface.address.contents) if interface.address else ""
        if address:
            found.append(_LocalAddress(interface.name.decode(), address))
    libc.freeifaddrs(first)
    return sorted(found, key=lambda each: ":" in each.address)


def _ip_text(address: _SocketAddress) -> str:
    """An IP address as text; empty for another family and for link-local IPv6."""
    if address.family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, bytes(address.body[:4]))
    if address.family == socket.AF_INET6:  # the four bytes before the address are its flow label
        text = socket.inet_ntop(socket.AF_INET6, bytes(address.body[4:20]))
        return "" if ip_address(text).is_link_local else text
    return ""
