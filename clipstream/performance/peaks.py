"""Peak arithmetic of known GPUs, which MFU is a share of."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch


class Peak(NamedTuple):
    """Dense TFLOP/s, without sparsity, of matrix products."""

    half: float  # bf16 and fp16, accumulated in float32
    tf32: float | None  # None: the GPU computes float32 products in float32
    fp32: float
    bf16: bool = True  # whether tensor cores take bf16


# From NVIDIA's data sheets and architecture whitepapers. The first name that is part of the device's counts, as a word.
PEAKS = {
    "B200": Peak(2250, 1100, 80),
    "GH200": Peak(989, 494, 67),
    "H200 NVL": Peak(835, 417, 60),
    "H200": Peak(989, 494, 67),
    "H100 PCIe": Peak(756, 378, 51),
    "H100 NVL": Peak(835, 417, 60),
    "H100": Peak(989, 494, 67),
    "A100": Peak(312, 156, 19.5),
    "A10G": Peak(70, 35, 35),
    "L40S": Peak(362, 183, 91.6),
    "L4": Peak(121, 60, 30.3),
    "T4": Peak(65, None, 8.1, bf16=False),
    "V100": Peak(125, None, 15.7, bf16=False),
    "RTX 4090": Peak(165, 82.6, 82.6),
    "RTX 3090": Peak(71, 35.6, 35.6),
}
SLOWER = r"(?! Laptop| D\b)"  # after the name: GPUs that share it


def peak_tflops(device: str, precision: str) -> float | None:
    """Peak TFLOP/s of a device ('cuda:0') at `train.precision`; None on a CPU and where it is not known."""
    if torch.device(device).type != "cuda":
        return None
    allowed = torch.backends.cuda.matmul.allow_tf32
    return find_peak(torch.cuda.get_device_name(device), precision, tf32=allowed)


def find_peak(name: str, precision: str, *, tf32: bool) -> float | None:
    """Peak TFLOP/s of the GPU with this name; None if it is not in the table, or has none at this precision.

    Args:
        tf32: whether products of float32 may be computed in TF32.
    """
    known = next((peak for part, peak in PEAKS.items() if re.search(rf"\b{part}\b{SLOWER}", name)), None)
    if known is None:
        return None
    if precision == "fp32":
        return known.tf32 if tf32 and known.tf32 is not None else known.fp32
    if precision == "fp16" or (precision in ("bf16", "pure_bf16") and known.bf16):
        return known.half
    return None
