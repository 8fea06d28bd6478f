"""Owns the way from settings to the order of a run's samples: its mode, the mix of sources, what makes it this order.

Never imports torch, so that what cannot be ordered is told before torch is loaded. It opens no shard, save to count
what no index tells.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from clipstream.data.counting import count_samples
from clipstream.data.epochs import EpochPlan
from clipstream.data.indexed import IndexedOrder
from clipstream.data.opening import Opener
from clipstream.data.order import Mix, Order, SourceMix, SourceOrder
from clipstream.data.settings import DataSettings
from clipstream.data.shards import redact, stable_name

ORDER = 2  # what the order of samples is computed by; another number is another order


@dataclass(frozen=True)
class OrderPlan:
    """The order of a run.

    Attributes:
        mix: of the sources.
        sources: the order of each source, by its place in the sorted list of names.
        fingerprint: a short hash of what fixes the order.
        epochs: where they are exact.
    """

    mix: Mix
    sources: Sequence[Order]
    fingerprint: str
    epochs: EpochPlan | None = None

    def tail(self, step: int) -> dict[str, dict[str, int]]:
        """What the tail of an epoch did that ends with batch number `step`, by source; nothing elsewhere."""
        if self.epochs is None or (step + 1) % self.epochs.steps:
            return {}
        return dict(zip(self.epochs.names, self.epochs.tails(), strict=True))


def order_plan(settings: DataSettings, openers: Sequence[Opener], seed: int) -> OrderPlan:
    """The order that the settings say.

    Args:
        settings: with `lanes` resolved.
        openers: of the sources, in the order of their names.

    Raises:
        SettingsError: as `epoch_plan`.
    """
    lanes, shuffle, sampling = settings.lanes, settings.shuffle, settings.sampling
    assert isinstance(lanes, int), "resolve the settings first"
    names, split = sorted(settings.sources), sampling.shards == "split"
    if sampling.mode == "indexed":
        epochs = epoch_plan(settings, openers, seed, lanes)
        exact = [
            IndexedOrder(epochs, i, opener.counts or [], split=split, open_shards=shuffle.shards, window=shuffle.window)
            for i, opener in enumerate(openers)
        ]
        return OrderPlan(epochs, exact, _fingerprint(settings, seed, names, openers), epochs)
    orders = [
        SourceOrder(
            seed, i, len(opener.names), lanes, sampling.mode, shuffle.shards, shuffle.window, split,
            sampling.replacement,
        )
        for i, opener in enumerate(openers)
    ]  # fmt: skip
    mix = SourceMix(seed, tuple(settings.sources[name].weight for name in names))
    return OrderPlan(mix, orders, _fingerprint(settings, seed, names, openers))


def epoch_plan(settings: DataSettings, openers: Sequence[Opener], seed: int = 0, lanes: int = 1) -> EpochPlan:
    """The epochs of the mode `indexed`; the openers then know how many samples each shard holds.

    Args:
        openers: of the sources, in the order of their names.
        seed, lanes: what the length of an epoch does not depend on.

    Raises:
        SettingsError: nothing tells how many samples there are, or there are too few for a batch.
    """
    names = sorted(settings.sources)
    sources = [settings.sources[name] for name in names]
    samples = [
        sum(count_samples(opener, source, f"data.sources.{name}"))
        for name, source, opener in zip(names, sources, openers, strict=True)
    ]
    weights = tuple(source.weight for source in sources)
    return EpochPlan(
        seed, tuple(names), tuple(samples), weights, settings.global_batch_size, lanes, settings.sampling.tail
    )


def _stable_names(urls: list[str]) -> list[str]:
    """Shards by names that stay when they are copied elsewhere or a signature in their URL is renewed."""
    names = [stable_name(url) for url in urls]
    return names if len(set(names)) == len(set(urls)) else [redact(url) for url in urls]


def _fingerprint(settings: DataSettings, seed: int, names: list[str], openers: Sequence[Opener]) -> str:
    """A short hash of what fixes the order of samples; the folder of the shards does not."""
    sampling = settings.sampling
    fixed = [
        ORDER, seed, settings.global_batch_size, settings.lanes, sampling.mode, settings.shuffle.window,
        settings.shuffle.shards, names, [_stable_names(opener.names) for opener in openers],
        [settings.sources[name].weight for name in names],
        *([settings.batch_schedule] if settings.batch_schedule else []),
        # Only what differs from before there was a choice: checkpoints of then stay valid.
        *(["split"] if sampling.shards == "split" else []),
        *([] if sampling.replacement else ["without replacement"]),
        *([sampling.tail, [opener.counts for opener in openers]] if sampling.mode == "indexed" else []),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(fixed).encode()).hexdigest()[:16]
