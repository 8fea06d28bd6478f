"""What benchmarks/lit.py makes for the LiT recipe."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

from PIL import Image

from benchmarks.lit import stamps


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
