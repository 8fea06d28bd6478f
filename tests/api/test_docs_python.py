"""The Python blocks of docs/python.md run in their order, in a folder like their reader's; its script under torchrun."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import model_files
from tests.support.examples import furnish_reader
from tests.support.ranks import ROOT, TIMEOUT


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
    assert len(blocks) == 6 and names["run"].status == "done" and names["figures"]["val"]["n"] == 16
    assert names["best"] in names["pictures"] and names["state"]["data"]["step"] == 8


def test_the_script_runs_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish_reader(tmp_path)
    monkeypatch.chdir(tmp_path)
    (script,) = re.findall(
        r"```python\n# script.py\n(.*?)```", (ROOT / "docs/python.md").read_text(encoding="utf-8"), re.S
    )
    # The run is whole on every rank, also where the last file takes rank 0 a while.
    sink = "import time, pathlib\nclass Late:\n    def __init__(self, *_): pass\n    def write(self, _): pass\n"
    sink += "    def show(self, *_): pass\n    def status(self, _): pass\n"
    sink += "    def close(self): time.sleep(1); pathlib.Path('late').touch()\n"
    (tmp_path / "late_sink.py").write_text(sink)
    with (tmp_path / "my.yaml").open("a") as file:
        file.write("log: {every: 1, tensorboard: false, sinks: {late: {type: 'late_sink:Late'}}}\n")
    checks = "import pathlib\nassert run == clipstream.Run.open('runs/ranks') or run.folder.samefile('runs/ranks')\n"
    checks += "assert pathlib.Path('late').exists() and (run.status, run.step) == ('done', 6), run.status\n"
    checks += "print('rank', os.environ['RANK'], run.latest.name)\n"
    (tmp_path / "script.py").write_text(script + checks)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "script.py")]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launch], env=env, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"done 6 16", *(f"rank {rank} step_00000006" for rank in (0, 1))} <= set(done.stdout.splitlines())
    assert "batch    8 on 2 x cpu" in done.stdout
