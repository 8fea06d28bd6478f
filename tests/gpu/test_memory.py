"""Micro-batches of automatic size, in a share of the GPU's memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.gpu_steps import make_batch, make_step, make_towers

COUNT = 2048


@pytest.fixture
def tight(cuda: str, tmp_path: Path) -> Iterator[float]:
    """The share of the memory that 60% of what a step without micro-batches reserves is."""
    step, batch = make_step(make_towers(tmp_path, cuda), cuda), make_batch(COUNT)
    step(batch, lr=0.0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(cuda)
    step(batch, lr=0.0)
    need = torch.cuda.max_memory_reserved(cuda)
    del step
    torch.cuda.empty_cache()
    yield 0.6 * need / torch.cuda.get_device_properties(cuda).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0, cuda)


def test_the_size_fits_a_share_of_the_memory(cuda: str, tight: float, tmp_path: Path) -> None:
    batch = make_batch(COUNT)
    wanted = make_step(make_towers(tmp_path, cuda), cuda, micro_batch_size=64)(batch, lr=1e-3)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(tight, cuda)
    step = make_step(make_towers(tmp_path, cuda), cuda, micro_batch_size="auto")
    found = step(batch, lr=1e-3)
    assert step.gradcache.size is not None and 8 <= step.gradcache.size < COUNT
    assert found.loss == pytest.approx(wanted.loss, rel=1e-4)
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-3)


def test_a_step_that_runs_out_of_memory_later_is_repeated(cuda: str, tight: float, tmp_path: Path) -> None:
    batch = make_batch(COUNT)
    step = make_step(make_towers(tmp_path, cuda), cuda, micro_batch_size="auto")
    first = step(batch, lr=0.0)
    assert step.gradcache.size is None, "all samples fit"
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(tight, cuda)
    again = step(batch, lr=0.0)
    assert step.gradcache.size is not None and step.gradcache.size < COUNT
    assert again.loss == pytest.approx(first.loss, rel=1e-4)
    assert again.grad_norm == pytest.approx(first.grad_norm, rel=1e-3)
