"""Reading weights, and refusing code, damage and non-finite numbers."""

from __future__ import annotations

import argparse
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from clipstream.errors import SettingsError
from clipstream.models.towers import read_weights
from tests.support.model_files import build, write

TENSORS = {"a": torch.ones(2)}


class Attack:
    """An object whose unpickling runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_a_checkpoint_of_tensors_and_numbers_is_read(tmp_path: Path) -> None:
    optimizer = {"state": {}, "param_groups": [{"lr": 0.1}]}
    torch.save({"state_dict": TENSORS, "epoch": 3, "optimizer": optimizer}, tmp_path / "epoch_3.pt")
    assert list(read_weights(tmp_path / "epoch_3.pt")) == ["a"]


@pytest.mark.parametrize("former", [False, True])
def test_objects_besides_tensors_are_refused_in_a_sentence(tmp_path: Path, former: bool) -> None:
    path, mark = tmp_path / "w.pt", tmp_path / "ran"
    for value, named in (
        (argparse.Namespace(lr=1), "argparse.Namespace"),
        (Attack(f"touch '{mark}'"), f"{os.system.__module__}.system"),
    ):
        torch.save({"state_dict": TENSORS, "args": value}, path, _use_new_zipfile_serialization=not former)
        with pytest.raises(SettingsError) as caught:
            read_weights(path)
        assert str(caught.value) == (
            f"{path} is a pickle that holds {named} besides tensors; nothing in it was run: ask its maker for the "
            "weights as .safetensors"
        )
    assert not mark.exists()


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"<!DOCTYPE html><html></html>", pickle.dumps({"w": [1, 2]}), b"\x80\x02", bytes(99)]
)
def test_files_that_are_no_weights_are_told(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "w.pt"
    path.write_bytes(content)
    with pytest.raises(SettingsError) as caught:
        read_weights(path)
    assert str(path) in str(caught.value) and "weights_only" not in str(caught.value)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, number: float) -> None:
    name = write(tmp_path)
    build(name).save_pretrained(tmp_path / "saved")
    state = load_file(tmp_path / "saved" / "open_clip_model.safetensors")
    for tensor in ("visual.proj", "text_projection"):
        state[tensor][0, 0] = number
    path = tmp_path / "broken.safetensors"
    save_file(state, path)
    with pytest.raises(SettingsError) as caught:
        build(name, pretrained=str(path))
    assert f"{path} holds weights that are NaN or infinite: " in str(caught.value)
    assert "visual.proj" in str(caught.value) and "text_projection" in str(caught.value)
