"""Averaged weights: timm's formula, sharding, saving, resuming bit for bit, evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from timm.utils import ModelEmaV3
from torch.distributed.tensor import DTensor

from clipstream.cli.verbs import evaluate
from clipstream.cli.verbs.train import main
from clipstream.distributed.world import World
from clipstream.models.build import build_towers
from clipstream.models.settings import ModelSettings
from clipstream.training.parallel import FullTowers, full_tensor, parallelize
from clipstream.training.precision import prepare
from clipstream.training.settings import Precision, TrainSettings
from clipstream.training.step import TrainStep, WeightAverages
from tests.support.pictures import make_shards
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, flags, lines, same_weights, weights
from tests.support.sharded import LAYERS, DeepTowers
from tests.support.steps import LOSSES, TinyTowers, make_batch, sgd

EMA = ("--train.ema", "0.9", "--train.ema-warmup", "true")


@pytest.mark.parametrize("warmup", [False, True])
def test_they_are_timms(warmup: bool) -> None:
    model = TinyTowers()
    theirs = ModelEmaV3(model, decay=0.7, use_warmup=True) if warmup else ModelEmaV3(model, decay=0.7)
    settings = TrainSettings(precision="fp32", ema=0.7, ema_warmup=warmup)
    step = TrainStep(model, LOSSES["clip"], sgd(model), World(), settings)
    averages = step.averages
    assert averages is not None
    for number in range(12):
        step(make_batch(number), lr=1.0)
        theirs.update(model, step=number + 1 if warmup else None)
    for name, expected in theirs.module.named_parameters():
        torch.testing.assert_close(averages.tensors[name], expected.data, rtol=0, atol=1e-6)
        assert not torch.equal(averages.tensors[name], model.get_parameter(name))


def averaged(world: World, parallel: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], bool]:
    """Averages and weights after some steps, and whether what an evaluation sees is right and leaves no trace."""
    model = DeepTowers().double()
    settings = TrainSettings(parallel=parallel, precision="fp64", ema=0.8)
    layout = parallelize(model, world, settings)
    step = TrainStep(layout, LOSSES["clip"], sgd(model), world, settings)
    averages = step.averages
    assert averages is not None
    for number in range(3):
        step(make_batch(number, world.rank, world.size), lr=1.0)
    assert all(isinstance(t, DTensor) == (t.numel() > 1 and parallel == "fsdp") for t in averages.tensors.values())
    found = {name: full_tensor(tensor).clone() for name, tensor in averages.tensors.items()}
    with layout.full_weights("cpu", instead=averages.tensors) as full:
        seen = {name: p.detach().clone() for name, p in full.named_parameters(remove_duplicate=False)}
    with layout.full_weights("cpu") as full:
        after = {name: p.detach().clone() for name, p in full.named_parameters(remove_duplicate=False)}
    right = all(torch.equal(seen[name], found.get(name, after[name])) for name in seen)
    return found, after, right


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_have_one_processs_averages_and_frozen_weights_have_none(parallel: str) -> None:
    expected, trained, right = averaged(World(), "ddp")
    assert right and expected.keys() < trained.keys()
    assert {name for name in trained if name not in expected} == {"clip.layers.0.0.weight", "clip.layers.0.0.bias"}
    assert torch.equal(expected["clip.again.weight"], expected["clip.words.weight"])  # one tensor, two names
    for found, weights_there, right in run_ranks(2, averaged, parallel):
        assert right and found.keys() == expected.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-10)
            torch.testing.assert_close(weights_there[name], trained[name], rtol=0, atol=1e-10)


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
    weight = "clip.visual.0.weight"
    moved = (averages.tensors[weight] - before[weight]).mean()
    assert moved == pytest.approx(0.001, rel=0.05)  # bfloat16 would have lost it
    with FullTowers(model).full_weights("cpu", instead=averages.tensors) as towers:
        assert {p.dtype for p in towers.parameters()} == {
            p.dtype for p in prepare(TinyTowers(), precision).parameters()
        }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with shards and a small model's configuration."""
    folder: Path = tmp_path_factory.mktemp("averaging")
    make_shards(folder / "pairs", [21, 17, 19, 5])
    make_shards(folder / "val", [11, 9], start=100)
    (folder / "model.json").write_text(json.dumps({**MODEL, **LAYERS}))
    return folder


def averaging(place: Path, name: str, *more: str, steps: int = 8) -> list[str]:
    """A run's command line with averages."""
    evaluator = ["--val-data", f"{place}/val/*.tar", "--evals.val.every", "4", "--evals.val.weights", "both"]
    return flags(place, name, *EMA, *evaluator, "--lr", "1e-3", "--precision", "fp32", *more, steps=steps)


@pytest.fixture(scope="module")
def whole(place: Path) -> str:
    """The name of an undisturbed run with averages."""
    assert main(averaging(place, "whole")) == 0
    return "whole"


def test_a_checkpoint_has_them_beside_the_weights(place: Path, whole: str) -> None:
    folder = place / "runs" / whole / "checkpoints" / "step_00000008"
    model, _, _ = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    trained, found = weights(place, whole, 8), weights(place, whole, 8, "averaged")
    assert same_weights(model.state_dict(), trained) and found.keys() == trained.keys()
    assert not any(
        torch.equal(found[name], trained[name]) for name in ("visual.conv1.weight", "token_embedding.weight")
    )
    own = build_towers(
        ModelSettings(name=f"local-dir:{folder}", pretrained=str(folder / "averaged.safetensors")), seed=1
    )
    assert same_weights(own.clip.state_dict(), found)


def test_evaluations_with_them_have_a_name_of_their_own(
    place: Path, whole: str, capsys: pytest.CaptureFixture[str]
) -> None:
    records = lines(place, whole, "eval")
    assert [(line["step"], line["eval"]) for line in records] == [
        (4, "val"), (4, "val_averaged"), (8, "val"), (8, "val_averaged"),
    ]  # fmt: skip
    figures = [{k: v for k, v in line.items() if k not in ("step", "eval", "seconds")} for line in records[2:]]
    assert figures[0] != figures[1]
    for kind, expected in zip(("trained", "averaged"), figures, strict=True):
        output = place / f"{kind}.jsonl"
        run = ["--checkpoint", f"{place}/runs/{whole}", "--weights", kind, "--output", str(output)]
        assert evaluate.main(run) == 0
        (record,) = [json.loads(line) for line in output.read_text().splitlines()]
        assert record["eval"] == ("val" if kind == "trained" else "val_averaged")
        assert {name: record[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert "val_averaged" in capsys.readouterr().out


def test_what_is_wrong_with_them_is_told(place: Path, whole: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--checkpoint", f"{place}/runs/{whole}"]
    for argv, told in [
        ([*run, "--weights", "mean"], "--weights: expected trained or averaged, not 'mean'"),
        (["--val-data", "a.tar", "--weights", "averaged"], "--weights averaged requires --checkpoint"),
    ]:
        assert evaluate.main(argv) == 2 and told in capsys.readouterr().err
    assert main(flags(place, "without", steps=2)) == 0
    bare = ["--checkpoint", f"{place}/runs/without", "--val-data", f"{place}/val/*.tar"]
    assert evaluate.main([*bare, "--weights", "averaged"]) == 2
    assert "(--train.ema)" in capsys.readouterr().err
    (place / "runs/without/checkpoints/step_00000002/averaged.safetensors").write_bytes(b"torn")
    assert evaluate.main([*bare, "--weights", "averaged"]) == 2
    assert "averaged.safetensors" in capsys.readouterr().err


def test_a_resumed_run_goes_on_with_them_bit_by_bit(place: Path, whole: str) -> None:
    assert main(averaging(place, "cut", "--schedule.type", "constant", steps=4)) == 0
    assert main(averaging(place, "cut", "--schedule.type", "constant", "--resume", "latest")) == 0
    assert main(averaging(place, "uncut", "--schedule.type", "constant")) == 0
    for file in ("averaged", "open_clip_model"):
        assert same_weights(weights(place, "cut", 8, file), weights(place, "uncut", 8, file))

    def figures(name: str) -> list[dict[str, Any]]:
        records = [{k: v for k, v in line.items() if k != "seconds"} for line in lines(place, name, "eval")]
        return [record for record in records if record["step"] == 8]

    assert figures("cut") == figures("uncut")
    # A run that begins with them later begins at its weights, and one without them leaves none behind.
    without = ["--train.ema", "null", "--train.ema-warmup", "false", "--evals.val.weights", "trained"]
    assert main(averaging(place, "cut", *without, "--resume", "latest", steps=10)) == 0
    assert not (place / "runs/cut/checkpoints/step_00000010/averaged.safetensors").exists()
    assert main(averaging(place, "cut", "--lr", "0", "--resume", "latest", steps=12)) == 0
    assert same_weights(weights(place, "cut", 12, "averaged"), weights(place, "cut", 12))
