"""Finding a model's files in a Hub cache that the test writes, offline; `test_hub` covers the network."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from clipstream.checkpoint.store import resolve_model_name
from clipstream.errors import SettingsError
from clipstream.models.build import build_towers
from clipstream.models.pretrained import ModelFiles, look_up, preflight
from clipstream.models.settings import ModelSettings
from tests.support import hubtree
from tests.support.commands import run_code


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    hubtree.build(folder)
    return folder


def found(tokenizer: Any = None, **settings: Any) -> ModelFiles:
    files = look_up(ModelSettings.model_validate(settings), tokenizer)
    assert isinstance(files, ModelFiles), files
    return files


PREFLIGHT = """
import sys
from clipstream.errors import SettingsError
from clipstream.models.pretrained import preflight
from clipstream.models.settings import ModelSettings
try:
    preflight(ModelSettings(name="ViT-B-16-SigLIP", pretrained="webli"))
except SettingsError as error:
    print(error)
assert "torch" not in sys.modules
"""


def test_missing_files_are_listed_before_torch_is_imported(tmp_path: Path) -> None:
    out = run_code(PREFLIGHT, HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(tmp_path))
    assert "HF_HUB_OFFLINE" in out and f"looked in:  {tmp_path}/models--timm--ViT-B-16-SigLIP" in out
    files = "open_clip_model.safetensors tokenizer.json tokenizer_config.json"
    assert f"hf download timm/ViT-B-16-SigLIP {files}\n" in out
    with socket.socket() as deaf:  # a Hub that does not answer is asked once, for a limited time
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        deaf.setblocking(False)
        out = run_code(PREFLIGHT, HF_ENDPOINT=f"http://127.0.0.1:{deaf.getsockname()[1]}", HF_HUB_CACHE=str(tmp_path))
        deaf.accept()[0].close()
        with pytest.raises(BlockingIOError):
            deaf.accept()
    assert "repository: timm/ViT-B-16-SigLIP" in out


def test_no_network_is_used_where_nothing_is_missing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **more: pytest.fail(f"{given[0]} is asked"))
    preflight(ModelSettings(name="ViT-B-32"))
    for name, tag in ((str(hubtree.write_named_config(tmp_path)), "webli"), (f"hf-hub:{hubtree.REPO}", None)):
        settings = ModelSettings(name=name, pretrained=tag, cache_dir=str(cache))
        preflight(settings)
        towers = build_towers(settings, seed=0)
        assert towers.open_clip_tokenizer()(["A photo, of a DOG!"])[0, :6].tolist() == [4, 5, 6, 4, 14, 1]
        assert towers.image.resize_mode == "squash" and towers.mean.flatten().tolist() == [0.5] * 3
        assert towers.loss_type == "siglip"
        scalars = [towers.clip.logit_bias.item(), towers.clip.logit_scale.item()]
        assert scalars == pytest.approx([hubtree.LOGIT_BIAS, hubtree.LOGIT_SCALE])


def test_wrong_names_and_tokenizers_are_errors(cache: Path, tmp_path: Path) -> None:
    class Tokens:
        type, context_length, name = "path", None, str(tmp_path)

    for given, words in (
        ({"name": "ViT-B-16-SigLlP"}, "did you mean 'ViT-B-16-SigLIP'"),
        ({"name": "nowhere/model.json"}, "there is no model configuration"),
        ({"name": "local-dir:nowhere"}, "there is no model configuration"),
        ({"name": "ViT-B-16-SigLIP", "pretrained": "weblj"}, r"tags of ViT-B-16-SigLIP: webli.*did you mean 'webli'\?"),
        ({"name": "ViT-M-16", "pretrained": "openai"}, "ViT-M-16 has no tags"),
        ({"name": "ViT-B-32", "pretrained": "tests"}, "neither a tag nor a file"),
        ({"name": "hf-hub:not a repository"}, "not a repository"),
        ({"name": "hf-hub:"}, "not a repository"),
    ):
        with pytest.raises(SettingsError, match=words):
            preflight(ModelSettings.model_validate(given))
    with pytest.raises(SettingsError, match=r"distill\.model: RN50 has no weights"):
        preflight(ModelSettings(), teacher=ModelSettings(name="RN50"))
    hubtree.write_tokenizer(tmp_path)
    chosen = {"name": f"hf-hub:{hubtree.REPO}", "cache_dir": str(cache)}
    with pytest.raises(SettingsError, match="allow_mismatch"):
        preflight(ModelSettings.model_validate(chosen), Tokens())
    source = found(Tokens(), **chosen, allow_mismatch=True)
    assert source.tokenizer == tmp_path and "tokenizer_kwargs" not in source.model_cfg["text_cfg"]
    Tokens.type, Tokens.name = "hub", hubtree.REPO
    preflight(ModelSettings.model_validate(chosen), Tokens())


def test_a_tag_brings_its_activation_and_a_users_preprocessing_stays(cache: Path, tmp_path: Path) -> None:
    config = hubtree.tiny_config()
    config["preprocess_cfg"] = {"resize_mode": "longest"}
    path = tmp_path / "ViT-B-16-SigLIP.json"
    path.write_text(json.dumps(config))
    source = found(name=str(path), pretrained="webli", cache_dir=str(cache))
    assert source.preprocess_cfg["resize_mode"] == "longest" and source.preprocess_cfg["mean"] == (0.5, 0.5, 0.5)
    # Weights that come with a configuration of their own bring their activation and tokenizer, wherever they lie.
    saved = tmp_path / "saved"
    saved.mkdir()
    own = {**hubtree.tiny_config()["model_cfg"], "quick_gelu": True}
    own["text_cfg"] = {**own["text_cfg"], "hf_tokenizer_name": "tokenizer"}
    preprocess = {"mean": [0.1, 0.2, 0.3], "resize_mode": "squash"}
    (saved / "open_clip_config.json").write_text(json.dumps({"model_cfg": own, "preprocess_cfg": preprocess}))
    (saved / "open_clip_model.safetensors").write_bytes(b"")
    hubtree.write_tokenizer(saved)
    for pretrained in (f"local-dir:{saved}", str(saved), str(saved / "open_clip_model.safetensors")):
        files = found(name="ViT-B-32", pretrained=resolve_model_name(pretrained))
        assert files.model_cfg["quick_gelu"] and files.tokenizer == saved
        assert files.preprocess_cfg["mean"] == [0.1, 0.2, 0.3] and files.preprocess_cfg["resize_mode"] == "squash"
    assert found(name=resolve_model_name(str(saved))) == found(name=f"local-dir:{saved}")
    missing = look_up(ModelSettings(name="ViT-B-32", pretrained="openai", cache_dir=str(tmp_path)))
    assert isinstance(missing, dict) and list(missing) == ["timm/vit_base_patch32_clip_224.openai"]


@pytest.mark.parametrize("text", ["runs/frist", "run/first"])
def test_a_mistyped_folder_is_not_looked_for_on_the_hub(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs/first").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=f"{text} does not exist; did you mean 'runs/first'"):
        resolve_model_name(text)
    assert resolve_model_name("timm/ViT-B-16-SigLIP") == "hf-hub:timm/ViT-B-16-SigLIP"
