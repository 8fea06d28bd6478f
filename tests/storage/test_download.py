"""Downloads by HTTP, HTTPS and from object stores, a real S3 server too: one version of a file, or a named failure."""

from __future__ import annotations

import functools
import hashlib
import http.server
import random
import re
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from clipstream.cli.verbs import stage
from clipstream.errors import DataError, ShardError
from clipstream.storage import download
from clipstream.storage.download import Fetcher
from clipstream.storage.shard_cache import ShardCache
from clipstream.storage.shard_url import ShardURL
from clipstream.storage.tar import Shard
from tests.support.loaders import data, loader
from tests.support.pictures import make_shards
from tests.support.ranks import reserved_port
from tests.support.s3 import BUCKET, S3, use_keys, write_keys
from tests.support.stores import BODY, failure, make_store
from tests.support.tars import tar_bytes
from tests.support.unruly import FAULTS, FaultyFile, Unruly

TRIES = 200
REASONS = {
    "truncated_download", "timeout", "unreachable", "http_404", "http_403", "http_503", "http_429", "http_416",
}  # fmt: skip
CUT = {"truncated_header", "truncated_member", "missing_end", "empty", "not_a_tar"}  # where no true length was told


@pytest.fixture
def site() -> Iterator[Unruly]:
    running = Unruly()
    yield running
    running.close()


def versions(draws: random.Random) -> list[bytes]:
    """A file as it changes: the headers stay, so that a mixture of two looks like a whole tar."""
    sizes = [draws.randrange(1, 9000) for _ in range(draws.randrange(1, 12))]
    made = [
        tar_bytes({"__key__": f"{i:03d}", "jpg": draws.randbytes(size), "txt": "x"} for i, size in enumerate(sizes))
        for _ in range(3)
    ]
    return made if draws.random() < 0.7 else [*made[:2], made[2] + tar_bytes([])]


def one_try(site: Unruly, folder: Path, seed: int) -> str:
    """What a fetch came to: 'whole', or the reason of its failure."""
    draws = random.Random(seed)
    kinds = tuple(draws.sample(FAULTS, draws.randrange(1, 6)))
    file = FaultyFile(versions(draws), draws.choice(["etag", "etag", "weak", "date", "none"]), draws, kinds=kinds)
    url = site.put(f"{seed}.tar", file)
    kept = None if seed % 2 else str(folder / str(seed))
    store = ShardCache(kept, fetcher=Fetcher(timeout=0.6, retries=3, backoff=0.005))
    try:
        path = store.local(url)
        if path.read_bytes() in file.versions:
            return "whole"
        fault, loaded = samples_of(path)
        wanted = []
        for version in file.versions:
            path.write_bytes(version)
            wanted.append(samples_of(path)[1])
        # A length that lies may leave out zeros behind the end of the tar: then nothing is missing.
        assert loaded in ([w[: len(loaded)] for w in wanted] if fault else wanted), f"try {seed}, after {file.done}"
        return fault or "whole"
    except ShardError as error:
        assert url in error.detail
        return error.reason
    finally:
        store.close()


def samples_of(path: Path) -> tuple[str | None, list[dict[str, bytes]]]:
    shard = Shard(path)
    try:
        return shard.index.fault and shard.index.fault.reason, [shard.load(ref) for ref in shard.index.samples]
    finally:
        shard.close()


def test_every_try_gives_the_file_or_a_reason(site: Unruly, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        ends = Counter(pool.map(lambda seed: one_try(site, tmp_path, seed), range(TRIES)))
    assert ends.total() == TRIES and ends.keys() <= {"whole"} | REASONS | CUT, ends
    done = sum((file.done for file in site.files.values()), Counter())
    assert set(done) == {*FAULTS, "whole"}, "every kind of fault was tried"
    assert ends["whole"] > TRIES / 4 and len(ends) > 5, ends


def scripted(site: Unruly, *script: str, name: str = "0.tar") -> tuple[str, FaultyFile]:
    """A file that behaves so at first, and then well."""
    file = FaultyFile([BODY, BODY[::-1]], "etag", random.Random(7), share=0.0, script=[*script])
    return site.put(name, file), file


@pytest.mark.parametrize("tags", ["etag", "date"])
@pytest.mark.parametrize(
    "kind", ["other version after a change", "change", "other range", "ignore range", "503", "no length"]
)
def test_a_second_try_goes_on_and_never_makes_a_mixture(site: Unruly, tags: str, kind: str) -> None:
    draws = random.Random(7)
    files = [tar_bytes([{"__key__": "0", "jpg": draws.randbytes(50_000), "txt": "x"}]) for _ in range(2)]
    file = FaultyFile(files, tags, draws, share=0.0, script=["cut", kind])
    store = ShardCache(None, fetcher=Fetcher(retries=3, backoff=0.005))
    path = store.local(site.put("0.tar", file))
    assert path.read_bytes() == files[1 if "change" in kind else 0]
    assert file.done["cut"] == file.done[kind] == 1
    assert file.asked[0] is None and re.fullmatch(r"bytes=[1-9]\d*-", str(file.asked[1]))
    store.close()


@pytest.mark.parametrize(
    ("kind", "reason", "tries"),
    [
        ("404", "http_404", 1),
        ("503", "http_503", 3),
        ("cut", "truncated_download", 3),
        ("no length and cut", "truncated_download", 3),
        ("stall", "timeout", 3),
        ("elsewhere", "http_302", 1),
    ],
)
def test_failures_have_a_reason_and_no_credentials(
    site: Unruly, tmp_path: Path, kind: str, reason: str, tries: int
) -> None:
    url, file = scripted(site, *[kind] * 9, name="0.tar?token=HIDDEN")
    store = make_store(tmp_path, retries=2, timeout=0.3 if kind == "stall" else 60.0)
    error = failure(store, url.replace("//", "//u:p%20w@"))
    assert error.reason == reason and file.done.total() == tries
    assert "HIDDEN" not in str(error) and "p%20w" not in str(error) and "token=***" in str(error)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>", "credentials"),
        ("<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>", "credentials"),
        ("<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>", "http_403"),
    ],
)
def test_a_signed_link_that_has_expired_is_told_from_a_shard_that_is_denied(
    site: Unruly, tmp_path: Path, answer: str, reason: str
) -> None:
    """S3 answers 403 with a body of XML for both."""
    url, file = scripted(site, answer, name="0.tar?X-Amz-Signature=HIDDEN")
    error = failure(make_store(tmp_path, retries=2), url)
    assert error.reason == reason and file.done.total() == 1 and "HIDDEN" not in error.detail
    assert ("the signature of the link has expired" in error.detail) == (reason == "credentials")


def test_hosts_that_are_not_there_and_what_python_says_of_a_url(tmp_path: Path) -> None:
    with reserved_port() as port:  # nobody listens there
        assert failure(make_store(tmp_path, retries=1), f"http://127.0.0.1:{port}/0.tar").reason == "unreachable"
        error = failure(make_store(tmp_path, retries=0), f"http://127.0.0.1:{port}/a b/0.tar?token=HIDDEN")
        assert "HIDDEN" not in str(error) and "token=***" in str(error)
    assert failure(make_store(tmp_path), "http://[somewhere/0.tar").reason == "unreachable"


def test_a_login_in_the_url_is_sent(site: Unruly, tmp_path: Path) -> None:
    url, file = scripted(site, "login")
    assert make_store(tmp_path).local(url.replace("//", "//u:p%20w@")).read_bytes() == BODY
    assert file.done["login"] == 1


@pytest.mark.parametrize("told", ["-1", "many", "12, 12"])
def test_a_length_that_is_no_number_is_none(site: Unruly, told: str, tmp_path: Path) -> None:
    url, _ = scripted(site, f"length {told}")
    assert make_store(tmp_path, retries=0).local(url).read_bytes() == BODY


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
def https_site(tmp_path: Path) -> Iterator[str]:
    """The address of the test's folder."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (tmp_path / "certificate.pem").write_text(CERTIFICATE)
    context.load_cert_chain(tmp_path / "certificate.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    download._tls.cache_clear()
    yield f"https://127.0.0.1:{server.server_port}"
    download._tls.cache_clear()
    server.shutdown()
    server.server_close()


def test_a_known_certificate_is_taken_and_an_unknown_one_refused(
    https_site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        (tmp_path / f"{number}.tar").write_bytes(BODY)
    store = make_store(tmp_path / "cache", retries=0)
    with monkeypatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate.pem"))
        assert store.local(f"{https_site}/1.tar").read_bytes() == BODY
        assert download.info(ShardURL(f"{https_site}/1.tar"), 5.0).size == len(BODY)
    download._tls.cache_clear()
    error = failure(make_store(tmp_path / "other", retries=0), f"{https_site}/0.tar")
    assert error.reason == "unreachable" and "certificate verify failed" in error.detail


class Bucket(LocalFileSystem):
    """Object storage in a folder: `bucket:///PATH`. A name with `cut` breaks after some bytes, as often as it says."""

    protocol = "bucket"
    cachable = False
    opened: ClassVar[list[tuple[str, int]]] = []
    changed: ClassVar[dict[str, bytes]] = {}
    ends: ClassVar[dict[str, int]] = {}

    def ukey(self, path: str) -> str:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()

    def open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        file = super().open(path, mode, **more)
        left, read = self.ends.get(path, 0), file.read
        self.ends[path] = left - 1

        def broken(size: int = -1) -> bytes:
            self.opened.append((path, file.tell()))
            if file.tell() and path in self.changed:
                Path(path).write_bytes(self.changed.pop(path))
            if left > 0 and file.tell() % 100_000 >= 60_000:
                raise ConnectionResetError("the peer is gone")
            return bytes(read(60_000))

        file.read = broken
        return file


@pytest.fixture
def bucket() -> Iterator[type[Bucket]]:
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    Bucket.opened, Bucket.ends = [], {}
    yield Bucket
    fsspec.register_implementation("bucket", LocalFileSystem, clobber=True)


def test_buckets_go_on_where_they_broke(tmp_path: Path, bucket: type[Bucket]) -> None:
    source = tmp_path / "0.tar"
    source.write_bytes(BODY)
    bucket.ends[str(source)] = 1
    store = make_store(tmp_path / "cache")
    assert store.local(f"bucket://{source}").read_bytes() == BODY
    offsets = [at for _, at in bucket.opened]
    assert offsets.count(0) == 1 and offsets.count(60_000) == 2, (
        "the second try begins at the byte where the first broke"
    )
    bucket.ends[str(source)] = 9
    error = failure(make_store(tmp_path / "b"), f"bucket://{source}")
    assert error.reason == "truncated_download" and "after 60,000 bytes: ConnectionResetError" in error.detail
    assert failure(make_store(tmp_path / "b"), f"bucket://{tmp_path}/1.tar").reason == "missing"
    assert not list((tmp_path / "b").glob("*.part"))


def test_a_file_of_a_bucket_that_changes_while_it_comes_is_fetched_anew(tmp_path: Path, bucket: type[Bucket]) -> None:
    source = tmp_path / "0.tar"
    source.write_bytes(BODY)
    bucket.changed[str(source)] = BODY[::-1]
    assert make_store(tmp_path / "cache").local(f"bucket://{source}").read_bytes() == BODY[::-1]


def test_a_bucket_without_its_backend_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)  # type: ignore[attr-defined]
    error = failure(make_store(tmp_path), "s3://somewhere/0.tar")
    assert error.reason == "unknown_scheme" and "clipstream[s3]" in error.detail


@pytest.fixture
def s3_site(s3: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    drawn = SimpleNamespace(uniform=lambda *_: 0.0)  # failed transfers are tried again at once
    monkeypatch.setattr("clipstream.storage.download.random", SimpleNamespace(SystemRandom=lambda: drawn))
    return s3


@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_a_request_without_an_answer_ends_in_time(s3_site: S3, method: str) -> None:
    url = s3_site.put("0.tar", BODY)
    s3_site.fault = lambda request: "hang" if request.method == method else None
    began = time.monotonic()
    error = failure(make_store(timeout=0.3, retries=1), url)
    assert error.reason == "timeout" and "no answer in 0.3 s after 0 bytes" in error.detail
    assert time.monotonic() - began < 12


def test_staging_keeps_the_limit_of_its_flag(s3_site: S3, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    s3_site.put("0.tar", BODY)
    s3_site.fault = lambda request: "hang"
    flags = ["--train-data", f"s3://{BUCKET}/0.tar", "--data.transfer-timeout", "0.2", "--executor", "local:1"]
    began = time.monotonic()
    assert stage.main([str(tmp_path / "out"), *flags]) == 3
    assert "timeout: s3://bucket/0.tar: no answer in 0.2 s" in capsys.readouterr().err
    assert time.monotonic() - began < 30


def test_a_transfer_goes_on_after_failures(s3_site: S3, tmp_path: Path) -> None:
    url, left = s3_site.put("0.tar", BODY), ["503", "reset", "reset"]
    s3_site.fault = lambda request: left.pop() if left else None
    assert make_store(tmp_path).local(url).read_bytes() == BODY and not left


@pytest.mark.parametrize("fault", ["expired", "unknown key"])
def test_renewed_credentials_are_taken_while_it_is_tried_again(
    s3_site: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """S3 answers 400 to the HEAD of an expired token, which s3fs 2026.9 raises as OSError EINVAL 'Bad Request'."""
    use_keys(tmp_path, monkeypatch)
    store, urls = make_store(tmp_path / "cache"), [s3_site.put(f"{n}.tar", BODY) for n in range(3)]
    assert store.local(urls[0]).read_bytes() == BODY

    def refuse(request: object) -> str | None:
        if s3_site.requests[-1].key != "OLD":
            return None
        if len(s3_site.requests) > 8:
            write_keys(tmp_path, "NEW")
        return fault

    s3_site.fault = refuse
    assert store.local(urls[1]).read_bytes() == BODY
    s3_site.fault = lambda request: fault
    with pytest.raises(ShardError, match=r"^credentials: .*\(the credentials are expired or denied\)$") as caught:
        store.local(urls[2])
    assert "hidden" not in caught.value.detail


def test_a_single_object_that_is_denied_is_one_broken_shard(s3_site: S3, tmp_path: Path) -> None:
    """S3 also answers 403 for an object that does not exist if the caller may not list the bucket."""
    store, urls = make_store(tmp_path, retries=1), [s3_site.put(f"{n}.tar", BODY) for n in range(2)]
    s3_site.fault = lambda request: "denied" if "1.tar" in request.path else None
    assert failure(store, urls[1]).reason == "denied"
    assert store.local(urls[0]).read_bytes() == BODY


def test_refused_credentials_end_a_run_and_break_no_shard(s3_site: S3, tmp_path: Path) -> None:
    urls = [s3_site.put(Path(one).name, Path(one).read_bytes()) for one in make_shards(tmp_path, [5] * 4)]
    s3_site.fault = lambda request: "expired"
    stream = loader(data("::".join(urls), workers=0, max_shard_failures=1.0))
    with pytest.raises(DataError, match=r"credentials: s3://bucket/.*expired.*: renew them, and run the same command"):
        next(stream)
    assert not stream.health.sources["train"].faults
    stream.close()
