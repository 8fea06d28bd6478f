"""All evaluators give the results of one process on several ranks, with DDP and with FSDP2."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from clipstream.data.settings import DataSettings
from clipstream.distributed.world import World
from clipstream.evals.context import EvalContext
from clipstream.evals.runner import EvalRunner
from clipstream.evals.settings import EvalSettings
from clipstream.losses.contrastive import build_loss
from clipstream.losses.settings import LossSettings
from clipstream.models.build import build_towers
from clipstream.models.settings import ModelSettings
from clipstream.training.parallel import parallelize
from clipstream.training.settings import TrainSettings
from tests.support.evaluating import CONFIG
from tests.support.pictures import ByteTokenizer, make_shards
from tests.support.ranks import run_ranks

COUNTS = (17, 1, 5)  # so few that ranks have parts of unequal size, and some none of a shard


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("ranks")
    make_shards(folder / "test", COUNTS, npy=b"", txt="the first\nthe second")
    make_shards(folder / "train", [30], start=50)
    (folder / "model.json").write_text(json.dumps(CONFIG))
    return folder


def sections(place: Path) -> dict[str, EvalSettings]:
    data, train = {"shards": f"{place}/test/*.tar"}, f"{place}/train/*.tar"
    classes = ["a", "b", "c"]
    told: dict[str, dict[str, Any]] = {
        "pairs": {"type": "retrieval", "data": {**data, "caption": {"type": "json", "path": "caption.en"}}},
        "many": {"type": "retrieval", "captions": "all"},
        "one": {"type": "zero_shot", "classes": classes, "templates": ["a {c}"]},
        "more": {"type": "zero_shot", "classes": classes, "templates": ["a {c}"], "labels": "list"},
        "loss": {"type": "loss", "data": {**data, "caption": {"type": "json", "path": "caption.en"}}},
        "probe": {"type": "linear_probe", "train_shards": train},
        "near": {"type": "knn", "train_shards": train, "k": 3},
        "choose": {"type": "choice", "category": "cls"},
    }
    common = {"data": data, "batch_size": 8, "on_error": "raise"}
    return {name: EvalSettings.model_validate({**common, **section}) for name, section in told.items()}


def evaluate(world: World, place: Path, parallel: str) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    towers = build_towers(ModelSettings(name=f"{place}/model.json"), seed=0).double()
    layout = parallelize(towers, world, TrainSettings(parallel=parallel, precision="fp64"))
    data = DataSettings(workers=0, global_batch_size=6)
    loss = build_loss(LossSettings.model_validate({"type": "clip"}), "clip")
    context = EvalContext(layout.full, ByteTokenizer(), world, data, "fp64", loss, 4)
    weights = partial(layout.full_weights, world.device)
    runner = EvalRunner(sections(place), context, weights={"trained": weights})
    runner.dry_run()
    records = runner(1, last=True)
    return [{key: record[key] for key in record["metrics"] if key != "seconds"} for record in records]


@pytest.mark.parametrize(("size", "parallel"), [(4, "ddp"), (2, "fsdp")])  # of three prompts, four ranks
def test_the_figures_of_one_process(place: Path, size: int, parallel: str) -> None:
    alone = evaluate(World(), place, "ddp")
    assert [record["n"] for record in alone] == [23, 23, 23, 23, 18, 23, 23, 23]
    assert (alone[1]["captions"], alone[4]["left_out"]) == (46, 5)
    for found in run_ranks(size, evaluate, place, parallel):
        for mine, theirs in zip(found, alone, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-6)
