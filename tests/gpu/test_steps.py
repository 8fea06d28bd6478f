"""Steps on a GPU: those of the CPU in float32, near them in 16 bits, and exact whatever is computed again."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from clipstream.distributed.world import World
from clipstream.losses.contrastive import build_loss
from clipstream.losses.settings import ClipLossSettings, SiglipLossSettings
from clipstream.models.towers import Features
from tests.support.gpu_steps import assert_close, gradients, make_batch, make_step, make_towers, weights
from tests.support.losses import sigmoid_loss, softmax_loss


def test_normalised_pixels_are_those_of_the_cpu(device: str, tmp_path: Path) -> None:
    towers, pixels = make_towers(tmp_path, "cpu"), torch.arange(256, dtype=torch.uint8).repeat(48).view(4, 3, 32, 32)
    seen = []
    towers.clip.visual.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach().cpu()))
    towers.encode_image(pixels)
    towers.to(device).encode_image(pixels.to(device))
    torch.testing.assert_close(*seen, rtol=0, atol=1e-6)  # GPUs divide by 255 in another way


def test_a_float32_step_is_that_of_the_cpu(device: str, tmp_path: Path) -> None:
    found = {}
    for name in ("cpu", device):
        towers = make_towers(tmp_path, name)
        result = make_step(towers, name, plain=True, clip_norm=1.0)(make_batch(), lr=1.0)
        found[name] = result, weights(towers)
    (result, moved), (expected, wanted) = found[device], found["cpu"]
    assert result.loss == pytest.approx(expected.loss, rel=1e-5)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
    assert_close(moved, wanted, 1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_are_near_float32_and_the_loss_falls(device: str, precision: Any, tmp_path: Path) -> None:
    batch, wide = make_batch(), make_step(make_towers(tmp_path, device), device)
    narrow = make_step(make_towers(tmp_path, device), device, precision=precision)
    losses = [(wide(batch, lr=1e-3).loss, narrow(batch, lr=1e-3).loss) for _ in range(8)]
    assert losses[0][1] == pytest.approx(losses[0][0], rel=0.02)
    assert losses[-1][1] < 0.9 * losses[0][1]


def state(step: Any) -> list[torch.Tensor]:
    moments = [tensor for values in step.optimizer.state.values() for tensor in values.values()]
    return [
        tensor.detach().clone() for tensor in (*step.towers.parameters(), *moments, *step.averages.tensors.values())
    ]


def test_an_overflow_of_fp16_changes_nothing(device: str, tmp_path: Path) -> None:
    towers = make_towers(tmp_path, device)
    step = make_step(towers, device, precision="fp16", ema=0.9)
    while step(make_batch(), lr=1e-3).overflow:  # until the factor of the beginning is small enough
        pass
    step.scaler.update(2.0**60)
    before = state(step)
    result = step(make_batch(seed=1), lr=1e-3)
    assert result.overflow and not result.skipped and result.loss_scale == 2.0**59
    assert all(map(torch.equal, state(step), before))


def test_a_batch_that_is_not_finite_is_skipped(device: str, tmp_path: Path) -> None:
    towers, batch = make_towers(tmp_path, device), make_batch()
    step = make_step(towers, device, ema=0.9, clip_norm=1.0)
    step(batch, lr=1e-3)
    before, good = state(step), batch.weights.clone()
    batch.weights[3] = float("nan")
    assert step(batch, lr=1e-3).skipped
    assert all(map(torch.equal, state(step), before))
    batch.weights.copy_(good)
    assert not step(batch, lr=1e-3).skipped and not all(map(torch.equal, state(step), before))


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_micro_batches_give_the_gradients_of_the_batch(device: str, kept: int, tmp_path: Path) -> None:
    towers = make_towers(tmp_path, device)
    whole, cut = make_step(towers, device), make_step(towers, device, micro_batch_size=4, kept_micro_batches=kept)
    assert_close(gradients(cut, make_batch()), gradients(whole, make_batch()), 1e-4)


def test_micro_batches_drop_the_same_patches_twice(device: str, tmp_path: Path) -> None:
    towers, batch = make_towers(tmp_path, device, patch_dropout=0.5, text_buckets="off"), make_batch().to(device)
    step = make_step(towers, device, micro_batch_size=4, kept_micro_batches=0)
    torch.manual_seed(3)
    found = gradients(step, batch)
    torch.manual_seed(3)
    assert batch.pixels is not None
    parts = [towers(batch.pixels[i : i + 4], batch.ids[i : i + 4]) for i in range(0, 16, 4)]
    image, text = torch.cat([part.image for part in parts]), torch.cat([part.text for part in parts])
    step.gradcache.loss(parts[0]._replace(image=image, text=text), batch, step.world).backward()  # type: ignore[no-untyped-call]
    wanted = {name: p.grad.cpu() for name, p in towers.named_parameters() if p.grad is not None}
    assert_close(found, wanted, 1e-4)


def loss_inputs(count: int, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Features of pictures and texts, scale and bias, as leaves."""
    draw = torch.Generator().manual_seed(0)
    image, text = (torch.nn.functional.normalize(torch.randn(count, 64, generator=draw), dim=1) for _ in range(2))
    values = (image, text, torch.tensor(20.0), torch.tensor(-10.0))
    return [value.to(device, dtype, copy=True).requires_grad_() for value in values]


@cache
def whole_matrix(count: int, kind: str) -> list[torch.Tensor]:
    """The loss and its gradients from all logits, in float64."""
    image, text, scale, bias = leaves = loss_inputs(count, "cpu", torch.float64)
    formula = softmax_loss if kind == "clip" else sigmoid_loss
    loss = formula(scale * image @ text.T + bias, torch.ones(count), torch.arange(count))
    return [loss.detach(), *torch.autograd.grad(loss, leaves[:3])]


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_losses_in_tiles_are_those_of_the_whole_matrix(device: str, kind: str, tf32: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = tf32
    batch = make_batch(1100 if device == "cpu" else 4200)  # several tiles
    leaves = loss_inputs(len(batch), device, torch.float32)
    compute = build_loss(ClipLossSettings() if kind == "clip" else SiglipLossSettings(), kind)
    loss = compute(Features(*leaves), batch.to(device), World(device=device))
    found = [loss.detach(), *torch.autograd.grad(loss, leaves[:3])]
    for one, other in zip(found, whole_matrix(len(batch), kind), strict=True):
        assert float((one.cpu().double() - other).norm()) <= (3e-2 if tf32 else 1e-4) * float(other.norm())
