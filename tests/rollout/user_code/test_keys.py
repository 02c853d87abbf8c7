"""Addresses that name the environment variable with their key."""

import pytest

from headrace.comm.errors import SettingError
from headrace.rollout.user_code.keys import KeyedAddress


def test_the_key_becomes_a_header_and_the_name_is_not_sent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("A_KEY", " sesame\n")
    address = KeyedAddress.of("environment.path", "https://host:8000/mcp?version=1#key=A_KEY")
    assert address == ("https://host:8000/mcp?version=1", {"Authorization": "Bearer sesame"})
    assert KeyedAddress.of("environment.path", "http://host/mcp") == ("http://host/mcp", {})


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://host#key=NOT_SET", "environment.tools: key=NOT_SET, but the environment variable NOT_SET is not set"),
        ("http://host#key=", "environment.tools: key=, but the environment variable  is not set"),
        ("http://host#key=TWO_LINES", "environment.tools: key=TWO_LINES: a key has printable ASCII characters alone"),
        ("http://host#token=A_KEY", "environment.tools: host: behind # only key=VARIABLE may stand"),
        ("http://host#sesame", "environment.tools: host: behind # only key=VARIABLE may stand"),
        ("http://user:sesame@host/mcp", "environment.tools: the address of host holds a password"),
        ("http://[host", "environment.tools: http://[host is not an address"),
    ],
)
def test_a_mistake_is_told_without_the_key(address: str, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TWO_LINES", "open\nsesame")
    with pytest.raises(SettingError) as caught:
        KeyedAddress.of("environment.tools", address)
    assert str(caught.value).startswith(message)
    assert "sesame" not in str(caught.value)
