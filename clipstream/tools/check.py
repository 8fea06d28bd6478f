"""Inspection of a data set: its settings enter; tables of members and dropped samples, and flags to use, are printed.

Shards are read and decoded as in training, without a model and without importing torch.
"""

from __future__ import annotations

import contextlib
import html
import io
from collections import Counter
from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from clipstream.data.decode.captions import build_caption, image_bytes
from clipstream.data.decode.images import check_shape, converted, loaded, opaque, opened
from clipstream.data.decode.sample_profile import NO_TEXT, SHORT_FLAGS, Profile
from clipstream.data.loader.health import Captions
from clipstream.data.settings import AugmentSettings, SourceSettings, rgb
from clipstream.data.sources.protocol import SourceContext
from clipstream.data.sources.registry import Source
from clipstream.data.sources.tables import MISSING
from clipstream.errors import DataError, Dropped
from clipstream.storage.shard_cache import ShardCache
from clipstream.storage.shard_url import redact
from clipstream.storage.tar import SCATTERED
from clipstream.storage.transfer import ShardError
from clipstream.text import MESSAGE, printable
from clipstream.utils.console import ResultConsole
from clipstream.utils.content import OTHER_NAME

T = TypeVar("T")
SHARDS_READ = 10  # of a large data set, spread over it
ROWS = 25
CELL = 400  # characters of a table's cell
OFF_TERMINAL = 160  # columns where there is no terminal


@dataclass
class CheckReport:
    """What is in a data set, and what training would do with the samples that were read.

    `print(report)` shows tables, and a notebook shows them too.
    """

    shards: str  # the source in words
    missing: list[str] = field(default_factory=list)  # local shards that do not exist
    faults: dict[str, str] = field(default_factory=dict)  # shard -> its fault
    held: int = 0  # number of samples in the opened shards
    profile: Profile = field(default_factory=Profile)  # members and JSON fields of the samples read
    used: int = 0  # number of samples read that training would use
    drops: Counter[str] = field(default_factory=Counter)  # number of samples read that training would drop, by reason
    examples: dict[str, str] = field(default_factory=dict)  # reason -> one such sample, with the detail
    captions: dict[str, str] = field(default_factory=dict)  # 'SHARD/KEY' -> caption of the first samples used
    # of the samples that training checks for constant captions
    first_captions: Captions = field(default_factory=Captions)

    @property
    def tried(self) -> int:
        """Number of samples read, also in vain."""
        return self.used + self.drops.total()

    @property
    def ok(self) -> bool:
        """Whether training would use all samples that were read, and nothing is missing or broken."""
        return self.used == self.tried > 0 and not self.missing and not self.faults

    def __str__(self) -> str:
        console = Console(
            file=(text := io.StringIO()), markup=False, highlight=False, emoji=False, width=OFF_TERMINAL,
            force_terminal=False, force_jupyter=False,  # else rich displays its own output in a notebook, with colours
        )  # fmt: skip
        show(self, console)
        return text.getvalue().rstrip()

    def _repr_html_(self) -> str:
        return f'<pre style="white-space:pre;overflow-x:auto;font-family:monospace">{html.escape(str(self))}</pre>'


def look(source: SourceSettings, samples: int) -> CheckReport:
    """Read `samples` samples (0: all), spread evenly over the shards, or over ten of them if there are more.

    Raises:
        SettingsError: the caption settings do not fit together, or the shards cannot be listed.
        DataError: a manifest cannot be read.
    """
    extract = build_caption(source.caption)
    store = ShardCache(None)
    try:
        shards = Source(source, SourceContext(store, key=SHORT_FLAGS))
        view = CheckReport(shards.summary(), shards.missing)
        gone = set(view.missing)
        there = [name for name in shards.names if name not in gone]
        chosen = _spread([name for name in there if not shards.types[name].cheap], SHARDS_READ if samples else 0)
        chosen += _spread([name for name in there if shards.types[name].cheap], samples)
        for number, name in enumerate(chosen):
            if samples and view.tried >= samples:
                break
            wanted = -(-(samples - view.tried) // (len(chosen) - number)) if samples else 0
            try:
                shard = shards.open(name)
            except (ShardError, OSError) as error:
                view.faults[redact(name)] = str(error)
                continue
            view.held += len(shard.index.samples)
            if shard.index.fault is not None:
                view.faults[redact(name)] = str(shard.index.fault)
            for ref in _spread(shard.index.samples, wanted):
                where = f"{Path(shards.types[name].title(name)).name}/{ref.key}"
                about = {"__key__": ref.key, "__url__": ""}
                try:
                    try:
                        sample = {**about, **shard.load(ref)}
                    except Dropped:
                        with contextlib.suppress(Dropped):
                            view.profile.add({**about, **shard.look(ref)})
                        raise
                    view.profile.add(sample)
                    data, text = image_bytes(sample, keys=source.image_key), extract(sample, None)
                    picture = opened(data)
                    check_shape(picture.size, AugmentSettings().max_aspect)
                    pixels = np.asarray(converted(opaque(loaded(picture), rgb("white"))))
                except Dropped as drop:
                    view.drops[drop.reason] += 1
                    shown = printable(where, 200)
                    view.examples.setdefault(drop.reason, f"{shown}: {drop.detail}" if drop.detail else shown)
                else:
                    view.used += 1
                    view.first_captions.add(where, text, pixels)
                    if len(view.captions) < 3:
                        view.captions[where] = text
            shard.close()
            shards.types[name].release(name)
    finally:
        store.close()
    return view


def _spread(items: Sequence[T], count: int) -> list[T]:
    """`count` evenly spaced items; all for 0."""
    if count <= 0 or count >= len(items):
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


def show(view: CheckReport, console: Console) -> None:
    """Print the view as tables."""
    read = view.tried
    console.print(f"{view.shards}: {read:,} samples read of {view.held:,} in the shards opened")
    if view.missing:
        first = ", ".join(map(printable, view.missing[:3]))
        console.print(f"not there: {len(view.missing):,} of them: {first}{' …' if len(view.missing) > 3 else ''}")
    if view.faults:
        table = _table("Faults", "shard", "what is wrong")
        for name, fault in list(view.faults.items())[:ROWS]:
            _row(table, name, fault)
        if len(view.faults) > ROWS:
            _row(table, f"… and {len(view.faults) - ROWS:,} more", "")
        console.print(table)
    if not read:
        return
    table = _table("Members", "suffix", "samples", "what")
    for suffix, count in view.profile.suffixes.most_common(ROWS):
        what = (
            "picture"
            if view.profile.images[suffix]
            else view.profile.texts[suffix].example
            if suffix in view.profile.texts
            else ""
        )
        _row(table, suffix, f"{count:,}", what or ("JSON" if suffix.endswith("json") else "bytes"))
    _more(table, view.profile.suffixes)
    console.print(table)
    if view.profile.json_fields:
        table = _table("JSON fields", "path", "samples", "type", "example")
        fields = sorted(view.profile.json_fields.items(), key=lambda item: -item[1].samples)
        for path, value in fields[:ROWS]:
            _row(table, path, f"{value.samples:,}", value.kind, value.example)
        _more(table, fields)
        console.print(table)
    table = _table("With these settings", "samples", "share", "what becomes of them", "example")
    example = next((f"{where}: {text}" for where, text in view.captions.items()), "")
    _row(table, f"{view.used:,}", f"{view.used / read:.1%}", "used", example)
    for reason, count in view.drops.most_common():
        _row(table, f"{count:,}", f"{count / read:.1%}", f"dropped: {reason}", view.examples[reason])
    console.print(table)


def _row(table: Table, *cells: str) -> None:
    table.add_row(*(printable(cell, CELL) for cell in cells))


def _more(table: Table, rows: Sized) -> None:
    if len(rows) > ROWS:
        _row(table, f"… and {len(rows) - ROWS:,} more")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", expand=False)
    for column in columns:
        numbers = column in ("samples", "share")
        table.add_column(column, justify="right" if numbers else "left", overflow="fold", no_wrap=numbers)
    return table


def check(source: SourceSettings, given: str, samples: int) -> None:
    """Print the contents of the shards and the flags to train on them.

    Args:
        given: the command that trains with these settings.
        samples: number of samples to read; 0 for all.

    Raises:
        SettingsError: the caption settings do not fit together, or the shards cannot be listed.
        DataError: no sample is usable; the message names flags that change that, if there are any.
    """
    view = look(source, samples)
    console = ResultConsole(OFF_TERMINAL, markup=False)
    show(view, console)
    if note := view.profile.layout():
        console.print(f"note: {note}", soft_wrap=True)
    if view.used:
        if warning := view.first_captions.warning():
            others = view.profile.captions(source.caption)
            fields = f"; members and fields with text: {', '.join(others[:5])}" if others else ""
            console.print(f"warning: {warning}{fields}", soft_wrap=True)
        if warning := view.first_captions.flat_warning():
            console.print(f"warning: {warning}", soft_wrap=True)
        console.print(f"train on them with: {printable(given, MESSAGE)}", soft_wrap=True)
        return
    read = view.tried
    if not read:
        raise DataError(f"no sample could be read from {view.shards}: see what is wrong with them above")
    reason, count = view.drops.most_common(1)[0]
    flags = view.profile.suggestion(source.image_key, source.caption)
    flags = flags if reason != "no_image" or "image-key" in str(flags) else []  # a caption alone is of no use
    hint = f"use {' '.join(flags)}" if flags else f"e.g. {view.examples[reason]}"
    if reason == "no_caption":
        others = [flag for flag in view.profile.captions(source.caption) if flag not in flags]
        hint += f"; other members and fields with text: {', '.join(others[:5])}" if others else ""
        hint += "" if flags or others else f"; {NO_TEXT}"
    scattered = next((fault for fault in view.faults.values() if fault.startswith(SCATTERED)), None)
    if not flags and (scattered or note):
        hint = scattered or "see the note above"
    if reason == MISSING and OTHER_NAME not in view.examples[reason]:
        hint += "; the pictures' paths begin elsewhere? Say where by --folder"
    raise DataError(f"none of {read:,} samples is usable, {count:,} of them for {reason}: {hint}")
