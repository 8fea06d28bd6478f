"""Figures of a GPU, and stores of features that it computes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from clipstream.cli.verbs.precompute import main as precompute
from clipstream.features.store import FeatureStore
from clipstream.features.stored_rows import StoredRows
from clipstream.models.execution.flops import Throughput, count_flops, peak_tflops
from clipstream.utils.timing import Usage
from tests.support.gpu_steps import make_batch, make_step, make_towers
from tests.support.pictures import make_shards
from tests.support.runs import MODEL


def test_use_of_the_gpu(cuda: str) -> None:
    usage, kept = Usage(cuda), torch.ones(1 << 28, dtype=torch.uint8, device=cuda)
    found = usage.read()
    assert found["memory_reserved_gib"] >= found["memory_allocated_gib"] >= kept.numel() / 2**30
    if "utilization" not in found:
        pytest.skip("NVML is not available: pip install nvidia-ml-py")
    assert 0 <= found["utilization"] <= 1 and 1 < found["power_w"] < 3000


def test_mfu_is_a_share(cuda: str, tmp_path: Path) -> None:
    peak = peak_tflops(cuda, "bf16")
    if peak is None:
        pytest.skip(f"the peak of {torch.cuda.get_device_name(cuda)} is not known")
    towers = make_towers(tmp_path, cuda)
    flops, batch = count_flops(towers), make_batch(512)
    assert flops is not None
    throughput, step = Throughput(flops, peak), make_step(towers, cuda, precision="bf16")
    step(batch, lr=1e-3)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(5):
        throughput.add(batch)
        step(batch, lr=1e-3)
    torch.cuda.synchronize()
    figures = throughput.figures([throughput.take()], time.perf_counter() - began, frozenset())
    assert 0 < figures["mfu"] < 1 and figures["tflops"] < peak
    x, count = torch.randn(4096, 4096, device=cuda, dtype=torch.bfloat16), 50
    x @ x
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        x @ x
    torch.cuda.synchronize()
    assert 0.2 < 2 * 4096**3 * count / (time.perf_counter() - began) / 1e12 / peak <= 1.02


@pytest.mark.parametrize("number", [0, 1])
def test_a_store_is_that_of_the_cpu(device: str, number: int, tmp_path: Path) -> None:
    if number:
        if torch.cuda.device_count() < 2:
            pytest.skip("one GPU")
        device = "cuda:1"
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    shards = "::".join(make_shards(tmp_path / "pairs", [21, 17]))
    stores = {}
    for name, where in (("expected", "cpu"), ("found", device)):
        flags = ["--towers", "both", "--train-data", shards, "--model", str(tmp_path / "model.json"), "--workers", "1"]
        flags += ["--dtype", "float32", "--precision", "fp32", "--run.threads", "1", "--device", where]
        assert precompute([str(tmp_path / name), *flags, "--batch-size", "8"]) == 0
        stores[name] = FeatureStore(tmp_path / name)
    for part in ("image", "text"):
        found, expected = (list(StoredRows(stores[name], part).blocks()) for name in ("found", "expected"))
        for (row, rows), (wanted_row, wanted) in zip(found, expected, strict=True):
            assert row == wanted_row and len(rows)
            torch.testing.assert_close(rows, wanted, rtol=0, atol=1e-5)
        assert found
