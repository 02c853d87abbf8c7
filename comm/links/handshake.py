"""The handshake of a connection: TLS if the run uses it, then each end proves to the other that it knows the run's secret."""

import hmac
import secrets
from typing import TYPE_CHECKING

from ..errors import WrongSecret
from .tcp import TcpLink

if TYPE_CHECKING:
    from .tls import TlsIdentity

NONCE_BYTES = 16
PROOF_BYTES = 32


def authenticate(
    link: TcpLink, name: str, end: int, secret: bytes, deadline_s: float, tls: "TlsIdentity | None" = None
) -> None:
    """Prove to the other end that this one knows `secret`, and check its proof.

    With `tls` the link is encrypted first; the proofs then hold for this TLS connection alone and cannot be passed on.
    On failure closes the link and raises `LinkBroken`, or `WrongSecret` for a wrong proof.
    """
    binding = b"" if tls is None else link.start_tls(tls, end, deadline_s)
    mine = secrets.token_bytes(NONCE_BYTES)
    theirs = _exchange(link, end, mine, deadline_s)
    proof = _exchange(link, end, proof_of(secret, name, end, theirs, binding), deadline_s)
    if not hmac.compare_digest(proof, proof_of(secret, name, 1 - end, mine, binding)):
        link.close()
        raise WrongSecret(f"link {name}: the other end does not know the run's secret")


def derive_key(secret: bytes, purpose: str) -> bytes:
    """The key for a purpose, 32 bytes. Each purpose has its own key, so a proof for one is useless for another."""
    return hmac.digest(secret, purpose.encode(), "sha256")


def proof_of(secret: bytes, name: str, end: int, nonce: bytes, binding: bytes) -> bytes:
    """The proof of one end of a link, for the nonce of the other: 32 bytes."""
    proved = f"{name}/{end}/".encode() + nonce + binding
    return hmac.digest(derive_key(secret, "hand-shakes"), proved, "sha256")


def _exchange(link: TcpLink, end: int, mine: bytes, deadline_s: float) -> bytes:
    """Send bytes and receive the same number; end 0 sends first."""
    theirs = bytearray(len(mine))
    for turn in (0, 1):
        if turn == end:
            link.send(mine, deadline_s)
        else:
            link.receive(theirs, deadline_s)
    return bytes(theirs)
