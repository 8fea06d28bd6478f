"""Samples drawn with their own probability: how often, the same on any ranks, resumed, and what is said of odd ones."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from clipstream.cli.verbs.train import main
from clipstream.data.order.windows import NO_SAMPLE, SystematicDraws
from clipstream.errors import DataError, SettingsError
from tests.support.loaders import COUNTS, assert_layouts, data, drawn_keys, loader, numbered
from tests.support.pictures import make_shards
from tests.support.runs import flags, furnish, lines

CHANCE = {n: (n % 8) / 7 for n in range(sum(COUNTS))}  # by sample
MODES: dict[str, dict[str, Any]] = {
    "resampled": {"sampling": {"replacement": False}},
    "epoch": {"sampling": {"mode": "epoch"}},
    **{tail: {"sampling": {"mode": "indexed", "remainder": tail}} for tail in ("drop", "pad", "wrap")},
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return make_shards(tmp_path_factory.mktemp("shards"), COUNTS)


@pytest.fixture
def chances(tmp_path: Path, shards: list[str]) -> str:
    names = [f"{i:05d}.tar" for i, count in enumerate(COUNTS) for _ in range(count)]
    assert {Path(shard).name for shard in shards} == set(names)
    keys = {"shard": names, "key": [f"{n:06d}" for n in CHANCE], "probability": list(CHANCE.values())}
    parquet.write_table(pa.table(keys), tmp_path / "p.parquet")
    return str(tmp_path / "p.parquet")


def assert_binomial(counts: Counter[int], times: int, more: int = 0) -> None:
    """Each sample comes as often as its probability says: 4.5 standard deviations, 7e-6 for each of 48.

    Args:
        more: passes by which samples may differ at the end.
    """
    for n, p in CHANCE.items():
        assert abs(counts[n] - times * p) <= more * p + 4.5 * (times * p * (1 - p)) ** 0.5, (n, p, counts[n], times)


def test_systematic_draws_are_exact() -> None:
    rng = np.random.default_rng(1)
    p = np.concatenate((rng.uniform(size=40), [0.0, 1.0, np.nan, 1.0, 1e-3]))
    counts = np.array([13, 0, 30, 2, 0])
    draws, passes = SystematicDraws(p), 4000
    wanted = np.nan_to_num(p)
    assert draws.size == np.ceil(wanted.sum())
    found, empty, starts = np.zeros(len(p)), 0, np.cumsum(counts) - counts
    for key in range(passes):
        numbers, ends = draws(key, counts)
        assert len(numbers) == ends[-1] == draws.size
        there = numbers != NO_SAMPLE
        empty += int((~there).sum())
        numbers = (numbers + np.repeat(starts, np.diff(ends, prepend=0)))[there]
        assert len(np.unique(numbers)) == len(numbers) >= draws.size - 1
        found[numbers] += 1
    assert (np.abs(found - passes * wanted) <= 4.5 * np.sqrt(passes * wanted * (1 - wanted))).all()
    rest = draws.size - wanted.sum()
    assert abs(empty - passes * rest) <= 4.5 * (passes * rest * (1 - rest)) ** 0.5


@pytest.mark.parametrize("mode", ["resampled", "epoch", "pad"])
def test_samples_come_as_often_as_their_probability_says(shards: list[str], chances: str, mode: str) -> None:
    source = {"shards": shards, "probability": chances}
    settings = data([], sources={"train": source}, lanes=3, **MODES[mode])
    one, counts, batches = loader(settings), Counter[int](), 200
    total = sum(CHANCE.values())
    assert round(total, 9) == 24
    for _ in range(batches):
        batch = next(one)
        one.mark_trained()
        keys = zip(batch.keys, batch.weights.tolist(), strict=True)
        counts.update(int(key.rpartition("/")[2]) for key, w in keys if w)
    if mode in ("resampled", "epoch"):
        passes = sum(counts[n] for n, p in CHANCE.items() if p == 1) / sum(p == 1 for p in CHANCE.values())
        assert abs(passes - batches * 12 / total) < 8
        assert_binomial(counts, round(passes), more=3)
        train = one.trained.sources["train"]
        assert set(train.dropped) == {"not_drawn"} and train.failed == 0
    else:
        assert_binomial(counts, batches // 2)  # of 24 samples, which 2 batches of 12 hold


@pytest.mark.parametrize(("mode", "ranks", "workers"), [("resampled", 3, 1), ("epoch", 2, 0), ("wrap", 3, 0)])
def test_batches_are_the_same_on_any_ranks_and_go_on(
    shards: list[str], tmp_path: Path, chances: str, mode: str, ranks: int, workers: int
) -> None:
    drop = tmp_path / "drop.txt"
    drop.write_text("00000.tar/000007\n000047\n")
    source = {"shards": shards, "probability": chances, "drop": str(drop), "weight": 2}
    settings = data([], sources={"train": source, "other": {"shards": shards[0]}}, **MODES[mode])
    plain = drawn_keys(settings, 1, 13)
    assert not {7, 47} & {n for _, keys in plain[:13] for n in keys if n >= COUNTS[0] or n == 47}
    assert_layouts(settings, plain, (ranks, workers))


def test_a_field_gives_the_batches_of_a_file(tmp_path: Path) -> None:
    shards = make_shards(tmp_path, COUNTS)
    rows = ["shard,key,probability", *(f"/else/{i:05d}.tar,{n:06d},{n / 47}" for i, n in numbered(COUNTS))]
    (tmp_path / "p.csv").write_text("\n".join(rows))
    transform = "tests.data.test_probability:scaled"
    for mode in ("resampled", "pad"):
        found = []
        for probability, how in ((str(tmp_path / "p.csv"), {}), ("json:p", {"transform": transform}), ("p", {
            "transform": transform})):  # fmt: skip
            source = {"shards": shards, "probability": probability, **how}
            found.append(drawn_keys(data([], sources={"train": source}, **MODES[mode]), 1, 8)[:8])
        assert found[0] == found[1] == found[2]


def scaled(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample with its number as a probability, in its JSON and beside it."""
    p = int(sample["__key__"]) / 47
    return sample | {"json": f'{{"p": {p}}}'.encode(), "p": p}


def test_odd_probabilities(tmp_path: Path, shards: list[str], chances: str, capsys: pytest.CaptureFixture[str]) -> None:
    def said(probability: str, **how: Any) -> str:
        settings = data([], sources={"train": {"shards": shards, "probability": probability}}, **how)
        with pytest.raises((SettingsError, DataError)) as error:
            for one in [loader(settings)] * 200:
                next(one)
        return str(error.value)

    table = tmp_path / "odd.csv"
    for row, why in (("00000.tar,000001,1.5", "1.5 is no probability"), ("00000.tar,000001,much", "cannot read a list"),
                     ("other,000001,", "nan is no probability")):  # fmt: skip
        table.write_text(f"shard,key,probability\n{row}\n")
        assert why in said(str(table))
    table.write_text("shard,key,p\n00000.tar,000001,0.5\n")
    assert "no column 'probability'" in said(str(table))
    table.write_text("shard,key,probability\nother.tar,000001,0.5\n")
    for mode in ({}, MODES["pad"]):
        assert "0 of its 1 entries match samples of these data; 'other.tar/000001' does" in said(str(table), **mode)
    table.write_text("shard,key,probability\n00000.tar,000001,0\n")
    assert "none of the 48 samples has one above 0" in said(str(table), **MODES["pad"])
    assert "no_probability, e.g. 00000.tar/000000: not in" in said(str(table))
    assert "'picture 0' is no number" in said("json:caption.en")
    table.write_text("shard,key,probability\n00000.tar,000001,0.5\n")
    next(loader(data([], sources={"train": {"shards": shards, "probability": str(table)}}, **MODES["pad"])))
    split = {"mode": "indexed", "shards": "split"}
    with pytest.raises(ValueError, match="whose lanes have the same samples in every epoch"):
        data([], sources={"train": {"shards": shards, "probability": chances}}, sampling=split)
    state = drawn_keys(data([], sources={"train": {"shards": shards, "probability": chances}}), 1, 1)[-1]
    with pytest.raises(SettingsError, match=r"data.sources.train.probability: \w+ -> json:n"):
        drawn_keys(data([], sources={"train": {"shards": shards, "probability": "json:n"}}), 1, 1, state)


def test_epochs_and_held_out_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = furnish(tmp_path)
    (tmp_path / "p.csv").write_text("key,probability\n" + "".join(f"{n:06d},{n % 2 / 2}\n" for n in range(62)))
    more = f"--data.sources.train.probability={tmp_path}/p.csv", "--data.global-batch-size=6", "--epochs=2"
    argv = flags(place, "drawn", *more)
    del argv[(steps := argv.index("--steps")) : steps + 2]
    assert main(argv) == 2
    assert "--train-num-samples" in capsys.readouterr().err
    assert main([*argv, "--data.sampling.mode=indexed", "--val-split=0.2", "--name=exact"]) == 0
    samples = [line["samples"] for line in lines(place, "exact")]
    held = set((place / "runs" / "exact" / "val_split.txt").read_text().splitlines()[1:])
    assert held
    odd = 31 - sum(int(name[-6:]) % 2 for name in held)  # with a probability of one half
    assert samples[-1] == 2 * (-(-odd // 2) // 6 * 6), (samples, odd)
