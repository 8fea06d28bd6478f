"""Folders and files of transformers' CLIPModel and SiglipModel, read as weights of open_clip's models.

The reference is the model of transformers that wrote the folder.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn.functional import normalize

import clipstream
from clipstream.errors import SettingsError
from clipstream.export.files import write_tokenizer, write_transformers
from clipstream.models.model_config import ModelConfig
from clipstream.models.transformers_names import TEXT, TIMM_IMAGE, rename_tensors
from clipstream.models.weights import read_weights
from tests.support.model_files import SIZES, build, clip_model, lively, write

WORDS = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "a": 4, "cat": 5, "dog": 6, "red": 7, "two": 8, "zebra": 9}
TEXTS = ["a red cat", "two", "a zebra zebra dog"]
PIXELS = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def siglip_model(text: Any = (), vision: Any = ()) -> Any:
    torch.manual_seed(0)
    sections = {
        "vision_config": {**SIZES, "image_size": 32, "patch_size": 8, **dict(vision)},
        "text_config": {**SIZES, "vocab_size": 64, "max_position_embeddings": 12, **dict(text)},
    }
    sections["text_config"] |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = lively(transformers.SiglipModel(transformers.SiglipConfig(**sections)))
    with torch.no_grad():
        model.logit_scale.fill_(2.0), model.logit_bias.fill_(-7.0)
    return model


def write_words(folder: Path, words: dict[str, int], *, first: str | None = "<s>") -> None:
    """A tokenizer of whole words, with `<s>` in front if `first`, and `</s>` at the end."""
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [(name, words[name]) for name in ("<s>", "</s>") if name in words]
    backend.post_processor = processors.TemplateProcessing(single=f"{first or ''} $A </s>".strip(), special_tokens=ends)
    named = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **named).save_pretrained(folder)


def features(found: Any) -> torch.Tensor:
    return normalize(getattr(found, "pooler_output", found), dim=-1)


def assert_equal(folder: Path, theirs: Any, texts: list[str] = TEXTS, atol: float = 1e-5) -> Any:
    """Assert that a folder gives the features of a model of transformers, and so does the model saved again."""
    found = clipstream.load_model(folder, device="cpu")[0]
    for _ in range(2):
        model, _, tokenizer = clipstream.load_model(folder, device="cpu")
        ids = tokenizer(texts)
        with torch.no_grad():
            image, text = features(theirs.get_image_features(PIXELS)), features(theirs.get_text_features(ids))
        torch.testing.assert_close(model.encode_image(PIXELS), image, atol=atol, rtol=0)
        torch.testing.assert_close(model.encode_text(ids), text, atol=atol, rtol=0)
        assert model.logit_scale == pytest.approx(float(theirs.logit_scale.detach().exp()), rel=1e-3)
        again = folder.parent / f"{folder.name}-again"
        build(f"local-dir:{folder}").save_pretrained(again)
        folder = again
    return found


@pytest.mark.parametrize("act", ["gelu", "quick_gelu"])
def test_a_clip_model_gives_its_own_features(act: str, tmp_path: Path) -> None:
    theirs = clip_model(act)
    theirs.save_pretrained(tmp_path / "clip")
    assert_equal(tmp_path / "clip", theirs, ["A cat", "two dogs & a bird", "x" * 99])


def test_clip_models_of_other_sizes(tmp_path: Path) -> None:
    """Other heads, epsilons and widths whose ratio is rounded; transformers 4 also wrote `text_config_dict`."""
    odd = {"hidden_size": 30, "intermediate_size": 41, "num_attention_heads": 3, "layer_norm_eps": 0.1}
    theirs = clip_model(text={**odd, "num_hidden_layers": 3}, vision={**odd, "image_size": 32, "patch_size": 16})
    theirs.save_pretrained(tmp_path / "clip")
    path = tmp_path / "clip" / "config.json"
    config = json.loads(path.read_text())
    config |= {"text_config_dict": config["text_config"], "text_config": {"vocab_size": 49408, "hidden_size": 8}}
    path.write_text(json.dumps(config))
    assert_equal(tmp_path / "clip", theirs)


OWN = {name: place for place, name in enumerate(("</s>", "<pad>", "<s>", *[w for w in WORDS if w[0] != "<"], "<unk>"))}


@pytest.mark.parametrize(
    ("eos", "words"),
    [
        pytest.param(WORDS["</s>"], WORDS, id="2, the largest id"),
        pytest.param(OWN["</s>"], OWN, id="0, the first of its places"),
        pytest.param(8, {**WORDS, "</s>": 8, "two": 2}, id="within the words"),
        pytest.param(9, {**WORDS, "</s>": 9, "zebra": 2}, id="the last word"),
        pytest.param(9, WORDS, id="the last word, which a text may lack"),
        pytest.param(49407, {**WORDS, "</s>": 8, "two": 2}, id="the default, which no text has: the first place"),
    ],
)
def test_a_text_has_its_feature_at_the_end_of_text_token(eos: int, words: dict[str, int], tmp_path: Path) -> None:
    """transformers 5.24, `CLIPTextModel`: at the first `eos_token_id`, but at the largest id where that is 2.

    Where an own vocabulary has larger ids than that of the end of a text, the largest id is another word.
    """
    theirs = clip_model(text={"vocab_size": len(words), "pad_token_id": 0, "eos_token_id": eos, "bos_token_id": 1})
    theirs.save_pretrained(tmp_path / "clip")
    write_words(tmp_path / "clip", words)
    assert_equal(tmp_path / "clip", theirs)
    out = tmp_path / "out"
    if eos != 49407:  # which is no id of these words, and is exported as the largest id
        write_transformers(build(f"local-dir:{tmp_path / 'clip'}"), out)
        assert_equal(out, theirs)


def test_words_that_were_added_to_those_of_clip(tmp_path: Path) -> None:
    """`tokenizer.add_tokens`: the new words have larger ids than the end of a text."""
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(clip_words(tmp_path / "words"))
    assert tokenizer.add_tokens(["zyzzyva", "qwop"]) == 2
    ids = {"eos_token_id": 49407, "bos_token_id": 49406, "pad_token_id": 49407}
    theirs = clip_model(text={**ids, "vocab_size": len(tokenizer)})
    theirs.save_pretrained(tmp_path / "clip")
    tokenizer.save_pretrained(tmp_path / "clip")
    texts = ["a zyzzyva", "qwop", "a cat"]
    model = assert_equal(tmp_path / "clip", theirs, texts)
    found = torch.tensor(tokenizer(texts, padding="max_length", max_length=12)["input_ids"])
    torch.testing.assert_close(model.encode_text(texts), model.encode_text(found))


def clip_words(folder: Path) -> Path:
    """A folder with CLIP's own vocabulary as transformers has it."""
    folder.mkdir()
    write_tokenizer(build(write(folder.parent)), folder)
    return folder


def test_a_vocabulary_of_the_size_of_clips_is_looked_at(tmp_path: Path) -> None:
    """49,408 other words, whose tokenizer lies beside the configuration."""
    words = {**WORDS, **{f"word{place}": place for place in range(len(WORDS), 49408)}}
    theirs = clip_model(text={"eos_token_id": 2, "pad_token_id": 0})
    for name, vocabulary in (("other", words), ("clip", None)):
        theirs.save_pretrained(tmp_path / name)
        if vocabulary is None:
            shutil.copytree(clip_words(tmp_path / "words"), tmp_path / name, dirs_exist_ok=True)
        else:
            write_words(tmp_path / name, vocabulary)
        ids = clipstream.load_model(tmp_path / name, device="cpu")[2](["a red cat"])[0]
        assert ids[:5].tolist() == ([1, 4, 7, 5, 2] if name == "other" else [49406, 320, 736, 2368, 49407])


def test_no_end_of_text(tmp_path: Path) -> None:
    clip_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["eos_token_id"] = [49407]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SettingsError, match=r"text_config.eos_token_id \[49407\] is not an id"):
        ModelConfig.beside(tmp_path)


@pytest.mark.parametrize(
    ("text", "vision"),
    [
        ({}, {}),
        ({"num_attention_heads": 4, "layer_norm_eps": 0.1}, {"num_attention_heads": 8, "layer_norm_eps": 0.25}),
        ({"layer_norm_eps": 1e-5, "hidden_act": "gelu"}, {"layer_norm_eps": 2.5e-05, "hidden_act": "quick_gelu"}),
        (
            {"hidden_act": "quick_gelu", "hidden_size": 24, "projection_size": 32},
            {"hidden_act": "gelu", "patch_size": 16},
        ),
        ({"intermediate_size": 41}, {"intermediate_size": 47, "num_hidden_layers": 3}),
    ],
)
def test_a_siglip_model_gives_its_own_features(text: dict[str, Any], vision: dict[str, Any], tmp_path: Path) -> None:
    """Also the model that is exported again.

    open_clip 3.3, `convert_to_custom_text_state_dict` looks for `text_projection`, where SigLIP has
    `text_projection.weight`: it leaves SigLIP's text tower as it is.
    """
    theirs = siglip_model(text, vision)
    theirs.save_pretrained(tmp_path / "siglip")
    write_words(tmp_path / "siglip", WORDS, first=None)
    model = assert_equal(tmp_path / "siglip", theirs)
    assert model.logit_bias == -7
    write_transformers(build(f"local-dir:{tmp_path / 'siglip'}"), tmp_path / "out")
    assert_equal(tmp_path / "out", theirs)


def test_the_tokenizer_of_a_siglip_folder_is_its_own(tmp_path: Path) -> None:
    """transformers 5.24: SigLIP's tokenizer drops punctuation itself, SigLIP 2's and others keep it."""
    words = {**WORDS, ",": 10, "!": 11, "-": 12, "Two": 13}
    theirs = siglip_model()
    theirs.save_pretrained(tmp_path)
    write_words(tmp_path, words)
    own = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = ["Two, dogs!", "a red-cat", "two"]
    found = own(texts, padding="max_length", max_length=12, return_tensors="pt")["input_ids"]
    assert torch.equal(clipstream.load_model(tmp_path, device="cpu")[2](texts), found.to(torch.int64))


def test_an_image_tower_of_another_size(tmp_path: Path) -> None:
    """Of a shape that timm has no name for, resized."""
    siglip_model().save_pretrained(tmp_path)
    write_words(tmp_path, WORDS, first=None)
    towers = build(f"local-dir:{tmp_path}", image_size=48)
    assert towers.image.size == (48, 48) and towers.clip.visual.trunk.pos_embed.shape[1] == 36
    assert towers.encode_image(torch.zeros(1, 3, 48, 48, dtype=torch.uint8)).shape == (1, 32)


def test_names_of_siglip_lead_there_and_back() -> None:
    theirs = siglip_model().state_dict()
    rows = (*TEXT, *TIMM_IMAGE)
    ours, left = rename_tensors(theirs, rows, reverse=True)
    assert sorted(left) == ["logit_bias", "logit_scale"]
    again, left = rename_tensors(ours, rows)
    assert not left and again.keys() == theirs.keys() - {"logit_bias", "logit_scale"}
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in again.items())


def test_the_configuration_of_a_siglip_folder(tmp_path: Path) -> None:
    """timm's name where it has the tower; a SigLIP without an image processor has the default one of its class."""

    def saved(text: Any = (), vision: Any = ()) -> Any:
        own = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **dict(text)}
        transformers.SiglipConfig(text_config=own, vision_config=dict(vision)).save_pretrained(tmp_path)
        return ModelConfig.beside(tmp_path)

    found = saved()
    assert found.model_cfg["vision_cfg"]["timm_model_name"] == "vit_base_patch16_siglip_224"
    half = [0.5, 0.5, 0.5]
    assert found.preprocess_cfg == {"mean": half, "std": half, "interpolation": "bicubic", "resize_mode": "squash"}
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    found = saved({**large}, {**large, "image_size": 384})
    assert found.model_cfg["vision_cfg"]["timm_model_name"] == "vit_large_patch16_siglip_384"
    for vision in ({"image_size": 320}, {"num_attention_heads": 8}, {"layer_norm_eps": 1e-5}, {"hidden_act": "gelu"}):
        assert saved(vision=vision).model_cfg["vision_cfg"]["timm_model_name"].startswith("siglip_w768_d12_")
    for text, vision, said in (
        ({}, {"vision_use_head": False}, "vision_use_head is false"),
        ({"projection_size": 12}, {}, "features of texts have 12 numbers: they cannot be compared"),
        ({"hidden_act": "silu"}, {}, "no such activation"),
        ({}, {"hidden_act": "silu"}, "no such activation"),
        ({}, {"num_channels": 4}, "num_channels 4"),
        ({}, {"image_size": [224, 112]}, r"no image_size \[224, 112\]"),
    ):
        with pytest.raises(SettingsError, match=said):
            saved(text, vision)


def shards_of(folder: Path) -> None:
    """Two files of torch.save with an index, as transformers 4 wrote them."""
    state = load_file(folder / "model.safetensors")
    names = sorted(state)
    parts = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
    for file, own in parts.items():
        torch.save({name: state[name] for name in own}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, own in parts.items() for name in own}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def test_weights_in_several_files(tmp_path: Path) -> None:
    """`save_pretrained(max_shard_size=…)`; the folder, the index, and any of the files."""
    theirs = clip_model()
    theirs.save_pretrained(tmp_path / "several", max_shard_size="100KB")
    theirs.save_pretrained(tmp_path / "bin")
    shards_of(tmp_path / "bin")
    for folder in (tmp_path / "several", tmp_path / "bin"):
        assert_equal(folder, theirs)
        for path in folder.glob("*-of-*"):
            assert read_weights(path).keys() == read_weights(next(folder.glob("*.index.json"))).keys()
    ids = torch.full((1, 12), 49407)
    model, _, _ = clipstream.load_model(next((tmp_path / "several").glob("*-00002-of-*")), device="cpu")
    with torch.no_grad():
        torch.testing.assert_close(model.encode_text(ids), features(theirs.get_text_features(ids)))
    index = tmp_path / "bin" / "pytorch_model.bin.index.json"
    for content, said in (
        ({"weight_map": {"a": "../bin/x.bin"}}, "not beside it"),
        ({"weight_map": {"a": "x.bin"}}, "its file x.bin is missing"),
        ({"weight_map": {}}, "no tensors by name"),
    ):
        index.write_text(json.dumps(content))
        with pytest.raises(SettingsError, match=said):
            read_weights(index)


@pytest.mark.parametrize("prefix", ["model.", "state_dict.clip."])
def test_names_with_a_prefix(prefix: str, tmp_path: Path) -> None:
    """A CLIPModel within another module, saved with it; a further head is left out with a warning."""
    theirs = clip_model()
    theirs.config.save_pretrained(tmp_path / "clip")
    state = {f"{prefix}{name}": tensor for name, tensor in theirs.state_dict().items()}
    save_file({**state, "classifier.weight": torch.ones(2, 2)}, tmp_path / "clip" / "model.safetensors")
    assert_equal(tmp_path / "clip", theirs)


def test_half_precision_and_buffers_of_positions(tmp_path: Path) -> None:
    theirs = clip_model()
    theirs.config.save_pretrained(tmp_path / "clip")
    state = {name: tensor.half() for name, tensor in theirs.state_dict().items() if "position_ids" not in name}
    ids = {f"{part}_model.embeddings.position_ids": torch.arange(12)[None] for part in ("text", "vision")}
    torch.save({**state, **ids}, tmp_path / "clip" / "pytorch_model.bin")
    assert_equal(tmp_path / "clip", theirs, atol=0.02)


def adapted(model: Any, folder: Path, base: str, **config: Any) -> Any:
    """Write an adapter as peft 0.21 does, and add it to a model of transformers by its formula, as forward passes."""
    generator, rank, tensors = torch.Generator().manual_seed(1), 3, {}
    alphas = {"q_proj": 6, "fc1": 12, "patch_embedding": 6}
    for name, layer in model.named_modules():
        kind = name.rpartition(".")[2]
        if kind not in alphas or "text_model.encoder.layers.1" in name:
            continue
        weight = layer.weight
        first = torch.randn(rank, *weight.shape[1:], generator=generator) / 4
        second = torch.randn(len(weight), rank, *[1] * (weight.ndim - 2), generator=generator) / 4
        tensors |= {f"base_model.model.{name}.lora_A.weight": first, f"base_model.model.{name}.lora_B.weight": second}
        scale = alphas[kind] / (rank**0.5 if config.get("use_rslora") else rank)

        def add(layer: Any, given: Any, out: Any, a: Any = first, b: Any = second, scale: float = scale) -> Any:
            if a.ndim == 2:
                return out + scale * (given[0] @ a.T @ b.T)
            return out + scale * torch.conv2d(torch.conv2d(given[0], a, stride=layer.stride), b)

        layer.register_forward_hook(add)
    with torch.no_grad():
        model.visual_projection.weight.mul_(-2)
    tensors["base_model.model.visual_projection.weight"] = model.visual_projection.weight.detach().clone()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    given = {"peft_type": "LORA", "base_model_name_or_path": base, "r": rank, "lora_alpha": 6, **config}
    given |= {"alpha_pattern": {"fc1": 12}, "modules_to_save": ["visual_projection"]}
    (folder / "adapter_config.json").write_text(json.dumps(given))
    return model


@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_of_peft_is_added_to_its_base(rslora: bool, tmp_path: Path) -> None:
    theirs = clip_model(text={"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 2})
    theirs.save_pretrained(tmp_path / "base")
    write_words(tmp_path / "base", WORDS)
    adapted(theirs, tmp_path / "tuned", str(tmp_path / "base"), use_rslora=rslora)
    assert_equal(tmp_path / "tuned", theirs)


def test_adapters_that_are_refused(tmp_path: Path) -> None:
    clip_model().save_pretrained(tmp_path / "base")
    folder = tmp_path / "tuned"
    adapted(clip_model(), folder, "nobody/nothing")
    with pytest.raises(SettingsError, match=r"adapter of peft on the model nobody/nothing.*hf download nobody/nothing"):
        clipstream.load_model(folder, device="cpu")
    with pytest.raises(SettingsError, match=r"adapter_model.safetensors is an adapter of peft: .* its folder"):
        read_weights(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text()) | {"base_model_name_or_path": "../base"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    clipstream.load_model(folder, device="cpu")
    tensors = load_file(folder / "adapter_model.safetensors")
    for name in ("visual_projection.lora_magnitude_vector", "text_model.head.weight"):
        more = {**tensors, f"base_model.model.{name}": torch.ones(24)}
        save_file(more, folder / "adapter_model.safetensors")
        with pytest.raises(SettingsError, match=rf"{name} is not of a LoRA adapter on this model"):
            clipstream.load_model(folder, device="cpu")
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "LOHA"}))
    with pytest.raises(SettingsError, match="peft_type LOHA"):
        clipstream.load_model(folder, device="cpu")


def test_other_models_of_transformers_are_named(tmp_path: Path) -> None:
    clip_model("gelu").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "multi_modal_projector.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(SettingsError, match=r"not those of a CLIPModel or SiglipModel \(multi_modal"):
        read_weights(tmp_path / "model.safetensors")
    vision, text = clip_model().config.vision_config, clip_model().config.text_config
    siglip2 = {**SIZES, "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    two = transformers.Siglip2Config(text_config=siglip2, vision_config={**SIZES, "patch_size": 8, "num_patches": 16})
    for other, said, alone in (
        (transformers.CLIPVisionModelWithProjection(vision), "model_type clip_vision_model", "an image tower"),
        (transformers.CLIPTextModelWithProjection(text), "model_type clip_text_model", "a text tower"),
        (transformers.Siglip2Model(two), "holds Siglip2Model of transformers", None),
    ):
        other.save_pretrained(tmp_path / "other")
        for name in (str(tmp_path / "other"), f"local-dir:{tmp_path / 'other'}"):
            with pytest.raises(SettingsError, match=rf"{said}.*only whole models are read"):
                clipstream.load_model(name, device="cpu")
        if alone is not None:
            with pytest.raises(SettingsError, match=f"holds {alone} of transformers alone: only whole"):
                read_weights(tmp_path / "other" / "model.safetensors")
