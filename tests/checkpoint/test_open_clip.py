"""Checkpoints of open_clip's trainer are resumed without the moments of their optimizer."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clipstream.checkpoint.state import OpenClipCheckpoint
from clipstream.checkpoint.store import find
from clipstream.errors import SettingsError
from tests.support import model_files
from tests.support.open_clip_epochs import write_epoch


def test_weights_are_loaded_and_moments_are_not(tmp_path: Path) -> None:
    name = model_files.write(tmp_path)
    path, model = write_epoch(tmp_path, json.loads(Path(name).read_text()))
    towers = model_files.build(name)
    OpenClipCheckpoint.read(path).load(towers)
    for key, parameter in towers.clip.named_parameters():
        assert torch.equal(parameter, model.get_parameter(key)), key
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    with pytest.raises(SettingsError, match="no epoch in it; start a new run from its weights with --pretrained"):
        OpenClipCheckpoint.read(tmp_path / "weights.pt")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"epoch": np.int64(2), "args": argparse.Namespace(lr=np.float64(1))}, None),
        ({"epoch": 10**18}, "epoch: Input should be less than"),
        ({"epoch": torch.zeros(3)}, "epoch"),
        ({"global_step": "x"}, "global_step"),
        ({"scaler": {"scale": {}}}, "scaler.scale"),
        ({"state_dict": {"visual.proj": torch.ones(2, 2)}}, "weights do not match the model"),
    ],
)
def test_odd_fields_are_named(changed: dict[str, Any], words: str | None, tmp_path: Path) -> None:
    name = model_files.write(tmp_path)
    path, _ = write_epoch(tmp_path, json.loads(Path(name).read_text()), **changed)
    towers = model_files.build(name)
    with nullcontext() if words is None else pytest.raises(SettingsError, match=words):
        OpenClipCheckpoint.read(path).load(towers)


@pytest.mark.parametrize("content", [b"", b"<!DOCTYPE html><html>404</html>", b"../x\n", b"a\0b"])
def test_a_file_of_another_kind_is_an_error(content: bytes, tmp_path: Path) -> None:
    (path := tmp_path / "epoch_1.pt").write_bytes(content)
    assert find(tmp_path, str(path)) == path
    with pytest.raises(SettingsError, match="not a checkpoint of clipstream or of open_clip's trainer: "):
        OpenClipCheckpoint.read(path)
