"""Small data settings, a training loader, and digests of its batches."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from clipstream.data.batch import Batch, ImageSpec
from clipstream.data.loader.loader import Loader
from clipstream.data.loader.reading_recipe import ModelInputs
from clipstream.data.order.lanes import DataState
from clipstream.data.pipeline import training_loader
from clipstream.data.sequential_loader import EvalSource, evaluation_loader
from clipstream.data.settings import DataSettings
from clipstream.data.source_settings import SourceSettings
from clipstream.distributed.world import World
from tests.support.pictures import ByteTokenizer

IMAGE = ImageSpec((16, 16))
INPUTS = ModelInputs(ByteTokenizer(), IMAGE)
COUNTS = (23, 9, 16)  # samples of the shards of some tests
OPEN: weakref.WeakSet[Loader] = weakref.WeakSet()  # closed after each test by conftest.py


def indexed(shards: Any, tail: str = "drop", batch: int = 12, **changes: Any) -> DataSettings:
    """Settings of exact epochs."""
    sampling = {"mode": "indexed", "remainder": tail, **changes.pop("sampling", {})}
    return data(shards, sampling=sampling, global_batch_size=batch, **changes)


def close_loaders() -> None:
    """Close what a test left open: each lane holds shards open, and the system's limit may be 1,024 files."""
    while OPEN:
        OPEN.pop().close()


def is_filled(stream: Loader) -> bool:
    """Whether the workers have made all batches that they were asked for."""
    stream._receive_all(timeout=0.0)
    return all(worker.filled_last >= worker.asked_last for worker in stream._workers)


def data(shards: Any, **changes: Any) -> DataSettings:
    values = {
        "global_batch_size": 12,
        "lanes": 8,
        "workers": 0,
        "shuffle": {"window": 10, "shards": 2},
        "sources": {"train": {"shards": shards}},
        **changes,
    }
    return DataSettings.model_validate(values)


def loader(
    settings: DataSettings, rank: int = 0, size: int = 1, start: DataState | None = None, device: str = "cpu",
    **inputs: Any,
) -> Loader:  # fmt: skip
    world = World(rank=rank, size=size, device=device)
    made = training_loader(settings, replace(INPUTS, **inputs), world=world, seed=3, start=start)
    OPEN.add(made)
    return made


def evaluation_of(
    source: SourceSettings, batch_size: int = 8, inputs: ModelInputs = INPUTS, world: World | None = None,
    max_samples: int | None = None, **settings: Any,
) -> Loader:  # fmt: skip
    """The samples of a source once; `settings` are of the data."""
    values = DataSettings.model_validate({"workers": 0, **settings})
    one = EvalSource(source, max_samples=max_samples)
    return evaluation_loader(one, inputs, batch_size=batch_size, world=world or World(), data=values)


def digest(parts: list[Batch]) -> str:
    """Hash of a global batch, put together from its ranks' parts."""
    found = hashlib.sha256()
    for name in ("pixels", "ids", "weights", "sources", "checksums"):
        whole = torch.cat([getattr(part, name) for part in parts])
        found.update(whole.contiguous().numpy().tobytes())
    found.update(repr([key for part in parts for key in part.keys]).encode())
    return found.hexdigest()


def digests(settings: DataSettings, ranks: int, steps: int, start: DataState | None = None) -> list[str]:
    loaders = [loader(settings, rank, ranks, start) for rank in range(ranks)]
    try:
        return [digest([next(one) for one in loaders]) for _ in range(steps)]
    finally:
        for one in loaders:
            one.close()


def drawn_keys(
    settings: DataSettings, ranks: int, steps: int, start: list[DataState] | None = None, **inputs: Any
) -> list[Any]:
    """The global batches of some steps, as digests and numbers of samples, and last the ranks' positions."""
    loaders = [
        loader(settings, rank, ranks, None if start is None else DataState.merge(start), **inputs)
        for rank in range(ranks)
    ]
    found: list[Any] = []
    for _ in range(steps):
        parts = [next(one) for one in loaders]
        keys = [
            int(key.rpartition("/")[2])
            for part in parts for key, w in zip(part.keys, part.weights.tolist(), strict=True) if w
        ]  # fmt: skip
        found.append((digest(parts), keys))
    states = [one.state() for one in loaders]
    for one in loaders:
        one.close()
    return [*found, states]


def assert_layouts(settings: DataSettings, plain: list[Any], *layouts: tuple[int, int], **inputs: Any) -> None:
    """13 batches are those of other ranks and workers, also where a run goes on from their positions."""
    for ranks, workers in layouts:
        again = settings.model_copy(update={"workers": workers})
        assert drawn_keys(again, ranks, 13, **inputs)[:13] == plain[:13]
        states = drawn_keys(again, ranks, 4, **inputs)[-1]
        assert drawn_keys(settings, 1, 9, states, **inputs)[:9] == plain[4:13]


def numbered(counts: Sequence[int]) -> list[tuple[int, int]]:
    """The shard and the number of each sample."""
    return [(i, sum(counts[:i]) + n) for i, count in enumerate(counts) for n in range(count)]
