"""Who may ask: with keys the owner of one, without them programs of this machine alone."""

import hashlib
import hmac
import ipaddress
import os
import re
from collections.abc import Mapping, Sequence

from ...comm.errors import SettingError
from .fields import RequestRefused

_PORT = re.compile(r":\d+$")
LEAST_KEY = 8
"""Least characters of a key."""
KEY_VARIABLE = "HEADRACE_API_KEY"
"""The environment variable of a key, which other users of the machine do not see, unlike a word of the command line."""
SERVE_FILE = "serve.json"
"""The file of a run folder with the address of its front: `{"url": "http://HOST:PORT", "model": NAME}`."""
_HOST = "127.0.0.1"


class Access:
    """Checks the headers of requests."""

    def __init__(self, host: str, keys: Sequence[str], setting: str = "") -> None:
        """host: the address to listen on. keys: any of them opens. Raises `SettingError` for a host beyond loopback without keys.

        setting: that of a recipe which gives the host; empty for options of a command.
        """
        if not keys and not is_loopback(host):
            where = f"{setting}: {host}" if setting else f"--host={host}"
            how = f"set {KEY_VARIABLE}" + ("" if setting else " or --api-key")
            raise SettingError(f"{where}: other machines reach this address, so an API key is needed: {how}")
        if any(len(key) < LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key for key in keys):
            raise SettingError(
                f"{KEY_VARIABLE if setting else '--api-key'}: a key has at least {LEAST_KEY} printable ASCII characters and no space"
            )
        self._digests = [_digest(key) for key in keys]

    def check(self, headers: Mapping[str, str]) -> None:
        """Raise `RequestRefused` unless the headers, whose names are in lower case, show a key, or with no keys are of this machine."""
        if not self._digests:
            # A page elsewhere may have made its own name mean this machine (DNS rebinding).
            if not is_loopback(_PORT.sub("", headers.get("host", "")).strip("[]")):
                problem = (
                    "without API keys this server answers under the names of this machine alone, such as 127.0.0.1"
                )
                raise RequestRefused(problem, status=403, code="wrong_host")
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            problem = "no API key was given: send it as the header `Authorization: Bearer KEY`"
            raise RequestRefused(problem, status=401, code="missing_api_key")
        digest = _digest(given.strip())
        # All are compared, in constant time, so that the answer's time says nothing about a key.
        found = [hmac.compare_digest(digest, own) for own in self._digests]
        if not any(found):
            raise RequestRefused("this is not an API key of this server", status=401, code="invalid_api_key")


def api_keys() -> list[str]:
    """The key in the environment, if there is one."""
    return [key] if (key := os.environ.get(KEY_VARIABLE)) else []


def serve_address(text: str) -> tuple[str, int]:
    """Host and port of `rollout.serve`: PORT, HOST:PORT or [IPV6]:PORT, where port 0 takes a free one. Raises `SettingError`."""
    host, _, port = text.rpartition(":")
    is_bare = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not port.isascii() or not port.isdigit() or int(port) >= 1 << 16 or is_bare:
        raise SettingError(f"rollout.serve={text} is neither PORT nor HOST:PORT, such as 8000 or 127.0.0.1:8000")
    return host.strip("[]") or _HOST, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
