"""The hand-shake of a connection: TLS where the run has it, then each end proves to the other that it knows the run's secret."""

import hmac
import secrets

import numpy as np

from ..errors import LinkBroken
from ..signing import derive_key
from .tcp import TcpLink
from .tls import TlsIdentity

_NONCE_BYTES = 16
_PROOF_BYTES = 32


def authenticate(
    link: TcpLink, name: str, end: int, secret: bytes, deadline_s: float, tls: TlsIdentity | None = None
) -> None:
    """Prove to the other end that this one knows `secret`, and check its proof.

    With `tls` the link is encrypted first; the proofs then hold for this TLS connection alone and cannot be passed on.
    On failure closes the link and raises `LinkBroken`.
    """
    binding = b"" if tls is None else link.start_tls(tls, end, deadline_s)
    mine = np.frombuffer(secrets.token_bytes(_NONCE_BYTES), dtype=np.uint8)
    theirs = np.empty(_NONCE_BYTES, np.uint8)
    proof = np.empty(_PROOF_BYTES, np.uint8)
    _exchange(link, end, mine, theirs, deadline_s)
    _exchange(link, end, _proof(secret, name, end, theirs, binding), proof, deadline_s)
    if not hmac.compare_digest(proof.tobytes(), _proof(secret, name, 1 - end, mine, binding).tobytes()):
        link.close()
        raise LinkBroken(f"link {name}: the other end does not know the run's secret")


def _exchange(link: TcpLink, end: int, mine: np.ndarray, theirs: np.ndarray, deadline_s: float) -> None:
    for turn in (0, 1):
        if turn == end:
            link.send(mine, deadline_s)
        else:
            link.receive(theirs, deadline_s)


def _proof(secret: bytes, name: str, end: int, nonce: np.ndarray, binding: bytes) -> np.ndarray:
    proved = f"{name}/{end}/".encode() + nonce.tobytes() + binding
    return np.frombuffer(hmac.digest(derive_key(secret, "hand-shakes"), proved, "sha256"), dtype=np.uint8)
