"""Image processors of transformers: the files of a folder enter, open_clip's preprocess_cfg of the same pixels leaves.

Every field of CLIPImageProcessor and SiglipImageProcessor (of transformers 4 and 5, also their Fast and Pil classes) is
used, has no effect on the pixels of an image file, or is refused by name; so is a field that they do not have.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from clipstream.errors import SettingsError, errors_as
from clipstream.utils.logs import logger

PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
RESAMPLE = {"bilinear": 2, "bicubic": 3}  # Pillow's numbers of its filters
_FILTERS = {number: name for name, number in RESAMPLE.items()}
# Defaults of transformers' classes, which files leave out.
_COMMON: dict[str, Any] = {
    **dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True), "resample": 3, "rescale_factor": 1 / 255,
    **dict.fromkeys(("do_center_crop", "do_pad"), False), **dict.fromkeys(("crop_size", "pad_size")),
}  # fmt: skip
_DEFAULTS = {
    "clip": _COMMON | {
        "size": 224, "crop_size": 224, "do_center_crop": True, "default_to_square": False,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    },
    "siglip": _COMMON | {"size": 224, "default_to_square": True, "image_mean": 0.5, "image_std": 0.5},
}  # fmt: skip
_CLASSES = {"CLIPImageProcessor": "clip", "CLIPFeatureExtractor": "clip", "SiglipImageProcessor": "siglip"}
# Fields without which a step cannot be.
_NEEDED = {"do_rescale": "rescale_factor", "do_normalize": "image_mean", "do_center_crop": "crop_size"}
_DAMAGED = (OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
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
        with errors_as(SettingsError, f"{folder / name} is no configuration of an image processor", *_DAMAGED):
            values = json.loads(path.read_text(encoding="utf-8")) if (path := folder / name).is_file() else {}
            if (name == PREPROCESSOR and path.is_file()) or "image_processor" in values:  # which transformers 4 lacks
                return _of(values["image_processor"] if name == PROCESSOR else values, path, model_type, image_size)
    _warn_of_defaults(folder, model_type)
    return _of({"size": image_size, "crop_size": image_size}, folder, model_type, image_size)


@cache  # a folder is read several times
def _warn_of_defaults(folder: Path, model_type: str) -> None:
    logger.warning(f"{folder} has no {PREPROCESSOR}: images get the defaults of transformers' {model_type} processor")


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
    unknown = (key for key in fields if key not in _DEFAULTS[kind].keys() | _NO_EFFECT)
    if key := next((key for key in unknown if fields[key] is not None), None):
        raise refused(key, "no field of CLIPImageProcessor or SiglipImageProcessor: remove it if it has no use")
    fields = _DEFAULTS[kind] | fields
    needed = ["size", "resample", *(_NEEDED[step] for step in _NEEDED if fields[step])]
    if key := next((key for key in needed if fields[key] is None), None):  # null is no default in transformers 5
        raise refused(key, "it has no value")
    # Of a byte b, transformers makes (factor b - mean) / std, and open_clip (b / 255 - mean) / std.
    scale = 255 * float(fields["rescale_factor"] if fields["do_rescale"] else 1)
    scale = 1.0 if math.isclose(scale, 1, rel_tol=1e-6) else scale
    size = _size(fields["size"], square=fields["default_to_square"])
    crop = _size(fields["crop_size"], square=True) if fields["do_center_crop"] else None
    pad = fields["do_pad"] and fields["pad_size"] and _size(fields["pad_size"], square=True)
    if not (squash := size.keys() == {"height", "width"}) and size.keys() != {"shortest_edge"}:
        raise refused("size", "open_clip has only height and width, or shortest_edge")
    final = size if squash else dict.fromkeys(("height", "width"), size["shortest_edge"])
    for key, wrong, why in (
        ("do_resize", not fields["do_resize"], "images of any size do not fit the model"),
        ("do_center_crop", not (squash or crop), "images that are not square do not fit the model"),
        ("crop_size", crop not in (None, final), f"open_clip does not crop images of size {json.dumps(size)}"),
        ("size", {*final.values()} != {image_size}, f"the model takes {image_size} x {image_size} pixels (image_size)"),
        ("pad_size", pad and pad != final, "open_clip does not pad these images"),
        ("resample", fields["resample"] not in _FILTERS, "open_clip has only 2 (bilinear) and 3 (bicubic)"),
        ("rescale_factor", not 0 < scale < math.inf, "it must be a positive number"),
    ):
        if wrong:
            raise refused(key, why)
    mean, std = (fields["image_mean"], fields["image_std"]) if fields["do_normalize"] else (0, 1)
    channels = (values if isinstance(values, list) else [values] * 3 for values in (mean, std))
    found: dict[str, Any] = dict(
        zip(("mean", "std"), ([float(one) / scale for one in values] for values in channels), strict=True)
    )
    found |= {"interpolation": _FILTERS[fields["resample"]], "resize_mode": "squash" if squash else "shortest"}
    return found if squash or short == _TIMM else found | {"floor_crop": True}


def _size(value: Any, *, square: bool) -> dict[str, int]:
    """A size in any form of transformers, as a dictionary; a number is a square or the shortest edge."""
    if isinstance(value, list | tuple):
        return {"height": value[0], "width": value[1]}
    if isinstance(value, dict):
        return {key: side for key, side in value.items() if side is not None}
    return {"height": value, "width": value} if square else {"shortest_edge": value}


def _from_timm(cfg: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The fields of CLIPImageProcessor for a pretrained_cfg of timm, as the verb `export` writes it."""
    (_, *size), mode = cfg["input_size"], cfg["crop_mode"]
    if cfg["crop_pct"] != 1 or mode not in ("center", "squash"):
        raise SettingsError(f"{path}: open_clip has no crop_mode {mode} with crop_pct {cfg['crop_pct']}")
    found = {"image_mean": cfg["mean"], "image_std": cfg["std"], "resample": RESAMPLE[cfg["interpolation"]]}
    return found | {
        "size": size[0] if mode == "center" else size,
        "do_center_crop": mode == "center",
        "crop_size": size,
    }
