"""What workers report: counts of samples read, used and dropped, by source and reason, and when a run ends for them.

Workers fill one Health and send it as a delta, in a WorkerReport; the rank's loader merges the deltas and checks the
Budget, which raises DataError. For people, a SampleTrace tells what became of one of the first samples (`--data.trace
N`).
"""

from __future__ import annotations

import io
import math
import re
import sys
import zlib
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from pathlib import PurePath
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from clipstream.data.decode.captions import RawSample
from clipstream.data.decode.key_lists import LEFT_OUT, NOT_DRAWN, NOT_KEPT
from clipstream.data.decode.sample_profile import Profile, is_multilingual
from clipstream.data.loader.stage_timing import StageIntervals
from clipstream.data.order.lanes import LaneState
from clipstream.data.settings import DataSettings
from clipstream.data.source_settings import CaptionSettings, TextCaption
from clipstream.data.sources import Source
from clipstream.errors import DataError
from clipstream.storage.shard_url import redact
from clipstream.text import lines, listed_lines, printable

MAX_TEXT = 200  # characters of a caption that a trace prints
FIRST_SAMPLES = 2000  # samples without a usable one after which the run ends
FIRST_SLOTS = 200  # the same where slots of dropped samples stay empty, as empty batches are trained on meanwhile
FIRST_LEFT_OUT = 100_000  # samples that a list of keys leaves out, without a usable one, after which the run ends
FIRST_SHARDS = 20  # shards (or all, where there are fewer) that are tried before their failures count
FIRST_SILENT = 4  # the same for servers that do not answer: each may have cost many seconds
INTERIM_DROPS = 200  # dropped samples after which a worker reports before its part of a batch is filled
PROFILED = 64  # dropped samples whose members are examined for the advice
FEW_SAMPLES = 20  # too few to tell whether captions are constant
SHOWN_CAPTION = 60  # characters
FLAT_RANGE = 4  # of 255: highest difference of the pixels of an image of one colour, in each channel
LARGE_CROP = 0.3  # mean share of an image's area that a crop leaves out, above which it is worth a word
LISTED = 1000  # dropped samples of a source that one report lists; all are counted
_SHOWN = 5
_NUMBER = re.compile(r"(?i)[-+.,:/\d\s%tz]*\d[-+.,:/\d\s%tze]*$|(?:true|false|none|null|nan)$")
# The beginning of a list or an object in JSON, or as Python and NumPy print it.
_STRUCTURED = re.compile(r"""\s*(?:array\()?(?:"?\[\s*(?:["'{\[\]]|\d+\s*,|\\")|\{\s*["'}\d]|"\{|b['"])""")
_PATH = re.compile(r"(?a)(?:https?://)?[\w.%~-]*(?:/[\w.%~?=&-]*)+$|[\w.-]+\.(?:jpe?g|png|webp)$")
_OTHERS = (
    ("numbers or dates", _NUMBER, 0.5),
    ("lists or objects", _STRUCTURED, 0.05),
    ("UTF-16 or bytes", re.compile(r"[^\0]?\0"), 0.05),
    ("paths or URLs", _PATH, 0.5),
)


class Captions:
    """The captions of a source's first samples, for a warning if they are (nearly) all the same, or no texts, and
    whether their images have one colour.

    Attributes:
        seen: hash of a sample's name -> hash and beginning of its caption.
        flat: name of a sample whose image has (nearly) one colour, by the hash of it.
        multilingual: the same of a sample whose caption has several languages.
    """

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, str]] = {}
        self.flat: dict[int, str] = {}
        self.multilingual: dict[int, str] = {}

    def add(self, name: str, caption: str, pixels: np.ndarray[Any, Any] | None, *, flat: bool = False) -> None:
        """Add a sample with its pixels uint8 [..., H, W, 3], or with whether they are of one colour, unless there are
        enough or it was added before."""
        if len(self.seen) < FIRST_SAMPLES:
            key = zlib.crc32(name.encode(errors="replace"))
            self.seen.setdefault(key, (zlib.crc32(caption.encode()), caption[:SHOWN_CAPTION]))
            if flat or (pixels is not None and is_flat(pixels)):
                self.flat[key] = name
            if is_multilingual(caption):
                self.multilingual[key] = name

    def merge(self, other: Captions) -> None:
        for key, caption in other.seen.items():
            if len(self.seen) < FIRST_SAMPLES:
                self.seen.setdefault(key, caption)
                for own, theirs in ((self.flat, other.flat), (self.multilingual, other.multilingual)):
                    if key in theirs:
                        own[key] = theirs[key]

    def flat_warning(self) -> str:
        """The warning on images of one colour; '' if there are few."""
        if len(self.seen) < FEW_SAMPLES or len(self.flat) <= 0.05 * len(self.seen):
            return ""
        example = printable(next(iter(self.flat.values())), 200)
        return (
            f"{len(self.flat):,} of the first {len(self.seen):,} images have (nearly) a single color, such as "
            f"{example}: check their range of values"
        )

    def languages_warning(self, settings: CaptionSettings | None, least: float = 0.0) -> str:
        """The warning on captions in several languages; '' if they are not more than the share `least`."""
        count = len(self.multilingual)
        if count <= least * len(self.seen):
            return ""
        flag = "name its field with --caption-json"
        if isinstance(settings, TextCaption) and settings.lines == "all":
            flag = "set --caption-lines first, if the text has it in its first line"
        example = printable(next(iter(self.multilingual.values())), 200)
        share = f"{count:,} captions ({count / len(self.seen):.0%})"
        return f"{share} are in several languages, for example {example}: to train on one, {flag}"

    def warning(self) -> str:
        """The warning on captions that are nearly constant, or no texts; '' if few are or were seen."""
        counts, number = Counter(self.seen.values()), len(self.seen)
        if number < FEW_SAMPLES:
            return ""
        (_, text), most = counts.most_common(1)[0]
        found = []
        if most * 2 >= number or len(counts) <= number // 50:
            few = f"{most:,} of them " if most * 2 >= number else f"there are {len(counts):,} different ones, {most:,} "
            found.append(f"nearly constant: {few}are {printable(text)!r}")
        for what, pattern, least in _OTHERS:
            like = [text for _, text in self.seen.values() if pattern.match(text)]
            if len(like) > least * number:
                found.append(f"{what}, not texts: {len(like):,} of them are such as {printable(like[0])!r}")
        if not found:
            return ""
        return (
            f"the captions of {number:,} samples are {', and '.join(found)}. If these are not the captions, choose "
            f"another field with --caption-json or another member with --caption-key (`clipstream check` lists them)"
        )


def is_flat(pixels: np.ndarray[Any, Any]) -> bool:
    """Whether pixels uint8 [..., H, W, C] have (nearly) one colour."""
    looks = (pixels[..., ::step, ::step, :].reshape(-1, pixels.shape[-1]) for step in (8, 1))  # few need the second
    return bool(pixels.size) and all((np.ptp(some, axis=0) <= FLAT_RANGE).all() for some in looks)


class DroppedSample(NamedTuple):
    """A sample or a shard that could not be used."""

    source: str  # name
    shard: str  # URL without credentials
    key: str | None  # of the sample; None for a shard
    reason: str  # under which it is counted
    detail: str  # the error, in words


@dataclass
class SourceHealth:
    """Counts of one source."""

    read: int = 0  # number of samples read from shards
    used: int = 0  # number of samples in batches
    dropped: Counter[str] = field(default_factory=Counter)  # number of samples by reason
    # reason -> 'shard/key: detail' of a dropped sample: the first by name, whoever dropped it and when
    examples: dict[str, str] = field(default_factory=dict)
    shards: set[int] = field(default_factory=set)  # numbers of the shards that were tried
    faults: dict[str, str] = field(default_factory=dict)  # shard (without credentials) -> its error
    unopened: set[int] = field(default_factory=set)  # numbers of the shards in `faults` without a usable sample
    # the first dropped samples and shards since the last report
    listed: list[DroppedSample] = field(default_factory=list)
    profile: Profile = field(default_factory=Profile)  # members and JSON fields of the first dropped samples
    # of exact epochs: samples `left_out` or `repeated`, slots `padded`
    remainder: Counter[str] = field(default_factory=Counter)
    captions: Captions = field(default_factory=Captions)  # of the first samples used in training
    # of the first samples, by name: shares of an image's area that the crop, and that of evaluation, left out
    lost: dict[str, tuple[float, float]] = field(default_factory=dict)

    def drop(self, sample: DroppedSample) -> None:
        """Count a dropped sample, and keep one of each reason as an example."""
        where = printable(f"{PurePath(sample.shard).name}/{sample.key}", 200)
        self.dropped[sample.reason] += 1
        text = f"{where}: {sample.detail}" if sample.detail else where
        self.examples[sample.reason] = min(text, self.examples.get(sample.reason, text))
        if sample.reason not in LEFT_OUT and len(self.listed) < LISTED:
            self.listed.append(sample)

    @property
    def failed(self) -> int:
        """Number of dropped samples without those that `keep`, `drop` and `probability` leave out."""
        return sum(self.dropped.values()) - self.left_out

    @property
    def left_out(self) -> int:
        """Number of the samples that `keep`, `drop` and `probability` leave out."""
        return sum(self.dropped[reason] for reason in LEFT_OUT)

    def funnel(self) -> str:
        """The counts of shards and samples, in words."""
        drops = "".join(f", {count} {reason}" for reason, count in self.dropped.most_common())
        return f"{len(self.shards)} shards tried, {len(self.faults)} broken; {self.read} read, {self.used} used{drops}"

    def merge(self, delta: SourceHealth) -> None:
        self.read += delta.read
        self.used += delta.used
        self.dropped.update(delta.dropped)
        for reason, example in delta.examples.items():
            self.examples[reason] = min(example, self.examples.get(reason, example))
        self.shards |= delta.shards
        self.faults.update(delta.faults)
        self.unopened |= delta.unopened
        self.remainder.update(delta.remainder)
        self.captions.merge(delta.captions)
        if len(self.lost) < FIRST_SAMPLES:
            self.lost.update(delta.lost)
        self.listed += delta.listed[: max(0, LISTED - len(self.listed))]
        if sum(self.profile.suffixes.values()) < 100 * PROFILED:
            self.profile.merge(delta.profile)


def lost_areas(lost: Sequence[tuple[float, float]]) -> dict[str, float]:
    """The number of images, and the mean shares of their area that training's crop, and evaluation's, leave out."""
    training, evaluation = (round(fmean(shares), 4) for shares in zip(*lost, strict=True))
    return {"images": len(lost), "training": training, "evaluation": evaluation}


def lost_area_note(share: float) -> str:
    """How much of an image evaluation's centre crop leaves out on average, and what to do about it if it is much."""
    advice = ": --image-resize-mode longest shows whole images, with borders" if share >= LARGE_CROP else ""
    return f"the centre crop of evaluation leaves out {share:.0%} of an image's area on average{advice}"


class Health:
    """Counts by source."""

    def __init__(self, names: list[str]) -> None:
        self.sources = {name: SourceHealth() for name in names}

    def merge(self, delta: Health) -> list[str]:
        """Add counts; returns a line on each newly found broken shard."""
        new = []
        for name, health in delta.sources.items():
            into = self.sources[name]
            faults = {url: fault for url, fault in health.faults.items() if url not in into.faults}
            new += [f"source {name!r}: {printable(url)}: {printable(fault, 500)}" for url, fault in faults.items()]
            into.merge(health)
            for url, fault in faults.items():
                reason, _, detail = fault.partition(": ")
                into.listed.append(DroppedSample(name, url, None, reason, detail))
        return new

    def take_dropped(self) -> list[DroppedSample]:
        """The samples and shards that were dropped since the last call, as far as they are listed."""
        dropped = [one for source in self.sources.values() for one in source.listed]
        for source in self.sources.values():
            source.listed = []
        return dropped

    def take(self) -> Health:
        """The counts since the last call."""
        delta = Health([])
        delta.sources = self.sources
        self.sources = {name: SourceHealth() for name in self.sources}
        return delta

    def counts(self) -> dict[str, dict[str, Any]]:
        """What `merge_counts` takes: counts, and the sets of shards that were tried (as bits, in hexadecimal) and of
        broken ones, with the reason.
        """
        return {
            name: {
                "read": h.read,
                "used": h.used,
                "dropped": dict(h.dropped),
                "examples": dict(h.examples),
                "tried": _hex_of(h.shards),
                "faults": {url: fault.partition(":")[0] for url, fault in h.faults.items()},
                **h.remainder,
            }
            for name, h in self.sources.items()
        }


def empty_shards(sources: Mapping[str, Source]) -> Health:
    """Faults of shards without samples, found when samples were counted; an exact epoch never opens these shards."""
    found = Health(list(sources))
    for name, source in sources.items():
        if source.empty:
            health = found.sources[name]
            health.shards = set(range(len(source.names)))
            health.faults = {redact(source.names[number]): fault for number, fault in source.empty.items()}
            health.unopened = set(source.empty)
    return found


def merge_counts(parts: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The counts of all ranks, or of a run before and after it was resumed, by source.

    These are read, used, dropped {reason: n}, examples {reason: text}, tried, faults, shards, shard_faults,
    fault_reasons {reason: n}, and the remainders of exact epochs. A shard that several parts tried counts once. Those
    of a checkpoint of 0.1.0, which has no sets, are not counted.
    """
    merged: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        found: dict[str, Any] = {}
        given = [part[name] for part in parts if name in part]
        for key in dict.fromkeys(key for one in given for key in one):
            values = [one[key] for one in given if key in one]
            if key == "tried":
                found[key] = f"{reduce(or_, (int(value, 16) for value in values)):x}"
            elif isinstance(values[0], dict):
                tables = defaultdict(list)
                for word, value in (item for one in values for item in one.items()):
                    tables[word].append(value)
                combine = {"examples": min, "faults": min}.get(key, sum)
                found[key] = {word: combine(tables[word]) for word in sorted(tables)}
            else:
                found[key] = sum(values)
        if "tried" in found:
            found["shards"], found["shard_faults"] = int(found["tried"], 16).bit_count(), len(found["faults"])
            found["fault_reasons"] = dict(sorted(Counter(found["faults"].values()).items()))
        merged[name] = found
    return merged


def without_sets(counts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The counts alone."""
    return {name: {key: n for key, n in one.items() if key not in ("tried", "faults")} for name, one in counts.items()}


def _hex_of(numbers: Collection[int]) -> str:
    bits = bytearray(max(numbers, default=0) // 8 + 1)
    for number in numbers:
        bits[number // 8] |= 1 << number % 8
    return f"{int.from_bytes(bits, 'little'):x}"


@dataclass(frozen=True)
class Budget:
    """The failures of a source that end the run."""

    total_shards: dict[str, int]  # source -> number of its shards
    # source -> (image_key, caption settings, key of the source's settings), for the advice
    hints: dict[str, tuple[str, CaptionSettings | None, str]]
    max_shard_failures: float  # share of the tried shards, 0 to 1
    max_sample_failures: float  # share of the read samples, 0 to 1
    first_samples: int = FIRST_SAMPLES  # that may be read without a usable one
    lists: Mapping[str, tuple[str | None, str | None]] = field(default_factory=dict)  # source -> its keep and drop

    @classmethod
    def of(cls, settings: DataSettings, sources: Mapping[str, Source]) -> Budget:
        """The failures that training accepts."""
        return cls(
            {name: len(set(source.names)) for name, source in sources.items()},
            {name: (one.image_key, one.caption, f"data.sources.{name}") for name, one in settings.sources.items()},
            settings.max_shard_failures,
            settings.max_sample_failures,
            FIRST_SLOTS if settings.sampling.mode == "indexed" else FIRST_SAMPLES,
            {name: (one.keep, one.drop) for name, one in settings.sources.items()},
        )

    def check(self, health: Health) -> None:
        """Raise DataError if a source has no usable sample, or fails more often than the settings allow."""
        for name, h in health.sources.items():
            total = self.total_shards[name]
            enough = len(h.shards) >= min(total, FIRST_SHARDS)
            unanswered = all(fault.startswith(("unreachable", "timeout")) for fault in h.faults.values())
            silent = len(h.shards) >= min(total, FIRST_SILENT) and unanswered
            tried = f"{len(h.shards)} shards tried (of {total})"
            if (enough or silent) and h.shards and len(h.unopened) == len(h.shards):
                raise DataError(lines(f"source {name!r}: none of the {tried} could be read:", *_faults(h)))
            left_out = h.left_out
            if h.used == 0 and (h.read - left_out >= self.first_samples or left_out >= FIRST_LEFT_OUT):
                raise DataError(self.nothing_usable(name, h))
            if (enough or not self.max_shard_failures) and len(h.faults) > math.ceil(
                self.max_shard_failures * len(h.shards)
            ):
                limit = f"--data.max-shard-failures {self.max_shard_failures:g}"
                head = f"source {name!r}: {len(h.faults)} of the {tried} are broken, more than {limit}:"
                raise DataError(lines(head, *_faults(h)))
            read = h.read - left_out
            if read >= FIRST_SAMPLES and h.failed > self.max_sample_failures * read:
                limit = f"--data.max-sample-failures {self.max_sample_failures:g}"
                head = f"source {name!r}: {h.failed} of {read} samples were dropped, more than {limit}:"
                raise DataError(lines(head, *_drops(h)))

    def list_warning(self, name: str, h: SourceHealth) -> str:
        """The warning on lists of keys that match (nearly) nothing; '' without one."""
        (keep, drop), left_out = self.lists.get(name, (None, None)), h.dropped[NOT_KEPT]
        flag = f"--{self.hints[name][2]}"
        if keep is not None and 1000 * (h.read - left_out) < h.read:
            said = f"{flag}.keep: only {h.read - left_out:,} of the {h.read:,} samples read so far are in {keep}"
        elif drop is not None and keep is None and not left_out:
            said = f"{flag}.drop: none of the {h.read:,} samples read so far is in {drop}"
        else:
            return ""
        return f"{said}: expected lines KEY or SHARD/KEY, as shown by `clipstream check`"

    def nothing_usable(self, name: str, h: SourceHealth) -> str:
        """The message on a source that gave no usable sample, with advice."""
        image_key, caption, key = self.hints[name]
        why = _drops(h)
        if h.left_out >= FIRST_LEFT_OUT:
            drawn = h.dropped[NOT_DRAWN] > h.dropped[NOT_KEPT]
            which = f"--{key}.probability excludes" if drawn else f"--{key}.keep and --{key}.drop exclude"
            advice = [f"{which} them: check that their keys belong to these shards"]
        else:
            why, advice = why + _faults(h), [h.profile.advice(image_key, caption, key)]
            if h.dropped["missing_picture"]:
                advice.append(f"if the paths of the images begin in another folder, set --{key}.folder")
        head = f"source {name!r}: none of the first {h.read} samples is usable{':' if why else ''}"
        return lines(head, *why, *advice)


def _drops(h: SourceHealth) -> list[str]:
    drops = h.dropped.most_common(_SHOWN)
    return [
        f"  {n} x {reason}" + (f", e.g. {h.examples[reason]}" if h.examples.get(reason) else "") for reason, n in drops
    ]


def _faults(h: SourceHealth) -> list[str]:
    return listed_lines([f"  {printable(url)}: {printable(fault, 500)}" for url, fault in h.faults.items()], _SHOWN)


class SampleTrace:
    """Collects the lines on one sample and prints them together, as other processes print too."""

    def __init__(self, title: str) -> None:
        self._lines = [title]

    def members(self, stage: str, sample: RawSample) -> None:
        """Add names and sizes of a sample's members after a stage."""
        parts = []
        for name, value in sample.items():
            size = type(value).__name__
            if isinstance(value, bytes | str):
                size = f"{len(value):,} {'bytes' if isinstance(value, bytes) else 'characters'}"
            parts += [] if name.startswith("__") else [f"{name} {size}"]
        self._add(stage, ", ".join(parts) or "no members that the settings read")

    def image(self, data: bytes, pixels: np.ndarray[Any, Any] | None) -> None:
        """Add an image file and the uint8 [H, W, 3] made of it; None if it is decoded with its batch."""
        from PIL import Image

        with Image.open(io.BytesIO(data)) as image:
            stored = f"{image.format} {image.width} x {image.height} {image.mode}"
        if pixels is None:
            self._add("image", f"{stored} -> decoded with its batch")
            return
        levels = " ".join(f"{level:.0f}" for level in pixels.reshape(-1, 3).mean(axis=0))
        self._add("image", f"{stored} -> {pixels.shape[1]} x {pixels.shape[0]}, mean of the channels {levels}")

    def caption(self, caption: str, ids: Sequence[int], text: str) -> None:
        """Add a caption, its ids, and the text that these decode to."""
        used = len(ids) - next((n for n, number in enumerate(reversed(ids)) if number), len(ids))
        shown = " ".join(map(str, ids[: min(used, 16)])) + (" …" if used > 16 else "")
        self._add("caption", repr(caption[:MAX_TEXT]))
        self._add("ids", f"{used} of {len(ids)}: {shown} = {text[:MAX_TEXT]!r}")

    def end(self, stage: str, text: str) -> None:
        """Add the outcome and print the trace."""
        self._add(stage, text)
        sys.stderr.write("\n".join(printable(line, 2000) for line in self._lines) + "\n")
        sys.stderr.flush()

    def _add(self, stage: str, text: str) -> None:
        self._lines.append(f"  {stage:<10} {text}")


@dataclass
class WorkerReport:
    """What a worker reports while it fills its part of a batch."""

    health: Health  # counts since the last report
    intervals: StageIntervals  # of the stages since then


@dataclass
class Candidates:
    """All captions of the samples of a batch part, and why samples were dropped."""

    texts: dict[int, list[list[str]]]  # slot -> texts of each path of the source's caption setting
    ids: np.ndarray[Any, np.dtype[np.int32]]  # [c, T], of all texts: slot by slot, path by path
    dropped: dict[int, str]  # slot -> reason
    shard_samples: int = 0  # of the whole shard that the samples are from
    keys: dict[int, str] = field(default_factory=dict)  # slot -> key of its sample in the shard


@dataclass
class FilledPart(WorkerReport, ABC):
    """What is reported when a part of a batch is filled; the loader makes `health` the counts of the whole part."""

    step: int  # number of the batch
    ended: bool = field(default=False, kw_only=True)  # whether all lanes have ended (evaluation)

    @abstractmethod
    def lane_states(self) -> dict[int, LaneState]:
        """Lane number -> position after this batch."""


@dataclass
class BatchPart(FilledPart):
    """The part of a worker."""

    # slot -> 'SHARD/KEY' of its sample, '' for padding; without the slots of lanes that have ended
    keys: dict[int, str]
    lanes: dict[int, LaneState]  # lane number -> position after this batch
    candidates: Candidates | None = None  # for stored features
    captions: dict[int, str] = field(default_factory=dict)  # slot -> caption, see Batch.captions

    def lane_states(self) -> dict[int, LaneState]:
        return self.lanes
