"""Doubtful pairs and hard negatives, against float64 products over all pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from clipstream.curation.stores import pairs as module
from clipstream.curation.stores.pairs import PairRows, doubts, hard_negatives, sample_scores
from clipstream.errors import DataError
from tests.support.stored_features import Made, make_store


def both(made: Made) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of samples with captions: their rows, features float64 [n, D] of images and texts, and which share captions."""
    which = [i for i, captions in enumerate(made.captions) if captions]
    unit = [F.normalize(F.normalize(made.images[i].double(), dim=1).mean(dim=0), dim=0) for i in which]
    texts = [F.normalize(F.normalize(made.texts[i].double(), dim=1).mean(dim=0), dim=0) for i in which]
    same = torch.tensor([[set(made.captions[i]) == set(made.captions[j]) for j in which] for i in which])
    return torch.tensor(which), torch.stack(unit), torch.stack(texts), same


def mean_of_best(scores: torch.Tensor, k: int, of: torch.Tensor) -> torch.Tensor:
    """Row by row, the mean of `of` at the k largest scores; 0 where all are -inf."""
    best = scores.topk(min(k, scores.shape[1]), dim=1)
    used = best.values.isfinite()
    return (of.gather(1, best.indices) * used).sum(dim=1) / used.sum(dim=1).clamp(min=1)


@pytest.mark.parametrize(("views", "block"), [(0, 16384), (2, 7)])
def test_doubts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, views: int, block: int) -> None:
    monkeypatch.setattr(module, "TILE", 64)
    made = make_store(tmp_path / "store", views=views, sizes={"a": [5, 40], "b/c": [1, 0, 30]})
    monkeypatch.setattr(PairRows.blocks, "__defaults__", (block,))
    rows, images, texts, same = both(made)
    found = doubts(PairRows(made.store), 3)
    assert found.rows.tolist() == rows.tolist()
    cosines, like = images @ texts.T, (texts @ texts.T).masked_fill(same, -torch.inf)
    near = (images @ images.T).fill_diagonal_(-torch.inf)
    wanted = 2 * cosines.diagonal() - mean_of_best(near, 3, cosines)
    wanted += mean_of_best(like, 3, images @ images.T) - mean_of_best(like, 3, cosines.T)
    np.testing.assert_allclose(found.scores, wanted, atol=1e-5)
    np.testing.assert_allclose(found.cosines, cosines.diagonal(), atol=1e-5)
    firsts = same.int().argmax(dim=1)  # the store's equal captions have other features, of which the first ones count
    is_first = firsts == torch.arange(len(rows))
    others = cosines.masked_fill(same | ~is_first, -torch.inf).max(dim=1)
    np.testing.assert_allclose(found.other_cosines, others.values, atol=1e-5)
    assert found.captions.tolist() == rows[firsts].tolist()
    assert found.others.tolist() == rows[firsts[others.indices]].tolist()
    scores = np.concatenate([some.scores for some in sample_scores(made.store, "doubt")])
    assert np.isnan(scores).sum() == len(made.names) - len(rows) > 0
    monkeypatch.setattr(module, "REFERENCES", 20)
    some = doubts(PairRows(made.store), 3)
    assert some.rows.tolist() == rows.tolist() and set(some.others) < set(found.captions)


def test_a_store_without_captions(tmp_path: Path) -> None:
    made = make_store(tmp_path / "store", sizes={"a": [0]})
    with pytest.raises(DataError, match="no image with a caption"):
        doubts(PairRows(made.store))


@pytest.mark.parametrize("kind", ["image-text", "text-text", "image-image"])
@pytest.mark.parametrize("held", [1, 256 << 20])
def test_hard_negatives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, held: int) -> None:
    """Of the same source, best first; same captions and near images are left out; any block size finds the same."""
    monkeypatch.setattr(PairRows.blocks, "__defaults__", (9,))
    made = make_store(tmp_path / "store", sizes={"a": [5, 40], "b/c": [1, 0, 30]})
    rows, images, texts, same = both(made)
    sources = np.array([made.names[i][0] for i in rows.tolist()])
    query, other = (images if of == "image" else texts for of in kind.split("-"))
    for source in ("a", "b/c"):
        left_out = same | (images @ images.T >= 0.5) | torch.from_numpy((sources != source)[None])
        scores, order = (query @ other.T).masked_fill(left_out, -torch.inf).sort(dim=1, descending=True)
        mined = list(hard_negatives(PairRows(made.store, source), kind, 30, 0.5, held=held))
        assert held == 1 or len(mined) == 1
        found, others = (np.concatenate(of) for of in zip(*mined, strict=True))
        assert found.tolist() == rows[sources == source].tolist()
        for i, of in zip((sources == source).nonzero()[0], others, strict=True):
            wanted = rows[order[i][scores[i].isfinite()]][:30].tolist()
            assert [row for row in of.tolist() if row >= 0] == wanted
