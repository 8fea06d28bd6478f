"""Folders and files of transformers' CLIPModel and SiglipModel, read as weights of open_clip's models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize

import clipstream
from clipstream.errors import SettingsError
from clipstream.models.model_config import ModelConfig
from clipstream.models.transformers_names import TEXT, TIMM_IMAGE, renamed
from clipstream.models.weights import read_weights

SIZES = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}


def clip_model(act: str) -> Any:
    torch.manual_seed(0)
    vision = {**SIZES, "image_size": 32, "patch_size": 8, "hidden_act": act}
    text = {**SIZES, "max_position_embeddings": 12, "hidden_act": act}
    config = transformers.CLIPConfig(projection_dim=24, vision_config=vision, text_config=text)
    return transformers.CLIPModel(config).eval()


def features(found: Any) -> torch.Tensor:
    return normalize(getattr(found, "pooler_output", found), dim=-1)


@pytest.mark.parametrize("act", ["gelu", "quick_gelu"])
def test_a_clip_model_gives_its_own_features(act: str, tmp_path: Path) -> None:
    theirs = clip_model(act)
    theirs.save_pretrained(tmp_path)
    model, _, tokenizer = clipstream.load_model(tmp_path, device="cpu")
    ids, pixels = tokenizer(["A cat", "two dogs & a bird", "x" * 99]), torch.randn(5, 3, 32, 32)
    with torch.no_grad():
        image, text = features(theirs.get_image_features(pixels)), features(theirs.get_text_features(ids))
    assert torch.allclose(model.encode_image(pixels), image, atol=1e-6)
    assert torch.allclose(model.encode_text(ids), text, atol=1e-6)
    assert model.logit_scale == pytest.approx(float(theirs.logit_scale.exp()))


def test_names_of_siglip_lead_there_and_back() -> None:
    torch.manual_seed(0)
    vision, text = {**SIZES, "image_size": 32, "patch_size": 8}, {**SIZES, "vocab_size": 64, "pad_token_id": 0}
    text |= {"bos_token_id": 1, "eos_token_id": 2}
    theirs = transformers.SiglipModel(transformers.SiglipConfig(vision_config=vision, text_config=text)).state_dict()
    rows = (*TEXT, *TIMM_IMAGE)
    ours, left = renamed(theirs, rows, reverse=True)
    assert sorted(left) == ["logit_bias", "logit_scale"]
    again, left = renamed(ours, rows)
    assert not left and again.keys() == theirs.keys() - {"logit_bias", "logit_scale"}
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in again.items())


def test_the_configuration_of_a_siglip_folder(tmp_path: Path) -> None:
    text = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    transformers.SiglipConfig(text_config=text).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        '{"size": {"height": 224, "width": 224}, "image_mean": [0.5, 0.5, 0.5], "resample": 2}'
    )
    found = ModelConfig.beside(tmp_path)
    assert found.model_cfg["vision_cfg"]["timm_model_name"] == "vit_base_patch16_siglip_224"
    assert found.preprocess_cfg == {"mean": [0.5, 0.5, 0.5], "interpolation": "bilinear", "resize_mode": "squash"}
    other = "is no configuration of an image processor"
    for damaged, said in (
        ("{", other),
        ("[]", other),
        ('{"resample": 1}', "open_clip has no filter for resample 1"),
        ('{"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}}', "does not crop images"),
    ):
        (tmp_path / "preprocessor_config.json").write_text(damaged)
        with pytest.raises(SettingsError, match=said):
            ModelConfig.beside(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    transformers.SiglipConfig(vision_config={"hidden_size": 32, "num_attention_heads": 2}).save_pretrained(tmp_path)
    with pytest.raises(SettingsError, match="timm has no SigLIP image tower of width 32, 12 layers"):
        ModelConfig.beside(tmp_path)


def test_other_models_of_transformers_are_refused(tmp_path: Path) -> None:
    clip_model("gelu").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "multi_modal_projector.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(SettingsError, match=r"not those of a CLIPModel or SiglipModel \(multi_modal"):
        read_weights(tmp_path / "model.safetensors")
