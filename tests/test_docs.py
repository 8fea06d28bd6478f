"""The commands of docs/ run in their order as they are written, in a folder like their reader's, with a small model."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from clipstream import export, precompute, search, train
from tests.support import model_files
from tests.support.evaluating import CONFIG
from tests.support.pictures import make_shards
from tests.support.ranks import ROOT

MAINS: dict[str, Callable[[list[str]], int]] = {
    "export": export.main,
    "precompute": precompute.main,
    "search": search.main,
    "train": train.main,
}
# In place of models that are not here.
MODELS = {"ViT-B-32": "model.json", "openai": "local-dir:model", "large=ViT-L-14,openai": "large=local-dir:model"}
TEACHER = {"ViT-L-14": "local-dir:model"}


def commands(page: str) -> list[list[str]]:
    """The indented command lines of a page, in its order, as words."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").replace("\\\n        ", "")
    return [shlex.split(line) for line in re.findall(r"^    (python -m clipstream\..*)$", text, re.M)]


def small(words: list[str]) -> list[str]:
    """The command's flags with a small model and two shards."""
    verb = words[2].rpartition(".")[2]
    flags = [TEACHER.get(word, MODELS.get(word, word)).replace("00099", "00001") for word in words[3:]]
    if "--distill-model" in flags:
        at = flags.index("--distill-pretrained")
        del flags[at : at + 2]
    if verb == "precompute":
        flags += ["--workers", "1", "--batch-size", "8"]
    if verb == "train":
        flags[flags.index("--steps") + 1] = "2"
        flags += "--warmup 1 --batch-size 8 --workers 1 --log.every 1 --precision fp32".split()  # noqa: SIM905
    return flags


@pytest.mark.parametrize("page", ["features.md"])
def test_the_commands_run_in_their_order(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_shards(tmp_path / "shards", [9, 8])
    text = {**CONFIG["text_cfg"], "vocab_size": 49408}  # type: ignore[dict-item]
    (tmp_path / "model.json").write_text(json.dumps({**CONFIG, "text_cfg": text}))
    model_files.build(str(tmp_path / "model.json")).save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    run = commands(page)
    assert {words[2].rpartition(".")[2] for words in run} == set(MAINS)
    for words in run:
        assert MAINS[words[2].rpartition(".")[2]](small(words)) == 0, words
    assert Path("kept.txt").read_text() and list(Path("out").rglob("*.parquet"))


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            assert "://" in target or (page.parent / target).exists(), (page.name, target)
