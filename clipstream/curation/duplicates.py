"""Near-duplicates among samples, and held-out samples (`data.val_split`) that have none in training. Imports no torch.

Hashes of the sample table enter; pairs of near ones, and groups leave. Settings of a source enter; a file with the
names of held-out samples leaves, which the settings `keep` and `drop` read: samples with the same caption, the same
image file or nearly the same image are a group, which is held out as a whole. Each node makes the file once, in one
pass over the source, before the ranks meet: it depends on the samples alone, so that all nodes have the same.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipstream.curation.sample_table import Hashes, sample_table
from clipstream.data.decode.key_lists import NOT_KEPT
from clipstream.data.decode.sample_profile import TRIED, Profile
from clipstream.data.order.lanes import Numbers
from clipstream.data.order.rng import hash_of
from clipstream.data.settings import DataSettings, split_counts
from clipstream.data.shard_pass import SamplePass, ShardSamples, get_or_fill, identity
from clipstream.data.source_settings import LabelCaption, SourceSettings
from clipstream.data.sources import Source, SourceContext
from clipstream.distributed.world import World
from clipstream.errors import Dropped, SettingsError, ShardError
from clipstream.text import counted, lines
from clipstream.utils.logs import announce, logger

FORM = 7  # of the file and its rule: another one is another identity
COLUMNS = ("shard", "key", "reason", "image_hash", "file_hash", "caption_hash", "other_hashes")
FEWEST = 2  # samples on each side
NEAR = 8  # differing bits of 64 up to which two images are nearly the same
EQUAL = 3  # bands of bits that are compared at once: fewer take more comparisons, more take more passes
MANY = 1 << 21  # hashes from which these bands are wider


def near_pairs(hashes: Hashes, most: int = NEAR) -> Iterator[tuple[Any, Any]]:
    """Numbers of pairs of different hashes with at most `most` differing bits; a pair may come more than once.

    Of `most` + EQUAL bands of bits, EQUAL are the same in such a pair: it stands together if sorted by these. From MANY
    hashes on, bands are wider: of pairs with `most` bits 7 of 8 are found, and all with `most` - 2.
    """
    bands = np.array_split(np.arange(64), most + EQUAL - 2 * (len(hashes) >= MANY))
    for chosen in itertools.combinations(bands, EQUAL):
        keys = np.zeros(len(hashes), np.uint64)
        for bits in chosen:
            keys <<= np.uint64(len(bits))
            keys |= (hashes >> np.uint64(bits[0])) & np.uint64((1 << len(bits)) - 1)
        keys <<= np.uint64(32)
        keys |= np.arange(len(hashes), dtype=np.uint64)
        keys.sort()  # with the number of the hash in its lower half: faster than argsort
        numbers = keys.astype(np.uint32)
        keys >>= np.uint64(32)
        keys, ordered = keys.astype(np.uint32), hashes[numbers]
        left = np.flatnonzero(keys[1:] == keys[:-1])
        for distance in itertools.count(1):
            near = left[_ones(ordered[left] ^ ordered[left + distance]) <= most]
            if len(near):
                yield numbers[near], numbers[near + distance]
            left = left[left + distance + 1 < len(keys)]
            left = left[keys[left] == keys[left + distance + 1]]
            if not len(left):
                break


def _ones(values: Hashes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The number of bits that are set in each value."""
    if hasattr(np, "bitwise_count"):  # since NumPy 2.0
        found: np.ndarray[Any, np.dtype[np.uint8]] = np.asarray(np.bitwise_count(values), np.uint8)
        return found
    bits: np.ndarray[Any, np.dtype[np.uint8]] = np.unpackbits(values.view(np.uint8).reshape(-1, 8), axis=1)
    return np.asarray(bits.sum(axis=1), np.uint8)


class Disjoint:
    """Disjoint sets of the numbers 0 to n - 1, joined by pairs (union-find on arrays).

    Attributes:
        parents: int64 [n], a number of the same set, never a larger one.
    """

    def __init__(self, n: int) -> None:
        self.parents = np.arange(n, dtype=np.int64)

    def join(self, one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> None:
        """Join the sets of one[i] and other[i], int64 [m], for all i."""
        while len(one):
            one, other = self.roots(one), self.roots(other)
            differ = one != other
            low, high = np.minimum(one, other)[differ], np.maximum(one, other)[differ]
            np.minimum.at(self.parents, high, low)
            one, other = low, high

    def roots(self, numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The smallest member of each number's set, int64 [m]."""
        found: np.ndarray[Any, Any] = self.parents[numbers]
        while not np.array_equal(above := self.parents[found], found):
            found = above
        self.parents[numbers] = found
        return found


def near_groups(looks: Hashes, most: int = NEAR) -> np.ndarray[Any, Any]:
    """The group of each of the hashes, uint64 [n], by its first one, int64 [n]: near pairs and chains of them."""
    hashes, places, of = np.unique(looks, return_index=True, return_inverse=True)
    sets = Disjoint(len(hashes))
    for some, others in near_pairs(hashes, most):
        sets.join(some, others)
    found: np.ndarray[Any, Any] = places[sets.roots(np.arange(len(hashes)))[of]]
    return found


def group(looks: Hashes, marks: Iterable[tuple[Any, Any]], most: int) -> tuple[np.ndarray[Any, Any], int, int]:
    """The group of each sample, by the number of its first one, int64 [n]; how many samples have a near-duplicate
    image; and up to how many differing bits images are near ones.

    Images that are near others by chance chain a large set to one group: where near images alone make a group of more
    than `most` different hashes, fewer bits may differ, 4 at least. Copies of one image make no chain.

    Args:
        looks: of the samples' images, uint64 [n].
        marks: numbers of samples, int64 [m], and hashes of what they have, [m]: those of an equal hash are a group.
    """
    sets = Disjoint(len(looks))
    for numbers, values in marks:
        first, of = np.unique(values, return_index=True, return_inverse=True)[1:]
        sets.join(numbers[first[of]], numbers)
    once = np.unique(looks, return_index=True)[1]
    for bits in (NEAR, 6, 4):
        near = near_groups(looks, bits)
        if np.bincount(near[once], minlength=1).max() <= most:
            break
    sets.join(near, np.arange(len(looks)))
    return sets.roots(np.arange(len(looks))), int((np.bincount(near)[near] > 1).sum()), bits


def make_held_out(section: SourceSettings, share: float, data: DataSettings, key: str) -> Path:
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
        rows = select_compared(source, data)
        reasons, rows = rows["reason"].to_pylist(), rows.filter(pc.equal(rows["reason"], ""))
        if not len(rows):
            raise _nothing_usable(source, data, Counter(reasons))
        seen = [f"{shard}/{key}" for shard, key in zip(rows["shard"].to_pylist(), rows["key"].to_pylist(), strict=True)]
        names, said = choose(seen, rows, share)
        if names is None:
            raise ShardError("val_split", said)
        announce(f"val_split {said}")
        made.append(said)
        content = [f"# {len(names)} of {len(seen)} usable samples", *names, ""]
        part.write_text("\n".join(content), encoding="utf-8", errors="surrogateescape")

    how = [FORM, NEAR, share, data.max_image_pixels, section.reading]
    path = get_or_fill("data.val_split", "splits", identity(source, *how), fill)
    if not made and World.from_env().is_main:
        held = counted(split_counts(path)[0], "sample", ",")
        announce(f"val_split {held} held out for the evaluator val, chosen before")
    return path


def _nothing_usable(source: Source, data: DataSettings, drops: Counter[str]) -> SettingsError:
    """The error on data without a usable sample: why they are dropped, and the flags that help."""
    profile, section = Profile(), source.settings

    def look(number: int, samples: ShardSamples) -> None:
        for _, _, sample in islice(samples, TRIED):
            if not isinstance(sample, Dropped):
                profile.add(sample)

    with closing(SamplePass(source, data, None, look)) as one:
        one(0)
    why = ", ".join(f"{count:,} x {reason}" for reason, count in drops.most_common())
    said = f"data.val_split: none of {counted(drops.total(), 'sample', ',')} is usable: {why}"
    return SettingsError(lines(said, profile.advice(section.image_key, section.caption)))


def choose(names: Sequence[str], rows: pa.Table, share: float) -> tuple[list[str] | None, str]:
    """The names of the samples to hold out, sorted, and how they were chosen, in words; None if there are too few.

    Groups are taken in the order of a hash of their first name, as long as they fit. Those of more than half of the
    samples to hold out stay in training, and so does a sample whose name has a line break.

    Args:
        names: of the samples; those of one name are a group, as lists of keys do not tell them apart.
        rows: as `select_compared` gives them; rows with the same value in `group` are a group, too.
    """
    wanted, held = round(len(names) * share), list[str]()
    most = max(1, wanted // 2)
    roots, near, bits = group(rows["image_hash"].to_numpy(), _marks(names, rows), most)
    groups: dict[int, list[str]] = {}
    for name, root in zip(names, roots.tolist(), strict=True):
        groups.setdefault(root, []).append(name)
    for some in sorted(groups.values(), key=lambda some: hash_of(min(some).encode())):
        broken = any("\n" in name or "\r" in name for name in some)
        if not broken and len(some) <= most and len(held) + len(some) <= wanted:
            held += some
    if min(len(held), len(names) - len(held)) < FEWEST:
        return None, (
            f"only {len(held):,} of {counted(len(names), 'usable sample', ',')} can be held out (share {share:g}, "
            f"{counted(len(groups), 'group', ',')} of similar samples): use more data, another share, or --val-data"
        )
    kept = f"{len(held):,} of {counted(len(names), 'sample', ',')} held out for the evaluator val"
    said = f"{len(groups):,} groups, the largest of {max(map(len, groups.values())):,}"
    return sorted(
        held
    ), f"{kept}; {said}; {near:,} samples with a near-duplicate (of at most {bits} differing bits) are kept together"


def select_compared(
    source: Source,
    data: DataSettings,
    groups: Sequence[Numbers] = (),
    folder: Path | None = None,
    executor: str = "local",
) -> pa.Table:
    """The columns compared for the samples that `keep` and `drop` leave, in stored order, from the sample table.

    Columns: shard, key, reason, image_hash, file_hash, caption_hash, other_hashes, and `group` if there are groups.

    Args:
        groups: by shard, a label of each sample; those of one label stay together.
        folder, executor: see `sample_table`.

    Raises ShardError: a shard cannot be read, whose samples might have counterparts among those held out.
    """
    table = sample_table(source, data, folder=folder, executor=executor)
    for name, error in table.faults.items():
        some = f"{len(table.faults):,} of {counted(len(set(source.names)), 'shard', ',')} cannot be compared"
        raise ShardError("val_split", f"{some} with the others: {name}: {error}: mend it, or leave it out")
    labelled = isinstance(source.settings.caption, LabelCaption)  # samples of a class are not alike
    rows = table.read(COLUMNS[:-2] if labelled else COLUMNS)
    if groups:
        rows = rows.append_column("group", pa.array(np.concatenate(groups)))
    return rows.filter(pc.not_equal(rows["reason"], NOT_KEPT))


def _marks(names: Sequence[str], rows: pa.Table) -> Iterator[tuple[Any, Any]]:
    """What makes samples a group besides their images; see `group`."""
    numbers = np.arange(len(names))
    yield numbers, np.array(names, object)
    yield numbers, rows["file_hash"].to_numpy()
    if "caption_hash" in rows.column_names:
        captions, others = rows["caption_hash"].combine_chunks(), rows["other_hashes"].combine_chunks()
        further = pc.list_parent_indices(others).to_numpy(), pc.list_flatten(others).to_numpy()
        there = captions.is_valid().to_numpy(zero_copy_only=False)
        own = numbers[there], captions.drop_null().to_numpy()
        yield np.concatenate([own[0], further[0]]), np.concatenate([own[1], further[1]])
    if "group" in rows.column_names:
        yield numbers, rows["group"].to_numpy()
