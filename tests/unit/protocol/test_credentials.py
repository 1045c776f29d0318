"""The job's certificate: what it says, what it keeps to itself, how long it holds."""

from __future__ import annotations

import os
import pickle
import ssl

import pytest
from cryptography import x509

from spark_elastic.protocol.credentials import Credentials, create_credentials
from spark_elastic.protocol.ticket import Ticket


@pytest.fixture(scope="module")
def credentials() -> Credentials:
    return create_credentials("abc123")


def test_every_job_has_a_key_of_its_own(credentials: Credentials) -> None:
    other = create_credentials("abc123")
    assert other.private_key != credentials.private_key
    assert other.certificate != credentials.certificate


def test_the_certificate_names_the_run(credentials: Credentials) -> None:
    certificate = x509.load_pem_x509_certificate(credentials.certificate)
    assert "abc123" in certificate.subject.rfc4514_string()


def test_a_long_run_id_still_fits() -> None:
    assert create_credentials("x" * 200).certificate


def test_the_key_does_not_show_when_printed(credentials: Credentials) -> None:
    ticket = Ticket("abc123", (("host", 1),), credentials)
    for shown in (repr(credentials), str(credentials), repr(ticket)):
        assert "KEY" not in shown
        assert "CERTIFICATE" not in shown


def test_credentials_travel_by_pickle(credentials: Credentials) -> None:
    assert pickle.loads(pickle.dumps(credentials)) == credentials


@pytest.mark.parametrize("side", ["server_context", "client_context"])
def test_contexts_speak_tls_1_3_only_and_require_a_certificate(credentials: Credentials, side: str) -> None:
    context: ssl.SSLContext = getattr(credentials, side)()
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert len(context.get_ca_certs()) == 1


def test_making_a_context_leaves_no_file_open(credentials: Credentials) -> None:
    before = os.listdir("/proc/self/fd")
    credentials.server_context()
    assert os.listdir("/proc/self/fd") == before
