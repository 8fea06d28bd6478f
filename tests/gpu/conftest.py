"""The device of these tests, float32 without TF32, and a GPU that each test leaves as it was.

pytest -p no:xdist tests/gpu                # on a GPU; skipped without one
pytest tests/gpu --gpu-device cpu           # those that need none, on the CPU
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # of deterministic algorithms, before CUDA starts


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """torch's name of the device."""
    if request.config.getoption("--gpu-device") == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    return "cuda:0"


@pytest.fixture
def cuda(device: str) -> str:
    """The same, for what the CPU does not have."""
    if device == "cpu":
        pytest.skip("for GPUs only")
    return device


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    yield
    matmul.allow_tf32, cudnn.allow_tf32 = before
    if torch.cuda.is_initialized():
        torch.cuda.set_device(0)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
