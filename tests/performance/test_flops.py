"""Model FLOPs, and the figures of training lines that follow from them."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from clipstream.models.build import build_towers
from clipstream.models.settings import ModelSettings
from clipstream.models.towers import Towers
from clipstream.performance.flops import ModelFlops, Throughput, count_flops
from clipstream.performance.peaks import find_peak
from tests.support.steps import make_batch


def _towers(name: str = "ViT-B-32", **options: bool) -> Towers:
    return build_towers(ModelSettings(name=name, **options), seed=0)


@pytest.fixture(scope="module")
def flops() -> ModelFlops:
    """Of ViT-B-32."""
    found = count_flops(_towers())
    assert found is not None
    return found


def test_the_flops_of_vit_b_32_are_those_that_are_known(flops: ModelFlops) -> None:
    assert count_flops(_towers(grad_checkpointing=True)) == flops  # recomputation does not count
    text = flops.of_text(77)
    assert flops.image.forward + text.forward == pytest.approx(14.78e9, rel=1e-3)  # open_clip's model_profile.csv
    assert flops.image.backward == pytest.approx(2 * flops.image.forward, rel=0.02)
    assert text.backward == pytest.approx(2 * text.forward, rel=0.001)


def test_the_backward_pass_of_grouped_convolutions_is_twice_the_forward() -> None:
    flops = count_flops(_towers("convnext_base"))
    assert flops is not None and flops.image.backward == 2 * flops.image.forward


def test_texts_count_at_their_true_length_and_frozen_towers_forward_only() -> None:
    towers = _towers("RN50")
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
        assert trained.of_text(length).forward == pytest.approx(expected, rel=1e-9)

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
    total = 4 * sum(flops.image) + sum(sum(flops.of_text(length)) for length in (5, 8, 20, 77))
    assert line["tflops"] == pytest.approx(total / 2 / 2 / 1e12)
    assert line["mfu"] == pytest.approx(line["tflops"] / 100)
    assert one.figures(works, 2.0, ("image", "text"))["tflops"] < line["tflops"] / 2.9

    stored = Throughput(flops)
    stored.add(replace(batch, features={"image": torch.zeros(4, 8), "text": torch.zeros(4, 8)}))
    assert stored.figures([stored.take()], 1.0, ()) == {"tflops": 0.0}


def test_counting_a_batch_takes_less_than_a_hundredth_of_a_step(flops: ModelFlops) -> None:
    batch = replace(make_batch(0), ids=torch.zeros(1024, 77, dtype=torch.int32), keys=("k",) * 1024)
    one, times = Throughput(flops), []
    for _ in range(20):
        began = time.thread_time()
        one.add(batch)
        times.append(time.thread_time() - began)
    assert min(times) < 0.003


def test_peaks_of_known_gpus() -> None:
    assert find_peak("NVIDIA A100-SXM4-80GB", "bf16", tf32=False) == 312
    assert find_peak("NVIDIA A100-SXM4-80GB", "fp32", tf32=False) == 19.5
    assert find_peak("NVIDIA A100-SXM4-80GB", "fp32", tf32=True) == 156
    assert find_peak("NVIDIA H100 80GB HBM3", "bf16", tf32=False) == 989
    assert find_peak("NVIDIA H100 PCIe", "pure_bf16", tf32=False) == 756
    assert find_peak("NVIDIA L40S", "bf16", tf32=False) == 362
    assert find_peak("NVIDIA L4", "bf16", tf32=False) == 121
    assert find_peak("Tesla T4", "fp16", tf32=True) == 65
    for name in ("NVIDIA L40", "NVIDIA RTX A1000", "NVIDIA T400 4GB", "NVIDIA GeForce RTX 4090 Laptop GPU"):
        assert find_peak(name, "bf16", tf32=False) is None
    assert find_peak("Tesla V100-SXM2-16GB", "bf16", tf32=False) is None
    assert find_peak("NVIDIA A100-SXM4-80GB", "fp64", tf32=False) is None
