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

from clipstream.errors import SettingsError, absent, did_you_mean, errors_as
from clipstream.models import transformers_names
from clipstream.utils.atomic_write import note_input
from clipstream.utils.section import parse_as, shipped_models

HUB, LOCAL = "hf-hub:", "local-dir:"
CONFIG_FILE = "open_clip_config.json"
WEIGHT_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
AVERAGED_FILE = "averaged.safetensors"  # of a checkpoint, beside its trained weights
ADAPTER, AVERAGED_ADAPTER = "adapter", "adapter_averaged"  # folders of a checkpoint, in peft's format
# Defaults of open_clip (CLIPVisionCfg and CLIPTextCfg in open_clip/model.py).
_VISION = {"width": 768, "head_width": 64, "patch_size": 16, "image_size": 224}
_TEXT = {"width": 512, "heads": 8}
Config = dict[str, Any]  # JSON, with open_clip's keys
_Size = Annotated[int, Field(strict=True, ge=1, le=1 << 16)]
_Layers = Annotated[int, Field(strict=True, ge=1, le=10_000)]


class _TextConfig(TypedDict, total=False):
    """What clipstream checks of a text_cfg; open_clip checks the rest when it builds the tower."""

    context_length: _Size
    vocab_size: Annotated[int, Field(strict=True, ge=1, le=10**8)]
    width: _Size
    heads: _Size
    layers: _Layers
    hf_model_name: str | None
    hf_model_pretrained: bool | None
    hf_tokenizer_name: str | None
    tokenizer_kwargs: dict[str, object] | None
    tokenizer_mode: str | None


class _Vision(TypedDict, total=False):
    """Likewise of a vision_cfg."""

    image_size: _Size | Annotated[list[_Size], Field(min_length=2, max_length=2)]
    patch_size: _Size | None
    width: _Size
    head_width: _Size
    layers: _Layers | Annotated[list[_Layers], Field(min_length=4, max_length=4)]
    timm_model_name: str | None
    timm_model_pretrained: bool | None


class _Model(TypedDict):
    """Likewise of a model_cfg."""

    embed_dim: _Size
    vision_cfg: _Vision
    text_cfg: _TextConfig
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
    floor_crop: bool | None  # of ours: see ImageSpec


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
        with errors_as(SettingsError, f"{where} is not a model configuration of open_clip", ValueError):
            parse_as(_Model, model_cfg)
            parse_as(_Preprocess, preprocess_cfg)
        assert isinstance(model_cfg, dict) and isinstance(preprocess_cfg, dict)
        return cls(model_cfg, preprocess_cfg)

    @classmethod
    def beside(cls, folder: Path) -> ModelConfig:
        """The configuration of the model in a folder of open_clip, of transformers' CLIPModel or SiglipModel, or of an
        adapter of peft on one of these.

        Raises SettingsError: as `read`.
        """
        note_input(folder := transformers_names.base_of(folder))
        own = folder / CONFIG_FILE
        theirs = None if own.is_file() else transformers_names.read_config(folder)
        return cls.read(own) if theirs is None else cls.of(theirs, str(folder / transformers_names.CONFIG))

    @classmethod
    def read(cls, path: Path) -> ModelConfig:
        """The configuration in a file. Raises SettingsError: there is none, or it is no configuration of open_clip."""
        note_input(path)
        try:
            content = json.loads(path.read_text(encoding="utf-8-sig"))
        except FileNotFoundError as error:
            raise SettingsError(f"there is no model configuration {path}") from error
        except (OSError, ValueError, RecursionError) as error:
            why = getattr(error, "strerror", None) or error
            hint = "" if path.suffix == ".json" else "; weights are given by --pretrained, beside a model's name"
            raise SettingsError(f"cannot read the model configuration {path}: {why}{hint}") from error
        return cls.of(content, str(path))


def is_model(folder: Path) -> bool:
    """Whether a folder holds the configuration of a model that `ModelConfig.beside` reads."""
    folder = transformers_names.base_of(folder)
    return (folder / CONFIG_FILE).is_file() or transformers_names.read_config(folder) is not None


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
    if config is None and name.startswith((".", "/")):
        raise SettingsError(absent(name))
    if config is None:
        raise SettingsError(
            f"open_clip has no model {name!r}: model.name is open_clip's name, a JSON configuration, a run, "
            f"a checkpoint, {HUB}ORG/NAME or {LOCAL}PATH{did_you_mean(name, (*known, *shipped_models()), 3)}"
        )
    found: Config = config
    return found


def check_config(label: str, model_cfg: Config, image_size: int | None) -> None:
    """Check that a model has an image and a text tower of fixed size, and that the sizes of open_clip's own towers fit
    together, with `image_size`, if given, in place of theirs. timm and transformers check their own.

    Raises SettingsError: they do not.
    """
    vision, text = _VISION | model_cfg["vision_cfg"], _TEXT | model_cfg["text_cfg"]
    keys = (*model_cfg, *vision, str(vision.get("timm_model_name")))
    for part, kind in (("multimodal", "CoCa"), ("naflex", "NaFlex"), ("audio", "audio")):
        if any(part in key for key in keys):
            raise SettingsError(f"{label}: {kind} models are not supported; train them with open_clip_train")
    key, size = ("vision_cfg.image_size", vision["image_size"]) if image_size is None else ("image_size", image_size)
    divided = []
    if not vision.get("timm_model_name") and not isinstance(vision.get("layers"), list):  # no ResNet, either
        divided += [
            (key, side, "vision_cfg.patch_size", vision["patch_size"])
            for side in (size if isinstance(size, list) else [size])
        ]
        divided.append(("vision_cfg.width", vision["width"], "vision_cfg.head_width", vision["head_width"]))
    if not text.get("hf_model_name"):
        divided.append(("text_cfg.width", text["width"], "text_cfg.heads", text["heads"]))
    for key, size, other, by in divided:
        if by and size % by:
            raise SettingsError(f"{label}: {key} {size} is not a multiple of {other} {by}")
