"""The losses for loops of one's own: open_clip's values and signatures, and exact gradients under DDP as it is."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from clipstream.distributed.world import World
from clipstream.losses import ClipLoss, SigLipLoss
from tests.support.ranks import run_ranks

PAIRS = {1: [7], 3: [1, 4, 2]}
LOSSES = {"clip": ClipLoss, "siglip": SigLipLoss}


class Model(nn.Module):
    """Two linear towers, with the scalars of the logits."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.visual, self.text = (
            nn.Parameter(torch.randn(6, 5, generator=draw, dtype=torch.float64)) for _ in range(2)
        )
        self.logit_scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.logit_bias = nn.Parameter(torch.tensor(-2.0, dtype=torch.float64))

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Features, scale and bias."""
        image, text = F.normalize(images @ self.visual, dim=-1), F.normalize(texts @ self.text, dim=-1)
        return image, text, self.logit_scale.exp(), self.logit_bias


def results(module: nn.Module, model: nn.Module, loss: Any, rows: slice) -> dict[str, Any]:
    """Loss and gradients on some of the pairs."""
    draw = torch.Generator().manual_seed(4)
    images, texts = (torch.randn(7, 6, generator=draw, dtype=torch.float64)[rows] for _ in range(2))
    found = loss(*module(images, texts))
    found.backward()
    grads = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": found.item(), **grads}


def on_a_rank(world: World) -> dict[str, dict[str, Any]]:
    counts = PAIRS[world.size]
    start, found = sum(counts[: world.rank]), {}
    for kind, loss in LOSSES.items():
        model = Model()
        module = DistributedDataParallel(model) if world.size > 1 else model
        found[kind] = results(module, model, loss(), slice(start, start + counts[world.rank]))
    return found


@pytest.mark.parametrize("ranks", sorted(PAIRS))
def test_gradients_are_those_of_the_global_batch_under_ddp(ranks: int) -> None:
    import open_clip.loss  # here, so that ranks do not import it

    theirs = {"clip": open_clip.loss.ClipLoss(), "siglip": open_clip.loss.SigLipLoss()}
    for found in run_ranks(ranks, on_a_rank):
        for kind in LOSSES:
            model = Model()
            wanted = results(model, model, theirs[kind], slice(None))
            assert found[kind].keys() == wanted.keys()
            for name, value in wanted.items():
                assert found[kind][name] == pytest.approx(value, abs=1e-12), (kind, name)


@pytest.mark.parametrize("kind", LOSSES)
def test_they_are_called_as_open_clips(kind: str) -> None:
    import open_clip.loss

    theirs = {"clip": open_clip.loss.ClipLoss, "siglip": open_clip.loss.SigLipLoss}[kind]

    def of(loss: Any) -> list[tuple[str, object]]:
        return [(p.name, p.default) for p in inspect.signature(loss.forward).parameters.values()]

    assert of(LOSSES[kind]) == of(theirs)
    features = F.normalize(torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), dim=-1)
    bias = torch.tensor([-10.0])  # nontrivial shapes, as open_clip's nonscalar_logit_scale has them
    ours = LOSSES[kind]()(features.bfloat16(), features.bfloat16(), torch.tensor([10.0]), bias, output_dict=True)
    wanted = theirs()(features, features, torch.tensor([10.0]), bias, output_dict=True)
    assert ours.keys() == wanted.keys() and ours["contrastive_loss"].dtype == torch.float32
    torch.testing.assert_close(ours["contrastive_loss"], wanted["contrastive_loss"], rtol=0.02, atol=0.01)
    with torch.no_grad():
        assert LOSSES[kind]()(features, features, 10.0, -10.0).ndim == 0


def test_features_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"equal shape \[n, D\].*not \(3, 4\) and \(2, 4\)"):
        ClipLoss()(torch.ones(3, 4), torch.ones(2, 4), 1.0)
