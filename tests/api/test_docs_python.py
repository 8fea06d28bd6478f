"""The Python blocks of docs/python.md and README run in their order; the script of docs/python.md, by torchrun."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import pytest

import clipstream
from tests.support import model_files
from tests.support.examples import furnish_reader
from tests.support.forks import ROOT, run_fork
from tests.support.pictures import picture


def test_the_blocks_run_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish_reader(tmp_path)
    model_files.build(str(tmp_path / "model.json")).save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(encoding="utf-8"), re.S)
    names: dict[str, Any] = {}
    for block in blocks:
        if block.startswith("# script.py"):
            continue
        imported = re.match(r"import (accelerate|lightning)$", block, re.M)
        if imported is None or importlib.util.find_spec(imported[1]):
            exec(block, names)
    assert len(blocks) == 9 and names["run"].status == "done" and names["figures"]["val"]["n"] == 16
    assert names["best"] in ("cat.jpg", "dog.jpg") and names["state"]["data"]["data"]["step"] == 8


def test_the_block_of_the_readme_trains_the_model_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = furnish_reader(tmp_path)
    for number in range(16):
        (folder / "photos").mkdir(exist_ok=True)
        (folder / "photos" / f"{number}.jpg").write_bytes(picture(number))
        (folder / "photos" / f"{number}.txt").write_text(f"a photo of {number}")
    monkeypatch.chdir(folder)
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    small = {
        '"ViT-B-32", pretrained="openai"': '"model.json", steps=2, workers=1, device="cpu"',
        "size=64": "size=8, workers=1",
        "=1000": "=16",
    }
    for word, other in small.items():
        assert word in block
        block = block.replace(word, other)
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["scores"].shape == (2, 2) and names["loss"].requires_grad and names["clip"].training
    saved = clipstream.load_model(names["run"], device="cpu")[0].clip.state_dict()
    assert any((saved[name] != value).any() for name, value in names["clip"].state_dict().items()), "it has trained"


CHECKS = """
assert (run.status, run.step) == ("done", 6), run.status
print("rank", os.environ["RANK"], run.latest.name)
"""


@pytest.mark.ci
def test_the_script_runs_under_torchrun(tmp_path: Path) -> None:
    furnish_reader(tmp_path)
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n# script.py\n(.*?)```", page, re.S)
    (tmp_path / "script.py").write_text(script + CHECKS)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "OMP_NUM_THREADS": "1"}
    said = run_fork(*command, cwd=tmp_path, env=env).splitlines()
    assert {"done 6 16", "rank 0 step_00000006", "rank 1 step_00000006"} <= {*said}, said
    assert any(line.startswith("batch    8 on 2 x cpu") for line in said), said
