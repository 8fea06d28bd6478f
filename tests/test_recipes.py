"""The recipes in configs/: the command in each file's head runs as it is written and reaches the stated results."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from clipstream.cli.verbs.train import main
from clipstream.data.sources import toy_data

ROOT = Path(__file__).parents[1]
EMOJI = ROOT.parent / "shared/data"
# That of lit.yaml is on the page on LiT: tests/test_docs.py.
RECIPES = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml") if path.stem != "lit")


def command(name: str) -> list[str]:
    """The flags of the command in a recipe's head, for data that are here."""
    head = (ROOT / f"configs/{name}.yaml").read_text()
    found = re.search(r"^#\s+(?:python -m clipstream\.|clipstream )train (.*)$", head, re.M)
    assert found is not None
    if "DIR/" in found[1] and not EMOJI.is_dir():
        pytest.skip("the recipe's data are not here")
    return shlex.split(found[1].replace("DIR/", f"{EMOJI}/"))


def metrics(folder: Path) -> dict[str, dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {record["eval"]: record for record in records if "eval" in record}


@pytest.fixture
def small_scenes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Scenes of a few shards, in a cache folder of the test's own."""
    monkeypatch.setenv("CLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(toy_data, "SHARD_SAMPLES", 40)
    monkeypatch.setattr(toy_data, "SHARDS", {"train": 2, "heldout": 1, "gallery": 1})
    toy_data.gallery_scenes.cache_clear()
    yield
    toy_data.gallery_scenes.cache_clear()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "emoji" else []) for name in RECIPES]
)
def test_the_command_in_its_head_runs(
    name: str, small_scenes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    less = ["--steps", "2", "--warmup", "0", "--data.global-batch-size", "48", "--log.every", "1"]
    less += ["--run.threads", "1"]
    less += ["--evals.val.max-samples", "64"] if name == "emoji" else []
    assert main([*command(name), *less, "--logs", str(tmp_path), "--name", name]) == 0
    evaluations = metrics(tmp_path / name)
    assert evaluations and all(record["n"] > 0 for record in evaluations.values())


@pytest.mark.slow
def test_quickstart_reaches_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert main([*command("quickstart"), "--logs", str(tmp_path), "--name", "run"]) == 0
    found = metrics(tmp_path / "run")
    assert found["heldout"]["top1"] >= 0.75 and found["heldout"]["chance"] <= 1 / 12
    assert found["gallery"]["n"] == 1000
    assert min(found["gallery"][f"{way}_R@1"] for way in ("image_to_text", "text_to_image")) >= 30 / 1000


@pytest.mark.slow
def test_emoji_reaches_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert main([*command("emoji"), "--logs", str(tmp_path), "--name", "run"]) == 0
    found = metrics(tmp_path / "run")["val"]
    assert found["n"] == 1852
    assert min(found[f"{way}_R@1"] for way in ("image_to_text", "text_to_image")) >= 0.08
