"""A server that gives rewards, over HTTP: its address with options, and requests that are repeated up to a deadline.

Options follow `#` as in a URL's query, and are not part of the address: `key` names an environment variable with the bearer token,
`name` names the reward in the metrics. The key is in no message.
"""

import asyncio
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.parse import SplitResult, parse_qsl, urlsplit

from ...comm.errors import SettingError
from ..user_code.keys import password_problem, read_key
from .function import OWN

JUDGE = "judge+"
"""Before the scheme of a judge's address."""
MOST_BYTES = 1 << 24
"""Most bytes of an answer."""
_THREADS = 256
"""Requests at a time, as many as `pool.MAX_ASYNC` samples."""
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 16.0
_SHOWN = 200
"""Characters of a refusal in a message."""
_RETRIED = (408, 409, 425, 429)
"""Refusals after which the same request may succeed, beside those of 500 and more."""
_LOCAL = ("localhost", "127.0.0.1", "::1")
"""Hosts that no proxy of the environment reaches."""


class EndpointError(Exception):
    """An endpoint has not given a usable answer."""


class _Refused(Exception):
    """One request failed; another one may succeed after `pause_s`, or, where it is None, none will."""

    def __init__(self, reason: str, pause_s: float | None) -> None:
        super().__init__(reason)
        self.pause_s = pause_s


class Address(NamedTuple):
    """Where to ask, with the options, which are never sent."""

    url: str
    options: Mapping[str, str]

    @staticmethod
    def of(path: str) -> "Address":
        """The address in `reward.path`; raises `SettingError` for one that cannot be used."""
        try:
            parts = urlsplit(path.removeprefix(JUDGE))
            _ = parts.port
        except ValueError as error:
            raise SettingError(f"reward.path: {path} is not an address: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingError(f"reward.path: {path} is not of the form [judge+]http[s]://HOST[:PORT]/PATH")
        if parts.username or parts.password:
            raise SettingError(f"reward.path: {password_problem(parts)}")
        options = dict(parse_qsl(parts.fragment, keep_blank_values=True))
        return Address(SplitResult(*parts[:4], "").geturl(), options)


class Endpoint:
    """Posts JSON to an address, again while it is busy or does not answer, up to a deadline."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        """timeout_s: of a call, all its attempts together. Raises `SettingError` if the key's variable is not set."""
        self._url = address.url
        # Its own end comes before that of the call, so that the reason is known.
        self._timeout_s = timeout_s - min(1.0, timeout_s / 10)
        self._key = ""
        if (variable := address.options.get("key")) is not None:
            self._key = read_key("reward.path", variable)
        is_local = urlsplit(self._url).hostname in _LOCAL
        self._opener = urllib.request.build_opener(
            _NoRedirects, *([urllib.request.ProxyHandler({})] if is_local else [])
        )
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="endpoint")

    async def post(self, body: object) -> Any:
        """The JSON of the answer. Raises `EndpointError` with one line."""
        content = json.dumps(body).encode()
        deadline = time.monotonic() + self._timeout_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                loop = asyncio.get_running_loop()
                answer = await loop.run_in_executor(self._threads, self._attempt, content, deadline)
                break
            except _Refused as refusal:
                wanted_s = refusal.pause_s
                if wanted_s is None or time.monotonic() + max(wanted_s, pause_s) >= deadline:
                    raise EndpointError(f"{self._url}: {refusal}") from None
                await asyncio.sleep(max(wanted_s, pause_s * random.uniform(0.5, 1.0)))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        try:
            return json.loads(answer)
        except ValueError:
            raise EndpointError(f"{self._url}: the answer is not JSON") from None

    def _attempt(self, content: bytes, deadline: float) -> bytes:
        """One request; raises `_Refused`."""
        headers = {"Content-Type": "application/json", "User-Agent": "headrace"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self._url, content, headers, method="POST")
        try:
            with self._opener.open(request, timeout=max(0.01, deadline - time.monotonic())) as response:
                return _read(response, deadline)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(error) from None
        except TimeoutError:
            raise _Refused("no answer in time", 0.0) from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise _Refused("no answer in time", 0.0) from None
            raise _Refused(str(getattr(reason, "strerror", None) or reason or type(error).__name__), 0.0) from None

    def _refusal(self, error: urllib.error.HTTPError) -> _Refused:
        """An answer with another status than success, in words without the key, which some servers repeat."""
        reason = f"HTTP {error.code} {error.reason}"
        if error.code in _RETRIED or error.code >= 500:
            return _Refused(reason, _retry_after(error))
        try:
            text = " ".join(error.read(1 << 14).decode(errors="replace").split())
        except (OSError, HTTPException):
            text = ""
        if self._key:
            text = text.replace(self._key, "***")
        return _Refused(f"{reason}: {text[:_SHOWN]}" if text else reason, None)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirection would send the key to another host, and a POST as a GET."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def rows_of(given: Mapping[str, Any], num: int) -> list[dict[str, Any]]:
    """The columns of each sample, of the arguments of a reward function for a batch of `num`."""
    columns = {name: values for name, values in given.items() if name not in OWN}
    return [{name: values[i] for name, values in columns.items()} for i in range(num)]


def _read(response: Any, deadline: float) -> bytes:
    """The whole answer; one that comes in drops ends with the deadline too."""
    pieces = list[bytes]()
    size = 0
    while piece := response.read1(1 << 16):
        size += len(piece)
        if size > MOST_BYTES:
            raise _Refused(f"an answer of more than {MOST_BYTES >> 20} MiB", None)
        if time.monotonic() > deadline:
            raise _Refused("no answer in time", 0.0)
        pieces.append(piece)
    return b"".join(pieces)


def _retry_after(error: urllib.error.HTTPError) -> float:
    """Seconds that the server asks to wait; 0 without."""
    try:
        return max(0.0, float(error.headers.get("Retry-After", "0")))
    except ValueError:  # a date
        return 0.0
