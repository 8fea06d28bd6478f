"""Stages of a run: what changes at a border, exact resume across it, and what is refused at the start."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from clipstream.checkpoint.async_writer import Snapshot
from clipstream.cli.verbs.train import main
from clipstream.distributed.world import World
from clipstream.models.build import build_towers
from clipstream.models.settings import ModelSettings
from clipstream.models.weights import fit_positions
from clipstream.training.gradcache import GradCache
from tests.support.model_files import write
from tests.support.ranks import die, end_ranks
from tests.support.runs import MODEL, flags, furnish, go, lines, same_weights, train_on, weights

IMAGES = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
RESNET = {"image_size": 64, "layers": [1, 1, 1, 1], "width": 4}
STAGES = (
    "--stages.small.until=3",
    "--stages.small.set={model.image_size: 16, optim.lr: 0.002, data.augment.scale: [0.5, 1]}",
    "--stages.dropped.until=5", "--stages.dropped.set.model.patch_dropout=0.5",
    "--stages.dropped.set.tokenizer.context_length=6",
    "--train.ema=0.9", "--checkpoint.every=1", "--checkpoint.keep-last=9",
)  # fmt: skip


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `whole`, of 7 steps in three stages."""
    place = furnish(tmp_path_factory.mktemp("stages"), {**MODEL, "vision_cfg": IMAGES})
    go(flags(place, "whole", *STAGES, steps=7))
    return place


def test_each_stage_has_its_settings_and_the_last_those_of_the_run(staged: Path) -> None:
    positions = {step: weights(staged, "whole", step)["visual.positional_embedding"].shape[0] for step in range(1, 8)}
    assert positions == {1: 5, 2: 5, 3: 5, 4: 17, 5: 17, 6: 17, 7: 17}
    texts = {step: len(weights(staged, "whole", step)["positional_embedding"]) for step in (3, 4, 5, 6)}
    assert texts == {3: 8, 4: 6, 5: 6, 6: 8}
    found = lines(staged, "whole")
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6, 7] and found[2]["lr"] > 1e-3 > found[3]["lr"]
    assert "image_size: null" in (staged / "runs/whole/config.yaml").read_text()


@pytest.mark.parametrize("step", [2, 3, 4, 5])
def test_a_run_goes_on_exactly_from_any_step(staged: Path, step: int) -> None:
    name = f"from{step}"
    shutil.copytree(staged / "runs/whole", staged / "runs" / name)
    for later in range(step + 1, 8):
        shutil.rmtree(staged / f"runs/{name}/checkpoints/step_{later:08d}")
    go([*flags(staged, name, *STAGES, steps=7), "--resume", "latest"])
    for file in ("open_clip_model", "averaged", "optimizer"):
        assert same_weights(weights(staged, name, 7, file), weights(staged, "whole", 7, file))
    assert lines(staged, name)[-1] == lines(staged, "whole")[-1]


@pytest.mark.parametrize(("ranks", "more"), [(2, ["--train.parallel=fsdp"]), (3, [])])
def test_ranks_pass_the_borders_alike(staged: Path, ranks: int, more: list[str]) -> None:
    go(flags(staged, f"on{ranks}", *STAGES, *more, steps=7), ranks)
    for one, other in zip(lines(staged, "whole"), lines(staged, f"on{ranks}"), strict=True):
        # patch dropout draws on each rank
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-5 if int(one["step"]) <= 3 else 0.2)


def train_and_die(world: World, argv: list[str], place: Any, name: str, call: int) -> int:
    die(place, name, call)
    return train_on(world, argv)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("place", [GradCache, Snapshot])  # before a step; before it is saved, borders included
def test_a_run_that_is_killed_at_any_step_goes_on_exactly(staged: Path, ranks: int, place: Any) -> None:
    whole, alone = f"whole{ranks}", "--train.rescue-seconds=0"  # no rank outlives the others for a moment and saves
    if not (staged / "runs" / whole).exists():
        go(flags(staged, whole, *STAGES, alone, steps=7), ranks)
    for call in range(1, 8):
        argv = flags(staged, f"killed{ranks}-{place.__name__}-{call}", *STAGES, alone, steps=7)
        method = "take" if place is Snapshot else "__call__"
        ends = end_ranks(ranks, train_and_die, argv, place, method, call)
        assert {end.code for end in ends} == {-signal.SIGKILL}
        go([*argv, "--resume", "auto"], ranks)
        name = argv[argv.index("--name") + 1]
        for file in ("open_clip_model", "averaged", "optimizer"):
            assert same_weights(weights(staged, name, 7, file), weights(staged, whole, 7, file)), (name, file)
        assert lines(staged, name)[-1] == lines(staged, whole)[-1]


def test_the_plan_and_the_time_left_count_later_stages_by_their_flops(
    staged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = write(staged, RESNET)  # at 32 px one position is left, which batch norm refuses of a single image
    stage = ["--stages.one.until=2", "--stages.one.set.model.image_size=32"]
    go(flags(staged, "resnet", "--model", name, *stage, "--checkpoint.keep-last=9", steps=4))
    said = capsys.readouterr().out
    (small, soon), (large, late) = re.findall(r"GFLOPs a sample, (\d+)% of the run's, about ([\d.]+)s", said)
    assert int(small) + int(large) == 100 and int(small) < int(large)
    assert 0 <= float(soon) <= float(late)
    lefts = [float(left) for left in re.findall(r"eta ([\d.]+)s", said)]
    assert lefts[1] > 0.0 == lefts[-1]


def test_moments_are_resampled_with_their_positions(tmp_path: Path) -> None:
    clip = build_towers(ModelSettings(name=write(tmp_path, IMAGES)), seed=0).clip
    name = "visual.positional_embedding"
    like = clip.visual.positional_embedding
    flat = torch.full((5, like.shape[1]), 0.25, dtype=torch.bfloat16)
    assert torch.equal(fit_positions(name, flat, like, clip), torch.full(like.shape, 0.25, dtype=torch.bfloat16))
    assert fit_positions(name, like, like, clip) is like
    assert fit_positions("visual.proj", flat, clip.visual.proj, clip).shape == flat.shape  # refused where it is loaded
    resnet = build_towers(ModelSettings(name=write(tmp_path, RESNET)), seed=0).clip
    pool = resnet.visual.attnpool.positional_embedding
    flat = torch.full((2, pool.shape[1]), 0.25)
    assert torch.equal(fit_positions("visual.attnpool.positional_embedding", flat, pool, resnet), 0.25 + 0 * pool)
    assert fit_positions("positional_embedding", torch.rand(5, 32), clip.positional_embedding, clip).is_contiguous()


REFUSED = {
    "optim.type: lion": "optim.type cannot change between stages",
    "data.global_batch_size: 9": "cannot change between stages: set data.batch_schedule",
    "model.lock_image: true": "cannot change between stages: set model.unlock_image_at",
    "model.image_sise: 9": "did you mean",
    "model.image_size: big": "stages.one.set: model.image_size: ",
    "data.sources.other.weight: 2": "stages.one.set.data.sources.other.weight: the run has no other",
    "data.sources.train.shards: nowhere/*.tar": "stages.one.set: ",
}


@pytest.mark.parametrize(("value", "said"), REFUSED.items())
def test_a_border_that_cannot_be_is_refused_at_the_start(
    staged: Path, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(staged, "x", "--stages.one.until=2", f"--stages.one.set={{{value}}}")) == 2
    assert said in capsys.readouterr().err and not (staged / "runs/x").exists()
