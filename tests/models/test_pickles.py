"""Files of weights in all formats are read by their content, and nothing that they name is run."""

from __future__ import annotations

import argparse
import io
import os
import pathlib
import pickle
import tarfile
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from clipstream.errors import SettingsError
from clipstream.models.weights import LEGACY, read_object, read_weights
from tests.support.steps import assert_close

TENSORS = {"visual.a": torch.arange(6.0).view(2, 3), "transformer.b": torch.ones(2, dtype=torch.bfloat16)}
OBJECTS = {
    "numpy": np.float64(1.5),
    "namespace": argparse.Namespace(lr=1, tokens=np.arange(3)),
    "path": pathlib.PurePosixPath("/a"),
    "of": {torch.device("cpu"): [torch.float16, torch.Size([2])], np.int64(3): {1, 2}},
    "class": argparse.Namespace,
}


class Attack:
    """An object whose unpickling writes a file."""

    def __init__(self, call: Any, *args: Any) -> None:
        self.call = call, args

    def __reduce__(self) -> Any:
        return self.call


def same(path: Path) -> None:
    found = read_weights(path)
    assert_close(found, TENSORS, 0)
    assert [found[name].dtype for name in TENSORS] == [tensor.dtype for tensor in TENSORS.values()]


@pytest.mark.parametrize("former", [False, True])
@pytest.mark.parametrize("protocol", [2, 4])
def test_objects_besides_tensors_are_inert(tmp_path: Path, former: bool, protocol: int) -> None:
    mark, path = tmp_path / "ran", tmp_path / "w.safetensors"
    attacks = [Attack(os.system, f"touch '{mark}'"), Attack(eval, f"open({str(mark)!r}, 'w')"), Attack(open, mark, "w")]
    for content in ({**OBJECTS, "state_dict": TENSORS}, {"state_dict": {**TENSORS, "x": attacks}}):
        torch.save(content, path, pickle_protocol=protocol, _use_new_zipfile_serialization=not former)
        same(path)
    assert not mark.exists()


def by_hand(kind: str, command: str) -> bytes:
    """A pickle that runs a command by one of the opcodes that call."""
    line = f"V{command}\n".encode()
    system = f"c{os.system.__module__}\nsystem\n".encode()
    found = {
        "REDUCE": system + b"(" + line + b"tR.",
        "OBJ": b"(" + system + line + b"o.",
        "INST": b"(" + line + f"i{os.system.__module__}\nsystem\n.".encode(),
        "NEWOBJ": b"csubprocess\nPopen\n(" + line + b"K\x00NNNNK\x01\x89\x88t\x81.",
        "BUILD": b"cargparse\nNamespace\n)\x81}X\x0c\x00\x00\x00__setstate__" + system + b"sb" + line + b"b.",
        "PERSID": b"(X\x06\x00\x00\x00module" + system + line + line + b"tQ.",
        "nested": b"(X\x07\x00\x00\x00storage" + system + b"(" + line + b"tR(" + line + b"NK\x01NtQQ.",
    }
    return b"\x80\x02" + found[kind]


@pytest.mark.parametrize("kind", ["REDUCE", "OBJ", "INST", "NEWOBJ", "BUILD", "PERSID", "nested"])
def test_no_opcode_runs_what_it_names(kind: str, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    attack = by_hand(kind, f"touch {mark}")
    if kind in ("REDUCE", "OBJ", "INST"):
        pickle.loads(attack)  # it does run where nothing prevents it
        assert mark.exists()
        mark.unlink()
    with io.BytesIO() as packed, tarfile.open(fileobj=packed, mode="w") as tar:  # torch's format of 2016
        for name in ("storages", "tensors", "pickle"):
            member = tarfile.TarInfo(name)
            member.size = len(attack)
            tar.addfile(member, io.BytesIO(attack))
        tarred = packed.getvalue()
    path = tmp_path / "w.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", attack)
        archive.writestr("archive/constants.pkl", attack)  # as in TorchScript
    former = pickle.dumps(LEGACY, 2) + pickle.dumps(1001, 2) + pickle.dumps({}, 2) + attack + pickle.dumps([], 2)
    for content in (path.read_bytes(), attack, former, tarred):
        path.write_bytes(content)
        with pytest.raises(SettingsError):
            read_weights(path)
        assert not mark.exists()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual = torch.nn.Linear(3, 2)
        self.transformer = torch.nn.Linear(2, 2)
        self.register_buffer("attn_mask", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.transformer(self.visual(x))


def test_whole_models_and_torchscript_are_read_without_their_code(tmp_path: Path) -> None:
    model = Model()
    torch.save(model, tmp_path / "whole.bin")
    torch.jit.trace(model, torch.zeros(1, 3)).save(tmp_path / "script.bin")
    for name in ("whole.bin", "script.bin"):
        assert_close(read_weights(tmp_path / name), model.state_dict(), 0)


@pytest.mark.parametrize("prefix", ["", "module._orig_mod.", "any.other."])
@pytest.mark.parametrize("key", [None, "model", "state_dict", "ema.shadow"])
def test_names_are_found_below_any_prefix(prefix: str, key: str | None, tmp_path: Path) -> None:
    content: Any = {prefix + name: tensor for name, tensor in TENSORS.items()}
    for part in (key or "").split(".")[::-1] if key else ():
        content = {part: content, "epoch": 1, "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}}
    torch.save(content, tmp_path / "w.pt")
    same(tmp_path / "w.pt")
    module = {f"module.{name}": value for name, value in TENSORS.items()}
    torch.save({"ema": TENSORS, "model": module}, tmp_path / "2.pt")
    same(tmp_path / "2.pt")


def test_formats_are_known_by_content(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "named.bin")
    same(tmp_path / "named.bin")
    arrays = {"visual.a": TENSORS["visual.a"].numpy(), "logit_scale": np.asarray(2.5, ">f4")}
    (tmp_path / "arrays.pt").write_bytes(pickle.dumps({"model": arrays}, 4))
    found = read_weights(tmp_path / "arrays.pt")
    assert torch.equal(found["visual.a"], TENSORS["visual.a"]) and found["logit_scale"] == 2.5
    for content, words in (
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
        (b"<!DOCTYPE html><html>404</html>", "an HTML page"),
        (b"", "an empty file"),
        (bytes(99), "neither safetensors nor"),
        (b"image,caption\na.jpg,A frog.\n", "it is a table as CSV or TSV$"),
    ):
        (tmp_path / "w.pt").write_bytes(content)
        with pytest.raises(SettingsError, match=words):
            read_weights(tmp_path / "w.pt")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(SettingsError, match="not a regular file"):
        read_weights(tmp_path / "fifo")


@given(st.data())
@settings(max_examples=60)
def test_damage_is_told(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "w.pt"
    torch.save({"state_dict": TENSORS, **OBJECTS}, path, _use_new_zipfile_serialization=data.draw(st.booleans()))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, min(len(content), 1500) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    try:
        read_weights(path)
    except SettingsError as error:
        assert str(path) in str(error)


def test_memory_does_not_depend_on_damaged_indexes(tmp_path: Path) -> None:
    (tmp_path / "w.pt").write_bytes(b"\x80\x02}r" + (2**24).to_bytes(4, "little") + b".")
    tracemalloc.start()
    try:
        assert read_object(tmp_path / "w.pt") == {}
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def test_a_tensor_is_no_larger_than_its_file(tmp_path: Path) -> None:
    torch.save({"visual.a": torch.zeros(1).expand(10**6, 10**6)}, tmp_path / "w.pt")
    with pytest.raises(ValueError, match="larger than the file"):
        read_object(tmp_path / "w.pt")
