"""Use of the device: processes on the CPU, and what is left out where a GPU does not tell."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from clipstream.utils.timing import GIB, Usage

WORK = """
import time
print(flush=True)
input()
while time.process_time() < 0.5:
    pass
print(flush=True)
input()
"""


def test_data_workers_count() -> None:
    with subprocess.Popen([sys.executable, "-c", WORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None and worker.stdin is not None
        worker.stdout.readline()
        usages = {"with": Usage("cpu", lambda: [worker.pid, 2**30]), "without": Usage("cpu")}  # no such process
        for usage in usages.values():
            usage.read()
        worker.stdin.write(b"\n")
        worker.stdin.flush()
        worker.stdout.readline()
        found = {name: usage.read() for name, usage in usages.items()}
        worker.stdin.close()
    assert found["with"]["cores"] > found["without"]["cores"] >= 0
    assert 0 < found["with"]["memory_gib"] <= found["with"]["memory_peak_gib"]
    assert 0 < found["with"]["workers_memory_gib"] < found["with"]["memory_gib"]
    assert "workers_memory_gib" not in found["without"]


def test_what_a_gpu_does_not_tell_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def absent(device: Any) -> int:
        asked.append(device)
        raise ModuleNotFoundError("pynvml")

    stats = {"allocated_bytes.all.current": 1, "reserved_bytes.all.current": 4, "allocated_bytes.all.peak": 3}
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 93)
    monkeypatch.setattr(torch.cuda, "power_draw", absent)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {key: n * GIB for key, n in stats.items()})
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    usage = Usage("cuda:0")
    memory = {"memory_allocated_gib": 1.0, "memory_reserved_gib": 4.0, "memory_peak_gib": 3.0}
    assert usage.kind == "gpu"
    assert usage.read() == usage.read() == {"utilization": 0.93, **memory}
    assert len(asked) == 1, "what failed is not asked for again"
