"""Non-finite steps are skipped, counted and listed; after several in a row the run rolls back or ends."""

from __future__ import annotations

import json
import math
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import Field

from clipstream.data.batch import Batch
from clipstream.distributed.world import World
from clipstream.errors import DivergedError
from clipstream.losses.contrastive import SoftmaxLoss
from clipstream.losses.settings import ClipLossSettings, LossSettings
from clipstream.report.html_report import read_run
from clipstream.report.records import scalars
from clipstream.training.settings import TrainSettings
from clipstream.training.step import StepResult
from clipstream.training.trainer import Rollback
from tests.support.ranks import end_ranks
from tests.support.runs import flags, furnish, go, lines, same_weights, train_on, weights
from tests.support.steps import assert_close

COURSE = [2, 6, 7, 8]  # steps that break
FINE = StepResult(1.0, 1.0, 10.0, 24)
BROKEN = StepResult(math.nan, math.nan, 10.0, 24, skipped=True)
OVERFLOW = StepResult(1.0, math.inf, 10.0, 24, loss_scale=1.0, overflow=True)


class Broken:
    """The softmax loss, but not a number on the last rank for the batches of some steps."""

    class Settings(LossSettings):
        """Which: the numbers that the training lines have for them."""

        steps: list[int] = Field(default_factory=list)

    def __init__(self, settings: Settings) -> None:
        self.steps, self.max_logit_scale = settings.steps, 100.0
        self.clip = SoftmaxLoss(ClipLossSettings())

    def __call__(self, features: Any, batch: Batch, world: World) -> torch.Tensor:
        """As SoftmaxLoss."""
        share = self.clip(features, batch, world)
        return share * math.nan if batch.step + 1 in self.steps and world.rank == world.size - 1 else share


class Folder(list[int]):
    """Steps of checkpoints that are there; what was put back."""

    def __init__(self, *steps: int) -> None:
        super().__init__(steps)
        self.restored: list[int] = []

    def __call__(self, good: Any) -> int | None:
        """As the trainer's way to put a checkpoint back."""
        found = max((step for step in self if step in good), default=None)
        self.restored += [] if found is None else [found]
        return found


def test_it_goes_back_to_weights_that_gave_a_finite_loss() -> None:
    folder = Folder()
    rollback = Rollback(TrainSettings(max_nonfinite=3), folder)

    def take(step: int, result: StepResult) -> int | None:
        found = rollback.on_step(step, result)
        if step % 4 == 0 and not rollback.state.nonfinite:
            folder.append(step)
            rollback.on_save(step)
        return found

    course = [FINE] * 5 + [BROKEN] * 2 + [FINE] + [BROKEN, OVERFLOW, BROKEN, BROKEN] + [FINE] * 9 + [BROKEN] * 3
    found = [take(step, result) for step, result in enumerate(course, 1)]
    # The checkpoint of step 8 is as bad as what came of it; the second time, that of step 20 was proven.
    assert [(step, to) for step, to in enumerate(found, 1) if to is not None] == [(12, 4), (24, 20)]
    assert folder.restored == [4, 20] and 8 in folder


def test_it_ends_where_returns_do_not_help_and_counts_them_anew_after_progress() -> None:
    rollback = Rollback(TrainSettings(max_nonfinite=1, max_rollbacks=2), folder := Folder(3, 20))
    rollback.on_save(3)
    assert [rollback.on_step(5, FINE), rollback.on_step(6, BROKEN), rollback.on_step(7, BROKEN)] == [None, 3, 3]
    with pytest.raises(DivergedError, match="did not help: lower --lr"):
        Rollback(TrainSettings(max_nonfinite=1), folder, deepcopy(rollback.state)).on_step(8, BROKEN)
    again = Rollback(TrainSettings(max_nonfinite=1), folder, deepcopy(rollback.state))
    again.on_save(20)
    assert [again.on_step(21, FINE), again.on_step(22, BROKEN), again.on_step(23, BROKEN)] == [None, 20, 20]


@pytest.mark.parametrize(
    ("settings", "saved", "there", "told"),
    [
        ({}, [], [], "there is no checkpoint from before"),
        ({}, [2], [], "there is no checkpoint from before"),
        ({}, [4], [4], "there is no checkpoint from before"),  # its weights gave nothing finite
        ({"max_rollbacks": 0}, [2], [2], "not finite for 1 step in a row: lower --lr"),
    ],
)
def test_it_ends_without_a_way_back(settings: dict[str, Any], saved: list[int], there: list[int], told: str) -> None:
    rollback = Rollback(TrainSettings(max_nonfinite=1, **settings), Folder(*there))
    for step in saved:
        rollback.on_save(step)
    rollback.on_step(4, FINE)
    with pytest.raises(DivergedError, match=told):
        rollback.on_step(5, BROKEN)


def test_a_run_that_never_took_a_step_ends_as_diverged() -> None:
    rollback = Rollback(TrainSettings(max_nonfinite=9), Folder())
    rollback.on_end(0)
    rollback.on_step(1, BROKEN)
    rollback.on_step(2, OVERFLOW)
    with pytest.raises(DivergedError, match=r"none of 2 steps gave finite gradients.*--pretrained"):
        rollback.on_end(2)
    resumed = Rollback(TrainSettings(), Folder(), deepcopy(rollback.state))
    assert not resumed.state.applied
    resumed.on_step(3, FINE)
    resumed.on_end(3)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, `whole`, that went back once."""
    folder = furnish(tmp_path_factory.mktemp("recovery"))
    go(breaking(folder, "whole", COURSE, "--train.ema", "0.9"))
    return folder


def breaking(place: Path, name: str, steps: list[int], *more: str, of: int = 12) -> list[str]:
    """A run's command line whose loss breaks in some steps."""
    loss = ["--loss.type", "tests.training.test_rollback:Broken", "--loss.steps", str(steps), "--precision", "fp64"]
    return flags(place, name, *loss, "--train.max-nonfinite", "3", "--checkpoint.keep-last", "9", *more, steps=of)


def test_what_a_run_leaves_of_it(place: Path) -> None:
    whole, folder = "whole", place / "runs/whole"
    listed = [json.loads(line) for line in (folder / "nonfinite.jsonl").read_text().splitlines()]
    assert [line["step"] for line in listed] == COURSE and all(len(line["keys"]) == 24 for line in listed)
    assert listed[0]["keys"][0] == "00001.tar/000021" and (listed[0]["loss"], listed[0]["grad_norm"]) == ("nan", "nan")
    training = lines(place, whole)
    assert dict(scalars(training[1]))["train/skipped"] == 1
    assert [line["skipped"] for line in training] == [int(step in COURSE) for step in range(1, 13)]
    assert [line["step"] for line in training if line["loss"] is None] == COURSE
    assert [line["samples"] for line in training] == [24 * step for step in range(1, 13)]
    assert lines(place, whole, "rollback") == [{"step": 8, "rollback": {"to": 4, "skipped": 3}}]
    assert same_weights(weights(place, whole, 8), weights(place, whole, 4))
    assert not same_weights(weights(place, whole, 10), weights(place, whole, 4))
    assert read_run(folder).rollbacks == [{"step": 8, "to": 4, "skipped": 3}]
    page, said = (folder / "report.html").read_text(), (folder / "out.log").read_text()
    assert "step 2 is left out: loss nan, norm of the gradients nan; its samples: 00001.tar/000021, " in said
    assert " and 20 more in nonfinite.jsonl" in said
    assert "3 steps in a row were left out: back to the weights of step 4" in said
    assert "at step 8 back to the weights of step 4" in page and "skipped steps" in page


@pytest.mark.parametrize("step", [4, 8])
def test_a_run_killed_around_a_return_goes_on_with_the_same_bits(place: Path, step: int) -> None:
    """The folder as a kill leaves it before the next checkpoint is whole."""
    name, folder = f"killed-{step}", place / "runs" / f"killed-{step}"
    shutil.copytree(place / "runs/whole", folder)
    for checkpoint in (folder / "checkpoints").glob("step_*"):
        if int(checkpoint.name[-8:]) > step:
            shutil.rmtree(checkpoint)
    (folder / "checkpoints" / "latest").write_text(f"step_{step:08d}\n")
    go(breaking(place, name, COURSE, "--train.ema", "0.9", "--resume", "auto"))
    for key in ("loss", "rollback"):
        assert lines(place, name, key) == lines(place, "whole", key)
    assert (folder / "nonfinite.jsonl").read_text() == (place / "runs/whole/nonfinite.jsonl").read_text()
    for file in ("open_clip_model", "averaged"):
        assert same_weights(weights(place, name, 12, file), weights(place, "whole", 12, file))


def test_it_is_the_same_on_other_ranks_and_in_micro_batches(place: Path) -> None:
    more = ["--train.ema", "0.9", "--train.parallel", "fsdp", "--train.micro-batch-size", "5"]
    go(breaking(place, "other", COURSE, *more), 2)
    assert lines(place, "other", "rollback") == lines(place, "whole", "rollback")
    for mine, theirs in zip(lines(place, "other"), lines(place, "whole"), strict=True):
        ours, wanted = ({k: v for k, v in line.items() if v is not None} for line in (mine, theirs))
        assert ours == pytest.approx(wanted, rel=1e-9)
    for file in ("open_clip_model", "averaged"):
        assert_close(weights(place, "other", 12, file), weights(place, "whole", 12, file), 1e-9)


def test_it_ends_with_code_4_on_all_ranks(place: Path) -> None:
    ends = end_ranks(2, train_on, breaking(place, "lost", list(range(4, 99)), of=99))
    assert [end.code for end in ends] == [4, 4]
    for word in ("did not help", "--lr", "--grad-clip-norm", "--precision", "nonfinite.jsonl"):
        assert word in ends[0].stderr
    assert "Traceback" not in ends[0].stderr
    # 3 steps, and after each of two returns 3 more
    assert len((place / "runs/lost/nonfinite.jsonl").read_text().splitlines()) == 9


def test_a_run_without_any_applied_step_saves_nothing_and_blames_no_sample(place: Path) -> None:
    ends = end_ranks(2, train_on, breaking(place, "never", [1, 2], of=2))  # fewer steps than max_nonfinite
    assert [end.code for end in ends] == [4, 4]
    assert "nothing was trained or saved" in ends[0].stderr and "nonfinite.jsonl" not in ends[0].stderr
    assert not list((place / "runs/never/checkpoints").glob("step_*"))


def test_weights_that_became_infinite_are_never_saved(place: Path) -> None:
    argv = flags(place, "blown", "--wd", "1e300", "--checkpoint.every", "1", "--train.parallel", "fsdp", steps=3)
    ends = end_ranks(2, train_on, argv)
    assert [end.code for end in ends] == [4, 4], ends[0].stderr
    assert "the weights after step 3 are NaN or infinite, and are not saved" in ends[0].stderr
    assert not list((place / "runs/blown/checkpoints").glob("step_*"))
