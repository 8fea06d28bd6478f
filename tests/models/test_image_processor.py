"""Image processors of transformers: every field is used, has no effect, or is refused by name.

transformers 5.24: `CLIPProcessor.save_pretrained` writes processor_config.json alone, with the fields of the image
processor in `image_processor`; up to version 4 they were in preprocessor_config.json. A file leaves out what is the
default of its class, and fields that the class does not have are kept and have no effect. A null is not the default:
`do_normalize: null` is false (5.24: `ImageProcessingMixin.__init__` sets it before the class's default is looked up).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
import transformers
from PIL import Image
from torch.nn.functional import normalize
from transformers.processing_utils import ImagesKwargs

import clipstream
from clipstream.errors import SettingsError
from clipstream.export.files import write_transformers
from clipstream.models.transformers_names import read_processor
from tests.support.model_files import build, clip_model

SIZE = 32
EDGE, SQUARE = {"shortest_edge": SIZE}, {"height": SIZE, "width": SIZE}
OPENAI = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
STEPS = {"do_resize": True, "do_normalize": True}


def pil_class(name: str) -> Any:
    """transformers' class that resizes by Pillow: its own name since version 5."""
    return getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)


@cache
def pictures() -> list[Image.Image]:
    """Also of sizes that the centre crop leaves 3 and 7 pixels of, whose half transformers rounds down."""
    draw, sizes = np.random.default_rng(0), ((48, 32), (64, 80), (37, 37), (70, 64), (32, 39))
    waves = [np.add.outer(np.arange(h), np.arange(w))[..., None] * draw.uniform(0.05, 0.4, 3) for w, h in sizes]
    return [Image.fromarray((127 + 120 * np.sin(wave + 3 * draw.random(3))).astype(np.uint8)) for wave in waves]


def agrees(folder: Path, fields: dict[str, Any], *, kind: str = "CLIPImageProcessor", nested: bool = False) -> None:
    """Assert that a folder with a processor of these fields gives transformers' features, with its own processor."""
    clip_model().save_pretrained(folder)
    if nested:
        content: dict[str, Any] = {"image_processor": fields, "processor_class": "CLIPProcessor"}
        (folder / "processor_config.json").write_text(json.dumps(content))
    else:
        (folder / "preprocessor_config.json").write_text(json.dumps(fields))
    model, _, _ = clipstream.load_model(folder, device="cpu")
    pixels = pil_class(kind).from_dict(fields)(pictures(), return_tensors="pt")["pixel_values"].float()
    with torch.no_grad():
        found = clip_model().get_image_features(pixels)
    theirs = normalize(getattr(found, "pooler_output", found), dim=-1)
    assert (model.encode_image(pictures()) * theirs).sum(1).min() > 0.9999
    assert (theirs[0] * theirs[1:]).sum(1).max() < 0.99  # pictures whose features tell processors apart


# The content of preprocessor_config.json, at this model's size, in repositories of the Hub.
OLD = {**STEPS, **OPENAI, "do_center_crop": True, "feature_extractor_type": "CLIPFeatureExtractor", "resample": 3}
NEW = {**OLD, "crop_size": SQUARE, "do_convert_rgb": True, "do_rescale": True, "rescale_factor": 0.00392156862745098}
NEW |= {"image_processor_type": "CLIPImageProcessor", "size": EDGE}
SIGLIP = {**STEPS, **HALF, "do_rescale": True, "image_processor_type": "SiglipImageProcessor", "resample": 3}
SIGLIP |= {"processor_class": "SiglipProcessor", "rescale_factor": 0.00392156862745098, "size": SQUARE}
FAST = {**NEW, "image_processor_type": "CLIPImageProcessorFast", "default_to_square": False, "device": None}
FAST |= {"disable_grouping": None, "data_format": "channels_first", "input_data_format": None, "return_tensors": None}
LAYOUTS = {
    "openai/clip-vit-base-patch32": {**OLD, "crop_size": SIZE, "size": SIZE},
    "openai/clip-vit-large-patch14-336": {**OLD, "crop_size": SIZE, "size": SIZE, "do_convert_rgb": True},
    "laion/CLIP-ViT-H-14-laion2B-s32B-b79K": {**NEW, "processor_class": "CLIPProcessor"},
    "patrickjohncyh/fashion-clip": NEW,
    "vinid/plip": {**NEW, "do_convert_rgb": True},
    "facebook/metaclip-b32-400m": {**NEW, "processor_class": "CLIPProcessor", "_valid_processor_keys": ["images"]},
    "apple/mobileclip": {**NEW, "image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0]},
    "google/siglip-base-patch16-224": SIGLIP,
    "google/siglip-so400m-patch14-384": {**SIGLIP, "do_convert_rgb": None},
    "google/siglip2-base-patch16-224": {**SIGLIP, "resample": 2, "processor_class": "SiglipProcessor"},
    "saved by CLIPImageProcessorFast": {**FAST, "do_pad": None, "pad_size": None, "crop_to_patches": None},
}


BOTH = ("patrickjohncyh/fashion-clip", "google/siglip-base-patch16-224")


@pytest.mark.parametrize(("name", "nested"), [*((name, False) for name in LAYOUTS), *((name, True) for name in BOTH)])
def test_processors_of_the_hub_give_their_features(name: str, nested: bool, tmp_path: Path) -> None:
    fields = LAYOUTS[name]
    kind = "SiglipImageProcessor" if "siglip" in name else "CLIPImageProcessor"
    agrees(tmp_path, fields, kind=kind, nested=nested)


USED = [
    {"rescale_factor": 1 / 127.5, "image_mean": [1.0, 0.9, 1.1], "image_std": [1.0, 0.5, 0.7]},
    {"rescale_factor": 1 / 127.5},
    {"rescale_factor": 0.01, "do_normalize": False},
    {"do_normalize": False},
    {"do_rescale": False, "image_mean": [120, 110, 100], "image_std": [60.0, 50.0, 40.0]},
    {"do_rescale": False, "rescale_factor": 7.0, "image_mean": [120.0] * 3, "image_std": [60.0] * 3},
    {"image_mean": 0.5, "image_std": 0.25},
    {"do_normalize": None, "image_mean": None, "do_convert_rgb": None},
    {"do_rescale": None, "image_mean": [120.0] * 3, "image_std": [60.0] * 3},
    {"resample": 2},
    {"size": SQUARE, "do_center_crop": True},
    {"size": SQUARE, "do_center_crop": False, "crop_size": 7},
    {"size": [SIZE, SIZE]},
    {"size": SIZE, "default_to_square": True},
    {"size": SIZE, "default_to_square": False, "crop_size": [SIZE, SIZE]},
    {"size": {"shortest_edge": SIZE, "longest_edge": None}},
    {"do_pad": True},
    {"do_pad": True, "pad_size": SQUARE},
    {"do_convert_rgb": False},
    {"data_format": "channels_last", "input_data_format": "channels_first"},
    {"device": "cpu", "disable_grouping": True, "image_seq_length": 9, "return_tensors": "np"},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"size": {"shortest_edge": 36}}, "crop_size"),
    ({"size": 36}, "crop_size"),
    ({"size": {"height": 36, "width": 36}}, "crop_size"),
    ({"crop_size": 28}, "crop_size"),
    ({"do_center_crop": False}, "do_center_crop"),
    ({"size": SQUARE, "crop_size": {"height": 32, "width": 16}}, "crop_size"),
    ({"size": {"height": 32, "width": 16}, "do_center_crop": False}, "size"),
    ({"size": {"shortest_edge": 40}, "crop_size": 40}, "size .*the model takes 32 x 32 pixels"),
    ({"size": {"longest_edge": 32}}, "size"),
    ({"size": {"shortest_edge": 32, "longest_edge": 64}}, "size"),
    ({"size": {"max_height": 32, "max_width": 32}}, "size"),
    ({"do_resize": False}, "do_resize"),
    ({"resample": 0}, "resample 0: open_clip has only 2"),
    ({"resample": 1}, "resample"),
    ({"rescale_factor": 0}, "rescale_factor"),
    ({"rescale_factor": -1.0}, "rescale_factor"),
    ({"do_pad": True, "pad_size": {"height": 64, "width": 64}}, "pad_size"),
    ({"rescale_offset": True}, "rescale_offset true: no field of CLIPImageProcessor"),
    ({"do_flip_channel_order": True}, "do_flip_channel_order"),
    ({"auto_map": {"AutoImageProcessor": "mine.Mine"}}, "auto_map"),
    ({"image_processor_type": "BlipImageProcessor"}, "images of BlipImageProcessor are not those of"),
    ({"image_processor_type": "Siglip2ImageProcessorFast"}, "images of Siglip2ImageProcessorFast"),
    ({"image_std": [0.0, 1.0, 1.0]}, "std"),
    ({"image_mean": [0.5]}, "mean"),
    ({"image_mean": None}, "image_mean null: it has no value"),
    ({"size": None}, "size null"),
    ({"resample": None}, "resample null"),
    ({"size": "large"}, 'crop_size .*does not crop images of size {"shortest_edge": "large"}'),
]


@pytest.mark.parametrize("change", USED, ids=str)
def test_a_field_is_used(change: dict[str, Any], tmp_path: Path) -> None:
    fields = {**NEW, **change}
    agrees(tmp_path, fields)


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=str)
def test_a_field_is_refused_by_name(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    clip_model().config.save_pretrained(tmp_path)
    for name, content in (
        ("preprocessor_config.json", {**NEW, **change}),
        ("processor_config.json", {"image_processor": {**NEW, **change}}),
    ):
        (tmp_path / name).write_text(json.dumps(content))
        with pytest.raises(SettingsError, match=words):
            clipstream.load_model(tmp_path, device="cpu")


def test_every_field_of_transformers_is_in_the_tables() -> None:
    """The fields that transformers' image processors take; a later version with a further one fails here."""
    tested = {key for fields in (*LAYOUTS.values(), *USED, *(change for change, _ in REFUSED)) for key in fields}
    assert ImagesKwargs.__annotations__.keys() <= tested


def test_the_nested_form_goes_first_and_a_processor_without_one_is_passed_over(tmp_path: Path) -> None:
    clip_model().save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**NEW, **HALF}))
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "CLIPProcessor"}))
    model, _, _ = clipstream.load_model(tmp_path, device="cpu")
    half = model.encode_image(pictures())
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": NEW}))
    model, _, _ = clipstream.load_model(tmp_path, device="cpu")
    assert (model.encode_image(pictures()) * half).sum(1).min() < 0.9999
    for damaged in ("{", "3", '{"image_processor": 3}'):
        (tmp_path / "processor_config.json").write_text(damaged)
        with pytest.raises(SettingsError, match=r"processor_config.json is no configuration of an image processor"):
            clipstream.load_model(tmp_path, device="cpu")


def test_the_centre_crop_of_transformers_stays(tmp_path: Path) -> None:
    """In saved models, which open_clip 3.3 loads without this field, and in exports; unless a resize mode is set."""
    clip_model().save_pretrained(tmp_path / "clip")
    (tmp_path / "clip" / "preprocessor_config.json").write_text(json.dumps(NEW))
    model, _, _ = clipstream.load_model(tmp_path / "clip", device="cpu")
    towers = build(f"local-dir:{tmp_path / 'clip'}")
    towers.save_pretrained(tmp_path / "saved")
    write_transformers(towers, tmp_path / "exported")
    for name in ("saved", "exported"):
        again, _, _ = clipstream.load_model(tmp_path / name, device="cpu")
        torch.testing.assert_close(again.encode_image(pictures()), model.encode_image(pictures()))
    pixels = pil_class("CLIPImageProcessor").from_pretrained(tmp_path / "exported")(pictures(), return_tensors="pt")
    torch.testing.assert_close(model.encode_image(pixels["pixel_values"]), model.encode_image(pictures()))
    plain = build(f"local-dir:{tmp_path / 'clip'}", image_resize_mode="shortest")
    assert towers.image.floor_crop and not plain.image.floor_crop
    _, preprocess = open_clip.create_model_from_pretrained(f"local-dir:{tmp_path / 'saved'}")
    assert preprocess(pictures()[0]).shape == (3, SIZE, SIZE)


def test_a_folder_without_a_processor_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        read_processor(tmp_path, "siglip", 32)
    assert caplog.text.count("preprocessor_config.json: images get the defaults of transformers' siglip processor") == 1
