"""A checkpoint is complete or invalid, and a run resumes from it bit for bit."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import socket
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from clipstream.checkpoint.resume import agree
from clipstream.checkpoint.state import OPTIMIZER, RANDOM, STATE, WEIGHTS, OpenClipCheckpoint, load, read_meta
from clipstream.checkpoint.store import MARKER, fault, find, locate, markers
from clipstream.data.order.lanes import Cursor, DataState, LaneState
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.training.optim import AdamW
from clipstream.training.state import TrainState
from clipstream.training.step import TrainStep
from tests.support.ranks import run_ranks
from tests.support.savers import damage, names, parts, saver_of, write
from tests.support.steps import LOSSES, TinyTowers, make_batch

FILES = sorted([MARKER, WEIGHTS, OPTIMIZER, RANDOM, STATE, "open_clip_config.json"])


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
            data = DataState(number, lanes={world.rank: LaneState(number, [Cursor(window=number)])})
            saver = saver_of(Path(folder), world, model=(model, optimizer))
            saver.save(TrainState(number, samples=10 * number, data=data))
            step(make_batch(number, world.rank, world.size), lr=0.01)  # what is saved is what was there before it
            assert saver.finish()
            torch.manual_seed(99)
            model, optimizer, step = start()
            path = find(Path(folder), "latest")
            assert path is not None
            found = load(path, towers=model, optimizer=optimizer, world=world)
            assert (found.step, found.samples) == (number, 10 * number)
            expected = {rank: LaneState(number, [Cursor(window=number)]) for rank in range(world.size)}
            assert found.data == DataState(number, lanes=expected)
        losses.append(step(make_batch(number, world.rank, world.size), lr=0.01).loss)
    return losses, [p.detach() for p in model.parameters()]


def both(world: World, folder: str) -> bool:
    """Whether the interrupted run gives the bits of the undisturbed one."""
    losses, weights = resumed(world, folder, break_at=-1)
    losses_2, weights_2 = resumed(world, folder, break_at=2)
    return losses == losses_2 and all(torch.equal(a, b) for a, b in zip(weights, weights_2, strict=True))


@pytest.mark.parametrize("size", [1, 3])
def test_a_resumed_run_has_the_bits_of_the_undisturbed_one(size: int, tmp_path: Path) -> None:
    assert run_ranks(size, both, str(tmp_path)) == [True] * size


def test_files_and_random_states(tmp_path: Path) -> None:
    model = parts()
    saver = saver_of(tmp_path, model=model, recorded={"optim.lr": 1})
    saver.save(TrainState(12))
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    assert saver.finish()
    path = tmp_path / "step_00000012"
    assert names(path) == FILES and (tmp_path / "latest").read_text().strip() == path.name
    meta = read_meta(path)
    assert (
        meta.train == TrainState(12)
        and meta.settings == {"optim.lr": 1}
        and meta.versions["torch"] == torch.__version__
    )
    load(path, towers=model[0], optimizer=model[1], world=World())
    assert [random.random(), float(np.random.rand()), float(torch.rand(()))] == drawn


@pytest.mark.parametrize("fused", [True, False])
def test_moments_of_the_fused_optimizer_and_of_the_plain_one_are_the_same(fused: bool, tmp_path: Path) -> None:
    """A run goes on with the other kind, as with its own, also where weights have other strides than in a file."""

    def weights(then: bool, folder: Path) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = TinyTowers()
        model.clip.text[1].weight.data = model.clip.text[1].weight.data.t().contiguous().t()
        for number, kind in enumerate((fused, then)):
            optimizer = AdamW.Settings(fused=kind).build(model, "ViT")
            if number:
                load(folder / "step_00000001", towers=model, optimizer=optimizer, world=World())
                assert optimizer.param_groups[0]["fused"] is kind
            TrainStep(model, LOSSES["clip"], optimizer, World())(make_batch(number, 0, 1), lr=0.01)
            saver = saver_of(folder, model=(model, optimizer))
            saver.save(TrainState(number + 1))
            assert saver.finish()
        return [parameter.detach() for parameter in model.parameters()]

    same, other = (weights(then, tmp_path / str(then)) for then in (fused, not fused))
    for a, b in zip(same, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_contents_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path, other = write(tmp_path, 1), TinyTowers("siglip")
    assert path is not None
    with pytest.raises(SettingsError, match="does not match the model and optimizer"):
        load(path, towers=other, optimizer=AdamW.Settings().build(other, "ViT"), world=World())
    for content in (pickle.dumps(Path("x"), 2), b"no pickle"):
        (path / RANDOM).write_bytes(content)
        model, optimizer = parts()
        with pytest.raises(SettingsError, match=r"rng.pt in .* use another checkpoint"):
            load(path, towers=model, optimizer=optimizer, world=World())
    model, optimizer = parts()
    with torch.no_grad():
        model.clip.words.weight[0, 0] = torch.inf
    saver = saver_of(tmp_path, model=(model, optimizer))
    saver.save(TrainState(2))
    assert saver.finish()
    fresh, new = parts()
    with pytest.raises(SettingsError, match=r"model.safetensors holds weights that are NaN or infinite: words.weight;"):
        load(tmp_path / "step_00000002", towers=fresh, optimizer=new, world=World())


@pytest.mark.parametrize("version", [None, 0, 2])
def test_a_checkpoint_of_another_format_is_refused(version: int | None, tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    assert path is not None
    content = json.loads((path / STATE).read_text())
    assert content.pop("version") == 1
    (path / STATE).write_text(json.dumps(content if version is None else {**content, "version": version}))
    model, optimizer = parts()
    weights = model.clip.words.weight.detach().clone()
    for read in (lambda: read_meta(path), lambda: load(path, towers=model, optimizer=optimizer, world=World())):
        with pytest.raises(SettingsError, match=rf"format {version or 0}, but .* reads 1: .* --pretrained local-"):
            read()
    assert torch.equal(model.clip.words.weight, weights)


def test_keeps_the_newest_and_multiples(tmp_path: Path) -> None:
    saver = saver_of(tmp_path, every=4, keep_every=6, keep_last=1)
    due = [step for step in range(1, 21) if saver.due(step)]
    assert due == [4, 6, 8, 12, 16, 18, 20]
    for step in due:
        saver.save(TrainState(step))
    assert saver.finish()
    assert names(tmp_path) == ["latest", *(f"step_{step:08d}" for step in (6, 12, 18, 20))]


def test_the_newest_is_the_last_written_not_the_highest_step(tmp_path: Path) -> None:
    """A run that went on from an older checkpoint, and came to step 10 again."""
    for step in (5, 10, 15):
        write(tmp_path, step, keep_last=9)
    write(tmp_path, 10, keep_last=9, samples=7)
    newest = find(tmp_path, "latest")
    assert newest == tmp_path / "step_00000010" and read_meta(newest).train.samples == 7
    assert names(tmp_path) == ["latest", "step_00000005", "step_00000010", "step_00000015"]


def test_what_is_not_whole_is_not_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step, keep_last=9)
    assert find(tmp_path, "latest") == tmp_path / "step_00000003"
    assert capsys.readouterr().err == ""
    os.truncate(tmp_path / "step_00000003" / OPTIMIZER, 100)
    assert find(tmp_path, "auto") == tmp_path / "step_00000002"
    assert "step_00000003 is damaged" in capsys.readouterr().err
    (tmp_path / "step_00000002" / MARKER).unlink()
    shutil.copytree(tmp_path / "step_00000001", tmp_path / "step_00000009.tmp")
    assert find(tmp_path, "latest") == tmp_path / "step_00000001"
    with pytest.raises(SettingsError, match="no complete checkpoint"):
        find(tmp_path, str(tmp_path / "step_00000002"))
    write(tmp_path, 4, keep_last=9)
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000004"]
    for step in (1, 4):
        (tmp_path / f"step_{step:08d}" / OPTIMIZER).unlink()
    with pytest.raises(SettingsError, match=r"all checkpoints .* are incomplete \(.*step_00000004"):
        find(tmp_path, "auto")


@pytest.mark.parametrize("file", [name for name in FILES if name != MARKER])
def test_a_changed_byte_is_found_and_the_one_before_taken(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        write(tmp_path, step)
    damage(tmp_path / "step_00000002" / file)
    for resume in ("latest", "auto", str(tmp_path)):
        assert find(tmp_path, resume) == tmp_path / "step_00000001"
        told = capsys.readouterr().err
        assert f"step_00000002 is damaged ({file} does not match its checksum)" in told
        assert "using the previous one: step_00000001" in told
    with pytest.raises(SettingsError, match=f"step_00000002 is damaged: {file} does not match its checksum"):
        find(tmp_path, str(tmp_path / "step_00000002"))
    write(tmp_path, 3)
    assert find(tmp_path, "latest") == tmp_path / "step_00000003"


def agreed(world: World, folder: str) -> tuple[str, str]:
    """What a rank goes on from that looks in a folder of its own; its error if its disk is another one."""
    root = Path(folder)
    found = str(agree(partial(find, root, str(root / str(world.rank))), world))
    try:
        agree(lambda: root / f"step_0000000{world.rank}", World(world.rank, world.size))
    except SettingsError as error:
        return found, str(error)
    return found, ""


def test_ranks_agree_on_a_checkpoint_that_all_see(tmp_path: Path) -> None:
    written = write(tmp_path / "0", 7)
    for found, said in run_ranks(2, agreed, str(tmp_path)):
        assert found == str(written) and "must be shared by all nodes" in said


def of_own(world: World, root: str, resume: str) -> str:
    """The error of a rank whose host has a folder of its own for runs, or what the ranks go on from."""
    here = Path(root, str(world.rank))
    found = partial(find, here, resume.format(here))
    try:
        return str(agree(found, world, here))
    except SettingsError as error:
        return str(error)


@pytest.mark.parametrize(
    ("steps", "resume"),
    [(((), (40,)), "auto"), (((20,), (20, 40)), "auto"), (((20,), (40,)), "auto"), (((), (40,)), "latest")],
)
def test_folders_that_the_hosts_do_not_share_are_refused(
    tmp_path: Path, steps: tuple[tuple[int, ...], ...], resume: str
) -> None:
    """Whichever host has the newer checkpoint: rank 0 alone would begin anew, or lose steps."""
    for rank, own in enumerate(steps):
        for step in own:
            write(tmp_path / str(rank), step)
    name = socket.gethostname()
    for said in run_ranks(2, of_own, str(tmp_path), resume):
        assert f"--resume: rank 1 ({name})" in said and f"rank 0 ({name})" in said
        assert "step_000000" in said and "must be shared by all nodes" in said


def test_a_shared_folder_whose_newest_checkpoint_is_damaged(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path / "0", step)
    damage(tmp_path / "0/step_00000002" / WEIGHTS)
    (tmp_path / "1").symlink_to(tmp_path / "0")
    said = run_ranks(2, of_own, str(tmp_path), "auto")
    assert said == [str(tmp_path / "0/step_00000001")] * 2


@pytest.mark.parametrize("file", [MARKER, WEIGHTS])
def test_a_checkpoint_that_cannot_be_read_is_neither_removed_nor_passed_over(tmp_path: Path, file: str) -> None:
    """As of a disk that fails, or a server that is away; here a link to itself (ELOOP)."""
    for step in (1, 2):
        write(tmp_path, step)
    path = tmp_path / "step_00000002" / file
    content = path.read_bytes()
    path.unlink()
    path.symlink_to(path)
    for resume in ("latest", "auto", str(tmp_path), str(path.parent)):
        with pytest.raises(SettingsError, match=f"--resume.*: cannot read .*step_00000002/{file}: Too many levels"):
            agree(partial(find, tmp_path, resume), World())
    with pytest.raises(SettingsError, match="cannot read"):
        locate(str(path.parent))
    for step in (3, 4):
        write(tmp_path, step, keep_last=1)
    path.unlink()
    path.write_bytes(content)
    assert list(markers(tmp_path)) == ["step_00000004", "step_00000002"], "newest first"


def test_which_one_to_resume_from(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert find(folder, None) is None and find(folder, "auto") is None
    with pytest.raises(SettingsError, match="--resume auto"):
        find(folder, "latest")
    with pytest.raises(SettingsError, match="nowhere"):
        find(folder, "nowhere")
    path = write(folder, 3)
    other = tmp_path / "other"
    for resume in (str(path), str(folder), str(tmp_path), str(folder / "latest")):
        assert find(other, resume) == path
    with pytest.raises(SettingsError, match="not a checkpoint of clipstream or of open_clip's trainer"):
        OpenClipCheckpoint.read(find(other, str(folder / "step_00000003" / STATE)) or Path())


def test_a_crash_between_the_renames_of_a_new_save_of_a_step(tmp_path: Path) -> None:
    write(tmp_path, 3)
    (tmp_path / "step_00000003").rename(tmp_path / "step_00000003.old")
    aside = tmp_path / "step_00000003.old"
    assert find(tmp_path, "latest") == aside == find(tmp_path, str(tmp_path / "latest"))
    write(tmp_path, 4)
    assert names(tmp_path) == ["latest", "step_00000003", "step_00000004"]
    assert fault(tmp_path / "step_00000003") is None
