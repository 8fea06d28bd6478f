"""The work of `clipstream pack OUT SOURCE…`: writes new shards of the samples of any source that trains.

A command line enters; shards leave, with side indexes, `sizes.json`, `SHA256SUMS` and a data card (`README.md`). The
samples of the sources are listed first (`pack_shards`). `PackPlan` says which of them each new shard gets, a function
of their numbers, the settings and the seed, so that any process can write any shard (`PackShard`), and always the same
bytes. What these depend on is kept in `pack.json`, so that the same command continues after an interruption, and
another one is refused. Never imports torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tarfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.filesize import decimal

from clipstream.config.settings import Settings
from clipstream.curation.duplicates import choose, select_compared
from clipstream.curation.pack_shards import (
    MEND,
    Corpus,
    Listed,
    Merged,
    Out,
    Packed,
    Recording,
    SamplePacker,
    add_member,
    open_captions,
)
from clipstream.data.decode.key_lists import build_filter, check_lists
from clipstream.data.decode.labels import compare_groups
from clipstream.data.groups import group_labels
from clipstream.data.order.lanes import Numbers
from clipstream.data.order.rng import mix, permute
from clipstream.data.settings import DataSettings
from clipstream.data.shard_pass import PARTS, ShardPass, draft_in, identity, lock_output
from clipstream.data.sources import ShardIndex, Source, SourceContext, indexes
from clipstream.data.sources.tars import SIZES
from clipstream.errors import DataError, Dropped, SettingsError, ShardError, errors_as
from clipstream.storage.shard_cache import ShardCache
from clipstream.storage.shard_url import ShardURL, in_braces, redact
from clipstream.storage.tar import SampleRefs
from clipstream.text import MESSAGE, counted, duration, printable
from clipstream.utils import atomic_write
from clipstream.utils.console import print_training
from clipstream.utils.content import file_digest
from clipstream.utils.executors import require_all
from clipstream.utils.logs import logger

FORM = 1  # of the shards' bytes: another one is another plan
PLAN_FILE, SUMS, CARD = "pack.json", "SHA256SUMS", "README.md"


@dataclass(frozen=True)
class PackPlan:
    """Which samples each new shard gets. Samples are numbered in the order of the sources, from 0."""

    ends: Numbers  # number behind the last sample of each shard of the sources, int64
    size: int | None  # most samples of a new shard; None for one new shard for each of the sources
    shuffled: bool
    seed: int
    unique: bool  # whether keys are unique over all samples, and stay as they are
    held: Numbers | None = None  # the samples for validation, sorted, int64

    @cached_property
    def _parts(self) -> list[tuple[str, int, int]]:
        """(folder, samples, shards) of each split."""
        total = int(self.ends[-1])
        held = 0 if self.held is None else len(self.held)
        split = [("", total)] if self.held is None else [("train/", total - held), ("val/", held)]
        if self.size is None:
            return [("", total, len(self.ends))]
        return [(folder, count, -(-count // self.size)) for folder, count in split]

    def __len__(self) -> int:
        return sum(shards for _, _, shards in self._parts)

    def shard(self, number: int) -> tuple[str, Numbers]:
        """The file of a new shard, and the numbers of its samples in order."""
        for turn, (folder, count, shards) in enumerate(self._parts):
            if number < shards:
                if self.size is None:
                    return f"{number:05d}.tar", np.arange(self.ends[number - 1] if number else 0, self.ends[number])
                positions = np.arange(count * number // shards, count * (number + 1) // shards)
                if self.shuffled:
                    positions = permute(positions, count, mix(self.seed, turn))
                if self.held is not None:
                    positions = self.held[positions] if turn else _without(positions, self.held)
                return f"{folder}{number:05d}.tar", positions
            number -= shards
        raise IndexError(number)

    def places(self, numbers: Numbers) -> Iterator[tuple[int, int]]:
        """(shard of the sources, row in its list) of samples."""
        shards = np.searchsorted(self.ends, numbers, side="right")
        rows = numbers - np.concatenate([[0], self.ends])[shards]
        return zip(shards.tolist(), rows.tolist(), strict=True)


def _without(positions: Numbers, held: Numbers) -> Numbers:
    """The numbers at some positions among all that are not in `held`."""
    return positions + np.searchsorted(held - np.arange(len(held)), positions, side="right")


def choose_held_out(
    corpus: Corpus, data: DataSettings, share: float, group: str | None, folder: Path, executor: str
) -> Numbers:
    """The numbers of the samples for validation, sorted, as `duplicates.choose` chooses them; int64.

    Args:
        group: field whose equal values stay on one side; None for none.
        folder: of the sample tables, which an interrupted call goes on with.

    Raises:
        SettingsError: a shard cannot be read, or no sample has the field.
        DataError: too few samples can be held out.
    """
    tables = []
    for source in corpus.sources:
        labels = dict[str, Numbers]()
        if group is not None:
            labels = dict(zip(source.names, group_labels(source, group, data, "--group"), strict=True))
            if few := compare_groups("--group", group, np.concatenate([*labels.values()]))[1]:
                logger.warning(few)
        tables.append(select_compared(source, data, [*labels.values()], folder, executor))
    rows = pa.concat_tables(tables, promote_options="default")  # of the samples that are listed
    usable = pc.equal(rows["reason"], "")
    names, said = choose(np.flatnonzero(usable).astype(str).tolist(), rows.filter(usable), share)
    if names is None:
        raise DataError(f"--val-split: {said}")
    return np.array(sorted(map(int, names)), np.int64)


@dataclass
class PackShard:
    """Writes a new shard, unless it is there. Called in a process of its own."""

    out: Out
    corpus: Corpus
    plan: PackPlan
    recording: Recording
    digest: str  # of what the bytes depend on
    merged: Merged | None = None
    _packers: dict[int, SamplePacker] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_packers": {}}

    def __call__(self, number: int) -> Packed:
        """Pack a shard by its number in the plan. Raises ShardError, OSError."""
        name, numbers = self.plan.shard(number)
        if (packed := self.out.find_packed(name, self.digest)) is not None:
            return packed
        with draft_in(self.out.folder / PARTS) as (part, index):
            table, packed = self._write(part, numbers)
            if packed.samples:
                origin: dict[str, object] = {"pack": self.digest, **packed._asdict()}
                indexes.write(index, ShardIndex(table), indexes.identity_of(part), origin)
                self.out.place(name, part, index)
        return packed._replace(made=bool(packed.samples))

    def _write(self, part: Path, numbers: Numbers) -> tuple[SampleRefs, Packed]:
        """Write samples into a tar. Raises ShardError, OSError."""
        drops, images, suffixes = Counter[str](), Counter[str](), Counter[str]()
        table, merged = SampleRefs(), 0
        with tarfile.open(part, "w", encoding="utf-8") as tar:
            for number, (shard, row) in zip(numbers.tolist(), self.plan.places(numbers), strict=True):
                source, name = self.corpus.shards[shard]
                of = self.corpus.sources[source]
                columns = of.types[name].columns  # whether members are columns
                if source not in self._packers:
                    self._packers[source] = SamplePacker(of.settings, self.recording)
                packer = self._packers[source]
                try:
                    sample = self.corpus.load(shard, row, packer.members_needed(columns))
                    key = sample["__key__"]
                    more = [] if self.merged is None else self.merged.texts(key)
                    members, what = packer(sample, columns, more)
                except Dropped as drop:
                    drops[drop.reason] += 1
                    continue
                merged += bool(more)
                images.update([what] if what else [])
                suffixes.update(list(members))
                key = key if self.plan.unique else f"{number:09d}-{key}"
                spans = []
                for suffix, data in members.items():
                    spans += [add_member(tar, f"{key}.{suffix}", data), len(data)]
                table.add(key, members, spans)
        atomic_write.flush(part)
        size, digest = part.stat().st_size, file_digest(part)
        return table, Packed(len(table), size, digest, dict(drops), dict(images), dict(suffixes), merged)


@dataclass(frozen=True)
class Asked:
    """The parsed command line."""

    url: str  # of the new shards, or their folder
    folder: Path  # that folder, absolute; for a URL one of this machine, for what is not complete
    settings: Settings  # name the sources
    recording: Recording
    size: tuple[int, bool] | None  # of a shard, and whether that is in bytes; None for those of the sources
    shuffled: bool
    share: float | None  # for validation
    group: str | None
    merge: str | None
    license: str
    executor: str

    @property
    def out(self) -> Out:
        """The folder or the storage of the new shards."""
        return Out(self.url, self.folder)

    @property
    def parts(self) -> Path:
        """The folder for what is not kept."""
        return self.folder / PARTS

    @property
    def shown(self) -> str:
        """The folder or URL of the new shards, for people."""
        return redact(self.url)


def pack(asked: Asked) -> None:
    """Write the shards. Raises SettingsError: wrong usage. Raises DataError: samples cannot be read or written."""
    with errors_as(DataError, "", ShardError):
        _claim(asked)
        with lock_output(asked.folder):
            _pack(asked)


def _claim(asked: Asked) -> None:
    """Raises SettingsError: OUT has other files, or is read. It is not changed."""
    there = {*asked.out.names()} - {f"{PLAN_FILE}.tmp"}  # of a call that was killed at once
    if not asked.out.is_remote:
        atomic_write.claim_output(asked.folder / "0.tar", "OUT")
        atomic_write.claim_output(asked.parts, "OUT", holds=True)
    if there and PLAN_FILE not in there:
        raise SettingsError(f"{asked.shown} is not empty, it holds {min(there)}: use another folder")


def _pack(asked: Asked) -> None:
    """Write the shards. Raises SettingsError, DataError, WorkInterrupted, OSError."""
    began, parts, out = time.monotonic(), asked.parts, asked.out
    data = asked.settings.data  # a cache with a limit may not hold all that is read at random
    own = data.cache is None or data.cache_gib is not None
    data = data.model_copy(update={"cache": str(parts / "cache") if own else data.cache, "cache_gib": None})
    with contextlib.closing(ShardCache(data.cache, fetcher=data.fetcher)) as cache:
        sources = [
            Source(one, SourceContext(cache, asked.settings.data.cache, f"data.sources.{name}"))
            for name, one in data.sources.items()
        ]
        extra = None if asked.merge is None else open_captions(asked.merge, SourceContext(cache, key="--merge"))
        check_lists([build_filter(one.settings, one.context.key, one) for one in sources], told=False)
        about, digest = _begin(asked, sources, extra)
        if out.read(CARD) is not None:  # written last
            names = [line.partition("  ")[2] for line in (out.read(SUMS) or b"").decode().splitlines()]
            if names and all(out.find_packed(name, digest) for name in names):
                told = f"{counted(len(names), 'shard', ',')} in {printable(asked.shown)}"
                print(f"{told}: complete since an earlier call", flush=True)
                return _finish(asked, names)
        kept = parts / digest  # lists are named by number, and are those of one plan
        corpus = Corpus(sources, kept / "lists")
        found = _list(asked, corpus, "listing", data)
        further = None if extra is None else Corpus([extra], kept / "merged")
        merged = None if further is None else Merged(further, _list(asked, further, "listing captions", data))
        plan = _plan(asked, corpus, found)
        if merged is not None:
            matches = merged.matches(corpus)
            if not matches:
                told = f"no key in {redact(str(asked.merge))} is that of a sample, such as {corpus.first_key!r}"
                raise DataError(f"--merge: {told}")
            print(f"captions are merged into {matches:,} of {int(plan.ends[-1]):,} samples", flush=True)
        if asked.share is not None:
            held_numbers = choose_held_out(corpus, data, asked.share, asked.group, kept / "samples", asked.executor)
            plan = replace(plan, held=held_numbers)
        names = [plan.shard(number)[0] for number in range(len(plan))]
        do = PackShard(out, corpus, plan, asked.recording, digest, merged)
        packed = require_all("packing", ShardPass(names, do, parts).run("packing", asked.executor), MEND)
    _conclude(asked, about, found, dict(zip(names, packed, strict=True)), began)


def _begin(asked: Asked, sources: Sequence[Source], extra: Source | None) -> tuple[dict[str, Any], str]:
    """What the bytes depend on, kept in the folder, and its digest.

    Raises SettingsError: the folder holds other files, or shards of other sources or settings.
    """
    settings, recording = asked.settings, asked.recording
    about: dict[str, Any] = {
        "version": FORM,
        "sources": [
            {"name": source.context.key.rpartition(".")[2], "shards": _spec_of(source), **source.settings.reading,
             "keep": source.settings.keep, "drop": source.settings.drop, "identity": identity(source)}
            for source in sources
        ],
        "merge": None if extra is None else {"shards": _spec_of(extra), "identity": identity(extra)},
        "images": {**asdict(recording), "recipe": None if recording.recipe is None else asdict(recording.recipe)},
        "shard_size": "source" if asked.size is None else list(asked.size),
        "order": "shuffled" if asked.shuffled else "source",
        "seed": settings.run.seed,
        "val_split": asked.share,
        "group": asked.group,
        "license": asked.license,
    }  # fmt: skip
    now = json.loads(json.dumps(about))
    if (content := asked.out.read(PLAN_FILE)) is None:
        asked.out.write(PLAN_FILE, json.dumps(about, indent=1) + "\n")
    try:
        before = now if content is None else json.loads(content)
    except ValueError as error:
        raise SettingsError(f"{asked.shown}/{PLAN_FILE} is damaged: use another folder") from error
    if before != now:
        other = [key for key in now if not isinstance(before, dict) or before.get(key) != now[key]]
        raise SettingsError(
            f"{asked.shown} holds shards of another pack, which differs in {', '.join(other)}: use another "
            "folder, or remove it"
        )
    return about, hashlib.sha256(json.dumps(now, sort_keys=True).encode()).hexdigest()[:32]


def _spec_of(source: Source) -> str:
    urls = map(ShardURL, source.settings.parts)
    return "::".join(url.unsigned if url.is_remote else str(url) for url in urls)


def _list(asked: Asked, corpus: Corpus, label: str, data: DataSettings) -> list[Listed]:
    """The samples of the corpus. Raises SettingsError: a list of the settings names samples that do not exist."""
    lists = [build_filter(one.settings, one.context.key, one) for one in corpus.sources]
    found = corpus.list_samples(label, data, asked.executor, measured=asked.size is not None and asked.size[1])
    if not any(one.fault for one in found):
        entries = [(of, one.entries) for (of, _), one in zip(corpus.shards, found, strict=True)]
        try:
            check_lists(lists, [[some for of, some in entries if of == number] for number in range(len(lists))])
        except SettingsError:
            (asked.folder / PLAN_FILE).unlink(missing_ok=True)  # the list is to be corrected
            raise
    return found


def _plan(asked: Asked, corpus: Corpus, found: Sequence[Listed]) -> PackPlan:
    """The plan without a split. Raises DataError: there are no samples."""
    samples = sum(one.samples for one in found)
    if not samples:
        raise DataError("there are no samples to pack: see `clipstream check` of the same sources")
    size = None if asked.size is None else asked.size[0]
    if asked.size is not None and asked.size[1]:  # bytes
        size = max(1, asked.size[0] * samples // max(1, sum(one.size for one in found)))
    is_unique = len(np.unique(corpus.hashes())) == samples
    if not is_unique:
        print("keys of the sources are not unique: the number of its sample is put in front of each", flush=True)
    ends = np.cumsum([one.samples for one in found], dtype=np.int64)
    return PackPlan(ends, size, asked.shuffled, asked.settings.run.seed, is_unique)


def _conclude(
    asked: Asked,
    about: Mapping[str, Any],
    found: Sequence[Listed],
    packed: Mapping[str, Packed],
    began: float,
) -> None:
    """Write sizes, checksums and the data card, and print a summary and the command of training.

    Raises DataError: no sample was usable.
    """
    whole = {name: one for name, one in packed.items() if one.samples}
    samples, size = sum(one.samples for one in whole.values()), sum(one.size for one in whole.values())
    drops = Counter[str](not_kept=sum(one.dropped for one in found))
    for one in packed.values():
        drops.update(one.drops)
    told = ", ".join(f"{count:,} {reason}" for reason, count in (+drops).most_common())
    if not samples:
        raise DataError(f"none of the samples is usable ({told}): see `clipstream check` of the same sources")
    for under in {os.path.dirname(name) for name in whole}:
        sizes = {os.path.basename(name): one.samples for name, one in whole.items() if os.path.dirname(name) == under}
        asked.out.write(os.path.join(under, SIZES), json.dumps(sizes, indent=1) + "\n")
    sums = "".join(f"{one.sha256}  {name}\n" for name, one in whole.items())
    asked.out.write(SUMS, sums)
    asked.out.write(CARD, _card(asked, about, whole, +drops))
    made = sum(one.made for one in whole.values())
    print(
        f"{counted(len(whole), 'shard', ',')} in {printable(asked.shown)}: {samples:,} samples, {decimal(size)}"
        f"{f'; dropped: {told}' if told else ''}; {made:,} were written now, in {duration(time.monotonic() - began)}"
    )
    if not any("txt" in one.suffixes for one in whole.values()):
        print("they have labels and no captions: train with {type: label, label: cls} as data.sources.train.caption")
    _finish(asked, list(whole))


def _finish(asked: Asked, names: Sequence[str]) -> None:
    """Remove what is not kept, and print the command that trains on these shards."""
    shutil.rmtree(asked.folder if asked.out.is_remote else asked.parts, ignore_errors=True)
    words, sides = ["clipstream", "train"], {"--train-data": "train/", "--val-data": "val/"}
    for flag, under in ({"--train-data": ""} if asked.share is None else sides).items():
        paths = [f"{asked.shown}/{name}" for name in names if name.startswith(under)]
        words += [flag, "::".join(in_braces(paths)) if asked.out.is_remote else asked.url]
    print_training(words)


def _card(asked: Asked, about: Mapping[str, Any], whole: Mapping[str, Packed], drops: Counter[str]) -> str:
    """The data card, as the Hugging Face Hub shows it."""
    samples, merged = sum(one.samples for one in whole.values()), sum(one.merged for one in whole.values())
    members, images = Counter[str](), Counter[str]()
    for one in whole.values():
        members.update(one.suffixes)
        images.update(one.images)
    splits = {"train": 0, "validation": 0} if asked.share is not None else {"train": 0}
    for name, one in whole.items():
        splits["validation" if name.startswith("val/") else "train"] += one.samples
    rows = [("samples", f"{samples:,}"), *((split, f"{n:,}") for split, n in splits.items() if asked.share is not None)]
    rows += [("shards", f"{len(whole):,}"), ("bytes", f"{sum(one.size for one in whole.values()):,}")]
    rows += [(f"source {one['name']}", f"`{one['shards']}`") for one in about["sources"]]
    if about["merge"] is not None:
        rows.append(("merged captions", f"`{about['merge']['shards']}`, of {merged:,} samples"))
    rows += [("members", ", ".join(f"{suffix} {count:,}" for suffix, count in members.most_common()))]
    rows += [(f"dropped: {reason}", f"{count:,}") for reason, count in sorted(drops.items())]
    rows += [(f"images {what}", f"{count:,}") for what, count in sorted(images.items())]
    rows += [("order", about["order"] + (f", seed {about['seed']}" if asked.shuffled else ""))]
    if asked.share is not None:
        group = f", and groups of {asked.group}" if asked.group else ""
        rows.append(("validation", f"share {asked.share:g}; near-duplicates{group} are on one side"))
    rows = [(printable(name), printable(text, MESSAGE).replace("|", "\\|")) for name, text in rows]
    folders = {"validation": "val/", "train": "train/" if asked.share is not None else ""}
    files = "\n".join(f'  - split: {split}\n    path: "{folders[split]}*.tar"' for split in splits)
    return "\n".join([
        "---", f"license: {json.dumps(asked.license)}", "configs:", "- config_name: default", "  data_files:", files,
        "---", "", f"# {printable(asked.shown.rstrip('/').rpartition('/')[2])}", "",
        "Image-text pairs as WebDataset shards, written by `clipstream pack`.",
        "", "| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows), "",
        f"License: {printable(asked.license)}. `{PLAN_FILE}` has all settings; check the files with "
        f"`sha256sum -c {SUMS}`.", "",
    ])  # fmt: skip
