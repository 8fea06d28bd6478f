"""Shards on a real S3 server that refuses, or does not answer: a limit of time, renewed credentials, a named reason."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from clipstream.cli.verbs import stage
from clipstream.errors import DataError
from clipstream.storage.download import ShardError
from clipstream.storage.shard_cache import ShardCache
from tests.support.loaders import data, loader
from tests.support.pictures import make_shards
from tests.support.s3 import BUCKET, S3, use_keys, write_keys
from tests.support.stores import BODY, make_store


@pytest.fixture
def site(s3: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    drawn = SimpleNamespace(uniform=lambda *_: 0.0)  # failed transfers are tried again at once
    monkeypatch.setattr("clipstream.storage.download.random", SimpleNamespace(SystemRandom=lambda: drawn))
    return s3


def failure(store: ShardCache, url: str) -> ShardError:
    with pytest.raises(ShardError) as caught:
        store.local(url)
    return caught.value


@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_a_request_without_an_answer_ends_in_time(site: S3, method: str) -> None:
    url = site.put("0.tar", BODY)
    site.fault = lambda request: "hang" if request.method == method else None
    began = time.monotonic()
    error = failure(make_store(timeout=0.3, retries=1), url)
    assert error.reason == "timeout" and "no answer in 0.3 s after 0 bytes" in error.detail
    assert time.monotonic() - began < 12


def test_staging_keeps_the_limit_of_its_flag(site: S3, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site.put("0.tar", BODY)
    site.fault = lambda request: "hang"
    flags = ["--train-data", f"s3://{BUCKET}/0.tar", "--data.transfer-timeout", "0.2", "--executor", "local:1"]
    began = time.monotonic()
    assert stage.main([str(tmp_path / "out"), *flags]) == 3
    assert "timeout: s3://bucket/0.tar: no answer in 0.2 s" in capsys.readouterr().err
    assert time.monotonic() - began < 30


def test_a_transfer_goes_on_after_failures(site: S3, tmp_path: Path) -> None:
    url, left = site.put("0.tar", BODY), ["503", "reset", "reset"]
    site.fault = lambda request: left.pop() if left else None
    assert make_store(tmp_path).local(url).read_bytes() == BODY and not left


@pytest.mark.parametrize("fault", ["expired", "unknown key"])
def test_renewed_credentials_are_taken_while_it_is_tried_again(
    site: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """S3 answers 400 to the HEAD of an expired token, which s3fs 2026.9 raises as OSError EINVAL 'Bad Request'."""
    use_keys(tmp_path, monkeypatch)
    store, urls = make_store(tmp_path / "cache"), [site.put(f"{n}.tar", BODY) for n in range(3)]
    assert store.local(urls[0]).read_bytes() == BODY

    def refuse(request: object) -> str | None:
        if site.requests[-1].key != "OLD":
            return None
        if len(site.requests) > 8:
            write_keys(tmp_path, "NEW")
        return fault

    site.fault = refuse
    assert store.local(urls[1]).read_bytes() == BODY
    site.fault = lambda request: fault
    error = failure(store, urls[2])
    assert error.reason == "credentials" and error.detail.endswith("(the credentials are expired or denied)")
    assert "hidden" not in error.detail


def test_a_single_object_that_is_denied_is_one_broken_shard(site: S3, tmp_path: Path) -> None:
    """S3 also answers 403 for an object that does not exist if the caller may not list the bucket."""
    store, urls = make_store(tmp_path, retries=1), [site.put(f"{n}.tar", BODY) for n in range(2)]
    site.fault = lambda request: "denied" if "1.tar" in request.path else None
    assert failure(store, urls[1]).reason == "denied"
    assert store.local(urls[0]).read_bytes() == BODY


def test_refused_credentials_end_a_run_and_break_no_shard(site: S3, tmp_path: Path) -> None:
    urls = [site.put(Path(one).name, Path(one).read_bytes()) for one in make_shards(tmp_path, [5] * 4)]
    site.fault = lambda request: "expired"
    stream = loader(data("::".join(urls), workers=0, max_shard_failures=1.0))
    with pytest.raises(DataError, match=r"credentials: s3://bucket/.*expired.*: renew them, and run the same command"):
        next(stream)
    assert not stream.health.sources["train"].faults
    stream.close()
