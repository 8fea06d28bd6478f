"""Stored rows: exact for what their type can hold, and int8 within half a step of its scale."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clipstream.features.manifest import FEATURE_DTYPES, decode_rows, encode_rows, is_finite, row_bytes, stored_width

ROWS = st.lists(st.lists(st.floats(-1, 1, width=32), min_size=6, max_size=6), min_size=1, max_size=5)


@given(ROWS)
def test_rows_are_rounded_to_the_type_and_int8_elements_within_half_of_the_rows_scale(
    values: list[list[float]],
) -> None:
    features = torch.tensor(values)
    for dtype in ("float32", "float16", "bfloat16"):
        rows = encode_rows(features, dtype)
        assert rows.dtype == FEATURE_DTYPES[dtype] and rows.shape == features.shape
        decoded = decode_rows(rows)
        assert decoded.dtype == torch.float32
        assert torch.equal(encode_rows(decoded, dtype), rows), "what was stored once is exact"
        assert torch.equal(decoded, features.to(FEATURE_DTYPES[dtype]).float())
    rows = encode_rows(features, "int8")
    assert rows.dtype == torch.int8 and rows.shape == (len(values), 10)
    scale = rows[:, -4:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    assert torch.equal(scale[:, 0], features.abs().amax(dim=1) / 127)
    error = (decode_rows(rows) - features).abs()
    normal = (features.abs().amax(dim=1, keepdim=True) > 1e-30).expand_as(error)  # below, the scale is subnormal
    assert (error[normal] <= (scale * (0.5 + 1e-4)).expand_as(error)[normal]).all()
    assert torch.isfinite(error).all() and is_finite(rows)


@pytest.mark.parametrize("dtype", FEATURE_DTYPES)
def test_sizes_and_rows_that_are_not_finite(dtype: str) -> None:
    rows = encode_rows(torch.ones(2, 768), dtype)
    assert rows.shape == (2, stored_width(768, dtype)) and rows.nbytes == 2 * row_bytes(768, dtype)
    assert decode_rows(encode_rows(torch.zeros(2, 3), dtype)).tolist() == [[0.0] * 3] * 2
    assert is_finite(rows) and is_finite(rows[:0])
    for value in (float("nan"), float("inf")):
        features = torch.ones(3, 4)
        features[1, 2] = value
        assert not is_finite(encode_rows(features, dtype))
