"""Each training feature in bfloat16, which every processor computes or emulates: the losses are those of float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from clipstream.data.batch import Batch
from clipstream.distributed.world import World
from clipstream.losses.contrastive import SoftmaxLoss
from clipstream.losses.settings import ClipLossSettings
from clipstream.training.precision import prepare
from clipstream.training.settings import Precision, TrainSettings
from clipstream.training.step import TrainStep
from tests.support.model_files import TEXT, build, write

BATCH, TOKENS = 12, 10
FEATURES: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {  # settings of the model, arguments of the step
    "plain": ({}, {}),
    "padded": ({"text_buckets": "off"}, {}),
    "buckets": ({"text_buckets": 2}, {}),
    "checkpointing": ({"grad_checkpointing": "all"}, {}),
    "checkpointing matmuls": ({"grad_checkpointing": "matmuls"}, {}),
    "checkpointing, padded": ({"grad_checkpointing": "matmuls", "text_buckets": "off"}, {}),
    "checkpointing, micro-batches": ({"grad_checkpointing": "all"}, {"micro_batch_size": 5}),
    "micro-batches": ({}, {"micro_batch_size": 4, "kept_micro_batches": 0}),
    "kept micro-batches": ({}, {"micro_batch_size": 3, "kept_micro_batches": 2}),
    "clipping and averages": ({}, {"clip_norm": 100.0, "ema": 0.9}),
    "patch dropout, checkpointing": ({"patch_dropout": 0.5, "grad_checkpointing": "all"}, {}),
    "channels last": ({"channels_last": "on"}, {}),
    "locked": ({"lock_image": True}, {}),
    "locked in bf16": ({"lock_text": True, "text": {"precision": "bf16"}}, {"micro_batch_size": 4}),
}


def losses(name: str, precision: Precision, model: Mapping[str, Any], step: Mapping[str, Any]) -> list[float]:
    """Of three steps on one batch."""
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    towers = prepare(build(name, **model).train(), precision)
    pixels = torch.randint(0, 256, (BATCH, 3, *towers.image.size), dtype=torch.uint8, generator=draw)
    ids = torch.zeros(BATCH, TOKENS, dtype=torch.int32)
    for row, length in zip(ids, torch.randint(2, TOKENS + 1, (BATCH,), generator=draw).tolist(), strict=True):
        row[:length] = torch.randint(1, 60, (length,), generator=draw)
        row[length - 1] = 63
    batch = Batch(pixels, ids, torch.ones(BATCH), ("",) * BATCH, torch.zeros(BATCH), step=0, global_size=BATCH)
    optimizer = torch.optim.SGD([p for p in towers.parameters() if p.requires_grad], lr=0.0)
    given = {key: value for key, value in step.items() if key != "clip_norm"}
    settings = TrainSettings(precision=precision, **given)
    loss = SoftmaxLoss(ClipLossSettings())
    take = TrainStep(towers, loss, optimizer, World(), settings, clip_norm=step.get("clip_norm"))
    return [take(batch, lr=0.05).loss for _ in range(3)]


@pytest.mark.parametrize("precision", ["bf16", "pure_bf16"])
@pytest.mark.parametrize("feature", FEATURES)
def test_losses_are_those_of_float32(feature: str, precision: Precision, tmp_path: Path) -> None:
    name = write(tmp_path, text_cfg={**TEXT, "context_length": TOKENS, "vocab_size": 64})
    model, step = FEATURES[feature]
    same = {key: value for key, value in model.items() if key.startswith(("lock", "patch"))}
    expected = losses(name, "fp32", {"text_buckets": "off", **same}, {})
    assert losses(name, precision, model, step) == pytest.approx(expected, rel=0.03)
