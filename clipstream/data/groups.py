"""What an order needs to know of every sample of a source before training: its group, its hard neighbours, or the
probability with which it is drawn; and the orders of exact epochs whose batches have samples that belong together.

A source enters; numbers of each sample leave, by shard. They are read in one pass over the source, which is kept in the
cache. Of an order, the line of an epoch is a function of these numbers, the seed and the epoch. Imports no torch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np

from clipstream.data.decode.class_names import fold_name
from clipstream.data.decode.key_lists import KeyList, List, errors_of_list, read_list
from clipstream.data.decode.labels import GroupField, LabelField, SampleProbability, compare_groups
from clipstream.data.order.lanes import Numbers, share_of
from clipstream.data.order.rng import mix, permutation
from clipstream.data.order.windows import EpochPlan, Order, WindowSamples
from clipstream.data.settings import DataSettings
from clipstream.data.shard_pass import SamplePass, ShardSamples, scan_numbers
from clipstream.data.sources import Source
from clipstream.errors import Dropped, SettingsError
from clipstream.text import counted
from clipstream.utils.content import file_state
from clipstream.utils.logs import logger
from clipstream.utils.processes import TaskFailure

FORM = 3  # of what is kept: another one is another identity


def look_up(source: Source, data: DataSettings, *, told: bool = False) -> None:
    """Set what the order of the mode `indexed` needs of each sample: labels, neighbours or probabilities of the source.

    Args:
        told: whether to warn of samples that have none.

    Raises SettingsError: a shard or file cannot be read; no two samples share a group, no sample has a neighbour or a
        probability.
    """
    if data.groups.by is not None:
        source.labels = group_labels(source, data.groups.by, data, "data.groups.by")
        _check_groups(source.labels, data.groups.by, told)
    if data.hard_negatives is not None:
        source.neighbours = _neighbours(source, data.hard_negatives, data, told)
    if source.settings.probability is not None:
        source.probabilities = probabilities(source, data)
        values = np.concatenate(source.probabilities)
        key, missing = f"{source.context.key}.probability", int(np.isnan(values).sum())
        if not np.nansum(values):
            said = f"none of the {len(values):,} samples has one above 0 in {source.settings.probability}"
            raise SettingsError(f"{key}: {said}: name a file with the columns shard, key and probability, or json:PATH")
        if told and missing:
            logger.warning(f"{key}: {missing:,} of {len(values):,} samples cannot be used or have none: never drawn")


def group_labels(source: Source, field: str, data: DataSettings, setting: str) -> list[Numbers]:
    """By shard, in the order of `source.names`, the label of each sample (see `labels.GroupField`): int64; 0 where
    training cannot use it.

    Args:
        setting: that asks for them, for messages.

    Raises SettingsError: a shard cannot be read, or labels cannot be kept.
    """
    name = _name(source)
    group = GroupField(field, name)
    return scan_numbers(setting, source, data, group.members, group, 0, "groups", FORM, field, name, *_reading(source))


def probabilities(source: Source, data: DataSettings) -> list[np.ndarray[Any, Any]]:
    """By shard, the probability of each sample: float64; NaN where it has none, or training cannot use it.

    Raises SettingsError: as `group_labels`, or SampleProbability.
    """
    where = source.settings.probability
    assert where is not None
    setting, one = f"{source.context.key}.probability", SampleProbability(where, source.context.key, source)
    if (listed := one.list) is None:
        how = FORM, where, *_reading(source)
        return scan_numbers(setting, source, data, one.members, one, float("nan"), "probabilities", *how)

    entries = _entries(setting, source, data, listed)
    if sum(one.probability == where for one in data.sources.values()) < 2:  # else it may be of another source
        listed.check()
    assert listed.values is not None
    return [np.where(of < 0, np.nan, listed.values[np.maximum(of, 0)]) for of in entries]


def label_names(source: Source, label: str, data: DataSettings) -> tuple[str, list[str]]:
    """Where labels are, `label` or else this field of the JSON member, and the labels that occur, as `LabelField` reads
    them, sorted; of spellings of one class (`fold_name`), the most frequent one.

    Raises SettingsError: no sample has a label.
    """
    field = LabelField(label)

    def do(number: int, samples: ShardSamples) -> Counter[str]:
        found = Counter[str]()
        for _, _, sample in samples:
            with suppress(Dropped):  # as in the evaluation, which counts it
                found.update([] if isinstance(sample, Dropped) else [field(sample, None).strip()])
        return found

    each = SamplePass(source, data, field.members, do).run("labels", count=Counter.total)
    found = sum((one for one in each if not isinstance(one, TaskFailure)), Counter[str]())
    if not found and field.of_member:
        return label_names(source, f"json:{label}", data)
    if not found:
        name = label.removeprefix("json:")
        raise SettingsError(f"no sample has a label in {name!r}: `clipstream check` lists the members and fields")
    spellings = {fold_name(name): name for name, _ in reversed(found.most_common())}
    return label, [spellings[name] for name in sorted(spellings)]


def _check_groups(labels: Sequence[Numbers], field: str, told: bool) -> None:
    """Warn if most samples have no group, where `told`. Raises SettingsError: no two samples share one."""
    setting, found = "data.groups.by", np.concatenate(labels)
    found = found[found != 0]
    alone, few = compare_groups(setting, field, found)
    if alone:
        raise SettingsError(alone)
    if told:
        logger.info(f"groups   {len(np.unique(found)):,} of {len(found):,} samples, by {field}")
    if told and few:
        logger.warning(few)


def _neighbours(source: Source, path: str, data: DataSettings, told: bool) -> np.ndarray[Any, Any]:
    """The hard neighbours of each sample by their numbers in the source, best first: int32 [n, K], filled with -1.

    Args:
        path: of a Parquet file with the columns shard, key and neighbours (lists of SHARD/KEY); where it has the column
            source, rows of other sources are ignored.

    Raises SettingsError: the file cannot be read, names samples that the source does not have, or no sample has a
        neighbour.
    """
    setting = "data.hard_negatives"
    with errors_of_list(f"{setting}: {path}"):
        table = read_list(path, _name(source), "neighbours")
        lists = table.columns[0]
        if any(isinstance(names, str) for names in lists):
            raise ValueError("the column 'neighbours' has no lists")
    owners, names = [table.name(n) for n in range(len(lists))], [name for names in lists for name in names or ()]
    each = np.array([len(some or ()) for some in lists], dtype=np.int64)
    entries: dict[str, tuple[str | None, str]] = {name: (None, name) for name in names}
    entries |= dict(zip(owners, zip(table.shards, table.keys, strict=True), strict=True))
    shards, keys = zip(*entries.values(), strict=True) if entries else ((), ())
    every = List(shards, keys, np.arange(len(keys)), [])
    listed = KeyList(path, _name(source), source=source, flag=setting, listed=every)
    of = np.concatenate(_entries(setting, source, data, listed, by_key=False))
    listed.check(told=told, advice="mine it from a store of this source, as `clipstream search`")
    numbers = np.full(len(listed), -1)
    used = np.flatnonzero(of >= 0)[::-1]  # of a shard that is listed twice, the first one counts
    numbers[of[used]] = used
    known = dict(zip(entries, numbers[listed.same].tolist(), strict=True))
    rows = np.repeat(np.array([known[name] for name in owners], dtype=np.int64), each)
    near = np.array([known[name] for name in names], dtype=np.int64)
    ranks = np.arange(len(names)) - np.repeat(np.cumsum(each) - each, each)
    good = (rows >= 0) & (near >= 0) & (rows != near)
    if not good.any():
        said = f"none of its {counted(len(known), 'sample', ',')} with neighbours is used in training"
        raise SettingsError(f"{setting}: {path}: {said}: keep and drop leave them out")
    found = np.full((len(of), int(each.max())), -1, dtype=np.int32)
    found[rows[good], ranks[good]] = near[good]
    return found


def _entries(
    setting: str, source: Source, data: DataSettings, listed: KeyList, *, by_key: bool = True
) -> list[np.ndarray[Any, Any]]:
    """By shard, the first entry of each sample in a list, whose entries without a sample are noted: int64; -1 for none,
    -2 - entry for a sample that training does not use.

    Args:
        by_key: whether an entry may be a key alone.
    """

    def entry(name: str, key: str) -> int:
        place = listed.place(name, key if by_key else name)
        return -1 if place is None else place

    found = scan_numbers(
        setting, source, data, (), lambda name, sample: entry(name, sample["__key__"]), -1, "entries", FORM, setting,
        listed.path, file_state(listed.path), left_out=lambda name, key: -2 - entry(name, key),
    )  # fmt: skip
    every = np.unique(np.concatenate(found))
    listed.set_found(np.where(every < -1, -2 - every, every)[every != -1].tolist())
    return found


def _name(source: Source) -> str:
    return source.context.key.removeprefix("data.sources.")


def _reading(source: Source) -> tuple[object, ...]:
    """The settings that the fields of a sample depend on."""
    section = source.settings
    return section.transform, section.separator, section.quoting


class LineOrder(Order):
    """An order whose epochs are a line of all samples of one source, cut into batches, in the mode `indexed`.

    All shards are open, and a lane's slots of an epoch are one window.

    Args:
        plan: of the epochs, of one source.
        counts: samples of each shard.
    """

    keeps_slots = True

    def __init__(self, plan: EpochPlan, counts: Sequence[int]) -> None:
        self.seed, self.source, self.window = plan.seed, 0, plan.steps * plan.batch
        self._plan, self._counts = plan, np.asarray(counts, dtype=np.int64)
        self._line = lru_cache(maxsize=2)(self._make_line)

    @abstractmethod
    def _make_line(self, epoch: int) -> Numbers:
        """The samples of an epoch in the order of its slots, by their numbers in the source."""

    def group(self, lane: int, group: int) -> list[int]:
        return list(range(len(self._counts)))

    def sizes(self, lane: int, group: int, found: Sequence[int]) -> list[int]:
        return [len(self._plan.stretch(0, lane)), *[0] * (len(self._counts) - 1)]

    def samples(self, lane: int, group: int, window: int, sizes: Sequence[int]) -> WindowSamples:
        plan = self._plan
        first, count = share_of(lane, plan.lanes, plan.batch)
        slots = (np.arange(plan.steps)[:, None] * plan.batch + first + np.arange(count)).ravel()
        numbers = self._line(group)[slots[: sum(sizes)]]
        ends = np.cumsum(self._counts)
        shards = np.searchsorted(ends, numbers, "right")
        return np.stack((shards, numbers - (ends - self._counts)[shards]), axis=1)

    def _fill(self, line: Numbers) -> Numbers:
        """The line, which begins again for `wrap`."""
        return np.resize(line, max(len(line), self._plan.steps * self._plan.batch))


class GroupedOrder(LineOrder):
    """The order of a source whose batches have `size` samples of a group each.

    The line has each sample once. It is made of runs of `size` samples of a group, in random order; what is left of
    groups, and groups that are smaller, follow each other in further runs, which are among the others.

    Args:
        labels: of the samples of each shard, int64; a group's are equal and even, others are of samples without one.
        size: of a run; divides the batch.
    """

    def __init__(self, plan: EpochPlan, labels: Sequence[Numbers], size: int) -> None:
        super().__init__(plan, [len(one) for one in labels])
        self._size = size
        self._labels: Numbers = np.concatenate(labels)
        alone = (self._labels == 0) | (self._labels & 1 == 1)
        self._labels[alone] = 2 * np.flatnonzero(alone) + 1

    def _make_line(self, epoch: int) -> Numbers:
        size, drawn = self._size, permutation(len(self._labels), mix(self.seed, 16, epoch))
        groups = mix(self._labels[drawn].astype(np.uint64), state=mix(self.seed, 17, epoch))
        drawn = drawn[np.argsort(groups, kind="stable")]
        _, counts = np.unique(groups, return_counts=True)
        place = np.arange(len(drawn)) - np.repeat(np.cumsum(counts) - counts, counts)
        whole = place < np.repeat(counts // size * size, counts)
        rest = drawn[~whole]
        end = len(rest) // size * size
        runs = np.concatenate((drawn[whole], rest[:end])).reshape(-1, size)
        line = np.concatenate((runs[permutation(len(runs), mix(self.seed, 18, epoch))].ravel(), rest[end:]))
        return self._fill(line)


class NeighbourOrder(LineOrder):
    """The order of a source whose batches are filled with seed samples and their hard neighbours.

    The line has each sample once. A batch takes a seed, its neighbours that no batch of the epoch has yet, best first,
    then the next seed, until it is full. Seeds come in random order. As the batches that are filled last have the
    fewest neighbours, batches are put in random order; one that is not full is the last.

    Args:
        neighbours: of each sample, by their numbers in the source, best first: [n, K], filled with -1.
    """

    def __init__(self, plan: EpochPlan, counts: Sequence[int], neighbours: np.ndarray[Any, Any]) -> None:
        super().__init__(plan, counts)
        self._neighbours = neighbours

    def _make_line(self, epoch: int) -> Numbers:
        batch, line, used = self._plan.batch, list[int](), bytearray(len(self._neighbours))
        for seed in permutation(len(used), mix(self.seed, 20, epoch)).tolist():
            if used[seed]:
                continue
            used[seed] = 1
            line.append(seed)
            for near in self._neighbours[seed].tolist():
                if not len(line) % batch:
                    break
                if near >= 0 and not used[near]:
                    used[near] = 1
                    line.append(near)
        end = len(line) // batch * batch
        whole = np.array(line[:end], dtype=np.int64).reshape(-1, batch)
        whole = whole[permutation(len(whole), mix(self.seed, 22, epoch))]
        return self._fill(np.concatenate((whole.ravel(), np.array(line[end:], dtype=np.int64))))
