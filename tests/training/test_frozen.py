"""Runs with frozen towers: what checkpoints hold, towers that are trained from a step on, and cached features."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clipstream.models.build import build_towers
from clipstream.models.settings import ModelSettings
from tests.support.model_files import VIT, build, write
from tests.support.runs import flags, go, lines, same_weights, weights

RESNET = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 4}


def trained(place: Path, name: str, step: int) -> set[str]:
    """The towers that a step, counted from 1, changed; the checkpoint before the first is not there."""
    before, after = weights(place, name, step - 1), weights(place, name, step)
    changed = [key for key in after if not torch.equal(before[key], after[key])]
    return {"image" if key.startswith("visual.") else "text" for key in changed if key != "logit_scale"}


EVERY = ("--train.ema", "0.9", "--checkpoint.every", "1", "--checkpoint.keep-last", "9")


def test_checkpoints_hold_the_weights_as_they_were_and_resume_exactly(place: Path) -> None:
    own = ("--lock-image", "--model.image.precision", "bf16", *EVERY)
    go(flags(place, "one", *own, steps=3))
    initial = build_towers(ModelSettings(name=f"{place}/model.json"), seed=0).clip.state_dict()
    go(flags(place, "two", *own, "--checkpoint.resume", f"{place}/runs/one/checkpoints/step_00000001", steps=3))
    assert lines(place, "two") == lines(place, "one")[1:]
    for file in ("open_clip_model", "averaged"):
        saved = weights(place, "one", 3, file)
        assert saved.keys() == initial.keys() and {tensor.dtype for tensor in saved.values()} == {torch.float32}
        for name, tensor in initial.items():
            assert torch.equal(saved[name], tensor) == name.startswith("visual.")
        assert same_weights(weights(place, "two", 3, file), saved)


def test_a_tower_that_is_trained_from_a_step_on_resumes_exactly(place: Path) -> None:
    locks = ("--lock-image", "--model.unlock-image-at", "2", "--lock-text", "--model.unlock-text-at", "3", *EVERY)
    go(flags(place, "unlock", *locks, steps=4))
    assert [trained(place, "unlock", step) for step in (2, 3, 4)] == [set(), {"image"}, {"image", "text"}]
    go(flags(place, "again", *locks, "--checkpoint.resume", f"{place}/runs/unlock/checkpoints/step_00000002", steps=4))
    assert lines(place, "again") == lines(place, "unlock")[2:]
    for file in ("open_clip_model", "averaged"):
        assert same_weights(weights(place, "again", 4, file), weights(place, "unlock", 4, file))


def test_cached_features_change_no_loss(place: Path) -> None:
    more = ["--lock-image", "--data.augment.enabled=false", "--train.micro-batch-size=5", "--precision=fp64"]
    go(flags(place, "plain", *more, steps=4))
    go(flags(place, "cached", *more, "--model.image.cache-gib", "0.001", steps=4))
    assert "features of the image tower in 0.001 GiB a rank" in (place / "runs/cached/out.log").read_text()
    for one, other in zip(lines(place, "plain"), lines(place, "cached"), strict=True):
        assert other == pytest.approx(one, abs=1e-10)


def test_a_locked_tower_is_in_evaluation_mode_until_its_step(tmp_path: Path) -> None:
    towers = build(write(tmp_path, RESNET), lock_image=True, unlock_image_at=3, lock_text=True).train()
    assert towers.has_batch_norm and not towers.frozen & set(towers.clip.visual.modules())
    towers.toggle(towers.changing_locks(2))
    assert not towers.changing_locks(2) and not towers.train().clip.visual.bn1.training
    assert not any(parameter.requires_grad for parameter in towers.clip.visual.parameters())
    towers.toggle(towers.changing_locks(3))
    assert towers.clip.visual.bn1.training and towers.clip.visual.bn1.weight.requires_grad
    assert not towers.clip.transformer.training and not towers.clip.text_projection.requires_grad


def test_groups_that_train_from_the_beginning_are_not_locked(tmp_path: Path) -> None:
    towers = build(write(tmp_path, VIT), lock_image=True, unlocked_groups=2, unlock_image_at=3)
    towers.toggle(towers.changing_locks(0))
    assert towers.clip.visual.proj.requires_grad and not towers.clip.visual.conv1.weight.requires_grad
    towers.toggle(towers.changing_locks(3))
    assert towers.clip.visual.conv1.weight.requires_grad
