"""The validation loss equals open_clip's on the same batches, on 1 and 3 ranks, for any packing of pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from open_clip.loss import SigLipLoss

from clipstream.data.loader.reading_recipe import ModelInputs
from clipstream.data.settings import DataSettings
from clipstream.data.source_settings import SourceSettings
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.evals.context import of_samples
from clipstream.evals.runner import EvalRunner
from clipstream.evals.settings import LossEvalSettings
from clipstream.losses.contrastive import build_loss
from clipstream.losses.settings import LossSettings
from tests.support.evaluating import context_of, evaluated, tiny_towers
from tests.support.loaders import evaluation_of
from tests.support.pictures import ByteTokenizer, make_shards
from tests.support.ranks import run_ranks

COUNTS = (17, 20, 14)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("heldout")
    make_shards(folder, COUNTS)
    return folder


def evaluate(world: World, folder: str, size: int, kind: str, **more: Any) -> dict[str, float]:
    context = context_of(world)
    context.loss = build_loss(LossSettings.model_validate({"type": kind}), kind)
    context.data = DataSettings(workers=0, global_batch_size=size)
    if kind == "siglip":
        context.with_scalars = with_bias(context.with_scalars)  # type: ignore[method-assign]
    return evaluated({"type": "loss", "data": {"shards": f"{folder}/*.tar"}, "batch_size": 7, **more}, context)


def with_bias(scalars: Any) -> Any:
    return lambda images, texts: scalars(images, texts)._replace(logit_bias=torch.tensor(-10.0))


def reference(folder: Path, size: int, kind: str) -> float:
    """By open_clip's loss of whole batches, in the order that the docstring tells."""
    towers = tiny_towers().eval()
    source = SourceSettings(shards=f"{folder}/*.tar")
    loader = evaluation_of(source, 99, inputs=ModelInputs(ByteTokenizer(), towers.image))
    with loader, torch.no_grad():
        batch = next(iter(loader))
        order = np.argsort(of_samples(batch)[1].astype(np.int64), kind="stable")
        images, texts = towers.encode_image(batch.pixels)[order], towers.encode_text(batch.ids)[order]
    scale, bias = towers.clip.logit_scale.exp().detach(), torch.tensor(-10.0)
    losses = []
    for start in range(0, len(order) // size * size, size):
        some = images[start : start + size], texts[start : start + size]
        if kind == "clip":
            losses.append(open_clip.ClipLoss()(*some, scale))
        else:
            losses.append(SigLipLoss()(*some, scale, bias))
    return float(torch.stack(losses).mean())


@pytest.mark.parametrize(("kind", "size"), [("clip", 1), ("siglip", 1), ("siglip", 3)])
def test_equal_to_open_clips_on_any_number_of_ranks(pairs: Path, kind: str, size: int) -> None:
    expected = reference(pairs, 16, kind)
    for found in run_ranks(size, evaluate, str(pairs), 16, kind):
        assert found.pop("val_loss") == pytest.approx(expected, rel=1e-6)
        assert found == {"n": 48, "batch_size": 16, "batches": 3, "left_out": 3}


def test_the_batches_are_the_same_however_pairs_are_packed(pairs: Path, tmp_path: Path) -> None:
    make_shards(tmp_path, [sum(COUNTS[:2])])
    make_shards(tmp_path / "rest", COUNTS[2:], start=sum(COUNTS[:2]))
    (tmp_path / "rest" / "00000.tar").rename(tmp_path / "another.tar")
    one, other = (evaluate(World(), str(folder), 16, "clip") for folder in (pairs, tmp_path))
    assert one == pytest.approx(other, rel=1e-6)


def test_fewer_pairs_than_a_batch_are_one(pairs: Path) -> None:
    found = evaluate(World(), str(pairs), 512, "clip")
    assert (found["n"], found["batch_size"], found["batches"], found["left_out"]) == (51, 51, 1, 0)
    assert found["val_loss"] == pytest.approx(reference(pairs, 51, "clip"), rel=1e-6)
    told = evaluate(World(), str(pairs), 512, "clip", global_batch_size=16, max_samples=40)
    assert (told["n"], told["batch_size"], told["left_out"]) == (32, 16, 8)


def test_without_a_training_it_says_what_is_missing(pairs: Path) -> None:
    section = LossEvalSettings(data=SourceSettings(shards=f"{pairs}/*.tar"), on_error="raise")
    with pytest.raises(SettingsError, match=r"evals\.held: .*requires a training run"):
        EvalRunner({"held": section}, context_of(World()))(1, last=True)
