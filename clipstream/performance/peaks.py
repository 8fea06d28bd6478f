"""Peak arithmetic of known GPUs, which MFU is a share of.

Source: NVIDIA's data sheets of each GPU, and the whitepapers of the architectures Ampere GA102, Ada and RTX Blackwell.
Those of HGX and NVL72 systems are divided by their GPUs, figures with sparsity by two.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch


class Peak(NamedTuple):
    """Dense TFLOP/s, without sparsity, of matrix products on the whole GPU."""

    multiprocessors: int
    half: float  # bf16 and fp16, accumulated in float32
    tf32: float | None  # None: the GPU computes float32 products in float32
    fp32: float
    bf16: bool = True  # whether tensor cores take bf16


# Patterns of names. The first that is part of the device's counts, as a word.
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
    """Peak TFLOP/s of the GPU with this name; None if it is not in the table, or has none at this precision.

    Args:
        tf32: whether products of float32 may be computed in TF32.
        multiprocessors: of the device. The peak of a part of a GPU (MIG) is its share of the whole GPU's.
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
