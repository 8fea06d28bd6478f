"""Which GPU a rank works on, and what NCCL is told; without a GPU, by stand-ins for torch.cuda."""

from __future__ import annotations

import ast
import os
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import HashStore

import clipstream
from clipstream.api.model import usable_device
from clipstream.distributed import world as world_module
from clipstream.distributed.launch import run_embedded, run_ranks
from clipstream.distributed.settings import RunSettings
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.precompute import run as compute
from clipstream.training.precision_audit import Recorder

# Functions of torch.cuda that mean the current GPU where no device is given, and the place of the device.
PER_DEVICE = {
    "Stream": 0, "current_stream": 0, "default_stream": 0, "synchronize": 0, "mem_get_info": 0, "memory_stats": 0,
    "memory_allocated": 0, "memory_reserved": 0, "max_memory_allocated": 0, "max_memory_reserved": 0,
    "reset_peak_memory_stats": 0, "get_device_name": 0, "get_device_capability": 0, "get_device_properties": 0,
    "utilization": 0, "power_draw": 0, "clock_rate": 0, "get_rng_state": 0, "set_rng_state": 1,
    "set_per_process_memory_fraction": 1,
}  # fmt: skip


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand-ins for two GPUs; returns the devices that were made the current one."""
    current: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(str(device)))
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", lambda index: current.append(f"cuda:{index}"))
    return current


def test_one_rank_works_on_the_gpu_that_it_is_given(gpus: list[str]) -> None:
    seen: list[tuple[str, list[str]]] = []
    assert run_ranks(RunSettings(device="cuda:1"), lambda world, watch: seen.append((world.device, [*gpus]))) == 0
    assert seen == [("cuda:1", ["cuda:1"])]


def test_a_program_has_its_gpu_and_its_variables_again(gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(world_module.DUMP, raising=False)
    run_embedded(RunSettings(device="cuda:1"), lambda world, watch: os.environ.setdefault(world_module.DUMP, "1"))
    assert gpus == ["cuda:1", "cuda:0"] and world_module.DUMP not in os.environ


@pytest.mark.parametrize("given", [None, "0"])
def test_nccl_is_given_the_gpu_and_has_its_exchanges_written(
    gpus: list[str], monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.setenv(world_module.DUMP, given or "")
    if given is None:
        monkeypatch.delenv(world_module.DUMP)
    made: list[tuple[Any, ...]] = []

    def init(backend: str, **options: Any) -> None:
        made.append((backend, options["device_id"], os.environ.get(world_module.DUMP), [*gpus]))
        raise dist.DistBackendError("NCCL error in: NCCLUtils.cpp\nLast error:\nDuplicate GPU detected : rank 1")

    monkeypatch.setattr(
        sys.modules["torch.distributed.rendezvous"], "rendezvous", lambda *_, **options: iter([(HashStore(), 1, 2)])
    )
    monkeypatch.setattr(world_module, "meet", lambda *_: "word")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(dist, "init_process_group", init)
    with pytest.raises(SettingsError, match=r"cuda:1 of rank 3 .* \(Duplicate GPU detected : rank 1\)"):
        World(3, 4, 1, 2, "cuda:1").start(timedelta(seconds=5))
    assert made == [("cpu:gloo,cuda:nccl", torch.device("cuda:1"), given or "1", ["cuda:1"])]


def test_a_programs_models_and_batches_are_on_its_ranks_gpu(gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [usable_device(name) for name in ("auto", "cuda", "cuda:3", "cpu")] == ["cuda:1", "cuda:1", "cuda:3", "cpu"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7")
    assert usable_device("auto") == "cuda:0"
    monkeypatch.delenv("WORLD_SIZE")  # not what a launcher sets
    assert usable_device("cpu") == "cpu"


def test_events_are_recorded_on_the_stream_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[str] = []

    def stream(device: Any) -> SimpleNamespace:
        return SimpleNamespace(record_event=lambda event=None: recorded.append(str(device)))

    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: SimpleNamespace(record=lambda: recorded.append("current")))
    empty = torch.empty
    with FakeTensorMode(allow_non_fake_inputs=True):
        monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **options: empty(*shape, **options))
        compute._to_host({"ids": torch.zeros(2), "image": torch.zeros(2, 3, device="cuda:1")})
    Recorder(torch.nn.Identity(), "bf16", "cuda:1")._event()
    assert recorded == ["cuda:1", "cuda:1"]


def test_no_code_means_the_current_gpu() -> None:
    package = Path(clipstream.__file__).parent
    faults, judged = [], 0
    for path in sorted(package.rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            owner, _, attribute = ast.unparse(call.func).rpartition(".")
            given = len(call.args) + len(call.keywords)
            wrong = owner in ("torch.cuda", "cuda") and given <= PER_DEVICE.get(attribute, -1)
            judged += owner in ("torch.cuda", "cuda") and attribute in PER_DEVICE
            # An event's; rows of a benchmark have a method of this name too.
            wrong |= attribute == "record" and not given and owner not in ("row", "one")
            values = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "device")]
            named = any(isinstance(value, ast.Constant) and value.value == "cuda" for value in values)
            wrong |= attribute == "cuda" or (named and attribute not in ("startswith", "from_env"))
            faults += [f"{path.relative_to(package)}:{call.lineno}: {ast.unparse(call)}"] * wrong
    assert not faults and judged > 10, faults
