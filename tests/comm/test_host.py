"""The addresses on which a host listens, and the identity by which its processes find each other's memory."""

import os
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest
from support.closing import at_end

from headrace.comm.errors import SettingError
from headrace.comm.links.host import (
    bind_process_groups,
    host_id,
    join_address,
    listening_address,
    own_address,
    split_address,
)
from headrace.comm.links.opening import open_link
from headrace.comm.storage.client import StorageClient
from headrace.comm.storage.server import StorageServer
from headrace.comm.store.client import StoreClient
from headrace.comm.store.server import StoreServer

PATIENCE_S = 60.0


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("setting", ["lo", "127.0.0.1", "127.0.0.0/8", "auto"])
def test_an_interface_an_address_and_a_network_select_one_address(setting: str):
    assert listening_address(setting) == "127.0.0.1"


def test_auto_is_the_address_of_the_route_to_the_store():
    assert own_address("auto", "127.0.0.1:80") == "127.0.0.1"
    assert own_address("auto", "localhost:80") == "127.0.0.1"


@pytest.mark.parametrize("setting", ["nonsense0", "203.0.113.7", "203.0.113.0/24", "0.0.0.0"])
def test_a_setting_that_fits_no_address_is_refused_with_the_hosts_name_and_addresses(setting: str):
    with pytest.raises(
        SettingError, match=rf"comm\.interface={setting} .* host {socket.gethostname()}.* lo 127\.0\.0\.1"
    ):
        listening_address(setting)


def test_a_host_that_would_announce_a_loopback_address_to_other_hosts_is_refused():
    with pytest.raises(SettingError, match=r"comm\.interface=lo: other hosts cannot reach 127\.0\.0\.1"):
        own_address("lo", "203.0.113.7:80")
    with pytest.raises(SettingError, match=r"other hosts cannot reach 127\.0\.0\.1 .* store is at first-host"):
        own_address("lo", "first-host:80")


@pytest.mark.parametrize(
    ("host", "text"), [("10.0.0.1", "10.0.0.1:80"), ("fd00::1", "[fd00::1]:80"), ("a.b", "a.b:80")]
)
def test_an_address_is_written_and_read(host: str, text: str):
    assert join_address(host, 80) == text
    assert split_address(text) == (host, 80)


@pytest.mark.parametrize("text", ["", "host", ":80", "host:", "host:http"])
def test_a_text_that_is_no_address_is_refused(text: str):
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        split_address(text)


def test_processes_of_one_pid_namespace_have_one_host():
    code = "from headrace.comm.links.host import host_id; print(host_id())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert other.stdout.strip() == host_id()


def test_process_groups_use_the_hosts_own_interface_unless_the_user_names_one(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "users0")
    bind_process_groups("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "users0"


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
def test_store_links_and_storage_units_work_over_ipv6():
    hosted = StoreServer("::1", b"s").start()
    at_end(hosted.close)
    clients = [StoreClient.connect(hosted.address, b"s", PATIENCE_S) for _ in range(2)]
    for each in clients:
        at_end(each.close)
    assert hosted.address.startswith("[::1]:")
    assert own_address("auto", hosted.address) == "::1"
    sent, received = np.arange(9, dtype=np.uint8), np.empty(9, np.uint8)

    def listen() -> None:
        link = open_link("tcp", clients[0], "six", 0, PATIENCE_S, interface="::1")
        link.send(sent, PATIENCE_S)
        link.close()

    thread = threading.Thread(target=listen)
    thread.start()
    link = open_link("tcp", clients[1], "six", 1, PATIENCE_S, interface="::1")
    link.receive(received, PATIENCE_S)
    thread.join(PATIENCE_S)
    link.close()
    assert (received == sent).all()
    unit = StorageServer("::1").start()
    at_end(unit.close)
    client = StorageClient(unit.address)
    at_end(client.close)
    client.put("row", {"x": sent})
    assert (client.get("row")["x"] == sent).all()
