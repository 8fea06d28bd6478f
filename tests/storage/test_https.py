"""Downloads over HTTPS from a server on loopback."""

from __future__ import annotations

import functools
import http.server
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from clipstream.storage import download
from clipstream.storage.shard_url import ShardURL
from tests.support.stores import BODY, failure, make_store

# Self-signed for 127.0.0.1, with its key, valid from 2000 to 2126: openssl ca -selfsign with basicConstraints CA:TRUE,
# keyUsage keyCertSign and subjectAltName IP:127.0.0.1. The dates allow for a clock that is wrong.
CERTIFICATE = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgzUAf6mW/Hf25Mk0a
GMdZQK/iHL2Qd81gR/PYuUPhCJehRANCAAQy4Io5Ew8N7aH38N55iPOIcEU0iGoJ
mGYhCnCLaCwiD5n6gnlYJ1h0nCX6K4xiMOrMgB8dxJwEU7laDZ5C2ufI
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBbDCCARKgAwIBAgIBATAKBggqhkjOPQQDAjAUMRIwEAYDVQQDDAkxMjcuMC4w
LjEwIBcNMDAwMTAxMDAwMDAwWhgPMjEyNjAxMDEwMDAwMDBaMBQxEjAQBgNVBAMM
CTEyNy4wLjAuMTBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABDLgijkTDw3toffw
3nmI84hwRTSIagmYZiEKcItoLCIPmfqCeVgnWHScJforjGIw6syAHx3EnARTuVoN
nkLa58ijUzBRMB0GA1UdDgQWBBR/33TgQoolCVkC6JGNnPYYwqMI9TAPBgNVHRMB
Af8EBTADAQH/MA4GA1UdDwEB/wQEAwIChDAPBgNVHREECDAGhwR/AAABMAoGCCqG
SM49BAMCA0gAMEUCIAg5Qq0nb7i7qhV4yMpi2cjVojbtwACH9nz8cCXxYNv6AiEA
goOZLOvnfZCYuhG/ZxNODjLGHhj3S5Ve+qo1oT1all8=
-----END CERTIFICATE-----
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """The address of the test's folder."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (tmp_path / "certificate.pem").write_text(CERTIFICATE)
    context.load_cert_chain(tmp_path / "certificate.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    download._tls.cache_clear()
    yield f"https://127.0.0.1:{server.server_port}"
    download._tls.cache_clear()
    server.shutdown()
    server.server_close()


def test_a_known_certificate_is_taken_and_an_unknown_one_refused(
    site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        (tmp_path / f"{number}.tar").write_bytes(BODY)
    store = make_store(tmp_path / "cache", retries=0)
    with monkeypatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate.pem"))
        assert store.local(f"{site}/1.tar").read_bytes() == BODY
        assert download.info(ShardURL(f"{site}/1.tar"), 5.0).size == len(BODY)
    download._tls.cache_clear()
    error = failure(make_store(tmp_path / "other", retries=0), f"{site}/0.tar")
    assert error.reason == "unreachable" and "certificate verify failed" in error.detail
