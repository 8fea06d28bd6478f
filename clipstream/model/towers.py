"""Owns Towers, the model: open_clip's two towers from uint8 pixels and token ids to features, and its saved form.

Never looks for files (`pretrained` does), never downloads, and knows neither loss, optimizer nor ranks.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import open_clip
import timm
import torch
import torch.nn.functional as F
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer
from open_clip.transform import PreprocessCfg, merge_preprocess_dict
from safetensors.torch import save_file
from torch import nn

from clipstream.batch import ImageSpec
from clipstream.errors import SettingsError
from clipstream.model.pretrained import CONFIG_FILE, WEIGHT_FILES, Source, TokenizerChoice, resolve, settle_loss
from clipstream.model.settings import ModelSettings
from clipstream.model.weights import load_weights, read_weights


class Features(NamedTuple):
    """What the loss takes: one rank's features and the two scalars of the logits `scale * image @ text.T + bias`.

    Attributes:
        image: [n, D], rows of length 1, float32 (float64 where the parameters are).
        text: [n, D], likewise.
        logit_scale: scalar, exp of the parameter.
        logit_bias: scalar; None for models of the softmax loss.
    """

    image: torch.Tensor
    text: torch.Tensor
    logit_scale: torch.Tensor
    logit_bias: torch.Tensor | None


class Towers(nn.Module):
    """An image and a text tower of open_clip behind one forward.

    Attributes:
        clip: open_clip's CLIP or CustomTextCLIP.
        image: how a picture becomes pixels before normalisation.
        context_length: tokens a caption, T.
        vocab_size: token ids are below it.
        loss_type: 'clip' or 'siglip', the loss that the model has its parameters for (siglip: a logit bias).
        config: {'model_cfg', 'preprocess_cfg'}, open_clip's configuration of exactly this model.
        tokenizer_folder: files of a Hugging Face tokenizer; None where open_clip's own BPE is used.
    """

    clip: Any
    mean: torch.Tensor
    std: torch.Tensor

    def __init__(
        self, clip: Any, config: dict[str, Any], *, loss_type: str, tokenizer_folder: Path | None = None
    ) -> None:
        super().__init__()
        self.clip = clip
        self.config, self.loss_type, self.tokenizer_folder = config, loss_type, tokenizer_folder
        preprocess, text_cfg = config["preprocess_cfg"], config["model_cfg"]["text_cfg"]
        size = preprocess["size"]
        self.image = ImageSpec(
            size=_pair(size),
            interpolation=preprocess["interpolation"],
            resize_mode=preprocess["resize_mode"],
            fill=preprocess["fill_color"],
        )
        self.context_length = int(text_cfg.get("context_length", 77))
        self.vocab_size = int(self.clip.vocab_size)
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(preprocess[name]).view(1, 3, 1, 1), persistent=False)
        self._frozen: list[nn.Module] = []
        self._tokenizer: Any = None

    def forward(self, pixels: torch.Tensor, ids: torch.Tensor) -> Features:
        """uint8 [n, 3, H, W] and int [n, T] -> Features. Every trainable parameter takes part, as DDP wants it."""
        return Features(self.encode_image(pixels), self.encode_text(ids), *self.scalars())

    def scalars(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """exp(logit_scale), and the logits' bias where the model has one."""
        bias = self.clip.logit_bias
        # Sums, of one number: a view of it would be a parameter that FSDP has no hold on.
        return self.clip.logit_scale.exp().sum(), None if bias is None else bias.sum()

    def encode_image(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8 [n, 3, H, W] -> L2-normalised [n, D]; the same arithmetic as torchvision's ToTensor and Normalize."""
        dtype = next(self.clip.visual.parameters()).dtype
        wide = torch.promote_types(dtype, torch.float32)
        scaled = (pixels.to(wide) / 255 - self.mean.to(wide)) / self.std.to(wide)
        return _unit(self.clip.encode_image(scaled.to(dtype)))

    def encode_text(self, ids: torch.Tensor) -> torch.Tensor:
        """int [n, T] -> L2-normalised [n, D]."""
        return _unit(self.clip.encode_text(ids))

    def train(self, mode: bool = True) -> Towers:
        """As nn.Module.train, but frozen towers stay in evaluation mode: no dropout, no moving batch statistics."""
        super().train(mode)
        for module in self._frozen:
            module.eval()
        return self

    @property
    def n_parameters(self) -> int:
        """Number of parameters, trained or frozen."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def has_batch_norm(self) -> bool:
        """Whether features of a sample depend on the others of its micro-batch in training."""
        frozen = {module for root in self._frozen for module in root.modules()}
        norm = nn.modules.batchnorm._BatchNorm
        return any(isinstance(module, norm) and module not in frozen for module in self.modules())

    def lock_image(self, unlocked_groups: int = 0) -> None:
        """Freeze the image tower (LiT, arXiv:2111.07991), its projection included, but for its last groups.

        Raises:
            SettingsError: the tower has no groups to leave unlocked.
        """
        if unlocked_groups:
            try:
                self.clip.visual.lock(unlocked_groups=unlocked_groups)
            except (AssertionError, RuntimeError, AttributeError) as error:
                raise SettingsError(f"model.unlocked_groups: this image tower has none to unlock: {error}") from error
        else:
            self.clip.visual.requires_grad_(False)
        self._frozen += _wholly_frozen(self.clip.visual)
        self.train(self.training)

    def lock_text(self, unlocked_layers: int = 0, *, keep_projection: bool = False) -> None:
        """Freeze the text tower but for its last layers; not its projection if that is new on top of a Hugging Face
        base model.

        Raises:
            SettingsError: the tower has no layers to leave unlocked.
        """
        custom = hasattr(self.clip, "text")
        if unlocked_layers:
            try:
                self.clip.lock_text_tower(unlocked_layers=unlocked_layers)
            except (AssertionError, RuntimeError, AttributeError, KeyError) as error:
                raise SettingsError(f"model.unlocked_layers: this text tower has none to unlock: {error}") from error
            self._frozen += _wholly_frozen(self.clip.text if custom else self.clip.transformer)
            self.train(self.training)
            return
        prefixes = ("text.",) if custom else ("",)
        spared = ("visual.", "logit_", *(("text.proj",) if keep_projection else ()))
        for name, parameter in self.clip.named_parameters():
            if name.startswith(prefixes) and not name.startswith(spared):
                parameter.requires_grad_(False)
        self._frozen.append(self.clip.text if custom else self.clip.transformer)
        self.train(self.training)

    def open_clip_tokenizer(self) -> Any:
        """The model's tokenizer as open_clip.get_tokenizer builds it: texts -> int64 [n, T].

        Read once: the folder may be gone when a checkpoint is written, hours later.

        Raises:
            SettingsError: the tokenizer's files cannot be read.
        """
        if self._tokenizer is None:
            self._tokenizer = self._read_tokenizer()
        return self._tokenizer

    def _read_tokenizer(self) -> Any:
        text_cfg = self.config["model_cfg"]["text_cfg"]
        options = dict(text_cfg.get("tokenizer_kwargs") or {})
        if self.tokenizer_folder is None:
            return SimpleTokenizer(context_length=self.context_length, **options)
        mode = text_cfg.get("tokenizer_mode")
        try:
            return HFTokenizer(
                str(self.tokenizer_folder), context_length=self.context_length, tokenizer_mode=mode, **options
            )
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            raise SettingsError(f"cannot load the tokenizer in {self.tokenizer_folder}: {error}") from error

    def save_pretrained(self, folder: str | Path) -> None:
        """Write what open_clip rebuilds model, preprocessing and tokenizer from, under the name 'local-dir:FOLDER'."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for name, tensor in self.clip.state_dict().items():
            # safetensors refuses tensors that share memory (tied embeddings of some text towers).
            shared = tensor.untyped_storage().data_ptr() in seen
            seen.add(tensor.untyped_storage().data_ptr())
            tensors[name] = (tensor.detach().clone() if shared else tensor.detach()).contiguous()
        save_file(tensors, folder / WEIGHT_FILES[0], metadata={"format": "pt"})
        for name, content in self.description().items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)

    def description(self) -> dict[str, bytes]:
        """What `save_pretrained` writes beside the weights, by the file's name: configuration and tokenizer."""
        files = {CONFIG_FILE: (json.dumps(self.config, indent=2) + "\n").encode()}
        if self.tokenizer_folder is not None:
            with tempfile.TemporaryDirectory() as name:
                self.open_clip_tokenizer().save_pretrained(name)
                folder = Path(name)
                files |= {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        return files


def build_towers(
    settings: ModelSettings,
    *,
    seed: int,
    loss_type: str | None = None,
    tokenizer: TokenizerChoice | None = None,
) -> Towers:
    """The model that the settings name, in float32 on the CPU, from files that are on this machine already.

    Initial values come from `seed` alone, so that all ranks start alike; the global random state is left as it was.
    A tag's activation (quick_gelu) is used whatever the model's name says, as the weights were trained with it.

    Args:
        loss_type: 'clip' or 'siglip' where the user chose one; None for the loss that the model was made for.
        tokenizer: the tokenizer's settings; what they change is saved with the model.

    Raises:
        SettingsError: no such model, weights that do not fit it, or a loss that the weights were not made for and
            no `allow_mismatch`.
    """
    source = resolve(settings, tokenizer)
    cfg = deepcopy(source.model_cfg)
    if settings.image_size is not None:
        _set_image_size(cfg["vision_cfg"], settings.image_size)
    if settings.patch_dropout is not None:
        if isinstance(cfg["vision_cfg"].get("layers"), list):
            raise SettingsError(f"model.patch_dropout: {settings.name} has a ResNet, which has no patches to leave out")
        cfg["vision_cfg"]["patch_dropout"] = settings.patch_dropout
    state = None if source.weights is None else read_weights(source.weights)
    loss_type = _settle_loss(settings, cfg, state, loss_type)
    clip = _create(source, cfg, seed, settings.image_size)
    if state is not None:
        load_weights(clip, state, source)
    preprocess = merge_preprocess_dict(asdict(PreprocessCfg()), source.preprocess_cfg)
    preprocess |= _own_preprocessing(settings)
    preprocess["size"] = clip.visual.image_size
    open_clip.model.set_model_preprocess_cfg(clip, preprocess)
    config = {"model_cfg": cfg, "preprocess_cfg": preprocess}
    towers = Towers(clip, config, loss_type=loss_type, tokenizer_folder=source.tokenizer)
    if settings.grad_checkpointing:
        if isinstance(clip.visual, open_clip.modified_resnet.ModifiedResNet):
            raise SettingsError(f"model.grad_checkpointing: open_clip's ResNet ({settings.name}) cannot recompute")
        clip.set_grad_checkpointing()
    if settings.lock_image:
        towers.lock_image(settings.unlocked_groups)
    if settings.lock_text:
        keep = state is None and source.text_model is not None
        towers.lock_text(settings.unlocked_layers, keep_projection=keep)
    return towers


def _unit(features: torch.Tensor) -> torch.Tensor:
    """Rows of length 1, in float32 at least whatever the autocast."""
    return F.normalize(features.to(torch.promote_types(features.dtype, torch.float32)), dim=-1)


def _wholly_frozen(module: nn.Module) -> list[nn.Module]:
    """The outermost modules with parameters, none of which is trained."""
    parameters = list(module.parameters())
    if not parameters:
        return []
    if not any(parameter.requires_grad for parameter in parameters):
        return [module]
    return [frozen for child in module.children() for frozen in _wholly_frozen(child)]


def _own_preprocessing(settings: ModelSettings) -> dict[str, Any]:
    """What the settings say of the pictures' way into the model, in open_clip's words."""
    named = {
        "mean": settings.image_mean,
        "std": settings.image_std,
        "interpolation": settings.image_interpolation,
        "resize_mode": settings.image_resize_mode,
    }
    return {name: value for name, value in named.items() if value is not None}


def _set_image_size(vision_cfg: dict[str, Any], size: int) -> None:
    """Another picture size. A timm model has its size in its name, and open_clip rebuilds it by that name alone."""
    vision_cfg["image_size"] = size
    name = str(vision_cfg.get("timm_model_name") or "")
    sized = re.fullmatch(r"(.+_)(\d{2,4})", name)
    if not sized or int(sized[2]) == size:
        return
    if not timm.is_model(f"{sized[1]}{size}"):
        others = [other for other in timm.list_models(f"{sized[1]}*") if re.fullmatch(r"\d+", other[len(sized[1]) :])]
        raise SettingsError(
            f"model.image_size {size}: timm has no {sized[1]}{size}; sizes of this tower: "
            f"{', '.join(other[len(sized[1]) :] for other in others)}"
        )
    vision_cfg["timm_model_name"] = f"{sized[1]}{size}"


def _settle_loss(
    settings: ModelSettings, cfg: dict[str, Any], state: dict[str, torch.Tensor] | None, wanted: str | None
) -> str:
    """Decide on the loss, and give or take the logit bias accordingly, in `cfg` and `state`.

    SigLIP (arXiv:2303.15343, section 3.2) starts at a scale of 10 and a bias of -10. So does a model whose weights
    are another loss's: at CLIP's final scale of 100 without a bias, all but the diagonal would be far off.
    """
    weights_for = None if state is None else "siglip" if "logit_bias" in state else "clip"
    chosen = settle_loss(settings, wanted, cfg, weights_for=weights_for)
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


def _create(source: Source, model_cfg: dict[str, Any], seed: int, size: int | None) -> Any:
    """A fresh model of open_clip, with base weights in a Hugging Face text tower unless it says otherwise."""
    cfg = deepcopy(model_cfg)
    text_cfg = cfg["text_cfg"]
    custom = cfg.pop("custom_text", False) or "hf_model_name" in text_cfg
    cfg["vision_cfg"]["timm_model_pretrained"] = False
    if source.text_model is not None:
        text_cfg["hf_model_pretrained"] = source.weights is None and text_cfg.get("hf_model_pretrained", True)
        text_cfg["hf_model_name"] = str(source.text_model)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            clip = (open_clip.CustomTextCLIP if custom else open_clip.CLIP)(**cfg)
    except (TypeError, ValueError, KeyError, RuntimeError, AssertionError, OSError) as error:
        raise SettingsError(f"open_clip cannot build {source.label}: {error}") from error
    clip = clip.float()
    if size is not None:
        _try_size(clip, source.label, size)
    return clip


def _try_size(clip: Any, label: str, size: int) -> None:
    """Whether the image tower takes pictures of a size that it was not made for."""
    try:
        with torch.no_grad():
            clip.eval().encode_image(torch.zeros(1, 3, *_pair(clip.visual.image_size)))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise SettingsError(
            f"model.image_size {size}: {label} takes no pictures of this size (a ResNet takes multiples of 32): {error}"
        ) from error
    finally:
        clip.train()


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])
