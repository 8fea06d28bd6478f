"""Owns what the installed open_clip offers by name: its configurations and its table of pretrained tags.

It is read from the package without importing it (and torch with it), unless it is imported already: then names that
were registered with `open_clip.add_model_config` count.
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


@functools.cache
def _package() -> Path:
    spec = importlib.util.find_spec("open_clip")
    if spec is None or not spec.submodule_search_locations:
        raise SettingsError("open_clip is not installed: pip install open_clip_torch")
    return Path(spec.submodule_search_locations[0])


def table() -> Any:
    """open_clip's module of pretrained tags, from an import that leaves out open_clip/__init__ and with it torch."""
    name = "_clipstream_open_clip"
    if "open_clip.pretrained" in sys.modules:
        return sys.modules["open_clip.pretrained"]
    if f"{name}.pretrained" not in sys.modules:
        stub = types.ModuleType(name)
        stub.__path__ = [str(_package())]
        sys.modules[name] = stub
        # The table's module tries safetensors.torch, for its downloads, and does without where it cannot be imported.
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
        SettingsError: it has none; names near to it are suggested.
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
    """A configuration file as {'model_cfg': …, 'preprocess_cfg': …}; a bare model_cfg is taken as well."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SettingsError(f"there is no model configuration {path}") from error
    except (OSError, ValueError) as error:
        raise SettingsError(f"cannot read the model configuration {path}: {error}") from error
    model_cfg = config.get("model_cfg", config) if isinstance(config, dict) else None
    if not isinstance(model_cfg, dict) or not {"embed_dim", "vision_cfg", "text_cfg"} <= model_cfg.keys():
        raise SettingsError(f"{path} is no configuration of open_clip: it needs embed_dim, vision_cfg and text_cfg")
    return {"model_cfg": model_cfg, "preprocess_cfg": config.get("preprocess_cfg") or {}}


def refuse(name: str, model_cfg: dict[str, Any]) -> None:
    """Raise for models that are no pair of an image and a text tower of fixed size."""
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
