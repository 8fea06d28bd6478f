"""Encoding of L2-normalised features as stored rows: float32, float16, bfloat16, or int8 with a scale for each row."""

from __future__ import annotations

import torch

SCALE_BYTES = 4  # of the float32 scale at the end of an int8 row
FEATURE_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}
ID_DTYPES = {"uint16": torch.uint16, "int32": torch.int32}
DTYPES = {**FEATURE_DTYPES, **ID_DTYPES}


def stored_width(width: int, dtype: str) -> int:
    """Elements of a stored row of `width` features or ids: those, and the scale of an int8 row."""
    return width + SCALE_BYTES * (dtype == "int8")


def row_bytes(width: int, dtype: str) -> int:
    """Bytes of a stored row."""
    return stored_width(width, dtype) * DTYPES[dtype].itemsize


def encode_rows(features: torch.Tensor, dtype: str) -> torch.Tensor:
    """Stored rows of features [n, D], on the same device: [n, D] of `dtype`, or int8 [n, D + 4].

    An int8 row x is round(x / scale) with scale = max|x| / 127, so each element is off by at most scale / 2, apart from
    float32's rounding. The last 4 bytes of the row are the scale in float32, little-endian; a row with NaN or infinity
    gets a scale that is not finite.
    """
    if dtype != "int8":
        return features.to(FEATURE_DTYPES[dtype])
    values = features.float()
    scale = values.abs().amax(dim=1, keepdim=True) / 127
    # Of a row of zeros, and of one so small that its scale underflows, all elements are 0.
    quantised = torch.where(scale > 0, values / scale, 0.0).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([quantised, _copy(scale).view(torch.int8)], dim=1)


def decode_rows(rows: torch.Tensor) -> torch.Tensor:
    """Features float32 [n, D] of rows that `encode_rows` made, on the same device; float32 rows are returned as is."""
    if rows.dtype != torch.int8:
        return rows.float()
    return rows[:, :-SCALE_BYTES].float() * _scale(rows)


def is_finite(rows: torch.Tensor) -> bool:
    """Whether stored rows of features hold no NaN and no infinity."""
    if rows.dtype == torch.int8:
        rows = _scale(rows)
    return bool(torch.isfinite(rows).all())


def _scale(rows: torch.Tensor) -> torch.Tensor:
    return _copy(rows[:, -SCALE_BYTES:]).view(torch.float32)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that can be viewed as another type; `contiguous` returns a single row as it is, at any offset."""
    return tensor.clone(memory_format=torch.contiguous_format)
