"""Towers from files of their own: a timm image tower's weights, and a Hugging Face text tower in a folder."""

from __future__ import annotations

import argparse
import json
import pickle
from pathlib import Path
from typing import Any

import open_clip
import pytest
import timm
import torch
from safetensors.torch import save_file

from clipstream.errors import SettingsError
from clipstream.models.pretrained import look_up, preflight
from clipstream.models.settings import ModelSettings
from tests.support import hubtree
from tests.support.model_files import VIT, build, write, write_text_tower

ARCHITECTURE = "test_efficientnet"
TIMM = {"timm_model_name": ARCHITECTURE, "image_size": 64, "timm_pool": "avg", "timm_proj": "linear"}
REPO = "someone/text"
NAMES = {"hf_model_name": REPO, "hf_tokenizer_name": REPO, "hf_pooler_type": "mean_pooler", "context_length": 12}


def trained(seed: int = 3) -> dict[str, torch.Tensor]:
    """Tensors of a timm model with its classifier, as published files have them."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return dict(timm.create_model(ARCHITECTURE).state_dict())


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_an_image_tower_starts_from_its_own_file(suffix: str, tmp_path: Path) -> None:
    """Its mean and deviation are timm's unless the config has them."""
    state, path, name = trained(), tmp_path / f"own.{suffix}", write(tmp_path, TIMM)
    if suffix == "pth":  # as timm's training script writes it, and as early versions of torch did
        kept = {name: tensor for name, tensor in state.items() if not name.endswith("num_batches_tracked")}
        torch.save({"epoch": 3, "state_dict": kept}, path)
    else:
        save_file(state, path)
    towers, fresh, entry = build(name, image_pretrained=str(path)), build(name), timm.get_pretrained_cfg(ARCHITECTURE)
    for key, tensor in towers.clip.visual.trunk.state_dict().items():
        assert torch.equal(tensor, state[key])
    assert torch.equal(towers.clip.visual.head.proj.weight, fresh.clip.visual.head.proj.weight)
    assert towers.loss_type == "clip" and build(name, loss_type="siglip").loss_type == "siglip"
    assert [towers.mean.flatten().tolist(), towers.std.flatten().tolist()] == [
        pytest.approx(entry.mean), pytest.approx(entry.std),
    ]  # fmt: skip
    own = write(tmp_path, TIMM, preprocess={"mean": [0.1, 0.2, 0.3], "std": [0.9, 0.8, 0.7]})
    assert build(own, image_pretrained=str(path)).mean.flatten().tolist() == pytest.approx([0.1, 0.2, 0.3])


def test_position_embeddings_are_resampled_as_timm_does(tmp_path: Path) -> None:
    name = "test_vit"
    state = timm.create_model(name, img_size=160).state_dict()
    larger = timm.create_model(name, img_size=320).state_dict()
    save_file(dict(larger), tmp_path / "larger.safetensors")
    vision = {"timm_model_name": name, "image_size": 160, "timm_pool": "", "timm_proj": "linear"}
    towers = build(write(tmp_path, vision), image_pretrained=str(tmp_path / "larger.safetensors"))
    trunk = towers.clip.visual.trunk
    assert trunk.pos_embed.shape == state["pos_embed"].shape != larger["pos_embed"].shape
    assert torch.equal(trunk.state_dict()["blocks.0.attn.qkv.weight"], larger["blocks.0.attn.qkv.weight"])


def test_files_and_tags_that_do_not_fit_are_named(tmp_path: Path) -> None:
    name, state = write(tmp_path, TIMM), trained()
    path, stem = tmp_path / "own.safetensors", state["conv_stem.weight"]
    for tensors, words in (
        ({f"_{key}": tensor for key, tensor in state.items()}, "conv_stem.weight is missing"),
        (state | {"conv_stem.weight": torch.zeros(3, 3)}, r"conv_stem.weight is \[3, 3\] in the file"),
        (state | {"conv_stem.weight": stem * torch.nan}, r"NaN or infinite: conv_stem.weight"),
    ):
        save_file(tensors, path)
        with pytest.raises(SettingsError, match=words):
            build(name, image_pretrained=str(path))
    for chosen in ("gone.pth", "webli"):
        with pytest.raises(SettingsError, match=f"{chosen}' is neither a file nor a tag; tags of {ARCHITECTURE}: r160"):
            preflight(ModelSettings(name=name, image_pretrained=chosen))
    with pytest.raises(SettingsError, match="open_clip's own"):
        preflight(ModelSettings(name=write(tmp_path, VIT), image_pretrained=str(path)))


@pytest.mark.parametrize("chosen", ["default", "r160_in1k"])
def test_a_tag_of_timm_is_read_from_the_hubs_cache(chosen: str, tmp_path: Path) -> None:
    name, state = write(tmp_path, TIMM), trained()
    missing = look_up(ModelSettings(name=name, image_pretrained=chosen, cache_dir=str(tmp_path / "cache")))
    assert isinstance(missing, dict)
    ((repo, files),) = missing.items()
    assert repo == f"timm/{ARCHITECTURE}.r160_in1k" and "model.safetensors" in files[0]
    home = tmp_path / "cache" / f"models--{repo.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "refs/main").write_text(hubtree.REVISION)
    snapshot = home / "snapshots" / hubtree.REVISION
    snapshot.mkdir(parents=True)
    save_file(state, snapshot / "model.safetensors")
    towers = build(name, image_pretrained=chosen, cache_dir=str(tmp_path / "cache"))
    assert torch.equal(towers.clip.visual.trunk.conv_stem.weight, state["conv_stem.weight"])


def text_tower(folder: Path, **text: Any) -> tuple[Path, str]:
    """A folder with a small BERT in half precision that pads with another id than 0, and a model with it."""
    write_text_tower(folder / "text", half=True, pad_token_id=1)
    return folder / "text", write(folder, text_cfg={**NAMES, **text})


def test_a_text_tower_is_taken_from_a_folder(tmp_path: Path) -> None:
    from transformers import AutoModel

    folder, name = text_tower(tmp_path)
    towers = build(name, text_model=str(folder), lock_text=True).eval()
    assert towers.config.model_cfg["text_cfg"]["hf_model_name"] == REPO
    base = AutoModel.from_pretrained(folder).float().eval()
    ids = towers.open_clip_tokenizer()(["a photo of a dog", "two"])
    mask = (ids != 1).unsqueeze(-1)
    assert 0 < mask[1].sum() < mask[0].sum() < 12
    with torch.no_grad():
        alone = base(input_ids=ids[1:, : int(mask[1].sum())]).last_hidden_state.mean(1)  # without any padding
        expected = torch.nn.functional.normalize(towers.clip.text.proj(alone), dim=-1)
        torch.testing.assert_close(towers.encode_text(ids)[1:], expected)


def test_a_saved_model_is_whole_without_the_folder(tmp_path: Path) -> None:
    here = str(tmp_path / "text")
    folder, name = text_tower(tmp_path, hf_model_name=here, hf_tokenizer_name=here)
    towers = build(name).eval()
    towers.save_pretrained(tmp_path / "saved")
    theirs = open_clip.create_model(f"local-dir:{tmp_path}/saved").float().eval()  # the folder has half precision
    folder.rename(tmp_path / "elsewhere")
    again = build(f"local-dir:{tmp_path}/saved", seed=7).eval()
    ids = again.open_clip_tokenizer()(["a photo of a dog", "two"])
    assert torch.equal(open_clip.get_tokenizer(f"local-dir:{tmp_path}/saved")(["a photo of a dog", "two"]), ids)
    with torch.no_grad():
        assert torch.equal(towers.encode_text(ids), again.encode_text(ids))
        torch.testing.assert_close(theirs.encode_text(ids, normalize=True), towers.encode_text(ids))
    again.save_pretrained(tmp_path / "twice")
    assert (tmp_path / "twice/config.json").read_bytes() == (tmp_path / "saved/config.json").read_bytes()
    assert str(tmp_path) not in (tmp_path / "saved/config.json").read_text()


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({"a": argparse.Namespace()}, 2)])
def test_unreadable_weights_and_tokenizers_of_a_text_tower_are_errors(content: bytes, tmp_path: Path) -> None:
    folder, name = text_tower(tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    del settings["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(SettingsError, match=r"has no pad token.*set pad_token in its tokenizer_config.json"):
        build(name, text_model=str(folder)).open_clip_tokenizer()
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(SettingsError, match=r"cannot build .* with the text tower in .*text"):
        build(name, text_model=str(folder))


def test_folders_that_lack_a_file_are_told(tmp_path: Path) -> None:
    folder, name = text_tower(tmp_path)
    (folder / "model.safetensors").rename(folder / "model.fp16.safetensors")
    chosen = ModelSettings(name=name, text_model=str(folder))
    for lost, said in ((None, "holds no weights"), ("tokenizer.json", "no tokenizer in"),
                       ("config.json", r"there is no config\.json")):  # fmt: skip
        hubtree.write_tokenizer(folder)
        if lost is not None:
            (folder / lost).unlink()
        with pytest.raises(SettingsError, match=said):
            preflight(chosen)
    with pytest.raises(SettingsError, match="is open_clip's own"):
        preflight(ModelSettings(name=write(tmp_path), text_model=str(folder)))


def test_a_tower_from_a_store_cannot_be_unlocked(tmp_path: Path) -> None:
    folder, name = text_tower(tmp_path)
    towers = build(name, text_model=str(folder), lock_image=True, lock_text=True)
    towers.save_pretrained(tmp_path / "model")
    weights, files = tmp_path / "model/open_clip_model.safetensors", towers.description()
    towers.remove("text", weights)
    assert towers.train().description() == files and "config.json" in files
    later = build(write(tmp_path), lock_image=True, unlock_image_at=3)
    with pytest.raises(SettingsError, match=r"unlock_image_at: .* remove the store"):
        later.remove("image", weights)


@pytest.mark.parametrize(("kind", "offset"), [("Bert", 0), ("Roberta", 2)])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_text_tower_with_fewer_positions_than_tokens_is_refused(
    kind: str, offset: int, missing: int, tmp_path: Path
) -> None:
    """RoBERTa counts positions from the padding's number + 1."""
    write_text_tower(tmp_path / "text", kind, max_position_embeddings=12 + offset - missing)
    name, folder = write(tmp_path, text_cfg={**NAMES, "hf_proj_type": "linear"}), str(tmp_path / "text")
    if not missing:
        assert build(name, text_model=folder).context_length == 12
        return
    with pytest.raises(SettingsError, match=r"text tower of .* 12 tokens: set a smaller --force-context-length"):
        build(name, text_model=folder)
