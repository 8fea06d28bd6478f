"""The page on parts of your own: its code and settings run together as they are written."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import sys
from pathlib import Path

import pytest
import yaml

from clipstream.cli.main import main as cli
from clipstream.cli.verbs import train
from tests.support.forks import ROOT
from tests.support.pictures import make_shards, picture

PAGE = ROOT / "docs" / "plugins.md"
MODEL = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 24, "vocab_size": 256, "layers": 1, "width": 32, "heads": 2},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, where we are: the page's files, and shards under the names that it uses."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    section = PAGE.read_text(encoding="utf-8")
    files = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", section, re.DOTALL)
    assert len(files) == 11
    for name, code in files:
        (tmp_path / name).write_text(code)
    for name, _ in files:
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
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
    with contextlib.closing(sqlite3.connect(tmp_path / "pairs.sqlite")) as database, database:
        database.execute("CREATE TABLE pairs (image BLOB, caption TEXT)")
        rows = [(picture(number), f"picture {number} of the database") for number in range(20)]
        database.executemany("INSERT INTO pairs VALUES (?, ?)", rows)
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    return tmp_path


def test_a_run_takes_all_of_the_pages_parts_together(folder: Path) -> None:
    configs = sorted(Path().glob("*.yaml"))
    assert len(configs) == 10
    flags = [word for config in configs for word in ("--config", config.name)]
    sizes = "--model model.json --steps 3 --data.global-batch-size 8 --workers 1 --precision fp32 --log.every 1"
    sizes += " --run.threads 1"
    assert train.main([*flags, *sizes.split(), "--name", "own", "--logs", "runs"]) == 0
    lines = [json.loads(line) for line in Path("runs/own/metrics.jsonl").read_text().splitlines()]
    (evaluation,) = [line for line in lines if line.get("eval") == "pairs"]
    assert evaluation["n"] == 24 and -1 <= evaluation["cosine"] <= 1
    losses = [[line["step"], line["loss"]] for line in lines if "loss" in line]
    table = [line.split("\t") for line in Path("runs/own/losses.tsv").read_text().splitlines()]
    assert [[int(step), float(loss)] for step, loss in table] == losses and len(losses) == 3
    rates = [line["lr"] for line in lines if "lr" in line]
    assert rates == pytest.approx([0.01, 0.01, 0.01 / 1.1**0.5])
    settings = yaml.safe_load(Path("runs/own/config.yaml").read_text())
    assert settings["loss"] == {"type": "my_loss:Margin", "margin": 0.05}
    assert (settings["optim"]["momentum"], settings["schedule"]["timescale"]) == (0.95, 10)
    assert settings["data"]["sources"]["train"]["caption"]["keys"] == ["txt", "alt"]
    read = [line["health"] for line in lines if "health" in line]
    assert read and set(read[-1]) == {"database", "train"}
    assert settings["data"]["sources"]["train"]["image_transform"]["flip"] == 0.25


def test_the_pages_function_for_captions_is_checked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(4):
        (folder / f"{number}.jpg").write_bytes(picture(number))
    rows = ["image,title,category", "0.jpg,red car,cars", "1.jpg,,boats", "2.jpg,blue car,cars", "3.jpg,ship,boats"]
    Path("products.csv").write_text("\n".join([*rows, ""]))
    command = re.search(r"^clipstream (check products.csv .*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert command is not None and cli(command[1].split()) == 0
    told = capsys.readouterr().out
    assert "red car, cars" in told and "returned None" in told
