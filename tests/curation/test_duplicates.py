"""Equal samples in a batch: their expected share, and the warning of `check` and of training."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from clipstream.cli.verbs.check import main as check
from clipstream.data.batch import Batch
from clipstream.data.decode.sample_profile import share_of_equal
from clipstream.distributed.world import World
from clipstream.losses.contrastive import warn_of_duplicates
from clipstream.losses.settings import AutoLoss, PositivesSettings
from tests.support.pictures import picture
from tests.support.ranks import run_ranks
from tests.support.tars import write_tar


def exact(values: np.ndarray, batch: int) -> float:
    """Of all data, drawn without replacement: 1 - C(N - c, B - 1) / C(N - 1, B - 1), the mean over the samples."""
    counts, total = np.bincount(values)[values].tolist(), len(values)
    return 1 - np.mean([math.comb(total - c, batch - 1) / math.comb(total - 1, batch - 1) for c in counts])


@pytest.mark.parametrize("kinds", [3, 12, 60, 2000])
@pytest.mark.parametrize("batch", [8, 64])
def test_the_share_is_that_of_all_data(kinds: int, batch: int) -> None:
    values = np.arange(6000) % kinds
    seen = np.arange(0, 6000, 7)  # every kind comes equally often
    assert share_of_equal(values[seen], batch, np.zeros(len(seen))) == pytest.approx(exact(values, batch), abs=0.04)


@pytest.mark.parametrize(("classes", "each"), [(1000, 60), (100_000, 1), (20, 300)])
def test_samples_of_a_shard_are_alike(classes: int, each: int) -> None:
    """Of a folder of classes 10 shards are read, 50 samples each: most pairs of these are equal, few of all data."""
    seen = np.repeat(np.arange(10), min(each, 50))
    found = share_of_equal(seen, 64, seen, of=classes / 10)
    assert found == pytest.approx(1 - (1 - (each > 1) / classes) ** 63, abs=0.01)


@pytest.mark.parametrize("values", [[], [1], [1, 1], [*range(500)], [1, 1, *range(2, 500)]])
def test_samples_that_are_rarely_equal_count_as_none(values: list[int]) -> None:
    assert share_of_equal(np.array(values, np.uint64), 512, np.arange(len(values)) // 50) == 0
    assert share_of_equal(np.array(values, np.int64), 512) == 0


MASK = "set --loss.duplicates mask"
KINDS = {
    "labels": (48, 4, MASK + ","),
    "rows": (12, 48, MASK + " --loss.duplicates-by pictures"),
    "unique": (48, 48, ""),
}


@pytest.mark.parametrize("kind", KINDS)
def test_check_says_which_samples_are_equal(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By captions that are labels, and by an image with a row for each of its captions."""
    images, captions, said = KINDS[kind]
    for shard in range(2):
        rows = range(24 * shard, 24 * shard + 24)
        samples = [{"__key__": f"{n}", "jpg": picture(n % images), "txt": f"a thing {n % captions}"} for n in rows]
        write_tar(tmp_path / f"{shard}.tar", samples)
    assert check([f"{tmp_path}/{{0..1}}.tar"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("which the loss takes as a negative") == bool(said) and said in out


def messages(world: World, kind: str, loss: AutoLoss, copies: int) -> list[str]:
    images, captions, _ = KINDS[kind]
    mine = [n for n in range(48 * copies) if n % world.size == world.rank]
    batch = Batch(
        pixels=None,
        ids=torch.tensor([[7, n % 48 % captions, 9] for n in mine], dtype=torch.int32),
        weights=torch.ones(len(mine)),
        keys=[f"0.tar/{n % 48}" for n in mine],
        sources=torch.zeros(len(mine), dtype=torch.uint8),
        step=0,
        global_size=48 * copies,
        checksums=torch.tensor([n % 48 % images - (1 << 62) for n in mine]),
        groups=torch.tensor([n % 6 * 2 for n in mine]),
    )
    found: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("clipstream")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        warn_of_duplicates(loss, batch, world)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_training_warns_of_the_first_batch_once(kind: str) -> None:
    """On rank 0 alone, and not of copies of a sample, for which there is another warning."""
    said = KINDS[kind][2]
    for size in (1, 2):
        first, *others = run_ranks(size, messages, kind, AutoLoss(), 1)
        assert not any(others) and len(first) == bool(said), first
        assert not said or (
            f"a batch of 48, about 100% have the {'caption' if kind == 'labels' else 'image file'}" in first[0]
        )
        assert not said or said in first[0]
    (copied,) = messages(World(), kind, AutoLoss(), 3)
    assert said in copied and (bool(said) or "holds only 48 different ones" in copied)
    for loss in (AutoLoss(duplicates="mask"), AutoLoss(duplicates="positives", duplicates_by="pictures")):
        assert messages(World(), kind, loss, 1) == []


def test_the_number_of_groups_is_said() -> None:
    (said,) = messages(World(), "unique", AutoLoss(positives=PositivesSettings(by="json:sku")), 1)
    assert said == "groups   6 of 48 samples in the first batch, by json:sku"
