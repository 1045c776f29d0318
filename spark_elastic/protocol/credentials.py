"""A job's identity: a self-signed certificate that both ends of every control connection present.

The private key is made on the driver and travels to the tasks inside Spark's own task closure. Whoever holds the key is a
member of the job; nobody else gets past the TLS handshake. The key is never written to disk, to an environment variable or to a
command line.
"""

from __future__ import annotations

import datetime
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

# A certificate must have dates, but they are never checked.
BACKDATED = datetime.timedelta(days=1)
VALID_FOR = datetime.timedelta(days=365)
# OpenSSL's X509_V_FLAG_NO_CHECK_TIME, for which Python's ssl has no name. Clocks in a cluster differ, and may jump while a job
# runs. The certificate belongs to one job, and is useless once the job's driver no longer listens.
NO_CHECK_TIME = 0x200000


@dataclass(frozen=True, slots=True)
class Credentials:
    """The certificate and private key of one job, in PEM format."""

    certificate: bytes = field(repr=False)
    private_key: bytes = field(repr=False)

    def server_context(self) -> ssl.SSLContext:
        """Return a context for TLS 1.3 clients that present this very certificate, and no others."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client_context(self) -> ssl.SSLContext:
        """Return a context for TLS 1.3 servers that present this very certificate; it presents it, too."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # The certificate is the identity. Host names in a cluster prove nothing.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags = ssl.VerifyFlags(context.verify_flags | NO_CHECK_TIME)
        context.load_verify_locations(cadata=self.certificate.decode())
        with _in_memory_file(self.certificate + self.private_key) as path:
            context.load_cert_chain(path)
        return context


def create_credentials(run_id: str) -> Credentials:
    """Return a new key and a certificate named after the run."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"spark_elastic {run_id}"[:64])])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + VALID_FOR)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Credentials(
        certificate=certificate.public_bytes(serialization.Encoding.PEM),
        private_key=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )


@contextmanager
def _in_memory_file(content: bytes) -> Iterator[str]:
    """Give ``content`` a path, for an API that reads only files (as ``ssl`` does to load keys)."""
    descriptor = os.memfd_create("spark_elastic", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
