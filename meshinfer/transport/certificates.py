"""Ephemeral certificates: one per process, known only by their exact bytes.

There is no authority and no name in them that means anything. A process makes one when it starts; its
agent tells the peer's agent over an authenticated connection; whoever then shows these very bytes in a
TLS handshake, and can sign with their key, is the one that was meant. They die with the process.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import ssl
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from meshinfer.base.errors import ProtocolError

# Pinning decides who is meant, not dates: a laptop whose clock is years off must still be let in.
_NOT_BEFORE = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
_NOT_AFTER = dt.datetime(2999, 1, 1, tzinfo=dt.UTC)


@dataclass(frozen=True, slots=True)
class Certificate:
    """A process's own certificate, and its key."""

    der: bytes
    """What peers pin."""
    pem: bytes = field(repr=False)
    """Certificate and private key."""


def fingerprint(der: bytes) -> str:
    """64 hex digits that name the holder of a certificate."""
    return hashlib.sha256(der).hexdigest()


def make_certificate() -> Certificate:
    """A new one: an elliptic-curve key (P-256; 0.1 ms to make, where RSA needs 100) signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "meshinfer")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Certificate(certificate.public_bytes(Encoding.DER), certificate.public_bytes(Encoding.PEM) + key_pem)


def check_certificate(der: bytes) -> None:
    """Raises ProtocolError if `der` (from outside) is not one certificate of the kind that we make."""
    try:
        certificate = x509.load_der_x509_certificate(der)
        is_ours = isinstance(certificate.public_key(), ec.EllipticCurvePublicKey)
    except ValueError as error:
        raise ProtocolError(f"{len(der)} bytes that are no certificate", expected="an X.509 certificate") from error
    if not is_ours:
        raise ProtocolError("a certificate with another kind of key", expected="an elliptic-curve key")


def server_context(own: Certificate, pinned: Iterable[bytes]) -> ssl.SSLContext:
    """TLS 1.3 for the accepting side; only holders of a pinned certificate's key get through the handshake.

    The caller still compares the certificate that came with the one that was meant: there may be several.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # a channel is never resumed
    return _pinning(context, own, pinned)


def client_context(own: Certificate, pinned: bytes) -> ssl.SSLContext:
    """TLS 1.3 for the dialling side, which accepts nobody but the holder of `pinned`'s key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the pinned bytes say who it is; the name in them says nothing
    return _pinning(context, own, (pinned,))


def _pinning(context: ssl.SSLContext, own: Certificate, pinned: Iterable[bytes]) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    # The pinned certificate is itself the anchor, with nothing above it.
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    for der in pinned:
        check_certificate(der)
        _load_anchor(context, der)
    # The standard library takes keys only from files: a directory of mode 0700, gone at once.
    with tempfile.TemporaryDirectory(prefix="meshinfer-") as directory:
        path = Path(directory, "certificate.pem")
        path.touch(mode=0o600)
        path.write_bytes(own.pem)
        context.load_cert_chain(path)
    return context


def _load_anchor(context: ssl.SSLContext, der: bytes) -> None:
    try:
        context.load_verify_locations(cadata=der)
    except ssl.SSLError as error:
        raise ProtocolError(f"a certificate that cannot be pinned: {error.reason}") from error
