"""README's parts of one's own: the code and settings that stand there are run as they stand."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.pictures import make_shards
from tests.ranks import TIMEOUT

README = Path(__file__).parents[1] / "README.md"
MODEL = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 24, "vocab_size": 256, "layers": 1, "width": 32, "heads": 2},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder: README's files, and shards under the names that README uses."""
    section = README.read_text(encoding="utf-8").partition("## Parts of your own")[2].partition("\n## ")[0]
    files = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", section, re.DOTALL)
    assert len(files) == 6
    for name, code in files:
        (tmp_path / name).write_text(code)
    for number, config in enumerate(re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)):
        (tmp_path / f"{number}.yaml").write_text(config)
    make_shards(tmp_path / "made", [6] * 4, alt="a longer text about the picture")
    (tmp_path / "val").mkdir()
    (tmp_path / "shards").mkdir()
    for number in range(4):
        shard = tmp_path / "made" / f"{number:05d}.tar"
        (tmp_path / "val" / f"{number:02d}.tar").write_bytes(shard.read_bytes())
    for number in range(100):
        (tmp_path / "shards" / f"{number:05d}.tar").symlink_to(tmp_path / "made" / f"{number % 4:05d}.tar")
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    return tmp_path


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(README.parent), str(folder)])}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_the_checks_pass_on_readmes_parts(folder: Path) -> None:
    run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_parts.py")


def test_a_run_takes_all_of_readmes_parts_together(folder: Path) -> None:
    configs = sorted(folder.glob("*.yaml"))
    assert len(configs) == 5
    flags = [word for config in configs for word in ("--config", config.name)]
    sizes = "--model model.json --steps 3 --data.global-batch-size 8 --workers 1 --precision fp32 --log.every 1"
    run(folder, "-m", "clipstream.train", *flags, *sizes.split(), "--name", "own", "--logs", "runs")
    lines = [json.loads(line) for line in (folder / "runs" / "own" / "metrics.jsonl").read_text().splitlines()]
    (evaluation,) = [line for line in lines if line.get("eval") == "pairs"]
    assert evaluation["n"] == 24 and -1 <= evaluation["cosine"] <= 1
    settings = yaml.safe_load((folder / "runs" / "own" / "config.yaml").read_text())
    assert settings["loss"] == {"type": "my_loss:Margin", "margin": 0.05}
    assert settings["data"]["sources"]["train"]["caption"]["keys"] == ["txt", "alt"]
