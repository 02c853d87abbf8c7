"""The interface of a link, and the proof by which its two ends show each other that they know the run's secret."""

import hashlib
import hmac
import secrets
from typing import Protocol

import numpy as np

from ..errors import LinkBroken
from .seal import Seal

_NONCE_BYTES = 16
_PROOF_BYTES = 32


class Link(Protocol):
    """One end of a link. Buffers are one-dimensional uint8 arrays of any length, 0 included."""

    backend: str
    seal: Seal | None
    """Of the frames on this link, once `authenticate` has run; None within a process."""

    def send(self, buffer: np.ndarray, deadline_s: float) -> None:
        """Send all bytes of `buffer`, which is free for reuse afterwards. Raises `LinkBroken`."""

    def receive(self, buffer: np.ndarray, deadline_s: float) -> None:
        """Fill `buffer`. Raises `LinkBroken`."""

    def close(self) -> None:
        """End the link; the other end's next operation fails. Closing twice is allowed."""


def authenticate(link: Link, name: str, end: int, secret: bytes, deadline_s: float) -> None:
    """Prove to the other end that this one knows `secret`, check its proof, and agree on the key of the link's seal.

    On failure closes the link and raises `LinkBroken`.
    """
    mine = np.frombuffer(secrets.token_bytes(_NONCE_BYTES), dtype=np.uint8)
    theirs, proof = np.empty(_NONCE_BYTES, np.uint8), np.empty(_PROOF_BYTES, np.uint8)
    _exchange(link, end, mine, theirs, deadline_s)
    _exchange(link, end, _proof(secret, name, end, theirs), proof, deadline_s)
    if not hmac.compare_digest(proof.tobytes(), _proof(secret, name, 1 - end, mine).tobytes()):
        link.close()
        raise LinkBroken(f"link {name}: the other end does not know the run's secret")
    first, second = (mine, theirs) if end == 0 else (theirs, mine)
    link.seal = Seal(hmac.digest(secret, f"seal {name} ".encode() + first.tobytes() + second.tobytes(), "sha256"), end)


def _exchange(link: Link, end: int, mine: np.ndarray, theirs: np.ndarray, deadline_s: float) -> None:
    for turn in (0, 1):
        if turn == end:
            link.send(mine, deadline_s)
        else:
            link.receive(theirs, deadline_s)


def _proof(secret: bytes, name: str, end: int, nonce: np.ndarray) -> np.ndarray:
    code = hmac.new(secret, f"{name}/{end}/".encode() + nonce.tobytes(), hashlib.sha256)
    return np.frombuffer(code.digest(), dtype=np.uint8)
