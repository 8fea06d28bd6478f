"""Precomputed features in training: which stores give what, and the samples of one source of the training data in them.

Paths of stores enter; sample numbers, choices of captions and views, and stored rows leave.

**Numbers.** `StoredSamples` gives each sample of a source an int64: `base[shard] + position`, with `base` of
`features.store.StoredSource` in the first store, the primary one. Numbers below 0 have no rows: -1 - (shard << 40 |
position) for a sample that the store lacks, which keeps both for messages, and _NOT_DRAWN for one that its probability
leaves out. Other stores may have their shards in another order: `_Stored.offsets` turns a number into theirs.

**Order of calls.** Of a shard, `hold` maps the rows, compares the stores and notes which samples lists keep (`_kept`).
Then, of a window, `numbers` and `take_part` say which samples are used; and of a batch, `draw` (or `choose`, for one
that is read from its shard) draws caption and view, and `gather` copies the rows.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from clipstream.data.decode.captions import draw_caption, draw_captions
from clipstream.data.decode.key_lists import NOT_DRAWN, NOT_KEPT, SampleLists
from clipstream.data.loader.health import DroppedSample, SourceHealth
from clipstream.data.order.lanes import Numbers
from clipstream.data.order.rng import Keys, SampleRNG, SampleRNGs, is_drawn, mix
from clipstream.data.order.windows import NO_SAMPLE
from clipstream.data.order_plan import stable_names
from clipstream.data.sources import Source
from clipstream.errors import DataError, Dropped, SettingsError
from clipstream.features.manifest import DTYPES, IDS, IMAGE, TEXT
from clipstream.features.store import FeatureStore, StoredSource
from clipstream.storage.shard_url import redact

TEACHER = "teacher"  # name of a teacher whose store names it image and text
Flags: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]
_SHIFT = 40
_NOT_DRAWN = -(1 << 63)


@dataclass(frozen=True)
class StoredData:
    """What stores give to training.

    Attributes:
        by_name: name in Batch.features -> store and its part: `image` and `text` in place of the towers, NAME.image
            and NAME.text of teachers.
        ids: the store of the token ids, where features take the place of images, and so no shard is read.
    """

    by_name: Mapping[str, tuple[FeatureStore, str]]
    ids: FeatureStore | None = None

    @classmethod
    def open(
        cls, image: str | None = None, text: str | None = None, teachers: Sequence[str] = (), cache: str | None = None
    ) -> StoredData:
        """Open the stores at these paths or URLs, the same store once.

        Args:
            teachers: stores of teachers. Parts NAME.image and NAME.text belong to the teacher NAME; in a store without
                such parts, image and text belong to the teacher `teacher`.
            cache: as for FeatureStore.

        Raises SettingsError: a store cannot be opened or lacks a part, or two stores have a teacher of one name.
        """
        opened = {path: FeatureStore(path, cache) for path in dict.fromkeys((image, text, *teachers)) if path}
        by_name: dict[str, tuple[FeatureStore, str]] = {}
        for name, path in ((IMAGE, image), (TEXT, text)):
            if path is not None:
                if name not in opened[path].manifest.parts:
                    raise SettingsError(
                        f"the feature store {opened[path].shown} has no {name} features, only "
                        f"{', '.join(opened[path].manifest.parts) or 'no part'}: add them with `clipstream precompute "
                        f"{opened[path].shown} --towers {name}`"
                    )
                by_name[name] = opened[path], name
        for path in dict.fromkeys(teachers):
            parts = opened[path].manifest.parts
            own = {part: part for part in parts if "." in part}
            own = own or {f"{TEACHER}.{part}": part for part in (IMAGE, TEXT) if part in parts}
            if not own:
                raise SettingsError(f"the feature store {opened[path].shown} has no features of a teacher")
            for name, part in own.items():
                if name in by_name:
                    raise SettingsError(
                        f"the feature stores {by_name[name][0].shown} and {opened[path].shown} both have {name}: use "
                        f"different teacher names (--teacher NAME=MODEL of clipstream precompute)"
                    )
                by_name[name] = opened[path], part
        if image is None:
            return cls(by_name)
        for store in (opened[image], *opened.values()):
            if IDS in store.manifest.parts:
                return cls(by_name, store)
        raise SettingsError(
            f"the feature store {opened[image].shown} has no token ids, which replace captions: rerun the same "
            f"`clipstream precompute` command"
        )

    @property
    def towers(self) -> dict[Literal["image", "text"], FeatureStore]:
        """The towers whose features are stored, with their stores."""
        names: tuple[Literal["image"], Literal["text"]] = ("image", "text")
        return {name: self.by_name[name][0] for name in names if name in self.by_name}

    @property
    def teachers(self) -> list[str]:
        return list(dict.fromkeys(name.rpartition(".")[0] for name in self.by_name if "." in name))

    @property
    def replaces_loader(self) -> bool:
        """Whether all that the model takes comes from stores, so that no shard is read."""
        return IMAGE in self.by_name

    @cached_property
    def parts(self) -> list[tuple[FeatureStore, list[str]]]:
        """Each store, and the parts that are read of it."""
        found: dict[int, tuple[FeatureStore, list[str]]] = {}
        asked = [*self.by_name.values(), *([] if self.ids is None else [(self.ids, IDS)])]
        for store, part in asked:
            found.setdefault(id(store), (store, []))[1].append(part)
        return list(found.values())

    @property
    def views(self) -> int:
        """K, augmented views of each image; 0 where its features are of the image as evaluations preprocess it.

        Raises SettingsError: stores differ in it.
        """
        counts = {store.manifest.views: store for store, _ in self.parts if store.manifest.views}
        if len(counts) > 1:
            (k, one), (other_k, other), *_ = counts.items()
            raise SettingsError(
                f"the feature store {one.shown} has {k} views per image, but {other.shown} has {other_k}: precompute "
                f"both with the same --views"
            )
        return max(counts, default=0)

    def row_bytes(self) -> dict[str, int]:
        return {name: store.manifest.parts[part].row_bytes for name, (store, part) in self.by_name.items()}

    def view_as_stored(self, rows: Mapping[str, np.ndarray[Any, Any]], count: int) -> dict[str, torch.Tensor]:
        """The first `count` rows of each of the features, uint8 [n, bytes], as views of their stored type."""
        parts = {name: store.manifest.parts[part] for name, (store, part) in self.by_name.items()}
        return {name: torch.from_numpy(rows[name][:count]).view(DTYPES[part.dtype]) for name, part in parts.items()}


class StoredChoice(NamedTuple):
    """Which stored rows of a sample belong to a batch."""

    number: int  # of the sample, see StoredSamples
    caption: int  # position among the captions of the sample
    view: int


@dataclass(frozen=True)
class _Stored:
    """One store's samples of the source."""

    source: StoredSource
    shards: list[int]  # number of the store's shard, by the number of the training data's
    offsets: Numbers  # added to a sample's number in the primary store, by its chunk there


class StoredSamples:
    """The samples of one source of the training data, in all stores.

    Args:
        stored: the stores.
        name: of the source.
        source: its shards; a manifest has their stable names, or URLs where names are not unique.
        weights: of the caption paths.
        filter: says which samples are used; None for all.

    Attributes:
        counts: samples of each shard, dropped ones included, int64.
        base: number of each shard's first sample, int64.
        primary: the source in the primary store.
        groups: labels of the samples' groups by number, int64; None where there are none.
        probabilities: with which samples are drawn, by number, float64; None where all are, or the order draws.

    Raises SettingsError: a store lacks the source, or one of its shards.
    """

    def __init__(
        self,
        stored: StoredData,
        name: str,
        source: Source,
        weights: Sequence[float] | None = None,
        filter: SampleLists | None = None,
    ) -> None:
        shards = list(zip(stable_names(source.names), source.names, strict=True))
        self.name, self.source, self.shown = name, source, [redact(url) for url in source.names]
        self._weights, self._views = weights, stored.views
        self.shard_titles = [source.types[url].title(url) for url in source.names]
        self.shard_names = [source.shard_names[url] for url in source.names]
        self._compared: set[int] = set()  # shards of which all stores hold the same samples
        self._checks = threading.Lock()
        self._all: list[_Stored] = []
        self._parts: dict[str, tuple[_Stored, str]] = {}
        self._by_view: _Stored | None = None  # that has the keys of views
        for store, parts in stored.parts:
            held = store.source(name, list(dict.fromkeys(parts)))
            numbers = {shard.name: number for number, shard in enumerate(held.shards)}
            mine = [numbers.get(stable, numbers.get(redact(url), -1)) for stable, url in shards]
            if -1 in mine:
                url = self.shown[mine.index(-1)]
                raise SettingsError(
                    f"data.sources.{name}.shards: the feature store {store.shown} does not have {url}: precompute the "
                    f"features of all shards, in another folder"
                )
            one = _Stored(held, mine, self._offsets(held, mine))
            self._all.append(one)
            named = [(name, part) for name, (other, part) in stored.by_name.items() if other is store]
            self._parts |= {name: (one, part) for name, part in named}
            if stored.ids is store:
                self._parts[IDS] = one, IDS
            if store.manifest.views and self._by_view is None:
                self._by_view = one
        self.primary = self._all[0].source
        self.counts: Numbers = np.array([self.primary.samples_of(shard) for shard in self._all[0].shards])
        self.base: Numbers = np.array([self.primary.base(shard) for shard in self._all[0].shards])
        self.groups: Numbers | None = None
        self.probabilities: np.ndarray[Any, Any] | None = None
        self.filter = filter
        size = self.primary.n_chunks * self._chunk_rows
        self._kept: Flags | None = None if filter is None else np.ones(size, dtype=bool)  # by number
        self._dropped: dict[int, dict[int, tuple[str, str]]] = {}  # shard -> position -> key and reason

    def _offsets(self, source: StoredSource, shards: Sequence[int]) -> Numbers:
        if not self._all:
            return np.zeros(source.n_chunks, dtype=np.int64)
        first = self._all[0]
        rows = first.source.store.manifest.chunk_rows
        found: Numbers = np.zeros(first.source.n_chunks, dtype=np.int64)
        for mine, theirs in zip(first.shards, shards, strict=True):
            base, held = first.source.base(mine), first.source.samples_of(mine)
            found[base // rows : base // rows + -(-held // rows)] = source.base(theirs) - base
        return found

    def by_number(self, values: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        """By number, the values of each shard's samples. Raises DataError: a shard has other samples now."""
        found = np.zeros(self.primary.n_chunks * self._chunk_rows, dtype=np.result_type(*values))
        for shard, mine in enumerate(values):
            base, held = int(self.base[shard]), int(self.counts[shard])
            if held and held != len(mine):
                raise DataError(
                    f"{self.shown[shard]} has {len(mine):,} samples, but {held:,} when its features were computed: "
                    "precompute them again, in another folder"
                )
            found[base : base + held] = mine[:held]
        return found

    def fault(self, shard: int) -> str:
        """Why a shard has no samples."""
        return self.primary.shards[self._all[0].shards[shard]].reason or "empty: no sample in it"

    def hold(self, shard: int) -> None:
        """Make the rows of a shard readable until as many calls of `release`; in any thread.

        Raises DataError: a chunk is damaged, or the stores hold different samples.
        """
        with ExitStack() as undo:
            for one in self._all:
                one.source.hold(one.shards[shard])
                undo.callback(one.source.release, one.shards[shard])
            with self._checks:
                if shard not in self._compared:
                    self._compare(shard)
                    if self.filter is not None:
                        self._filter_shard(shard)
                    self._compared.add(shard)
            undo.pop_all()

    def release(self, shard: int) -> None:
        """Undo one `hold`."""
        for one in self._all:
            one.source.release(one.shards[shard])

    def check_keys(self, shard: int, keys: Sequence[str]) -> None:
        """Compare the keys of an open shard with those whose features are stored. Raises DataError: they differ."""
        for one in self._all:
            if not one.source.has_keys(one.shards[shard], keys):
                raise DataError(
                    f"{self.shown[shard]} has changed since its features were computed: its {len(keys):,} samples are "
                    f"not the {one.source.samples_of(one.shards[shard]):,} of the feature store "
                    f"{one.source.store.shown}: precompute them again, in another folder"
                )

    def _compare(self, shard: int) -> None:
        """Check that all stores hold the same samples of a shard."""
        first, *others = self._all
        if not others:
            return
        numbers = self.base[shard] + np.arange(self.counts[shard])
        mine, keys = first.source.sample_rows(numbers), None
        for one in others:
            where = f"the feature stores {first.source.store.shown} and {one.source.store.shown}"
            advice = "precompute both from the same data with the same settings and --seed"
            if one.source.samples_of(one.shards[shard]) != self.counts[shard]:
                raise DataError(f"{where} hold different samples of {self.shown[shard]}: {advice}")
            keys = keys or first.source.keys(first.shards[shard])
            if not one.source.has_keys(one.shards[shard], keys):
                raise DataError(f"{where} hold different samples of {self.shown[shard]}: {advice}")
            theirs = one.source.sample_rows(numbers + one.offsets[numbers // self._chunk_rows])
            both = (mine["used"] > 0) & (theirs["used"] > 0)
            same_captions = mine["counts"].shape == theirs["counts"].shape and np.array_equal(
                mine["counts"][both], theirs["counts"][both]
            )
            views = [rows["views"] for rows in (mine, theirs) if rows["views"].shape[1]]
            if not same_captions or (len(views) > 1 and not np.array_equal(views[0][both], views[1][both])):
                what = "views" if same_captions else "captions"
                raise DataError(f"{where} hold different {what} of {self.shown[shard]}: {advice}")

    @property
    def _chunk_rows(self) -> int:
        return self.primary.store.manifest.chunk_rows

    def numbers(self, shards: Numbers, positions: Numbers, absent: Flags | None = None) -> Numbers:
        """Numbers of samples by the numbers of their shards and their positions in these; of samples that the store
        does not have, and of those that `absent` selects, a negative number for each.
        """
        found = self.base[shards] + positions
        lacking: Flags = positions >= self.counts[shards]
        absent = lacking if absent is None else lacking | absent
        if absent.any():
            found[absent] = -1 - (shards[absent] << _SHIFT | positions[absent])
        return found

    def take_part(self, numbers: Numbers, key: int) -> tuple[Flags, Numbers]:
        """Which samples of a window training uses; and their numbers, _NOT_DRAWN for those that chance leaves out.

        Args:
            key: of the window's random numbers.
        """
        used = self.is_used(numbers)
        if self.probabilities is None:
            return used, numbers
        keys, there = mix(np.arange(len(numbers), dtype=np.uint64), state=key), np.maximum(numbers, 0)
        chances = np.where(numbers < 0, np.nan, self.probabilities[there])
        # Samples without a probability, or that lists leave out, are counted for that reason.
        drawn: Flags = np.isnan(chances) | is_drawn(keys, chances)
        drawn = drawn if self._kept is None else drawn | ~self._kept[there]
        return used & drawn, np.where(drawn, numbers, _NOT_DRAWN)

    def is_used(self, numbers: Numbers) -> Flags:
        """Whether training uses the samples: those that no store has dropped."""
        used = numbers >= 0
        all_there = bool(used.all())
        there = numbers if all_there else numbers[used]
        found = np.ones(len(there), dtype=bool) if self._kept is None else self._kept[there]
        if self.probabilities is not None:
            found &= ~np.isnan(self.probabilities[there])
        for one in self._all:
            found &= one.source.sample_rows(there + one.offsets[there // self._chunk_rows])["used"] > 0
        if all_there:
            return found
        used[used] = found
        return used

    def draw(self, numbers: Numbers, keys: Keys) -> tuple[Numbers, Numbers, Numbers]:
        """Checksums of the images, choices of captions, and of views, int64 [n] each.

        Args:
            keys: of the samples' random numbers.
        """
        rows = self.primary.sample_rows(numbers)
        counts, rngs = rows["counts"], SampleRNGs(keys)
        if counts.shape[1] == 1 and bool((counts == 1).all()):
            choices = np.zeros(len(numbers), dtype=np.int64)
        else:
            choices = draw_captions(counts, self._weights, rngs)
        views = np.zeros(len(numbers), dtype=np.int64)
        if self._views:
            views = rngs.integer(np.full(len(numbers), self._views), np.arange(len(numbers)))
        return rows["pictures"], choices, views

    def choose(
        self, shard: int, position: int, by_path: Sequence[list[str]], rng: SampleRNG
    ) -> tuple[StoredChoice, SampleRNG]:
        """The caption and view of a sample that is read from its shard, and the generator that its image is augmented
        by.

        Args:
            by_path: the captions that may be drawn, by path.
            rng: of the sample.

        Raises Dropped: the sample could not be used when its features were computed, or had other captions.
        """
        number = int(self.base[shard]) + position
        row = self.primary.sample_rows(np.array([number]))[0]
        if not self.is_used(np.array([number]))[0]:
            raise Dropped(*self._why_dropped(shard, position)[1:])
        if row["counts"].tolist() != [len(texts) for texts in by_path]:
            raise Dropped("not_stored", "the captions of the sample have changed since its features were computed")
        choice = draw_caption(by_path, self._weights, rng)
        if not self._views:
            return StoredChoice(number, choice, 0), rng
        view, one = rng.integer(self._views), self._by_view
        assert one is not None
        there = number + int(one.offsets[number // self._chunk_rows])
        key = int(one.source.sample_rows(np.array([there]))["views"][0, view])
        return StoredChoice(number, choice, view), SampleRNG(key)

    def gather(
        self, name: str, numbers: Numbers, choices: Numbers, views: Numbers, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Stored rows of features or `ids`, of samples in use whose shards are held: [n, W].

        Args:
            out: contiguous tensor of the stored type, which is filled and returned.
        """
        one, part = self._parts[name]
        if one is not self._all[0]:
            numbers = numbers + one.offsets[numbers // self._chunk_rows]
        source = one.source
        if source.store.manifest.per_caption(part):
            rows = source.caption_rows(numbers, choices)
        else:
            rows = source.view_rows(numbers, views if source.store.manifest.views else np.zeros_like(views))
        return source.gather(part, rows, out)

    def shard_and_position(self, number: int) -> tuple[int, int]:
        """The number of a sample's shard in the training data, and its position in it."""
        if number < 0:
            return (-1 - number) >> _SHIFT, (-1 - number) & ((1 << _SHIFT) - 1)
        shard = int(self._shard_of_chunk[number // self._chunk_rows])
        return shard, number - int(self.base[shard])

    @cached_property
    def _shard_of_chunk(self) -> Numbers:
        found: Numbers = np.full(self.primary.n_chunks, -1, dtype=np.int64)
        for shard, (base, held) in enumerate(zip(self.base.tolist(), self.counts.tolist(), strict=True)):
            first = base // self._chunk_rows
            found[first : first + -(-held // self._chunk_rows)] = shard
        return found

    def titles(self, numbers: Numbers) -> list[str]:
        """The names SHARD/KEY of samples."""
        found = [""] * len(numbers)
        by_shard: dict[int, list[tuple[int, int]]] = {}
        for i, number in enumerate(numbers.tolist()):
            shard, position = self.shard_and_position(number)
            by_shard.setdefault(shard, []).append((i, position))
        for shard, places in by_shard.items():
            begin = self.shard_names[shard]
            keys = self.primary.keys(self._all[0].shards[shard])
            for i, position in places:
                found[i] = f"{begin}/{keys[position] if numbers[i] >= 0 else f'#{position}'}"
        return found

    def count_dropped(self, numbers: Numbers, health: SourceHealth) -> None:
        """Count samples that training does not use; those that are not drawn or kept without Python for each."""
        if not_drawn := int((numbers == _NOT_DRAWN).sum()):
            health.dropped[NOT_DRAWN] += not_drawn
            numbers = numbers[numbers != _NOT_DRAWN]
        if self._kept is not None:
            there = numbers >= 0
            left_out = np.zeros(len(numbers), dtype=bool)
            left_out[there] = ~self._kept[numbers[there]]
            if left_out.any():
                shard, position = self.shard_and_position(int(numbers[left_out][0]))
                if NOT_KEPT not in health.examples:
                    key = self.primary.keys(self._all[0].shards[shard])[position]
                    health.drop(DroppedSample(self.name, self.shard_titles[shard], key, NOT_KEPT, ""))
                    health.dropped[NOT_KEPT] -= 1
                health.dropped[NOT_KEPT] += int(left_out.sum())
                numbers = numbers[~left_out]
        for number in numbers.tolist():
            shard, position = self.shard_and_position(number)
            if position == NO_SAMPLE:
                health.dropped[NOT_DRAWN] += 1
                continue
            if number < 0:
                why = f"#{position}", "unreadable_shard", "not in the feature store"
            else:
                why = self._why_dropped(shard, position)
            health.drop(DroppedSample(self.name, self.shard_titles[shard], *why))

    def _why_dropped(self, shard: int, position: int) -> tuple[str, str, str]:
        """Key, reason and detail of a dropped sample."""
        if self.probabilities is not None and np.isnan(self.probabilities[int(self.base[shard]) + position]):
            return self.primary.keys(self._all[0].shards[shard])[position], "no_probability", ""
        if shard not in self._dropped:
            self._dropped[shard] = self._read_dropped(shard)
        key, text = self._dropped[shard].get(position, (f"#{position}", "not_stored"))
        reason, _, detail = text.partition(": ")
        return key, reason, detail

    def _filter_shard(self, shard: int) -> None:
        """Note which samples of a shard the settings keep."""
        assert self.filter is not None and self._kept is not None
        begin = self.shard_names[shard]
        keys, base = self.primary.keys(self._all[0].shards[shard]), int(self.base[shard])
        self._kept[base : base + len(keys)] = [self.filter(f"{begin}/{key}", key) for key in keys]

    def _read_dropped(self, shard: int) -> dict[int, tuple[str, str]]:
        """By position the key and the reason of each dropped sample of a shard."""
        keys, found = self.primary.keys(self._all[0].shards[shard]), {}
        for one in self._all:
            for position, reason in enumerate(one.source.reasons(one.shards[shard])):
                if reason and position not in found:
                    found[position] = keys[position], reason
        return found
