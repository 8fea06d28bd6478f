"""Configurations of models in open_clip's form: built-in ones, files, and checks of their values.

open_clip's own configurations and pretrained tags are read from the installed package without importing it (and
torch), unless it is imported already; then names registered with `open_clip.add_model_config` are included.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat
from typing_extensions import NotRequired, TypedDict

from clipstream.errors import SettingsError, did_you_mean
from clipstream.utils.section import checked

HUB, LOCAL = "hf-hub:", "local-dir:"
# Defaults of open_clip (CLIPVisionCfg and CLIPTextCfg in open_clip/model.py).
_VISION = {"layers": 12, "width": 768, "head_width": 64, "patch_size": 16, "image_size": 224}
_TEXT = {"context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 12}
MOST_LAYERS, MOST_PARAMETERS = 10_000, 10**11  # of a tower, and of a model
Config = dict[str, Any]  # JSON, with open_clip's keys


class _Text(TypedDict, total=False):
    """What clipstream reads of a text_cfg; open_clip checks the rest when it builds the tower."""

    hf_model_name: str | None
    hf_model_pretrained: bool | None
    hf_tokenizer_name: str | None
    tokenizer_kwargs: dict[str, object] | None
    tokenizer_mode: str | None


class _Vision(TypedDict, total=False):
    """Likewise of a vision_cfg."""

    timm_model_name: str | None
    timm_model_pretrained: bool | None


class _Model(TypedDict):
    """Likewise of a model_cfg."""

    embed_dim: int
    vision_cfg: _Vision
    text_cfg: _Text
    init_logit_bias: NotRequired[FiniteFloat | None]
    init_logit_scale: NotRequired[FiniteFloat | None]


_Channels = Annotated[list[FiniteFloat], Field(min_length=3, max_length=3)]
_Pixels = Annotated[int, Field(ge=1)]


class _Preprocess(TypedDict, total=False):
    """A preprocess_cfg."""

    size: _Pixels | Annotated[list[_Pixels], Field(min_length=2, max_length=2)] | None
    mean: _Channels | None
    std: Annotated[list[Annotated[FiniteFloat, Field(gt=0)]], Field(min_length=3, max_length=3)] | None
    interpolation: Literal["bicubic", "bilinear", "random"] | None
    resize_mode: Literal["shortest", "longest", "squash"] | None
    fill_color: int | list[int] | None


@dataclass(frozen=True)
class ModelConfig:
    """The content of an open_clip_config.json."""

    model_cfg: Config  # towers and embedding; arguments of open_clip's model
    preprocess_cfg: Config  # mean, std, interpolation, ...; open_clip's defaults where it lacks a key

    @classmethod
    def of(cls, content: object, where: str) -> ModelConfig:
        """The configuration in a JSON file's content, which may be a bare model_cfg; `where` names it in errors.

        Raises SettingsError: it is no configuration of open_clip.
        """
        model_cfg = content.get("model_cfg", content) if isinstance(content, dict) else None
        preprocess_cfg = (content.get("preprocess_cfg") if isinstance(content, dict) else None) or {}
        try:
            checked(_Model, model_cfg)
            checked(_Preprocess, preprocess_cfg)
        except ValueError as error:
            raise SettingsError(
                f"{where} is no configuration of open_clip: it needs embed_dim, vision_cfg and text_cfg ({error})"
            ) from error
        assert isinstance(model_cfg, dict) and isinstance(preprocess_cfg, dict)
        return cls(model_cfg, preprocess_cfg)

    @classmethod
    def read(cls, path: Path) -> ModelConfig:
        """The configuration in a file. Raises SettingsError: there is none, or it is no configuration of open_clip."""
        try:
            content = json.loads(path.read_text(encoding="utf-8-sig"))
        except FileNotFoundError as error:
            raise SettingsError(f"there is no model configuration {path}") from error
        except (OSError, ValueError, RecursionError) as error:
            why = getattr(error, "strerror", None) or error
            raise SettingsError(f"cannot read the model configuration {path}: {why}") from error
        return cls.of(content, str(path))


@functools.cache
def _package() -> Path:
    spec = importlib.util.find_spec("open_clip")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def pretrained_tags() -> Any:
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


def builtin(name: str) -> Config:
    """open_clip's configuration of that name. Raises SettingsError: there is none; similar names are suggested."""
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
    found: Config = config
    return found


def check_sizes(label: str, model_cfg: Config, image_size: int | None) -> None:
    """Raise for sizes that do not fit together, in open_clip's own towers. timm and transformers check theirs.

    Args:
        image_size: pixels per side that replace the configuration's.
    """
    vision, text = dict(_VISION, **model_cfg["vision_cfg"]), dict(_TEXT, **model_cfg["text_cfg"])
    size_key = "vision_cfg.image_size" if image_size is None else "model.image_size"
    image = vision["image_size"] if image_size is None else image_size
    sizes: Config = {"embed_dim": model_cfg["embed_dim"], "text_cfg.context_length": text["context_length"]}
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
    if size := _too_large(vision, text, sizes):
        raise SettingsError(f"{label}: {size}, more than any machine here can hold: correct its configuration")
    for key, by in divided:
        if sizes[key] % sizes[by]:
            below = sizes[key] // sizes[by] * sizes[by]
            near = " or ".join(str(n) for n in (below, below + sizes[by]) if n)
            raise SettingsError(f"{label}: {key} is {sizes[key]}, no multiple of {by}, {sizes[by]}: {near} would be")


def _too_large(vision: Config, text: Config, sizes: Config) -> str:
    """Why a model of these sizes, in open_clip's own towers, cannot be built; empty if it can."""
    layers = vision["layers"] if isinstance(vision["layers"], list | tuple) else [vision["layers"]]
    total = 0
    for name, part, depth in (("vision_cfg", vision, layers), ("text_cfg", text, [text["layers"]])):
        if f"{name}.width" not in sizes:
            continue  # timm's, or of transformers
        if not all(isinstance(count, int) and 0 < count <= MOST_LAYERS for count in depth):
            return f"{name}.layers is {part['layers']}"
        ratio = part.get("mlp_ratio", 4.0)
        total += sum(depth) * int(part["width"] ** 2 * (4 + 2 * (ratio if isinstance(ratio, int | float) else 4)))
    tables = [("vision_cfg.width", key) for key in sizes if "image_size" in key]
    tables += [("text_cfg.width", f"text_cfg.{key}") for key in ("vocab_size", "context_length")]
    tables += [(f"{name}_cfg.width", "embed_dim") for name in ("vision", "text")]
    total += sum(sizes.get(width, 0) * sizes.get(rows, 0) for width, rows in tables)
    return f"it would have about {total:.1e} parameters" if total > MOST_PARAMETERS else ""


def refuse(name: str, model_cfg: Config) -> None:
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
        raise SettingsError(
            f"model {name} is {kind}: clipstream trains image-text models of one picture size; train this one with "
            "open_clip_train"
        )
