"""Copies of checkpoints on a real S3 server that fails: only whole checkpoints are taken, nothing of others is lost.

s3fs makes `S3FileSystem.retries` attempts by itself, and waits between them (s3fs 2026.9, `_error_wrapper`): one here.
"""

from __future__ import annotations

import random
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from clipstream.checkpoint import remote_sync, resume
from clipstream.checkpoint.async_writer import AsyncWriter
from clipstream.checkpoint.remote_sync import RemoteDir, RemoteSync, download
from clipstream.checkpoint.store import MARKER, fault
from clipstream.config.settings import load
from clipstream.distributed.world import World
from clipstream.errors import CopyError, SettingsError, Stopped
from clipstream.training.settings import CheckpointSettings
from clipstream.training.state import TrainState
from tests.support.s3 import BUCKET, S3, Request, s3fs, use_keys, write_keys
from tests.support.savers import names, saver_of

URL = f"s3://{BUCKET}/runs"
OPTIMIZER = "optimizer.safetensors"


@pytest.fixture
def site(s3: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    monkeypatch.setattr(remote_sync, "BACKOFF", 0.001)
    return s3


def begin(folder: Path, resumes: str | None = "auto", **settings: Any) -> AsyncWriter:
    """The writer of a run that begins as `--name run --remote-sync URL --resume RESUMES` does."""
    flags = ["--train-data", "synthetic:8", "--logs", str(folder), "--name", "run", "--remote-sync", URL]
    given = load([*flags, *(["--resume", resumes] if resumes else [])])
    given.run_folder.mkdir(parents=True, exist_ok=True)
    found = resume.find(given.checkpoint.model_copy(update=settings), given.run_folder, World())
    return saver_of(given.run_folder / "checkpoints", sync=found.remote_sync, **settings)


def sync_of(saver: AsyncWriter) -> RemoteSync:
    assert saver._sync is not None
    return saver._sync


def save(saver: AsyncWriter, *steps: int) -> None:
    """Saves, each copied, or failed to be, before the next."""
    for step in steps:
        saver.save(TrainState(step, samples=step))
        assert saver.finish()


def there(site: S3) -> dict[str, list[str]]:
    """The files of each remote checkpoint."""
    found: dict[str, list[str]] = {}
    for name in site.names("runs/run/checkpoints/step_"):
        step, _, file = name.partition("checkpoints/")[2].partition("/")
        found.setdefault(step, []).append(file)
    return found


def taken(folder: Path) -> str | None:
    """The checkpoint that another machine takes, whose files are whole."""
    path = download(RemoteDir(f"{URL}/run", "--resume"), folder)
    assert path is None or fault(path) is None
    return None if path is None else path.name


def test_a_copy_that_is_cut_at_any_byte_is_never_taken(
    site: S3, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_sync, "RETRIES", 0)
    base = begin(tmp_path, keep_last=1).folder.parent
    save(saver_of(base / "checkpoints", sync=RemoteSync(RemoteDir(f"{URL}/run", ""), base, CheckpointSettings())), 1)
    first = {name: site.get(name) for name in site.names()}
    markers = RemoteDir(f"{URL}/run/checkpoints", "").whole()
    total, draws, ends = 0, random.Random(46), set()
    for number in range(5):
        shutil.copytree(base, folder := tmp_path / str(number))
        site.heal()
        left = {*site.names()}
        for name in left - first.keys():
            remove(site, name)
        for name in first:
            if name not in left or name.endswith("latest"):
                site.put(name, first[name])
        sync = RemoteSync(RemoteDir(f"{URL}/run", ""), folder, CheckpointSettings(keep_last=1))
        sync.begin(markers)
        cut = site.left = draws.randrange(1, total) if total else 1 << 30
        save(saver_of(folder / "checkpoints", sync=sync, keep_last=1), 2)
        total = total or cut - site.left
        site.heal()
        capsys.readouterr()
        step = taken(tmp_path / f"other-{number}")
        said, second = capsys.readouterr().err, there(site).get("step_00000002", [])
        whole = MARKER in second
        assert step == f"step_0000000{2 if whole else 1}", f"cut at byte {cut} of {total}"
        assert whole or number, "the first copy is not cut"
        if second and not whole:
            assert f"step_00000002 is damaged (it has no {MARKER}): it is not used" in said
            ends.add("a part")
    assert total > 10_000 and ends


def remove(site: S3, name: str) -> None:
    site.client.delete_object(Bucket=BUCKET, Key=name)


DAMAGE: list[tuple[str, Any, str]] = [
    (OPTIMIZER, lambda old: old[: len(old) // 2], "optimizer.safetensors has .* bytes"),
    (OPTIMIZER, lambda old: None, "optimizer.safetensors is missing"),
    (OPTIMIZER, lambda old: old[:-9] + bytes([old[-9] ^ 1]) + old[-8:], "optimizer.* does not match its checksum"),
    (MARKER, lambda old: old[:40], "its COMPLETE is damaged"),
    (MARKER, lambda old: None, "it has no COMPLETE"),
]


def test_a_damaged_copy_gives_way_to_the_one_before_and_is_told(
    site: S3, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(begin(tmp_path, keep_last=2), 1, 2)
    for number, (file, change, why) in enumerate(DAMAGE):
        name = f"runs/run/checkpoints/step_00000002/{file}"
        content = site.get(name)
        changed = change(content)
        remove(site, name) if changed is None else site.put(name, changed)
        assert taken(tmp_path / str(number)) == "step_00000001"
        said = capsys.readouterr().err
        assert re.search(rf"step_00000002 is damaged \({why}.*\): it is not used", said), said
        site.put(name, content)

    # It changes after the listing.
    name = f"runs/run/checkpoints/step_00000002/{OPTIMIZER}"

    def replace(request: Request) -> None:
        if request.method == "GET" and OPTIMIZER in request.path and "step_00000002" in request.path:
            site.put(name, bytes(len(content)))

    content, site.before = site.get(name), replace
    assert taken(tmp_path / "changes") == "step_00000001"
    assert "step_00000002 is damaged (optimizer.safetensors does not match its checksum)" in capsys.readouterr().err


def test_bursts_of_failures_are_overcome(
    site: S3, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)
    saver, draws = begin(tmp_path, keep_last=1), random.Random(3)
    site.fault = lambda request: draws.choice(["503", "reset"]) if draws.random() < 0.2 else None
    save(saver, 1, 2)
    site.heal()
    assert capsys.readouterr().err.count("warning") == 0
    assert taken(tmp_path / "other") == "step_00000002" and list(there(site)) == ["step_00000002"]


def test_an_empty_bucket_is_a_new_run(site: S3, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saver = begin(tmp_path)
    assert "s3://bucket/runs/run has no complete checkpoint yet" in capsys.readouterr().err
    save(saver, 1)
    assert list(there(site)) == ["step_00000001"] and sync_of(saver).behind() is None


def test_an_empty_listing_hides_no_run(site: S3, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file `latest` is read by its name, so the run goes on from the newest checkpoint."""
    save(begin(tmp_path / "first", keep_last=2), 1, 2)
    site.fault = lambda request: "empty" if request.is_listing else None
    with pytest.raises(SettingsError, match="has a run: continue it with --resume auto"):
        begin(tmp_path / "second", None)
    saver = begin(tmp_path / "second", keep_last=2)
    assert "checkpoints lacks step_00000002, which is there" in capsys.readouterr().err
    assert names(saver.folder) == ["latest", "step_00000002"]
    site.heal()
    save(saver, 3)
    assert sync_of(saver).behind() is None
    assert list(there(site)) == ["step_00000001", "step_00000002", "step_00000003"], "only its own are removed"


def test_a_run_that_was_not_seen_at_the_start_is_left_alone(
    site: S3, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every answer is 404 at the start, as of a gateway without its bucket."""
    save(begin(tmp_path / "first", keep_last=2), 1, 2)
    before = {name: site.get(name) for name in site.names()}
    site.fault = lambda request: "404"
    saver = begin(tmp_path / "second", keep_last=1)
    assert "has no complete checkpoint yet" in capsys.readouterr().err
    for answer in (None, "empty"):
        site.fault = lambda request, answer=answer: answer if request.is_listing else None
        save(saver, 2, 3)
        assert {name: site.get(name) for name in site.names()} == before
        assert "it has checkpoints of another run (step_0000000" in capsys.readouterr().err
    with pytest.raises(CopyError, match=r"the run is complete, but the copy .* choose another --name"):
        resume.Resumed(None, sync_of(saver)).require_copy(World())


def test_renewed_credentials_are_taken(
    site: S3, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """botocore reads the file of credentials once a session (botocore 1.43, `SharedCredentialProvider`)."""
    monkeypatch.setattr(remote_sync, "RETRIES", 1)
    use_keys(tmp_path, monkeypatch)
    saver = begin(tmp_path, keep_last=1)
    save(saver, 1)
    site.fault = lambda request: "expired" if request.key == "OLD" else None
    save(saver, 2, 3)
    said = capsys.readouterr().err
    assert "expired. (the credentials are expired or denied)" in said and "hidden" not in said
    behind = sync_of(saver).behind()
    assert behind is not None
    assert behind.startswith("the copy in s3://bucket/runs/run is 2 saves behind (ends at step 1): ")
    with pytest.raises(CopyError, match="2 saves behind") as caught:
        resume.Resumed(None, sync_of(saver)).require_copy(World())
    assert caught.value.exit_code == 5
    with pytest.raises(Stopped, match="saved\nthe copy in s3://bucket/runs/run is 2 saves behind") as stopped, saver:
        raise Stopped("stopped by SIGTERM, step 3 is saved")
    assert stopped.value.exit_code == 75
    write_keys(tmp_path, "NEW")
    save(saver, 4)
    assert sync_of(saver).behind() is None and list(there(site)) == ["step_00000004"]


@pytest.mark.parametrize("stopping", [False, True])
def test_an_upload_without_an_answer_does_not_keep_the_run(
    site: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopping: bool
) -> None:
    saver = begin(tmp_path)
    save(saver, 1)
    monkeypatch.setattr(remote_sync, "LIMIT", 600.0 if stopping else 0.3)
    monkeypatch.setattr(remote_sync, "PATIENCE", 0.3)
    sync_of(saver).is_stopping = lambda: stopping
    site.fault = lambda request: "hang" if request.method == "PUT" else None
    began = time.monotonic()
    save(saver, 2)
    saver.close()
    assert time.monotonic() - began < 60
    behind = sync_of(saver).behind()
    assert behind is not None and "1 save behind (ends at step 1): no answer in" in behind
    if not stopping and (thread := sync_of(saver)._thread) is not None:
        thread.join()  # else it writes to the bucket of another test


def test_no_request_waits_without_an_end(site: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    site.put("runs/a", b"x")
    place = RemoteDir(f"{URL}/a", "")
    monkeypatch.setattr(remote_sync, "LIMIT", 0.2)
    site.fault = lambda request: "hang"
    for kind in ("names", "read", "size", "remove", "examine"):
        with pytest.raises(TimeoutError, match=r"no answer in 0.2 s"):
            getattr(place, kind)()


def test_an_upload_that_arrives_short_is_an_error(site: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(self: Any, lpath: str, rpath: str, **_: Any) -> None:
        self.pipe_file(rpath, Path(lpath).read_bytes()[:-1])

    monkeypatch.setattr(s3fs.S3FileSystem, "put_file", short)
    (tmp_path / "a").write_bytes(b"0123456789")
    with pytest.raises(OSError, match="9 of 10 bytes of a arrived"):
        RemoteDir(f"{URL}/a", "").upload(tmp_path / "a")
