"""Which samples each new shard gets, and which are held out for validation: lists enter, numbers leave."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipstream.data.decode.labels import compare_groups
from clipstream.data.groups import group_labels
from clipstream.data.order.lanes import Numbers
from clipstream.data.order.rng import mix, permuted
from clipstream.data.packing.lists import Corpus, Listed
from clipstream.data.settings import DataSettings
from clipstream.data.val_split import choose, compared
from clipstream.errors import DataError
from clipstream.utils.logs import logger


@dataclass(frozen=True)
class Plan:
    """Which samples each new shard gets. Samples are numbered in the order of the sources, from 0."""

    ends: Numbers  # number behind the last sample of each shard of the sources, int64
    size: int | None  # most samples of a new shard; None for one new shard for each of the sources
    shuffled: bool
    seed: int
    unique: bool  # whether keys are unique over all samples, and stay as they are
    held: Numbers | None = None  # the samples for validation, sorted, int64

    @cached_property
    def _parts(self) -> list[tuple[str, int, int]]:
        """(folder, samples, shards) of each split."""
        total = int(self.ends[-1])
        held = 0 if self.held is None else len(self.held)
        split = [("", total)] if self.held is None else [("train/", total - held), ("val/", held)]
        if self.size is None:
            return [("", total, len(self.ends))]
        return [(folder, count, -(-count // self.size)) for folder, count in split]

    def __len__(self) -> int:
        return sum(shards for _, _, shards in self._parts)

    def shard(self, number: int) -> tuple[str, Numbers]:
        """The file of a new shard, and the numbers of its samples in order."""
        for turn, (folder, count, shards) in enumerate(self._parts):
            if number < shards:
                if self.size is None:
                    return f"{number:05d}.tar", np.arange(self.ends[number - 1] if number else 0, self.ends[number])
                positions = np.arange(count * number // shards, count * (number + 1) // shards)
                if self.shuffled:
                    positions = permuted(positions, count, mix(self.seed, turn))
                if self.held is not None:
                    positions = self.held[positions] if turn else _without(positions, self.held)
                return f"{folder}{number:05d}.tar", positions
            number -= shards
        raise IndexError(number)

    def places(self, numbers: Numbers) -> Iterator[tuple[int, int]]:
        """(shard of the sources, row in its list) of samples."""
        shards = np.searchsorted(self.ends, numbers, side="right")
        rows = numbers - np.concatenate([[0], self.ends])[shards]
        return zip(shards.tolist(), rows.tolist(), strict=True)


def _without(positions: Numbers, held: Numbers) -> Numbers:
    """The numbers at some positions among all that are not in `held`."""
    return positions + np.searchsorted(held - np.arange(len(held)), positions, side="right")


def plan_of(corpus: Corpus, listed: Sequence[Listed], size: int | None, shuffled: bool, seed: int) -> Plan:
    """The plan without a split for validation."""
    ends = np.cumsum([one.samples for one in listed], dtype=np.int64)
    hashes = corpus.hashes()
    hashes.sort()
    return Plan(ends, size, shuffled, seed, not bool((hashes[1:] == hashes[:-1]).any()))


def held_out(corpus: Corpus, data: DataSettings, share: float, group: str | None, kept: Path, executor: str) -> Numbers:
    """The numbers of the samples for validation, sorted, as `val_split.choose` chooses them; int64.

    Args:
        group: field whose equal values stay on one side; None for none.
        kept: the file of an earlier call, or for the next one.

    Raises:
        SettingsError: a shard cannot be read, or no sample has the field.
        DataError: too few samples can be held out.
    """
    with contextlib.suppress(OSError, ValueError):
        found: Numbers = np.load(kept)
        return found
    tables = []
    for source in corpus.sources:
        labels = dict[str, Numbers]()
        if group is not None:
            labels = dict(zip(source.names, group_labels(source, group, data, "--group"), strict=True))
            if few := compare_groups("--group", group, np.concatenate([*labels.values()]))[1]:
                logger.warning(few)
        tables.append(compared(source, data, [*labels.values()], kept.parent / "samples", executor))
    rows = pa.concat_tables(tables, promote_options="default")  # of the samples that are listed
    usable = pc.equal(rows["reason"], "")
    names, said = choose(np.flatnonzero(usable).astype(str).tolist(), rows.filter(usable), share)
    if names is None:
        raise DataError(f"--val-split: {said}")
    held = np.array(sorted(map(int, names)), np.int64)
    with open(draft := kept.with_suffix(".part"), "wb") as file:
        np.save(file, held)
    draft.replace(kept)
    return held
