"""Orders of exact epochs whose batches have samples that belong together: groups, or seeds with hard neighbours.

What is known of each sample of a source enters; the line of an epoch leaves, a function of the seed and the epoch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from clipstream.data.order.lanes import Numbers, share_of
from clipstream.data.order.rng import mix, permutation
from clipstream.data.order.windows import EpochPlan, Order, WindowSamples


class LineOrder(Order):
    """An order whose epochs are a line of all samples of one source, cut into batches, in the mode `indexed`.

    All shards are open, and a lane's slots of an epoch are one window.

    Args:
        plan: of the epochs, of one source.
        counts: samples of each shard.
    """

    keeps_slots = True

    def __init__(self, plan: EpochPlan, counts: Sequence[int]) -> None:
        self.seed, self.source, self.window = plan.seed, 0, plan.steps * plan.batch
        self._plan, self._counts = plan, np.asarray(counts, dtype=np.int64)
        self._line = lru_cache(maxsize=2)(self._make_line)

    @abstractmethod
    def _make_line(self, epoch: int) -> Numbers:
        """The samples of an epoch in the order of its slots, by their numbers in the source."""

    def group(self, lane: int, group: int) -> list[int]:
        return list(range(len(self._counts)))

    def sizes(self, lane: int, group: int, found: Sequence[int]) -> list[int]:
        return [len(self._plan.stretch(0, lane)), *[0] * (len(self._counts) - 1)]

    def samples(self, lane: int, group: int, window: int, sizes: Sequence[int]) -> WindowSamples:
        plan = self._plan
        first, count = share_of(lane, plan.lanes, plan.batch)
        slots = (np.arange(plan.steps)[:, None] * plan.batch + first + np.arange(count)).ravel()
        numbers = self._line(group)[slots[: sum(sizes)]]
        ends = np.cumsum(self._counts)
        shards = np.searchsorted(ends, numbers, "right")
        return np.stack((shards, numbers - (ends - self._counts)[shards]), axis=1)

    def _filled(self, line: Numbers) -> Numbers:
        """The line, which begins again for `wrap`."""
        return np.resize(line, max(len(line), self._plan.steps * self._plan.batch))


class GroupedOrder(LineOrder):
    """The order of a source whose batches have `size` samples of a group each.

    The line has each sample once. It is made of runs of `size` samples of a group, in random order; what is left of
    groups, and groups that are smaller, follow each other in further runs, which are among the others.

    Args:
        plan: of the epochs, of one source.
        labels: of the samples of each shard, int64; a group's are equal and even, others are of samples without one.
        size: of a run; divides the batch.
    """

    def __init__(self, plan: EpochPlan, labels: Sequence[Numbers], size: int) -> None:
        super().__init__(plan, [len(one) for one in labels])
        self._size = size
        self._labels: Numbers = np.concatenate(labels)
        alone = (self._labels == 0) | (self._labels & 1 == 1)
        self._labels[alone] = 2 * np.flatnonzero(alone) + 1

    def _make_line(self, epoch: int) -> Numbers:
        size, drawn = self._size, permutation(len(self._labels), mix(self.seed, 16, epoch))
        groups = mix(self._labels[drawn].astype(np.uint64), state=mix(self.seed, 17, epoch))
        drawn = drawn[np.argsort(groups, kind="stable")]
        _, counts = np.unique(groups, return_counts=True)
        place = np.arange(len(drawn)) - np.repeat(np.cumsum(counts) - counts, counts)
        whole = place < np.repeat(counts // size * size, counts)
        rest = drawn[~whole]
        end = len(rest) // size * size
        runs = np.concatenate((drawn[whole], rest[:end])).reshape(-1, size)
        line = np.concatenate((runs[permutation(len(runs), mix(self.seed, 18, epoch))].ravel(), rest[end:]))
        return self._filled(line)


class NeighbourOrder(LineOrder):
    """The order of a source whose batches are filled with seed samples and their hard neighbours.

    The line has each sample once. A batch takes a seed, its neighbours that no batch of the epoch has yet, best first,
    then the next seed, until it is full. Seeds come in random order. As the batches that are filled last have the
    fewest neighbours, batches are put in random order; one that is not full is the last.

    Args:
        plan: of the epochs, of one source.
        counts: samples of each shard.
        neighbours: of each sample, by their numbers in the source, best first: [n, K], filled with -1.
    """

    def __init__(self, plan: EpochPlan, counts: Sequence[int], neighbours: np.ndarray[Any, Any]) -> None:
        super().__init__(plan, counts)
        self._neighbours = neighbours

    def _make_line(self, epoch: int) -> Numbers:
        batch, line, used = self._plan.batch, list[int](), bytearray(len(self._neighbours))
        for seed in permutation(len(used), mix(self.seed, 20, epoch)).tolist():
            if used[seed]:
                continue
            used[seed] = 1
            line.append(seed)
            for near in self._neighbours[seed].tolist():
                if not len(line) % batch:
                    break
                if near >= 0 and not used[near]:
                    used[near] = 1
                    line.append(near)
        end = len(line) // batch * batch
        whole = np.array(line[:end], dtype=np.int64).reshape(-1, batch)
        whole = whole[permutation(len(whole), mix(self.seed, 22, epoch))]
        return self._filled(np.concatenate((whole.ravel(), np.array(line[end:], dtype=np.int64))))
