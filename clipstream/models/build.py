"""Builds the towers that settings name, from the files that `pretrained` finds and downloads."""

from __future__ import annotations

import math
import re
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from typing import Any, cast

import open_clip
import timm
import torch
from open_clip.transform import PreprocessCfg, merge_preprocess_dict
from open_clip.transformer import PatchDropout
from timm.layers import LayerNorm, to_2tuple
from timm.layers.patch_dropout import patch_dropout_forward
from torch.func import functional_call

from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.models.execution.checkpointing import checkpoint_blocks
from clipstream.models.execution.text_buckets import TextBuckets
from clipstream.models.layers import ChannelsLast, suit_gpus
from clipstream.models.model_config import Config, ModelConfig
from clipstream.models.pretrained import ModelFiles, TokenizerChoice, fetch, resolve_loss, timm_entry
from clipstream.models.settings import NO_PATCHES, TOWERS, ModelSettings
from clipstream.models.towers import Towers
from clipstream.models.transformers_names import OWN_SIGLIP
from clipstream.models.weights import load_image_weights, load_weights, read_weights


def build_towers(
    settings: ModelSettings,
    *,
    seed: int,
    loss_type: str | None = None,
    tokenizer: TokenizerChoice | None = None,
    world: World | None = None,
) -> Towers:
    """The model that the settings name, in float32 on the CPU. Collective: one rank of each node downloads files.

    Initial values depend on `seed` alone, so that all ranks start alike; the global random state is not changed. A
    tag's activation (quick_gelu) takes precedence over the model's, as the weights were trained with it.

    Args:
        loss_type: 'clip' or 'siglip' where the user chose one; None for the loss that the model was made for.
        tokenizer: the tokenizer's settings, which are saved with the model.
        world: of all ranks; this process alone unless given.

    Raises SettingsError: there is no such model, a file is missing or does not fit, or the weights were trained with
    another loss and `allow_mismatch` is not set.
    """
    files = fetch(settings, tokenizer, world or World())
    cfg = deepcopy(files.model_cfg)
    if settings.image_size is not None:
        _set_image_size(cfg["vision_cfg"], settings.image_size)
    if settings.patch_dropout is not None:
        if isinstance(cfg["vision_cfg"].get("layers"), list):
            raise NO_PATCHES.error("model.patch_dropout", settings.patch_dropout, files.label)
        cfg["vision_cfg"]["patch_dropout"] = settings.patch_dropout
    state = None if files.weights is None else read_weights(files.weights, adapter=files.adapter)
    loss_type = _resolve_loss_and_bias(settings, cfg, state, loss_type)
    clip = _create(files, cfg, seed)
    suit_gpus(clip)
    _check_inputs(clip, files.label, int(cfg["text_cfg"].get("context_length", 77)))
    if state is not None:
        load_weights(clip, state, files, cut=getattr(tokenizer, "context_length", None) is not None)
    preprocess = asdict(PreprocessCfg())
    if files.image_weights is not None:
        load_image_weights(clip.visual.trunk, files.image_weights)
        theirs = timm_entry(cfg["vision_cfg"]["timm_model_name"], str(settings.image_pretrained))
        theirs = clip.visual.trunk.pretrained_cfg if theirs is None else asdict(theirs)
        preprocess |= {"mean": theirs["mean"], "std": theirs["std"]}
    preprocess = merge_preprocess_dict(preprocess, files.preprocess_cfg)
    own = {name: getattr(settings, f"image_{name}") for name in ("mean", "std", "interpolation", "resize_mode")}
    preprocess |= {name: value for name, value in own.items() if value is not None}
    preprocess["size"] = clip.visual.image_size
    open_clip.model.set_model_preprocess_cfg(clip, preprocess)
    if files.preprocess_cfg.get("floor_crop") and settings.image_resize_mode is None:
        preprocess["floor_crop"] = True
    towers = Towers(
        clip,
        ModelConfig(cfg, preprocess),
        loss_type=loss_type,
        tokenizer_folder=files.tokenizer,
        trust_remote_code=getattr(tokenizer, "trust_remote_code", False),
        text_buckets=TextBuckets.of(clip, settings.text_buckets),
        channels_last=ChannelsLast.of(clip.visual, settings.channels_last),
    )
    for kind in TOWERS:
        checkpoint_blocks(towers.tower(kind), settings.checkpointing_of(kind), f"model.{kind}.grad_checkpointing")
    if settings.lock_image:
        towers.lock_image(settings.unlocked_groups, until=settings.unlock_image_at)
    if settings.lock_text:
        keep = state is None and files.text_model is not None
        towers.lock_text(settings.unlocked_layers, keep_projection=keep, until=settings.unlock_text_at)
    if settings.adapters:
        new = {"text.proj": files.text_model is not None, "visual.head": files.image_weights is not None}
        heads = [name for name, fresh in new.items() if fresh and state is None]
        towers.adapt(settings.adapters, seed=seed, base=files.label, heads=heads)
    return towers


def _set_image_size(vision_cfg: Config, size: int) -> None:
    """Set the image size. timm models have it in their name, by which open_clip rebuilds them."""
    vision_cfg["image_size"] = size
    sized = re.fullmatch(r"(.+_)(\d{2,4})", str(vision_cfg.get("timm_model_name") or ""))
    if sized and int(sized[2]) != size:
        name = f"{sized[1]}{size}"
        if not _timm_has(name):
            others = [other for other in timm.list_models(f"{sized[1]}*") if other[len(sized[1]) :].isdigit()]
            raise SettingsError(f"model.image_size {size}: timm has no {name}, but {', '.join(others)}")
        vision_cfg["timm_model_name"] = name


def _timm_has(name: str) -> bool:
    """Whether timm builds a tower of that name; one of `OWN_SIGLIP` is registered as a variant of timm's SigLIP."""
    if (own := OWN_SIGLIP.fullmatch(name)) and not timm.is_model(name):
        width, depth, heads, inner, patch, size = (int(own[group]) for group in (1, 2, 3, 4, 7, 8))
        shape = {
            "embed_dim": width,
            "depth": depth,
            "num_heads": heads,
            "mlp_ratio": (inner + 0.5) / width,  # timm rounds the product down
            "norm_layer": partial(LayerNorm, eps=float(own[5].replace("p", "."))),
            "act_layer": own[6],
            "patch_size": patch,
            "img_size": size,
        }

        def tower(**options: Any) -> Any:
            return timm.model_entrypoint("vit_base_patch16_siglip_224")(**shape, **options)

        tower.__name__ = name
        timm.models.register_model(tower)
    return bool(timm.is_model(name))


def _resolve_loss_and_bias(
    settings: ModelSettings, cfg: Config, state: dict[str, torch.Tensor] | None, wanted: str | None
) -> str:
    """Resolve the loss, and add or remove the logit bias in `cfg` and `state`.

    SigLIP (arXiv:2303.15343, section 3.2) starts at a scale of 10 and a bias of -10. So does a model with weights of
    another loss: at CLIP's final scale of 100 without a bias, the loss of all negatives would be huge.
    """
    weights_for = None if state is None else "siglip" if "logit_bias" in state else "clip"
    chosen = resolve_loss(settings, wanted, cfg, weights_for=weights_for)
    if chosen == "siglip":
        cfg.setdefault("init_logit_bias", -10.0)
        cfg.setdefault("init_logit_scale", math.log(10.0))
        if state is not None and weights_for == "clip":
            shape = state["logit_scale"].shape
            state["logit_scale"] = torch.full(shape, math.log(10.0))
            state["logit_bias"] = torch.full(shape, -10.0)
    else:
        cfg.pop("init_logit_bias", None)
        if state is not None:
            state.pop("logit_bias", None)
    return chosen


def _create(files: ModelFiles, model_cfg: Config, seed: int) -> Any:
    """A fresh model of open_clip, with base weights in a Hugging Face text tower unless it says otherwise."""
    cfg = deepcopy(model_cfg)
    text_cfg = cfg["text_cfg"]
    custom = cfg.pop("custom_text", False) or "hf_model_name" in text_cfg
    cfg["vision_cfg"]["timm_model_pretrained"] = False
    if files.text_model is not None:
        from transformers import dynamic_module_utils

        dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # open_clip does not pass trust_remote_code: refuse, never ask
        text_cfg["hf_model_pretrained"] = files.weights is None and text_cfg.get("hf_model_pretrained", True)
        text_cfg["hf_model_name"] = str(files.text_model)
    if ":" in (name := str(cfg["vision_cfg"].get("timm_model_name"))):  # of which timm fetches a configuration
        raise SettingsError(f"{files.label}: timm_model_name {name!r} is not the name of a timm model")
    _timm_has(name)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            clip = (open_clip.CustomTextCLIP if custom else open_clip.CLIP)(**cfg)
    except Exception as error:  # whatever transformers and its unpickler raise for files that they cannot read
        if "patch_drop_rate" in str(error):  # which timm's ViTs have
            raise NO_PATCHES.error("model.patch_dropout", None, files.label) from error
        of = "" if files.text_model is None else f" with the text tower in {files.text_model}"
        own = "it has custom Python code (auto_map), which is never run"
        why = own if "trust_remote_code" in str(error) else error
        raise SettingsError(f"open_clip cannot build {files.label}{of}: {why}") from error
    if isinstance(dropout := getattr(clip.visual, "patch_dropout", None), PatchDropout):
        dropout.forward = partial(_drop_patches, dropout)
    return clip.float()


def _drop_patches(dropout: PatchDropout, tokens: torch.Tensor) -> torch.Tensor:
    """`forward` of open_clip's patch dropout, which draws on the CPU: on another device timm's, which draws on it."""
    if tokens.device.type == "cpu":
        return cast(torch.Tensor, type(dropout).forward(dropout, tokens))
    first = int(dropout.exclude_first_token)
    found = patch_dropout_forward(tokens, dropout.prob, first, ordered=False, training=dropout.training)
    return cast(torch.Tensor, found[0])


def _check_inputs(clip: Any, label: str, length: int) -> None:
    """Pass an image and a text of the configured sizes: as shapes alone (the meta device), or on the CPU where code of
    a tower needs values, as a Hugging Face text tower counts its positions from the tokens.

    Raises SettingsError: a tower does not take them, such as timm's of another image size.
    """
    tensors = (*clip.named_parameters(remove_duplicate=False), *clip.named_buffers(remove_duplicate=False))
    meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors}
    height, width = to_2tuple(clip.visual.image_size)
    config = getattr(getattr(clip, "text", None), "config", None)  # of a Hugging Face tower
    ids = torch.full((1, length), 0 if getattr(config, "pad_token_id", 0) else 1)
    inputs = {"image": torch.zeros(1, 3, height, width), "text": ids}
    advice = {"image": f"images of {height} x {width} pixels: set --force-image-size",
              "text": f"texts of {length} tokens: set a smaller --force-context-length"}  # fmt: skip
    training = clip.training
    clip.eval()
    for key, value in inputs.items():
        try:
            with torch.no_grad():
                try:
                    functional_call(clip, meta, kwargs={key: value.to("meta")})
                    values = key == "text" and config is not None
                except Exception:
                    values = True
                if values:
                    clip(**{key: value})
        except Exception as error:
            why = str(error).partition("\n")[0] or type(error).__name__
            raise SettingsError(f"the {key} tower of {label} does not take {advice[key]} ({why})") from error
    clip.train(training)
