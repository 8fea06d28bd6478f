"""Runs with a frozen tower in a precision of its own: micro-batches, ranks, shards, resume, and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from clipstream.cli.verbs.train import main
from clipstream.config.settings import load
from clipstream.config.validate import validate_run
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.models.build import build_towers
from clipstream.models.settings import ModelSettings
from tests.support.pictures import make_shards
from tests.support.ranks import end_ranks
from tests.support.runs import MODEL, flags, lines, same_weights, train_on, weights
from tests.support.sharded import FSDP, LAYERS

STEPS = 3
OWN = ("--lock-image", "--model.image.precision", "bf16", "--checkpoint.every", "1", "--checkpoint.keep-last", "9")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("frozen")
    make_shards(folder / "pairs", [21, 17, 19, 5])
    (folder / "model.json").write_text(json.dumps({**MODEL, **LAYERS}))
    return folder


def go(place: Path, name: str, *more: str, ranks: int = 1) -> None:
    argv = flags(place, name, *OWN, *more, steps=STEPS)
    if ranks == 1:
        assert main(argv) == 0
    else:
        ends = end_ranks(ranks, train_on, argv)
        assert [end.code for end in ends] == [0] * ranks, ends[0].stderr


def close(place: Path, one: str, other: str) -> None:
    """Check that both runs end with the same weights, up to the order of sums."""
    found = weights(place, other, STEPS)
    for key, tensor in weights(place, one, STEPS).items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-9, msg=f"{other}: {key}")


def test_checkpoints_hold_the_weights_as_they_were_and_resume_exactly(place: Path) -> None:
    go(place, "one", "--train.ema", "0.9")
    initial = build_towers(ModelSettings(name=f"{place}/model.json"), seed=0).clip.state_dict()
    for file in ("open_clip_model", "averaged"):
        saved = weights(place, "one", STEPS, file)
        assert saved.keys() == initial.keys() and {tensor.dtype for tensor in saved.values()} == {torch.float32}
        for name, tensor in initial.items():
            assert torch.equal(saved[name], tensor) == name.startswith("visual.")
    go(place, "again", "--train.ema", "0.9", "--checkpoint.resume", f"{place}/runs/one/checkpoints/step_00000001")
    assert lines(place, "again") == lines(place, "one")[1:]
    for file in ("open_clip_model", "averaged"):
        assert same_weights(weights(place, "again", STEPS, file), weights(place, "one", STEPS, file))


def test_ranks_shards_and_recomputation_change_nothing(place: Path) -> None:
    fp64 = ("--precision", "fp64")
    go(place, "fp64", *fp64)
    go(place, "ddp", *fp64, "--train.micro-batch-size", "5", ranks=2)
    go(place, "fsdp", *fp64, *FSDP, "--model.grad-checkpointing", "0.6", ranks=2)
    assert "memory   model.text.grad_checkpointing: of 2 blocks " in (place / "runs/fsdp/out.log").read_text()
    for other in ("ddp", "fsdp"):
        close(place, "fp64", other)


@pytest.mark.parametrize(("tower", "ranks"), [("image", 1), ("text", 2)])
def test_cached_features_are_computed_once_and_change_no_loss(tower: str, ranks: int, place: Path) -> None:
    more = [
        f"--lock-{tower}",
        "--data.augment.enabled",
        "false",
        "--train.micro-batch-size",
        "5",
        "--precision",
        "fp64",
    ]
    runs = {"plain": [], "cached": [f"--model.{tower}.cache-gib", "0.001"]}
    for name, own in runs.items():
        argv = flags(place, f"{name}-{tower}", *more, *own, steps=4)
        ends = end_ranks(ranks, train_on, argv) if ranks > 1 else [main(argv)]
        assert not any(end.code if ranks > 1 else end for end in ends), ends
    assert f"features of the {tower} tower in 0.001 GiB a rank" in (place / f"runs/cached-{tower}/out.log").read_text()
    plain, cached = (lines(place, f"{name}-{tower}") for name in runs)
    assert len(plain) == 4
    for one, other in zip(plain, cached, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-10)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], abs=1e-10)


def test_settings_that_cannot_work_are_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = ("--model.image.cache-gib", "1")
    for more, message in (
        (("--lock-image", *cache), "features of augmented images differ"),
        (cache, "training the image tower changes its features"),
        (
            ("--train.micro-batch-size", "auto", "--model.grad-checkpointing", "2GiB"),
            "2GiB requires a number",
        ),
    ):
        assert main(flags(place, "refused", *more)) == 2
        assert message in capsys.readouterr().err
    argv = flags(place, "refused", "--lock-image", "--data.augment.enabled", "false", *cache, *FSDP)
    with pytest.raises(SettingsError, match="not supported with fsdp: use ddp"):
        validate_run(load(argv, ranks=2), World(rank=0, size=2))
