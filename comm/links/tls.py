"""TLS for connections between processes (`comm.tls`): each process creates its own key and certificate when it starts.

No authority signs the certificates, and no end trusts them by themselves: the handshake under the run's secret proves the
certificate that the connecting end has seen (channel binding "tls-server-end-point", RFC 5929).
"""

import hashlib
import socket
import ssl
from datetime import UTC, datetime, timedelta

from ..errors import SettingError
from ..memfd import file_in_memory

_NAME = "headrace"
_VALID = timedelta(days=3650)


class TlsIdentity:
    """A key on P-256 and its self-signed certificate, both in memory only. Raises `SettingError` without `cryptography`."""

    def __init__(self) -> None:
        key, certificate = _key_and_certificate()
        self.listening = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._connecting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._connecting.check_hostname = False
        self._connecting.verify_mode = ssl.CERT_NONE  # the handshake under the secret verifies the certificate
        for context in (self.listening, self._connecting):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.listening.num_tickets = 0  # no session is resumed, and a ticket would hide the end of a connection
        with file_in_memory(key + certificate) as path:
            self.listening.load_cert_chain(path)
        self._certificate = ssl.PEM_cert_to_DER_cert(certificate.decode())

    @property
    def listening_binding(self) -> bytes:
        """The value of `binding` at end 0."""
        return hashlib.sha256(self._certificate).digest()

    def wrap(self, connection: socket.socket, end: int) -> ssl.SSLSocket:
        """End 0 (the one that listens) or 1 of a connection, before its TLS handshake."""
        context = self.listening if end == 0 else self._connecting
        return context.wrap_socket(connection, server_side=end == 0, do_handshake_on_connect=False)

    def binding(self, connection: ssl.SSLSocket, end: int) -> bytes:
        """The SHA-256 of the certificate of end 0, as this end knows it: 32 bytes, equal at both ends of one connection."""
        if end == 0:
            return self.listening_binding
        return hashlib.sha256(connection.getpeercert(binary_form=True) or b"").digest()


def _key_and_certificate() -> tuple[bytes, bytes]:
    """A new key and its certificate, in PEM."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise SettingError("comm.tls needs the package `cryptography`: pip install cryptography") from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + _VALID)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private, certificate.public_bytes(pem)
