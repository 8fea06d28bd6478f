"""What the installed open_clip offers by name: model configurations and pretrained tags.

Read from the package without importing it (and torch), unless it is imported already; then names registered with
`open_clip.add_model_config` are included.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

from clipstream.errors import SettingsError, did_you_mean

HUB, LOCAL = "hf-hub:", "local-dir:"
# Defaults of open_clip (CLIPVisionCfg and CLIPTextCfg in open_clip/model.py).
_VISION = {"layers": 12, "width": 768, "head_width": 64, "patch_size": 16, "image_size": 224}
_TEXT = {"context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 12}


@functools.cache
def _package() -> Path:
    spec = importlib.util.find_spec("open_clip")
    if spec is None or not spec.submodule_search_locations:
        raise SettingsError("open_clip is not installed: pip install open_clip_torch")
    return Path(spec.submodule_search_locations[0])


def table() -> Any:
    """open_clip's module of pretrained tags, imported without open_clip/__init__, which imports torch."""
    name = "_clipstream_open_clip"
    if "open_clip.pretrained" in sys.modules:
        return sys.modules["open_clip.pretrained"]
    if f"{name}.pretrained" not in sys.modules:
        stub = types.ModuleType(name)
        stub.__path__ = [str(_package())]
        sys.modules[name] = stub
        # The module imports safetensors.torch for its downloads, if it can; block that, as it imports torch.
        absent = "safetensors.torch" not in sys.modules
        if absent:
            sys.modules["safetensors.torch"] = None  # type: ignore[assignment]
        try:
            importlib.import_module(f"{name}.pretrained")
        finally:
            if absent:
                del sys.modules["safetensors.torch"]
    return sys.modules[f"{name}.pretrained"]


def builtin(name: str) -> dict[str, Any]:
    """open_clip's configuration of that name.

    Raises:
        SettingsError: there is none; similar names are suggested.
    """
    factory = sys.modules.get("open_clip.factory")
    if factory is not None:
        known = factory.list_models()
        config = factory.get_model_config(name) if name in known else None
    else:
        files = {path.stem: path for path in (_package() / "model_configs").glob("*.json")}
        known, config = list(files), None
        if name in files:
            config = json.loads(files[name].read_text())
    if config is None:
        raise SettingsError(
            f"open_clip has no model {name!r}: model.name is open_clip's name, a path to a JSON configuration, "
            f"{HUB}ORG/NAME or {LOCAL}PATH{did_you_mean(name, known, 3)}"
        )
    found: dict[str, Any] = config
    return found


def read_config(path: Path) -> dict[str, Any]:
    """A configuration file as {'model_cfg': …, 'preprocess_cfg': …}; a bare model_cfg is accepted, too."""
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise SettingsError(f"there is no model configuration {path}") from error
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise SettingsError(f"cannot read the model configuration {path}: {why}") from error
    return as_config(config, str(path))


def as_config(config: Any, place: str) -> dict[str, Any]:
    """The content of a configuration file as `read_config` gives it; `place` names it in errors."""
    model_cfg = config.get("model_cfg", config) if isinstance(config, dict) else None
    if not isinstance(model_cfg, dict) or not {"embed_dim", "vision_cfg", "text_cfg"} <= model_cfg.keys():
        raise SettingsError(f"{place} is no configuration of open_clip: it needs embed_dim, vision_cfg and text_cfg")
    preprocess_cfg = config.get("preprocess_cfg") or {}
    for key, part in {**model_cfg, "preprocess_cfg": preprocess_cfg}.items():
        if key in ("vision_cfg", "text_cfg", "preprocess_cfg") and not isinstance(part, dict):
            raise SettingsError(f"{place} is no configuration of open_clip: {key} is a mapping, not {part!r}")
    return {"model_cfg": model_cfg, "preprocess_cfg": preprocess_cfg}


def check_sizes(label: str, model_cfg: dict[str, Any], image_size: int | None) -> None:
    """Raise for sizes that do not fit together, in open_clip's own towers. timm and transformers check theirs.

    Args:
        label: the model's name in messages.
        image_size: pixels per side that replace the configuration's.
    """
    vision, text = dict(_VISION, **model_cfg["vision_cfg"]), dict(_TEXT, **model_cfg["text_cfg"])
    size_key = "vision_cfg.image_size" if image_size is None else "model.image_size"
    image = vision["image_size"] if image_size is None else image_size
    sizes: dict[str, Any] = {"embed_dim": model_cfg["embed_dim"], "text_cfg.context_length": text["context_length"]}
    divided: list[tuple[str, str]] = []
    if not vision.get("timm_model_name"):
        axes = list(image) if isinstance(image, list | tuple) and len(image) == 2 else [image]
        sizes |= {size_key: image} if len(axes) == 1 else {f"{size_key}.{n}": axis for n, axis in enumerate(axes)}
        sizes |= {f"vision_cfg.{key}": vision[key] for key in ("width", "head_width")}
        if not isinstance(vision["layers"], list | tuple):  # a ResNet has four numbers of layers, and no patches
            sizes |= {f"vision_cfg.{key}": vision[key] for key in ("layers", "patch_size")}
            divided += [(key, "vision_cfg.patch_size") for key in sizes if key.startswith(size_key)]
            divided.append(("vision_cfg.width", "vision_cfg.head_width"))
    if not text.get("hf_model_name"):
        sizes |= {f"text_cfg.{key}": text[key] for key in ("vocab_size", "width", "heads", "layers")}
        divided.append(("text_cfg.width", "text_cfg.heads"))
    for key, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise SettingsError(f"{label}: {key} is {value!r}, and must be a whole number, at least 1")
    for key, by in divided:
        if sizes[key] % sizes[by]:
            below = sizes[key] // sizes[by] * sizes[by]
            near = " or ".join(str(n) for n in (below, below + sizes[by]) if n)
            raise SettingsError(f"{label}: {key} is {sizes[key]}, no multiple of {by}, {sizes[by]}: {near} would be")


def refuse(name: str, model_cfg: dict[str, Any]) -> None:
    """Raise for models other than a pair of an image and a text tower of fixed size."""
    vision = model_cfg["vision_cfg"]
    kind = ""
    if "multimodal_cfg" in model_cfg:
        kind = "a CoCa model, which generates captions"
    elif any("naflex" in key for key in (*model_cfg, *vision, str(vision.get("timm_model_name")))):
        kind = "a NaFlex model, which takes pictures of any shape"
    elif any("audio" in key for key in model_cfg):
        kind = "an audio model"
    if kind:
        raise SettingsError(f"model {name} is {kind}: clipstream trains image-text models of one picture size")
