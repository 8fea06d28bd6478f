"""A checkpoint is whole or does not count, and a run goes on from it with the same bits."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from clipstream.errors import SettingsError
from clipstream.training.checkpoint import MARKER, agree, find, load, read_state, save
from clipstream.training.optim import build_optimizer
from clipstream.training.settings import OptimSettings
from clipstream.training.step import TrainStep
from clipstream.world import World
from tests.ranks import run_ranks
from tests.test_step import LOSSES, TinyTowers, make_batch


def parts() -> tuple[TinyTowers, torch.optim.Optimizer]:
    """A model and its optimiser, after one step so that both have state."""
    model = TinyTowers(dropout=0.2)
    return model, build_optimizer(model, OptimSettings(lr=0.01, wd=0.1), batch_norm=False)


def write(folder: Path, step: int, keep_last: int = 2, **state: Any) -> Path | None:
    """Save a checkpoint of `step` on one rank."""
    model, optimizer = parts()
    return save(folder, step, towers=model, optimizer=optimizer, state=state, world=World(), keep_last=keep_last)


def names(folder: Path) -> list[str]:
    """What is in the folder."""
    return sorted(path.name for path in folder.iterdir())


def resumed(world: World, folder: str, break_at: int) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and weights of 4 steps; with `break_at`, by two processes' worth of objects and a checkpoint between."""
    torch.set_num_threads(1)

    def start() -> tuple[TinyTowers, torch.optim.Optimizer, TrainStep]:
        model, optimizer = parts()
        return model, optimizer, TrainStep(model, LOSSES["clip"], optimizer, world)

    losses = []
    model, optimizer, step = start()
    torch.manual_seed(world.rank)
    for number in range(4):
        if number == break_at:
            state = {"samples": 10 * number, "data": {"step": number, "lanes": {str(world.rank): {"window": number}}}}
            path = save(Path(folder), number, towers=model, optimizer=optimizer, state=state, world=world, keep_last=1)
            torch.manual_seed(99)
            model, optimizer, step = start()
            assert path is not None
            found = load(path, towers=model, optimizer=optimizer, world=world)
            assert (found["step"], found["samples"]) == (number, 10 * number)
            assert found["data"]["lanes"] == {str(rank): {"window": number} for rank in range(world.size)}
        losses.append(step(make_batch(number, world.rank, world.size), lr=0.01).loss)
    return losses, [p.detach() for p in model.parameters()]


def both(world: World, folder: str) -> bool:
    """Whether the interrupted run gives the bits of the undisturbed one."""
    losses, weights = resumed(world, folder, break_at=-1)
    losses_2, weights_2 = resumed(world, folder, break_at=2)
    return losses == losses_2 and all(torch.equal(a, b) for a, b in zip(weights, weights_2, strict=True))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_resumed_run_has_the_bits_of_the_undisturbed_one(size: int, tmp_path: Path) -> None:
    assert run_ranks(size, both, str(tmp_path)) == [True] * size


def test_files_and_random_states(tmp_path: Path) -> None:
    model, optimizer = parts()
    path = save(tmp_path, 12, towers=model, optimizer=optimizer, state={"settings": "abc"}, world=World(), keep_last=1)
    assert path is not None and path.name == "step_00000012"
    assert names(path) == sorted([MARKER, "open_clip_model.safetensors", "optimizer.pt", "rng.pt", "state.json"])
    assert (tmp_path / "latest").read_text().strip() == path.name
    state = read_state(path)
    assert state["step"] == 12 and state["settings"] == "abc" and state["versions"]["torch"] == torch.__version__
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    load(path, towers=model, optimizer=optimizer, world=World())
    assert [random.random(), float(np.random.rand()), float(torch.rand(()))] == drawn


def test_the_optimisers_numbers_are_the_present_settings(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    assert path is not None
    model = TinyTowers()
    optimizer = build_optimizer(model, OptimSettings(wd=0.7, betas=(0.5, 0.6)), batch_norm=False)
    load(path, towers=model, optimizer=optimizer, world=World())
    assert optimizer.param_groups[0]["weight_decay"] == 0.7 and optimizer.param_groups[0]["betas"] == (0.5, 0.6)


def test_another_model_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    assert path is not None
    model = TinyTowers("siglip")
    with pytest.raises(SettingsError, match="does not fit"):
        load(path, towers=model, optimizer=build_optimizer(model, OptimSettings(), batch_norm=False), world=World())


def test_keeps_the_newest(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        write(tmp_path, step, keep_last=2)
    assert names(tmp_path) == ["latest", "step_00000015", "step_00000020"]


def test_the_newest_is_the_last_written_not_the_highest_step(tmp_path: Path) -> None:
    """A run that went on from an older checkpoint, and came to step 10 again."""
    for step in (5, 10, 15):
        write(tmp_path, step, keep_last=9)
    write(tmp_path, 10, keep_last=9, again=True)
    newest = find(tmp_path, "latest")
    assert newest == tmp_path / "step_00000010" and read_state(newest)["again"]
    assert names(tmp_path) == ["latest", "step_00000005", "step_00000010", "step_00000015"]


def test_what_is_not_whole_is_not_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step, keep_last=9)
    assert find(tmp_path, "latest") == tmp_path / "step_00000003"
    assert capsys.readouterr().err == ""
    os.truncate(tmp_path / "step_00000003" / "optimizer.pt", 100)
    assert find(tmp_path, "auto") == tmp_path / "step_00000002"
    assert "step_00000003 is damaged" in capsys.readouterr().err
    (tmp_path / "step_00000002" / MARKER).unlink()
    shutil.copytree(tmp_path / "step_00000001", tmp_path / "step_00000009.tmp")
    assert find(tmp_path, "latest") == tmp_path / "step_00000001"
    with pytest.raises(SettingsError, match="no whole checkpoint"):
        find(tmp_path, str(tmp_path / "step_00000002"))
    write(tmp_path, 4, keep_last=9)
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000004"]
    for step in (1, 4):
        (tmp_path / f"step_{step:08d}" / "optimizer.pt").unlink()
    with pytest.raises(SettingsError, match=r"none of the checkpoints .* is whole \(.*step_00000004"):
        find(tmp_path, "auto")


def agreed(world: World, folder: str) -> str:
    """What a rank goes on from that is told to look in a folder of its own."""
    return str(agree(Path(folder), str(Path(folder) / str(world.rank)), world))


def test_ranks_agree_on_the_checkpoint(tmp_path: Path) -> None:
    written = write(tmp_path / "0", 7)
    assert agree(tmp_path / "0", "auto", World()) == written
    assert agree(tmp_path / "1", "auto", World()) is None
    assert run_ranks(2, agreed, str(tmp_path)) == [str(written)] * 2


def test_which_one_to_resume_from(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert find(folder, None) is None and find(folder, "auto") is None
    with pytest.raises(SettingsError, match="--resume auto"):
        find(folder, "latest")
    with pytest.raises(SettingsError, match="nowhere"):
        find(folder, "nowhere")
    path = write(folder, 3)
    other = tmp_path / "other"
    for resume in (str(path), str(folder), str(tmp_path)):
        assert find(other, resume) == path


def save_for_ever(folder: str) -> None:
    """Save a checkpoint after the other."""
    torch.set_num_threads(1)
    for step in range(1, 10_000):
        write(Path(folder), step, keep_last=1 + step % 2)


@pytest.mark.slow
def test_killed_at_any_moment_there_is_a_whole_one(tmp_path: Path) -> None:
    write(tmp_path, 0)
    context = multiprocessing.get_context("forkserver")
    drafts = 0
    for kill in range(8):
        process = context.Process(target=save_for_ever, args=(str(tmp_path),))
        before = (tmp_path / "latest").stat().st_mtime_ns
        process.start()
        assert process.pid is not None
        limit = time.monotonic() + 300
        while (tmp_path / "latest").stat().st_mtime_ns == before and time.monotonic() < limit:
            time.sleep(0.001)
        time.sleep(random.Random(kill).uniform(0, 0.1))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        drafts += any(name.endswith(".tmp") for name in names(tmp_path))
        newest = find(tmp_path, "latest")
        assert newest is not None
        model, optimizer = parts()
        state = load(newest, towers=model, optimizer=optimizer, world=World())
        assert f"step_{state['step']:08d}" == newest.name.removesuffix(".old")
        load_file(newest / "open_clip_model.safetensors")
        json.loads((newest / MARKER).read_text())
    assert drafts, "no kill hit a save that was being written"


def test_a_full_disk_is_a_warning_and_the_older_one_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(tmp_path)], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("needs the right to mount a small file system")
    try:
        first = write(tmp_path, 1)
        needed = shutil.disk_usage(tmp_path).used
        for left in (0, needed // 4, needed // 2, needed * 3 // 4):
            (tmp_path / "ballast").write_bytes(bytes(max(0, shutil.disk_usage(tmp_path).free - left)))
            assert write(tmp_path, 2) is None, left
            warning = capsys.readouterr().err
            assert "full" in warning and "step_00000001" in warning
            (tmp_path / "ballast").unlink()
            assert find(tmp_path, "latest") == first
            assert names(tmp_path) == ["latest", "step_00000001"]
        assert write(tmp_path, 3) is not None
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(OSError):
        write(tmp_path / "checkpoints", 1)
