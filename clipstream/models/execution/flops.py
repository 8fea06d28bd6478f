"""Model FLOPs, as torch's flop counter counts them (a multiply-add is 2), and the peaks of GPUs that MFU is a share of.

Counted once, before training, by passes over tensors of the meta device, which hold no data: weights, batch statistics,
random states and the GPU's memory stay as they are. Recomputation (activation checkpointing, gradient caching), padding
of texts, loss, optimizer and a live teacher are not counted, nor is what the counter leaves out: norms, activations.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode

from clipstream.data.batch import Batch, flat_lengths
from clipstream.distributed.world import World
from clipstream.models.execution.checkpointing import suspend
from clipstream.models.execution.text_buckets import STEP, TextBuckets
from clipstream.models.precision import products_dtype
from clipstream.models.settings import ModelSettings, Precision, Tower
from clipstream.models.towers import Towers
from clipstream.utils.logs import logger

USUAL = 0.35  # of a peak: 0.25 to 0.45 on one H200 (docs/benchmarks.md), 0.25 (ResNet) and 0.5 (ViT) on two cores


class Flops(NamedTuple):
    """FLOPs of a tower for one sample."""

    forward: float = 0.0
    backward: float = 0.0  # for the parameters that are trained


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of a model for one sample."""

    image: Flops
    text: tuple[Flops, Flops, Flops]  # of a text of L tokens, the coefficients of 1, L and L squared
    buckets: TextBuckets | None  # tells a text's true length; None where the tower attends to padding


@dataclass
class Work:
    """Images and texts that a rank trained on since the last training line."""

    images: int = 0
    texts: int = 0
    tokens: int = 0
    squared_tokens: int = 0  # sum of the squares of the texts' lengths

    def add(self, batch: Batch, flops: ModelFlops) -> None:
        """Add a batch whose ids are on the CPU; features from a store take no work."""
        if "image" not in batch.features:
            self.images += len(batch)
        if "text" in batch.features:
            return
        ids = batch.ids if batch.roles is None else batch.ids.reshape(batch.roles.numel(), -1)
        lengths = None if batch.lengths is None else flat_lengths(batch.lengths)
        if lengths is None and flops.buckets is not None:
            lengths = flops.buckets.lengths(ids)
        if lengths is None:
            lengths = (ids.shape[1],) * len(ids)
        self.texts += len(lengths)
        self.tokens += sum(lengths)
        self.squared_tokens += sum(length * length for length in lengths)

    def flops(self, model: ModelFlops, frozen: Collection[Tower]) -> float:
        """Model FLOPs; those of `frozen` towers forward only."""
        amounts = (self.texts, self.tokens, self.squared_tokens)
        total = self.images * (model.image.forward + ("image" not in frozen) * model.image.backward)
        for amount, flops in zip(amounts, model.text, strict=True):
            total += amount * (flops.forward + ("text" not in frozen) * flops.backward)
        return total


@dataclass
class Throughput:
    """Figures of the training lines: true text tokens a second, TFLOP/s of a device, MFU."""

    model: ModelFlops
    peak: float | None = None  # TFLOP/s of a device at the run's precision; None if not known
    work: Work = field(default_factory=Work)

    def add(self, batch: Batch) -> None:
        self.work.add(batch, self.model)

    def take(self) -> Work:
        taken, self.work = self.work, Work()
        return taken

    def figures(self, works: list[Work], seconds: float, frozen: Collection[Tower]) -> dict[str, float]:
        """Keys of a training line, from the work of all ranks in `seconds`."""
        found = {}
        if any(work.texts for work in works):
            found["tokens_per_s"] = sum(work.tokens for work in works) / seconds
        done = sum(work.flops(self.model, frozen) for work in works)
        found["tflops"] = done / len(works) / seconds / 1e12
        if self.peak:
            found["mfu"] = found["tflops"] / self.peak
        return found


def build_throughput(
    towers: Towers, settings: ModelSettings, world: World, precision: str, peak: float | None = None
) -> Throughput | None:
    """Figures of a run with these towers; None where the model's FLOPs cannot be counted. Collective.

    FLOPs of towers whose features are cached are not counted, as they run less and less often.

    Args:
        peak: in TFLOP/s, in place of the one that is known of the device at the precision of the forward pass.
    """
    # A second of work for a processor, which all ranks of a node would do at once.
    flops = world.broadcast_object(count_flops(towers) if world.is_main else None)
    if flops is not None and settings.image.cache_gib is not None:
        flops = replace(flops, image=Flops())
    if flops is not None and settings.text.cache_gib is not None:
        flops = replace(flops, text=(Flops(), Flops(), Flops()))
    return None if flops is None else Throughput(flops, peak or peak_tflops(world.device, precision))


def estimate_seconds(flops: float, world: World, precision: Precision, peak: float | None = None) -> float:
    """Seconds of training from its FLOPs on all ranks, without waits for data: at `USUAL` of the devices' peak, or
    where none is known, of the rate of a matrix product on this one.

    Args:
        peak: as `build_throughput`.
    """
    known = peak or peak_tflops(world.device, precision)
    return flops / (USUAL * (known or _measure_tflops(world.device, products_dtype(precision))) * 1e12 * world.size)


@cache
def _measure_tflops(device: str, dtype: torch.dtype) -> float:
    """TFLOP/s of a product of two matrices of 1,024 rows."""
    matrix = torch.ones(1024, 1024, dtype=dtype, device=device)
    timer = Timer("matrix @ matrix", globals={"matrix": matrix}, num_threads=torch.get_num_threads())
    return 2 * 1024**3 / timer.blocked_autorange(min_run_time=0.1).median / 1e12


def count_flops(towers: Towers) -> ModelFlops | None:
    """FLOPs of towers as `build_model` gives them, neither sharded nor compiled.

    None if a tower cannot run on the meta device, which is logged.
    """
    own, buckets = towers.text_buckets, towers.text_buckets
    try:
        if "text" not in towers.stored:  # true lengths count, also where texts are padded
            buckets = towers.text_buckets = own or TextBuckets.of(towers.clip, "auto")
        with torch.random.fork_rng(devices=[]), suspend():
            image = Flops() if "image" in towers.stored else _count(towers, "image")
            text = (Flops(), Flops(), Flops()) if "text" in towers.stored else _text_terms(towers)
    except Exception as error:  # a user's own tower: training goes on without these figures
        logger.info(f"no TFLOP/s and MFU: the FLOPs of this model cannot be counted: {error}")
        return None
    finally:
        towers.text_buckets = own
    return ModelFlops(image, text, buckets)


def _count(towers: Towers, tower: Tower, length: int | None = None) -> Flops:
    """FLOPs of a tower for one sample, counted on the meta device with two: batch norm refuses one value a channel."""
    weights = {
        name: torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
        for name, tensor in [*towers.named_parameters(), *towers.named_buffers()]
    }
    rows = torch.empty(2, 1, device="meta")
    if tower == "image":
        pixels = torch.empty(2, 3, *towers.image.size, dtype=torch.uint8, device="meta")
        arguments: tuple[object, ...] = (pixels, rows, None, ("text",))
    else:
        length = length or towers.context_length
        ids = torch.empty(2, length, dtype=torch.int32, device="meta")
        arguments = (rows, ids, (length, length), ("image",))
    # The counter knows the products that attention is made of, but not every fused operation.
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        features = functional_call(towers, weights, arguments)
        forward = counter.get_total_flops()
        found: torch.Tensor = features.image if tower == "image" else features.text
        if found.requires_grad:
            torch.autograd.backward(found.sum())
    # torch's counter takes the backward pass of a grouped convolution for that of a full one (ConvNeXt: 8 x forward).
    return Flops(forward / 2, min(counter.get_total_flops() - forward, 2 * forward) / 2)


def _text_terms(towers: Towers) -> tuple[Flops, Flops, Flops]:
    """Coefficients of 1, L and L squared; of texts that are always as long as the context, only the first."""
    end = towers.context_length
    if towers.text_buckets is None or end <= 2 * STEP:
        return _count(towers, "text"), Flops(), Flops()
    lengths = (STEP, 2 * STEP, end)
    counts = [_count(towers, "text", length) for length in lengths]
    constant, linear, square = np.linalg.solve(np.vander(lengths, increasing=True), counts).tolist()
    return Flops(*constant), Flops(*linear), Flops(*square)


class Peak(NamedTuple):
    """Dense TFLOP/s, without sparsity, of matrix products on the whole GPU."""

    multiprocessors: int
    half: float  # bf16 and fp16, accumulated in float32
    tf32: float | None  # None: the GPU computes float32 products in float32
    fp32: float
    bf16: bool = True  # whether tensor cores take bf16


# By patterns of names: the first pattern that the device's name contains as a word. Sources: NVIDIA's data sheets, and
# the whitepapers of Ampere GA102, Ada and RTX Blackwell. Figures of HGX and NVL72 systems are divided by their GPUs,
# those with sparsity by two.
PEAKS = {
    "GB[23]00": Peak(152, 2500, 1250, 80),
    "B300": Peak(148, 2250, 1125, 75),
    "B200": Peak(148, 2250, 1100, 80),
    "H200 NVL": Peak(132, 835, 417, 60),
    "G?H200": Peak(132, 989, 494, 67),
    "H[18]00 PCIe": Peak(114, 756, 378, 51),
    "H[18]00 NVL": Peak(132, 835, 417, 60),
    "H[18]00": Peak(132, 989, 494, 67),
    "H20": Peak(78, 148, 74, 44),
    "A[18]00": Peak(108, 312, 156, 19.5),
    "A10": Peak(72, 125, 62.5, 31.2),
    "A10G": Peak(80, 70, 35, 35),
    "A40": Peak(84, 149.7, 74.8, 37.4),
    "RTX A6000": Peak(84, 154.8, 77.4, 38.7),
    "RTX 6000 Ada": Peak(142, 364.2, 182.1, 91.1),
    "L40": Peak(142, 181, 90.5, 90.5),
    "L40S": Peak(142, 362, 183, 91.6),
    "L4": Peak(58, 121, 60, 30.3),
    "T4": Peak(40, 65, None, 8.1, bf16=False),
    "V100": Peak(80, 125, None, 15.7, bf16=False),
    "RTX 5090": Peak(170, 209.5, 104.8, 104.8),
    "RTX 4090": Peak(128, 165, 82.6, 82.6),
    "RTX 3090": Peak(82, 71, 35.6, 35.6),
}
SLOWER = r"(?! Laptop| D\b)"  # after the name: GPUs that share it


def peak_tflops(device: str, precision: str) -> float | None:
    """Peak TFLOP/s of a device ('cuda:0') at `train.precision`; None on a CPU and where it is not known."""
    if torch.device(device).type != "cuda":
        return None
    tf32, found = torch.backends.cuda.matmul.fp32_precision == "tf32", torch.cuda.get_device_properties(device)
    return find_peak(found.name, precision, tf32=tf32, multiprocessors=found.multi_processor_count)


def find_peak(name: str, precision: str, *, tf32: bool, multiprocessors: int) -> float | None:
    """Peak TFLOP/s of the GPU with this name; None if it is not in the table, or has none at this precision. With
    `tf32`, products of float32 may be computed in TF32. Of a part of a GPU (MIG), it is the share of multiprocessors.
    """
    known = next((peak for part, peak in PEAKS.items() if re.search(rf"\b{part}\b{SLOWER}", name)), None)
    if known is None:
        return None
    share = min(1.0, multiprocessors / known.multiprocessors)
    if precision == "fp32":
        return share * (known.tf32 if tf32 and known.tf32 is not None else known.fp32)
    if precision == "fp16" or (precision in ("bf16", "pure_bf16") and known.bf16):
        return share * known.half
    return None
