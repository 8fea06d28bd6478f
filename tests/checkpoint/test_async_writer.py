"""Background saves: their content, what training waits for, and what a crash or a full disk leaves on disk."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from clipstream.checkpoint import store
from clipstream.checkpoint.async_writer import AsyncWriter, Content
from clipstream.checkpoint.state import OPTIMIZER, WEIGHTS, TensorFile, load, metadata, read, read_meta
from clipstream.checkpoint.store import BEST, find, marker_of
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError
from clipstream.training.settings import CheckpointSettings
from clipstream.training.state import TrainState
from clipstream.training.step import TrainStep
from clipstream.utils import atomic_write
from tests.support.fake_cuda import FakeCuda
from tests.support.forks import TIMEOUT, run_fork, wait_until
from tests.support.savers import fill, names, parts, saver_of, small_disk, write
from tests.support.steps import LOSSES, make_batch


class Gate:
    """Files are written only while it is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        written = atomic_write.write

        def wait(path: Path, content: Any) -> tuple[int, str]:
            self.reached.set()
            assert self.open.wait(TIMEOUT)
            return written(path, content)

        monkeypatch.setattr(atomic_write, "write", wait)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def test_training_goes_on_and_the_save_is_of_its_step(gate: Gate, tmp_path: Path) -> None:
    """On a GPU: tests/gpu/test_saving.py."""
    model, optimizer = parts()
    step = TrainStep(model, LOSSES["clip"], optimizer, World())
    step(make_batch(0), lr=0.01)
    saver = saver_of(tmp_path, model=(model, optimizer))
    before = {name: tensor.clone() for name, tensor in model.clip.state_dict().items()}
    saver.save(TrainState(1))
    assert gate.reached.wait(TIMEOUT)
    for number in (1, 2):
        step(make_batch(number), lr=0.01)
    saver.check()
    assert find(tmp_path, "auto") is None
    gate.open.set()
    assert saver.finish()
    saved = load_file(tmp_path / "step_00000001" / WEIGHTS)
    assert all(torch.equal(saved[name], tensor) for name, tensor in before.items())
    assert any(not torch.equal(saved[name], tensor) for name, tensor in model.clip.state_dict().items())


def checked(saver: AsyncWriter) -> bool:
    """Look for a failed save, as training does at each step."""
    saver.check()
    return True


def test_one_save_at_a_time_with_its_status(gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = parts()
    told: list[str] = []
    saver = AsyncWriter(tmp_path, World(), CheckpointSettings(), Content(model, optimizer), status=told.append)
    saver.save(TrainState(1, samples=11))
    assert gate.reached.wait(TIMEOUT)
    saver.check()
    assert told == ["saving"] and find(tmp_path, "auto") is None
    join, found = saver._join, []

    def join_late() -> None:
        gate.open.set()
        join()
        found.append(find(tmp_path, "auto"))

    monkeypatch.setattr(saver, "_join", join_late)
    saver.save(TrainState(2, samples=22))
    assert found == [tmp_path / "step_00000001"], "it is written before the next one is"
    wait_until(lambda: checked(saver) and len(told) > 3)
    assert saver.finish() and told == ["saving", "", "saving", ""]
    for step, samples in ((1, 11), (2, 22)):
        assert read_meta(tmp_path / f"step_{step:08d}").train.samples == samples


def test_a_failure_in_the_background_ends_the_run_at_its_next_step(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    saver = saver_of(tmp_path / "checkpoints")
    saver.save(TrainState(1))
    with pytest.raises(ClipstreamError, match=r"cannot write the checkpoint: .*checkpoints"):
        wait_until(lambda: not checked(saver))
    saver.save(TrainState(2))
    with pytest.raises(ClipstreamError, match="cannot write"):
        saver.finish()


def test_the_end_waits_for_the_save_but_not_after_ctrl_c_twice(gate: Gate, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), saver_of(tmp_path) as saver:
        saver.save(TrainState(1))
        raise KeyboardInterrupt
    assert find(tmp_path, "auto") is None
    threading.Timer(0.1, gate.open.set).start()
    with pytest.raises(ValueError, match="other"), saver:
        raise ValueError("other")
    assert find(tmp_path, "auto") == tmp_path / "step_00000001"


def test_files_of_tensors_are_those_of_the_library(tmp_path: Path) -> None:
    tensors = {
        "bytes": torch.arange(5, dtype=torch.uint8),
        "scalar": torch.tensor(2.5),
        "wide": torch.randn(3, 5, dtype=torch.float64),
        "narrow": torch.randn(7).to(torch.bfloat16),
        "turned": torch.randn(4, 3).T,
        "none": torch.zeros(0, 4),
        "flags": torch.tensor([True, False]),
        "ids": torch.arange(3),
    }
    file = TensorFile(tensors)
    for name, tensor in tensors.items():
        file.views[name].copy_(tensor)
    size, _ = atomic_write.write(tmp_path / "f.safetensors", file.parts({"format": "pt", "é": '"'}))
    assert size == (tmp_path / "f.safetensors").stat().st_size
    found = load_file(tmp_path / "f.safetensors")
    assert found.keys() == tensors.keys() and dict(read(tmp_path / "f.safetensors")).keys() == tensors.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    assert metadata(tmp_path / "f.safetensors") == {"format": "pt", "é": '"'}
    assert file.fits(tensors) and not file.fits({**tensors, "ids": torch.arange(4)})


@pytest.mark.parametrize("code", [0, 801])
def test_memory_for_a_gpus_copies_is_locked_in_its_exact_size(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's page-locked memory, of a power of two, is taken where CUDA registers no memory."""
    cuda, empty = FakeCuda(monkeypatch, code), torch.empty
    register, locked, pinned = cuda.cudaHostRegister, list[int](), list[bool]()

    def registered(address: int, size: int, flags: int) -> int:
        locked.append(size)
        return register(address, size, flags)

    def allocated(size: int, *, dtype: torch.dtype, pin_memory: bool = False) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty(size, dtype=dtype)

    monkeypatch.setattr(cuda, "cudaHostRegister", registered)
    monkeypatch.setattr(torch, "empty", allocated)
    tensors = {"a": torch.arange(1500.0)}
    file = TensorFile(tensors, pin="cuda:1")
    assert locked == [6000] and pinned == [True] * bool(code)
    assert len(cuda.registered) == (code == 0) and cuda.error == 0
    file.views["a"].copy_(tensors["a"])
    del file  # does not wait for a kernel that hangs
    assert len(cuda.registered) == (code == 0)
    cuda.stuck.set()
    wait_until(lambda: not cuda.registered)
    assert {device for _, device, _ in cuda.calls} == {"cuda:1"}


def evaluated(saver: AsyncWriter, step: int, value: float) -> None:
    """An evaluation, and the save that it makes due."""
    saver.on_eval([{"step": step, "eval": "other", "top1": -1.0}, {"step": step, "eval": "val", "top1": value}])
    if saver.due(step):
        saver.save(TrainState(step))


def test_the_best_is_saved_and_stays_until_the_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def new() -> AsyncWriter:
        return saver_of(tmp_path, every=10, keep_last=1, keep_best="val/top1")

    saver = new()
    for step, value in ((10, 0.2), (15, 0.5), (20, 0.4), (25, float("nan")), (30, 0.5)):
        evaluated(saver, step, value)
    assert saver.finish()
    assert names(tmp_path) == [BEST, "latest", "step_00000015", "step_00000030"]
    assert (tmp_path / BEST).read_text().splitlines()[0] == "step_00000015"
    assert find(tmp_path, str(tmp_path / BEST)) == tmp_path / "step_00000015"
    saver = new()  # after a resume
    evaluated(saver, 35, 0.45)
    evaluated(saver, 40, 0.45)
    assert saver.finish() and names(tmp_path)[2:] == ["step_00000015", "step_00000040"]
    saver.save(TrainState(44))
    saver.on_eval([{"step": 44, "eval": "val", "top1": 0.9}])  # the last evaluation comes after the last save
    assert saver.finish()
    assert names(tmp_path) == [BEST, "latest", "step_00000044"]
    saver.on_eval([{"step": 45, "eval": "val", "top5": 0.9}])
    assert "val has no metric 'top1' at step 45" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("metric", "by", "best"), [("loss", "auto", 2), ("val_loss", "auto", 2), ("loss", "max", 1), ("top1", "auto", 1)]
)
def test_a_loss_is_good_if_it_is_small(metric: str, by: str, best: int, tmp_path: Path) -> None:
    saver = saver_of(tmp_path, keep_best=f"val/{metric}", keep_best_by=by, every=1)
    for step, value in ((1, 3.0), (2, 2.0)):
        saver.on_eval([{"step": step, "eval": "val", metric: value}])
        saver.save(TrainState(step))
    assert saver.finish()
    assert (tmp_path / BEST).read_text().startswith(f"step_0000000{best}\n")


def test_a_full_disk_is_a_warning_and_the_older_one_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path, "400k"):
        first = write(tmp_path, 1)
        assert first is not None
        marker = marker_of(first)
        assert marker is not None
        needed = sum(marker.sizes.values())
        for left in (0, needed // 4, needed // 2, needed * 3 // 4):
            ballast = fill(tmp_path, left)
            assert write(tmp_path, 2) is None, left
            warning = capsys.readouterr().err
            assert "full" in warning and "step_00000001" in warning
            ballast.unlink()
            assert find(tmp_path, "latest") == first
            assert names(tmp_path) == ["latest", "step_00000001"]
        assert write(tmp_path, 3) is not None


def test_on_a_full_disk_a_lower_keep_last_makes_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path, "2m"):
        for step in (1, 2, 3):
            assert write(tmp_path, step, keep_last=3) is not None
        fill(tmp_path, 0)
        assert write(tmp_path, 4, keep_last=1) is None
        assert "the newest checkpoint is step_00000003" in capsys.readouterr().err
        assert write(tmp_path, 5, keep_last=1) is not None


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EROFS, errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_folder_that_is_not_writable_is_a_warning_and_the_next_save_tries_again(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(path: Path, content: Any) -> tuple[int, str]:
        raise OSError(number, os.strerror(number), str(path))

    saver = saver_of(tmp_path)
    saver.save(TrainState(1))
    assert saver.finish()
    with monkeypatch.context() as broken:
        broken.setattr(atomic_write, "write", fail)
        saver.save(TrainState(2))
        wait_until(lambda: checked(saver) and capsys.readouterr().err.count("warning: ") == 1)
    assert find(tmp_path, "latest") == tmp_path / "step_00000001"
    saver.save(TrainState(3))
    assert saver.finish() and names(tmp_path) == ["latest", "step_00000001", "step_00000003"]


def test_a_run_folder_that_is_away_is_awaited_at_the_end_and_then_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A save in between does not make it, so that it can be moved back."""
    run, aside = tmp_path / "run", tmp_path / "aside"
    run.mkdir()
    saver, waits = saver_of(run / "checkpoints"), list[float]()
    saver.save(TrainState(1))
    assert saver.finish()
    run.rename(aside)
    saver.save(TrainState(2))
    saver.save(TrainState(3))
    saver._join()
    said = capsys.readouterr().err
    assert said.count("cannot be written (No such file or directory): step") == 2 and not run.exists()

    def come_back(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            aside.rename(run)

    monkeypatch.setattr(time, "sleep", come_back)
    assert saver.finish() and len(waits) == 3 and capsys.readouterr().err == "", "told once"
    assert find(run / "checkpoints", "latest") == run / "checkpoints" / "step_00000003"
    shutil.rmtree(run)
    saver.save(TrainState(4))
    assert saver.finish() and names(run / "checkpoints") == ["latest", "step_00000004"]
    shutil.rmtree(run)
    run.write_text("a file: nothing can be made here")
    saver.save(TrainState(5))
    with pytest.raises(ClipstreamError, match="cannot write the checkpoint"):
        saver.finish()


# A process that saves steps 1, 2, 3 again and again, each time in a fork that ends at the n-th operation on files.
CRASHES = """
import json, os, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from clipstream.training.state import TrainState
from tests.support.savers import saver_of
from tests.checkpoint.test_async_writer import whole_after_a_crash

folder = Path(sys.argv[1])
OPERATIONS = ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")

def save(end_at):
    count = 0
    def counted(name):
        real = getattr(os, name)
        def operation(*args, **kwargs):
            nonlocal count
            count += 1
            if count == end_at:
                if name == "write" and len(args[1]) > 1:
                    real(args[0], args[1][:len(args[1]) // 2])
                os._exit(9)
            return real(*args, **kwargs)
        return operation
    for name in OPERATIONS:
        setattr(os, name, counted(name))
    saver = saver_of(folder / str(end_at), keep_last=1, keep_best="val/top1", every=1)
    for step in (1, 2, 3, 2):
        saver.on_eval([{"step": step, "eval": "val", "top1": float(step)}])
        saver.save(TrainState(step, samples=step))
        saver._join()  # on the disk before the next: which steps must be there is known
        print(step, flush=True)
    saver.finish()
    return count

for end_at in range(1, 10_000, int(sys.argv[2])):
    read, write = os.pipe()
    if not (pid := os.fork()):
        os.dup2(write, 1)
        save(end_at)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        done = [int(line) for line in pipe]
    _, status = os.waitpid(pid, 0)
    whole_after_a_crash(folder / str(end_at), done)
    if os.waitstatus_to_exitcode(status) == 0:
        break
    assert os.waitstatus_to_exitcode(status) == 9
print(end_at)
"""


def whole_after_a_crash(folder: Path, done: list[int]) -> None:
    """Check what a process left that had finished saving these steps."""
    newest = find(folder, "auto")
    if not done:
        assert newest is None or read_meta(newest).train.step == 1
        return
    assert newest is not None
    model, optimizer = parts()
    step = load(newest, towers=model, optimizer=optimizer, world=World()).step
    following = {1: 2, 2: 3, 3: 2}
    assert step in (done[-1], following[done[-1]]), (step, done)
    if (folder / BEST).exists():
        best = find(folder, str(folder / BEST))
        assert best is not None and read_meta(best).train.step in (step, max(done), max(done) + 1)


@pytest.mark.parametrize("stride", [31, pytest.param(1, marks=pytest.mark.slow)])
def test_a_crash_at_any_operation_leaves_a_whole_one(stride: int, tmp_path: Path) -> None:
    (tmp_path / "crashes.py").write_text(CRASHES)
    last = run_fork(str(tmp_path / "crashes.py"), str(tmp_path), str(stride)).splitlines()[-1]
    assert int(last) > 150, "there are more operations than that"
    assert json.loads((tmp_path / last / "step_00000002" / "state.json").read_text())["train"]["samples"] == 2
    assert OPTIMIZER in names(tmp_path / last / "step_00000002")


def test_a_claim_stays_as_long_as_a_rank_that_is_out_of_reach_may_look_for_it(tmp_path: Path) -> None:
    for name in ("old", "new"):
        store.claim(tmp_path, name)
    os.utime(tmp_path / "rescue-old", (0, 0))
    saver_of(tmp_path)  # of the next attempt
    store.claim(tmp_path, "old")
    with pytest.raises(ClipstreamError, match="another rank, which cannot be reached, saves it"):
        store.claim(tmp_path, "new")
