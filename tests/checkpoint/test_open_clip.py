"""Checkpoints of open_clip's trainer are resumed with their optimizer."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clipstream.checkpoint.open_clip import OpenClipCheckpoint
from clipstream.checkpoint.store import find
from clipstream.errors import SettingsError
from clipstream.training.optim import AdamW
from tests.support import model_files
from tests.support.open_clip_epochs import write_epoch


@pytest.mark.parametrize("kind", ["3.3.0", "main"])
def test_moments_are_those_of_their_parameters(kind: str, tmp_path: Path) -> None:
    name = model_files.write(tmp_path)
    config = json.loads(Path(name).read_text())
    path, theirs, model = write_epoch(tmp_path, config, kind)
    towers = model_files.build(name)
    optimizer = AdamW.Settings(lr=1e-3).build(towers, "ViT-B-32")
    OpenClipCheckpoint.read(path).load(towers, optimizer)
    for key, parameter in towers.clip.named_parameters():
        other = model.get_parameter(key)
        assert torch.equal(parameter, other), key
        mine, expected = optimizer.state[parameter], theirs.state[other]
        assert float(mine["step"]) == 2 and torch.equal(mine["exp_avg"], expected["exp_avg"]), key
        assert torch.equal(mine["exp_avg_sq"], expected["exp_avg_sq"]), key
    assert optimizer.param_groups[0]["weight_decay"] == 0.2


def test_what_does_not_fit_is_told(tmp_path: Path) -> None:
    name = model_files.write(tmp_path)
    path, _, model = write_epoch(tmp_path, json.loads(Path(name).read_text()), "3.3.0")
    locked = model_files.build(name, lock_image=True)
    with pytest.raises(SettingsError, match="lock the same towers"):
        OpenClipCheckpoint.read(path).load(locked, AdamW.Settings().build(locked, "ViT"))
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    with pytest.raises(SettingsError, match="with --pretrained"):
        OpenClipCheckpoint.read(tmp_path / "weights.pt")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"epoch": np.int64(2), "args": argparse.Namespace(lr=np.float64(1))}, None),
        ({"epoch": 10**18}, "epoch: Input should be less than"),
        ({"epoch": torch.zeros(3)}, "epoch"),
        ({"global_step": "x"}, "global_step"),
        ({"scaler": {"scale": {}}}, "scaler.scale"),
        ({"optimizer": {"state": {0: 1}, "param_groups": []}}, "optimizer.state.0"),
        ({"optimizer": {"state": {99999: {}}, "param_groups": [{"params": [0]}]}}, "lock the same towers"),
        (
            {"optimizer": {"state": {"visual.proj": {"x": torch.ones(3)}}, "param_groups": []}},
            "lock the same towers",
        ),
        ({"state_dict": {"visual.proj": torch.ones(2, 2)}}, "weights do not match the model"),
    ],
)
def test_odd_fields_are_named(changed: dict[str, Any], words: str | None, tmp_path: Path) -> None:
    name = model_files.write(tmp_path)
    path, *_ = write_epoch(tmp_path, json.loads(Path(name).read_text()), "3.3.0", **changed)
    towers = model_files.build(name)
    optimizer = AdamW.Settings(lr=1e-3).build(towers, "ViT-B-32")
    with nullcontext() if words is None else pytest.raises(SettingsError, match=words):
        OpenClipCheckpoint.read(path).load(towers, optimizer)


@pytest.mark.parametrize("content", [b"", b"<!DOCTYPE html><html>404</html>", b"../x\n", b"a\0b"])
def test_a_file_of_another_kind_is_an_error(content: bytes, tmp_path: Path) -> None:
    (path := tmp_path / "epoch_1.pt").write_bytes(content)
    assert find(tmp_path, str(path)) == path
    with pytest.raises(SettingsError, match="not a checkpoint of clipstream or of open_clip's trainer: "):
        OpenClipCheckpoint.read(path)
