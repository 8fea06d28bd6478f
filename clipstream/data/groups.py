"""What an order needs to know of every sample of a source before training: its group, its hard neighbours, or the
probability with which it is drawn.

A source enters; numbers of each sample leave, by shard. They are read in one pass over the source, which is kept in the
cache. Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from clipstream.data.decode.captions import RawSample
from clipstream.data.decode.key_lists import forms, read_key_table
from clipstream.data.decode.labels import GroupField, LabelField, SampleProbability, compare_groups
from clipstream.data.order.lanes import Numbers
from clipstream.data.order.rng import hash_of
from clipstream.data.scan import ShardPass, ShardSamples, file_state, scanned
from clipstream.data.settings import DataSettings
from clipstream.data.sources import Source
from clipstream.errors import Dropped, SettingsError
from clipstream.text import counted, listed, printable
from clipstream.utils.logs import logger
from clipstream.utils.processes import Failed

FORM = 1  # of what is kept: another one is another identity


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
    return scanned(setting, source, data, group.members, group, 0, "groups", FORM, field, name, *_reading(source))


def probabilities(source: Source, data: DataSettings) -> list[np.ndarray[Any, Any]]:
    """By shard, the probability of each sample: float64; NaN where it has none, or training cannot use it.

    Raises SettingsError: as `group_labels`, or SampleProbability.
    """
    where = source.settings.probability
    assert where is not None
    one, how = SampleProbability(where, _name(source)), (FORM, where, file_state(where), *_reading(source))
    setting = f"{source.context.key}.probability"
    return scanned(setting, source, data, one.members, one, float("nan"), "probabilities", *how)


def label_names(source: Source, label: str, data: DataSettings) -> tuple[str, list[str]]:
    """Where labels are, `label` or else this field of the JSON member, and the labels that occur, as `LabelField` reads
    them, sorted; of spellings that differ in case, the most frequent one.

    Raises SettingsError: no sample has a label.
    """
    field = LabelField(label)

    def do(number: int, samples: ShardSamples) -> Counter[str]:
        found = Counter[str]()
        for _, _, sample in samples:
            with suppress(Dropped):  # as in the evaluation, which counts it
                found.update([] if isinstance(sample, Dropped) else [field(sample, None).strip()])
        return found

    each = ShardPass(source, data, field.members, do).run("labels", Counter.total)
    found = sum((one for one in each if not isinstance(one, Failed)), Counter[str]())
    if not found and field.of_member:
        return label_names(source, f"json:{label}", data)
    if not found:
        name = label.removeprefix("json:")
        raise SettingsError(f"no sample has a label in {name!r}: `clipstream check` lists the members and fields")
    spellings = {name.casefold(): name for name, _ in reversed(found.most_common())}
    return label, [spellings[name] for name in sorted(spellings)]


def _check_groups(labels: Sequence[Numbers], field: str, told: bool) -> None:
    """Warn if most samples have no group, where `told`. Raises SettingsError: no two samples share one."""
    setting, found = "data.groups.by", np.concatenate(labels)
    found = found[found != 0]
    shared, few = compare_groups(setting, field, found)
    if not shared:
        raise SettingsError(f"{setting}: no two of the {len(found):,} samples have the same {field!r}")
    if told:
        logger.info(f"groups   {len(np.unique(found)):,} of {len(found):,} samples, by {field}")
    if told and few:
        logger.warning(few)


def _neighbours(source: Source, path: str, data: DataSettings, told: bool) -> np.ndarray[Any, Any]:
    """The hard neighbours of each sample by their numbers in the source, best first: int32 [n, K], filled with -1.

    Args:
        path: of a Parquet file with the columns shard, key and neighbours (lists of SHARD/KEY); where it has the column
            source, rows of other sources are ignored.

    Raises SettingsError: the file cannot be read, or no sample has a neighbour.
    """
    setting = "data.hard_negatives"
    try:
        seeds, lists = read_key_table(path, _name(source), "neighbours")
        flat = [name for names in lists for name in names or ()]
        each = np.array([len(names or ()) for names in lists], dtype=np.int64)
        if any(isinstance(names, str) for names in lists):
            raise ValueError("the column 'neighbours' has no lists")
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise SettingsError(f"{setting}: cannot read {path}: {text}") from error
    held = np.concatenate(scanned(setting, source, data, (), _hash_of_sample, 0, "names", FORM))
    unique = list(dict.fromkeys([*seeds, *flat]))
    known = dict(zip(unique, _numbers(unique, held).tolist(), strict=True))
    absent = [name for name, number in known.items() if number < 0]
    rows = np.repeat(np.array([known[name] for name in seeds], dtype=np.int64), each)
    near = np.array([known[name] for name in flat], dtype=np.int64)
    ranks = np.arange(len(flat)) - np.repeat(np.cumsum(each) - each, each)
    good = (rows >= 0) & (near >= 0) & (rows != near)
    if not good.any():
        of = f"none of its {counted(len(unique), 'sample', ',')} with neighbours is in the training data"
        raise SettingsError(f"{setting}: {path}: {of}: mine it from a store of this source, as `clipstream search`")
    if told and absent:
        some = listed([printable(name, 100) for name in absent], 1)
        logger.warning(
            f"{setting}: {len(absent):,} of the {len(unique):,} samples in {path} are not in the training data and are "
            f"left out, such as {some}"
        )
    found = np.full((len(held), int(each.max())), -1, dtype=np.int32)
    found[rows[good], ranks[good]] = near[good]
    return found


def _numbers(names: Sequence[str], held: Numbers) -> Numbers:
    """The numbers of the samples of names 'SHARD/KEY'; -1 for those that the source does not have.

    Args:
        held: hashes of the samples' names; 0 for a sample that training does not use.
    """
    order = np.argsort(held, kind="stable")
    found: Numbers = np.full(len(names), -1, dtype=np.int64)
    for form in (0, -1):  # as it is, and without what stands around SHARD/KEY
        left = np.flatnonzero(found < 0)
        wanted = np.array([_hash_of([*forms(names[i])][form]) for i in left.tolist()], dtype=np.int64)
        places = order[np.minimum(np.searchsorted(held, wanted, sorter=order), len(order) - 1)]
        found[left] = np.where(held[places] == wanted, places, -1)
    return found


def _hash_of_sample(name: str, sample: RawSample) -> int:
    return _hash_of(name)


def _hash_of(name: str) -> int:
    """A hash that fits into int64."""
    return hash_of(name.encode(errors="surrogateescape")) - (1 << 63)


def _name(source: Source) -> str:
    return source.context.key.removeprefix("data.sources.")


def _reading(source: Source) -> tuple[object, ...]:
    """The settings that the fields of a sample depend on."""
    section = source.settings
    return section.transform, section.separator, section.quoting
