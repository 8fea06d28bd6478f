"""Loading and training overlap: a trainer as slow as the data hardly waits."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from clipstream.data.batch import ImageSpec
from clipstream.data.build import training_loader
from clipstream.data.loader.loader import Loader
from clipstream.data.loader.pipeline import ModelInputs
from clipstream.distributed.world import World
from tests.support.loaders import data
from tests.support.pictures import ByteTokenizer, make_shards, picture

BATCHES = 60


def stream(shards: list[str]) -> Loader:
    settings = data(shards, workers=2, global_batch_size=64, lanes=8)
    return training_loader(settings, ModelInputs(ByteTokenizer(), ImageSpec((224, 224))), world=World(), seed=0)


def waited(shards: list[str], busy: float) -> float:
    """Seconds of BATCHES steps in which the trainer, busy for `busy` s a step, was at waiting for data."""
    waits = 0.0
    with stream(shards) as batches:
        next(batches)
        time.sleep(busy)
        for _ in range(BATCHES):
            began = time.perf_counter()
            next(batches)
            waits += time.perf_counter() - began
            time.sleep(busy)
    return waits


@pytest.mark.slow
def test_a_trainer_as_slow_as_the_data_waits_for_less_than_a_twentieth(tmp_path: Path) -> None:
    shards = make_shards(tmp_path, [40] * 8, jpg=picture(0, size=400))
    shares = []
    for _ in range(3):  # machines are shared: the data's own pace changes from one second to the next
        alone = waited(shards, 0.0) / BATCHES
        wait = waited(shards, alone)
        shares.append(wait / (wait + alone * BATCHES))
    assert min(shares) < 0.05, shares
