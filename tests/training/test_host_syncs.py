"""The host does not wait for the device in a step: it would leave a GPU without work.

The meta device stands for a GPU: its tensors have no content, so that nothing can be read from them in secret.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import clipstream
from clipstream.data.batch import Batch
from clipstream.distributed.world import World
from clipstream.losses.contrastive import build_loss
from clipstream.losses.distillation import DistilledLoss
from clipstream.losses.settings import DistillSettings, LossSettings
from clipstream.models.execution.text_buckets import TextBuckets
from clipstream.training.optim import parameter_groups
from clipstream.training.step import read_later
from tests.support.model_files import VIT, build, write
from tests.support.steps import make_step

PACKAGE = Path(clipstream.__file__).resolve().parent


class Waits(TorchDispatchMode):
    """Notes the places where the host would wait for a GPU, as 'file:function operator'.

    These are operators whose result the host reads or whose size depends on values, and copies between host and device
    that are not asynchronous, those of indices on the host included.
    """

    READING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal")
    WITHOUT_META = ("_fused_sgd_", "_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.updates = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::").split(".")[0]
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        kinds = {tensor.device.type for tensor in tensors}
        self.updates += name == "_fused_adamw_"
        if "meta" in kinds and name in self.READING:
            self._note(name)
            return 0.0 if name == "_local_scalar_dense" else torch.zeros(1, dtype=torch.long)
        to = getattr(kwargs.get("device"), "type", "")
        moves = name in ("_to_copy", "copy_") and len(kinds | {to} - {""}) > 1
        if moves and not kwargs.get("non_blocking") and not any(one is True for one in args):
            self._note(name)
        if kinds == {"cpu", "meta"} and name in ("index", "index_put_", "index_put"):
            self._note(name)
        if moves and to == "cpu":
            return torch.zeros(args[0].shape, dtype=args[0].dtype)
        if name in self.WITHOUT_META:
            return args[0] if func._schema.returns else None
        return func(*args, **kwargs)

    def _note(self, what: str) -> None:
        frame: Any = sys._getframe(2)
        while frame is not None and PACKAGE not in Path(frame.f_code.co_filename).resolve().parents:
            frame = frame.f_back
        code = None if frame is None else frame.f_code
        self.found.append(what if code is None else f"{Path(code.co_filename).name}:{code.co_name} {what}")


@pytest.fixture
def meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device in place of a GPU."""
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: nullcontext())
    module = sys.modules[torch.optim.Optimizer.__module__]
    monkeypatch.setattr(module, "_get_fused_kernels_supported_devices", lambda: ["meta"])


def started(
    folder: Path,
    model: dict[str, Any] | None = None,
    *,
    kind: str = "clip",
    vision: Any = VIT,
    fused: bool = True,
    distill: bool = False,
    loss: Any = None,
    **train: Any,
) -> Waits:
    """What a step waits for after its first one."""
    towers = build(write(folder, vision), loss_type=kind, **(model or {})).train()
    ids = towers.open_clip_tokenizer()(["a", "b c", "d e f", "g"] * 2).int()
    towers = towers.to("meta")
    built = build_loss(LossSettings.model_validate({"type": kind, **(loss or {})}), kind)
    if distill:
        built = DistilledLoss(built, DistillSettings(weight=1.0, features=1.0), {"t": 50.0})
    optimizer = torch.optim.AdamW(parameter_groups(towers, 0.1), fused=fused)
    step = make_step(towers, World(device="meta"), built, optimizer, **train)
    teachers = {f"t.{part}": torch.rand(8, 24) for part in ("image", "text")}
    pixels = torch.randint(0, 256, (8, 3, *towers.image.size), dtype=torch.uint8)
    batch = Batch(pixels, ids, torch.ones(8), ("",) * 8, torch.zeros(8), step=0, global_size=8, features=teachers)
    batch = replace(batch, checksums=torch.arange(8))
    with Waits() as waits:
        step.start(batch, lr=1e-3)  # the optimizer makes its moments
        first, waits.found = waits.found, []
        step.start(batch, lr=1e-3)
    assert waits.updates >= 2 or not fused
    assert first == ["step.py:_update _local_scalar_dense"]
    return waits


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sigmoid": {"kind": "siglip", "model": {"text_buckets": 9}},
    "micro": {"micro_batch_size": 2, "kept_micro_batches": 0, "model": {"text_buckets": 9}},
    "kept": {"micro_batch_size": 2, "kept_micro_batches": 2, "kind": "siglip", "model": {"text_buckets": "packed"}},
    "patches": {"model": {"patch_dropout": 0.5}, "micro_batch_size": 4},
    "distillation": {"distill": True},
    "averages": {"ema": 0.9, "ema_warmup": True, "clip_norm": 1.0},
    "fp16": {"precision": "fp16", "ema": 0.9, "ema_warmup": True, "clip_norm": 1.0},
    "mask": {"loss": {"duplicates": "mask"}},
    "batch norm": {"vision": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "head_width": 16}},
}


@pytest.mark.usefixtures("meta")
@pytest.mark.parametrize("case", CASES)
def test_a_step_does_not_wait_for_the_device(tmp_path: Path, case: str) -> None:
    assert started(tmp_path, **CASES[case]).found == []


@pytest.mark.usefixtures("meta")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_waits_once_for_an_optimizer_that_takes_no_flag(tmp_path: Path, precision: str) -> None:
    found = started(tmp_path, fused=False, precision=precision, ema=0.9).found
    assert found == ["step.py:_update _local_scalar_dense"]


def test_figures_are_copied_without_waiting_and_read_after_their_event(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class Figures:
        device = torch.device("cuda:1")

        def to(self, *args: Any, **options: Any) -> torch.Tensor:
            told.append((args, options))
            return torch.tensor([1.0, 2.0])

    class Event:
        def record(self, stream: Any) -> None:
            told.append(stream)

        def synchronize(self) -> None:
            told.append("synchronize")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    read = read_later(Figures())  # type: ignore[arg-type]
    assert told == [(("cpu",), {"non_blocking": True}), "stream of cuda:1"]
    assert read() == [1.0, 2.0] and told[2:] == ["synchronize"]


def test_lengths_of_texts_are_counted_on_the_host_alone() -> None:
    assert TextBuckets("argmax", 0).lengths(torch.zeros(3, 4, device="meta", dtype=torch.int32)) is None
