"""A step reads results from the device once, after its backward pass: earlier reads leave a GPU without work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import clipstream
from clipstream.data.batch import Batch
from clipstream.distributed.world import World
from clipstream.losses.contrastive import build_loss
from clipstream.losses.settings import ClipLossSettings, SiglipLossSettings
from clipstream.losses.tiled import _none_on_cpu
from clipstream.models.execution.text_buckets import TextBuckets
from clipstream.training.optim import parameter_groups
from clipstream.training.step import TrainStep
from tests.support.model_files import build, write

PACKAGE = Path(clipstream.__file__).resolve().parent
READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")
# Read what is on the CPU on any machine, or do not read on a GPU.
HOST = ("text_buckets.py:lengths", "tiled.py:_none_on_cpu")


class _Reads(TorchDispatchMode):
    """Notes operators whose result the host waits for."""

    WAITING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2")

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().split(".")[0] in self.WAITING:
            self.note(func.name())
        return func(*args, **(kwargs or {}))


@contextmanager
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The places of this package that read values of tensors within the context, as 'file:function'."""
    found: list[str] = []

    def note(what: str) -> None:
        frame: Any = sys._getframe(1)
        while frame is not None and PACKAGE not in Path(frame.f_code.co_filename).resolve().parents:
            frame = frame.f_back
        place = what if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"
        if place not in HOST:
            found.append(place)

    def noting(name: str, original: Any) -> Any:
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            note(name)
            with torch.utils._python_dispatch._disable_current_modes():
                return original(self, *args, **kwargs)

        return read

    with monkeypatch.context() as patch, _Reads(note):
        for name in READS:
            patch.setattr(torch.Tensor, name, noting(name, getattr(torch.Tensor, name)))
        yield found


@pytest.mark.parametrize("buckets", [9, "packed"])
@pytest.mark.parametrize("kept", [None, 0, 1, 3])
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_a_step_waits_for_the_device_once(
    tmp_path: Path, kind: str, kept: int | None, buckets: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ClipLossSettings() if kind == "clip" else SiglipLossSettings()
    towers = build(write(tmp_path), loss_type=kind, text_buckets=buckets).train()
    optimizer = torch.optim.AdamW(parameter_groups(towers, 0.1), fused=True)
    chunks: dict[str, Any] = {} if kept is None else {"micro_batch_size": 2, "kept": kept}
    step = TrainStep(towers, build_loss(settings, kind), optimizer, World(), clip_norm=1.0, **chunks)
    pixels = torch.randint(0, 256, (8, 3, *towers.image.size), dtype=torch.uint8)
    ids = towers.open_clip_tokenizer()(["a", "b c", "d e f", "g"] * 2).int()
    batch = Batch(pixels, ids, torch.ones(8), ("",) * 8, torch.zeros(8), step=0, global_size=8)
    step(batch, lr=1e-3)  # the optimizer makes its moments
    with reads(monkeypatch) as found:
        step(batch, lr=1e-3)
    assert found == ["step.py:__call__"]


def test_reads_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.ones(3)
    ways: dict[str, Callable[[torch.Tensor], object]] = {
        "item": lambda tensor: tensor.item(),
        "tolist": lambda tensor: tensor.tolist(),
        "if": bool,
        "float": float,
        "nonzero": torch.nonzero,
        "mask": lambda tensor: tensor[tensor > 0],
    }
    for name, way in ways.items():
        with reads(monkeypatch) as found:
            way(values.sum())
        assert found, name


def test_the_host_ones_read_nothing_from_a_device() -> None:
    flags, ids = torch.zeros(3, device="meta", dtype=torch.bool), torch.zeros(3, 4, device="meta", dtype=torch.int32)
    assert not _none_on_cpu(flags)  # a tensor without content raises when it is read
    assert TextBuckets("argmax", 0).lengths(ids) is None
    assert _none_on_cpu(torch.zeros(3, dtype=torch.bool)) and not _none_on_cpu(torch.ones(3, dtype=torch.bool))
