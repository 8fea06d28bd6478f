"""Pictures in channels-last format give the features, gradients and checkpoints of contiguous ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from clipstream.errors import SettingsError
from clipstream.models.layers import ChannelsLast, tune_convolutions
from clipstream.models.towers import Towers
from tests.support.model_files import build, write
from tests.support.steps import assert_close

RESNET = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "head_width": 8}


def image_pass(towers: Towers) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Features of four pictures, and the gradients of their sum with random weights."""
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=draw)
    features = towers.encode_image(pixels)
    (features * torch.randn(features.shape, generator=draw)).sum().backward()
    return features.detach(), {name: p.grad for name, p in towers.named_parameters() if p.grad is not None}


def strides(tensor: torch.Tensor) -> list[int]:
    """Those of dimensions of more than one element; of others they say nothing about the layout."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def test_features_gradients_and_weights_are_those_of_contiguous_pixels(tmp_path: Path) -> None:
    name = write(tmp_path, RESNET)
    off, auto = (build(name, channels_last=setting).double().train() for setting in ("off", "auto"))
    formats: list[bool] = []
    auto.clip.visual.conv1.register_forward_pre_hook(
        lambda _, given: formats.append(given[0].is_contiguous(memory_format=torch.channels_last))
    )
    (truth, gradients), (found, mine) = image_pass(off), image_pass(auto)
    assert formats == [True]
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-12)
    assert_close(mine, gradients, 1e-11)
    assert [strides(mine[parameter]) for parameter in gradients] == [strides(one) for one in gradients.values()]
    for parameter, tensor in auto.saved_tensors().items():
        assert tensor.is_contiguous() and tensor.shape == off.saved_tensors()[parameter].shape


def test_auto_takes_convolutional_towers_where_it_is_safe(tmp_path: Path) -> None:
    assert build(write(tmp_path)).channels_last is None, "a ViT"
    assert build(write(tmp_path), channels_last="on").channels_last == ChannelsLast(always=True)
    name = write(tmp_path, RESNET)
    assert build(name).channels_last == ChannelsLast()
    assert build(name, channels_last=False).channels_last is None, "YAML's reading of off"
    unsafe = timm.create_model("repvgg_a0")
    assert ChannelsLast.of(unsafe, "auto") is None
    with pytest.raises(SettingsError, match=r"model\.channels_last: .*1 x 1"):
        ChannelsLast.of(unsafe, "on")


@pytest.mark.parametrize(
    ("vision", "device", "deterministic", "expected"),
    [
        (RESNET, "cuda:1", False, True),
        (RESNET, "cuda:1", True, False),
        (RESNET, "cpu", False, False),
        (None, "cuda:1", False, False),
    ],
)
def test_cudnn_measures_convolutions(
    vision: Any, device: str, deterministic: bool, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    tune_convolutions(build(write(tmp_path, vision)), device)
    assert torch.backends.cudnn.benchmark is expected


def test_on_a_gpu_it_is_for_16_bits() -> None:
    class Pixels:
        device: Any = torch.device("cuda")

        def contiguous(self, memory_format: torch.memory_format) -> torch.memory_format:
            return memory_format

    pixels: Any = Pixels()
    assert ChannelsLast().apply(pixels, torch.float32) is pixels
    assert ChannelsLast().apply(pixels, torch.bfloat16) is torch.channels_last
    assert ChannelsLast(always=True).apply(pixels, torch.float32) is torch.channels_last
