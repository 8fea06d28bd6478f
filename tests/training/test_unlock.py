"""Towers that are trained from a step on: what trains when, and runs that resume before, at and after that step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from clipstream.cli.verbs.train import main
from tests.support.model_files import VIT, build, write
from tests.support.pictures import make_shards
from tests.support.ranks import end_ranks
from tests.support.runs import MODEL, flags, lines, same_weights, train_on, weights
from tests.support.sharded import FSDP, LAYERS

AT, STEPS = 2, 4
LOCKED = ("--lock-image", "--model.unlock-image-at", str(AT), "--checkpoint.keep-last", "9", "--checkpoint.every", "1")
RESNET = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 4}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unlock")
    make_shards(folder / "pairs", [21, 17, 19, 5])
    (folder / "vit.json").write_text(json.dumps({**MODEL, **LAYERS}))
    (folder / "resnet.json").write_text(json.dumps({**MODEL, "vision_cfg": RESNET}))
    return folder


def go(place: Path, name: str, *more: str, ranks: int = 1, resume: str = "") -> None:
    """A run with a locked image tower; `resume` is RUN/STEP of the checkpoint that it begins from."""
    run, _, step = resume.partition("/")
    from_ = ["--checkpoint.resume", f"{place}/runs/{run}/checkpoints/step_{int(step):08d}"] if resume else []
    argv = flags(place, name, *LOCKED, *from_, *more, steps=STEPS)
    if ranks == 1:
        assert main(argv) == 0
    else:
        ends = end_ranks(ranks, train_on, argv)
        assert [end.code for end in ends] == [0] * ranks, ends[0].stderr


def moved(place: Path, name: str, step: int) -> set[str]:
    """The towers whose weights differ between two checkpoints, of `step` and of the step before."""
    before, after = weights(place, name, step - 1), weights(place, name, step)
    changed = [key for key in after if not torch.equal(before[key], after[key])]
    return {"image" if key.startswith("visual.") else "text" for key in changed if key != "logit_scale"}


def trains(place: Path, name: str, step: int) -> set[str]:
    """The towers that a step, counted from 1, changed; the checkpoint before the first is not there."""
    before, after = weights(place, name, step - 1), weights(place, name, step)
    changed = [key for key in after if not torch.equal(before[key], after[key])]
    return {"image" if key.startswith("visual.") else "text" for key in changed if key != "logit_scale"}


CASES = {
    "vit": ["--train.ema", "0.9", "--train.micro-batch-size", "10", "--force-patch-dropout", "0.5"],
    "resnet": ["--lock-text", "--model.unlock-text-at", "3"],
}


@pytest.mark.parametrize("name", CASES)
def test_a_resume_before_at_and_after_the_step_changes_no_bit(name: str, place: Path) -> None:
    more = ["--model", f"{place}/{name}.json", *CASES[name]]
    go(place, name, *more)
    text_at = 3 if "--lock-text" in more else 0
    for step in range(2, STEPS + 1):
        expected = {"image": step > AT, "text": step > text_at}
        assert trains(place, name, step) == {tower for tower, trained in expected.items() if trained}
    for step in (1, AT, 3) if name == "vit" else (AT,):
        again = f"{name}-{step}"
        go(place, again, *more, resume=f"{name}/{step}")
        assert lines(place, again) == lines(place, name)[step:]
        for file in ("open_clip_model", *(["averaged"] if name == "vit" else [])):
            assert same_weights(weights(place, again, STEPS, file), weights(place, name, STEPS, file))


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        pytest.param("vit", ["--train.micro-batch-size", "5"], id="ddp", marks=pytest.mark.slow),
        pytest.param("vit", [*FSDP, "--train.micro-batch-size", "5"], id="fsdp", marks=pytest.mark.ci),
    ],
)
def test_two_ranks_equal_one_and_resume_exactly(model: str, parallel: list[str], place: Path) -> None:
    name = f"{model}-{len(parallel)}"
    more = ["--model", f"{place}/{model}.json", "--precision", "fp64", "--optim.grad-clip-norm", "0.5"]
    go(place, f"{name}-one", *more)
    go(place, f"{name}-two", *more, *parallel, ranks=2)
    one, two = weights(place, f"{name}-one", STEPS), weights(place, f"{name}-two", STEPS)
    for key, tensor in one.items():
        torch.testing.assert_close(two[key], tensor, rtol=0, atol=1e-10)
    assert [trains(place, f"{name}-two", step) for step in (2, 3)] == [{"text"}, {"image", "text"}]
    go(place, f"{name}-again", *more, *parallel, ranks=2, resume=f"{name}-two/{3 if parallel else 1}")
    assert same_weights(weights(place, f"{name}-again", STEPS), two)


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


def test_steps_that_never_come_and_towers_without_a_lock_are_errors(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(place, "late", "--lock-image", "--model.unlock-image-at", "8", steps=8)) == 2
    assert "step 8 is never reached: the run has 8" in capsys.readouterr().err
    assert main(flags(place, "open", "--model.unlock-text-at", "3")) == 2
    assert "unlock-text-at: requires --lock-text" in capsys.readouterr().err
