"""What benchmarks/lit.py makes for the LiT recipe."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import timm
import torch
from PIL import Image

from benchmarks.lit import ARCHITECTURE, stamps, timm_names


def test_stamps_have_their_captions_by_language(tmp_path: Path) -> None:
    for name, text in (("yak", "A yak.\nde.utf8=Ein Yak.\npt_BR.utf8= Um iaque. \nfr.utf8=\n"), ("gnu", "A gnu.")):
        Image.new("RGBA", (600, 300)).save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text(text)
    Image.new("RGB", (3, 3)).save(tmp_path / "silent.png")
    assert stamps(tmp_path, tmp_path / "out") == 2
    with tarfile.open(tmp_path / "out/00000.tar") as tar:
        files = {name: tar.extractfile(name) for name in tar.getnames()}
        found = {name: json.load(file) for name, file in files.items() if file is not None and name.endswith("json")}
    assert [about["texts"] for about in found.values()] == [
        {"en": "A gnu."},
        {"en": "A yak.", "de": "Ein Yak.", "pt_BR": "Um iaque."},
    ]


def test_every_tensor_gets_timms_name() -> None:
    """The package numbers batch norms from 0 in a block that expands, and from 1 in one that does not."""
    own = timm.create_model(ARCHITECTURE).state_dict()
    stages = sorted({tuple(map(int, name.split(".")[1:3])) for name in own if name.startswith("blocks.")})
    theirs: dict[str, torch.Tensor] = {}
    for name, tensor in own.items():
        if not name.startswith("blocks."):
            stem = {"bn1": "_bn0", "bn2": "_bn1", "classifier": "_fc"}
            kind, _, leaf = name.partition(".")
            theirs[f"{stem.get(kind, '_' + kind)}.{leaf}"] = tensor
            continue
        _, stage, block, layer, leaf = name.split(".")
        expands = int(stage) > 0
        renamed = {"conv_pw": "_expand_conv" if expands else "_project_conv", "conv_dw": "_depthwise_conv",
                   "conv_pwl": "_project_conv", **{f"bn{n}": f"_bn{n - expands}" for n in (1, 2, 3)}}  # fmt: skip
        theirs[f"_blocks.{stages.index((int(stage), int(block)))}.{renamed[layer]}.{leaf}"] = tensor
    found = timm_names(theirs)
    assert found.keys() == own.keys() and all(torch.equal(found[name], own[name]) for name in own)
