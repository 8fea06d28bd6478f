"""The commands of docs/ run in their order as they are written, in a folder like their reader's, with a small model."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from clipstream import export, precompute, search, train
from tests.support import hubtree, model_files
from tests.support.evaluating import CONFIG
from tests.support.pictures import make_shards, picture
from tests.support.ranks import ROOT
from tests.support.tars import write_tar

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


@pytest.fixture(scope="module")
def towers_and_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the page on LiT calls DIR and MADE: small shards, and small random towers."""
    from transformers import BertConfig, BertModel

    made = tmp_path_factory.mktemp("made")
    texts = json.dumps({"caption": {"en": "a dog", "alt": ["a hound"]}, "texts": {"en": "a dog"}})
    for name, shards in (("emoji-train", 9), ("emoji-val", 5), ("stamps", 8)):
        for shard in range(shards):
            sample = {
                "__key__": "0",
                "png": picture(shard, kind="PNG"),
                "json": texts,
                "cls": str(shard % 3),
                "txt": "a",
            }
            write_tar(made / name / f"{shard:05d}.tar", [sample])
    save_file(timm.create_model("test_efficientnet").state_dict(), made / "lite0.safetensors")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(**sizes, vocab_size=64, pad_token_id=1)).save_pretrained(made / "minilm")
    hubtree.write_tokenizer(made / "minilm")
    model = json.loads((ROOT / "configs/models/lite0-minilm.json").read_text())
    model["model_cfg"]["vision_cfg"]["timm_model_name"] = "test_efficientnet"
    model["model_cfg"]["embed_dim"] = 256
    (made / "model.json").write_text(json.dumps(model))
    return made


def test_the_page_on_lit(towers_and_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(ROOT / "configs")
    own = ["--model", str(towers_and_data / "model.json")]
    more = "--warmup 0 --log.every 1 --precision fp32 --steps 2".split()  # noqa: SIM905
    for words in commands("lit.md"):
        verb = words[2].rpartition(".")[2]
        flags = [re.sub("^(DIR|MADE)/", f"{towers_and_data}/", word) for word in words[3:]]
        flags = [word.replace("step_00000150", "step_00000002") for word in flags]
        flags += ["--data.global-batch-size", "8", "--workers", "1", *([] if "--model" in flags else own)]
        assert MAINS[verb]([*flags, *(more if verb == "train" else [])]) == 0, words
    saved = [load_file(f"runs/{run}/checkpoints/step_00000002/open_clip_model.safetensors") for run in ("lit", "both")]
    start, image = load_file(towers_and_data / "lite0.safetensors"), "conv_stem.weight"
    assert torch.equal(saved[0][f"visual.trunk.{image}"], start[image])
    assert not torch.equal(saved[1][f"visual.trunk.{image}"], start[image])


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            assert "://" in target or (page.parent / target).exists(), (page.name, target)
