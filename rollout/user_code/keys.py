"""Keys of servers. A setting names the environment variable that has the key: `http://HOST:PORT/PATH#key=VARIABLE`.

`config.yaml` and messages have the name alone. Each host whose processes ask the server needs the variable.
"""

import os
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, urlsplit

from ...comm.errors import SettingError


class KeyedAddress(NamedTuple):
    """An address without its options, and the headers to send with each request."""

    url: str
    headers: dict[str, str]

    @staticmethod
    def of(setting: str, address: str) -> "KeyedAddress":
        """Reads an address, whose only option is `key`. Raises `SettingError`, which begins with the setting."""
        try:
            parts = urlsplit(address)
        except ValueError as error:
            raise SettingError(f"{setting}: {address} is not an address: {error}") from None
        if parts.username or parts.password:
            raise SettingError(f"{setting}: {password_problem(parts)}")
        options = dict(parse_qsl(parts.fragment, keep_blank_values=True))
        if parts.fragment and options.keys() != {"key"}:  # it may be the key itself, and is not shown
            raise SettingError(f"{setting}: {parts.hostname}: behind # only key=VARIABLE may stand")
        url = SplitResult(*parts[:4], "").geturl()
        if "key" not in options:
            return KeyedAddress(url, {})
        return KeyedAddress(url, {"Authorization": f"Bearer {read_key(setting, options['key'])}"})


def read_key(setting: str, variable: str) -> str:
    """The key in an environment variable. Raises `SettingError`, which does not show it."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise SettingError(f"{setting}: key={variable}, but the environment variable {variable} is not set")
    if not (key.isascii() and key.isprintable()):
        raise SettingError(
            f"{setting}: key={variable}: a key has printable ASCII characters alone, and {variable} has others"
        )
    return key


def password_problem(address: SplitResult) -> str:
    """Why an address with a password is refused."""
    return (
        f"the address of {address.hostname} holds a password, which config.yaml would keep; put it into an environment variable"
        " and name that one with #key=VARIABLE"
    )
