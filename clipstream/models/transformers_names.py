"""transformers' CLIPModel and SiglipModel: their configurations and names of tensors, from and to those of open_clip.

One table of names is read in both directions: `--pretrained` reads a folder of transformers, and the verb `export`
writes one. Imports torch on use, as configurations are read before it is imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipstream.errors import SettingsError

if TYPE_CHECKING:
    import torch

Config = dict[str, Any]
Row = tuple[tuple[str, ...], tuple[str, ...], str]  # open_clip's pieces, transformers' pieces, how the shape differs

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"  # files of transformers
MODEL_TYPES = ("clip", "siglip")
BOS, EOS = 49406, 49407  # ids of CLIP's own BPE
RESAMPLE = {"bilinear": 2, "bicubic": 3}  # Pillow's numbers of its filters
_SIGLIP_SIZES = {(768, 12): "base", (1024, 24): "large", (1152, 27): "so400m", (1536, 40): "giantopt"}

# A row names pieces of tensors: a name that occurs k times is cut into, or joined from, k equal pieces. `#` is the
# number of a layer, `*` stands for weight and bias. Shapes: "T" is transposed, "[1]" has a first dimension of 1 in
# open_clip's model.
_QKV = tuple(f"self_attn.{name}_proj.*" for name in "qkv")
_BLOCK = (
    (("ln_1.*",), ("layer_norm1.*",)),
    (("ln_2.*",), ("layer_norm2.*",)),
    (("attn.in_proj_*",) * 3, _QKV),
    (("attn.out_proj.*",), ("self_attn.out_proj.*",)),
    (("mlp.c_fc.*",), ("mlp.fc1.*",)),
    (("mlp.c_proj.*",), ("mlp.fc2.*",)),
)
_TIMM_BLOCK = (
    (("norm1.*",), ("layer_norm1.*",)),
    (("norm2.*",), ("layer_norm2.*",)),
    (("attn.qkv.*",) * 3, _QKV),
    (("attn.proj.*",), ("self_attn.out_proj.*",)),
    (("mlp.fc1.*",), ("mlp.fc1.*",)),
    (("mlp.fc2.*",), ("mlp.fc2.*",)),
)
_TEXT, _TEXT_LAYER = "text_model.", "text_model.encoder.layers.#."
_IMAGE, _IMAGE_LAYER = "vision_model.", "vision_model.encoder.layers.#."


def _layers(block: Iterable[tuple[tuple[str, ...], ...]], ours: str, theirs: str) -> Iterator[Row]:
    for mine, other in block:
        yield tuple(ours + name for name in mine), tuple(theirs + name for name in other), ""


def _rows(ours: str, theirs: str, names: Iterable[tuple[str, str, str]]) -> Iterator[Row]:
    for mine, other, how in names:
        yield (ours + mine,), (theirs + other,), how


TEXT: tuple[Row, ...] = (
    (("token_embedding.weight",), (_TEXT + "embeddings.token_embedding.weight",), ""),
    (("positional_embedding",), (_TEXT + "embeddings.position_embedding.weight",), ""),
    *_layers(_BLOCK, "transformer.resblocks.#.", _TEXT_LAYER),
    (("ln_final.*",), (_TEXT + "final_layer_norm.*",), ""),
    (("text_projection",), ("text_projection.weight",), "T"),
    (("text_projection.*",), (_TEXT + "head.*",), ""),
)
IMAGE: tuple[Row, ...] = (
    *_rows(
        "visual.",
        _IMAGE,
        (
            ("class_embedding", "embeddings.class_embedding", ""),
            ("positional_embedding", "embeddings.position_embedding.weight", ""),
            ("conv1.weight", "embeddings.patch_embedding.weight", ""),
            ("ln_pre.*", "pre_layrnorm.*", ""),
            ("ln_post.*", "post_layernorm.*", ""),
        ),
    ),
    *_layers(_BLOCK, "visual.transformer.resblocks.#.", _IMAGE_LAYER),
    (("visual.proj",), ("visual_projection.weight",), "T"),
)
TIMM_IMAGE: tuple[Row, ...] = (
    *_rows(
        "visual.trunk.",
        _IMAGE,
        (
            ("patch_embed.proj.*", "embeddings.patch_embedding.*", ""),
            ("pos_embed", "embeddings.position_embedding.weight", "[1]"),
            ("norm.*", "post_layernorm.*", ""),
            ("attn_pool.latent", "head.probe", ""),
            ("attn_pool.proj.*", "head.attention.out_proj.*", ""),
            ("attn_pool.norm.*", "head.layernorm.*", ""),
            ("attn_pool.mlp.fc1.*", "head.mlp.fc1.*", ""),
            ("attn_pool.mlp.fc2.*", "head.mlp.fc2.*", ""),
        ),
    ),
    *_layers(_TIMM_BLOCK, "visual.trunk.blocks.#.", _IMAGE_LAYER),
    (
        ("visual.trunk.attn_pool.q.*", *("visual.trunk.attn_pool.kv.*",) * 2),
        (f"{_IMAGE}head.attention.in_proj_*",) * 3,
        "",
    ),
)
SCALARS: tuple[Row, ...] = tuple(((name,), (name,), "") for name in ("logit_scale", "logit_bias"))


def renamed(
    state: Mapping[str, torch.Tensor], rows: Iterable[Row], *, reverse: bool = False
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Tensors under transformers' names, or with `reverse` under open_clip's, and the names that the rows lack."""
    import torch

    layers = 1 + max((int(number) for name in state for number in re.findall(r"\.(\d+)\.", name)), default=0)
    left, found = dict(state), dict[str, torch.Tensor]()
    for ours, theirs, how in rows:
        ends = ("weight", "bias") if ours[0].endswith("*") else ("",)
        for number in range(layers if "#" in ours[0] else 1):
            for end in ends:
                sides = [[name.replace("#", str(number)).replace("*", end) for name in side] for side in (ours, theirs)]
                source, target = reversed(sides) if reverse else sides
                names = dict.fromkeys(source)
                if not left.keys() >= names.keys():
                    continue
                pieces = [piece for name in names for piece in _cut(left.pop(name), source.count(name))]
                for name in dict.fromkeys(target):
                    parts = [piece for piece, wanted in zip(pieces, target, strict=True) if wanted == name]
                    found[name] = _shaped(parts[0] if len(parts) == 1 else torch.cat(parts), how, reverse)
    return found, [*left]


def _cut(tensor: torch.Tensor, pieces: int) -> tuple[torch.Tensor, ...]:
    return (tensor,) if pieces == 1 else tensor.chunk(pieces)


def _shaped(tensor: torch.Tensor, how: str, reverse: bool) -> torch.Tensor:
    tensor = tensor.T if how == "T" else tensor
    return (tensor if how != "[1]" else tensor[None] if reverse else tensor[0]).contiguous()


def from_transformers(state: Mapping[str, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    """The weights of a CLIPModel or SiglipModel by open_clip's names.

    Raises SettingsError: the file holds tensors of another model of transformers.
    """
    siglip = any(name.endswith("head.probe") for name in state)
    state = {name: tensor for name, tensor in state.items() if not name.endswith(".position_ids")}
    found, left = renamed(state, (*TEXT, *(TIMM_IMAGE if siglip else IMAGE), *SCALARS), reverse=True)
    if left:
        raise SettingsError(
            f"{path} holds weights of transformers that are not those of a CLIPModel or SiglipModel ({left[0]}): "
            "other classes have no counterpart in open_clip"
        )
    return found


def read_config(folder: Path) -> Config | None:
    """The configuration of open_clip for a folder of transformers' CLIPModel or SiglipModel; None for other folders.

    Raises SettingsError: a configuration that open_clip cannot build, or a damaged one of the image processor.
    """
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict) or config.get("model_type") not in MODEL_TYPES:
        return None
    if not {"vision_config", "text_config"} <= config.keys():
        raise SettingsError(f"{folder / CONFIG} has no vision_config and text_config: it is not of a whole model")
    preprocess: Config = {}
    if (folder / PREPROCESSOR).is_file():
        try:
            values = json.loads((folder / PREPROCESSOR).read_text(encoding="utf-8"))
            preprocess = _preprocess(values, folder / PREPROCESSOR)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise SettingsError(
                f"{folder / PREPROCESSOR} is no configuration of an image processor: {error}"
            ) from error
    siglip = config["model_type"] == "siglip"
    return {"model_cfg": (_siglip if siglip else _clip)(config, folder), "preprocess_cfg": preprocess}


def _sizes(section: Mapping[str, Any], defaults: Config) -> Config:
    """The values of a configuration of transformers that open_clip's has too; files leave out defaults."""
    found = defaults | {key: section[key] for key in defaults if section.get(key) is not None}
    ratio = found["intermediate_size"] / found["hidden_size"]
    return found | {"mlp_ratio": ratio}


def _clip(config: Config, folder: Path) -> Config:
    common = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
    vision = _sizes(
        config["vision_config"],
        {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
        | {"image_size": 224, "patch_size": 32, **common},
    )
    text = _text_sizes(config["text_config"], {"vocab_size": 49408, "max_position_embeddings": 77, **common}, 512)
    acts = {vision["hidden_act"], text["hidden_act"]}
    if len(acts) > 1 or not acts <= {"quick_gelu", "gelu"}:
        raise SettingsError(f"{folder / CONFIG}: open_clip's CLIP has no activation {' and '.join(sorted(acts))}")
    found: Config = {
        "embed_dim": config.get("projection_dim", 512),
        "vision_cfg": {
            "image_size": vision["image_size"],
            "patch_size": vision["patch_size"],
            "layers": vision["num_hidden_layers"],
            "width": vision["hidden_size"],
            "head_width": vision["hidden_size"] // vision["num_attention_heads"],
            "mlp_ratio": vision["mlp_ratio"],
        },
        "text_cfg": _text_cfg(text),
    }
    for key, section in (("vision_cfg", vision), ("text_cfg", text)):
        if section["layer_norm_eps"] != 1e-5:
            found[key]["norm_kwargs"] = {"eps": section["layer_norm_eps"]}
    if config["text_config"].get("vocab_size", 49408) != 49408:
        found["text_cfg"]["hf_tokenizer_name"] = "tokenizer"  # the files beside the configuration
    return found | ({"quick_gelu": True} if acts == {"quick_gelu"} else {})


def _text_sizes(section: Mapping[str, Any], own: Config, width: int) -> Config:
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 12}
    return _sizes(section, {**sizes, "num_attention_heads": width // 64, **own})


def _text_cfg(text: Config) -> Config:
    return {
        "context_length": text["max_position_embeddings"],
        "vocab_size": text["vocab_size"],
        "width": text["hidden_size"],
        "heads": text["num_attention_heads"],
        "layers": text["num_hidden_layers"],
        "mlp_ratio": text["mlp_ratio"],
    }


def _siglip(config: Config, folder: Path) -> Config:
    own = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
    vision = _sizes(
        config["vision_config"],
        {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
        | {"image_size": 224, "patch_size": 16, **own},
    )
    text = _text_sizes(config["text_config"], {"vocab_size": 32000, "max_position_embeddings": 64, **own}, 768)
    size = _SIGLIP_SIZES.get((vision["hidden_size"], vision["num_hidden_layers"]))
    name = f"vit_{size}_patch{vision['patch_size']}_siglip_{vision['image_size']}"
    if size is None:
        shape = f"width {vision['hidden_size']}, {vision['num_hidden_layers']} layers"
        raise SettingsError(
            f"{folder / CONFIG}: timm has no SigLIP image tower of {shape}, which open_clip takes it from"
        )
    return {
        "embed_dim": text.get("projection_size") or text["hidden_size"],
        "init_logit_bias": -10.0,
        "custom_text": True,
        "vision_cfg": {
            "image_size": vision["image_size"],
            "timm_model_name": name,
            "timm_model_pretrained": False,
            "timm_pool": "map",
            "timm_proj": "none",
        },
        "text_cfg": {
            **_text_cfg(text),
            "hf_tokenizer_name": "tokenizer",
            "tokenizer_kwargs": {"clean": "canonicalize"},
            "no_causal_mask": True,
            "proj_bias": True,
            "pool_type": "last",
            "norm_kwargs": {"eps": text["layer_norm_eps"]},
            **({"act_kwargs": {"approximate": "tanh"}} if text["hidden_act"] == "gelu_pytorch_tanh" else {}),
        },
    }


def _preprocess(values: Mapping[str, Any], path: Path) -> Config:
    """open_clip's preprocess_cfg for the image processors of CLIP and SigLIP."""
    size, crop = values.get("size"), values.get("crop_size")
    edge = size.get("shortest_edge") if isinstance(size, dict) else size
    sides = set(crop.values()) if isinstance(crop, dict) else {crop}
    if values.get("do_center_crop", True) and edge is not None and crop is not None and sides != {edge}:
        raise SettingsError(f"{path}: open_clip does not crop images of shortest edge {edge} to {crop}")
    squash = isinstance(size, dict) and "height" in size and not values.get("do_center_crop")
    found = {"mean": values.get("image_mean"), "std": values.get("image_std")}
    filters = {number: name for name, number in RESAMPLE.items()}
    resample = 3 if values.get("resample") is None else values["resample"]
    if resample not in filters:
        raise SettingsError(
            f"{path}: open_clip has no filter for resample {resample}, only 2 (bilinear) and 3 (bicubic)"
        )
    found |= {"interpolation": filters[resample]}
    return {key: value for key, value in found.items() if value} | {"resize_mode": "squash" if squash else "shortest"}
