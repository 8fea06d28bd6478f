"""Model FLOPs, and the figures of training lines that follow from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from clipstream.models.execution.flops import Flops, ModelFlops, Throughput, count_flops, find_peak, peak_tflops
from tests.support.model_files import TEXT, build, write
from tests.support.steps import make_batch


def of_text(flops: ModelFlops, length: int) -> Flops:
    """FLOPs of a text of `length` tokens."""
    terms = zip(flops.text, (1, length, length**2), strict=True)
    forward, backward = zip(*((amount * one.forward, amount * one.backward) for one, amount in terms), strict=True)
    return Flops(sum(forward), sum(backward))


@pytest.fixture(scope="module")
def flops() -> ModelFlops:
    """Of ViT-B-32."""
    found = count_flops(build("ViT-B-32"))
    assert found is not None
    return found


def test_the_flops_of_vit_b_32_are_those_that_are_known(flops: ModelFlops) -> None:
    text = of_text(flops, 77)
    assert flops.image.forward + text.forward == pytest.approx(14.78e9, rel=1e-3)  # open_clip's model_profile.csv
    assert flops.image.backward == pytest.approx(2 * flops.image.forward, rel=0.02)
    assert text.backward == pytest.approx(2 * text.forward, rel=0.001)


def test_the_backward_pass_of_grouped_convolutions_is_twice_the_forward(tmp_path: Path) -> None:
    name = write(tmp_path, {"timm_model_name": "test_convnext", "image_size": 32})
    flops = count_flops(build(name))
    assert count_flops(build(name, grad_checkpointing=True)) == flops  # recomputation does not count
    assert flops is not None and flops.image.backward == 2 * flops.image.forward


def test_texts_count_at_their_true_length_and_frozen_towers_forward_only(tmp_path: Path) -> None:
    vision = {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8}
    towers = build(write(tmp_path, vision, text_cfg={**TEXT, "width": 64, "context_length": 77}))
    tower = towers.clip.transformer
    width, layers = tower.width, tower.layers
    before = {name: tensor.clone() for name, tensor in towers.state_dict().items()}
    random = torch.random.get_rng_state()
    trained = count_flops(towers)
    assert torch.equal(random, torch.random.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in towers.state_dict().items())
    assert trained is not None and towers.training
    projection = 2 * width * towers.clip.text_projection.shape[1]
    for length in (8, 40, 77):
        expected = layers * (24 * length * width**2 + 4 * length**2 * width) + projection
        assert of_text(trained, length).forward == pytest.approx(expected, rel=1e-9)

    towers.lock_image()
    frozen = count_flops(towers)
    assert frozen is not None
    assert frozen.image == (trained.image.forward, 0) and frozen.text == trained.text


def test_a_training_line_has_tokens_tflops_and_mfu(flops: ModelFlops) -> None:
    assert flops.buckets is not None
    ids = torch.zeros(4, 77, dtype=torch.int32)
    for row, length in enumerate((5, 8, 20, 77)):
        ids[row, length - 1] = 49407
    batch = make_batch(0)
    batch = replace(batch, ids=ids, keys=("k",) * 4)
    one = Throughput(flops, peak=100.0)
    one.add(batch)
    works = [one.take(), replace(one.work)]
    line = one.figures(works, 2.0, ())
    assert line["tokens_per_s"] == 110 / 2
    total = 4 * sum(flops.image) + sum(sum(of_text(flops, length)) for length in (5, 8, 20, 77))
    assert line["tflops"] == pytest.approx(total / 2 / 2 / 1e12)
    assert line["mfu"] == pytest.approx(line["tflops"] / 100)
    assert one.figures(works, 2.0, ("image", "text"))["tflops"] < line["tflops"] / 2.9

    stored = Throughput(flops)
    stored.add(replace(batch, features={"image": torch.zeros(4, 8), "text": torch.zeros(4, 8)}))
    assert stored.figures([stored.take()], 1.0, ()) == {"tflops": 0.0}


@pytest.mark.parametrize(
    ("name", "multiprocessors", "precision", "tf32", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", 108, "bf16", False, 312),
        ("NVIDIA A100-SXM4-80GB", 108, "fp32", True, 156),
        ("NVIDIA A100-SXM4-80GB", 108, "fp64", False, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 14, "bf16", False, 312 * 14 / 108),
        ("NVIDIA A10", 72, "bf16", False, 125),
        ("NVIDIA H100 80GB HBM3", 132, "bf16", False, 989),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16, "fp32", True, 494 * 16 / 132),
        ("NVIDIA H100 PCIe", 114, "pure_bf16", False, 756),
        ("NVIDIA GH200 480GB", 132, "bf16", False, 989),
        ("Tesla T4", 40, "fp16", True, 65),
        ("Tesla V100-SXM2-16GB", 80, "bf16", False, None),
        ("NVIDIA RTX 6000 Ada Generation", 142, "bf16", False, 364.2),
        ("Quadro RTX 6000", 72, "bf16", False, None),
        ("NVIDIA GeForce RTX 5090", 170, "bf16", False, 209.5),
        ("NVIDIA GeForce RTX 5090 D", 170, "bf16", False, None),
    ],
)
def test_peaks_of_known_gpus(name: str, multiprocessors: int, precision: str, tf32: bool, expected: float) -> None:
    assert find_peak(name, precision, tf32=tf32, multiprocessors=multiprocessors) == pytest.approx(expected)


def test_the_peak_of_a_device_is_that_of_its_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    half = SimpleNamespace(name="NVIDIA H100 80GB HBM3 MIG 3g.40gb", multi_processor_count=66)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: half)
    assert peak_tflops("cuda:0", "bf16") == 989 / 2
