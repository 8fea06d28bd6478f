"""The files of an exported model for each target: weights, configuration, image processor and tokenizer.

`Towers` and a folder enter. Each tower becomes a model of transformers by configuration and names of tensors, and both
its CLIPModel, SiglipModel or VisionTextDualEncoderModel; what has no counterpart is a `SettingsError` that says which
part and why. A tokenizer leaves as a `tokenizer.json` whose normalizer does what open_clip's cleaning
does, and an image processor as the configuration of transformers' class that resizes and crops as open_clip does.
Beside the model stands the code by which it is used, and checked without clipstream:

encoder.py        the model of a target's own library: features of image files and texts
pixels.py         images as in training, by the functions of `data.decode.images` themselves
preprocess.json   size, resize, mean and standard deviation of the model
example.py        the example of the model card
check.py          what compares all of this with the model
"""

from __future__ import annotations

import ast
import html
import inspect
import json
import math
import shutil
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from ftfy import chardata
from open_clip.hf_model import ClsLastHiddenStatePooler, ClsPooler, HFTextEncoder, MaxPooler, MeanPooler
from open_clip.model import CLIPTextCfg, CLIPVisionCfg
from open_clip.timm_model import TimmModel
from open_clip.tokenizer import SimpleTokenizer, get_clean_fn
from open_clip.transformer import TextTransformer, VisionTransformer
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from torch import nn

from clipstream.data.decode import images
from clipstream.errors import SettingsError
from clipstream.models.towers import Towers
from clipstream.models.transformers_names import (
    EOS,
    IMAGE,
    PREPROCESSOR,
    PROCESSOR,
    RESAMPLE,
    TEXT,
    TIMM_IMAGE,
    Row,
    rename_tensors,
)

ENTITIES = ("amp", "lt", "gt", "quot", "apos", "nbsp", "#39", "#34", "#x27", "#8217", "#8211", "rsquo", "lsquo",
            "ldquo", "rdquo", "ndash", "mdash", "hellip", "eacute", "copy", "reg", "trade", "deg", "bull")  # fmt: skip
PROCESSOR_FILES = (PREPROCESSOR, PROCESSOR)
POOLERS = {MeanPooler: "mean", MaxPooler: "max", ClsLastHiddenStatePooler: "cls", ClsPooler: "pooled"}
PAD = "<pad>"
_TRAINING = {"patch_dropout", "timm_model_pretrained", "timm_drop", "timm_drop_path", "hf_model_pretrained"}
_COMMON = {"width", "layers", "mlp_ratio", "act_kwargs", "norm_kwargs"}
_IMAGE = _TRAINING | _COMMON | {"image_size", "head_width", "patch_size"}
_TEXT = _TRAINING | _COMMON | {"context_length", "vocab_size", "heads", "hf_tokenizer_name", "tokenizer_kwargs"}
_SIGLIP_TEXT = _TEXT | {"no_causal_mask", "pool_type", "proj_bias"}


@dataclass(frozen=True)
class Counterpart:
    """A tower in transformers.

    Attributes:
        model: transformers' model; its `pooler_output`, or a pooling of its last hidden state, is projected.
        projection: weight [D, width] of a linear layer without bias; None where the model's output is the feature.
        pooling: 'pooled' for `pooler_output`, else how the last hidden state becomes one row.
    """

    model: Any
    projection: torch.Tensor | None
    pooling: str = "pooled"

    @property
    def width(self) -> int:
        return int(self.model.config.hidden_size)


def none(what: str, why: str, other: str = "") -> SettingsError:
    """The error of a part that transformers lacks; `other` is a further target that has it."""
    return SettingsError(f"transformers has no counterpart of {what}: {why}; use {other}--to onnx or --to open_clip")


def sees_padding(towers: Towers) -> bool:
    """Whether the text tower attends to padding, whose id is then part of the text."""
    return bool(towers.config.model_cfg["text_cfg"].get("no_causal_mask"))


def image_tower(towers: Towers) -> Counterpart:
    """The image tower. Raises SettingsError: it has no counterpart."""
    visual, cfg = towers.clip.visual, towers.config.model_cfg["vision_cfg"]
    if isinstance(visual, TimmModel):
        return _siglip_image(towers, visual) if _is_siglip(visual) else _timm(visual, cfg)
    if not isinstance(visual, VisionTransformer):
        raise none("open_clip's ResNet", "it ends in attention pooling, which transformers' ResNet has not")
    _usual("vision_cfg", cfg, CLIPVisionCfg, _IMAGE)
    config = transformers.CLIPVisionConfig(
        **_sizes(cfg, visual.transformer, visual.ln_post),
        image_size=_square(towers),
        patch_size=visual.patch_size[0],
        projection_dim=towers.config.model_cfg["embed_dim"],
    )
    return _load_tower(transformers.CLIPVisionModel(config), _part(towers, "visual."), IMAGE, "vision_model.")


def text_tower(towers: Towers) -> Counterpart:
    """The text tower. Raises SettingsError: it has no counterpart."""
    clip, cfg = towers.clip, towers.config.model_cfg["text_cfg"]
    text = getattr(clip, "text", clip)
    if isinstance(text, HFTextEncoder):
        return _hugging_face(text)
    assert text is clip or isinstance(text, TextTransformer)
    state = _part(towers, "text.") if text is not clip else dict(clip.state_dict())
    state = {name.removeprefix("text."): tensor for name, tensor in state.items()}
    siglip = bool(cfg.get("no_causal_mask")) and cfg.get("pool_type") == "last"
    at_eos = cfg.get("pool_type") == "eos" and cfg.get("eos_id", 2) != 2
    _usual(
        "text_cfg", cfg, CLIPTextCfg, _SIGLIP_TEXT if siglip else _TEXT | ({"pool_type", "eos_id"} if at_eos else set())
    )
    sizes = _sizes(cfg, text.transformer, text.ln_final)
    if sees_padding(towers) and towers.tokenizer_folder is None:
        # The BPE pads with the id of "!", which cannot be the pad token as well: PAD is a token of the same weights.
        rows = state["token_embedding.weight"]
        state["token_embedding.weight"] = torch.cat([rows, rows[:1]])
    sizes |= {"vocab_size": len(state["token_embedding.weight"]), "max_position_embeddings": towers.context_length}
    if siglip:
        own = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
        config = transformers.SiglipTextConfig(**sizes, **own, projection_size=towers.config.model_cfg["embed_dim"])
        if isinstance(text.text_projection, nn.Parameter):
            state["text_projection.weight"] = state.pop("text_projection").T
        state.setdefault("text_projection.bias", torch.zeros(len(state["text_projection.weight"])))
        return _load_tower(transformers.SiglipTextModel(config), state, TEXT, "text_model.")
    # transformers takes the position of the largest id, as open_clip does, for an eos_token_id of 2.
    eos = cfg["eos_id"] if at_eos else EOS if towers.tokenizer_folder is None else 2
    config = transformers.CLIPTextConfig(
        **sizes, projection_dim=towers.config.model_cfg["embed_dim"], eos_token_id=eos, pad_token_id=None
    )
    return _load_tower(transformers.CLIPTextModel(config), state, TEXT, "text_model.")


def whole_model(towers: Towers, image: Counterpart, text: Counterpart) -> Any:
    """transformers' model of both towers. Raises SettingsError: it has no counterpart."""
    scale, bias = towers.clip.logit_scale.detach(), towers.clip.logit_bias
    sections = {"vision_config": image.model.config.to_dict(), "text_config": text.model.config.to_dict()}
    dimension = int(towers.config.model_cfg["embed_dim"])
    if isinstance(image.model, transformers.SiglipVisionModel) and isinstance(text.model, transformers.SiglipTextModel):
        model = transformers.SiglipModel(transformers.SiglipConfig(**sections))
        model.logit_bias.data = torch.zeros(1) if bias is None else bias.detach().reshape(1).clone()
        scale = scale.reshape(1)
    else:
        if text.pooling != "pooled":
            raise none(
                f"a Hugging Face text tower with {text.pooling} pooling",
                "VisionTextDualEncoderModel takes the output of its pooler, open_clip's cls_pooler",
                "--to sentence-transformers, ",
            )
        both = (image.model, text.model)
        clip = isinstance(both[0], transformers.CLIPVisionModel) and isinstance(both[1], transformers.CLIPTextModel)
        kind = "CLIP" if clip else "VisionTextDualEncoder"
        config = getattr(transformers, f"{kind}Config")(**sections, projection_dim=dimension)
        try:
            model = getattr(transformers, f"{kind}Model")(config)
        except ValueError as error:
            why = f"VisionTextDualEncoderModel cannot hold them ({str(error).splitlines()[0]})"
            raise none("this pair of towers", why) from error
        for name, part in (("visual_projection", image), ("text_projection", text)):
            projection = torch.eye(dimension) if part.projection is None else part.projection
            getattr(model, name).weight.data = projection.clone()
        scale = scale.reshape(())
    model.vision_model.load_state_dict(image.model.state_dict())
    model.text_model.load_state_dict(text.model.state_dict())
    model.logit_scale.data = scale.clone()
    return model.eval()


def _part(towers: Towers, prefix: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in towers.clip.state_dict().items() if name.startswith(prefix)}


def _load_tower(model: Any, state: Mapping[str, torch.Tensor], rows: Iterable[Row], prefix: str) -> Counterpart:
    """A tower's model with its weights; names outside of `prefix` are those of the projection."""
    scalars = ("logit_scale", "logit_bias", "visual.")  # of open_clip's CLIP, which has no text tower of its own
    own = state if prefix == "vision_model." else {k: v for k, v in state.items() if not k.startswith(scalars)}
    found, left = rename_tensors(own, rows)
    tensors = {name.removeprefix(prefix): tensor for name, tensor in found.items() if name.startswith(prefix)}
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        left = left or [" ".join(str(error).split())]
    if left:
        raise none(f"the tower's {left[0]}", f"{type(model).__name__} has no such weights")
    projection = next((found[name] for name in found if name.endswith("_projection.weight")), None)
    return Counterpart(model.eval(), projection)


def _sizes(cfg: Mapping[str, Any], transformer: Any, norm: Any) -> dict[str, Any]:
    block = transformer.resblocks[0]
    return {
        "hidden_size": transformer.width,
        "intermediate_size": block.mlp.c_fc.out_features,
        "num_hidden_layers": transformer.layers,
        "num_attention_heads": block.attn.num_heads,
        "hidden_act": _activation(block.mlp.gelu),
        "layer_norm_eps": norm.eps,
    }


def _activation(module: nn.Module) -> str:
    if isinstance(module, nn.GELU):
        return "gelu" if module.approximate == "none" else "gelu_pytorch_tanh"
    names = {"QuickGELU": "quick_gelu", "GELUTanh": "gelu_pytorch_tanh", "GELU": "gelu"}
    if (name := names.get(type(module).__name__)) is None:
        raise none(f"the activation {type(module).__name__}", "its CLIP and SigLIP models have GELU and QuickGELU")
    return name


def _usual(section: str, cfg: Mapping[str, Any], defaults: type, known: set[str]) -> None:
    """Raises SettingsError: a configuration has a key, not at its default, that the counterpart does not know."""
    usual = {field.name: field.default for field in fields(defaults)}
    for key, value in cfg.items():
        if key not in known and value != usual.get(key):
            raise none(f"{section}.{key} = {value!r}", "its CLIP and SigLIP models have no such setting")


def _square(towers: Towers) -> int:
    height, width = towers.image.size
    if height != width:
        raise none(f"images of {height} x {width} pixels", "its CLIP and SigLIP models take square ones")
    return height


def _is_siglip(visual: Any) -> bool:
    """Whether a timm tower is a ViT of SigLIP: no class token, attention pooling, no projection."""
    trunk = visual.trunk
    pool = getattr(trunk, "attn_pool", None)
    return (
        type(trunk).__name__ == "VisionTransformer"
        and getattr(pool, "latent_len", 0) == 1
        and trunk.num_prefix_tokens == 0
        and len(visual.head) == 0
        and trunk.num_classes == 0
    )


def _siglip_image(towers: Towers, visual: Any) -> Counterpart:
    trunk = visual.trunk
    config = transformers.SiglipVisionConfig(
        hidden_size=trunk.embed_dim,
        intermediate_size=trunk.blocks[0].mlp.fc1.out_features,
        num_hidden_layers=len(trunk.blocks),
        num_attention_heads=trunk.blocks[0].attn.num_heads,
        image_size=_square(towers),
        patch_size=trunk.patch_embed.patch_size[0],
        hidden_act=_activation(trunk.blocks[0].mlp.act),
        layer_norm_eps=trunk.norm.eps,
    )
    return _load_tower(transformers.SiglipVisionModel(config), _part(towers, "visual."), TIMM_IMAGE, "vision_model.")


def _timm(visual: Any, cfg: Mapping[str, Any]) -> Counterpart:
    """Any tower of timm, in transformers' wrapper of timm."""
    trunk, name, pool = visual.trunk, cfg["timm_model_name"], cfg.get("timm_pool")
    linear = list(dict(visual.head.named_children())) in ([], ["drop", "proj"])
    if not linear or trunk.num_classes or (len(visual.head) and visual.head.proj.bias is not None):
        why = "transformers' wrapper of timm is followed by a linear projection without bias or by none"
        raise none(f"the head of the image tower (timm_proj {cfg.get('timm_proj')!r}, timm_pool {pool!r})", why)
    config = transformers.TimmWrapperConfig(
        architecture=name,
        model_args={"global_pool": pool} if pool else {},
        hidden_size=trunk.num_features,
        num_labels=0,
    )
    model = transformers.TimmWrapperModel(config)
    try:
        model.timm_model.load_state_dict(trunk.state_dict())
    except RuntimeError as error:
        raise none(f"timm's {name}", f"transformers' wrapper builds another one ({error})") from error
    return Counterpart(model.eval(), visual.head.proj.weight.detach() if len(visual.head) else None)


def _hugging_face(text: Any) -> Counterpart:
    if not isinstance(text.proj, nn.Identity | nn.Linear):
        raise none("a text projection of several layers (hf_proj_type mlp)", "its projections are linear")
    pooling = POOLERS.get(type(text.pooler), type(text.pooler).__name__)
    if pooling == "pooled" and not (text.pooler.use_pooler_output and getattr(text.transformer, "pooler", None)):
        pooling = "cls"
    projection = None if isinstance(text.proj, nn.Identity) else text.proj.weight.detach()
    return Counterpart(text.transformer.eval(), projection, pooling)


def logit_note(towers: Towers, model: Any) -> str:
    """What a whole model of transformers leaves out of the logits."""
    bias = towers.clip.logit_bias
    if bias is None or hasattr(model, "logit_bias") or math.isclose(float(bias), 0.0):
        return ""
    return f"Add {float(bias):.6g} to its logits, as {type(model).__name__} has no bias."


def unescape(text: str) -> str:
    """The text without the `ENTITIES` of HTML, as an exported tokenizer reads it."""
    for name in ENTITIES:
        text = text.replace(f"&{name};", html.unescape(f"&{name};"))
    return text


def cleaning(kind: str) -> Iterator[Any]:
    """Normalizers that do what open_clip's cleaning of a text does: 'lower', 'whitespace' or 'canonicalize'.

    They lack ftfy's repair of texts in a wrong encoding, and rare entities of HTML.
    """
    yield normalizers.Replace(Regex(chardata.SINGLE_QUOTE_RE.pattern), "'")
    yield normalizers.Replace(Regex(chardata.DOUBLE_QUOTE_RE.pattern), '"')
    for table in (chardata.LIGATURES, chardata.WIDTH_MAP):
        yield from (normalizers.Replace(chr(code), text) for code, text in table.items())
    yield from (normalizers.Replace(f"&{name};", html.unescape(f"&{name};")) for name in ENTITIES)
    yield normalizers.NFC()
    if kind == "canonicalize":
        yield normalizers.Replace("_", " ")
        yield normalizers.Replace(Regex("[" + "".join(f"\\{char}" for char in string.punctuation) + "]"), "")
    yield normalizers.Replace(Regex(r"\s+"), " ")
    yield normalizers.Strip()
    if kind != "whitespace":
        yield normalizers.Lowercase()


def fast_tokenizer(towers: Towers) -> tuple[Backend, dict[str, Any]]:
    """The model's tokenizer for `tokenizers`, which cuts and pads as in training, and what transformers is told of it.

    Raises SettingsError: a tokenizer that `tokenizers` cannot run.
    """
    own = towers.open_clip_tokenizer()
    kind = next((name for name in ("lower", "whitespace", "canonicalize") if get_clean_fn(name) is own.clean_fn), None)
    if kind is None:
        raise none("this tokenizer's cleaning of texts", "it is a function of its own")
    length = towers.context_length
    told: dict[str, Any] = {"model_max_length": length, "model_input_names": ["input_ids"]}
    if type(own) is SimpleTokenizer:
        if own.reduction_fn is not None:
            raise none("a tokenizer with reduction_mask", "tokenizers keep the first words")
        backend = _bpe(own, list(cleaning(kind)))
        told |= {"bos_token": "<start_of_text>", "eos_token": "<end_of_text>", "unk_token": "<end_of_text>"}
        told |= {"pad_token": PAD if sees_padding(towers) else "<end_of_text>"}
        backend.enable_padding(length=length, pad_id=0, pad_token="!")
    else:
        inner = own.tokenizer
        if not getattr(inner, "is_fast", False) or own.strip_sep_token or own.tokenizer_mode:
            raise none(f"the tokenizer {type(inner).__name__}", "it has no tokenizer.json, or a mode of its own")
        backend = Backend.from_str(inner.backend_tokenizer.to_str())
        before = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([*cleaning(kind), *before])
        told |= {name: token for name, token in inner.special_tokens_map.items() if isinstance(token, str)}
        told |= {"padding_side": inner.padding_side}
        if hasattr(towers.clip, "text") and getattr(towers.clip.text, "config", None) is not None:
            told["model_input_names"] = ["input_ids", "attention_mask"]
        pad = {"pad_id": inner.pad_token_id, "pad_token": inner.pad_token, "direction": inner.padding_side}
        backend.enable_padding(length=length, **pad)
    backend.enable_truncation(length)
    return backend, told


def _bpe(own: SimpleTokenizer, clean: list[Any]) -> Backend:
    """CLIP's byte pair encoding, as open_clip's SimpleTokenizer has it."""
    merges = sorted(own.bpe_ranks, key=own.bpe_ranks.__getitem__)
    backend = Backend(models.BPE(vocab=own.encoder, merges=merges, end_of_word_suffix="</w>"))
    backend.normalizer = normalizers.Sequence(clean)
    special = [token for token in own.encoder if token.startswith("<") and own.encoder[token] in own.all_special_ids]
    words = "|".join([*(token.replace("|", r"\|") for token in special), "'s|'t|'re|'ve|'m|'ll|'d"])
    pattern = Regex(words + r"|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    names = {ident: token for token, ident in own.encoder.items()}
    start, end = names[own.sot_token_id], names[own.eot_token_id]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}", special_tokens=[(start, own.sot_token_id), (end, own.eot_token_id)]
    )
    return backend


def write_tokenizer(towers: Towers, folder: Path) -> None:
    """Write the tokenizer as transformers reads it. Raises SettingsError: as `fast_tokenizer`."""
    backend, told = fast_tokenizer(towers)
    backend.no_padding()
    backend.no_truncation()
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **told).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_processor(towers: Towers, folder: Path, kind: str) -> None:
    """Write the image processor as transformers reads it; `kind` is the class of a model of both towers, or empty.

    Its CLIPImageProcessor rounds the centre crop down where torchvision's, and so open_clip's, rounds half to even;
    images that are cropped so, or padded, are left to timm's transforms, which transformers wraps. Programs that do not
    know these read CLIPImageProcessor from preprocessor_config.json.
    """
    spec, preprocess = towers.image, towers.config.preprocess_cfg
    (height, width), mode = spec.size, spec.resize_mode
    size = {"height": height, "width": width}
    mean, std = list(preprocess["mean"]), list(preprocess["std"])
    plain: dict[str, Any] = {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": size if mode != "shortest" else {"shortest_edge": height},
        "resample": RESAMPLE[spec.interpolation],
        "do_center_crop": mode == "shortest",
        "crop_size": size,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": mean,
        "image_std": std,
    }
    exact = plain
    if mode != "squash" and not spec.floor_crop:
        crop = {"crop_pct": 1.0, "crop_mode": "center" if mode == "shortest" else "border"}
        cfg = {"input_size": [3, height, width], "interpolation": spec.interpolation, "mean": mean, "std": std, **crop}
        exact = {"image_processor_type": "TimmWrapperImageProcessor", "architecture": None, "pretrained_cfg": cfg}
    named = {"processor_class": f"{kind.removesuffix('Model')}Processor"} if kind else {}
    for name, content in zip(PROCESSOR_FILES, (plain | named, named | {"image_processor": exact}), strict=True):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_transformers(towers: Towers, folder: Path) -> str:
    """Write a folder of transformers; returns a note for the model card.

    Raises SettingsError: a part of the model has no counterpart in transformers.
    """
    model = whole_model(towers, image_tower(towers), text_tower(towers))
    model.save_pretrained(folder)
    write_tokenizer(towers, folder)
    write_processor(towers, folder, type(model).__name__)
    return f"`{type(model).__name__}` of transformers. {logit_note(towers, model)}".strip()


def write_open_clip(towers: Towers, folder: Path) -> str:
    """Write a folder of open_clip; returns a note for the model card."""
    towers.save_pretrained(folder)
    return "A model of open_clip."


USE = Path(__file__).parent / "use"
EXAMPLE = USE / "example.py"
_IMPORT = f"from {images.__name__} import "


def write_use(towers: Towers, folder: Path, target: str) -> None:
    """Write the code of a target into the folder of its files."""
    spec, cfg = towers.image, towers.config.preprocess_cfg
    told = {**asdict(spec), "mean": list(cfg["mean"]), "std": list(cfg["std"])}
    (folder / "preprocess.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(USE / f"with_{target.replace('-', '_')}.py", folder / "encoder.py")  # without its mode
    for path in (EXAMPLE, USE / "check.py"):
        shutil.copyfile(path, folder / path.name)
    (folder / "pixels.py").write_text(_inline((USE / "pixels.py").read_text(encoding="utf-8")), encoding="utf-8")


def _inline(script: str) -> str:
    """A script with the functions that it imports of `data.decode.images`, and what these use, instead of the import.

    Constants of other modules of ours are written as their values, and Dropped is ValueError.
    """
    lines = inspect.getsource(images).splitlines()
    defined: dict[str, ast.stmt] = {}
    for node in ast.parse("\n".join(lines)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined[node.name] = node
        elif isinstance(node, ast.Assign):
            defined |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Import):
            defined |= {alias.asname or alias.name: ast.Import([alias]) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and "clipstream" not in str(node.module):
            defined |= {alias.name: ast.ImportFrom(node.module, [alias], 0) for alias in node.names}
    head, _, tail = script.partition(_IMPORT)
    names, _, tail = tail.partition("\n")
    found, constants, wanted = dict[str, ast.stmt](), {"Dropped": "ValueError"}, set(names.split(", "))
    while wanted:
        name = wanted.pop()
        if name not in defined:
            if isinstance(value := getattr(images, name, None), int | str | tuple):
                constants[name] = repr(value)
        elif name not in found:
            found[name] = node = defined[name]
            # Types are not evaluated.
            types = [getattr(part, of, None) for part in ast.walk(node) for of in ("returns", "annotation")]
            notes = {id(n) for note in types if note is not None for n in ast.walk(note)}
            wanted |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and id(n) not in notes}
    imports = {ast.unparse(node) for node in found.values() if isinstance(node, ast.Import | ast.ImportFrom)}
    parts = [*sorted(line for line in imports if f"\n{line}\n" not in head), ""]
    parts += [f"{name} = {value}" for name, value in constants.items()]
    for node in sorted((node for node in found.values() if hasattr(node, "lineno")), key=lambda node: node.lineno):
        gap = "" if isinstance(node, ast.Assign) else "\n\n"
        parts.append(gap + "\n".join(lines[node.lineno - 1 : node.end_lineno]))
    return head + "\n".join(parts) + "\n" + tail
