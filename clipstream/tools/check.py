"""Owns the look into a data set without a model: what its samples hold, what settings would use of it, which to use.

Reads and decodes like training does, but never trains and never imports torch. Of a manifest it makes the Arrow file,
as training does.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from clipstream.batch import ImageSpec
from clipstream.data.fields import CaptionExtractor, build_caption, image_bytes
from clipstream.data.images import EvalTransform
from clipstream.data.opening import Opener, OpenShard
from clipstream.data.profile import SHORT_FLAGS, Profile
from clipstream.data.remote import ShardError, ShardStore
from clipstream.data.rows import MISSING
from clipstream.data.settings import SourceSettings
from clipstream.data.shards import redact
from clipstream.data.tarstream import SampleRef
from clipstream.errors import DataError, Dropped

T = TypeVar("T")
SHARDS_READ = 10  # of a large data set, spread over it
ROWS = 25
SHOWN = ImageSpec((64, 64))


@dataclass
class View:
    """What was found.

    Attributes:
        shards: what was named, in words.
        missing: local shards that are not there.
        faults: shard -> what is wrong with it.
        held: samples of the shards opened.
        profile: members and JSON fields of the samples read.
        used: samples read that training would use.
        drops: samples read that it would drop, by reason.
        examples: reason -> one of them, with the detail.
        captions: 'SHARD/KEY' -> caption of the first samples used.
    """

    shards: str
    missing: list[str] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)
    held: int = 0
    profile: Profile = field(default_factory=Profile)
    used: int = 0
    drops: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    captions: dict[str, str] = field(default_factory=dict)

    @property
    def tried(self) -> int:
        """Samples that were read, or could not be."""
        return self.used + self.drops.total()


def look(source: SourceSettings, samples: int) -> View:
    """Read `samples` samples (0: all) evenly out of the shards: of more than ten shards, out of ten of them.

    Raises:
        SettingsError: the caption settings do not fit together, or the shards cannot be listed.
        DataError: a manifest cannot be read.
    """
    extract = build_caption(source.caption)
    store = ShardStore(None)
    try:
        opener = Opener(source, store, place=SHORT_FLAGS)
        view = View(opener.summary(), opener.missing)
        gone = set(view.missing)
        there = [name for name in opener.names if name not in gone]
        tars = _spread([name for name in there if not opener.is_block(name)], SHARDS_READ if samples else 0)
        chosen = tars + _spread([name for name in there if opener.is_block(name)], samples)
        for number, name in enumerate(chosen):
            if samples and view.tried >= samples:
                break
            wanted = -(-(samples - view.tried) // (len(chosen) - number)) if samples else 0
            try:
                shard = opener.open(name)
            except (ShardError, OSError) as error:
                view.faults[redact(name)] = str(error)
                continue
            view.held += len(shard.index.samples)
            if shard.index.fault is not None:
                view.faults[redact(name)] = str(shard.index.fault)
            for ref in _spread(shard.index.samples, wanted):
                where = f"{Path(opener.title(name)).name}/{ref.key}"
                try:
                    text = _use(shard, ref, view, partial(image_bytes, keys=source.image_key), extract)
                except Dropped as drop:
                    view.drops[drop.reason] += 1
                    view.examples.setdefault(drop.reason, f"{where}: {drop.detail}" if drop.detail else where)
                else:
                    view.used += 1
                    if len(view.captions) < 3:
                        view.captions[where] = text
            shard.close()
            opener.release(name)
    finally:
        store.close()
    return view


def _use(
    shard: OpenShard,
    ref: SampleRef,
    view: View,
    image: Callable[[dict[str, Any]], bytes],
    extract: CaptionExtractor,
) -> str:
    """The sample's caption, if training would use it; counts its members. Raises Dropped."""
    about = {"__key__": ref.key, "__url__": ""}
    try:
        sample = {**about, **shard.load(ref)}
    except Dropped:
        with contextlib.suppress(Dropped):
            view.profile.add({**about, **shard.look(ref)})
        raise
    view.profile.add(sample)
    picture, text = image(sample), extract(sample, None)
    EvalTransform(SHOWN, "white")(picture)
    return text


def _spread(items: Sequence[T], count: int) -> list[T]:
    """`count` of the items at even distances, all of them for 0."""
    if count <= 0 or count >= len(items):
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


def show(view: View, console: Console) -> None:
    """Print the view as tables."""
    read = view.tried
    console.print(f"{view.shards}: {read:,} samples read of {view.held:,} in the shards opened")
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


def check(source: SourceSettings, given: str, samples: int) -> None:
    """Print what the shards hold and the flags to train on them.

    Args:
        source: names the shards, and how they would be read.
        given: the command that trains so, as text.
        samples: how many samples to read; 0 for all.

    Raises:
        SettingsError: the caption settings do not fit together, or the shards cannot be listed.
        DataError: no sample is usable; the message names the flags that would change it, if there are any.
    """
    view = look(source, samples)
    # Without a terminal rich takes 80 columns, and folds what scripts and people search for.
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console = Console(markup=False, highlight=False, emoji=False, width=160)
    show(view, console)
    if view.used:
        console.print(f"train on them with: {given}", soft_wrap=True)
        return
    read = view.tried
    if not read:
        raise DataError(f"no sample could be read from {view.shards}: see what is wrong with them above")
    flags = view.profile.suggestion(source.image_key, source.caption)
    reason, count = view.drops.most_common(1)[0]
    hint = f"use {' '.join(flags)}" if flags else f"e.g. {view.examples[reason]}"
    if reason == MISSING:
        hint += "; the pictures' paths begin elsewhere? Say where by --folder"
    raise DataError(f"none of {read:,} samples is usable, {count:,} of them for {reason}: {hint}")
