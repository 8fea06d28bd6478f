"""Owns the way from settings to the order of a run's samples: its mode and the mix of sources.

Never imports torch, so that what cannot be ordered is told before torch is loaded. It opens no shard, save to count
what no index tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clipstream.data.counting import count_samples
from clipstream.data.epochs import EpochPlan
from clipstream.data.indexed import IndexedOrder
from clipstream.data.opening import Opener
from clipstream.data.order import Mix, Order, SourceMix, SourceOrder
from clipstream.data.settings import DataSettings


@dataclass(frozen=True)
class OrderPlan:
    """The order of a run.

    Attributes:
        mix: of the sources.
        sources: the order of each source, by its place in the sorted list of names.
        epochs: where they are exact.
    """

    mix: Mix
    sources: Sequence[Order]
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
        return OrderPlan(epochs, exact, epochs)
    orders = [
        SourceOrder(
            seed, i, len(opener.names), lanes, sampling.mode, shuffle.shards, shuffle.window, split,
            sampling.replacement,
        )
        for i, opener in enumerate(openers)
    ]  # fmt: skip
    mix = SourceMix(seed, tuple(settings.sources[name].weight for name in names))
    return OrderPlan(mix, orders)


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
