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
from clipstream.storage.download import ShardError
from clipstream.storage.schemes import Fetcher
from clipstream.storage.shard_cache import ShardCache
from clipstream.storage.shard_url import ShardURL
from tests.support.tars import tar_bytes

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
TAR = tar_bytes([{"__key__": "0", "jpg": bytes(1000), "txt": "x"}])


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    path = tmp_path / "certificate.pem"
    path.write_text(CERTIFICATE)
    return path


@pytest.fixture
def site(tmp_path: Path, certificate: Path) -> Iterator[str]:
    """The address of a folder with 0.tar to 3.tar."""
    (tmp_path / "served").mkdir()
    for number in range(4):
        (tmp_path / "served" / f"{number}.tar").write_bytes(TAR)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "served"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    download._tls.cache_clear()
    yield f"https://127.0.0.1:{server.server_port}"
    download._tls.cache_clear()
    server.shutdown()
    server.server_close()


def test_a_known_certificate_is_taken_and_an_unknown_one_refused(
    site: str, certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ShardCache(str(tmp_path / "cache"), fetcher=Fetcher(retries=0))
    with monkeypatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(certificate))
        assert store.local(f"{site}/1.tar").read_bytes() == TAR
        assert download.info(ShardURL(f"{site}/1.tar"), 5.0).size == len(TAR)
    download._tls.cache_clear()
    with pytest.raises(ShardError, match="certificate verify failed") as caught:
        store.local(f"{site}/0.tar")
    assert caught.value.reason == "unreachable"
    store.close()
