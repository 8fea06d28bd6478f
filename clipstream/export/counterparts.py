"""A model's towers as models of transformers, by configuration and names of tensors.

`Towers` enter; transformers' model of each tower leaves, and the whole CLIPModel, SiglipModel or
VisionTextDualEncoderModel. What has no counterpart is a `SettingsError` that says which part and why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import transformers
from open_clip.hf_model import ClsLastHiddenStatePooler, ClsPooler, HFTextEncoder, MaxPooler, MeanPooler
from open_clip.model import CLIPTextCfg, CLIPVisionCfg
from open_clip.timm_model import TimmModel
from open_clip.transformer import TextTransformer, VisionTransformer
from torch import nn

from clipstream.errors import SettingsError
from clipstream.models.towers import Towers
from clipstream.models.transformers_names import EOS, IMAGE, TEXT, TIMM_IMAGE, Row, rename_tensors

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
