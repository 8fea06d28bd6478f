"""Layers as they compute on a GPU: results and gradients of torch's layers, in the shapes and calls of the towers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from clipstream.cli.verbs.bench.open_clip_step import OpenClipStep
from clipstream.models import layers
from clipstream.models.execution.text_buckets import CausalAttention
from clipstream.models.layers import PatchProjection, SelfAttention, restore_layers
from clipstream.training.optim import AdamW
from tests.support.model_files import VIT, build, write

SIGLIP = {"timm_model_name": "vit_tiny_patch16_224", "timm_pool": "", "timm_proj": "linear"}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "on_gpu", lambda tensor: True)


def outcome(layer: nn.Module, *inputs: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """The result, and the gradients of the first input and of the parameters."""
    first = inputs[0].clone().requires_grad_()
    found = layer(first, *(first for _ in inputs[1:]), **options)
    found = found[0] if isinstance(found, tuple) else found
    found.square().sum().backward()
    gradients = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    assert first.grad is not None
    return [found.detach(), first.grad, *(gradient for gradient in gradients if gradient is not None)]


def masks() -> dict[str, torch.Tensor | None]:
    causal = torch.full((5, 5), float("-inf"), dtype=torch.float64).triu_(1)
    return {"none": None, "causal": causal, "by head": causal.expand(12, 5, 5)}


KINDS = [(SelfAttention, "none"), (SelfAttention, "causal"), (SelfAttention, "by head"), (CausalAttention, "causal")]


@pytest.mark.parametrize(("kind", "mask"), KINDS)
def test_attention_without_copies_is_torchs(kind: type[nn.Module], mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(24, 4, batch_first=True).double(), torch.randn(3, 5, 24, dtype=torch.float64)
    options = {"need_weights": False, "attn_mask": masks()[mask]}
    expected, calls = outcome(layer, x, x, x, **options), []
    layer.__class__ = kind
    assert all(map(torch.equal, outcome(layer, x, x, x, **options), expected)), "on a CPU nothing changes"
    monkeypatch.setattr(layers, "on_gpu", lambda tensor: True)
    attend = SelfAttention.attend
    monkeypatch.setattr(SelfAttention, "attend", lambda *args, **kinds: calls.append(args) or attend(*args, **kinds))
    for ours, theirs in zip(outcome(layer, x, x, x, **options), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert len(calls) == (mask != "by head")
    other = torch.randn(3, 2, 24, dtype=torch.float64)
    layer(other, x, x, need_weights=False)
    layer(x, x, x)
    assert len(calls) == (mask != "by head"), "other queries than keys, or weights that are asked for"


@pytest.mark.parametrize("patch", [4, 7])
@pytest.mark.parametrize("bias", [False, True])
def test_patches_as_rows_are_those_of_a_convolution(patch: int, bias: bool, as_on_a_gpu: None) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 16, patch, stride=patch, bias=bias)
    x = torch.randn(2, 3, 2 * patch, 3 * patch)
    expected = outcome(layer, x)
    layer.__class__ = PatchProjection
    assert all(map(torch.equal, outcome(layer, x), expected)), "float32 is convolved"
    with torch.autocast("cpu", torch.bfloat16):
        found = outcome(layer, x)
    assert found[0].dtype == torch.bfloat16 and found[0].shape == expected[0].shape
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours.float() - theirs).norm()) <= 0.01 * float(theirs.norm())
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x[..., :-1]).shape == (2, 16, 2, 2), "incomplete patches are left out"
        assert layer(x[0]).shape == (16, 2, 3)


@pytest.mark.parametrize("vision", [VIT, SIGLIP], ids=["open_clip", "timm"])
def test_the_layers_of_towers(vision: dict[str, Any], tmp_path: Path) -> None:
    clip = build(write(tmp_path, vision), text_buckets="off").clip
    layers = [type(module) for module in clip.modules()]
    assert layers.count(PatchProjection) == 1 and nn.Conv2d not in layers
    assert nn.MultiheadAttention not in layers and SelfAttention in layers
    restore_layers(clip)
    assert not {PatchProjection, SelfAttention} & {type(module) for module in clip.modules()}
    resnet = build(write(tmp_path, {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8})).clip
    assert PatchProjection not in {type(module) for module in resnet.modules()}


def test_the_step_of_open_clip_has_its_own_layers(tmp_path: Path) -> None:
    towers = build(write(tmp_path, VIT))
    assert CausalAttention in {type(module) for module in towers.clip.modules()}
    OpenClipStep(towers, "cpu", "fp32", AdamW.Settings(), "ViT-B-32")
    own = {type(module) for module in towers.clip.modules()}
    assert nn.MultiheadAttention in own and not own & {CausalAttention, SelfAttention, PatchProjection}


def test_shapes_on_a_gpu() -> None:
    with FakeTensorMode(), torch.device("cuda"):
        layer = nn.Conv2d(3, 16, 14, stride=14, dtype=torch.bfloat16)
        pixels = torch.empty(2, 3, 28, 42, dtype=torch.bfloat16)
        wanted = layer(pixels)
        layer.__class__ = PatchProjection
        found = layer(pixels)
        assert found.shape == wanted.shape and found.dtype == wanted.dtype and found.is_cuda
        attention, x = nn.MultiheadAttention(24, 4, batch_first=True), torch.empty(3, 5, 24)
        attention.__class__ = SelfAttention
        result, weights = attention(x, x, x, need_weights=False, attn_mask=None)
        assert result.shape == x.shape and result.is_contiguous() and weights is None
