"""From settings to the order of a run's samples: the order of each source and the mix of sources.

Imports no torch, so that errors in the order are reported before torch is loaded. Shards are read only to count samples
that no index has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clipstream.data.order.epochs import EpochPlan, IndexedOrder
from clipstream.data.order.mixing import Mix, SourceMix
from clipstream.data.order.windows import Order, SourceOrder, group_size_for
from clipstream.data.settings import DataSettings
from clipstream.data.sources.sample_counts import count_samples
from clipstream.data.sources.source import Source


@dataclass(frozen=True)
class OrderPlan:
    """The order of a run.

    Attributes:
        mix: of the sources.
        sources: the order of each source, in the order of names.
        epochs: in the mode `indexed`.
    """

    mix: Mix
    sources: Sequence[Order]
    epochs: EpochPlan | None = None

    def remainder(self, step: int) -> dict[str, dict[str, int]]:
        """By source, the remainder of the exact epoch that ends with batch number `step`; {} if none does."""
        if self.epochs is None or (step + 1) % self.epochs.steps:
            return {}
        return dict(zip(self.epochs.names, self.epochs.remainders(), strict=True))


def order_plan(settings: DataSettings, sources: Sequence[Source], seed: int) -> OrderPlan:
    """The order that the settings choose.

    Args:
        settings: with `lanes` resolved.
        sources: in the order of names.

    Raises:
        SettingsError: as `epoch_plan`.
    """
    lanes, shuffle, sampling = settings.lanes, settings.shuffle, settings.sampling
    assert isinstance(lanes, int), "resolve the settings first"
    split = sampling.shards == "split"
    if sampling.mode == "indexed":
        epochs = epoch_plan(settings, sources, seed, lanes)
        exact = [
            IndexedOrder(
                epochs, i, source.counts or [], split=split, window=shuffle.window,
                open_shards=shuffle.open_shards or group_size_for(lanes, len(source.names)),
            )
            for i, source in enumerate(sources)
        ]  # fmt: skip
        return OrderPlan(epochs, exact, epochs)
    orders = [source_order(settings, seed, i, len(source.names)) for i, source in enumerate(sources)]
    weights = tuple(settings.sources[name].weight for name in sorted(settings.sources))
    batches = tuple(zip(settings.batch_changes, settings.batch_sizes, strict=True))
    return OrderPlan(SourceMix(seed, weights, lanes, batches), orders)


def source_order(settings: DataSettings, seed: int, source: int, shards: int) -> SourceOrder:
    """The order of source number `source` with so many shards, in the modes `resampled` and `epoch`.

    Args:
        settings: with `lanes` resolved.
    """
    sampling, shuffle = settings.sampling, settings.shuffle
    assert isinstance(settings.lanes, int), "resolve the settings first"
    return SourceOrder(
        seed, source, shards, settings.lanes, sampling.mode, shuffle.open_shards, shuffle.window,
        sampling.shards == "split", sampling.replacement,
    )  # fmt: skip


def epoch_plan(settings: DataSettings, sources: Sequence[Source], seed: int = 0, lanes: int = 1) -> EpochPlan:
    """The epochs of the mode `indexed`; sets `counts` of the sources.

    Args:
        sources: in the order of names.
        seed, lanes: the length of an epoch does not depend on them.

    Raises:
        SettingsError: samples cannot be counted, or there are too few for a batch.
    """
    named = sorted(settings.sources.items())
    samples = [
        sum(count_samples(source, section, f"data.sources.{name}"))
        for (name, section), source in zip(named, sources, strict=True)
    ]
    return EpochPlan(
        seed,
        tuple(name for name, _ in named),
        tuple(samples),
        tuple(section.weight for _, section in named),
        settings.global_batch_size,
        lanes,
        settings.sampling.remainder,
    )
