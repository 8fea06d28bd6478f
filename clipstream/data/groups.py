"""The group of every sample of a source, where samples are not read as training goes: one pass, kept in the cache.

A source and a field enter; a label of each sample leaves (see `labels.GroupField`), by shard. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from clipstream.data.decode.labels import GroupField, compare_groups
from clipstream.data.order.lanes import Numbers
from clipstream.data.scan import cached, identity, scan
from clipstream.data.settings import DataSettings
from clipstream.data.sources import Source
from clipstream.errors import SettingsError
from clipstream.utils.logs import logger

FORM = 1  # of the file and of labels: another one is another identity


def group_labels(source: Source, field: str, data: DataSettings, setting: str) -> list[Numbers]:
    """By shard, in the order of `source.names`, the label of each sample: int64; 0 where training cannot use it.

    Args:
        setting: that asks for them, for messages.

    Raises SettingsError: a shard cannot be read, or labels cannot be kept.
    """
    section, name = source.settings, source.context.key.removeprefix("data.sources.")
    group = GroupField(field, name)
    names = list(dict.fromkeys(source.names))

    def fill(part: Path) -> None:
        found = scan("groups", source, data, group.members, group)
        labels = [np.array([label or 0 for label in found[name]], dtype=np.int64) for name in names]
        with part.open("wb") as file:
            np.savez(file, labels=np.concatenate(labels), ends=np.cumsum([len(one) for one in labels]))

    how = [FORM, field, name, section.transform, section.separator, section.quoting]
    path = cached(setting, "groups", identity(source, *how), fill)
    with np.load(path, allow_pickle=False) as held:
        by_name = dict(zip(names, np.split(held["labels"], held["ends"][:-1]), strict=True))
    return [by_name[name] for name in source.names]


def check_groups(labels: Sequence[Numbers], field: str, *, told: bool) -> None:
    """Warn if most samples have no group, where `told`. Raises SettingsError: no two samples share one."""
    setting, found = "data.groups.by", np.concatenate(labels)
    found = found[found != 0]
    shared, few = compare_groups(setting, field, found)
    if not shared:
        raise SettingsError(f"{setting}: no two of the {len(found):,} samples have the same {field!r}")
    if told and few:
        logger.warning(few)
