"""Held-out samples (`data.val_split`): a part of a source for evaluation that has no counterpart in training.

Settings of a source enter; a file with the names of held-out samples leaves, which the settings `keep` and `drop` read.
Samples with the same caption, the same image file or nearly the same image are a group, which is held out as a whole.
Each node makes the file once, in one pass over the source, before the ranks meet: it depends on the samples alone, so
that all nodes have the same. Imports no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clipstream.data.decode.captions import RawSample, build_caption, candidates, image_bytes, split_keys
from clipstream.data.duplicates import NEAR, Seen, caption_hash, group, look_of
from clipstream.data.image_settings import rgb
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

FORM = 4  # of the file and its rule: another one is another identity
FEWEST = 2  # samples on each side


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
    rest: dict[str, Any] = {"drop": None, "weight": 1.0, "upsampling_factors": None, "probability": None}
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
        return Seen(name, captions, hash_of(image), look_of(image, background, data.max_image_pixels).hash)

    found = scan("val_split", source, data, members, read)
    return [sample for samples in found.values() for sample in samples if sample is not None]
