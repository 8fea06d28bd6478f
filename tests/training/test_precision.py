"""Numerics that devices have or lack."""

from __future__ import annotations

import pytest
import torch

from clipstream.errors import SettingsError
from clipstream.training.precision import set_tf32


def test_tf32_is_refused_where_no_gpu_computes_it() -> None:
    with pytest.raises(SettingsError, match=r"train\.tf32: the CPU computes no TF32"):
        set_tf32("cpu", True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_tf32_is_set_where_a_gpu_computes_it() -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no TF32")
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for enabled in (True, False):
            set_tf32("cuda:0", enabled)
            assert torch.backends.cuda.matmul.allow_tf32 is enabled
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
