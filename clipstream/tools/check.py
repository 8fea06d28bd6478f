"""Owns the look into a data set without a model: what its samples hold, what settings would use of it, which to use.

Reads and decodes like training does, but never trains, writes or imports torch.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from clipstream.batch import ImageSpec
from clipstream.data.fields import build_caption, image_bytes
from clipstream.data.images import EvalTransform
from clipstream.data.profile import Profile
from clipstream.data.remote import ShardError, ShardStore
from clipstream.data.settings import CaptionSettings
from clipstream.data.shards import redact, scheme_of
from clipstream.data.tarstream import Shard
from clipstream.errors import DataError, Dropped

T = TypeVar("T")
SHARDS_READ = 10  # of a large data set, spread over it
ROWS = 25
SHOWN = ImageSpec((64, 64))


@dataclass
class View:
    """What was found.

    Attributes:
        shards: number of shards named.
        missing: local shards that are not there.
        read: shards opened.
        faults: shard -> what is wrong with it.
        held: samples of the shards opened.
        profile: members and JSON fields of the samples read.
        used: samples read that training would use.
        drops: samples read that it would drop, by reason.
        examples: reason -> one of them, with the detail.
        captions: 'SHARD/KEY' -> caption of the first samples used.
    """

    shards: int
    missing: list[str] = field(default_factory=list)
    read: int = 0
    faults: dict[str, str] = field(default_factory=dict)
    held: int = 0
    profile: Profile = field(default_factory=Profile)
    used: int = 0
    drops: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    captions: dict[str, str] = field(default_factory=dict)


def look(shards: Sequence[str], image_key: str, caption: CaptionSettings, samples: int) -> View:
    """Read `samples` samples (0: all) evenly out of the shards: of more than ten shards, out of ten of them.

    Raises:
        SettingsError: the caption settings do not fit together.
    """
    view = View(len(shards))
    view.missing = [url for url in shards if scheme_of(url) is None and not os.path.exists(url)]
    gone = set(view.missing)
    chosen = _spread([url for url in shards if url not in gone], SHARDS_READ if samples else 0)
    extract = build_caption(caption)
    transform = EvalTransform(SHOWN, "white")
    store = ShardStore(None)
    try:
        for number, url in enumerate(chosen):
            if samples and view.profile.samples >= samples:
                break
            wanted = -(-(samples - view.profile.samples) // (len(chosen) - number)) if samples else 0
            name = redact(url)
            try:
                shard = Shard(store.local(url))
            except (ShardError, OSError) as error:
                view.faults[name] = str(error)
                continue
            view.read += 1
            view.held += len(shard.index.samples)
            if shard.index.fault is not None:
                view.faults[name] = str(shard.index.fault)
            for ref in _spread(shard.index.samples, wanted):
                where = f"{Path(name).name}/{ref.key}"
                try:
                    sample = {"__key__": ref.key, "__url__": url, **shard.load(ref)}
                    view.profile.add(sample)
                    picture = image_bytes(sample, image_key)
                    text = extract(sample, None)
                    transform(picture)
                except Dropped as drop:
                    view.drops[drop.reason] += 1
                    view.examples.setdefault(drop.reason, f"{where}: {drop.detail}" if drop.detail else where)
                else:
                    view.used += 1
                    if len(view.captions) < 3:
                        view.captions[where] = text
            shard.close()
            store.release(url)
    finally:
        store.close()
    return view


def _spread(items: Sequence[T], count: int) -> list[T]:
    """`count` of the items at even distances, all of them for 0."""
    if count <= 0 or count >= len(items):
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


def show(view: View, console: Console) -> None:
    """Print the view as tables."""
    read = view.profile.samples
    console.print(f"{view.shards:,} shards, {view.read:,} read: {read:,} of their {view.held:,} samples")
    if view.missing:
        first = ", ".join(view.missing[:3])
        console.print(f"not there: {len(view.missing):,} of them: {first}{' …' if len(view.missing) > 3 else ''}")
    if view.faults:
        table = _table("Faults", "shard", "what is wrong")
        for name, fault in list(view.faults.items())[:ROWS]:
            table.add_row(name, fault)
        console.print(table)
    if not read:
        return
    table = _table("Members", "suffix", "samples", "what")
    for suffix, count in view.profile.suffixes.most_common(ROWS):
        what = "picture" if view.profile.images[suffix] else view.profile.texts.get(suffix, "")
        table.add_row(suffix, f"{count:,}", what or ("JSON" if suffix.endswith("json") else "bytes"))
    console.print(table)
    if view.profile.json_fields:
        table = _table("JSON fields", "path", "samples", "type", "example")
        fields = sorted(view.profile.json_fields.items(), key=lambda item: -item[1].samples)
        for path, value in fields[:ROWS]:
            table.add_row(path, f"{value.samples:,}", value.type, value.example)
        console.print(table)
    table = _table("With these settings", "samples", "share", "what becomes of them", "example")
    example = next((f"{where}: {text}" for where, text in view.captions.items()), "")
    table.add_row(f"{view.used:,}", f"{view.used / read:.1%}", "used", example)
    for reason, count in view.drops.most_common():
        table.add_row(f"{count:,}", f"{count / read:.1%}", f"dropped: {reason}", view.examples[reason])
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", expand=False)
    for column in columns:
        numbers = column in ("samples", "share")
        table.add_column(column, justify="right" if numbers else "left", overflow="fold", no_wrap=numbers)
    return table


def check(shards: Sequence[str], given: str, image_key: str, caption: CaptionSettings, samples: int) -> None:
    """Print what the shards hold and the flags to train on them.

    Args:
        shards: their names, expanded.
        given: the flags that the user gave, as text.
        image_key: suffixes of the image member.
        caption: where the caption is.
        samples: how many samples to read; 0 for all.

    Raises:
        SettingsError: the caption settings do not fit together.
        DataError: no sample is usable; the message names the flags that would change it, if there are any.
    """
    view = look(shards, image_key, caption, samples)
    # Without a terminal rich takes 80 columns, and folds what scripts and people search for.
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console = Console(markup=False, highlight=False, emoji=False, width=160)
    show(view, console)
    if view.used:
        console.print(f"train on them with: {given}", soft_wrap=True)
        return
    read = view.profile.samples
    if not read:
        raise DataError(f"no sample could be read from {view.shards:,} shards: see what is wrong with them above")
    flags = view.profile.suggestion(image_key, caption)
    reason, count = view.drops.most_common(1)[0]
    hint = f"use {' '.join(flags)}" if flags else f"e.g. {view.examples[reason]}"
    raise DataError(f"none of {read:,} samples is usable, {count:,} of them for {reason}: {hint}")
