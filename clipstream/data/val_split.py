"""Held-out samples (`data.val_split`): a part of a source for evaluation that has no counterpart in training.

Settings of a source enter; a file with the names of held-out samples leaves, which the settings `keep` and `drop` read.
Samples with the same caption, the same image file or nearly the same image are a group, which is held out as a whole.
Each node makes the file once, in one pass over the source, before the ranks meet: it depends on the samples alone, so
that all nodes have the same. Imports no torch.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from clipstream.data.decode.captions import RawSample, build_caption, candidates, image_bytes, split_keys
from clipstream.data.decode.images import loaded, opaque, opened, orientation_of, turned
from clipstream.data.image_settings import MAX_PIXELS, rgb
from clipstream.data.order.rng import hash_of
from clipstream.data.order_plan import reading_of
from clipstream.data.scan import cached, identity, scan
from clipstream.data.settings import DataSettings, SourceSettings, split_counts
from clipstream.data.sources import Source, SourceContext
from clipstream.data.sources.folders import with_split
from clipstream.data.text_settings import LabelCaption
from clipstream.distributed.world import World
from clipstream.storage.download import ShardError
from clipstream.text import counted
from clipstream.utils.logs import announce, logger
from clipstream.utils.plugins import is_plugin

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
    made: list[str] = []

    def fill(part: Path) -> None:
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

    how = [FORM, NEAR, share, data.max_image_pixels, reading_of(section)]
    path = cached("data.val_split", "splits", identity(source, *how), fill)
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
    for names in sorted(groups.values(), key=lambda names: hash_of(min(names).encode(errors="surrogateescape"))):
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
    return hash_of(" ".join(plain.split()).encode(errors="surrogatepass"))


def _seen(source: Source, data: DataSettings) -> list[Seen]:
    """All usable samples of a source, in the order of its shards.

    Raises ShardError: a shard cannot be read, whose samples might have counterparts among those held out.
    """
    section = source.settings
    settings, background = section.caption, rgb(section.background)
    if isinstance(settings, LabelCaption):  # whose texts are not compared: no templates of open_clip, which needs torch
        settings = settings.model_copy(update={"templates": "plain"})
    caption = build_caption(settings)
    members = None if caption.members is None else (*split_keys(section.image_key), *caption.members)

    def read(name: str, sample: RawSample) -> Seen:
        texts = set(itertools.chain(*candidates(caption, sample)))
        image = image_bytes(sample, section.image_key)
        texts = set() if isinstance(section.caption, LabelCaption) else texts  # samples of a class are not alike
        captions = tuple(sorted(map(caption_hash, texts)))
        return Seen(name, captions, hash_of(image), look_of(image, background, data.max_image_pixels))

    found = scan("val_split", source, data, members, read)
    return [sample for samples in found.values() for sample in samples if sample is not None]
