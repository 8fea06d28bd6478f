"""transformers' CLIPModel and SiglipModel: their configurations and names of tensors, from and to those of open_clip.

One table of names is read in both directions: `--pretrained` reads a folder of transformers, and the verb `export`
writes one. Imports torch on use, as configurations are read before it is imported.

Of image processors, the files of a folder enter, and open_clip's preprocess_cfg of the same pixels leaves. Every
field of CLIPImageProcessor and SiglipImageProcessor (of transformers 4 and 5, also their Fast and Pil classes) is
used, has no effect on the pixels of an image file, or is refused by name; so is a field that they do not have.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipstream.errors import SettingsError, errors_as
from clipstream.utils.logs import logger

if TYPE_CHECKING:
    import torch


Config = dict[str, Any]
Row = tuple[tuple[str, ...], tuple[str, ...], str]  # open_clip's pieces, transformers' pieces, how the shape differs

CONFIG = "config.json"  # of transformers
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # of peft
WHOLE = "only whole models are read, CLIPModel and SiglipModel"
MODEL_TYPES = ("clip", "siglip")
EOS = 49407  # id of the end in CLIP's own BPE
CLIP_WORDS = {"in": 512, "core</w>": 5000, "christianity</w>": 20000, "cheek": 40000, "jekyll</w>": 49405}  # some of it
# timm's names of SigLIP's image towers by width, layers, heads, and width of the perceptrons.
_SIGLIP_SIZES = {(768, 12, 12, 3072): "base", (1024, 24, 16, 4096): "large",
                 (1152, 27, 16, 4304): "so400m", (1536, 40, 16, 6144): "giantopt"}  # fmt: skip
# Towers of SigLIP that timm has no name for: width, depth, heads, width of the perceptrons, eps, activation, sizes.
OWN_SIGLIP = re.compile(r"siglip_w(\d+)_d(\d+)_h(\d+)_m(\d+)_e([^_]+)_(\w+)_patch(\d+)_(\d+)")
# Activations of timm by those of transformers.
_TIMM_ACTS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "quick_gelu": "quick_gelu", "relu": "relu"}

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


def rename_tensors(
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
                    found[name] = _reshape(parts[0] if len(parts) == 1 else torch.cat(parts), how, reverse)
    return found, [*left]


def _cut(tensor: torch.Tensor, pieces: int) -> tuple[torch.Tensor, ...]:
    return (tensor,) if pieces == 1 else tensor.chunk(pieces)


def _reshape(tensor: torch.Tensor, how: str, reverse: bool) -> torch.Tensor:
    tensor = tensor.T if how == "T" else tensor
    return (tensor if how != "[1]" else tensor[None] if reverse else tensor[0]).contiguous()


def in_transformers(name: str) -> bool:
    """Whether a CLIPModel or SiglipModel may have a tensor of that name."""
    return name.startswith((_TEXT, _IMAGE, "text_projection.", "visual_projection.", "logit_"))


def from_transformers(state: Mapping[str, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    """The weights of a CLIPModel or SiglipModel by open_clip's names.

    Raises SettingsError: the file holds tensors of another model of transformers.
    """
    if any(".lora_" in name for name in state):
        raise SettingsError(f"{path} is an adapter of peft: name its folder, with {ADAPTER_CONFIG}")
    siglip = any(name.endswith("head.probe") for name in state)
    state = {name: tensor for name, tensor in state.items() if not name.endswith(".position_ids")}
    for absent, part in ((_IMAGE, "a text tower"), (_TEXT, "an image tower")):
        if not any(name.startswith(absent) for name in state):
            raise SettingsError(f"{path} holds {part} of transformers alone: {WHOLE}")
    found, left = rename_tensors(state, (*TEXT, *(TIMM_IMAGE if siglip else IMAGE), *SCALARS), reverse=True)
    if left:
        what = f"weights of transformers that are not those of a CLIPModel or SiglipModel ({left[0]})"
        raise SettingsError(f"{path} holds {what}: other classes have no counterpart in open_clip")
    return found


def base_of(folder: Path) -> Path:
    """The folder of the model that a folder with an adapter of peft belongs to; of any other folder itself.

    Raises SettingsError: this model is neither a folder nor in the Hub's cache.
    """
    if not (folder / ADAPTER_CONFIG).is_file() or (folder / CONFIG).is_file():
        return folder
    base = str(_json(folder, ADAPTER_CONFIG).get("base_model_name_or_path"))
    for path in (Path(base), folder / base):
        if (path / CONFIG).is_file():
            return path
    from huggingface_hub import try_to_load_from_cache  # on use, as --help imports this module

    cached = try_to_load_from_cache(base, CONFIG) if re.fullmatch(r"[\w.-]+/[\w.-]+", base) else None
    if isinstance(cached, str):
        return Path(cached).parent
    raise SettingsError(
        f"{folder} is an adapter of peft on the model {base}, which is neither a folder nor in the Hub's cache: "
        f"`hf download {base}`, or set base_model_name_or_path in {ADAPTER_CONFIG} to its folder"
    )


def with_adapter(state: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], folder: Path) -> Any:
    """The weights of a model of transformers with those of a LoRA adapter of peft, by the same names: W + alpha / r B A
    and the layers that were trained in full.

    Raises SettingsError: an adapter of another kind, or of another model.
    """
    config, found = _json(folder, ADAPTER_CONFIG), dict(state)
    for name, tensor in tensors.items():
        layer, dot, part = name.partition(".lora_")
        target = f"{layer}.weight" if dot else name.replace(".base_layer.", ".")
        if config.get("peft_type") != "LORA" or target not in state or part not in ("", "A.weight", "B.weight"):
            kind = f"peft_type {config.get('peft_type')}"
            raise SettingsError(f"{folder}: {name} is not of a LoRA adapter on this model ({kind}); merge it with peft")
        if not dot:
            found[target] = tensor
        elif part == "A.weight":
            alphas = config.get("alpha_pattern") or {}
            key = next((key for key in alphas if re.fullmatch(rf"(.*\.)?({key})", layer)), None)
            alpha = config["lora_alpha"] if key is None else alphas[key]
            scale = alpha / (len(tensor) ** 0.5 if config.get("use_rslora") else len(tensor))
            product = tensors[f"{layer}.lora_B.weight"].float().flatten(1) @ tensor.float().flatten(1)
            product = product.T if config.get("fan_in_fan_out") else product
            found[target] = state[target].float() + scale * product.reshape(state[target].shape)
    return found


def read_config(folder: Path) -> Config | None:
    """The configuration of open_clip for a folder of transformers' CLIPModel or SiglipModel; None for other folders.

    Raises SettingsError: a configuration that open_clip cannot build, or an image processor that it does not have.
    """
    config = _json(folder)
    if (kind := config.get("model_type")) not in MODEL_TYPES:
        return None
    with errors_as(SettingsError, str(folder / CONFIG), TypeError, ValueError, LookupError, ArithmeticError):
        # Files of transformers 4 may have a second section, which takes the place of the first.
        image, text = (config.get(f"{name}_config_dict") or config.get(f"{name}_config") for name in ("vision", "text"))
        if not isinstance(image, dict) or not isinstance(text, dict):
            raise ValueError("without vision_config and text_config, it is not of a whole model")
        found = _siglip(image, text) if kind == "siglip" else _clip(image, text, config.get("projection_dim") or 512)
    words = found["text_cfg"]
    if kind == "clip" and (words["vocab_size"] != 49408 or _has_other_words(folder)):
        words["hf_tokenizer_name"] = "tokenizer"  # the files beside the configuration
    elif words.get("eos_id") == EOS:  # of CLIP's own words the largest id
        del words["pool_type"], words["eos_id"]
    return {"model_cfg": found, "preprocess_cfg": read_processor(folder, kind, found["vision_cfg"]["image_size"])}


def other_model(folder: Path) -> str | None:
    """What a folder holds of transformers that is no whole CLIPModel or SiglipModel; None if nothing."""
    config = _json(folder)
    if not (kind := config.get("model_type")) or kind in MODEL_TYPES:
        return None
    name = next(iter(config.get("architectures") or ()), "a model")
    return f"holds {name} of transformers (model_type {kind}), which has no counterpart in open_clip: {WHOLE}"


def _json(folder: Path, name: str = CONFIG) -> Config:
    """The content of a JSON file; empty if it cannot be read."""
    try:
        config = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _sizes(section: Mapping[str, Any], width: int, own: Config) -> Config:
    """The values of a configuration of transformers that open_clip's has too; files leave out defaults, which are those
    of a tower of that width and `own`.
    """
    layers = {"num_hidden_layers": 12, "num_attention_heads": width // 64}
    defaults = {"hidden_size": width, "intermediate_size": 4 * width, **layers, **own}
    found = defaults | {key: section[key] for key in defaults if section.get(key) is not None}
    for key in ("image_size", "patch_size"):
        if isinstance(sides := found.get(key), list):
            if len(set(sides)) != 1:
                raise ValueError(f"open_clip has no {key} {sides} for this model: it must be square")
            found[key] = sides[0]
    if section.get("num_channels", 3) != 3:
        raise ValueError(f"images have 3 channels, not num_channels {section['num_channels']}")
    ratio = found["intermediate_size"] / found["hidden_size"]
    exact = int(found["hidden_size"] * ratio) == found["intermediate_size"]  # as open_clip and timm round it
    return found | {"mlp_ratio": ratio if exact else ratio + 0.5 / found["hidden_size"]}


def _clip(image: Config, text: Config, embed_dim: int) -> Config:
    common = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
    vision = _sizes(image, 768, {"image_size": 224, "patch_size": 32, **common})
    words = _sizes(text, 512, {"vocab_size": 49408, "max_position_embeddings": 77, **common})
    acts = {vision["hidden_act"], words["hidden_act"]}
    if len(acts) > 1 or not acts <= {"quick_gelu", "gelu"}:
        raise ValueError(f"open_clip's CLIP has no activation {' and '.join(sorted(acts))}")
    # transformers takes a text's feature at the first eos_token_id, but at the largest id, as open_clip does, if that
    # is 2, which files from before transformers 4.31 have for CLIP's own.
    if type(eos := text.get("eos_token_id", EOS)) is not int:
        raise ValueError(f"text_config.eos_token_id {eos} is not an id: no text has a feature")
    at_eos = {} if eos == 2 else {"pool_type": "eos", "eos_id": eos}
    found: Config = {
        "embed_dim": embed_dim,
        "vision_cfg": {
            "image_size": vision["image_size"],
            "patch_size": vision["patch_size"],
            "layers": vision["num_hidden_layers"],
            "width": vision["hidden_size"],
            "head_width": vision["hidden_size"] // vision["num_attention_heads"],
            "mlp_ratio": vision["mlp_ratio"],
        },
        "text_cfg": {**_text_cfg(words), **at_eos},
    }
    for key, section in (("vision_cfg", vision), ("text_cfg", words)):
        if section["layer_norm_eps"] != 1e-5:
            found[key]["norm_kwargs"] = {"eps": section["layer_norm_eps"]}
    return found | ({"quick_gelu": True} if acts == {"quick_gelu"} else {})


def _has_other_words(folder: Path) -> bool:
    """Whether a tokenizer of 49,408 words lies in a folder, but not CLIP's: the place of its merges tells."""
    for name in ("tokenizer.json", "vocab.json"):
        try:
            content = json.loads((folder / name).read_text(encoding="utf-8"))
            words = content["model"]["vocab"] if name == "tokenizer.json" else content
            return any(words[word] != place for word, place in CLIP_WORDS.items())
        except (OSError, ValueError):
            continue
        except (TypeError, LookupError):
            return True
    return False


def _text_cfg(text: Config) -> Config:
    return {
        "context_length": text["max_position_embeddings"],
        "vocab_size": text["vocab_size"],
        "width": text["hidden_size"],
        "heads": text["num_attention_heads"],
        "layers": text["num_hidden_layers"],
        "mlp_ratio": text["mlp_ratio"],
    }


def _siglip(image: Config, text: Config) -> Config:
    common = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
    vision = _sizes(image, 768, {"image_size": 224, "patch_size": 16, "vision_use_head": True, **common})
    own = {"vocab_size": 32000, "max_position_embeddings": 64, "projection_size": None}
    words = _sizes(text, 768, {**own, **common})
    embed_dim, act = words["projection_size"] or words["hidden_size"], words["hidden_act"]
    if not vision["vision_use_head"]:
        raise ValueError("vision_use_head is false: an image has no feature without a head")
    if embed_dim != vision["hidden_size"]:
        what = f"vision_config.hidden_size is {vision['hidden_size']}, and features of texts have {embed_dim} numbers"
        raise ValueError(f"{what}: they cannot be compared")
    if act not in ("gelu_pytorch_tanh", "gelu", "quick_gelu") or vision["hidden_act"] not in _TIMM_ACTS:
        raise ValueError(f"open_clip's SigLIP has no such activation (images: {vision['hidden_act']}, texts: {act})")
    return {
        "embed_dim": embed_dim,
        "init_logit_bias": -10.0,
        "custom_text": True,
        **({"quick_gelu": True} if act == "quick_gelu" else {}),  # of texts: timm's towers have their own
        "vision_cfg": {
            "image_size": vision["image_size"],
            "timm_model_name": _timm_name(vision),
            "timm_model_pretrained": False,
            "timm_pool": "map",
            "timm_proj": "none",
        },
        "text_cfg": {
            **_text_cfg(words),
            "hf_tokenizer_name": "tokenizer",
            "no_causal_mask": True,
            "proj_bias": True,
            "pool_type": "last",
            "norm_kwargs": {"eps": words["layer_norm_eps"]},
            **({"act_kwargs": {"approximate": "tanh"}} if act == "gelu_pytorch_tanh" else {}),
        },
    }


def _timm_name(vision: Config) -> str:
    """timm's name of a SigLIP image tower, or one of `OWN_SIGLIP`, which `build` registers."""
    width, depth, heads = vision["hidden_size"], vision["num_hidden_layers"], vision["num_attention_heads"]
    inner, eps = vision["intermediate_size"], vision["layer_norm_eps"]
    patch, size = vision["patch_size"], vision["image_size"]
    name = f"vit_{_SIGLIP_SIZES.get((width, depth, heads, inner))}_patch{patch}_siglip_{size}"
    timm = importlib.util.find_spec("timm")  # its source is read, as importing it would import torch
    assert timm is not None and timm.origin is not None
    source = Path(timm.origin).with_name("models").joinpath("vision_transformer.py").read_text(encoding="utf-8")
    # Most of these have GELU without its approximation (timm 1.0.31): features differ by 1e-6 in cosine.
    if (vision["hidden_act"], eps) == ("gelu_pytorch_tanh", 1e-6) and f"def {name}(" in source:
        return name
    act = _TIMM_ACTS[vision["hidden_act"]]
    return f"siglip_w{width}_d{depth}_h{heads}_m{inner}_e{str(eps).replace('.', 'p')}_{act}_patch{patch}_{size}"


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
    def refusal(key: str, why: str) -> SettingsError:
        return SettingsError(f"{path}: {key} {json.dumps(fields.get(key))}: {why}")

    fields = dict(values)
    named = str(values.get("image_processor_type") or values.get("feature_extractor_type") or "")
    short = named.removesuffix("Fast").removesuffix("Pil")
    if short == _TIMM:
        fields = _from_timm(values["pretrained_cfg"], path)
    kind = model_type if short in ("", _TIMM) else _CLASSES.get(short)
    if kind is None:
        what = f"images of {named} are not those of CLIPImageProcessor or SiglipImageProcessor, which are read"
        raise SettingsError(f"{path}: {what}")
    unknown = (key for key in fields if key not in _DEFAULTS[kind].keys() | _NO_EFFECT)
    if key := next((key for key in unknown if fields[key] is not None), None):
        raise refusal(key, "no field of CLIPImageProcessor or SiglipImageProcessor: remove it if it has no use")
    fields = _DEFAULTS[kind] | fields
    needed = ["size", "resample", *(_NEEDED[step] for step in _NEEDED if fields[step])]
    if key := next((key for key in needed if fields[key] is None), None):  # null is no default in transformers 5
        raise refusal(key, "it has no value")
    # Of a byte b, transformers makes (factor b - mean) / std, and open_clip (b / 255 - mean) / std.
    scale = 255 * float(fields["rescale_factor"] if fields["do_rescale"] else 1)
    scale = 1.0 if math.isclose(scale, 1, rel_tol=1e-6) else scale
    size = _size(fields["size"], square=fields["default_to_square"])
    crop = _size(fields["crop_size"], square=True) if fields["do_center_crop"] else None
    pad = fields["do_pad"] and fields["pad_size"] and _size(fields["pad_size"], square=True)
    if not (squash := size.keys() == {"height", "width"}) and size.keys() != {"shortest_edge"}:
        raise refusal("size", "open_clip has only height and width, or shortest_edge")
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
            raise refusal(key, why)
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
