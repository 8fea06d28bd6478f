"""Held-out samples (`data.val_split`): a part of a source for evaluation that has no counterpart in training.

Settings of a source enter; a file with the names of held-out samples leaves, which the settings `keep` and `drop` read.
Samples with the same caption, the same image file or nearly the same image are a group, which is held out as a whole.
Each node makes the file once, in one pass over the source, before the ranks meet: it depends on the samples alone, so
that all nodes have the same. Imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import unicodedata
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from clipstream.data.decode.captions import build_caption, build_transform, candidates, image_bytes, split_keys
from clipstream.data.decode.images import loaded, opaque, opened, orientation_of, turned
from clipstream.data.decode.key_lists import build_filter
from clipstream.data.order_plan import reading_of
from clipstream.data.settings import MAX_PIXELS, DataSettings, SourceSettings, rgb, split_counts
from clipstream.data.sources import Source, SourceContext
from clipstream.data.sources.folders import FolderShard, FolderSource, PairShard, with_split
from clipstream.distributed.world import World, cores
from clipstream.errors import Dropped, SettingsError
from clipstream.storage.download import GIB, ShardError
from clipstream.storage.schemes import Fetcher
from clipstream.storage.shard_cache import ShardCache, cache_root
from clipstream.storage.shard_url import ShardURL, redact
from clipstream.text import counted
from clipstream.utils.console import ProgressBar
from clipstream.utils.logs import announce, logger
from clipstream.utils.plugins import is_plugin
from clipstream.utils.processes import Crashed, run

FORM = 3  # of the file and its rule: another one is another identity
FEWEST = 2  # samples on each side
SIDE, WAVES = 32, 9  # pixels of a side that an image is reduced to, and lowest frequencies of each side
NEAR = 6  # differing bits of 64 up to which two images are nearly the same
EQUAL = 3  # bands of bits that are compared at once: fewer take more comparisons, more take more passes
Hashes = np.ndarray[Any, np.dtype[np.uint64]]


class Seen(NamedTuple):
    """A sample, by its name 'SHARD/KEY' and by hashes of 64 bits."""

    name: str
    captions: tuple[int, ...]  # of each text that training may draw
    file: int  # of the bytes of the image
    look: int  # of what the image shows: see `look_of`


def held_out(section: SourceSettings, share: float, data: DataSettings, key: str) -> Path:
    """The file with the names of the samples to hold out, one a line below their number; made unless it is there.

    Args:
        section: the source, whose own `keep` and `drop` count.
        share: of the samples, 0 to 1.
        data: settings of the cache and of transfers.
        key: dotted key of the source, for messages.

    Raises:
        SettingsError: too few samples can be held out, a shard cannot be read, or the list cannot be written.
    """
    source = Source(section, SourceContext(cache=data.cache, key=key))
    try:
        store = ShardCache(str(cache_root() / "splits"))
    except SettingsError as error:
        detail = str(error).removeprefix("data.cache: ")
        raise SettingsError(f"data.val_split: {detail}: set another folder with CLIPSTREAM_CACHE") from error
    made: list[str] = []

    def fill(part: Path, _: object) -> None:
        remote = sum(source.types[name].is_remote(name) for name in set(source.names))
        if remote:
            again = "" if data.cache else ", and again at each evaluation unless --data.cache names a folder for them"
            logger.info(f"val_split: {counted(remote, 'remote shard', ',')} are downloaded to compare samples{again}")
        names, said = choose(seen := _seen(source, data), share)
        if names is None:
            raise ShardError("val_split", said)
        announce(f"val_split {said}")
        made.append(said)
        lines = [f"# {len(names)} of {len(seen)} usable samples", *names, ""]
        part.write_text("\n".join(lines), encoding="utf-8", errors="surrogateescape")

    try:
        path = store.get_or_make("val_split", _identity(source, share, data.max_image_pixels), fill)
    except (ShardError, OSError) as error:
        raise SettingsError(f"data.val_split: {getattr(error, 'detail', error)}") from error
    if not made and World.from_env().is_main:
        held = counted(split_counts(path)[0], "sample", ",")
        announce(f"val_split {held} held out for the evaluator val, chosen before")
    return path


def evaluated(source: SourceSettings) -> SourceSettings:
    """The source as an evaluation reads its training data; of a folder with splits, the split for training."""
    rest: dict[str, Any] = {"drop": None, "weight": 1.0, "upsampling_factors": None}
    if not is_plugin(source.type):
        rest["shards"] = [with_split(part, source.type, source.image_key) for part in source.parts]
    return source.model_copy(update=rest)


def choose(samples: Sequence[Seen], share: float) -> tuple[list[str] | None, str]:
    """The names of the samples to hold out, sorted, and how they were chosen, in words; None if there are too few.

    Groups are taken in the order of a hash of their first name, as long as they fit. Those of more than half of the
    samples to hold out stay in training, and so does a sample whose name has a line break.
    """
    groups: dict[int, list[str]] = {}
    roots, near = group(samples)
    for sample, root in zip(samples, roots, strict=True):
        groups.setdefault(root, []).append(sample.name)
    wanted, held = round(len(samples) * share), list[str]()
    for names in sorted(groups.values(), key=lambda names: _hash(min(names).encode(errors="surrogateescape"))):
        broken = any("\n" in name or "\r" in name for name in names)
        if not broken and len(names) <= max(1, wanted // 2) and len(held) + len(names) <= wanted:
            held += names
    if min(len(held), len(samples) - len(held)) < FEWEST:
        return None, (
            f"only {len(held):,} of {counted(len(samples), 'usable sample', ',')} can be held out (share {share:g}, "
            f"{counted(len(groups), 'group', ',')} of similar samples): use more data, another share, or --val-data"
        )
    kept = f"{len(held):,} of {counted(len(samples), 'sample', ',')} held out for the evaluator val"
    return sorted(held), f"{kept}; {len(groups):,} groups, {near:,} samples with a near-duplicate are kept together"


def group(samples: Sequence[Seen]) -> tuple[list[int], int]:
    """The group of each sample, by the number of one of its samples; and how many have a near-duplicate image.

    Samples of the same name are one group: lists of keys do not tell them apart.
    """
    parents = list(range(len(samples)))

    def find(number: int) -> int:
        while parents[number] != number:
            parents[number] = number = parents[parents[number]]
        return number

    first: dict[tuple[str, Hashable], int] = {}
    looks: Counter[int] = Counter(sample.look for sample in samples)
    for number, sample in enumerate(samples):
        marks = [("name", sample.name), ("file", sample.file), ("look", sample.look)]
        for mark in (*marks, *(("caption", caption) for caption in sample.captions)):
            parents[find(number)] = find(first.setdefault(mark, number))
    hashes = np.array(sorted(looks), np.uint64)
    alike = {look for look, count in looks.items() if count > 1}
    for some, others in near_pairs(hashes):
        for one, other in zip(hashes[some].tolist(), hashes[others].tolist(), strict=True):
            alike |= {one, other}
            parents[find(first["look", one])] = find(first["look", other])
    return [find(number) for number in range(len(samples))], sum(looks[look] for look in alike)


def near_pairs(hashes: Hashes, most: int = NEAR) -> Iterator[tuple[Any, Any]]:
    """Numbers of pairs of different hashes with at most `most` differing bits; a pair may come more than once.

    Of `most` + EQUAL bands of bits, EQUAL are the same in such a pair: it stands together if sorted by these.
    """
    bands = [sum(1 << bit for bit in part.tolist()) for part in np.array_split(np.arange(64), most + EQUAL)]
    for equal in itertools.combinations(bands, EQUAL):
        keys = hashes & np.uint64(sum(equal))
        order = np.argsort(keys, kind="stable")
        keys, left = keys[order], np.arange(len(keys))
        for distance in itertools.count(1):
            left = left[left + distance < len(keys)]
            left = left[keys[left] == keys[left + distance]]
            if not len(left):
                break
            some, others = order[left], order[left + distance]
            bits = np.unpackbits((hashes[some] ^ hashes[others]).view(np.uint8).reshape(-1, 8), axis=1).sum(axis=1)
            yield some[bits <= most], others[bits <= most]


def look_of(data: bytes, background: tuple[int, int, int], max_pixels: int = MAX_PIXELS) -> int:
    """64 bits of what an image file shows: whether its 64 lowest frequencies but the mean are above their median.

    A copy that was scaled, encoded again or slightly retouched differs in few of them. Raises Dropped.

    Source: the perceptual hash of phash.org, by the discrete cosine transform of 32 x 32 grey pixels.
    """
    image = opened(data, max_pixels)
    image.draft("L", (4 * SIDE, 4 * SIDE))  # a JPEG is decoded at a reduced size
    image = turned(opaque(loaded(image), background), orientation_of(image)).convert("L")
    pixels = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX), np.float64)
    waves, order = _waves()
    values = np.round((waves @ pixels @ waves.T).ravel()[order], 3)
    return int(np.packbits(values > np.median(values)).view(">u8")[0])


@cache
def _waves() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The cosines [WAVES, SIDE], and the places of the 64 lowest of WAVES x WAVES frequencies without the mean."""
    waves = np.cos(np.pi / SIDE * np.outer(np.arange(WAVES), np.arange(SIDE) + 0.5))
    sums = np.add.outer(np.arange(WAVES), np.arange(WAVES)).ravel()
    return waves, np.argsort(sums, kind="stable")[1:65]


def caption_hash(text: str) -> int:
    """64 bits of a caption, the same for other spaces, another case and other forms of the same characters."""
    plain = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return _hash(" ".join(plain.split()).encode(errors="surrogatepass"))


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def _seen(source: Source, data: DataSettings) -> list[Seen]:
    """All usable samples of a source, in the order of its shards, read by one process per core.

    Raises ShardError: a shard cannot be read, whose samples might have counterparts among those held out.
    """
    fetcher = Fetcher(timeout=data.transfer_timeout, most=int(data.max_shard_gib * GIB))
    names, found, faults = list(dict.fromkeys(source.names)), dict[int, list[Seen]](), list[str]()
    with closing(ShardCache(data.cache, fetcher=fetcher)) as store, ProgressBar("val_split") as bar:
        look = _Look(Source(source.settings, replace(source.context, store=store)), data.max_image_pixels)
        with closing(run(lambda number: look(names[number]), len(names), min(cores(), len(names)))) as events:
            for event in events:
                if event is not None:
                    number, result = event
                    found[number] = result if isinstance(result, list) else []
                    faults += [] if isinstance(result, list) else [f"{redact(names[number])}: {result.how}"]
                samples = sum(map(len, found.values()))
                bar.update(len(found), len(names), f"{samples:,} samples, {len(found):,} of {len(names):,} shards")
    if faults:
        some = f"{len(faults):,} of {counted(len(names), 'shard', ',')} cannot be compared with the others"
        raise ShardError("val_split", f"{some}: {faults[0]}: mend it, or leave it out of the training data")
    return [sample for number in range(len(names)) for sample in found[number]]


class _Look:
    """Reads a shard, as training does without augmentation; called in a process of its own."""

    def __init__(self, source: Source, max_pixels: int) -> None:
        self.source, self.section, self.max_pixels = source, (section := source.settings), max_pixels
        self.caption, self.transform = build_caption(section.caption), build_transform(section.transform)
        self.filter = build_filter(source.context.key.rpartition(".")[2], section)
        self.background = rgb(section.background)
        members = None if self.transform is not None else self.caption.members
        self.members = None if members is None else (*split_keys(section.image_key), *members)

    def __call__(self, name: str) -> list[Seen] | Crashed:
        """The usable samples of a shard, or why it cannot be read."""
        kind = self.source.types[name]
        title, found = kind.title(name), list[Seen]()
        try:
            shard = self.source.open(name)
        except (ShardError, OSError) as error:
            return Crashed(str(error))
        for ref in shard.index.samples:
            where = f"{title.rstrip('/').rpartition('/')[2]}/{ref.key}"
            if self.filter is not None and not self.filter(where, ref.key):
                continue
            with contextlib.suppress(Dropped):  # as in training, which counts it
                sample: Any = {"__key__": ref.key, "__url__": title, **shard.load(ref, self.members)}
                sample = sample if self.transform is None else self.transform(sample)
                texts = set(itertools.chain(*candidates(self.caption, sample)))
                image = image_bytes(sample, self.section.image_key)
                captions = tuple(sorted(map(caption_hash, texts)))
                look = look_of(image, self.background, self.max_pixels)
                found.append(Seen(where, captions, _hash(image), look))
        shard.close()
        kind.release(name)
        return found


def _identity(source: Source, share: float, max_pixels: int) -> str:
    """What the choice depends on: names, times and sizes of the files, and how they are read."""
    section = source.settings
    lists = [section.keep, section.drop]
    titles = dict.fromkeys(source.types[name].title(name) for name in source.names)
    files = [path for one in (*titles, *lists) if one and (path := ShardURL(one).path) and os.path.isfile(path)]
    how = [lists, section.folder, max_pixels, reading_of(section)]
    parts: list[object] = [FORM, NEAR, share, sorted(set(source.names)), [_stat(path) for path in files], how]
    return hashlib.sha256(json.dumps([*parts, list(_folders(source))]).encode()).hexdigest()


def _folders(source: Source) -> Iterator[object]:
    """A hash of each shard that is a folder or a part of one: of names, times and sizes of its files."""
    for name in dict.fromkeys(source.names):
        if isinstance(source.types[name], FolderSource):
            shard = source.open(name)
            assert isinstance(shard, FolderShard | PairShard)
            yield _hash(json.dumps([_stat(path) for ref in shard.index.samples for path in shard.files(ref)]).encode())


def _stat(path: str) -> tuple[str, int, int]:
    try:
        stat = os.stat(path)
    except OSError:  # as a link to nowhere
        return path, 0, 0
    return path, stat.st_mtime_ns, stat.st_size
