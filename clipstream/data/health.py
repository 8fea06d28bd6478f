"""Owns the counts of what was read, used and dropped, by source and reason, and says when that is too little.

Workers fill one Health and send it as a delta; the rank's loader merges the deltas and checks the sum. It never opens a
shard and never ends a process: it raises DataError.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, NamedTuple

from clipstream.data.profile import Profile
from clipstream.errors import DataError

FIRST_SAMPLES = 2000  # read without one that is usable: the run ends
FIRST_PLACES = 200  # likewise where bad samples keep their places, and empty batches are trained on meanwhile
FIRST_SHARDS = 20  # tried (or all, where there are fewer) before their failures count
FIRST_SILENT = 4  # tried, where nothing answers: each may have cost many seconds
PROFILED = 64  # dropped samples whose members are looked into for the advice
LISTED = 1000  # losses of a source that one report lists; the counts are of all
_SHOWN = 5


class Loss(NamedTuple):
    """A sample or a shard that cannot be used.

    Attributes:
        source: its name.
        shard: without credentials.
        key: of the sample; None for a shard.
        reason: it is counted under.
        detail: what is wrong, in words.
    """

    source: str
    shard: str
    key: str | None
    reason: str
    detail: str


@dataclass
class SourceHealth:
    """Counts of one source.

    Attributes:
        read: samples that were taken from shards.
        used: samples that reached a batch.
        dropped: samples by reason of their drop.
        examples: reason -> 'shard/key: detail' of the first drop.
        shards: numbers of the shards that were tried.
        faults: shard (without credentials) -> what is wrong with it.
        unopened: how many of `faults` gave no sample at all.
        tail: what the tails of epochs did: samples `left_out` or `repeated`, places `padded`.
        losses: dropped samples one by one, the first of a report.
        profile: members and JSON fields of the first dropped samples.
    """

    read: int = 0
    used: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    shards: set[int] = field(default_factory=set)
    faults: dict[str, str] = field(default_factory=dict)
    unopened: set[int] = field(default_factory=set)
    losses: list[Loss] = field(default_factory=list)
    profile: Profile = field(default_factory=Profile)
    tail: Counter[str] = field(default_factory=Counter)

    def drop(self, loss: Loss) -> None:
        """Count a dropped sample, keeping the first of each reason as an example."""
        where = f"{PurePath(loss.shard).name}/{loss.key}"
        self.dropped[loss.reason] += 1
        self.examples.setdefault(loss.reason, f"{where}: {loss.detail}" if loss.detail else where)
        if len(self.losses) < LISTED:
            self.losses.append(loss)

    def funnel(self) -> str:
        """What became of what was read, in words."""
        drops = "".join(f", {count} {reason}" for reason, count in self.dropped.most_common())
        return f"{len(self.shards)} shards tried, {len(self.faults)} broken; {self.read} read, {self.used} used{drops}"

    def merge(self, delta: SourceHealth) -> None:
        """Add another's counts."""
        self.read += delta.read
        self.used += delta.used
        self.dropped.update(delta.dropped)
        for reason, example in delta.examples.items():
            self.examples.setdefault(reason, example)
        self.shards |= delta.shards
        self.faults.update(delta.faults)
        self.unopened |= delta.unopened
        self.tail.update(delta.tail)
        self.losses += delta.losses[: max(0, LISTED - len(self.losses))]
        if sum(self.profile.suffixes.values()) < 100 * PROFILED:
            self.profile.merge(delta.profile)


class Health:
    """Counts by source."""

    def __init__(self, names: list[str]) -> None:
        self.sources = {name: SourceHealth() for name in names}

    def merge(self, delta: Health) -> list[str]:
        """Add another's counts; says in words which shards are newly found to be broken."""
        new = []
        for name, health in delta.sources.items():
            into = self.sources[name]
            faults = {url: fault for url, fault in health.faults.items() if url not in into.faults}
            new += [f"source {name!r}: {url}: {fault}" for url, fault in faults.items()]
            into.merge(health)
            for url, fault in faults.items():
                reason, _, detail = fault.partition(": ")
                into.losses.append(Loss(name, url, None, reason, detail))
        return new

    def take_losses(self) -> list[Loss]:
        """The samples and shards that were lost since the last take, as far as they are listed."""
        losses = [loss for source in self.sources.values() for loss in source.losses]
        for source in self.sources.values():
            source.losses = []
        return losses

    def take(self) -> Health:
        """What was counted since the last take; counting starts again from nothing."""
        delta = Health([])
        delta.sources = self.sources
        self.sources = {name: SourceHealth() for name in self.sources}
        return delta

    def summary(self) -> dict[str, Any]:
        """Counts for metrics: {source: {read, used, dropped: {reason: n}, examples: {reason: text}, shards,
        shard_faults, fault_reasons: {reason: n}}}; where epochs have tails, what those did.
        """
        return {
            name: {
                "read": h.read,
                "used": h.used,
                "dropped": dict(sorted(h.dropped.items())),
                "examples": dict(sorted(h.examples.items())),
                "shards": len(h.shards),
                "shard_faults": len(h.faults),
                "fault_reasons": dict(sorted(Counter(fault.partition(":")[0] for fault in h.faults.values()).items())),
                **h.tail,
            }
            for name, h in self.sources.items()
        }


@dataclass(frozen=True)
class Budget:
    """When a source's failures end the run.

    Attributes:
        total_shards: source -> number of its shards.
        hints: source -> (image_key, caption settings, key of the settings it stands under), for the advice.
        max_shard_failures: share of the tried shards, 0 to 1.
        max_sample_failures: share of the read samples, 0 to 1.
        on_shard_error: 'raise' where the first broken shard ends the run.
        first_samples: that may be read without one that is usable.
    """

    total_shards: dict[str, int]
    hints: dict[str, tuple[str, Any, str]]
    max_shard_failures: float
    max_sample_failures: float
    on_shard_error: str = "skip"
    first_samples: int = FIRST_SAMPLES

    def check(self, health: Health) -> None:
        """Raise DataError where a source gives nothing, or fails more often than the settings allow."""
        for name, h in health.sources.items():
            total = self.total_shards[name]
            if h.faults and self.on_shard_error == "raise":
                raise DataError(f"source {name!r}: a shard is broken (--data.on-shard-error raise){_faults(h)}")
            enough = len(h.shards) >= min(total, FIRST_SHARDS)
            silent = len(h.shards) >= min(total, FIRST_SILENT) and all(map(_is_silence, h.faults.values()))
            if (enough or silent) and h.shards and len(h.unopened) == len(h.shards):
                raise DataError(f"source {name!r}: none of the {_tried(h, total)} could be read{_faults(h)}")
            if h.used == 0 and h.read >= self.first_samples:
                raise DataError(self.nothing_usable(name, h))
            if enough and len(h.faults) > math.ceil(self.max_shard_failures * len(h.shards)):
                raise DataError(
                    f"source {name!r}: {len(h.faults)} of the {_tried(h, total)} are broken, more than "
                    f"--data.max-shard-failures {self.max_shard_failures:g} allows{_faults(h)}"
                )
            dropped = sum(h.dropped.values())
            if h.read >= FIRST_SAMPLES and dropped > self.max_sample_failures * h.read:
                raise DataError(
                    f"source {name!r}: {dropped} of {h.read} samples were dropped, more than "
                    f"--data.max-sample-failures {self.max_sample_failures:g} allows{_drops(h)}"
                )

    def nothing_usable(self, name: str, h: SourceHealth) -> str:
        """What to say of a source that gave no usable sample."""
        image_key, caption, place = self.hints[name]
        advice = h.profile.advice(image_key, caption, place)
        if h.dropped["missing_picture"]:
            advice += f"\nthe pictures' paths begin elsewhere? Say where by --{place}.folder"
        return f"source {name!r}: none of the first {h.read} samples is usable{_drops(h)}{_faults(h)}\n{advice}"


def _is_silence(fault: str) -> bool:
    return fault.startswith(("unreachable", "timeout"))


def _tried(h: SourceHealth, total: int) -> str:
    return f"{len(h.shards)} shards tried (of {total})"


def _drops(h: SourceHealth) -> str:
    lines = [f"\n  {n} x {reason}, e.g. {h.examples[reason]}" for reason, n in h.dropped.most_common(_SHOWN)]
    return ":" + "".join(lines) if lines else ""


def _faults(h: SourceHealth) -> str:
    shown = [f"\n  {url}: {fault}" for url, fault in list(h.faults.items())[:_SHOWN]]
    more = f"\n  … and {len(h.faults) - _SHOWN} more" if len(h.faults) > _SHOWN else ""
    return ":" + "".join(shown) + more if shown else ""
