"""The Python blocks of docs/python.md run in their order, in a folder like their reader's."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support import model_files
from tests.support.examples import furnish_reader
from tests.support.ranks import ROOT


def test_the_blocks_run_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish_reader(tmp_path)
    model_files.build(str(tmp_path / "model.json")).save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(encoding="utf-8"), re.S)
    names: dict[str, Any] = {}
    for block in blocks:
        imported = re.match(r"import (accelerate|lightning)$", block, re.M)
        if imported is None or importlib.util.find_spec(imported[1]):
            exec(block, names)
    assert len(blocks) == 5 and names["run"].status == "done" and names["figures"]["val"]["n"] == 16
    assert names["best"] in names["pictures"] and names["state"]["data"]["step"] == 8
