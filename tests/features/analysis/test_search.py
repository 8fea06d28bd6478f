"""Exact search and near-duplicates against float64 products of all pairs, and their memory."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clipstream.features.analysis import search as module
from clipstream.features.analysis.search import TensorRows, duplicates, search

ROOT = Path(__file__).parents[3]


def make_rows(n: int, width: int, kind: str, seed: int) -> torch.Tensor:
    """Unit rows: random ones, a few different ones repeated, or ones that differ by less than float32 resolves."""
    draw = torch.Generator().manual_seed(seed)
    if kind == "repeated":
        few = F.normalize(torch.randn(3, width, generator=draw), dim=1)
        return few[torch.randint(3, (n,), generator=draw)]
    if kind == "close":
        base = F.normalize(torch.randn(width, generator=draw), dim=0)
        return F.normalize(base + 1e-6 * torch.randn(n, width, generator=draw), dim=1)
    return F.normalize(torch.randn(n, width, generator=draw), dim=1)


def brute_force(features: torch.Tensor, queries: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All products in float64, rounded to float32; the best rows, of equal ones the first."""
    scores = torch.stack([(features.double() * query.double()).sum(dim=1) for query in queries]).float()
    values, rows = scores.sort(dim=1, descending=True, stable=True)
    return values[:, :k], rows[:, :k]


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 300),
    queries=st.integers(1, 9),
    k=st.integers(1, 40),
    block=st.integers(1, 300),
    width=st.sampled_from([1, 5, 64]),
    kind=st.sampled_from(["random", "repeated", "close"]),
    seed=st.integers(0, 1000),
)
@example(n=300, queries=5, k=3, block=120, width=64, kind="close", seed=1)
@example(n=300, queries=5, k=3, block=120, width=5, kind="repeated", seed=1)
def test_search_is_that_of_float64_products(
    n: int, queries: int, k: int, block: int, width: int, kind: str, seed: int
) -> None:
    features = make_rows(n, width, kind, seed)
    wanted = torch.cat([make_rows(queries, width, "random", seed + 1), features[:1]])
    found = search(TensorRows(features, block), wanted, k)
    values, rows = brute_force(features, wanted, k)
    assert found.scores.dtype == torch.float32 and found.rows.dtype == torch.int64
    assert torch.equal(found.scores, values)
    assert torch.equal(found.rows, rows)


def test_float32_products_alone_would_give_other_rows() -> None:
    """The data of the property test are close enough for its reference to see the difference."""
    features = make_rows(300, 64, "close", 1)
    rough = (features[:5] @ features.T).sort(dim=1, descending=True, stable=True).indices[:, :3]
    assert not torch.equal(rough, brute_force(features, features[:5], 3)[1])


def test_search_in_little_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    features, queries = make_rows(500, 16, "close", 3), make_rows(40, 16, "random", 4)
    whole = search(TensorRows(features), queries, 7)
    monkeypatch.setattr(module, "TILE", 64)
    monkeypatch.setattr(module, "AT_ONCE", 64)
    parts = search(TensorRows(features, 33), queries, 7)
    assert torch.equal(whole.scores, parts.scores) and torch.equal(whole.rows, parts.rows)


def test_search_among_no_rows() -> None:
    found = search(TensorRows(torch.zeros(0, 4)), torch.ones(3, 4), 5)
    assert found.scores.shape == found.rows.shape == (3, 0)


def groups_of(features: torch.Tensor, threshold: float) -> list[int]:
    """The first row of each row's group, by a search through the graph of all pairs."""
    near = np.array([(features.double() * row.double()).sum(dim=1).tolist() for row in features]) >= threshold
    group = [-1] * len(features)
    for first in range(len(features)):
        open_rows = [first] if group[first] < 0 else []
        while open_rows:
            row = open_rows.pop()
            if group[row] < 0:
                group[row] = first
                open_rows += np.flatnonzero(near[row]).tolist()
    return group


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 150),
    block=st.integers(1, 150),
    held=st.integers(1, 20000),
    threshold=st.sampled_from([-1.0, 0.3, 0.9, 0.999999, 1.0]),
    width=st.sampled_from([3, 24]),
    kind=st.sampled_from(["random", "repeated", "close"]),
    seed=st.integers(0, 1000),
)
def test_duplicates_are_the_components_of_the_graph_of_pairs(
    n: int, block: int, held: int, threshold: float, width: int, kind: str, seed: int
) -> None:
    features = make_rows(n, width, kind, seed)
    found = duplicates(TensorRows(features, block), threshold, held=held)
    assert found.tolist() == groups_of(features, threshold)


def test_a_chain_of_pairs_is_one_group() -> None:
    angles = torch.arange(2000) * 0.001
    features = torch.stack([angles.cos(), angles.sin()], dim=1)[torch.randperm(2000)]
    found = duplicates(TensorRows(features, 100), float(np.cos(0.0011)), held=4000)
    assert set(found.tolist()) == {0}


MEMORY = """
    import resource, torch
    from clipstream.features.analysis import search as module

    class Made:
        width = 256

        def __len__(self):
            return 400_000

        def blocks(self, start=0):
            for first in range(start, len(self), 4096):
                draw = torch.Generator().manual_seed(first)
                block = torch.randn(min(4096, len(self) - first), self.width, generator=draw)
                yield first, torch.nn.functional.normalize(block, dim=1)

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    queries = next(Made().blocks())[1][:64].clone()
    module.search(module.TensorRows(queries), queries, 10)
    before = peak()
    found = module.search(Made(), queries, 10)
    assert found.rows[:, 0].tolist() == list(range(64))
    print(peak() - before)
"""


def test_memory_does_not_grow_with_the_rows() -> None:
    """400,000 rows are 410 MB; the bound is that of the module's docstring."""
    command = [sys.executable, "-c", textwrap.dedent(MEMORY)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 3 * 4096 * 256 * 4 + module.WORKSPACE < 400_000 * 256 * 4 * 1.02


def test_blocks_are_read_once_by_a_search_and_seldom_for_duplicates() -> None:
    features = make_rows(1000, 8, "random", 0)
    passes: list[int] = []

    class Counted(TensorRows):
        def blocks(self, start: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
            passes.append(start)
            return super().blocks(start)

    rows = Counted(features, 100)
    search(rows, features[:3], 5)
    assert passes == [0]
    passes.clear()
    duplicates(rows, 0.99, held=500 * 8 * 4)
    assert sorted(set(passes)) == [0, 500] and len(passes) == 4
