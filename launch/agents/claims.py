"""Claims and ends of samples at the front of a running job, by plain HTTP."""

import json
import os
import time
import urllib.request
import uuid
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from ...comm.errors import PeerGone, SettingError
from ...rollout.serving.access import KEY_VARIABLE, SERVE_FILE

ROUTE = "/agents/v1/conversations"
CLAIM_S = 60.0
"""Longest wait for the answer to a request; the front keeps a claim for at most 25 s."""
AWAY_S = 120.0
"""Longest time for which a run does not answer until it counts as gone: its front may be starting again."""
PAUSE_S = 0.5
_NONE_NOW = 503
_OVER = 410


class Claims:
    """The front of a run, by its folder or its address. Its methods block, and may be called from several threads."""

    def __init__(self, run: str) -> None:
        """Raises `SettingError` if `run` is neither."""
        self._address = run.rstrip("/") if run.startswith(("http://", "https://")) else ""
        self._file = Path(run, SERVE_FILE)
        if not self._address and not self._file.exists():
            raise SettingError(
                f"{run} has no {SERVE_FILE}: it is no folder of a running job with environment.path=serve and rollout.serve"
            )

    def claim(self) -> dict[str, Any] | None:
        """The answer to a claim; None when the run has ended. Waits for a sample. Raises `PeerGone` if the run does not answer."""
        name = uuid.uuid4().hex  # the same claim again gets the same sample
        while True:
            try:
                return self._ask(ROUTE, {}, {"Idempotency-Key": name})
            except HTTPError as error:
                if error.code == _OVER:
                    return None
                if error.code != _NONE_NOW:
                    raise _refusal(error) from None

    def state(self, number: str) -> str:
        """`open`, `ended` or `failed`, or `gone` for a conversation that the front does not know any more."""
        try:
            return self._ask(f"{ROUTE}/{number}")["status"]
        except HTTPError:
            return "gone"

    def end(self, number: str, outcome: dict[str, Any]) -> str:
        """End a conversation; returns why the end was refused, empty if it was not."""
        try:
            self._ask(f"{ROUTE}/{number}/end", outcome)
        except HTTPError as error:
            return str(_refusal(error))
        return ""

    def _ask(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        """The answer to a request. Raises `HTTPError`, and `PeerGone` when nothing has answered for `AWAY_S`."""
        until = time.monotonic() + AWAY_S
        raw = None if body is None else json.dumps(body).encode()
        own = {"Content-Type": "application/json"} | (headers or {})
        if key := os.environ.get(KEY_VARIABLE):
            own["Authorization"] = f"Bearer {key}"
        while True:
            try:
                request = urllib.request.Request(self._url() + path, raw, own)
                with urllib.request.urlopen(request, timeout=CLAIM_S) as answer:
                    return json.load(answer)
            except HTTPError:
                raise
            except (OSError, ValueError) as error:
                if time.monotonic() > until:
                    raise PeerGone(f"the run does not answer for {AWAY_S:g} s: {error}") from error
            time.sleep(PAUSE_S)

    def _url(self) -> str:
        """The address, which a front that was started again may have changed. Raises `OSError` and `ValueError`."""
        return self._address or json.loads(self._file.read_text())["url"]


def _refusal(error: HTTPError) -> SettingError:
    """The front's words about a request that it refuses."""
    try:
        words = json.loads(error.read())["error"]["message"]
    except (OSError, ValueError, LookupError, TypeError):
        words = error.reason
    return SettingError(f"the run refuses: {words} ({error.code})")
