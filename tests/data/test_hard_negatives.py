"""Batches of seeds with their hard neighbours: what is in them, on any ranks, resumed, and files that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from clipstream.data.groups import NeighbourOrder
from clipstream.data.order.windows import EpochPlan
from clipstream.errors import SettingsError
from tests.support.loaders import COUNTS, data, drawn_keys, indexed, loader, numbered
from tests.support.pictures import make_shards

NEAR = 5  # of each sample: those with the same number modulo 8


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return make_shards(tmp_path_factory.mktemp("shards"), COUNTS)


def mined(path: Path, **more: Any) -> str:
    """The file of neighbours, as `clipstream search neighbours --out` writes it."""
    names = {n: f"{i:05d}.tar/{n:06d}" for i, n in numbered(COUNTS)}
    near = [[names[m] for m in range(n % 8, 48, 8) if m != n][:NEAR] for n in names]
    near[3] = [names[3], names[11], names[11], "00009.tar/000001", *near[3]]
    table = {"source": ["train"] * 48, "shard": [name[:9] for name in names.values()],
             "key": [name[10:] for name in names.values()], "neighbours": near} | more  # fmt: skip
    parquet.write_table(pa.table(table), path)
    return str(path)


def test_batches_are_seeds_with_their_neighbours_on_any_ranks(shards: list[str], tmp_path: Path) -> None:
    path = mined(tmp_path / "hard.parquet")
    for tail in ("drop", "pad", "wrap"):
        settings = indexed(shards, tail, batch=9, hard_negatives=path)
        plain = drawn_keys(settings, 1, 13)
        for ranks, workers in ((3, 0), (2, 1))[: 2 * (tail == "wrap")]:
            again = settings.model_copy(update={"workers": workers})
            assert drawn_keys(again, ranks, 13)[:13] == plain[:13]
            states = drawn_keys(again, ranks, 4)[-1]
            assert drawn_keys(settings, 1, 9, states)[:9] == plain[4:13]
        steps = {"drop": 5}.get(tail, 6)
        for epoch in (plain[:steps], plain[steps : 2 * steps]):
            keys = [n for _, batch in epoch for n in batch]
            assert len(set(keys)) == {"drop": 45}.get(tail, 48) and (tail == "wrap" or len(keys) == len(set(keys)))
            # Of 8 other samples of a batch, 1.06 would be a neighbour by chance.
            near = [sum(a % 8 == b % 8 for b in batch) - 1 for _, batch in epoch for a in batch]
            assert sum(near) / len(near) > 3
        assert plain[:steps] != plain[steps : 2 * steps]


def test_a_batch_begins_with_a_seed_and_has_its_best_neighbours() -> None:
    plan = EpochPlan(3, ("train",), (12,), (1.0,), 12, 2, "drop")
    neighbours = np.full((12, 5), -1, dtype=np.int32)
    neighbours[0] = [4, 5, 6, 7, 8]
    for epoch in range(50):
        line = NeighbourOrder(plan, [5, 7], neighbours)._line(epoch).tolist()
        assert sorted(line) == list(range(12))
        place = line.index(0)
        free = [n for n in (4, 5, 6, 7, 8) if n not in line[:place]]
        assert line[place + 1 : place + 1 + len(free)] == free, "no other seed as long as it has neighbours"


def test_files_that_do_not_fit(shards: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def said(path: str) -> str:
        with pytest.raises(SettingsError) as error:
            loader(indexed(shards, hard_negatives=path))
        return str(error.value)

    next(loader(indexed(shards, hard_negatives=mined(tmp_path / "1.parquet"))))
    said_of = "48 of its 49 entries match samples of these data; '00009.tar/000001' does not, and 1 name shards"
    assert said_of in caplog.text  # a list of more shards
    absent = mined(tmp_path / "8.parquet", neighbours=[["00000.tar/absent"]] * 48)
    assert "48 of its 49 entries match samples of these data; '00000.tar/absent' does not" in said(absent)
    other = mined(tmp_path / "2.parquet", shard=["other.tar"] * 48, neighbours=[[f"x.tar/{n}"] for n in range(48)])
    assert "0 of its 96 entries match samples of these data" in said(other)
    assert "the column 'neighbours' has no lists" in said(mined(tmp_path / "3.parquet", neighbours=["a"] * 48))
    assert "no keys of source 'train' in it" in said(mined(tmp_path / "4.parquet", source=["other"] * 48))
    parquet.write_table(pa.table({"key": ["1"]}), tmp_path / "5.parquet")
    assert "no column 'neighbours'" in said(str(tmp_path / "5.parquet"))
    assert "No such file" in said(str(tmp_path / "none.parquet"))
    path = mined(tmp_path / "6.parquet")
    for changes, why in (
        ({"sources": {"a": {"shards": shards, "weight": 2}}}, "not supported with the weight"),
        ({"sources": {name: {"shards": shards} for name in "ab"}}, "not supported with several"),
    ):
        with pytest.raises(ValueError, match=why):
            indexed(shards, hard_negatives=path, **changes)
    state = drawn_keys(indexed(shards, hard_negatives=path), 1, 1)[-1]
    other = mined(tmp_path / "7.parquet", neighbours=[["00000.tar/000001"]] * 48)
    with pytest.raises(SettingsError, match=r"data.hard_negatives: .* -> "):
        drawn_keys(indexed(shards, hard_negatives=other), 1, 1, state)
    assert data(shards).hard_negatives is None
