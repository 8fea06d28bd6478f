"""Towers against open_clip: equal features from saved files, losses that match the weights, and refused files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from open_clip.transformer import PatchDropout
from PIL import Image
from safetensors.torch import load_file, save_file
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from clipstream.errors import SettingsError
from clipstream.models.towers import Towers
from tests.support import hubtree
from tests.support.model_files import VIT, build, write, write_text_tower
from tests.support.steps import assert_close

RESNET = {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8}


class Tokens:
    """Settings of the model's own tokenizer, with another length of texts."""

    type = "model"

    def __init__(self, context_length: int) -> None:
        self.context_length = context_length


def images(n: int, size: int) -> tuple[torch.Tensor, list[Image.Image]]:
    """Random images of the model's size: as uint8 pixels, and for open_clip's transform."""
    arrays = np.random.default_rng(5).integers(0, 256, (n, size, size, 3), dtype=np.uint8)
    return torch.from_numpy(arrays).permute(0, 3, 1, 2), [Image.fromarray(array) for array in arrays]


def assert_open_clip_agrees(towers: Towers, folder: Path) -> None:
    """The saved folder gives open_clip the same model, preprocessing and tokenizer."""
    towers.eval().save_pretrained(folder)
    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    model.eval()
    texts = ["a photo of a dog", "two small red circles"]
    ids = open_clip.get_tokenizer(f"local-dir:{folder}")(texts)
    assert torch.equal(ids, towers.open_clip_tokenizer()(texts))
    pixels, opened = images(2, towers.image.size[0])
    with torch.no_grad():
        found = towers(pixels, ids)
        image = model.encode_image(torch.stack([transform(one) for one in opened]), normalize=True)
        text = model.encode_text(ids, normalize=True)
    torch.testing.assert_close(found.image, image, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.text, text, rtol=0, atol=1e-6)
    assert torch.equal(found.logit_scale, model.logit_scale.exp())
    assert (found.logit_bias is None) == (model.logit_bias is None)


@pytest.mark.parametrize(
    ("vision", "custom_text"),
    [(VIT, False), (RESNET, False), ({"timm_model_name": "test_convnext", "image_size": 64}, True)],
)
def test_open_clip_rebuilds_what_is_saved(vision: dict[str, Any], custom_text: bool, tmp_path: Path) -> None:
    own = {"mean": [0.1, 0.2, 0.3], "std": [0.9, 0.8, 0.7], "interpolation": "bilinear", "resize_mode": "squash"}
    towers = build(write(tmp_path, vision, preprocess=own, custom_text=custom_text))
    assert towers.loss_type == "clip" and towers.context_length == 12
    assert towers.image.interpolation == "bilinear" and towers.image.resize_mode == "squash"
    assert_open_clip_agrees(towers, tmp_path / "saved")
    again = build(f"local-dir:{tmp_path / 'saved'}", seed=9)
    assert_close(again.state_dict(), towers.state_dict(), 0)


def test_a_hugging_face_text_tower_starts_from_its_base_weights(tmp_path: Path) -> None:
    name = write(tmp_path, text_cfg=write_text_tower(tmp_path / "base", "Roberta"))
    towers, base = build(name, lock_text=True), load_file(tmp_path / "base" / "model.safetensors")
    words = "embeddings.word_embeddings.weight"
    assert torch.equal(towers.clip.text.transformer.state_dict()[words], base[words])
    trained = {name for name, parameter in towers.clip.text.named_parameters() if parameter.requires_grad}
    assert trained and all(name.startswith("proj.") for name in trained)
    assert_open_clip_agrees(towers, tmp_path / "saved")


def test_the_seed_alone_decides_and_random_state_stays(tmp_path: Path) -> None:
    name = write(tmp_path)
    before = torch.get_rng_state()
    first, same, other = build(name, seed=3), build(name, seed=3), build(name, seed=4)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first.clip.text_projection, same.clip.text_projection)
    assert not torch.equal(first.clip.text_projection, other.clip.text_projection)


@pytest.mark.parametrize(
    ("vision", "size", "words"),
    [
        (RESNET, 63, "images of 63 x 63 pixels"),
        ({"timm_model_name": "vit_tiny_patch16_224", "image_size": 256}, None, r"images of 256 x 256 .*\(224\)"),
        ({"timm_model_name": "swin_tiny_patch4_window7_224", "image_size": 200}, None, "images of 200 x 200"),
        ({"timm_model_name": "test_convnext", "image_size": 64}, 16, "images of 16 x 16 .*: set --force-image-size"),
        ({"timm_model_name": "vit_base_patch16_siglip_224", "image_size": 224}, 200, "vit_base_patch16_siglip_256"),
    ],
)
def test_a_size_that_the_tower_does_not_take_is_an_error(
    vision: dict[str, Any], size: int | None, words: str, tmp_path: Path
) -> None:
    more = {"timm_pool": "avg", "timm_proj": "linear"} if "timm_model_name" in vision else {}
    with pytest.raises(SettingsError, match=words):
        build(write(tmp_path, vision | more), image_size=size)


def test_image_size_and_context_length_change_the_model(tmp_path: Path) -> None:
    """Positions of the weights are resampled, of a saved model and of a file alone."""
    saved, name = tmp_path / "saved", write(tmp_path)
    towers = build(name)
    towers.save_pretrained(saved)
    file = save(towers, tmp_path / "plain")
    for chosen in ({"name": f"local-dir:{saved}"}, {"name": name, "pretrained": str(file)}):
        towers = build(**chosen, image_size=48, tokenizer=Tokens(20))
        assert towers.image.size == (48, 48) and towers.context_length == 20
        assert towers.clip.positional_embedding.shape[0] == 20
        assert towers.open_clip_tokenizer()(["a"]).shape == (1, 20)
    assert build(write(tmp_path, RESNET), image_size=96).image.size == (96, 96)
    assert_open_clip_agrees(towers, tmp_path / "larger")


def test_weights_of_other_projects_are_named(tmp_path: Path) -> None:
    state = dict(build(name := write(tmp_path)).clip.state_dict())
    for part, said in (("bert.encoder.layer.0.attention.self.query", "Chinese-CLIP"), ("visual.blocks.0", "EVA-CLIP")):
        torch.save({**state, f"{part}.weight": torch.ones(1)}, tmp_path / "other.pt")
        with pytest.raises(SettingsError, match=rf"does not hold the weights of .* \(but of {said}"):
            build(name, pretrained=str(tmp_path / "other.pt"))


def test_weights_of_longer_texts_are_cut_only_where_it_is_asked_for(tmp_path: Path) -> None:
    """Also those of Long-CLIP, whose `positional_embedding_res` has the positions from the 21st on."""
    name, longer = write(tmp_path), build(write(tmp_path), tokenizer=Tokens(60))
    state = dict(longer.clip.state_dict())
    whole = state["positional_embedding"]
    first, rest = torch.full_like(whole, 7), torch.full_like(whole, 8)  # what has no effect
    first[:20], rest[20:] = whole[:20], whole[20:]
    for more in ({}, {"positional_embedding": first, "positional_embedding_res": rest}):
        torch.save({**state, **more}, tmp_path / "long.pt")
        with pytest.raises(SettingsError, match=r"is of texts of 60 tokens, .* of 12: set tokenizer.context_length"):
            build(name, pretrained=str(tmp_path / "long.pt"))
        found = build(name, pretrained=str(tmp_path / "long.pt"), tokenizer=Tokens(60))
        assert torch.equal(found.clip.positional_embedding, whole)
        assert build(name, pretrained=str(tmp_path / "long.pt"), tokenizer=Tokens(12)).context_length == 12


def test_longer_texts_keep_the_first_positions_as_long_clip_does(tmp_path: Path) -> None:
    """By the loops of Long-CLIP's load_from_clip; a short caption has the same features as before."""
    saved, width = tmp_path / "saved", 32
    before = build(write(tmp_path), tokenizer=Tokens(width))
    before.save_pretrained(saved)
    for custom in (False, True):
        longer = build(f"local-dir:{saved}", tokenizer=Tokens(4 * width - 3 * 20), custom_text=custom)
        old = before.clip.positional_embedding
        wanted = [old[i] for i in range(20)]
        for i in range(width - 1 - 20):
            wanted += [((4 - k) * old[i + 20] + k * old[i + 21]) / 4 for k in range(4)]
        wanted += [old[-1] + k * (old[-1] - old[-2]) / 4 for k in range(4)]
        found = longer.clip.text.positional_embedding if custom else longer.clip.positional_embedding
        torch.testing.assert_close(found, torch.stack(wanted))
        texts = ["a red bird", "two"]
        features = [towers.encode_text(towers.open_clip_tokenizer()(texts)) for towers in (before, longer)]
        torch.testing.assert_close(*features)


def test_a_siglip_model_starts_as_its_paper_says(tmp_path: Path) -> None:
    by_config, by_loss = build(write(tmp_path, init_logit_bias=-10)), build(write(tmp_path), loss_type="siglip")
    for towers in (by_config, by_loss):
        assert towers.loss_type == "siglip"
        assert towers.clip.logit_scale.item() == pytest.approx(math.log(10))
        assert towers.clip.logit_bias.item() == -10
        assert towers.config.model_cfg["init_logit_bias"] == -10
    assert build(write(tmp_path)).clip.logit_bias is None


def test_weights_and_loss_that_contradict_are_an_error_unless_overridden(tmp_path: Path) -> None:
    clip, siglip = tmp_path / "clip", tmp_path / "siglip"
    build(write(tmp_path)).save_pretrained(clip)
    build(write(tmp_path), loss_type="siglip").save_pretrained(siglip)
    for folder, wanted in ((clip, "siglip"), (siglip, "clip")):
        with pytest.raises(SettingsError, match="allow_mismatch"):
            build(f"local-dir:{folder}", loss_type=wanted)
        forced = build(f"local-dir:{folder}", loss_type=wanted, allow_mismatch=True)
        assert forced.loss_type == wanted and (forced.clip.logit_bias is not None) == (wanted == "siglip")
        assert_open_clip_agrees(forced, tmp_path / f"forced_{wanted}")
    published = build(f"local-dir:{hubtree.build(tmp_path / 'cache')}")
    assert published.loss_type == "siglip" and published.clip.logit_scale.item() == pytest.approx(hubtree.LOGIT_SCALE)
    assert_open_clip_agrees(published, tmp_path / "published")  # with its Hugging Face tokenizer
    # Weights of a file tell their loss by themselves; a configuration may not say otherwise.
    weights = str(siglip / "open_clip_model.safetensors")
    assert build(write(tmp_path), pretrained=weights).loss_type == "siglip"
    with pytest.raises(SettingsError, match="init_logit_bias"):
        build(write(tmp_path, init_logit_bias=-10), pretrained=str(clip / "open_clip_model.safetensors"))
    with pytest.raises(SettingsError, match="siglip"):
        build(write(tmp_path, init_logit_bias=-10), loss_type="clip")


def test_frozen_towers_get_no_gradient_and_stay_in_evaluation_mode(tmp_path: Path) -> None:
    towers = build(write(tmp_path, RESNET), lock_image=True).train()
    assert not towers.clip.visual.training and not towers.has_batch_norm
    assert build(write(tmp_path, RESNET)).has_batch_norm
    pixels, _ = images(2, 64)
    features = towers(pixels, torch.ones(2, 12, dtype=torch.int32))
    assert not features.image.requires_grad and features.text.requires_grad
    for custom_text in (False, True):
        towers = build(write(tmp_path, custom_text=custom_text), lock_text=True).train()
        features = towers(pixels[:, :, :32, :32], torch.ones(2, 12, dtype=torch.int32))
        assert features.image.requires_grad and not features.text.requires_grad


def test_a_file_that_does_not_fit_is_named_with_its_first_differences(tmp_path: Path) -> None:
    name, path = write(tmp_path), tmp_path / "weights.safetensors"
    towers = build(name)
    state = {name: tensor.contiguous() for name, tensor in towers.clip.state_dict().items()}
    nan = {key: state[key] * torch.nan for key in ("visual.proj", "text_projection")}
    for tensors, words in (
        ({name: tensor for name, tensor in state.items() if name != "ln_final.weight"}, "ln_final.weight is missing"),
        (state | {"text_projection": torch.zeros(3, 3)}, r"text_projection is \[3, 3\] in the file"),
        (state | nan, f"{path} .*NaN or infinite: (visual.proj.*text_projection|text_projection.*visual.proj)"),
    ):
        save_file(tensors, path)
        with pytest.raises(SettingsError, match=words):
            build(name, pretrained=str(path))
    torch.save({"epoch": 3}, tmp_path / "other.pt")
    with pytest.raises(SettingsError, match=r"other\.pt"):
        build(name, pretrained=str(tmp_path / "other.pt"))
    # A trainer's checkpoint, with DDP's prefix.
    torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}}, tmp_path / "good.pt")
    loaded = build(name, seed=8, pretrained=str(tmp_path / "good.pt"))
    assert torch.equal(loaded.clip.text_projection, towers.clip.text_projection)


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("coca_ViT-B-32", None, "CoCa models"),
        (None, {"vision": {"timm_model_name": "naflexvit_base_patch16_siglip"}}, "NaFlex models"),
        (None, {"audio_cfg": {}}, "audio models"),
        (None, {"nonsense": 1}, "nonsense"),
        ("ViT-B32", None, "did you mean 'ViT-B-32'"),
    ],
)
def test_models_of_another_kind_are_refused(name: str | None, more: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=words):
        build(name or write(tmp_path, **more))


class _Results(TorchDispatchMode):
    """Notes on which devices results are, and the shapes of those of kernels."""

    devices: frozenset[str] = frozenset()
    shapes: tuple[tuple[int, ...], ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        tensors = [one for one in tree_leaves(found) if isinstance(one, torch.Tensor)]
        self.devices |= {one.device.type for one in tensors}
        self.shapes += tuple(tuple(one.shape) for one in tensors)
        return found


def test_patch_dropout_draws_open_clips_patches_on_a_cpu_and_on_the_device_elsewhere(tmp_path: Path) -> None:
    dropout = build(write(tmp_path), patch_dropout=0.5).clip.visual.patch_dropout.train()
    tokens = torch.arange(2 * 17.0).view(2, 17, 1)
    found = []
    for forward in (dropout, PatchDropout(0.5)):
        torch.manual_seed(1)
        found.append(forward(tokens))
    assert torch.equal(*found)
    with FakeTensorMode(), _Results() as mode:
        assert dropout(torch.empty(2, 17, 1, device="cuda")).shape == found[0].shape
    assert mode.devices == {"cuda"}


def test_a_gpu_normalises_pixels_in_one_kernel(tmp_path: Path) -> None:
    """The values are those of the CPU: tests/gpu compares them, and here their formula is."""
    towers, pixels = build(write(tmp_path)), torch.arange(256, dtype=torch.uint8).repeat(24).view(2, 3, 32, 32)
    seen = []
    towers.clip.visual.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    towers.encode_image(pixels)
    fused = torch.addcmul(-towers.mean / towers.std, pixels, 1 / (255 * towers.std))
    torch.testing.assert_close(fused, seen[0], rtol=0, atol=1e-6)
    with FakeTensorMode(allow_non_fake_inputs=True):
        towers.clip.encode_image = lambda images: images.flatten(1)
        towers.mean, towers.std = (torch.empty(1, 3, 1, 1, device="cuda") for _ in range(2))
        pixels = torch.empty(2, 3, 32, 32, dtype=torch.uint8, device="cuda")
        with _Results() as mode:
            towers.encode_image(pixels)
    assert mode.shapes.count((2, 3, 32, 32)) == 1


def test_the_last_groups_of_a_locked_tower_may_train(tmp_path: Path) -> None:
    towers = build(write(tmp_path), lock_image=True, unlocked_groups=2, lock_text=True, unlocked_layers=1)
    trained = {name for name, parameter in towers.clip.named_parameters() if parameter.requires_grad}
    assert "visual.proj" in trained and "visual.conv1.weight" not in trained and "token_embedding.weight" not in trained
    assert any(name.startswith("visual.transformer") for name in trained)
    assert {"logit_scale"} <= trained and any(not name.startswith(("visual.", "logit")) for name in trained)
    towers.train()
    assert not towers.clip.visual.conv1.training and towers.clip.visual.transformer.resblocks[-1].training
    with pytest.raises(SettingsError, match=r"model\.unlocked_groups"):
        build(write(tmp_path, RESNET), lock_image=True, unlocked_groups=1)


def test_patch_dropout_leaves_patches_out_in_training_alone(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"has no patches"):
        build(write(tmp_path, RESNET), patch_dropout=0.5)
    towers, (pixels, _) = build(write(tmp_path), patch_dropout=0.5).eval(), images(10, 32)
    with torch.no_grad():
        assert torch.equal(towers.encode_image(pixels), towers.encode_image(pixels))
        towers.train()
        assert not torch.equal(towers.encode_image(pixels), towers.encode_image(pixels))


def test_activation_class_and_preprocessing_may_be_forced(tmp_path: Path) -> None:
    name = write(tmp_path)
    own = {"image_mean": (0.1, 0.2, 0.3), "image_std": (0.9, 0.8, 0.7), "image_interpolation": "bilinear"}
    plain = build(name)
    forced = build(name, quick_gelu=True, custom_text=True, **own, image_resize_mode="squash")
    assert (forced.image.interpolation, forced.image.resize_mode) == ("bilinear", "squash")
    assert isinstance(plain.clip, open_clip.CLIP) and isinstance(forced.clip, open_clip.CustomTextCLIP)
    assert type(forced.clip.visual.transformer.resblocks[0].mlp.gelu) is open_clip.transformer.QuickGELU
    assert_open_clip_agrees(forced, tmp_path / "saved")
    loaded = build(name, custom_text=True, pretrained=str(save(plain, tmp_path / "plain")))
    assert torch.equal(loaded.clip.text.text_projection, plain.clip.text_projection)


def save(towers: Towers, folder: Path) -> Path:
    towers.save_pretrained(folder)
    (folder / "open_clip_config.json").unlink()
    return folder / "open_clip_model.safetensors"
