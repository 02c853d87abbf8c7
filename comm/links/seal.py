"""The seal of a connection: each of its frames carries a MAC under a key that the two ends agreed on when it was opened."""

import hashlib
import hmac

from ..errors import LinkBroken

MAC_BYTES = 16


class Seal:
    """One end's seal. A frame's MAC (keyed BLAKE2b, RFC 7693, 16 bytes) is over its direction, its number and its body.

    So a frame that another process sends, changes, repeats, drops or moves to another connection is noticed. Columns and weights
    are not in frames; the digests of their bytes are.
    """

    def __init__(self, key: bytes, end: int) -> None:
        self._key = key
        self._end = end
        self._num_sent = self._num_received = 0

    def seal(self, body: bytes) -> bytes:
        """The next frame to send: the body and its MAC."""
        self._num_sent += 1
        return body + self._mac(self._end, self._num_sent, body)

    def open(self, frame: bytes) -> bytes:
        """The body of the next frame received; raises `LinkBroken` unless the other end sealed it as its next one."""
        self._num_received += 1
        body, mac = frame[:-MAC_BYTES], frame[-MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(1 - self._end, self._num_received, body)):
            raise LinkBroken("a frame that the other end did not send")
        return body

    def _mac(self, end: int, number: int, body: bytes) -> bytes:
        prefix = b"%d/%d/" % (end, number)  # a third of the time of HMAC-SHA256, of which a frame needs four
        return hashlib.blake2b(prefix + body, key=self._key, digest_size=MAC_BYTES).digest()
