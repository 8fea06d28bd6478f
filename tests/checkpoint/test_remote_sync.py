"""Copies of checkpoints in a remote folder, made in the background, and resuming from them."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from clipstream.checkpoint import remote_sync, resume
from clipstream.checkpoint.async_writer import AsyncWriter
from clipstream.checkpoint.remote_sync import RemoteDir, RemoteSync, download
from clipstream.checkpoint.store import BEST, MARKER, fault, marker_of
from clipstream.config.settings import load
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.training.settings import CheckpointSettings
from clipstream.training.state import TrainState
from tests.support.forks import TIMEOUT
from tests.support.savers import damage, names, saver_of, write


class Weak(MemoryFileSystem):  # type: ignore[misc]
    """A place whose uploads fail or wait."""

    protocol = "weak"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    failures = 0
    gate = threading.Event()
    begun = threading.Event()

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        """Copy a file."""
        type(self).begun.set()
        assert type(self).gate.wait(TIMEOUT)
        if type(self).failures:
            type(self).failures -= 1
            raise ConnectionError("weak://user:secret@host refused")
        super().put_file(lpath, rpath, **kwargs)


@pytest.fixture(autouse=True)
def _places(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fsspec.register_implementation("weak", Weak, clobber=True)
    monkeypatch.setattr(remote_sync, "BACKOFF", 0.001)
    Weak.failures = 0
    Weak.gate.set()
    Weak.begun.clear()
    yield
    for system in (MemoryFileSystem, Weak):
        system.store.clear()
        system.pseudo_dirs[:] = [""]


def synced(folder: Path, url: str, **settings: Any) -> AsyncWriter:
    """What saves in FOLDER/checkpoints, with a copy at the URL."""
    sync = RemoteSync(RemoteDir(url, "--remote-sync"), folder, CheckpointSettings(**settings))
    return saver_of(folder / "checkpoints", sync=sync, **settings)


def save(saver: AsyncWriter, *steps: int, **metrics: float) -> None:
    """Saves, each copied before the next."""
    for step in steps:
        if metrics:
            saver.on_eval([{"step": step, "eval": "val", **metrics}])
        saver.save(TrainState(step, samples=step))
        assert saver.finish()


@pytest.mark.parametrize("kind", ["file", "memory", "path"])
def test_what_stays_there_is_what_stays_here(kind: str, tmp_path: Path) -> None:
    url = {"file": f"file://{tmp_path}/far", "memory": "memory://far", "path": f"{tmp_path}/far"}[kind]
    folder = tmp_path / "run"
    saver = synced(folder, url, keep_last=2, keep_every=20, keep_best="val/top1")
    (folder / "config.yaml").write_text("run: {}\n")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    save(saver, 10, top1=0.5)
    save(saver, 20, 25, 30, 35, 40, 45, top1=0.4)
    far = RemoteDir(url, "")
    there = (far / "checkpoints").names()
    assert there == names(folder / "checkpoints") == [BEST, "latest", *(f"step_{s:08d}" for s in (10, 20, 40, 45))]
    for path in (folder / "checkpoints").glob("step_*"):
        assert (far / "checkpoints" / path.name).examine() == marker_of(path)
    for name in ("config.yaml", "metrics.jsonl", "checkpoints/latest", f"checkpoints/{BEST}"):
        assert (far / name).read() == (folder / name).read_bytes()


def test_a_failing_place_is_a_warning_and_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saver = synced(tmp_path / "run", "weak://user:secret@far", keep_last=2)
    Weak.failures = 2
    save(saver, 1)
    assert capsys.readouterr().err == "", "two failures are overcome at once"
    Weak.failures = 99
    save(saver, 2)
    said = capsys.readouterr().err
    assert "warning: --remote-sync: the copy to weak://***@far" in said and "secret" not in said
    assert "refused" in said
    Weak.failures = 0
    save(saver, 3)
    assert capsys.readouterr().err == ""
    assert list((saver._sync.remote / "checkpoints").whole()) == ["step_00000003", "step_00000001"]  # type: ignore[union-attr]


def test_what_is_being_copied_stays_and_what_is_overtaken_is_left_out(tmp_path: Path) -> None:
    saver = synced(tmp_path / "run", "weak://far", keep_last=1)
    Weak.gate.clear()
    saver.save(TrainState(1))
    assert Weak.begun.wait(TIMEOUT)
    for step in (2, 3, 4):
        saver.save(TrainState(step))
    saver._join()
    assert [name for name in names(saver.folder) if name != "latest"] == ["step_00000001", "step_00000004"]
    Weak.gate.set()
    assert saver.finish()
    assert (RemoteDir("weak://far", "") / "checkpoints").names() == ["latest", "step_00000004"]
    saver.save(TrainState(5))
    assert saver.finish() and names(saver.folder) == ["latest", "step_00000005"]


def far_run(tmp_path: Path, steps: tuple[int, ...] = (1, 2, 3)) -> Path:
    """A folder like a run's remote copy."""
    for step in steps:
        write(tmp_path / "far" / "run" / "checkpoints", step, keep_last=9)
    return tmp_path / "far" / "run"


def test_the_newest_whole_one_is_fetched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    far, here = far_run(tmp_path), tmp_path / "here"
    assert download(RemoteDir(f"file://{far}", "--resume"), here) == here / "step_00000003"
    assert fault(here / "step_00000003") is None and names(here) == ["latest", "step_00000003"]
    assert "fetching file://" in capsys.readouterr().err
    assert download(RemoteDir(f"file://{far}/checkpoints/step_00000003", "--resume"), here) == here / "step_00000003"
    assert capsys.readouterr().err == "", "what is here already is not fetched again"
    (far / "checkpoints" / "step_00000003" / MARKER).unlink()
    damage(far / "checkpoints" / "step_00000002" / "optimizer.safetensors")
    assert (
        download(RemoteDir(f"file://{far}/checkpoints", "--resume"), tmp_path / "other")
        == tmp_path / "other/step_00000001"
    )
    said = capsys.readouterr().err
    assert "step_00000002 is damaged (optimizer.safetensors does not match its checksum)" in said
    assert names(tmp_path / "other") == ["latest", "step_00000001"]


def test_a_checkpoint_is_named_by_its_address_or_a_pointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    far, here = far_run(tmp_path), tmp_path / "here"
    (far / "checkpoints" / BEST).write_text("step_00000001\n{}\n")
    assert download(RemoteDir(f"file://{far}/checkpoints/step_00000002/", "--resume"), here) == here / "step_00000002"
    assert download(RemoteDir(f"file://{far}/checkpoints/best", "--resume"), here) == here / "step_00000001"
    monkeypatch.setenv("FAR", str(far))
    assert download(RemoteDir("file://${FAR}", "--resume"), here) == here / "step_00000003"


def test_where_there_is_nothing(tmp_path: Path) -> None:
    for url in (f"file://{tmp_path}/none", "memory://none", "memory://none/checkpoints/step_00000001"):
        assert download(RemoteDir(url, "--resume"), tmp_path / "here") is None
    far = far_run(tmp_path, (1,))
    damage(far / "checkpoints" / "step_00000001" / "rng.pt")
    with pytest.raises(SettingsError, match=r"all checkpoints in file://.* are incomplete \(step_00000001\)"):
        download(RemoteDir(f"file://{far}", "--resume"), tmp_path / "here")


def test_a_place_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("key=abc denied")

    monkeypatch.setattr(Weak, "ls", refuse)
    with pytest.raises(SettingsError, match=r"--resume: cannot copy weak://far to .*: key=\*\*\* denied"):
        download(RemoteDir("weak://far", "--resume"), tmp_path / "here")
    with pytest.raises(SettingsError, match=r"nosuch://x.*not known"):
        RemoteDir("nosuch://x", "--remote-sync")


def test_a_machine_that_is_behind_catches_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that went on elsewhere comes back to a disk with an older checkpoint, and older metrics."""
    far, run = far_run(tmp_path, (1, 2)), tmp_path / "runs" / "run"
    shutil.copytree(far, run)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    far_run(tmp_path, (3,))
    (far / "metrics.jsonl").write_text('{"step": 3}\n')
    flags = ["--train-data", "synthetic:8", "--logs", str(run.parent), "--name", "run", "--resume", "auto"]
    settings = load([*flags, "--remote-sync", f"file://{far.parent}"])

    def found() -> str:
        taken = resume.find(settings.checkpoint, settings.run_folder, World()).checkpoint
        return "" if taken is None else taken.name

    damage(far / "checkpoints" / "step_00000003" / "rng.pt")
    shutil.rmtree(far / "checkpoints" / "step_00000001")
    shutil.rmtree(far / "checkpoints" / "step_00000002")
    assert found() == "step_00000002"
    assert "are incomplete (step_00000003); the newest local checkpoint is used" in capsys.readouterr().err
    far_run(tmp_path, (4,))
    assert found() == "step_00000004"
    assert (run / "metrics.jsonl").read_text() == '{"step": 3}\n'
    (run / "metrics.jsonl").write_text('{"step": 5}\n')
    write(run / "checkpoints", 5, keep_last=9)
    assert found() == "step_00000005", "what is here is newer"
    assert (run / "metrics.jsonl").read_text() == '{"step": 5}\n'
    shutil.rmtree(far)
    shutil.copytree(run, far)
    for path in run.glob("checkpoints/step_*"):
        damage(path / "rng.pt")
    assert found() == "step_00000005", "all here are damaged"
    assert fault(run / "checkpoints" / "step_00000005") is None
