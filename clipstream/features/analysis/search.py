"""Exact search and near-duplicates over features that are read in blocks.

Rows of length 1 enter, block by block; row numbers and cosines leave. A score is the float64 product, rounded to
float32: float32 products select candidates, and those that are closer to the limit than float32's error are computed
again in float64. Results therefore depend neither on the block size nor on device or threads.

Memory besides the results, the queries and (for `duplicates`) `held`: about three blocks and `WORKSPACE` bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from clipstream.utils.matmul_precision import restored_matmul_precision

BLOCK = 16384  # rows of a block, by default
TILE = 1 << 22  # scores computed at once
WORKSPACE = TILE * 96  # bytes that the scores of a tile and what is made of them take
SLACK = 16  # candidates of a block besides k: they prove that no other row is among the k best
AT_ONCE = 1 << 21  # feature elements converted to float64 at once: 16 MiB


class Rows(Protocol):
    """Features that can be read any number of times."""

    @property
    def width(self) -> int:
        """Columns, D."""

    def __len__(self) -> int:
        """Number of rows, N."""

    def blocks(self, start: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
        """(number of the first row, float32 [m, D] on the CPU) of blocks in order, from row `start` on."""


@dataclass(frozen=True)
class TensorRows:
    """Rows that are in memory."""

    features: torch.Tensor  # float32 [N, D]
    block: int = BLOCK

    @property
    def width(self) -> int:
        return self.features.shape[1]

    def __len__(self) -> int:
        return len(self.features)

    def blocks(self, start: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
        for first in range(start, len(self), self.block):
            yield first, self.features[first : first + self.block]


class Found(NamedTuple):
    """The best rows of q queries, best first; rows of equal score in ascending order."""

    scores: torch.Tensor  # float32 [q, k]
    rows: torch.Tensor  # int64 [q, k]


def search(rows: Rows, queries: torch.Tensor, k: int, *, device: torch.device | str = "cpu") -> Found:
    """The k rows with the largest product with each query; all rows if there are fewer.

    Args:
        queries: float32 [q, D].
        device: where the products are computed; results are on the CPU.
    """
    k = min(k, len(rows))
    queries = queries.to(device, torch.float32)
    best = Found(
        torch.full((len(queries), k), -torch.inf, device=device),
        torch.full((len(queries), k), -1, dtype=torch.int64, device=device),
    )
    if k:
        with _full_precision():
            for first, features in rows.blocks():
                block = features.to(device)
                margins = _margins(queries, block)
                for some in torch.split(torch.arange(len(queries), device=device), max(1, TILE // len(block))):
                    _search_block(best, queries, some, block, first, margins)
    return Found(best.scores.cpu(), best.rows.cpu())


def _search_block(
    best: Found, queries: torch.Tensor, some: torch.Tensor, block: torch.Tensor, first: int, margins: torch.Tensor
) -> None:
    """Update the best rows of the queries `some`, int64 [n], with a block whose first row has the number `first`."""
    k, wanted, margin = best.scores.shape[1], queries[some], margins[some]
    likely = (wanted @ block.T).topk(min(k + SLACK, len(block)))
    # Without the queries of which no row of the block can be among the best.
    hopeful = likely.values[:, 0] + margin >= best.scores[some, -1]
    some, wanted, margin = some[hopeful], wanted[hopeful], margin[hopeful]
    if not len(some):
        return
    before = Found(best.scores[some], best.rows[some])
    columns, order = likely.indices[hopeful].sort(dim=1)
    rough = likely.values[hopeful].gather(1, order)
    limits = before.scores[:, -1]
    if rough.shape[1] > k:
        limits = torch.maximum(limits, likely.values[hopeful, k - 1] - margin)
    places = (rough + margin[:, None] >= limits[:, None]).nonzero()
    exact = torch.full_like(rough, -torch.inf)
    for n, j in (part.unbind(1) for part in torch.split(places, max(1, AT_ONCE // block.shape[1]))):
        exact[n, j] = (wanted[n].double() * block[columns[n, j]].double()).sum(dim=1).float()
    merged = _merged(before, Found(exact, columns + first))
    if columns.shape[1] < len(block):
        # A row that is no candidate may still be one of the best where the last candidate is too close to them.
        unsure = (likely.values[hopeful, -1] + margin >= merged.scores[:, -1]).nonzero().squeeze(1)
        if len(unsure):
            wide, numbers = block.double().T, torch.arange(first, first + len(block), device=block.device)
            for part in torch.split(unsure, max(1, TILE // 4 // len(block))):
                scores = (wanted[part].double() @ wide).float()
                every = Found(scores, numbers.expand(len(part), -1))
                known = Found(before.scores[part], before.rows[part])
                merged.scores[part], merged.rows[part] = _merged(known, every)
    best.scores[some], best.rows[some] = merged


def _merged(before: Found, block: Found) -> Found:
    """The best of both; the rows of `block` are in ascending order, and all after those of `before`."""
    scores, rows = torch.cat([before.scores, block.scores], 1), torch.cat([before.rows, block.rows], 1)
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    k = before.scores.shape[1]
    return Found(scores[:, :k], rows.gather(1, order[:, :k]))


def _margins(queries: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """Bound of the error of float32 products, float32 [n] (Higham, Accuracy and Stability, 3.5), for any order."""
    longest = torch.linalg.vector_norm(block, dim=1).max()
    lengths = torch.linalg.vector_norm(queries, dim=1)
    margins: torch.Tensor = lengths * longest * ((block.shape[1] + 8) * 2.0**-24)
    return margins


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """Products of float32 in float32, never in TF32 or bf16."""
    with restored_matmul_precision():
        torch.set_float32_matmul_precision("highest")
        yield


class Groups:
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


def duplicates(
    rows: Rows, threshold: float, *, device: torch.device | str = "cpu", held: int = 256 << 20
) -> np.ndarray[Any, Any]:
    """Groups of near-duplicates: rows that a chain of pairs connects, each pair's cosine at least `threshold`.

    Compares all pairs, N^2 D multiplications and additions in all; the rows are read about N D / (held / 4) times.

    Args:
        device: where the products are computed.
        held: bytes of features that are compared with all later ones in one pass.

    Returns:
        int64 [N], the first row of each row's group: itself for a row without an earlier duplicate.
    """
    groups = Groups(len(rows))
    start = 0
    with _full_precision():
        while start < len(rows):
            parts: list[torch.Tensor] = []
            for first, block in rows.blocks(start):
                if parts and sum(part.nbytes for part in parts) + block.nbytes > held:
                    break
                parts.append(block)
                end = first + len(block)
            outer = torch.cat(parts).to(device)
            del parts
            for first, features in rows.blocks(start):
                _join_block(groups, outer, start, features.to(device), first, threshold)
            start = end
    return groups.roots(np.arange(len(rows)))


def _join_block(
    groups: Groups, outer: torch.Tensor, start: int, block: torch.Tensor, first: int, threshold: float
) -> None:
    """Join the pairs of a row of `outer`, from row `start` on, and a later row of a block from row `first` on."""
    step, margin = max(1, TILE // len(block)), float(_margins(outer, block).max())
    for top in range(0, min(len(outer), first + len(block) - start), step):
        tile = outer[top : top + step]
        scores = tile @ block.T
        if float(scores.max()) < threshold - margin:
            continue
        for some in torch.split((scores >= threshold - margin).nonzero(), TILE // 4):
            i, j = some.unbind(1)
            later = i + (start + top) < j + first
            i, j = i[later], j[later]
            sure = scores[i, j] >= threshold + margin
            unsure = (~sure).nonzero().squeeze(1)
            for part in torch.split(unsure, max(1, AT_ONCE // block.shape[1])):
                exact = (tile[i[part]].double() * block[j[part]].double()).sum(dim=1)
                sure[part] = exact >= threshold
            groups.join((i[sure] + (start + top)).cpu().numpy(), (j[sure] + first).cpu().numpy())
