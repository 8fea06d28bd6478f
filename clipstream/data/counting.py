"""Owns how many samples each shard of a source holds, before training opens one: side indexes, others' indexes.

Small local tars without an index are looked through on the spot; many or large ones are not, as every rank would do it
at every start.
"""

from __future__ import annotations

import os
import shlex
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from clipstream.data import borrowed, index
from clipstream.data.opening import Opener
from clipstream.data.packed import packing
from clipstream.data.settings import SourceSettings
from clipstream.data.shards import local_path, redact
from clipstream.data.tarstream import scan
from clipstream.errors import SettingsError

SMALL = 256 << 20  # bytes of tars without an index that are looked through at the start, at most
READERS = 16  # threads: on a network's disk, opening a file takes a thousand times as long as reading its line
NONE, STALE, GONE = "there is none", "the shard has changed since", "the shard is not there"


def count_samples(opener: Opener, source: SourceSettings, place: str) -> list[int]:
    """Samples of each shard, in the order of `opener.names`, which the opener then knows as `counts`.

    Args:
        source: of the opener.
        place: key of the settings where the source stands, for messages.

    Raises:
        SettingsError: of some shards nothing tells; with the command that makes their indexes.
    """
    names = list(dict.fromkeys(opener.names))
    wids = _wids(source.index, place)
    look = partial(_look, opener, None if wids is not None else source.index, wids or {}, borrowed.Beside())
    with ThreadPoolExecutor(READERS) as threads:
        found: dict[str, int | str] = dict(zip(names, threads.map(look, names), strict=True))
    untold = {name: why for name, why in found.items() if isinstance(why, str)}
    if untold and _are_small(list(untold)):
        found |= {name: len(scan(str(local_path(name))).samples) for name in untold}
    elif untold:
        raise SettingsError(_untold(source, place, untold, len(names)))
    opener.counts = [count for name in opener.names if isinstance(count := found[name], int)]
    return opener.counts


def _look(
    opener: Opener,
    folder: str | None,
    wids: dict[str, tuple[int, int | None]],
    beside: borrowed.Beside,
    name: str,
) -> int | str:
    """The samples of a shard, or why they are not known."""
    known = opener.known_samples(name)
    if known is not None:
        return known
    local = local_path(name)
    try:
        of = None if local is None else index.identity_of(local)
    except OSError:
        return GONE
    why = NONE
    for place in index.places_of(name, folder):
        try:
            head = index.read_head(place)
        except OSError:
            continue
        except ValueError as error:
            why = f"{place}: {error}"
            continue
        if of is None or head.of == of:
            return head.samples
        why = STALE
    size = None if of is None else of.size
    told = borrowed.count_of(wids, name, size)
    if told is None and local is not None and size is not None:
        told = beside.count(Path(local), size)
    return why if told is None else told


def _wids(named: str | None, place: str) -> dict[str, tuple[int, int | None]] | None:
    """wids' index, where the settings name a file and not a folder."""
    if named is None or not (named.endswith(".json") or os.path.isfile(named)):
        return None
    try:
        return borrowed.of_wids(Path(named).expanduser())
    except SettingsError as error:
        raise SettingsError(f"{place}.index: {error}") from error


def _are_small(names: list[str]) -> bool:
    """Whether all are local tars that are not packed, and small together."""
    room = SMALL
    for name in names:
        local = local_path(name)
        if local is None:
            return False
        try:
            room -= os.path.getsize(local)
            if room < 0 or packing(Path(local)) is not None:
                return False
        except OSError:
            return False
    return True


def _untold(source: SourceSettings, place: str, untold: dict[str, str], total: int) -> str:
    first, why = next(iter(untold.items()))
    if gone := [name for name, why in untold.items() if why == GONE]:
        return f"{place}.shards: {len(gone):,} of {total:,} shards are not there, e.g. {redact(gone[0])}"
    shards = [source.shards] if isinstance(source.shards, str) else source.shards
    words = ["python", "-m", "clipstream.index", *(redact(spec) for spec in shards)]
    folder = source.index
    advice = ""
    if folder is None and any(local_path(name) is None for name in untold):
        folder, advice = "FOLDER", f", and name that folder by --{place.replace('_', '-')}.index"
    words += [] if folder is None or folder.endswith(".json") else ["--into", folder]
    return (
        f"{place}.shards: the mode 'indexed' needs an index of each shard, and {len(untold):,} of {total:,} have none "
        f"that can be used, e.g. {redact(first)}: {why}. Make them by\n  {shlex.join(words)}{advice}"
    )
