"""Image processors of transformers: the files of a folder enter, open_clip's preprocess_cfg of the same pixels leaves.

Every field of CLIPImageProcessor and SiglipImageProcessor (of transformers 4 and 5, also their Fast and Pil classes) is
used, has no effect on the pixels of an image file, or is refused by name; so is a field that they do not have.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clipstream.errors import SettingsError

PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
RESAMPLE = {"bilinear": 2, "bicubic": 3}  # Pillow's numbers of its filters
# Defaults of transformers' classes, which files leave out.
_COMMON: dict[str, Any] = {
    "do_resize": True,
    "resample": 3,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "do_center_crop": False,
    "crop_size": None,
    "do_pad": False,
    "pad_size": None,
}
_DEFAULTS = {
    "clip": _COMMON
    | {
        "size": {"shortest_edge": 224},
        "crop_size": 224,
        "do_center_crop": True,
        "default_to_square": False,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    },
    "siglip": _COMMON
    | {"size": 224, "default_to_square": True, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
}
_CLASSES = {"CLIPImageProcessor": "clip", "CLIPFeatureExtractor": "clip", "SiglipImageProcessor": "siglip"}
_TIMM = "TimmWrapperImageProcessor"
_NO_EFFECT = {
    *("image_processor_type", "feature_extractor_type", "processor_class", "transformers_version", "return_tensors"),
    *("do_convert_rgb", "device", "disable_grouping", "data_format", "input_data_format", "image_seq_length"),
    "_valid_processor_keys",
}


def read_processor(folder: Path, model_type: str, image_size: int) -> dict[str, Any]:
    """open_clip's preprocess_cfg for the image processor of a folder; the defaults of its class without one.

    transformers reads `image_processor` in processor_config.json first, which alone it writes since version 5, and
    preprocessor_config.json else.

    Args:
        model_type: 'clip' or 'siglip', whose processor it is if the file does not say so.
        image_size: of the model, in pixels.

    Raises SettingsError: a damaged file, a processor of another class, or a field that open_clip has no counterpart of.
    """
    for name in (PROCESSOR, PREPROCESSOR):
        path = folder / name
        if not path.is_file():
            continue
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if name == PROCESSOR and "image_processor" not in values:
                continue  # as transformers 4 wrote it
            return _of(values["image_processor"] if name == PROCESSOR else values, path, model_type, image_size)
        except (OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
            raise SettingsError(f"{path} is no configuration of an image processor: {error}") from error
    return {} if model_type == "clip" else _of({"size": image_size}, folder, model_type, image_size)


def _of(values: Mapping[str, Any], path: Path, model_type: str, image_size: int) -> dict[str, Any]:
    def refused(key: str, why: str) -> SettingsError:
        return SettingsError(f"{path}: {key} {json.dumps(fields.get(key))}: {why}")

    fields = dict(values)
    named = str(values.get("image_processor_type") or values.get("feature_extractor_type") or "")
    short = named.removesuffix("Fast").removesuffix("Pil")
    if short == _TIMM:
        fields = _from_timm(values["pretrained_cfg"], path)
    kind = model_type if short in ("", _TIMM) else _CLASSES.get(short)
    if kind is None:
        raise SettingsError(
            f"{path}: images of {named} are not those of CLIPImageProcessor or SiglipImageProcessor, which are read"
        )
    known = _DEFAULTS[kind] | fields
    unknown = sorted(known.keys() - _DEFAULTS[kind].keys() - _NO_EFFECT)
    if key := next((key for key in unknown if fields[key] is not None), None):
        raise refused(key, "no field of CLIPImageProcessor or SiglipImageProcessor: remove it if it has no use")
    fields = known
    steps = {
        "do_rescale": ("rescale_factor",),
        "do_normalize": ("image_mean", "image_std"),
        "do_center_crop": ("crop_size",),
    }
    needed = ("size", "resample", *(key for step, keys in steps.items() if fields[step] for key in keys))
    if key := next((key for key in needed if fields[key] is None), None):  # null is no default in transformers 5
        raise refused(key, "it has no value")
    if not fields["do_resize"]:
        raise refused("do_resize", "images of any size do not fit the model")
    size = _size(fields["size"], square=fields["default_to_square"])
    crop = _size(fields["crop_size"], square=True) if fields["do_center_crop"] else None
    if size.keys() == {"height", "width"}:
        mode, final = "squash", size
        fits = crop in (None, final)
    elif size.keys() == {"shortest_edge"}:
        mode, final = "shortest", dict.fromkeys(("height", "width"), size["shortest_edge"])
        fits = crop == final
        if crop is None:
            raise refused("do_center_crop", "images that are not square do not fit the model")
    else:
        raise refused("size", "open_clip has only height and width, or shortest_edge")
    if not fits:
        raise refused("crop_size", f"open_clip does not crop images of size {json.dumps(size)} to another size")
    if final != {"height": image_size, "width": image_size}:
        raise refused("size", f"the model takes images of {image_size} x {image_size} pixels (image_size)")
    if fields["do_pad"] and fields["pad_size"] is not None and _size(fields["pad_size"], square=True) != final:
        raise refused("pad_size", "open_clip does not pad these images")
    filters = {number: name for name, number in RESAMPLE.items()}
    if fields["resample"] not in filters:
        raise refused("resample", "open_clip has no such filter, only 2 (bilinear) and 3 (bicubic)")
    # Of a byte b, transformers makes (factor b - mean) / std, and open_clip (b / 255 - mean) / std.
    scale = 255 * float(fields["rescale_factor"] if fields["do_rescale"] else 1)
    if not 0 < scale < math.inf:
        raise refused("rescale_factor", "it must be a positive number")
    scale = 1.0 if math.isclose(scale, 1, rel_tol=1e-6) else scale
    mean, std = (fields["image_mean"], fields["image_std"]) if fields["do_normalize"] else (0, 1)
    return {
        "mean": [one / scale for one in _channels(mean)],
        "std": [one / scale for one in _channels(std)],
        "interpolation": filters[fields["resample"]],
        "resize_mode": mode,
    }


def _channels(values: Any) -> list[float]:
    return [float(one) for one in values] if isinstance(values, list) else [float(values)] * 3


def _size(value: Any, *, square: bool) -> dict[str, int]:
    """A size in any form of transformers, as a dictionary; a number is a square or the shortest edge."""
    if isinstance(value, list | tuple):
        return {"height": value[0], "width": value[1]}
    if isinstance(value, dict):
        return {key: side for key, side in value.items() if side is not None}
    return {"height": value, "width": value} if square else {"shortest_edge": value}


def _from_timm(cfg: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The fields of CLIPImageProcessor for a pretrained_cfg of timm, as the verb `export` writes it."""
    crop, (_, height, width) = cfg["crop_mode"] == "center", cfg["input_size"]
    if cfg["crop_pct"] != 1 or cfg["crop_mode"] not in ("center", "squash"):
        raise SettingsError(f"{path}: open_clip has no crop_mode {cfg['crop_mode']} with crop_pct {cfg['crop_pct']}")
    size = {"height": height, "width": width}
    return {
        "size": {"shortest_edge": height} if crop else size,
        "do_center_crop": crop,
        "crop_size": size,
        "resample": RESAMPLE[cfg["interpolation"]],
        "image_mean": cfg["mean"],
        "image_std": cfg["std"],
    }
