"""Features of frozen towers in memory: what is computed, and that it is what the tower gives."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clipstream.data.batch import Batch
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.models.execution.batch_features import ENTRY, FeatureCache
from clipstream.models.settings import TOWERS, Tower
from clipstream.utils.logs import logger
from tests.support.model_files import build, write
from tests.support.ranks import run_ranks
from tests.support.text_batches import TEXT_CFG, make_texts

WIDTH = 24  # of the features


def batch_of(rows: list[int]) -> Batch:
    """Pictures and texts by number; texts have 3 to 7 tokens."""
    pixels, ids = make_texts([3 + row % 5 for row in range(9)])
    pixels[1] = pixels[0]
    pixels[1, 2, 31, 31] ^= 1  # one bit of the last pixel
    n = len(rows)
    return Batch(pixels[rows], ids[rows], torch.ones(n), ("",) * n, torch.zeros(n), 0, n)


def cache_of(name: str, tower: Tower, features: int, world: World) -> tuple[FeatureCache, list[int]]:
    """A cache for so many features, and the list of the sizes of the tower's passes."""
    towers = build(name, **{f"lock_{tower}": True}).train()
    towers.double()
    passes: list[int] = []
    key = "encode_image" if tower == "image" else "encode_text"
    encode = getattr(towers, key)

    def counted(rows: torch.Tensor, *more: Any) -> torch.Tensor:
        passes.append(len(rows))
        made: torch.Tensor = encode(rows, *more)
        return made

    setattr(towers, key, counted)
    gib = features * (WIDTH * 8 + ENTRY) / 2**30
    return FeatureCache(towers, tower, gib * 1.001, world, nullcontext), passes


@pytest.mark.parametrize("tower", TOWERS)
def test_a_sample_passes_through_the_tower_once(tower: Tower, tmp_path: Path) -> None:
    cache, passes = cache_of(write(tmp_path, text_cfg=TEXT_CFG), tower, 100, World())
    encode = cache.towers.encode_image if tower == "image" else cache.towers.encode_text
    first = cache(batch_of([0, 1, 2, 3]))
    again = cache(replace(batch_of([5, 3, 1, 0, 6, 5]), lengths=(3, 6, 4, 3, 4, 3)), size=2)
    last = cache(batch_of([6, 5]))
    assert passes == [4, 2, 1] and len(cache) == 6
    for batch, rows in ((first, [0, 1, 2, 3]), (again, [5, 3, 1, 0, 6, 5]), (last, [6, 5])):
        assert batch.known == (tower,)
        whole = batch_of(rows)
        expected = encode(whole.images if tower == "image" else whole.ids).detach()
        torch.testing.assert_close(batch.features[tower], expected, rtol=0, atol=1e-12)
        assert not batch.features[tower].requires_grad
    assert torch.equal(again.features[tower][[3, 2, 1]], first.features[tower][[0, 1, 3]])
    assert not torch.equal(first.features[tower][0], first.features[tower][1])


def test_a_full_cache_keeps_what_it_has_and_tells_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache, passes = cache_of(write(tmp_path, text_cfg=TEXT_CFG), "image", 3, World())
    with caplog.at_level("INFO", logger.name):
        for _ in range(2):
            cache(batch_of([4, 5, 6, 7, 8]))
    assert passes == [5, 2] and len(cache) == cache.capacity == 3
    assert [record.message for record in caplog.records if "cache_gib: full with 3 features" in record.message]


def passes_of(world: World, name: str) -> tuple[list[int], list[torch.Tensor]]:
    """Two batches of each rank: the second has what the other rank had in the first."""
    cache, passes = cache_of(name, "image", 100, world)
    mine, others = [[0, 1, 2], [3, 4]][:: 1 - 2 * world.rank]
    found = [cache(batch_of(rows)).features["image"] for rows in (mine, others)]
    return passes, found


def test_ranks_share_what_they_compute(tmp_path: Path) -> None:
    (one, first), (two, second) = run_ranks(2, passes_of, write(tmp_path, text_cfg=TEXT_CFG))
    assert (one, two) == ([3], [2])
    assert torch.equal(first[0], second[1]) and torch.equal(first[1], second[0])


def test_a_tower_that_is_trained_has_no_cache(tmp_path: Path) -> None:
    towers = build(write(tmp_path, text_cfg=TEXT_CFG)).train()
    with pytest.raises(SettingsError, match=r"model\.image\.cache_gib: the image tower is trained"):
        FeatureCache(towers, "image", 1.0, World(), nullcontext)
