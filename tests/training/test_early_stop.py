"""Early stopping: when a run ends, on several ranks, after a kill, and what it leaves."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from clipstream.cli.verbs.train import main
from clipstream.config.settings import read
from clipstream.config.validate import validate_run
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.evals.settings import EvalSettings
from clipstream.training.settings import EarlyStop, EarlyStopSettings
from tests.support.runs import flags, furnish, go, lines, same_weights, weights

VALUES = [1.0, 0.5, 0.7, 0.5, 0.8, 0.4, 0.9, 0.9, 0.9]  # evaluated every 2 steps: the best by step 10 is that of step 4


class Told:
    """An evaluator whose values are told: the next one to each evaluation that the run's metrics do not have yet."""

    class Settings(EvalSettings):
        """Where the metrics are."""

        metrics: str
        key: str

    def __init__(self, settings: Any) -> None:
        self.path, self.key = Path(settings.metrics), settings.key

    def __call__(self, context: Any) -> Iterator[tuple[str, float]]:
        """Yields val_loss; ranks differ in the last digits, as sums do."""
        there = [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []
        count = sum(line.get("eval") == self.key for line in there)
        yield "val_loss", VALUES[min(count, len(VALUES) - 1)] + 1e-9 * context.world.rank * (-1) ** count


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an undisturbed run that ended, `ended`."""
    folder = furnish(tmp_path_factory.mktemp("early"))
    go(until(folder, "ended"))
    return folder


def until(place: Path, name: str, *more: str, steps: int = 100) -> list[str]:
    """A run until told's val_loss gets no better, with a second evaluator at the end."""
    evals = place / f"{name}.yaml"
    told = {"type": "tests.training.test_early_stop:Told", "every": 2, "key": "told", "on_error": "raise"}
    told["metrics"] = f"{place}/runs/{name}/metrics.jsonl"
    evals.write_text(yaml.safe_dump({"evals": {"told": told}, "schedule": {"type": "constant"}}))
    more = ("--val-data", f"{place}/val/*.tar", "--train.early-stop.metric", "told/val_loss", *more)
    return ["--config", str(evals), *flags(place, name, "--checkpoint.every", "3", *more, steps=steps)]


def same(place: Path, name: str) -> None:
    for key in ("loss", "eval", "end"):
        assert lines(place, name, key) == lines(place, "ended", key)


def test_a_run_ends_when_it_gets_no_better(place: Path) -> None:
    folder = place / "runs/ended"
    assert [line["step"] for line in lines(place, "ended")] == list(range(1, 11))
    assert [(line["eval"], line["step"]) for line in lines(place, "ended", "eval")] == [
        *(("told", step) for step in (2, 4, 6, 8, 10)), ("val", 10)
    ]  # fmt: skip
    stop = {"metric": "told/val_loss", "evaluations": 3, "best": 0.5, "best_step": 4}
    end = {"status": "done", "code": 0, "error": None, "total_steps": 100, "early_stop": stop}
    assert lines(place, "ended", "end") == [{"step": 10, "end": end}]
    assert (folder / "checkpoints" / "latest").read_text().strip() == "step_00000010"
    assert (folder / "checkpoints" / "best").read_text().startswith("step_00000004\n")
    assert (folder / "checkpoints" / "step_00000004" / "COMPLETE").exists()
    said, why = (folder / "out.log").read_text(), "has not improved since step 4 (0.5), in 3 evaluations"
    assert "or until told/val_loss is no better in 3 evaluations in a row" in said
    for page in (said, (folder / "report.html").read_text()):
        assert f"ended at step 10: told/val_loss {why}" in page
    assert f"best at step 4: told/val_loss 0.5, {folder}/checkpoints/step_00000004\n" in said


def test_the_same_command_again_changes_nothing_and_more_patience_goes_on(place: Path) -> None:
    shutil.copytree(place / "runs/ended", place / "runs/twice")
    go(until(place, "twice", "--resume", "auto"))
    same(place, "twice")
    go(until(place, "twice", "--resume", "auto", "--train.early-stop.patience", "4"))
    told = [line["step"] for line in lines(place, "twice", "eval") if line["eval"] == "told"]
    assert told[5:] == [12, 14, 16, 18, 20]
    assert lines(place, "twice", "end")[-1]["end"]["early_stop"]["best_step"] == 12


def test_a_killed_run_ends_where_it_would_have_ended(place: Path) -> None:
    """The folder as a kill leaves it before the checkpoint of step 9 is whole."""
    shutil.copytree(place / "runs/ended", place / "runs/killed")
    for step in (9, 10):
        (place / "runs/killed/checkpoints" / f"step_{step:08d}" / "COMPLETE").unlink()
    go(until(place, "killed", "--resume", "auto"))
    same(place, "killed")
    assert same_weights(weights(place, "killed", 10), weights(place, "ended", 10))


def test_ranks_end_together_although_their_figures_differ(place: Path) -> None:
    go(until(place, "two"), 2)
    assert lines(place, "two", "end") == lines(place, "ended", "end")


def heard(stop: EarlyStop, *values: float | None) -> EarlyStop:
    """After evaluations at steps 10, 20, …; None failed."""
    for number, value in enumerate(values, 1):
        metrics = {"error": "no data"} if value is None else {"top1": value}
        step = 10 * number
        stop.on_eval([{"step": step, "eval": "other", "top1": 9.9}, {"step": step, "eval": "val", **metrics}])
    return stop


@pytest.mark.parametrize(
    ("settings", "values", "stale", "stops"),
    [
        ({}, [0.1, 0.2, 0.2, 0.19], 2, False),
        ({}, [0.1, 0.2, 0.2, 0.19, 0.1], 3, True),
        ({}, [0.1, 0.05, 0.05, 0.3], 0, False),
        ({}, [0.3, None, None, None, 0.2], 1, False),
        ({}, [math.nan, math.nan, math.nan], 3, True),
        ({"min_delta": 0.1}, [0.5, 0.55, 0.6, 0.6], 3, True),
        ({"min_delta": 0.1}, [0.5, 0.55, 0.65, 0.6], 1, False),
        ({"metric_by": "min"}, [0.1, 0.2, 0.2, 0.2], 3, True),
        ({"patience": 1}, [0.2, 0.2], 1, True),
    ],
)
def test_what_counts(settings: dict[str, Any], values: list[float | None], stale: int, stops: bool) -> None:
    section = EarlyStopSettings.model_validate({"metric": "val/top1", **settings})
    whole = heard(EarlyStop(section), *values)
    assert (whole.state.stale, whole.should_stop) == (stale, stops)
    again = EarlyStop(section, heard(EarlyStop(section), *values[:2]).state)
    assert heard(again, *values).state == whole.state, "what was heard before does not count again"
    other = EarlyStop(section.model_copy(update={"metric": "val/top5"}), whole.state)
    assert other.state.stale == 0 and not heard(EarlyStop(EarlyStopSettings()), *values).should_stop


EVALS = ["--val-data", "b.tar", "--evals.val.every", "5", "--train.ema", "0.9"]


@pytest.mark.parametrize(
    ("evals", "metric", "said"),
    [
        (EVALS, "vall/top1", "unknown evaluator 'vall': use NAME/METRIC with one of: val"),
        (EVALS, "val_averaged/top1", "unknown evaluator 'val_averaged'"),
        (EVALS[:2], "val/top1", "val is evaluated only at the end: set --evals.val.every"),
        ([*EVALS, "--evals.val.weights", "both"], "val_averaged/n", None),
        ([], "val", "expected EVALUATOR/METRIC"),
    ],
)
def test_what_cannot_be_meant_is_told(evals: list[str], metric: str, said: str | None) -> None:
    argv = ["--train-data", "a.tar", "--steps", "10", *evals, "--train.early-stop.metric", metric]
    with nullcontext() if said is None else pytest.raises(SettingsError, match=said):
        validate_run(read(argv), World())


def test_a_metric_that_an_evaluator_does_not_give(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evals = ["--val-data", f"{place}/val/*.tar", "--evals.val.every", "2"]
    assert main(flags(place, "misnamed", *evals, "--train.early-stop.metric", "val/R@1")) == 2
    assert "train.early_stop.metric: val has no metric 'R@1'; choose from image_to_text_R@1" in capsys.readouterr().err
