"""Averaged weights: timm's formula, sharding, saving, evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import open_clip
import pytest
import torch
from timm.utils import ModelEmaV3

from clipstream.cli.verbs import evaluate
from clipstream.models.build import build_towers
from clipstream.models.precision import prepare
from clipstream.models.settings import ModelSettings, Precision
from clipstream.training.ema import WeightAverages
from clipstream.training.parallel import FullTowers
from tests.support.runs import flags, furnish, go, lines, same_weights, weights
from tests.support.steps import TinyTowers, make_batch, make_step

EMA = ("--train.ema", "0.9", "--train.ema-warmup", "true")


@pytest.mark.parametrize("warmup", [False, True])
def test_they_are_timms(warmup: bool) -> None:
    model = TinyTowers()
    theirs = ModelEmaV3(model, decay=0.7, use_warmup=True) if warmup else ModelEmaV3(model, decay=0.7)
    step = make_step(model, ema=0.7, ema_warmup=warmup)
    assert step.averages is not None
    for number in range(12):
        step(make_batch(number), lr=1.0)
        theirs.update(model, step=number + 1 if warmup else None)
    for name, expected in theirs.module.named_parameters():
        torch.testing.assert_close(step.averages.tensors[name], expected.data, rtol=0, atol=1e-6)
        assert not torch.equal(step.averages.tensors[name], model.get_parameter(name))


@pytest.mark.parametrize(("precision", "kind"), [("pure_bf16", torch.float32), ("fp64", torch.float64)])
def test_they_are_float32_at_least(precision: Precision, kind: torch.dtype) -> None:
    model = prepare(TinyTowers(), precision)
    averages = WeightAverages(model, 0.999)
    before = {name: average.clone() for name, average in averages.tensors.items()}
    assert {average.dtype for average in before.values()} == {kind}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    averages.update(torch.zeros(()))
    moved = (averages.tensors["clip.visual.0.weight"] - before["clip.visual.0.weight"]).mean()
    assert moved == pytest.approx(0.001, rel=0.05)  # bfloat16 would have lost it
    with FullTowers(model).full_weights("cpu", instead=averages.tensors) as towers:
        assert [p.dtype for p in towers.parameters()] == [p.dtype for p in model.parameters()]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run with averages, `whole`."""
    folder = furnish(tmp_path_factory.mktemp("averaging"))
    go(averaging(folder, "whole"))
    return folder


def averaging(place: Path, name: str, *more: str, steps: int = 4) -> list[str]:
    """A run's command line with averages."""
    evaluator = ["--val-data", f"{place}/val/*.tar", "--evals.val.every", "2", "--evals.val.weights", "both"]
    return flags(place, name, *EMA, *evaluator, "--schedule.type", "constant", *more, steps=steps)


def test_a_checkpoint_has_them_beside_the_weights(place: Path) -> None:
    folder = place / "runs/whole/checkpoints/step_00000004"
    model, _, _ = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    trained, found = weights(place, "whole", 4), weights(place, "whole", 4, "averaged")
    assert same_weights(model.state_dict(), trained) and found.keys() == trained.keys()
    assert not torch.equal(found["visual.conv1.weight"], trained["visual.conv1.weight"])
    averaged = str(folder / "averaged.safetensors")
    own = build_towers(ModelSettings(name=f"local-dir:{folder}", pretrained=averaged), seed=1)
    assert same_weights(own.clip.state_dict(), found)


def test_evaluations_with_them_have_a_name_of_their_own(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = lines(place, "whole", "eval")
    assert [(line["step"], line["eval"]) for line in records] == [
        (2, "val"), (2, "val_averaged"), (4, "val"), (4, "val_averaged"),
    ]  # fmt: skip
    figures = [{k: line[k] for k in line["metrics"] if k in line} for line in records[2:]]
    assert figures[0] != figures[1]
    for kind, expected in zip(("trained", "averaged"), figures, strict=True):
        output = place / f"{kind}.jsonl"
        run = ["--checkpoint", f"{place}/runs/whole", "--weights", kind, "--output", str(output)]
        assert evaluate.main(run) == 0
        record = json.loads(output.read_text())
        assert record["eval"] == ("val" if kind == "trained" else "val_averaged")
        assert {name: record[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert "val_averaged" in capsys.readouterr().out


def test_a_run_that_begins_with_them_later_begins_at_its_weights(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And one without them leaves none behind, which is told where they are asked for."""
    without = ["--train.ema", "null", "--train.ema-warmup", "false", "--evals.val.weights", "trained"]
    go(averaging(place, "whole", *without, "--resume", "latest", steps=6))
    file, run = place / "runs/whole/checkpoints/step_00000006/averaged.safetensors", f"{place}/runs/whole"
    assert not file.exists()
    averaged = ["--weights", "averaged"]
    for argv, told in (
        (["--checkpoint", run, *averaged], "(--train.ema)"),
        (["--checkpoint", run, "--weights", "mean"], "--weights: 'mean' is not one of trained, averaged"),
        (["--val-data", "a.tar", *averaged], "--weights averaged requires --checkpoint"),
    ):
        assert evaluate.main(argv) == 2 and told in capsys.readouterr().err
    file.write_bytes(b"torn")
    assert evaluate.main(["--checkpoint", run, *averaged]) == 2 and file.name in capsys.readouterr().err
    file.unlink()
    go(averaging(place, "whole", "--lr", "0", "--resume", "latest", steps=8))
    assert same_weights(weights(place, "whole", 8, "averaged"), weights(place, "whole", 8))
